"""Measures training of populations, compared with published and OpenSpiel's results; prints tables and a line of JSON.

    python bench/psro.py                       every part
    python bench/psro.py --parts exact         some of them
    python bench/psro.py --report              writes docs/results-populations.md from stored results, without running
    python bench/psro.py --quick               shorter runs and fewer seeds: a smoke test

A part is a module of `bench/psro_parts/` with `figures(quick) -> dict[str, float]`, which prints its own tables, and
`TARGETS`, the upper bounds of its figures (lower bounds for those in `AT_LEAST`). NashConv is the sum over players of
what each could gain by a best response; figures named exploitability are half of it.
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

from psro_parts.keeping import KEPT
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


def run_part(name: str, quick: bool) -> dict[str, Any]:
    """Runs a part; returns its figures, targets and printed text, which are also stored unless `quick`."""
    part: Any = importlib.import_module(f"psro_parts.{name}")
    part.console = console
    console.rule(PARTS[name])
    console.export_text()  # drops what was printed before
    figures = {key: float(f"{value:.4g}") for key, value in part.figures(quick).items()}
    console.print(verdicts(figures, part.TARGETS, getattr(part, "AT_LEAST", set())))
    found = {"figures": figures, "targets": part.TARGETS, "text": console.export_text()}
    if not quick:
        KEPT.mkdir(parents=True, exist_ok=True)
        (KEPT / f"{name}.json").write_text(json.dumps(found, indent=2) + "\n")
    return found


def report() -> None:
    """Writes the page: what each part printed when it was last run, and the notes."""
    lines = [
        "# What populations reach",
        "",
        "Made by `python bench/psro.py` on two cores, and `--report`. NashConv is the sum over players of what",
    ]
    lines += [
        "each could gain by a best response; figures named exploitability are half of it.",
        "",
    ]
    for name, what in PARTS.items():
        lines += [f"## {what[0].upper()}{what[1:]}", ""]
        path = KEPT / f"{name}.json"
        if not path.exists():
            lines += ["Not run.", ""]
            continue
        found = json.loads(path.read_text())
        text = "\n".join(line.rstrip() for line in found["text"].strip().splitlines())
        lines += ["```", text, "```", "", f"`python bench/psro.py --parts {name}`", ""]
    PAGE.write_text("\n".join([*lines, NOTES.read_text()]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", type=lambda text: text.split(","), default=list(PARTS), help="names, separated by commas"
    )
    parser.add_argument("--quick", action="store_true", help="shorter runs and fewer seeds")
    parser.add_argument("--report", action="store_true", help="only write the page")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"--parts: unknown {', '.join(sorted(unknown))}. Parts are {', '.join(PARTS)}")
    if options.report:
        return report()
    found = [run_part(name, options.quick) for name in options.parts]
    figures = {key: value for one in found for key, value in one["figures"].items()}
    targets = {key: value for one in found for key, value in one["targets"].items()}
    print(json.dumps({"bench": "psro", "figures": figures, "targets": targets}))
    return None


if __name__ == "__main__":
    main()
