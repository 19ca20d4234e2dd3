"""Training loop for vectorised envs: collect a rollout, update, log, checkpoint. It depends on no env and no algorithm
by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from palestra.envs.vector.base import VectorEnv
from palestra.files import read_arrays, write_arrays
from palestra.policies.vector import VectorPolicy
from palestra.rollouts.actors import ActorPool
from palestra.rollouts.failures import RunFailed
from palestra.rollouts.vector_metrics import EndedEpisodes, VectorMetrics, all_episodes_done, evaluation_metrics
from palestra.rollouts.vector_rollout import VectorRollout, nonfinite_loss_advice
from palestra.runs import Checkpoint
from palestra.seeding import derive_seed
from palestra.training.loop import Callback, PhaseTimer, read_clocks
from palestra.types import TEAM, Metrics, RolloutBatch, Seat


class VectorLearner(Protocol):
    """All trained policies of a run and their update rule."""

    @property
    def names(self) -> Sequence[str]:
        """Names of the policies."""
        ...

    def rollout_policies(self, progress: float) -> Sequence[VectorPolicy]:
        """Players for training rollouts; `progress` is the elapsed share of the run, from 0 to 1."""
        ...

    def greedy_policies(self) -> Sequence[VectorPolicy]:
        """Players for evaluation, which act greedily."""
        ...

    def update(self, batch: RolloutBatch, progress: float) -> dict[str, Metrics]:
        """Trains on one rollout. Returns metrics by policy. Raises FloatingPointError if a loss is not finite."""
        ...

    def member_writers(self) -> dict[str, Callable[[Path], None]]:
        """Functions that write each policy's acting weights to a folder, by name."""
        ...

    def write_state(self, folder: Path) -> None:
        """Writes the training state."""
        ...

    def read_state(self, folder: Path) -> None:
        """Restores the training state."""
        ...


@dataclass
class VectorEval:
    """A held-out evaluation of `episodes` episodes in `env`, after every `every` steps (0: only before and after
    training). `players` returns players for all seats."""

    name: str
    env: VectorEnv
    episodes: int
    players: Callable[[], Sequence[VectorPolicy]]
    every: int = 0

    def is_due(self, step: int, steps: int) -> bool:
        """True before the first step (`step` = -1), after the last, and after every `every` steps in between."""
        return step + 1 in (0, steps) or (self.every > 0 and (step + 1) % self.every == 0)


def gather_single(thing: Any) -> list[Any]:
    """All-gather for a single process: a list with `thing` alone."""
    return [thing]


@dataclass
class VectorSetup:
    """Everything a run consists of.

    A step is one rollout of `rollout_length` joint steps in every env copy, and one update on it. Metrics are logged
    every `log_every` steps. `fixed_players` play the seats that are not trained. This is process `rank` of
    `num_processes`; `all_gather` all-gathers one object per process.
    """

    rollout: VectorRollout | ActorPool
    learner: VectorLearner
    fixed_players: Sequence[VectorPolicy]
    evals: Sequence[VectorEval]
    seats: Mapping[Seat, str]
    seed: int
    steps: int
    rollout_length: int
    log_every: int = 1
    checkpoint_every: int = 100
    keep_every: int = 0
    rank: int = 0
    num_processes: int = 1
    all_gather: Callable[[Any], list[Any]] = gather_single

    @property
    def policy_names(self) -> list[str]:
        """Names of the policies that are trained."""
        return list(self.learner.names)

    @property
    def num_envs(self) -> int:
        """Number of env copies in this process."""
        return self.rollout.env.num_envs

    def env_seeds(self, *key: object) -> np.ndarray:
        """Seeds of this process's env copies, int64 [B], derived from `key`. They are at least 2**33; evaluations use
        seeds below 2**32."""
        first = derive_seed(self.seed, "games", self.rank, *key) >> 1 | 1 << 33
        return first + np.arange(self.num_envs)


class RunProtocol(Protocol):
    """The part of a run that the loop writes to."""

    next_step: int

    @property
    def path(self) -> Path: ...
    def log_metrics(self, step: int, policy: str, metrics: Mapping[str, Any]) -> None: ...
    def log_timings(self, step: int, policy: str, figures: Mapping[str, Any]) -> None: ...
    def log_eval(self, step: int, name: str, figures: Mapping[str, Any]) -> None: ...
    def sync(self) -> None: ...
    def resume(self) -> Checkpoint | None: ...
    def checkpoint(
        self, step: int, write: Callable[[Path], None], info: Mapping[str, Any] | None = None, keep: bool = False
    ) -> Any: ...


def train_vector(
    setup: VectorSetup,
    run: RunProtocol,
    callback: Callback | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Runs the loop from `run.next_step` on. `should_stop` is called after each logged step and requests an early end.

    Returns True if all steps are done, False if `should_stop` returned True; the run then has a checkpoint. Raises
    RunFailed if an env fails, a reward is not finite, or a loss is not finite; the message names step, policy, seats
    and the last checkpoint.
    """
    callback = callback or Callback()
    if run.next_step == 0:
        run_evals(setup, run, -1, callback)
    tally, clock = VectorMetrics(setup.learner.names, setup.seats), PhaseTimer()
    for step in range(run.next_step, setup.steps):
        progress, start = step / setup.steps, read_clocks()
        players = [*setup.learner.rollout_policies(progress), *setup.fixed_players]
        batch = setup.rollout.collect(players, setup.rollout_length, derive_seed(setup.seed, "sweep", step, setup.rank))
        clock.add_since("rollout", start)
        start = read_clocks()
        try:
            metrics = setup.learner.update(batch, progress)
        except FloatingPointError as error:
            raise RunFailed(_diverged(setup, run, step, batch, error)) from error
        tally.add(batch, metrics)
        clock.add_since("train", start)
        done = step + 1
        if done % setup.log_every and done != setup.steps:
            continue
        callback.on_step(step, log_step(setup, run, step, tally, clock))
        run_evals(setup, run, step, callback)
        run.sync()
        tally, clock = VectorMetrics(setup.learner.names, setup.seats), PhaseTimer()
        last = done == setup.steps
        stopping = setup.all_gather(should_stop())[0] and not last
        if last or stopping or done % setup.checkpoint_every == 0:
            save_checkpoint(setup, run, step, keep=last or bool(setup.keep_every and done % setup.keep_every == 0))
        if stopping:
            return False
    return True


def log_step(
    setup: VectorSetup, run: RunProtocol, step: int, tally: VectorMetrics, timer: PhaseTimer
) -> dict[str, Metrics]:
    """Writes metrics of each policy and of all together to the run, and returns them by policy."""
    env_steps = float((step + 1) * setup.rollout_length * setup.num_envs * setup.num_processes)
    found = VectorMetrics.merge(setup.all_gather(tally)).metrics_by_policy()
    lines = {name: {"env_steps": env_steps} | line for name, line in found.items()}
    for name, line in lines.items():
        run.log_metrics(step, name, line)
    played = lines[TEAM]["env_steps_here"]
    run.log_timings(step, TEAM, timer.metrics() | {"env_steps_per_s": played / sum(timer.wall_s.values())})
    return lines


def run_evals(setup: VectorSetup, run: RunProtocol, step: int, callback: Callback) -> None:
    """Plays the evaluations that are due after `step` and writes their metrics to the run."""
    for exam in setup.evals:
        if exam.is_due(step, setup.steps):
            metrics = play_eval(exam.env, exam.players(), exam.episodes, derive_seed(setup.seed, "exam", exam.name))
            run.log_eval(step, exam.name, metrics)
            callback.on_eval(step, exam.name, metrics)


def play_eval(env: VectorEnv, players: Sequence[VectorPolicy], episodes: int, seed: int) -> dict[str, Any]:
    """Plays evaluation episodes, with seeds from 0 on, and returns their metrics.

    Counts the same number of first episodes of every env copy, `episodes` in all. Counting the first episodes to end
    instead would favour short ones.
    """
    sweeper = VectorRollout(env, np.arange(env.num_envs))
    tally: list[EndedEpisodes] = []
    each = -(-episodes // env.num_envs)
    chunk = 0
    while not tally or not all_episodes_done(tally, env.num_envs, each):
        batch = sweeper.collect(players, 32, derive_seed(seed, chunk))
        tally.append({name: values.copy() for name, values in batch.episode_stats.items()})
        chunk += 1
    return evaluation_metrics(tally, env.seats, each, episodes)


def _diverged(setup: VectorSetup, run: RunProtocol, step: int, batch: RolloutBatch, error: FloatingPointError) -> str:
    policy = getattr(error, "policy", "")
    seats = ", ".join(seat for seat, name in setup.seats.items() if name == policy)
    kept = run.next_step
    checkpoint = f"the last good checkpoint is after step {kept}" if kept else "there is no checkpoint yet"
    return (
        f"step {step + 1}: {error} (seats: {seats or 'all'}); {checkpoint} in {run.path}. "
        f"{nonfinite_loss_advice(setup.rollout.env, batch)}"
    )


def save_checkpoint(setup: VectorSetup, run: RunProtocol, step: int, *, keep: bool) -> None:
    """Writes a checkpoint after `step`: a folder per trained policy, and one per process with the training state.

    If the env cannot save its state, its episodes start over both here and after a resume, so that both continue
    equally.
    """
    games = setup.rollout.save()
    if games is None:
        setup.rollout.restart(setup.env_seeds(step))

    def write(folder: Path) -> None:
        folder = Path(setup.all_gather(str(folder))[0])
        if setup.rank == 0:
            for name, write_member in setup.learner.member_writers().items():
                write_member(folder / name)
        setup.learner.write_state(folder / f"training-{setup.rank}")
        if games is not None:
            write_arrays(folder / f"training-{setup.rank}" / "env_state.safetensors", games)
        setup.all_gather(None)  # the folder is complete when all have written

    run.checkpoint(step, write, {"names": {name: name for name in setup.learner.names}}, keep=keep)


def restore_checkpoint(setup: VectorSetup, run: RunProtocol) -> int:
    """Restores the run, learner and env state from the newest intact checkpoint. Returns the next step to train.

    Raises ValueError if the run has checkpoints and none can be loaded.
    """
    checkpoint = run.resume()
    run.next_step, checkpoint = setup.all_gather((run.next_step, checkpoint))[0]
    if checkpoint:
        with checkpoint.explain_load_errors():
            _load(setup, checkpoint.path / f"training-{setup.rank}", run.next_step - 1)
    return run.next_step


def _load(setup: VectorSetup, folder: Path, step: int) -> None:
    """Restores learner and env state as they were after `step`."""
    setup.learner.read_state(folder)
    if (folder / "env_state.safetensors").exists():
        saved = read_arrays(folder / "env_state.safetensors")
        setup.rollout.load(saved, [*setup.learner.rollout_policies(0.0), *setup.fixed_players])
    else:
        setup.rollout.restart(setup.env_seeds(step))
