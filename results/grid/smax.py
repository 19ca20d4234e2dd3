"""Compares QMIX on SMAX's map 3m with JaxMARL's QMIX: CPU seconds of a million env steps, and games won after them.

    python results/grid/smax.py          up to 50 minutes for JaxMARL's runs; ours are from the ledger of results/games
    python results/grid/smax.py --quick  2 minutes for each of JaxMARL's runs: a smoke test

JaxMARL's QMIX is a script of its repository, fetched once and run unchanged; `bench/peers/jaxmarl_qmix.py` has its
settings. They are made for GPUs, with networks of 512 units, so the script also runs with 64 units, as ours. Each run
has one thread. Tests and compiling are not counted. Ours are the published rows of results/games.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from urllib.request import urlopen

from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).parents[2]))
from bench.peers.running import ENVIRONMENT, VENVS, install, installed, run
from results.ledger import Ledger, absent, finish

SCRIPT = (
    "https://raw.githubusercontent.com/FLAIROx/JaxMARL/014b4f0af877856dc0a90437596a23a31153e303"
    "/baselines/QLearning/qmix_rnn.py"
)
TASK = "smax_qmix"
STEPS = 1_000_000
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
console = Console(width=120)


@dataclass(frozen=True)
class Theirs:
    """A run of JaxMARL's script; `hidden` is the width of all networks (None: the script's settings)."""

    path: Path
    hidden: int | None = None
    script: str = "jaxmarl_qmix"

    def spec_json(self, seconds: float) -> str:
        return json.dumps({"script": str(self.path), "map": "3m", "hidden": self.hidden, "seconds": seconds})


def fetched() -> Path:
    """Downloads JaxMARL's script at the commit in `SCRIPT`, unless it is there; returns its path."""
    path = VENVS.parent / "scripts" / "qmix_rnn.py"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with urlopen(SCRIPT, timeout=60) as answer:
            path.write_bytes(answer.read())
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 minutes for each of JaxMARL's runs")
    parser.add_argument(
        "--minutes", type=float, default=25.0, help="CPU minutes of each of JaxMARL's runs (default 25)"
    )
    options = parser.parse_args()
    if options.quick and not installed("jaxmarl"):
        absent("JaxMARL in an environment of its own: this script without --quick makes it")
    ours = [line for line in Ledger("games", str).published.values() if line["task"] == TASK]
    spent = mean(line["cpu"] / line["curve"][-1][0] for line in ours) * STEPS
    shown = Table("QMIX on SMAX 3m", "units", "CPU-s for a million env steps", "won", "after env steps")
    won = mean(line["score"] for line in ours)
    shown.add_row("palestra", "64", f"{spent:,.0f}", f"{won:.3f}", f"{ours[0]['curve'][-1][0]:,}")
    install("jaxmarl")
    ENVIRONMENT["XLA_FLAGS"] = ONE_THREAD
    seconds, figures = 120.0 if options.quick else 60 * options.minutes, {}
    for name, hidden in (("smax_qmix_vs_jaxmarl", None), ("smax_qmix_vs_jaxmarl_small", 64)):
        result = run(Theirs(fetched(), hidden), seconds, 4 * seconds + 600)
        figures[name] = result["cpu_s_per_million"] / spent
        steps, rate = result["curve"][-1] if result["curve"] else (0, math.nan)
        shown.add_row("JaxMARL", str(hidden or 512), f"{result['cpu_s_per_million']:,.0f}", f"{rate:.3f}", f"{steps:,}")
    console.print(shown)
    finish("smax", figures, {}, page="grid", is_stored=not options.quick)


if __name__ == "__main__":
    main()
