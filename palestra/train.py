"""The loop: play, credit, learn, keep. It knows neither torch nor any env, algorithm or backend by name."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from palestra.learners.base import Learner
from palestra.policies.base import Policy
from palestra.rollouts.failures import RunFailed, check_failures
from palestra.rollouts.figures import answers_of, policy_figures, seat_returns, summary
from palestra.rollouts.play import Arena, Branching, Match, derive
from palestra.rollouts.sources import Source
from palestra.runs import Checkpoint, Run
from palestra.types import TEAM, Episode, Memory, Metrics, Sample, Seat

MEMORY = "memory.json"  # in a checkpoint: what algorithms and curricula know from earlier steps


class Algorithm(Protocol):
    """Credit assignment and the name of a loss."""

    @property
    def branching(self) -> Branching: ...
    @property
    def loss(self) -> Callable: ...
    @property
    def loss_options(self) -> dict[str, Any]: ...
    def samples(
        self, episodes: Sequence[Episode], policy: str, memory: Memory | None = None
    ) -> tuple[list[Sample], Metrics]: ...
    async def refined(
        self, samples: list[Sample], learner: Learner, memory: Memory
    ) -> tuple[list[Sample], Metrics]: ...


@dataclass
class Exam:
    """Held-out instances 0 to `episodes`-1 of `arena`, played after every `every` steps (0: only at the end). `seats`
    says who sits where now."""

    name: str
    arena: Arena
    seats: Callable[[], dict[Seat, Policy]]
    episodes: int
    every: int = 0

    def due(self, step: int, steps: int) -> bool:
        """Before the first step (-1), after the last, and every `every` in between."""
        return step + 1 in (0, steps) or (self.every > 0 and (step + 1) % self.every == 0)

    async def play(self, seed: int) -> list[Episode]:
        """Its episodes, by the policies as they stand."""
        return await evaluate_on(self.arena, self.seats(), range(self.episodes), seed)


@dataclass
class Stage:
    """A part of a run: `steps` of `episodes` each, where they come from, and what is learned from them. `settle` gives
    the learners their settings; a stage but the first begins with a fresh optimizer, and with what its learners are
    then as their reference."""

    source: Source
    algorithm: Algorithm
    steps: int
    episodes: int
    name: str = ""
    settle: Callable[[], None] = lambda: None


@dataclass
class Setup:
    """Everything a run consists of. `memory` is what its algorithms (by policy) and its sources know from earlier
    steps; `staleness`, by how many steps episodes may be played ahead (train_async.py); `figures` says what has
    happened on the machines since it was last asked, for the timings. The run ends with an error where more than the
    share `max_failed` of the episodes of a step or an exam failed. `place` is open while the run goes on: who plays
    or learns in other processes. With `apart` learners do not work in this one, and learn all at once."""

    stages: Sequence[Stage]
    learners: Mapping[str, Learner]
    exams: Sequence[Exam]
    seed: int
    checkpoint_every: int = 10
    keep_every: int = 0
    record_every: int = 1
    staleness: int = 0
    max_failed: float = 0.5
    memory: Memory = field(default_factory=dict)
    figures: Callable[[], Metrics] = dict
    place: AbstractContextManager = field(default_factory=nullcontext)
    apart: bool = False

    @property
    def names(self) -> list[str]:
        """The policies that learn."""
        return list(self.learners)

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    def at(self, step: int) -> Moment:
        """Where in the run `step` is."""
        first = number = 0
        for stage in self.stages:
            if step < first + stage.steps:
                return Moment(stage, step - first, number + (step - first) * stage.episodes)
            first, number = first + stage.steps, number + stage.steps * stage.episodes
        raise ValueError(f"the run has {self.steps} steps, and {step} is none of them")

    def recall(self, policy: str) -> Memory:
        """What the algorithm knows of `policy` from earlier steps."""
        own: Memory = self.memory.setdefault("policies", {}).setdefault(policy, {})
        return own


@dataclass(frozen=True)
class Moment:
    """A step of a run: its stage, how many of the stage's steps are before it, and the number of its first episode,
    which no other step of the run has."""

    stage: Stage
    done: int
    first: int

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.stage.episodes)

    @property
    def progress(self) -> float:
        return self.done / self.stage.steps


class Watcher:
    """Told what happens; the command line's progress bar is one."""

    def step(self, step: int, metrics: Metrics) -> None:
        """A training step is over."""

    def played(self, episode: Episode) -> None:
        """An episode is over."""

    def exam(self, step: int, name: str, metrics: Mapping[str, Any]) -> None:
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
    first = run.next_step
    for step in range(first, setup.steps):
        moment = enter(setup, step, resumed=step == first)
        stage, clock, start = moment.stage, Clock(), now()
        episodes = await stage.source.play(moment.numbers, stage.algorithm.branching, setup.memory, watcher.played)
        clock.since("rollout", start)
        watcher.step(step, await study(setup, run, step, episodes, clock))
        await examine(setup, run, step, watcher)
        run.sync()
        if not keep(setup, run, step, stop):
            return False
    return True


def enter(setup: Setup, step: int, *, resumed: bool) -> Moment:
    """The moment of `step`, with the learners made ready for its stage."""
    moment = setup.at(step)
    if moment.done == 0 or resumed:
        moment.stage.settle()
    if moment.done == 0 and step > 0:
        for learner in setup.learners.values():
            learner.begin()
    return moment


async def study(
    setup: Setup,
    run: Run,
    step: int,
    episodes: Sequence[Episode],
    clock: Clock,
    more: Mapping[str, Metrics] | None = None,
) -> Metrics:
    """Every learner's part of a step, with all that is noted of it in the run; `more` figures are by policy. Returns
    the figures of all together. Raises RunFailed, with the episodes recorded, where too many failed."""
    moment = setup.at(step)
    _end_on_failures(setup, run, step, episodes)
    for name, (metrics, own) in (await _all_learned(setup, moment, episodes, clock)).items():
        run.log(step, name, policy_figures(episodes, name) | metrics | (more or {}).get(name, {}))
        run.time(step, name, own.figures() | speeds(episodes, own, name))
    mixture = moment.stage.source.observe(episodes, setup.memory)
    figures = summary(episodes)
    run.log(step, TEAM, figures | mixture)
    if setup.record_every and step % setup.record_every == 0:
        run.write_episodes(step, list(episodes))
    run.time(step, TEAM, clock.figures() | speeds(episodes, clock) | setup.figures())
    run.roll_call(step)
    return figures


def _end_on_failures(setup: Setup, run: Run, step: int, episodes: Sequence[Episode]) -> None:
    """Ends the run where too many of a step's episodes failed: recorded, and with a checkpoint of the step before."""
    try:
        check_failures(episodes, setup.max_failed, f"step {step + 1}")
    except RunFailed:
        if run.next_step < step:
            save(setup, run, step - 1, keep=False)
        run.write_episodes(step, list(episodes))
        raise


async def _all_learned(
    setup: Setup, moment: Moment, episodes: Sequence[Episode], clock: Clock
) -> dict[str, tuple[Metrics, Clock]]:
    """Figures and seconds of every learner's part of a step: in turn, or all at once where they work elsewhere."""
    start = now()
    if setup.apart:
        both = await asyncio.gather(*(_learned(setup, moment, name, episodes, clock) for name in setup.learners))
        clock.since("train", start)
        return dict(zip(setup.learners, both, strict=True))
    done = {}
    for name in setup.learners:
        start = now()
        done[name] = await _learned(setup, moment, name, episodes, clock)
        clock.since("train", start)
    return done


async def _learned(
    setup: Setup, moment: Moment, name: str, episodes: Sequence[Episode], clock: Clock
) -> tuple[Metrics, Clock]:
    start, own = now(), Clock(dict(clock.wall))
    learner, memory = setup.learners[name], setup.recall(name)
    metrics = await learn(moment.stage.algorithm, learner, episodes, moment.progress, memory)
    own.since("train", start)
    return metrics, own


def keep(setup: Setup, run: Run, step: int, stop: Callable[[], bool]) -> bool:
    """A checkpoint where one is due; false where `stop` says that this step was the last for now."""
    last = step + 1 == setup.steps
    stopping = stop() and not last
    if last or stopping or (step + 1) % setup.checkpoint_every == 0:
        save(setup, run, step, keep=last or bool(setup.keep_every and (step + 1) % setup.keep_every == 0))
    return not stopping


async def learn(
    algorithm: Algorithm,
    learner: Learner,
    episodes: Sequence[Episode],
    progress: float,
    memory: Memory | None = None,
) -> Metrics:
    """One learner's part of a step: exactly its own samples, one optimizer step for each batch; figures are means."""
    memory = {} if memory is None else memory
    samples, credit = algorithm.samples(episodes, learner.name, memory)
    samples, more = await algorithm.refined(samples, learner, memory)
    batches = learner.batches(samples)
    total: Metrics = {}
    for batch in batches:
        figures = await learner.forward_backward(batch, algorithm.loss, **algorithm.loss_options)
        figures |= await learner.optim_step(progress)
        for name, value in figures.items():
            total[name] = total.get(name, 0.0) + value / len(batches)
    return {"samples": float(len(samples)), "updates": float(len(batches)), **credit, **more, **total}


async def examine(setup: Setup, run: Run, step: int, watcher: Watcher, *, last: bool = False) -> None:
    """Plays the exams that are due after `step` (all, where it is the last) and notes their figures in the run. Raises
    RunFailed where too many of an exam's episodes failed."""
    for exam in setup.exams:
        if last or exam.due(step, setup.steps):
            episodes = await exam.play(setup.seed)
            check_failures(episodes, setup.max_failed, f"exam {exam.name}")
            figures = summary(episodes) | seat_returns(episodes)
            run.eval(step, exam.name, figures)
            watcher.exam(step, exam.name, figures)


async def evaluate(arena: Arena, seats: Mapping[Seat, Policy], episodes: int, seed: int) -> list[Episode]:
    """Plain episodes (no siblings) on instances 0 to `episodes`-1 of the arena's env."""
    return await evaluate_on(arena, seats, range(episodes), seed)


async def evaluate_on(arena: Arena, seats: Mapping[Seat, Policy], instances: Sequence[int], seed: int) -> list[Episode]:
    """Plain episodes (no siblings) on these instances of the arena's env."""
    matches = [Match(i, seats, derive(seed, "exam", arena.name, i)) for i in instances]
    return await arena.play_all(matches, Branching())


def speeds(episodes: Sequence[Episode], clock: Clock, policy: str | None = None) -> Metrics:
    """Tokens per second of rollout (of the whole step where rollout goes on beside training) and answers per second of
    the whole step, of one policy or of all."""
    answers = answers_of(episodes, policy)
    tokens = sum(len(answer.token_ids) for answer in answers)
    whole = sum(clock.wall.values())
    rollout = clock.wall.get("rollout", whole)
    return {"tokens_per_s": tokens / rollout, "answers_per_s": len(answers) / whole, "answers": float(len(answers))}


def save(setup: Setup, run: Run, step: int, *, keep: bool) -> Checkpoint:
    """A checkpoint after `step`: a folder for each learner, and what is remembered beside the weights."""

    def write(folder: Path) -> None:
        for name, learner in setup.learners.items():
            learner.save(folder / name)
        (folder / MEMORY).write_text(json.dumps(setup.memory))

    return run.checkpoint(step, write, {"names": {name: name for name in setup.learners}}, keep=keep)


def restore(setup: Setup, run: Run) -> int:
    """Takes the run back to its newest checkpoint and the learners with it; returns the step to go on with."""
    checkpoint = run.resume()
    if checkpoint:
        with checkpoint.loading():
            for name in setup.learners:
                setup.learners[name].load(checkpoint.path / checkpoint.names[name])
            memory = checkpoint.path / MEMORY
            setup.memory.update(json.loads(memory.read_text()) if memory.exists() else {})
    return run.next_step


def run_training(
    setup: Setup, run: Run, watcher: Watcher | None = None, stop: Callable[[], bool] = lambda: False
) -> bool:
    """`train`, for callers without an event loop. Raises ValueError for a setup that plays ahead."""
    if setup.staleness:
        raise ValueError(
            f"staleness: {setup.staleness} lets play go on while training does, and this loop waits for it: call "
            "palestra.train_async.run_training"
        )
    with setup.place:
        return asyncio.run(train(setup, run, watcher, stop))
