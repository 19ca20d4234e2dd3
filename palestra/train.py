"""The loop: play, credit, learn, keep. It knows neither torch nor any env, algorithm or backend by name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from palestra.learners.base import Learner
from palestra.policies.base import Policy
from palestra.rollouts.figures import member, policy_figures, summary
from palestra.rollouts.play import Arena, Branching, Match, derive
from palestra.runs import Checkpoint, Run
from palestra.types import TEAM, Episode, Metrics, Sample, Seat


class Algorithm(Protocol):
    """Credit assignment and the name of a loss."""

    @property
    def branching(self) -> Branching: ...
    @property
    def loss(self) -> Callable: ...
    @property
    def loss_options(self) -> dict[str, Any]: ...
    def samples(self, episodes: Sequence[Episode], policy: str) -> tuple[list[Sample], Metrics]: ...


@dataclass
class Exam:
    """Held-out instances 0 to `episodes`-1 of `arena`, played after every `every` steps (0: only at the end)."""

    name: str
    arena: Arena
    episodes: int
    every: int = 0

    def due(self, step: int, steps: int) -> bool:
        """Before the first step (-1), after the last, and every `every` in between."""
        return step + 1 in (0, steps) or (self.every > 0 and (step + 1) % self.every == 0)


@dataclass
class Setup:
    """Everything a run consists of. `seats` and `exam_seats` say who sits where now, in training and in exams."""

    arena: Arena
    algorithm: Algorithm
    learners: Mapping[str, Learner]
    seats: Callable[[], dict[Seat, Policy]]
    exam_seats: Callable[[], dict[Seat, Policy]]
    exams: Sequence[Exam]
    seed: int
    steps: int
    episodes_per_step: int
    checkpoint_every: int = 10
    keep_every: int = 0
    record_every: int = 1

    @property
    def names(self) -> list[str]:
        """The policies that learn."""
        return list(self.learners)

    def matches(self, step: int) -> list[Match]:
        """The episodes of a step: instances that no other step has, and no run of another seed."""
        seats, first = self.seats(), step * self.episodes_per_step
        numbers = range(first, first + self.episodes_per_step)
        return [Match((self.seed % 2**31 << 32) + i, seats, derive(self.seed, "play", i)) for i in numbers]


class Watcher:
    """Told what happens; the command line's progress bar is one."""

    def step(self, step: int, metrics: Metrics) -> None:
        """A training step is over."""

    def played(self, episode: Episode) -> None:
        """An episode is over."""

    def exam(self, step: int, name: str, metrics: Metrics) -> None:
        """An exam is over."""


@dataclass
class Clock:
    """Wall and CPU seconds by phase."""

    wall: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)

    def since(self, phase: str, start: tuple[float, float]) -> None:
        wall, cpu = now()
        self.wall[phase] = self.wall.get(phase, 0.0) + wall - start[0]
        self.cpu[phase] = self.cpu.get(phase, 0.0) + cpu - start[1]

    def figures(self) -> Metrics:
        wall = {f"{phase}_s": seconds for phase, seconds in self.wall.items()}
        return wall | {f"{phase}_cpu_s": seconds for phase, seconds in self.cpu.items()}


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


async def train(
    setup: Setup, run: Run, watcher: Watcher | None = None, stop: Callable[[], bool] = lambda: False
) -> bool:
    """Play, credit, learn, keep; from `run.next_step` on. True when all steps are done, False when `stop` said so (the
    run then has a checkpoint of its last step)."""
    watcher = watcher or Watcher()
    if run.next_step == 0:
        await examine(setup, run, -1, watcher)
    for step in range(run.next_step, setup.steps):
        clock, start = Clock(), now()
        episodes = await setup.arena.play_all(setup.matches(step), setup.algorithm.branching, watcher.played)
        clock.since("rollout", start)
        for name, learner in setup.learners.items():
            start, own = now(), Clock(dict(clock.wall))
            metrics = await learn(setup.algorithm, learner, episodes, step / setup.steps)
            run.log(step, name, policy_figures(episodes, name) | metrics)
            own.since("train", start)
            clock.since("train", start)
            run.time(step, name, own.figures() | speeds(episodes, own, name))
        metrics = summary(episodes)
        run.log(step, TEAM, metrics)
        if setup.record_every and step % setup.record_every == 0:
            run.write_episodes(step, episodes)
        run.time(step, TEAM, clock.figures() | speeds(episodes, clock))
        watcher.step(step, metrics)
        await examine(setup, run, step, watcher)
        run.sync()
        last = step + 1 == setup.steps
        stopping = stop() and not last
        if last or stopping or (step + 1) % setup.checkpoint_every == 0:
            save(setup, run, step, keep=last or bool(setup.keep_every and (step + 1) % setup.keep_every == 0))
        if stopping:
            return False
    return True


async def learn(algorithm: Algorithm, learner: Learner, episodes: Sequence[Episode], progress: float) -> Metrics:
    """One learner's part of a step: exactly its own samples, one optimizer step for each batch; figures are means."""
    samples, credit = algorithm.samples(episodes, learner.name)
    batches = learner.batches(samples)
    total: Metrics = {}
    for batch in batches:
        figures = await learner.forward_backward(batch, algorithm.loss, **algorithm.loss_options)
        figures |= await learner.optim_step(progress)
        for name, value in figures.items():
            total[name] = total.get(name, 0.0) + value / len(batches)
    return {"samples": float(len(samples)), "updates": float(len(batches)), **credit, **total}


async def examine(setup: Setup, run: Run, step: int, watcher: Watcher, *, last: bool = False) -> None:
    """Plays the exams that are due after `step` (all, where it is the last) and notes their figures in the run."""
    for exam in setup.exams:
        if last or exam.due(step, setup.steps):
            figures = summary(await evaluate(exam.arena, setup.exam_seats(), exam.episodes, setup.seed))
            run.eval(step, exam.name, figures)
            watcher.exam(step, exam.name, figures)


async def evaluate(arena: Arena, seats: Mapping[Seat, Policy], episodes: int, seed: int) -> list[Episode]:
    """Plain episodes (no siblings) on instances 0 to `episodes`-1 of the arena's env."""
    matches = [Match(i, seats, derive(seed, "exam", arena.name, i)) for i in range(episodes)]
    return await arena.play_all(matches, Branching())


def speeds(episodes: Sequence[Episode], clock: Clock, policy: str | None = None) -> Metrics:
    """Tokens per second of rollout and answers per second of the whole step, of one policy or of all."""
    answers = [answer for e in episodes for node in e.nodes for answer in node.answers.values()]
    answers = [answer for answer in answers if policy in (None, member(answer.policy))]
    tokens = sum(len(answer.token_ids) for answer in answers)
    rollout, whole = clock.wall["rollout"], sum(clock.wall.values())
    return {"tokens_per_s": tokens / rollout, "answers_per_s": len(answers) / whole, "answers": float(len(answers))}


def save(setup: Setup, run: Run, step: int, *, keep: bool) -> Checkpoint:
    """A checkpoint after `step`: a folder for each learner."""

    def write(folder: Path) -> None:
        for name, learner in setup.learners.items():
            learner.save(folder / name)

    return run.checkpoint(step, write, {"names": {name: name for name in setup.learners}}, keep=keep)


def restore(setup: Setup, run: Run) -> int:
    """Takes the run back to its newest checkpoint and the learners with it; returns the step to go on with."""
    checkpoint = run.resume()
    if checkpoint:
        for name, folder in checkpoint.names.items():
            setup.learners[name].load(checkpoint.path / folder)
    return run.next_step


def run_training(
    setup: Setup, run: Run, watcher: Watcher | None = None, stop: Callable[[], bool] = lambda: False
) -> bool:
    """`train`, for callers without an event loop."""
    return asyncio.run(train(setup, run, watcher, stop))
