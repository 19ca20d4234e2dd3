"""Populations: how good, how fast, beside what others reach. Prints tables, and one line of JSON at the end.

    python bench/psro.py                       every part
    python bench/psro.py --parts exact         some of them
    python bench/psro.py --quick               shorter runs and fewer seeds: does the road hold?

A part is a module of `bench/psro_parts/` with `figures(quick) -> dict[str, float]`, which prints its own tables, and
`TARGETS`, what its figures should be at most (`AT_LEAST` names those that should be at least that). NashConv is what
all players could win together by best answers; exploitability, where a figure is named so, is half of it.
"""

from __future__ import annotations

import argparse
import importlib
import json
from typing import Any

from rich.console import Console
from rich.table import Table

PARTS = {
    "exact": "exact oracles: PSRO, anytime PSRO, XDO, CFR",
    "learned": "learned oracles on Leduc poker, beside OpenSpiel's",
    "scheduling": "what handing out a task costs, and Ray with two workers beside one",
    "text": "language agents in Kuhn poker in words",
    "league": "a league and self-play in a game with a cycle",
}
console = Console(width=120)


def verdicts(figures: dict[str, float], targets: dict[str, float], at_least: set[str]) -> Table:
    """The figures that have a target, and whether they meet it."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), help="with commas between")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    figures: dict[str, float] = {}
    targets: dict[str, float] = {}
    at_least: set[str] = set()
    for name in options.parts:
        console.rule(PARTS[name])
        part: Any = importlib.import_module(f"psro_parts.{name}")
        figures |= part.figures(options.quick)
        targets |= part.TARGETS
        at_least |= getattr(part, "AT_LEAST", set())
    console.print(verdicts(figures, targets, at_least))
    rounded = {name: float(f"{value:.4g}") for name, value in figures.items()}
    print(json.dumps({"bench": "psro", "figures": rounded, "targets": targets}))


if __name__ == "__main__":
    main()
