"""Measures training of populations, compared with published and OpenSpiel's results; prints tables and a line of JSON.

    python results/populations/run.py                      every part: about three hours of two cores
    python results/populations/run.py --list               the parts: published, measured here, open
    python results/populations/run.py --only exact league  some of them: a minute and six; text takes half an hour
    python results/populations/run.py --publish            publishes what was measured here, and writes the page
    python results/populations/run.py --report             writes docs/results-populations.md from the published results
    python results/populations/run.py --quick              the exact part, shorter: a smoke test

A part is a module of `results/populations/parts/` with `figures(quick) -> dict[str, float]`, which prints its own
tables, and `TARGETS`, the upper bounds of its figures (lower bounds for those in `AT_LEAST`). NashConv is the sum over
players of what each could gain by a best response; figures named exploitability are half of it. Parts, and the runs
they are made of, go to runs/measured/populations/rows.jsonl, also where they are published
(results/populations/measured/rows.jsonl), and are printed beside the published ones.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).parents[2]))
from results.ledger import Ledger, Rows, add_options, choose, finish
from results.populations.parts.keeping import figure
from results.populations.report import write_page

PARTS = {
    "exact": "exact oracles: PSRO, anytime PSRO, XDO, CFR",
    "learned": "learned oracles on Leduc poker, beside OpenSpiel's",
    "scheduling": "what handing out a task costs, and Ray with two workers beside one",
    "text": "language agents in Kuhn poker in words",
    "league": "a league and self-play in a game with a cycle",
    "solvers": "solvers of OpenSpiel beside palestra's, at equal CPU time",
}
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
    part: Any = importlib.import_module(f"results.populations.parts.{name}")
    part.console = console
    console.rule(PARTS[name])
    console.export_text()  # drops what was printed before
    figures = {key: float(f"{value:.4g}") for key, value in part.figures(quick).items()}
    console.print(verdicts(figures, part.TARGETS, getattr(part, "AT_LEAST", set())))
    return {"figures": figures, "targets": part.TARGETS, "text": console.export_text()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    options = parser.parse_args()
    ledger = Ledger("populations", figure, options.quick)
    names = choose(list(PARTS), options.only or (["exact"] if options.quick else []))
    if options.again:  # of a part's runs too
        ledger.forget([name for name in ledger.here if name.split("/")[0] in names])
    Rows(ledger, partial(run_part, options.quick)).run(names, options)
    if options.publish:
        ledger.publish([name for name in ledger.here if name.split("/")[0] in names])
    if options.report or options.publish:
        write_page(ledger.published, PARTS)
    elif not options.list:
        found = [ledger.here[name] for name in names]
        figures = {key: value for one in found for key, value in one["figures"].items()}
        targets = {key: value for one in found for key, value in one["targets"].items()}
        finish("psro", figures, targets, is_stored=False)


if __name__ == "__main__":
    main()
