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
from palestra.rollouts.metrics import answers_of, episode_metrics, policy_metrics, seat_returns
from palestra.rollouts.refill import play_refilled
from palestra.rollouts.sources import EpisodeSource
from palestra.rollouts.tree_rollout import Branching, EpisodeRunner, EpisodeSpec
from palestra.runs import Checkpoint, Run
from palestra.seeding import derive_seed
from palestra.types import TEAM, AlgorithmState, Episode, Metrics, Sample, Seat

STATE_FILE = "algorithm_state.json"  # file in a checkpoint: state that algorithms and curricula keep between steps


class Algorithm(Protocol):
    """Credit assignment and a loss function."""

    @property
    def branching(self) -> Branching:
        """Where the trees of episodes branch."""
        ...

    @property
    def max_redraws(self) -> int:
        """Largest number of instances played in place of an episode without signal."""
        ...

    def has_signal(self, episode: Episode) -> bool:
        """True if an episode is kept."""
        ...

    @property
    def loss(self) -> Callable:
        """The loss function (losses/)."""
        ...

    @property
    def loss_options(self) -> dict[str, Any]:
        """Keyword arguments of the loss."""
        ...

    def build_samples(
        self, episodes: Sequence[Episode], policy: str, memory: AlgorithmState | None = None
    ) -> tuple[list[Sample], Metrics]:
        """Returns the samples that `policy` is trained on, and metrics. Reads only the episodes."""
        ...

    async def finalize_samples(
        self, samples: list[Sample], learner: Learner, memory: AlgorithmState
    ) -> tuple[list[Sample], Metrics]:
        """Returns the samples with what the learner's weights contribute, such as values, and metrics."""
        ...


@dataclass
class Evaluation:
    """A held-out evaluation: instances 0 to `episodes` - 1 of `arena`, played after every `every` steps (0: only before
    and after training). `seat_policies` returns the policy of each seat at its current weights."""

    name: str
    arena: EpisodeRunner
    seat_policies: Callable[[], dict[Seat, Policy]]
    episodes: int
    every: int = 0

    def is_due(self, step: int, steps: int) -> bool:
        """True before the first step (`step` = -1), after the last, and after every `every` steps in between."""
        return step + 1 in (0, steps) or (self.every > 0 and (step + 1) % self.every == 0)

    async def play(self, seed: int) -> list[Episode]:
        """Returns the episodes, played by the policies at their current weights."""
        return await evaluate_instances(self.arena, self.seat_policies(), range(self.episodes), seed)


@dataclass
class Stage:
    """A part of a run: `steps` of `episodes` each from `source`, and the algorithm that trains on them.

    `configure_learners` sets the learners' settings for the stage. Every stage except the first starts with a fresh
    optimizer, and with the learners' current weights as their reference.
    """

    source: EpisodeSource
    algorithm: Algorithm
    steps: int
    episodes: int
    name: str = ""
    configure_learners: Callable[[], None] = lambda: None


@dataclass
class Setup:
    """Everything a run consists of.

    `memory` is the state that algorithms (by policy) and sources keep between steps. `staleness` is the number of steps
    by which episodes may be played ahead (async_loop.py). `figures` returns metrics of remote workers since the last
    call, for the timings. The run ends with an error if more than the share `max_failed` of the episodes of a step or
    an evaluation failed. `worker_context` is a context that is open during training and holds other processes that play
    or train. `learners_are_remote`: learners work in other processes, so that all are updated concurrently.
    """

    stages: Sequence[Stage]
    learners: Mapping[str, Learner]
    evals: Sequence[Evaluation]
    seed: int
    checkpoint_every: int = 10
    keep_every: int = 0
    record_every: int = 1
    staleness: int = 0
    max_failed: float = 0.5
    algorithm_state: AlgorithmState = field(default_factory=dict)
    worker_metrics: Callable[[], Metrics] = dict
    worker_context: AbstractContextManager = field(default_factory=nullcontext)
    learners_are_remote: bool = False

    @property
    def policy_names(self) -> list[str]:
        """Names of the policies that are trained."""
        return list(self.learners)

    @property
    def steps(self) -> int:
        """Number of training steps over all stages."""
        return sum(stage.steps for stage in self.stages)

    def position_of(self, step: int) -> StepPosition:
        """Returns the position of `step` in the run. Raises ValueError if the run has no such step."""
        first = number = 0
        for stage in self.stages:
            if step < first + stage.steps:
                return StepPosition(stage, step - first, number + (step - first) * stage.episodes)
            first, number = first + stage.steps, number + stage.steps * stage.episodes
        raise ValueError(f"the run has {self.steps} steps, and {step} is none of them")

    def policy_state(self, policy: str) -> AlgorithmState:
        """Returns the state that the algorithm keeps for `policy` between steps; changes to it are saved with the
        run."""
        own: AlgorithmState = self.algorithm_state.setdefault("policies", {}).setdefault(policy, {})
        return own


@dataclass(frozen=True)
class StepPosition:
    """Position of a step in a run: its stage, the number of steps of the stage before it, and the number of its first
    episode. Episode numbers are unique in the run."""

    stage: Stage
    stage_step: int
    first_episode: int

    @property
    def episode_numbers(self) -> range:
        """Numbers of the step's episodes."""
        return range(self.first_episode, self.first_episode + self.stage.episodes)

    @property
    def progress(self) -> float:
        """Elapsed share of the stage, from 0 to below 1."""
        return self.stage_step / self.stage.steps


class Callback:
    """Callback for events of a run, such as a progress bar. The methods do nothing unless overridden.

    `stop()`, called in any of them, ends the run after the current step, with a checkpoint; it can be resumed.
    """

    stop_requested = False

    def stop(self) -> None:
        """Ends the run after the current step."""
        self.stop_requested = True

    def on_step(self, step: int, metrics: Mapping[str, Metrics]) -> None:
        """Called after step `step` (from 0) is logged: each step of a text run, each log line of a vector run, each
        task of a population. `metrics` holds the metrics of each policy, and those of all policies together as "team".
        """

    def on_episode(self, episode: Episode) -> None:
        """Called after each training episode of a text run, in the order in which they end."""

    def on_eval(self, step: int, name: str, metrics: Mapping[str, Any]) -> None:
        """Called after evaluation `name`, played after step `step` (-1: before training)."""


@dataclass
class PhaseTimer:
    """Wall-clock and CPU seconds by phase."""

    wall_s: dict[str, float] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)

    def add_since(self, phase: str, start: tuple[float, float]) -> None:
        """Adds the time since `start`, a result of `read_clocks`, to `phase`."""
        wall, cpu = read_clocks()
        self.wall_s[phase] = self.wall_s.get(phase, 0.0) + wall - start[0]
        self.cpu_s[phase] = self.cpu_s.get(phase, 0.0) + cpu - start[1]

    def metrics(self) -> Metrics:
        """Returns the seconds as metrics `<phase>_s` (wall clock) and `<phase>_cpu_s`."""
        wall = {f"{phase}_s": seconds for phase, seconds in self.wall_s.items()}
        return wall | {f"{phase}_cpu_s": seconds for phase, seconds in self.cpu_s.items()}


def read_clocks() -> tuple[float, float]:
    """Returns the current wall-clock and CPU time of this process, in seconds."""
    return time.perf_counter(), time.process_time()


async def train(
    setup: Setup, run: Run, callback: Callback | None = None, should_stop: Callable[[], bool] = lambda: False
) -> bool:
    """Runs the loop from `run.next_step` on. `should_stop` is called after each step and requests an early end.

    Returns True if all steps are done, False if `should_stop` returned True; the run then has a checkpoint of its last
    step. Raises RunFailed if too many episodes of a step or an evaluation failed.
    """
    callback = callback or Callback()
    if run.next_step == 0:
        await run_evals(setup, run, -1, callback)
    first = run.next_step
    for step in range(first, setup.steps):
        moment = enter_step(setup, step, resumed=step == first)
        stage, clock, start = moment.stage, PhaseTimer(), read_clocks()
        episodes = await play_refilled(
            stage.source, stage.algorithm, moment.episode_numbers, setup.algorithm_state, callback.on_episode
        )
        clock.add_since("rollout", start)
        callback.on_step(step, await train_step(setup, run, step, episodes, clock))
        await run_evals(setup, run, step, callback)
        run.sync()
        if not checkpoint_if_due(setup, run, step, should_stop):
            return False
    return True


def enter_step(setup: Setup, step: int, *, resumed: bool) -> StepPosition:
    """Returns the position of `step`, and prepares the learners if it is the first of its stage or of a resumed
    run."""
    moment = setup.position_of(step)
    if moment.stage_step == 0 or resumed:
        moment.stage.configure_learners()
    if moment.stage_step == 0 and step > 0:
        for learner in setup.learners.values():
            learner.start_stage()
    return moment


async def train_step(
    setup: Setup,
    run: Run,
    step: int,
    episodes: Sequence[Episode],
    timer: PhaseTimer,
    extra_metrics: Mapping[str, Metrics] | None = None,
) -> dict[str, Metrics]:
    """Assigns credit, updates every learner and writes metrics, timings and episodes of one step to the run.

    `extra_metrics` holds further metrics by policy. Returns the metrics by policy, those of all together as "team".
    Raises RunFailed, with the episodes recorded, if too many failed.
    """
    moment = setup.position_of(step)
    _end_on_failures(setup, run, step, episodes)
    lines: dict[str, Metrics] = {}
    for name, (metrics, own) in (await _all_learned(setup, moment, episodes, timer)).items():
        lines[name] = policy_metrics(episodes, name) | metrics | (extra_metrics or {}).get(name, {})
        run.log_metrics(step, name, lines[name])
        run.log_timings(step, name, own.metrics() | throughput(episodes, own, name))
    mixture = moment.stage.source.observe(episodes, setup.algorithm_state)
    lines[TEAM] = episode_metrics(episodes) | mixture
    run.log_metrics(step, TEAM, lines[TEAM])
    if setup.record_every and step % setup.record_every == 0:
        run.write_episodes(step, list(episodes))
    run.log_timings(step, TEAM, timer.metrics() | throughput(episodes, timer) | setup.worker_metrics())
    run.log_workers(step)
    return lines


def _end_on_failures(setup: Setup, run: Run, step: int, episodes: Sequence[Episode]) -> None:
    """Raises RunFailed if too many episodes of the step failed, after writing them and a checkpoint of the step
    before."""
    try:
        check_failures(episodes, setup.max_failed, f"step {step + 1}")
    except RunFailed:
        if run.next_step < step:
            save_checkpoint(setup, run, step - 1, keep=False)
        run.write_episodes(step, list(episodes))
        raise


async def _all_learned(
    setup: Setup, moment: StepPosition, episodes: Sequence[Episode], clock: PhaseTimer
) -> dict[str, tuple[Metrics, PhaseTimer]]:
    """Updates every learner, one after another or, if they work in other processes, concurrently. Returns metrics and
    phase times by policy."""
    start = read_clocks()
    if setup.learners_are_remote:
        both = await asyncio.gather(*(_learned(setup, moment, name, episodes, clock) for name in setup.learners))
        clock.add_since("train", start)
        return dict(zip(setup.learners, both, strict=True))
    done = {}
    for name in setup.learners:
        start = read_clocks()
        done[name] = await _learned(setup, moment, name, episodes, clock)
        clock.add_since("train", start)
    return done


async def _learned(
    setup: Setup, moment: StepPosition, name: str, episodes: Sequence[Episode], clock: PhaseTimer
) -> tuple[Metrics, PhaseTimer]:
    start, own = read_clocks(), PhaseTimer(dict(clock.wall_s))
    learner, memory = setup.learners[name], setup.policy_state(name)
    metrics = await update_learner(moment.stage.algorithm, learner, episodes, moment.progress, memory)
    own.add_since("train", start)
    return metrics, own


def checkpoint_if_due(setup: Setup, run: Run, step: int, should_stop: Callable[[], bool]) -> bool:
    """Writes a checkpoint if one is due. Returns False if `should_stop` returned True and training has to end after
    this step."""
    last = step + 1 == setup.steps
    stopping = should_stop() and not last
    if last or stopping or (step + 1) % setup.checkpoint_every == 0:
        save_checkpoint(setup, run, step, keep=last or bool(setup.keep_every and (step + 1) % setup.keep_every == 0))
    return not stopping


async def update_learner(
    algorithm: Algorithm,
    learner: Learner,
    episodes: Sequence[Episode],
    progress: float,
    state: AlgorithmState | None = None,
) -> Metrics:
    """Updates one learner on its own samples, with one optimizer step per batch. Returns metrics, averaged over
    batches.

    `progress` is the elapsed share of the stage, for learning-rate schedules.
    """
    state = {} if state is None else state
    samples, credit = algorithm.build_samples(episodes, learner.name, state)
    samples, more = await algorithm.finalize_samples(samples, learner, state)
    batches = learner.batches(samples)
    total: Metrics = {}
    for batch in batches:
        metrics = await learner.forward_backward(batch, algorithm.loss, **algorithm.loss_options)
        metrics |= await learner.optim_step(progress)
        for name, value in metrics.items():
            total[name] = total.get(name, 0.0) + value / len(batches)
    return {"samples": float(len(samples)), "updates": float(len(batches)), **credit, **more, **total}


async def run_evals(setup: Setup, run: Run, step: int, callback: Callback, *, last: bool = False) -> None:
    """Plays the evaluations that are due after `step` (all if `last`) and writes their metrics to the run.

    Raises RunFailed if too many episodes of an evaluation failed.
    """
    for exam in setup.evals:
        if last or exam.is_due(step, setup.steps):
            episodes = await exam.play(setup.seed)
            check_failures(episodes, setup.max_failed, f"evaluation {exam.name}")
            metrics = episode_metrics(episodes) | seat_returns(episodes)
            run.log_eval(step, exam.name, metrics)
            callback.on_eval(step, exam.name, metrics)


async def evaluate(arena: EpisodeRunner, seats: Mapping[Seat, Policy], episodes: int, seed: int) -> list[Episode]:
    """Plays episodes without branching on instances 0 to `episodes` - 1 of the arena's env, and returns them."""
    return await evaluate_instances(arena, seats, range(episodes), seed)


async def evaluate_instances(
    arena: EpisodeRunner, seats: Mapping[Seat, Policy], instances: Sequence[int], seed: int
) -> list[Episode]:
    """Plays episodes without branching on the given instances of the arena's env, and returns them in their order."""
    matches = [EpisodeSpec(i, seats, derive_seed(seed, "exam", arena.name, i)) for i in instances]
    return await arena.play_all(matches, Branching())


def throughput(episodes: Sequence[Episode], timer: PhaseTimer, policy: str | None = None) -> Metrics:
    """Returns throughput of one policy or, without `policy`, of all.

    `tokens_per_s` counts sampled tokens per second of rollout (of the whole step if rollout and training overlap),
    `answers_per_s` answers per second of the whole step, `answers` answers.
    """
    answers = answers_of(episodes, policy)
    tokens = sum(len(answer.token_ids) for answer in answers)
    whole = sum(timer.wall_s.values())
    rollout = timer.wall_s.get("rollout", whole)
    return {"tokens_per_s": tokens / rollout, "answers_per_s": len(answers) / whole, "answers": float(len(answers))}


def save_checkpoint(setup: Setup, run: Run, step: int, *, keep: bool) -> Checkpoint:
    """Writes a checkpoint after `step`: a folder per learner, and the state of algorithms and sources. With
    `keep` it is never pruned."""

    def write(folder: Path) -> None:
        for name, learner in setup.learners.items():
            learner.save(folder / name)
        (folder / STATE_FILE).write_text(json.dumps(setup.algorithm_state))

    return run.checkpoint(step, write, {"names": {name: name for name in setup.learners}}, keep=keep)


def restore_checkpoint(setup: Setup, run: Run) -> int:
    """Restores the run and the learners from the newest intact checkpoint. Returns the next step to train.

    Raises ValueError if the run has checkpoints and none can be loaded.
    """
    checkpoint = run.resume()
    if checkpoint:
        with checkpoint.explain_load_errors():
            for name in setup.learners:
                setup.learners[name].load(checkpoint.path / checkpoint.names[name])
            memory = checkpoint.path / STATE_FILE
            setup.algorithm_state.update(json.loads(memory.read_text()) if memory.exists() else {})
    return run.next_step


def run_training(
    setup: Setup, run: Run, callback: Callback | None = None, should_stop: Callable[[], bool] = lambda: False
) -> bool:
    """Runs `train` for callers without an event loop. Raises ValueError if the setup has staleness above 0."""
    if setup.staleness:
        raise ValueError(
            f"staleness: {setup.staleness} lets play go on while training does, and this loop waits for it: call "
            "palestra.training.async_loop.run_training"
        )
    with setup.worker_context:
        return asyncio.run(train(setup, run, callback, should_stop))
