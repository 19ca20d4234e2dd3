"""Writes docs/results-populations.md from the published parts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from results.ledger import Line, provenance
from results.pages import read_notes

PAGE = Path("docs/results-populations.md")
NOTES = Path(__file__).parent / "notes.md"  # the text of the page


def write_page(published: Mapping[str, Line], parts: Mapping[str, str]) -> None:
    """Writes the page: what each part printed when it was last run, and the notes."""
    lines = [
        "# What populations reach",
        "",
        "Made by `python results/populations/run.py --report` from the published results, which were measured on two",
        "cores; without `--report` it measures them again and prints both. Script, notes and results are in",
        "[results/populations/](../results/populations/). NashConv is the sum over players of what each could gain by",
        "a best response; figures named exploitability are half of it.",
        "",
        provenance(published.values()),
        "",
    ]
    for name, what in parts.items():
        lines += [f"## {what[0].upper()}{what[1:]}", ""]
        if name not in published:
            lines += ["Not run.", ""]
            continue
        text = "\n".join(line.rstrip() for line in published[name]["text"].strip().splitlines())
        lines += ["```", text, "```", "", f"`python results/populations/run.py --only {name}`", ""]
    PAGE.write_text("\n".join([*lines, read_notes(NOTES)]))
