"""Training loop for text envs: play episodes, assign credit, update, checkpoint. It depends on neither torch nor any
env, algorithm or backend by name."""

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

MEMORY = "memory.json"  # file in a checkpoint: state that algorithms and curricula keep between steps


class Algorithm(Protocol):
    """Credit assignment and a loss function."""

    @property
    def branching(self) -> Branching:
        """Where the trees of episodes branch."""
        ...

    @property
    def loss(self) -> Callable:
        """The loss function (losses/)."""
        ...

    @property
    def loss_options(self) -> dict[str, Any]:
        """Keyword arguments of the loss."""
        ...

    def samples(
        self, episodes: Sequence[Episode], policy: str, memory: Memory | None = None
    ) -> tuple[list[Sample], Metrics]:
        """Returns the samples that `policy` is trained on, and metrics. Reads only the episodes."""
        ...

    async def refined(self, samples: list[Sample], learner: Learner, memory: Memory) -> tuple[list[Sample], Metrics]:
        """Returns the samples with what the learner's weights contribute, such as values, and metrics."""
        ...


@dataclass
class Exam:
    """A held-out evaluation: instances 0 to `episodes` - 1 of `arena`, played after every `every` steps (0: only before
    and after training). `seats` returns the policy of each seat at its current weights."""

    name: str
    arena: Arena
    seats: Callable[[], dict[Seat, Policy]]
    episodes: int
    every: int = 0

    def due(self, step: int, steps: int) -> bool:
        """True before the first step (`step` = -1), after the last, and after every `every` steps in between."""
        return step + 1 in (0, steps) or (self.every > 0 and (step + 1) % self.every == 0)

    async def play(self, seed: int) -> list[Episode]:
        """Returns the episodes, played by the policies at their current weights."""
        return await evaluate_on(self.arena, self.seats(), range(self.episodes), seed)


@dataclass
class Stage:
    """A part of a run: `steps` of `episodes` each from `source`, and the algorithm that trains on them.

    `settle` sets the learners' settings for the stage. Every stage except the first starts with a fresh optimizer, and
    with the learners' current weights as their reference.
    """

    source: Source
    algorithm: Algorithm
    steps: int
    episodes: int
    name: str = ""
    settle: Callable[[], None] = lambda: None


@dataclass
class Setup:
    """Everything a run consists of.

    `memory` is the state that algorithms (by policy) and sources keep between steps. `staleness` is the number of steps
    by which episodes may be played ahead (train_async.py). `figures` returns metrics of remote workers since the last
    call, for the timings. The run ends with an error if more than the share `max_failed` of the episodes of a step or
    an evaluation failed. `place` is a context that is open during training and holds other processes that play or
    train. `apart`: learners work in other processes, so that all are updated concurrently.
    """

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
        """Names of the policies that are trained."""
        return list(self.learners)

    @property
    def steps(self) -> int:
        """Number of training steps over all stages."""
        return sum(stage.steps for stage in self.stages)

    def at(self, step: int) -> Moment:
        """Returns the position of `step` in the run. Raises ValueError if the run has no such step."""
        first = number = 0
        for stage in self.stages:
            if step < first + stage.steps:
                return Moment(stage, step - first, number + (step - first) * stage.episodes)
            first, number = first + stage.steps, number + stage.steps * stage.episodes
        raise ValueError(f"the run has {self.steps} steps, and {step} is none of them")

    def recall(self, policy: str) -> Memory:
        """Returns the state that the algorithm keeps for `policy` between steps; changes to it are saved with the
        run."""
        own: Memory = self.memory.setdefault("policies", {}).setdefault(policy, {})
        return own


@dataclass(frozen=True)
class Moment:
    """Position of a step in a run: its stage, the number of steps of the stage before it, and the number of its first
    episode. Episode numbers are unique in the run."""

    stage: Stage
    done: int
    first: int

    @property
    def numbers(self) -> range:
        """Numbers of the step's episodes."""
        return range(self.first, self.first + self.stage.episodes)

    @property
    def progress(self) -> float:
        """Elapsed share of the stage, from 0 to below 1."""
        return self.done / self.stage.steps


class Watcher:
    """Callback for events of a run, such as a progress bar. The methods do nothing unless overridden."""

    def step(self, step: int, metrics: Metrics) -> None:
        """Called after each training step with the metrics of all policies together."""

    def played(self, episode: Episode) -> None:
        """Called after each episode."""

    def exam(self, step: int, name: str, metrics: Mapping[str, Any]) -> None:
        """Called after each evaluation."""


@dataclass
class Clock:
    """Wall-clock and CPU seconds by phase."""

    wall: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)

    def since(self, phase: str, start: tuple[float, float]) -> None:
        """Adds the time since `start`, a result of `now`, to `phase`."""
        wall, cpu = now()
        self.wall[phase] = self.wall.get(phase, 0.0) + wall - start[0]
        self.cpu[phase] = self.cpu.get(phase, 0.0) + cpu - start[1]

    def figures(self) -> Metrics:
        """Returns the seconds as metrics `<phase>_s` (wall clock) and `<phase>_cpu_s`."""
        wall = {f"{phase}_s": seconds for phase, seconds in self.wall.items()}
        return wall | {f"{phase}_cpu_s": seconds for phase, seconds in self.cpu.items()}


def now() -> tuple[float, float]:
    """Returns the current wall-clock and CPU time of this process, in seconds."""
    return time.perf_counter(), time.process_time()


async def train(
    setup: Setup, run: Run, watcher: Watcher | None = None, stop: Callable[[], bool] = lambda: False
) -> bool:
    """Runs the loop from `run.next_step` on. `stop` is called after each step and requests an early end.

    Returns True if all steps are done, False if `stop` returned True; the run then has a checkpoint of its last step.
    Raises RunFailed if too many episodes of a step or an evaluation failed.
    """
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
    """Returns the position of `step`, and prepares the learners if it is the first of its stage or of a resumed run."""
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
    """Assigns credit, updates every learner and writes metrics, timings and episodes of one step to the run.

    `more` holds further metrics by policy. Returns the metrics of all policies together. Raises RunFailed, with the
    episodes recorded, if too many failed.
    """
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
    """Raises RunFailed if too many episodes of the step failed, after writing them and a checkpoint of the step
    before."""
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
    """Updates every learner, one after another or, if they work in other processes, concurrently. Returns metrics and
    phase times by policy."""
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
    """Writes a checkpoint if one is due. Returns False if `stop` returned True and training has to end after this
    step."""
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
    """Updates one learner on its own samples, with one optimizer step per batch. Returns metrics, averaged over
    batches.

    `progress` is the elapsed share of the stage, for learning-rate schedules.
    """
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
    """Plays the evaluations that are due after `step` (all if `last`) and writes their metrics to the run.

    Raises RunFailed if too many episodes of an evaluation failed.
    """
    for exam in setup.exams:
        if last or exam.due(step, setup.steps):
            episodes = await exam.play(setup.seed)
            check_failures(episodes, setup.max_failed, f"exam {exam.name}")
            figures = summary(episodes) | seat_returns(episodes)
            run.eval(step, exam.name, figures)
            watcher.exam(step, exam.name, figures)


async def evaluate(arena: Arena, seats: Mapping[Seat, Policy], episodes: int, seed: int) -> list[Episode]:
    """Plays episodes without branching on instances 0 to `episodes` - 1 of the arena's env, and returns them."""
    return await evaluate_on(arena, seats, range(episodes), seed)


async def evaluate_on(arena: Arena, seats: Mapping[Seat, Policy], instances: Sequence[int], seed: int) -> list[Episode]:
    """Plays episodes without branching on the given instances of the arena's env, and returns them in their order."""
    matches = [Match(i, seats, derive(seed, "exam", arena.name, i)) for i in instances]
    return await arena.play_all(matches, Branching())


def speeds(episodes: Sequence[Episode], clock: Clock, policy: str | None = None) -> Metrics:
    """Returns throughput of one policy or, without `policy`, of all.

    `tokens_per_s` counts sampled tokens per second of rollout (of the whole step if rollout and training overlap),
    `answers_per_s` answers per second of the whole step, `answers` answers.
    """
    answers = answers_of(episodes, policy)
    tokens = sum(len(answer.token_ids) for answer in answers)
    whole = sum(clock.wall.values())
    rollout = clock.wall.get("rollout", whole)
    return {"tokens_per_s": tokens / rollout, "answers_per_s": len(answers) / whole, "answers": float(len(answers))}


def save(setup: Setup, run: Run, step: int, *, keep: bool) -> Checkpoint:
    """Writes a checkpoint after `step`: a folder per learner, and the state of algorithms and sources. With `keep` it
    is never pruned."""

    def write(folder: Path) -> None:
        for name, learner in setup.learners.items():
            learner.save(folder / name)
        (folder / MEMORY).write_text(json.dumps(setup.memory))

    return run.checkpoint(step, write, {"names": {name: name for name in setup.learners}}, keep=keep)


def restore(setup: Setup, run: Run) -> int:
    """Restores the run and the learners from the newest intact checkpoint. Returns the next step to train.

    Raises ValueError if the run has checkpoints and none can be loaded.
    """
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
    """Runs `train` for callers without an event loop. Raises ValueError if the setup has staleness above 0."""
    if setup.staleness:
        raise ValueError(
            f"staleness: {setup.staleness} lets play go on while training does, and this loop waits for it: call "
            "palestra.train_async.run_training"
        )
    with setup.place:
        return asyncio.run(train(setup, run, watcher, stop))
