"""Training of language agents: play, assign credit, update. Imports no torch, concrete env, algorithm or backend."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from palestra.core.failures import RunFailed, check_failures
from palestra.core.seeding import derive_seed
from palestra.core.types import TEAM, AlgorithmState, Episode, Metrics, Seat
from palestra.parallel.process_group import SINGLE_PROCESS, ProcessGroup
from palestra.runs import Checkpoint
from palestra.runs.eval_files import MAX_EVAL_EPISODES
from palestra.runs.loop import Callback, Evaluation, PhaseTimer, read_clocks, save_checkpoint
from palestra.runs.null_run import AnyRun
from palestra.text.learners.base import Learner
from palestra.text.policies.base import Policy
from palestra.text.rollouts.metrics import (
    answers_of,
    episode_metrics,
    first_of_each_instance,
    instance_outcomes,
    policy_metrics,
    seat_returns,
)
from palestra.text.rollouts.refill import play_refilled
from palestra.text.rollouts.sample_metrics import sample_metrics
from palestra.text.rollouts.sources import STAGE_START_KEY, EpisodeSource
from palestra.text.rollouts.tree_rollout import Branching, EpisodeRunner, EpisodeSpec
from palestra.text.training.update import LearnerUpdate, run_updates

if TYPE_CHECKING:
    from palestra.text.algorithms.base import TextAlgorithm  # loads torch

T = TypeVar("T")

STATE_FILE = "algorithm_state.json"  # file in a checkpoint: state that algorithms and curricula keep between steps


@dataclass(kw_only=True)
class TextEval(Evaluation):
    """A held-out evaluation on instances 0 to `episodes` - 1 of `runner`, each played `samples` times. `seat_policies`
    returns the policy of each seat at its current weights."""

    runner: EpisodeRunner
    seat_policies: Callable[[], dict[Seat, Policy]]
    samples: int = 1

    @property
    def numbers(self) -> range:
        """Numbers of the episodes: number i is sample i % `samples` of instance i // `samples`."""
        return range(self.episodes * self.samples)

    async def play(self, seed: int, on_episode: Callable[[Episode], None] | None = None) -> list[Episode]:
        """Returns the episodes, played by the policies at their current weights; calls `on_episode` with each one."""
        policies = self.seat_policies()
        return await play_instances(self.runner, policies, self.numbers, seed, on_episode, samples=self.samples)


@dataclass
class Stage:
    """A part of a run: `steps` of `episodes` each from `source`, and the algorithm that trains on them.

    `configure_learners` sets the learners' settings for the stage. Every stage except the first starts with a fresh
    optimizer, and with the learners' current weights as their reference.
    """

    source: EpisodeSource
    algorithm: TextAlgorithm
    steps: int
    episodes: int
    name: str = ""
    configure_learners: Callable[[], None] = lambda: None


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
    def stage_first_episode(self) -> int:
        """Number of the stage's first episode."""
        return self.first_episode - self.stage_step * self.stage.episodes

    @property
    def progress(self) -> float:
        """Elapsed share of the stage, from 0 to below 1."""
        return self.stage_step / self.stage.steps


@dataclass(frozen=True)
class CollectedEpisodes:
    """The episodes of one step, the time of their rollout, and its metrics by policy. `replaced` are episodes that were
    played and are not trained on (text/rollouts/refill.py)."""

    position: StepPosition
    episodes: Sequence[Episode]
    timer: PhaseTimer
    metrics: Mapping[str, Metrics] = field(default_factory=dict)
    replaced: Sequence[Episode] = ()


@dataclass(frozen=True)
class TextUpdate:
    """The log of one step: its episodes, and metrics and phase times by policy, those of all as "team"."""

    episodes: Sequence[Episode]
    metrics: Mapping[str, Metrics]
    timers: Mapping[str, PhaseTimer]


@dataclass
class TextTrainer:
    """All components of a run of language agents (a `Trainer`, see loop.py).

    `algorithm_state` is the state that algorithms (by policy) and sources keep between steps. `worker_metrics` returns
    metrics of remote workers since the last call, for the timings. The run ends with an error if more than the share
    `max_failed` of the episodes of a step or an evaluation failed. `worker_context` makes a context that is open during
    training and holds other processes that play or train. `learners_are_remote`: learners run in other processes and
    are updated concurrently. `notes` are lines for the user about how the models run.
    """

    log_every: ClassVar[int] = 1
    can_save_any_time: ClassVar[bool] = True  # saving changes nothing

    stages: Sequence[Stage]
    learners: Mapping[str, Learner]
    evals: Sequence[TextEval]
    seed: int
    checkpoint_every: int = 10
    keep_every: int = 0
    record_every: int = 1
    max_failed: float = 0.5
    algorithm_state: AlgorithmState = field(default_factory=dict)
    worker_metrics: Callable[[], Metrics] = dict
    worker_context: Callable[[], AbstractContextManager[None]] = nullcontext
    learners_are_remote: bool = False
    ranks: ProcessGroup = SINGLE_PROCESS
    notes: Sequence[str] = ()
    resume_notes: Sequence[str] = ()

    # Set while the trainer is open.
    run: AnyRun = field(init=False, repr=False)
    callback: Callback = field(init=False, repr=False)
    event_loop: asyncio.Runner = field(init=False, repr=False)

    @property
    def policy_names(self) -> list[str]:
        return list(self.learners)

    @property
    def steps(self) -> int:
        """Number of training steps over all stages."""
        return sum(stage.steps for stage in self.stages)

    @contextmanager
    def open(self, run: AnyRun, callback: Callback) -> Iterator[None]:
        """Context with an event loop and the processes of `worker_context`."""
        with self.worker_context(), asyncio.Runner() as self.event_loop:
            self.run = run
            self.callback = callback
            if 0 < run.next_step < self.steps:
                self.position_of(run.next_step).stage.configure_learners()
            yield

    def run_async(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the event loop, below the caller's span."""

        async def keep() -> None:  # if the task had the result, `signal` would format it with Runner's handler
            results.append(await coroutine)

        results: list[T] = []
        self.event_loop.run(keep(), context=copy_context())
        return results[0]

    def position_of(self, step: int) -> StepPosition:
        """Returns the position of `step` in the run. Raises ValueError if the run has no such step."""
        first = number = 0
        for stage in self.stages:
            if step < first + stage.steps:
                return StepPosition(stage, step - first, number + (step - first) * stage.episodes)
            first = first + stage.steps
            number = number + stage.steps * stage.episodes
        raise ValueError(f"the run has {self.steps} steps, and {step} is none of them")

    def policy_state(self, policy: str) -> AlgorithmState:
        """Returns the state that the algorithm keeps for `policy` between steps; changes to it are saved with the
        run."""
        own: AlgorithmState = self.algorithm_state.setdefault("policies", {}).setdefault(policy, {})
        return own

    def enter_step(self, step: int) -> StepPosition:
        """Returns the position of `step`, and prepares the learners if it is the first of its stage. Writes the start
        of the stage to the state that sources read, since stages may differ in episodes per step."""
        position = self.position_of(step)
        self.algorithm_state[STAGE_START_KEY] = [step - position.stage_step, position.stage_first_episode]
        if position.stage_step == 0:
            position.stage.configure_learners()
            for learner in self.learners.values() if step > 0 else ():
                learner.start_stage()
        return position

    def collect(self, step: int) -> CollectedEpisodes:
        """Plays the episodes of `step` with the current weights."""
        position = self.enter_step(step)
        stage = position.stage
        timer = PhaseTimer()
        start = read_clocks()
        on_episode = self._count_episodes("playing", stage.episodes, self.callback.on_episode)
        playing = play_refilled(
            stage.source, stage.algorithm, position.episode_numbers, self.algorithm_state, on_episode
        )
        episodes, replaced = self.run_async(playing)
        timer.add_since("rollout", start)
        return CollectedEpisodes(position, episodes, timer, replaced=replaced)

    def _count_episodes(
        self, what: str, total: int, then: Callable[[Episode], None] | None = None
    ) -> Callable[[Episode], None]:
        """Returns a function to be called with each ended episode, which tells the callback how many there are; `then`
        is called, too. Groups that are played again (refill) are not counted above `total`."""
        ended = itertools.count(1)
        self.callback.on_progress(what, 0, total)

        def on_episode(episode: Episode) -> None:
            self.callback.on_progress(what, min(next(ended), total), total)
            if then:
                then(episode)

        return on_episode

    def update(self, step: int, collected: CollectedEpisodes) -> TextUpdate:
        """Assigns credit and updates every learner, together or, if they work in other processes, concurrently.
        Raises RunFailed, with the episodes recorded, if too many failed."""
        episodes = collected.episodes
        position = collected.position
        algorithm = position.stage.algorithm
        progress = position.progress
        self._check_failures(step, episodes)
        self.callback.on_progress("training", 0, 0)
        timers = {name: PhaseTimer.sum([collected.timer]) for name in [*self.learners, TEAM]}

        async def update_learners() -> list[Metrics]:
            updates = [
                LearnerUpdate(algorithm, learner, progress, self.policy_state(name), timers[name])
                for name, learner in self.learners.items()
            ]
            if self.learners_are_remote:
                return list(chain(*await asyncio.gather(*(run_updates([update], episodes) for update in updates))))
            return await run_updates(updates, episodes)

        start = read_clocks()
        learner_metrics = self.run_async(update_learners())
        timers[TEAM].add_since("train", start)
        metrics = {}
        for name, own in zip(self.learners, learner_metrics, strict=True):
            metrics[name] = policy_metrics(episodes, name) | own | collected.metrics.get(name, {})
        mixture = position.stage.source.observe([*collected.replaced, *episodes], self.algorithm_state)
        metrics[TEAM] = episode_metrics(episodes) | mixture
        return TextUpdate(episodes, metrics, timers)

    def log(self, step: int, updates: Sequence[TextUpdate]) -> Mapping[str, Metrics]:
        """Writes metrics, timings and episodes of the step to the run. Returns the metrics by policy."""
        (update,) = updates
        run = self.run
        episodes = update.episodes
        timers = update.timers
        for name in self.learners:
            run.log_metrics(step, name, update.metrics[name])
            run.log_timings(step, name, timers[name].metrics() | throughput(episodes, timers[name], name))
        run.log_metrics(step, TEAM, update.metrics[TEAM])
        if self.record_every and step % self.record_every == 0:
            run.write_episodes(step, list(episodes))
        timings = timers[TEAM].metrics() | throughput(episodes, timers[TEAM]) | self.worker_metrics()
        run.log_timings(step, TEAM, timings)
        run.log_workers(step)
        return update.metrics

    def evaluate(self, step: int, evaluation: TextEval) -> dict[str, Any]:
        """Plays an evaluation and returns its metrics. Raises RunFailed if too many of its episodes failed."""
        on_episode = self._count_episodes(f"evaluating {evaluation.name}", len(evaluation.numbers))
        episodes = self.run_async(evaluation.play(self.seed, on_episode))
        check_failures(episodes, self.max_failed, f"evaluation {evaluation.name}")
        outcomes = instance_outcomes(episodes[:: evaluation.samples])
        if outcomes and self.record_every:
            first = first_of_each_instance(episodes[:: evaluation.samples])
            self.run.write_eval_episodes(step, evaluation.name, first[:MAX_EVAL_EPISODES])
        return {
            **episode_metrics(episodes),
            **seat_returns(episodes),
            **sample_metrics(episodes, evaluation.samples),
            **outcomes,
        }

    def save(self, step: int, folder: Path) -> None:
        """Writes a folder per learner, and the state of algorithms and sources."""
        for name, learner in self.learners.items():
            learner.save(folder / name)
        (folder / STATE_FILE).write_text(json.dumps(self.algorithm_state))

    def load(self, checkpoint: Checkpoint) -> None:
        """Restores the learners, and the state of algorithms and sources."""
        for name in self.learners:
            self.learners[name].load(checkpoint.path / checkpoint.names[name])
        state = checkpoint.path / STATE_FILE
        self.algorithm_state.update(json.loads(state.read_text()) if state.exists() else {})

    def _check_failures(self, step: int, episodes: Sequence[Episode]) -> None:
        """Raises RunFailed if too many episodes of the step failed; writes them and a checkpoint of the previous step
        first."""
        try:
            check_failures(episodes, self.max_failed, f"step {step + 1}")
        except RunFailed:
            if self.run.next_step < step:
                save_checkpoint(self, self.run, step - 1, keep=False)
            self.run.write_episodes(step, list(episodes))
            raise


async def play_instances(
    runner: EpisodeRunner,
    seats: Mapping[Seat, Policy],
    numbers: Sequence[int],
    seed: int,
    on_episode: Callable[[Episode], None] | None = None,
    *,
    samples: int = 1,
) -> list[Episode]:
    """Plays episodes without branching, and returns them in the order of their `numbers`: number i is sample i %
    `samples` of instance i // `samples` of the runner's env. Calls `on_episode` with each one when it ends."""
    specs = []
    for instance, sample in (divmod(number, samples) for number in numbers):
        own = [sample] if sample else []  # sample 0 has the seed of an evaluation with `samples=1`
        specs.append(EpisodeSpec(instance, seats, derive_seed(seed, "exam", runner.name, instance, *own)))
    return await runner.play_all(specs, Branching(), on_episode)


def throughput(episodes: Sequence[Episode], timer: PhaseTimer, policy: str | None = None) -> Metrics:
    """Returns the throughput of one policy or, without `policy`, of all.

    `tokens_per_s` is sampled tokens per second of rollout (of the whole step if rollout and training overlap),
    `answers_per_s` answers per second of the whole step, `answers` the number of answers.
    """
    answers = answers_of(episodes, policy)
    tokens = sum(len(answer.token_ids) for answer in answers)
    whole = sum(timer.wall_s.values())
    rollout = timer.wall_s.get("rollout", whole)
    return {"tokens_per_s": tokens / rollout, "answers_per_s": len(answers) / whole, "answers": float(len(answers))}
