"""A league on a simulated cluster: the real scheduler, plan and files; only the workers' time is simulated.

    python results/scaling/cluster.py            1,000 workers, up to 10,000 members, a node lost every minute
    python results/scaling/cluster.py --quick    100 workers, a tenth of the members, a node lost every ten minutes
    python results/scaling/cluster.py --whole    without sampled opponents, to see what breaks first
    python results/scaling/cluster.py --results  only the league's CPU time for a training result; takes some seconds
    python results/scaling/cluster.py --table    the table of docs/scaling/cluster.md: 1 to 1,000 workers

Prints, for growing numbers of members: throughput and use of the workers (slices take a log-normal time, so some are
stragglers); work lost with nodes and how long the lost tasks wait for another worker; and the driver's cost: CPU
milliseconds for each finished task in the first and the last quarter of the run, memory, and size of the task log.
If the driver's cost for a task grew with the run, it would limit large leagues.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from palestra.parallel.tasks import Result, Task, TaskResult
from palestra.populations.payoffs import PayoffCell
from palestra.populations.plans.league import League, LeagueConfig
from palestra.populations.population import Member, Population
from palestra.populations.scheduler import PlanCallback, run_plan
from palestra.populations.tasks import OpponentResult, PlayResult, PlayTask, TrainResult, TrainTask
from palestra.runs import Run

sys.path.append(str(Path(__file__).parents[2]))
from results.ledger import finish
from results.scaling.simulated_backend import SimulatedBackend, SimulatedCluster, TaskRng

MEDIAN_SLICE_S, SIGMA, GAME_S = 600.0, 0.5, 0.02  # of a training slice (log-normal); of a game of the payoff table
TARGETS = {"driver_cpu_growth": 2.0, "worker_use": 0.9}
TABLE_WORKERS = (1, 3, 10, 30, 100, 300, 1000)
TABLE_HEADS = ("workers", "tasks", "tasks/s", "use %", "lost %", "restart s", "ms/task, first", "last", "driver MB")
console = Console(width=120)


def duration(task: Task, rng: TaskRng) -> float:
    """Simulated seconds of a task."""
    if isinstance(task, PlayTask):
        return GAME_S * task.games_per_cell * len(task.cells)
    return float(rng.lognormal(np.log(MEDIAN_SLICE_S), SIGMA))


def outcome(task: Task, rng: TaskRng) -> Result:
    """A result of the task as if every member's strength grew with its age."""
    if isinstance(task, PlayTask):
        return PlayResult(tuple(_cell(cell, task.games_per_cell, rng) for cell in task.cells))
    assert isinstance(task, TrainTask)
    (mix,) = task.opponents.mixes.values()
    games = 512
    chances = [_chance(task.output_member, name) for name in mix]
    wins = rng.binomial(np.maximum(1, (games * np.array(list(mix.values()))).astype(int)), chances)
    met = {
        name: OpponentResult(max(1, int(games * share)), 2 * chance - 1, 1.0, int(won), 0)
        for (name, share), chance, won in zip(mix.items(), chances, wins, strict=True)
    }
    return TrainResult(env_steps=20_000, mean_return=float(np.mean(chances)), opponents=met)


def _age(member: str) -> int:
    number = member.rpartition("-")[2]
    return int(number) if number.isdigit() else 0


def _chance(ours: str, theirs: str) -> float:
    return float(1 / (1 + np.exp(0.3 * (_age(theirs) - _age(ours)))))


def _cell(members: tuple[str, ...], games: int, rng: TaskRng) -> PayoffCell:
    won = int(rng.binomial(games, _chance(*members)))
    mean = 2 * won / games - 1
    spread = games * (1 - mean * mean)
    return PayoffCell(games, (mean, -mean), (spread, spread), (won, games - won))


class DriverCosts(PlanCallback):
    """CPU time of the driver, in seconds, at each finished task."""

    def __init__(self) -> None:
        self.times = [time.process_time()]

    def on_task_done(self, number: int, done: TaskResult, lines: Any) -> None:
        self.times.append(time.process_time())

    def ms_per_task(self, start: float, end: float) -> float:
        """Mean CPU milliseconds of a task between two fractions of the run's tasks."""
        first, last = (int(part * (len(self.times) - 1)) for part in (start, end))
        return 1e3 * (self.times[last] - self.times[first]) / max(1, last - first)


def simulate(workers: int, learners: int, slices: int, whole: bool) -> dict[str, float]:
    """Returns throughput, losses and driver costs of a league of so many learners, each trained for `slices` slices.
    `whole`: every copy plays every other, and the task of a slice lists the whole distribution of opponents."""
    mains = max(1, learners // 10)
    config = LeagueConfig(
        main_agents=mains,
        main_exploiters=mains,
        league_exploiters=learners - 2 * mains,
        slices=slices,
        min_slices=1,
        max_slices=1,
        games_per_cell=64,
        rated_opponents=0 if whole else 128,
        opponents_per_slice=0 if whole else 512,
    )
    population = Population(("player",))
    population.add(Member("uniform", "player"))
    cluster = SimulatedCluster(workers, duration, outcome, node_loss_interval_s=60.0 * 1000 / workers)
    with tempfile.TemporaryDirectory() as root:
        backend, costs = SimulatedBackend(cluster, Path(root)), DriverCosts()
        with Run.create(root, "", "league") as run:
            run_plan(League(config, population), backend, run, callback=costs, as_completed=True)
            log_bytes = (run.path / "tasks.jsonl").stat().st_size
    stats, hours = backend.stats, backend.now / 3600
    return {
        "members": len(population),
        "tasks": stats.tasks,
        "simulated_hours": hours,
        "tasks_per_s": stats.tasks / backend.now,
        "worker_use": stats.busy_s / (backend.now * workers),
        "lost_share": stats.lost_s / (stats.busy_s + stats.lost_s),
        "node_losses": stats.node_losses,
        "restart_delay_s": float(np.mean(stats.restart_delay_s or [0.0])),
        "cpu_ms_first": costs.ms_per_task(0.0, 0.25),
        "cpu_ms_last": costs.ms_per_task(0.75, 1.0),
        "log_mb": log_bytes / 1e6,
        "log_kb_per_task": log_bytes / 1e3 / stats.tasks,
        "rss_mb": _rss_mb(),
    }


def result_ms(members: int, results: int = 150) -> float:
    """Returns the CPU milliseconds that a league of 125 learners and so many members needs to process a training result
    and make the next task, without the log and files. Games of new copies are left out."""
    config = LeagueConfig(
        main_agents=12,
        main_exploiters=12,
        league_exploiters=101,
        slices=1_000_000,
        min_slices=1,
        max_slices=1,
        rated_opponents=128,
        opponents_per_slice=512,
    )
    population = Population(("player",))
    population.add(Member("uniform", "player"))
    league, rng = League(config, population), np.random.default_rng(0)
    learners = list(league.learners.values())
    for number in range(members):
        name = f"copy{number}-1"
        population.add(Member(name, "player", f"members/{name}"))
        learners[number % len(learners)].frozen_copies.append(name)
    tasks, spent = list(league.initial_tasks()), 0.0
    for _ in range(results):
        task = tasks.pop(0)
        result = outcome(task, rng)
        start = time.process_time()
        new = league.on_result(task, result)
        spent += time.process_time() - start
        tasks += [each for each in new if isinstance(each, TrainTask)]
    return 1e3 * spent / results


def print_table(sizes: tuple[int, ...]) -> None:
    """Prints a row for each number of workers as Markdown; each league has five learners for four workers."""
    print("| " + " | ".join(TABLE_HEADS) + " |")
    print("| ---" * len(TABLE_HEADS) + " |")
    for workers in sizes:
        line = simulate(workers, max(3, workers * 5 // 4), 8, whole=False)
        work = (line["tasks"], line["tasks_per_s"], 100 * line["worker_use"], 100 * line["lost_share"])
        driver = (line["restart_delay_s"], line["cpu_ms_first"], line["cpu_ms_last"], line["rss_mb"])
        cells = [f"{number:.4g}" for number in (*work, *driver)]
        print("| " + " | ".join([f"{workers:,}", *cells]) + " |", flush=True)
    figures = {"tasks_per_s": line["tasks_per_s"], "worker_use": line["worker_use"]}
    finish("cluster_table", figures, {}, page="scaling")


def _rss_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of everything")
    parser.add_argument("--whole", action="store_true", help="without sampled opponents, to see what breaks first")
    parser.add_argument("--members", type=int, nargs="*", help="sizes of the league")
    parser.add_argument("--results", action="store_true", help="the league's cost of a result at 100 to 10,000 members")
    parser.add_argument("--table", action="store_true", help="the table of the docs; with --quick up to 100 workers")
    args = parser.parse_args()
    if args.table:
        print_table(TABLE_WORKERS[:5] if args.quick else TABLE_WORKERS)
        return
    if args.results:
        found = {
            f"result_ms_{members}": round(result_ms(members), 3) for members in args.members or (100, 1000, 10_000)
        }
        finish("league_results", found, {}, page="scaling")
        return
    workers = 100 if args.quick else 1000
    learners = workers * 5 // 4  # each trains one slice at a time; games of frozen copies need workers too
    sizes = args.members or ([250] if args.quick else [2500, 5000, 10_000])
    if min(sizes) < learners:
        parser.error(f"--members {min(sizes)} is less than the {learners} learners of {workers} workers: give more")
    rows = [simulate(workers, learners, size // learners, args.whole) for size in sizes]
    table = Table("", *(str(row["members"]) for row in rows), title=f"{workers} workers", title_justify="left")
    for key in list(rows[0])[1:]:
        table.add_row(key, *(f"{row[key]:.4g}" for row in rows))
    console.print(table)
    last = rows[-1]
    figures = {
        "driver_cpu_growth": last["cpu_ms_last"] / rows[0]["cpu_ms_first"],
        **{key: last[key] for key in ("worker_use", "lost_share", "tasks_per_s", "cpu_ms_last", "rss_mb", "log_mb")},
    }
    finish("cluster", figures, TARGETS, page="scaling", is_stored=not args.quick)


if __name__ == "__main__":
    main()
