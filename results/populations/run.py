"""Measures training of populations, compared with published and OpenSpiel's results; prints tables and a line of JSON.

    python bench/psro.py                       every part: about three hours of two cores
    python bench/psro.py --list                the parts: published, measured here, open
    python bench/psro.py --only exact league   some of them: a minute and six; text takes half an hour
    python bench/psro.py --publish             publishes what was measured here, and writes the page
    python bench/psro.py --report              writes docs/results-populations.md from the published results
    python bench/psro.py --quick               the exact part, shorter: a smoke test (--only NAME for another)

A part is a module of `bench/psro_parts/` with `figures(quick) -> dict[str, float]`, which prints its own tables, and
`TARGETS`, the upper bounds of its figures (lower bounds for those in `AT_LEAST`). NashConv is the sum over players of
what each could gain by a best response; figures named exploitability are half of it. Parts, and the runs they are made
of, go to runs/measured/psro.jsonl, also where they are published (bench/measured/psro.jsonl), and are printed beside
the published ones.
"""

from __future__ import annotations

import argparse
import importlib
from functools import partial
from pathlib import Path
from typing import Any

from ledger import Ledger, Line, Rows, add_options, choose, finish, provenance
from psro_parts.keeping import figure
from rich.console import Console
from rich.table import Table

PARTS = {
    "exact": "exact oracles: PSRO, anytime PSRO, XDO, CFR",
    "learned": "learned oracles on Leduc poker, beside OpenSpiel's",
    "scheduling": "what handing out a task costs, and Ray with two workers beside one",
    "text": "language agents in Kuhn poker in words",
    "league": "a league and self-play in a game with a cycle",
}
PAGE = Path("docs/results-populations.md")
NOTES = Path("bench/psro-notes.md")  # the text of the page
console = Console(width=120, record=True)


def verdicts(figures: dict[str, float], targets: dict[str, float], at_least: set[str]) -> Table:
    """A table of the figures, with their targets and whether they meet them."""
    shown = Table("figure", "", "target", "", title="Figures", title_justify="left")
    for name, value in figures.items():
        target, low = targets.get(name), name not in at_least
        if target is None:
            shown.add_row(name, f"{value:.4g}", "", "")
        else:
            met = value <= target if low else value >= target
            shown.add_row(
                name, f"{value:.4g}", f"{'at most' if low else 'at least'} {target:g}", "yes" if met else "NO"
            )
    return shown


def run_part(quick: bool, name: str) -> dict[str, Any]:
    """Runs a part; returns its figures, targets and printed text."""
    part: Any = importlib.import_module(f"psro_parts.{name}")
    part.console = console
    console.rule(PARTS[name])
    console.export_text()  # drops what was printed before
    figures = {key: float(f"{value:.4g}") for key, value in part.figures(quick).items()}
    console.print(verdicts(figures, part.TARGETS, getattr(part, "AT_LEAST", set())))
    return {"figures": figures, "targets": part.TARGETS, "text": console.export_text()}


def report(published: dict[str, Line]) -> None:
    """Writes the page: what each part printed when it was last run, and the notes."""
    lines = [
        "# What populations reach",
        "",
        "Made by `python bench/psro.py --report` from the published results (bench/measured/psro.jsonl), which were",
        "measured on two cores; `python bench/psro.py` measures them again and prints both. NashConv is the sum over",
        "players of what each could gain by a best response; figures named exploitability are half of it.",
        "",
        provenance(published.values()),
        "",
    ]
    for name, what in PARTS.items():
        lines += [f"## {what[0].upper()}{what[1:]}", ""]
        if name not in published:
            lines += ["Not run.", ""]
            continue
        text = "\n".join(line.rstrip() for line in published[name]["text"].strip().splitlines())
        lines += ["```", text, "```", "", f"`python bench/psro.py --only {name}`", ""]
    PAGE.write_text("\n".join([*lines, NOTES.read_text()]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    options = parser.parse_args()
    ledger = Ledger("psro", figure, options.quick)
    names = choose(list(PARTS), options.only or (["exact"] if options.quick else []))
    if options.again:  # of a part's runs too
        ledger.forget([name for name in ledger.here if name.split("/")[0] in names])
    Rows(ledger, partial(run_part, options.quick)).run(names, options)
    if options.publish:
        ledger.publish([name for name in ledger.here if name.split("/")[0] in names])
    if options.report or options.publish:
        report(ledger.published)
    elif not options.list:
        found = [ledger.here[name] for name in names]
        figures = {key: value for one in found for key, value in one["figures"].items()}
        targets = {key: value for one in found for key, value in one["targets"].items()}
        finish("psro", figures, targets, is_stored=False)


if __name__ == "__main__":
    main()
