"""Backend whose workers only take simulated time: drives the real scheduler and plans at the scale of a cluster.

A discrete-event simulation. Durations and results come from functions of the task; nodes are lost at random, their
tasks are given to other workers as a real backend does it, and the nodes come back. The clock advances only in `wait`,
to the next event, so that an hour of a thousand workers takes as long as the scheduler needs for its results.
"""

from __future__ import annotations

import heapq
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from palestra.core.seeding import derive_seed
from palestra.parallel.task_queue import MemberFolders, TaskQueue
from palestra.parallel.tasks import Result, Task, TaskResult

TaskRng = np.random.Generator


@dataclass(frozen=True)
class SimulatedCluster:
    """A cluster: its size, and how often it loses a node.

    `duration` and `outcome` get a task and a generator of random numbers that its name seeds.
    """

    workers: int
    duration: Callable[[Task, TaskRng], float]
    """Seconds of a task without losses."""
    outcome: Callable[[Task, TaskRng], Result]
    """Its result."""
    workers_per_node: int = 8
    node_loss_interval_s: float = float("inf")
    """Mean time between two losses of a node anywhere in the cluster; they are a Poisson process."""
    recovery_s: float = 120.0
    """Seconds until a lost node is back."""
    seed: int = 0


@dataclass
class ClusterStats:
    """Totals of a simulation, in worker seconds unless noted."""

    busy_s: float = 0.0
    """Time spent on tasks that finished."""
    lost_s: float = 0.0
    """Time spent on tasks whose node was then lost."""
    tasks: int = 0
    node_losses: int = 0
    restarted_tasks: int = 0
    restart_delay_s: list[float] = field(default_factory=list)
    """Seconds from each loss to the next start of each task that it interrupted."""


@dataclass
class _Attempt:
    """A task on a worker, from `start` to `end`; `is_lost` once its node is."""

    task: Task
    node: int
    start: float
    end: float
    is_lost: bool = False


class SimulatedBackend:
    """Runs tasks in simulated time. Members get empty folders in `scratch`: no weights are made."""

    def __init__(self, cluster: SimulatedCluster, scratch: Path) -> None:
        self.cluster, self.stats, self.now = cluster, ClusterStats(), 0.0
        self._scratch = scratch
        self._queue, self._members = TaskQueue(), MemberFolders()
        self._rng = np.random.default_rng(derive_seed(cluster.seed, "nodes"))
        nodes = -(-cluster.workers // cluster.workers_per_node)
        self._idle = [number // cluster.workers_per_node for number in range(cluster.workers)]  # a node for each
        self._running: dict[int, dict[str, _Attempt]] = {node: {} for node in range(nodes)}
        self._down: set[int] = set()
        self._events: list[tuple[float, int, str, _Attempt | int]] = []
        self._num_events = 0
        self._lost_at: dict[str, float] = {}
        self._schedule_loss()

    @property
    def workers(self) -> int:
        return self.cluster.workers

    def add_member(self, name: str, folder: Path) -> None:
        self._members[name] = folder

    def remove_member(self, name: str) -> None:
        del self._members[name]

    def submit(self, task: Task) -> None:
        self._queue.add(task)

    def wait(self, timeout: float | None = None) -> TaskResult | None:
        """Advances the clock to the next finished task and returns it; None if none is left. The timeout is ignored."""
        self._start_tasks()
        while any(self._running.values()) or self._queue.tasks:
            self.now, _, kind, what = heapq.heappop(self._events)
            if isinstance(what, _Attempt):
                if not what.is_lost:
                    return self._finish(what)
            elif kind == "loss":
                self._lose_node()
            else:
                self._down.discard(what)
                self._idle += [what] * self._workers_of(what)
            self._start_tasks()
        return None

    def cancel_pending(self) -> int:
        self._queue.clear()
        return sum(map(len, self._running.values()))

    def close(self) -> None:
        """Does nothing: there is nothing to release."""

    # ---- events

    def _add_event(self, time: float, kind: str, what: _Attempt | int) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time, self._num_events, kind, what))

    def _schedule_loss(self) -> None:
        if np.isfinite(self.cluster.node_loss_interval_s):
            self._add_event(self.now + self._rng.exponential(self.cluster.node_loss_interval_s), "loss", 0)

    def _start_tasks(self) -> None:
        while self._idle and self._queue.tasks:
            task, node = self._queue.pop(), self._idle.pop()
            assert task is not None
            self._members.folders_for(task)
            seconds = self.cluster.duration(task, self._task_rng(task, "duration"))
            attempt = _Attempt(task, node, self.now, self.now + seconds)
            self._running[node][task.name] = attempt
            if (lost := self._lost_at.pop(task.name, None)) is not None:
                self.stats.restart_delay_s.append(self.now - lost)
            self._add_event(attempt.end, "end", attempt)

    def _finish(self, attempt: _Attempt) -> TaskResult:
        task, seconds = attempt.task, attempt.end - attempt.start
        del self._running[attempt.node][task.name]
        self._idle.append(attempt.node)
        self.stats.busy_s += seconds
        self.stats.tasks += 1
        out = Path(tempfile.mkdtemp(dir=self._scratch)) if task.output_member else None
        return TaskResult(task, self.cluster.outcome(task, self._task_rng(task, "outcome")), out, seconds)

    def _lose_node(self) -> None:
        """Takes a random node that is up from the cluster, and gives its tasks back to the queue."""
        self._schedule_loss()
        up = [node for node in self._running if node not in self._down]
        if not up:
            return
        node = int(self._rng.choice(up))
        self._down.add(node)
        self._idle = [other for other in self._idle if other != node]
        self.stats.node_losses += 1
        for attempt in reversed(self._running[node].values()):
            attempt.is_lost = True
            self.stats.lost_s += self.now - attempt.start
            self.stats.restarted_tasks += 1
            self._lost_at[attempt.task.name] = self.now
            self._queue.retry(attempt.task, "its node was lost", is_node_lost=lambda node: True)
        self._running[node].clear()
        self._add_event(self.now + self.cluster.recovery_s, "recovery", node)

    def _workers_of(self, node: int) -> int:
        first = node * self.cluster.workers_per_node
        return min(self.cluster.workers_per_node, self.cluster.workers - first)

    def _task_rng(self, task: Task, purpose: str) -> TaskRng:
        return np.random.default_rng(derive_seed(self.cluster.seed, purpose, task.name))
