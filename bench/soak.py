"""Loads a league over Ray, the service, and gRPC envs for a long time; reports speed, failures and memory growth.

    python bench/soak.py --minutes 30                  each part for 30 minutes
    python bench/soak.py --quick                       each part for six seconds, with fewer clients: a smoke test
    python bench/soak.py --only service --minutes 5 --markdown soak.md --plot soak.png

Parts: `league` (soak_parts/league.py: 16 Ray workers, one killed every minute, a growing number of members), `service`
(soak_parts/service.py: 200 clients and 64 adapters of 8 keys, sampled and trained concurrently), `envs`
(soak_parts/envs.py: 2,000 gRPC sessions with steps of 20 ms). `--quick` has 4 workers, 60 clients with 16 adapters, and
500 sessions. Figures of all parts that ran:

    service_p99_vs_p50                 99th percentile of a request's seconds over the median, for the worst verb
    rss_growth                         growth of resident memory over the last two thirds of the time, for the process
                                       group that grew most
    league_games_per_s_vs_one_worker   games per second of the league, over those of the same league on one worker
    lost_tasks                         lost tasks and sessions, failed requests and episodes
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.table import Table
from soak_parts.memory import Curve, SoakResult, at_tenths, growth

sys.path.append(str(Path(__file__).parents[1]))
from results.ledger import finish

PARTS = ("league", "service", "envs")
TARGETS = {
    "service_p99_vs_p50": 8.0,
    "rss_growth": 0.05,
    "league_games_per_s_vs_one_worker": 1.6,
    "lost_tasks": 0,
}
LOST = ("lost_tasks", "service_failed", "envs_failed", "envs_lost_sessions")
console = Console(width=120)


def curve_rows(curves: Mapping[str, Curve]) -> list[tuple[str, ...]]:
    """Table rows: memory of each process group in MB at each tenth of the time, and its growth."""
    return [
        (name, *(f"{mb:.0f}" for mb in at_tenths(curve)), f"{100 * growth(curve):+.1f} %")
        for name, curve in curves.items()
    ]


CURVE_HEADS = ("MB of a process", *(f"{10 * i} %" for i in range(11)), "growth")


def show(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Prints a table; returns it as Markdown."""
    table = Table(*heads)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def plot(curves: Mapping[str, Curve], path: Path) -> None:
    """Draws memory over time, relative to that at a third of the time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        middle = curve[len(curve) // 3][1]
        axes.plot([s / 60 for s, _ in curve], [mb / middle for _, mb in curve], label=f"{name} ({middle:.0f} MB)")
    axes.set(xlabel="minutes", ylabel="memory / memory at a third of the time", ylim=(0.5, 1.5))
    axes.legend()
    figure.savefig(path, dpi=120)


def figures_of(results: Sequence[SoakResult]) -> dict[str, float]:
    """The figures of all parts, with those that combine several parts."""
    found: dict[str, float] = {}
    for result in results:
        found |= result.figures
    found["rss_growth"] = max(growth(curve) for result in results for curve in result.curves.values())
    found["lost_tasks"] = sum(found.get(name, 0.0) for name in LOST)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="six seconds for each part, and fewer clients")
    parser.add_argument("--minutes", type=float, help="minutes of each part (default: 30, or 0.1 with --quick)")
    parser.add_argument("--only", choices=PARTS, help="run one part")
    parser.add_argument("--markdown", type=Path, help="also write the tables as Markdown to this file")
    parser.add_argument("--plot", type=Path, help="draw the memory curves to this picture file")
    args = parser.parse_args()
    sys.setswitchinterval(5e-4)  # clients are threads here but processes in practice: they must not wait for each other
    minutes = args.minutes or (0.1 if args.quick else 30.0)
    results, text = [], ""
    for name in [args.only] if args.only else PARTS:
        result = import_module(f"soak_parts.{name}").soak(minutes, args.quick)
        results.append(result)
        text += show(result.heads, result.rows) + "\n" + show(CURVE_HEADS, curve_rows(result.curves)) + "\n"
    if args.markdown:
        args.markdown.write_text(text)
    if args.plot:
        plot({name: curve for result in results for name, curve in result.curves.items()}, args.plot)
    finish("soak", figures_of(results), TARGETS, is_stored=not args.quick)


if __name__ == "__main__":
    main()
