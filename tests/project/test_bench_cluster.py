"""The simulated cluster: its clock by hand, nodes that are lost, and the real scheduler and league on it."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palestra.parallel.task_queue import MAX_ATTEMPTS, TaskQueue
from palestra.parallel.tasks import Result, Task, run_tasks
from palestra.populations.payoffs import PayoffCell
from palestra.populations.plans.league import League, LeagueConfig
from palestra.populations.plans.league_rules import OpponentWeights
from palestra.populations.population import Member, Population
from palestra.populations.scheduler import run_plan
from palestra.populations.tasks import OpponentResult, PlayResult, PlayTask, TrainResult, TrainTask
from palestra.runs import Run, read_lines
from results.scaling.simulated_backend import SimulatedBackend, SimulatedCluster, TaskRng


class Wait(Task):
    """A task without output."""

    kind = "wait"
    result_type = Result


def cluster(workers: int, seconds: float = 10.0, **options: Any) -> SimulatedCluster:
    return SimulatedCluster(workers, lambda task, rng: seconds, lambda task, rng: Result(), **options)


def waits(count: int) -> list[Task]:
    return [Wait(f"wait/{number}") for number in range(count)]


def test_clock_by_hand(tmp_path: Path) -> None:
    """Nine tasks of ten seconds on four workers: three rounds, of which the last has one task."""
    backend = SimulatedBackend(cluster(4), tmp_path)
    assert len(list(run_tasks(backend, waits(9)))) == 9
    assert backend.now == 30.0 and backend.stats.busy_s == 90.0 and backend.stats.lost_s == 0.0


def test_tasks_end_in_the_order_of_their_times(tmp_path: Path) -> None:
    times = {"wait/0": 9.0, "wait/1": 2.0, "wait/2": 4.0, "wait/3": 1.0}
    own = SimulatedCluster(2, lambda task, rng: times[task.name], lambda task, rng: Result())
    backend = SimulatedBackend(own, tmp_path)
    # worker 0 has wait/0 until 9; worker 1 has wait/1 until 2, wait/2 until 6, wait/3 until 7
    assert [done.task.name for done in run_tasks(backend, waits(4))] == ["wait/1", "wait/2", "wait/3", "wait/0"]
    assert backend.now == 9.0


def test_every_task_ends_once_despite_lost_nodes(tmp_path: Path) -> None:
    """Forty losses of a quarter of the cluster, more than the number of attempts of one task."""
    options = {"workers_per_node": 2, "node_loss_interval_s": 5.0, "recovery_s": 3.0}
    backend = SimulatedBackend(cluster(8, **options), tmp_path)
    names = Counter(done.task.name for done in run_tasks(backend, waits(100)))
    assert names == Counter(task.name for task in waits(100))
    stats = backend.stats
    assert stats.node_losses > 20 and stats.restarted_tasks > MAX_ATTEMPTS and stats.lost_s > 0
    assert stats.busy_s == 1000.0 and len(stats.restart_delay_s) == stats.restarted_tasks
    assert stats.busy_s + stats.lost_s <= 8 * backend.now  # no worker does two tasks at once


def test_only_deaths_on_living_nodes_count_against_a_task() -> None:
    queue, task = TaskQueue(), Wait("wait/0")
    for _ in range(MAX_ATTEMPTS + 2):
        queue.retry(task, "unreachable", node="a", is_node_lost={"a"}.__contains__)
    for _ in range(MAX_ATTEMPTS - 1):
        queue.retry(task, "killed", node="b", is_node_lost={"a"}.__contains__)
    with pytest.raises(ValueError, match="3 workers died at task wait/0"):
        queue.retry(task, "killed", node="b", is_node_lost={"a"}.__contains__)


# ---- the league

CONFIG = {"main_agents": 2, "main_exploiters": 1, "league_exploiters": 3, "slices": 6, "games_per_cell": 16}


def simulated_result(task: Task, rng: TaskRng) -> Result:
    if isinstance(task, PlayTask):
        return PlayResult(tuple(PayoffCell(16, (0.5, -0.5), (12.0, 12.0), (12, 4)) for _ in task.cells))
    assert isinstance(task, TrainTask)
    names = task.opponents.names()
    met = {name: OpponentResult(64, 0.0, 1.0, int(rng.integers(65)), 0) for name in names}
    return TrainResult(env_steps=1, mean_return=0.0, opponents=met)


def run_league(root: Path, workers: int, losses: float, **settings: Any) -> tuple[Run, SimulatedBackend]:
    """A league on a simulated cluster whose slices take 20 seconds in the median, some far longer."""
    population = Population(("player",))
    population.add(Member("uniform", "player"))
    own = SimulatedCluster(
        workers,
        lambda task, rng: float(rng.lognormal(3, 1)),
        simulated_result,
        node_loss_interval_s=losses,
        workers_per_node=2,
    )
    root.mkdir()
    backend = SimulatedBackend(own, root)
    with Run.create(root, "", "league") as run:
        assert run_plan(League(LeagueConfig(**CONFIG | settings), population), backend, run)
    return run, backend


def test_league_is_the_same_on_any_cluster(tmp_path: Path) -> None:
    """The plan gets results in task order: neither the number of workers nor lost nodes change a byte."""
    one, _ = run_league(tmp_path / "a", 1, float("inf"))
    many, backend = run_league(tmp_path / "b", 6, 30.0)
    assert backend.stats.node_losses > 5
    assert (one.path / "tasks.jsonl").read_bytes() == (many.path / "tasks.jsonl").read_bytes()
    assert (one.path / "metrics.jsonl").read_bytes() == (many.path / "metrics.jsonl").read_bytes()


def tasks(run: Run, kind: str) -> Sequence[dict[str, Any]]:
    return [line["task"] for line in read_lines(run.path / "tasks.jsonl") if line["kind"] == kind]


def test_sampled_opponents_bound_the_tasks_of_a_large_league(tmp_path: Path) -> None:
    whole, _ = run_league(tmp_path / "a", 4, float("inf"), slices=30, max_slices=2)
    some, _ = run_league(
        tmp_path / "b", 4, float("inf"), slices=30, max_slices=2, opponents_per_slice=5, rated_opponents=3
    )
    sizes = [[len(task["opponents"]["mixes"]["player"]) for task in tasks(run, "train")] for run in (whole, some)]
    assert max(sizes[0]) > 40 and max(sizes[1]) == 5
    for task in tasks(some, "train"):
        (mix,) = task["opponents"]["mixes"].values()
        assert sum(mix.values()) == pytest.approx(1) and all(round(5 * p, 9) % 1 == 0 for p in mix.values())
    rated = Counter(task["name"].split("/")[1] for task in tasks(some, "play") for _ in task["cells"])
    assert max(rated.values()) == 3 and len(rated) > 40


def test_sampled_opponents_are_drawn_from_the_whole_distribution(tmp_path: Path) -> None:
    """Over many slices, an opponent's mean share is its probability."""
    population = Population(("player",))
    for name in ("a", "b", "c"):
        population.add(Member(name, "player"))
    plan = League(LeagueConfig(opponents_per_slice=4), population)
    learner, shares, mean = next(iter(plan.learners.values())), np.array([0.5, 0.4, 0.1]), Counter[str]()
    for learner.slices in range(1000):
        drawn = plan._draw_opponents(learner, OpponentWeights(shares.copy()), {})
        mean.update({name: p / 1000 for name, p in drawn.items()})
    assert np.allclose([mean[name] for name in "abc"], shares, atol=0.03)  # 4 standard errors
