"""Training of networks in vectorised envs: collect a rollout, update on it. This module imports no
concrete env and no algorithm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from palestra.core.failures import RunFailed
from palestra.core.files import read_arrays, write_arrays
from palestra.core.seeding import derive_seed
from palestra.core.types import TEAM, Metrics, RolloutBatch, Seat
from palestra.envs.vector_base import GamesDiffer, VectorEnv
from palestra.parallel.process_group import SINGLE_PROCESS, ProcessGroup
from palestra.runs import Checkpoint
from palestra.runs.headline import DEV_EVAL
from palestra.runs.loop import Callback, Evaluation, PhaseTimer, read_clocks
from palestra.runs.null_run import AnyRun
from palestra.vector.learners.nets import NetLearner
from palestra.vector.learners.teams import JointLearner
from palestra.vector.policies.base import VectorPolicy
from palestra.vector.rollouts.actors import ActorPool
from palestra.vector.rollouts.metrics import (
    EndedEpisodes,
    VectorUpdate,
    all_episodes_done,
    evaluation_metrics,
    training_metrics,
)
from palestra.vector.rollouts.replay_recorder import ReplayRecorder
from palestra.vector.rollouts.rollout import VectorRollout, nonfinite_loss_advice

ENV_STATE_FILE = "env_state.safetensors"  # file in a checkpoint


@dataclass(kw_only=True)
class VectorEval(Evaluation):
    """A held-out evaluation in `env`. `players` returns players for all seats, `seats` names the
    policy of each seat. The first `replays` games are recorded (see `runs.replays`)."""

    env: VectorEnv
    players: Callable[[], Sequence[VectorPolicy]]
    seats: Mapping[Seat, str]
    replays: int = 0


FIRST_DEV_SEED = 1 << 31  # first env seed of an evaluation called "dev"; others begin at 0


@dataclass
class VectorTrainer:
    """All components of a run of networks (a `Trainer`, see loop.py).

    A step is one rollout of `rollout_length` joint steps in every env copy, and one update on it. `fixed_players` play
    the seats that are not trained; `seats` and `teams` name the policy and the team of each seat. `ranks` are the
    processes that train the same networks.
    """

    rollout: VectorRollout | ActorPool
    learner: NetLearner | JointLearner
    fixed_players: Sequence[VectorPolicy]
    evals: Sequence[VectorEval]
    seats: Mapping[Seat, str]
    teams: Mapping[Seat, str]
    seed: int
    steps: int
    rollout_length: int
    log_every: int = 1
    checkpoint_every: int = 100
    keep_every: int = 0
    ranks: ProcessGroup = SINGLE_PROCESS
    notes: Sequence[str] = ()  # about the env, to be printed before training
    resume_notes: list[str] = field(default_factory=list)  # about the checkpoint, likewise; set by `load`

    run: AnyRun = field(init=False, repr=False)  # set while the trainer is open

    @property
    def policy_names(self) -> list[str]:
        return list(self.learner.names)

    @property
    def can_save_any_time(self) -> bool:
        """True if the envs can save their state: otherwise their episodes start over at a checkpoint."""
        return self.rollout.save() is not None

    @property
    def num_envs(self) -> int:
        """Number of env copies in this process."""
        return self.rollout.env.num_envs

    def env_seeds(self, *key: object) -> np.ndarray:
        """Seeds of the env copies, int64 [B], at least 2**33; evaluations have them below 2**32."""
        first = derive_seed(self.seed, "games", self.ranks.rank, *key) >> 1 | 1 << 33
        return first + np.arange(self.num_envs)

    @contextmanager
    def open(self, run: AnyRun, callback: Callback) -> Iterator[None]:
        """Context in which the run is trained; ends the envs and the other processes."""
        self.run = run
        try:
            yield
        finally:
            self.close()
            self.ranks.leave()

    def close(self) -> None:
        self.rollout.close()
        for evaluation in self.evals:
            evaluation.env.close()

    def collect(self, step: int) -> tuple[RolloutBatch, PhaseTimer]:
        """Plays one rollout; returns it, valid until the next one, and the time it took. Raises
        RunFailed if an env fails or a reward is not finite."""
        timer = PhaseTimer()
        start = read_clocks()
        players = [*self.learner.rollout_policies(step / self.steps), *self.fixed_players]
        seed = derive_seed(self.seed, "sweep", step, self.ranks.rank)
        batch = self.rollout.collect(players, self.rollout_length, seed)
        timer.add_since("rollout", start)
        return batch, timer

    def update(self, step: int, collected: tuple[RolloutBatch, PhaseTimer]) -> VectorUpdate:
        """Trains on the rollout. Raises RunFailed if a loss is not finite; the message names step,
        policy, seats and the last checkpoint."""
        batch, timer = collected
        start = read_clocks()
        try:
            metrics = self.learner.update(batch, step / self.steps)
            self.learner.check_finite()
        except FloatingPointError as error:
            raise RunFailed(self._explain_divergence(step, batch, error)) from error
        timer.add_since("train", start)
        return VectorUpdate(batch.episode_stats, batch.rollout_metrics, batch.terminated.size, metrics, timer)

    def log(self, step: int, updates: Sequence[VectorUpdate]) -> dict[str, Metrics]:
        """Writes the metrics since the last log, by policy and of all together; returns them."""
        env_steps = float((step + 1) * self.rollout_length * self.num_envs * self.ranks.world_size)
        everywhere = list(chain.from_iterable(self.ranks.all_gather(updates)))
        metrics = training_metrics(everywhere, self.learner.names, self.seats, self.teams)
        lines = {name: {"env_steps": env_steps} | line for name, line in metrics.items()}
        for name, line in lines.items():
            self.run.log_metrics(step, name, line)
        timer = PhaseTimer.sum([update.timer for update in updates])
        per_second = lines[TEAM]["env_steps_here"] / sum(timer.wall_s.values())
        self.run.log_timings(step, TEAM, timer.metrics() | {"env_steps_per_s": per_second})
        return lines

    def evaluate(self, step: int, evaluation: VectorEval) -> dict[str, Any]:
        """Plays an evaluation, writes its replays to the run and returns its metrics. One called
        "dev" plays games of its own, since settings may be chosen by it."""
        seed = derive_seed(self.seed, "exam", evaluation.name)
        recorder = ReplayRecorder(evaluation.env, evaluation.replays)
        first = FIRST_DEV_SEED if evaluation.name == DEV_EVAL else 0
        teams = list(self.teams.values())
        metrics = play_eval(
            recorder, evaluation.players(), evaluation.episodes, seed, first_env_seed=first, teams=teams
        )
        if replays := recorder.replays():
            self.run.write_replays(step, evaluation.name, recorder.header(evaluation.seats), replays)
        return metrics

    def save(self, step: int, folder: Path) -> None:
        """Writes a folder per trained policy, and one per process with the training state.

        If the env cannot save its state, its episodes start over, both now and after a resume, so that a resumed run is
        identical.
        """
        env_state = self.rollout.save()
        if env_state is None:
            self.rollout.restart(self.env_seeds(step))
        folder = self.ranks.broadcast(folder)
        if self.ranks.is_rank_zero:
            for name, write_member in self.learner.member_writers().items():
                write_member(folder / name)
        self.learner.write_state(folder / f"training-{self.ranks.rank}")
        if env_state is not None:
            write_arrays(folder / f"training-{self.ranks.rank}" / ENV_STATE_FILE, env_state)
        self.ranks.broadcast(None)  # the folder is complete when all have written

    def load(self, checkpoint: Checkpoint) -> None:
        """Restores learner and env state. If the env's games are not those that were saved, they
        begin anew, and `resume_notes` says so."""
        folder = checkpoint.path / f"training-{self.ranks.rank}"
        self.learner.read_state(folder)
        why = self._load_games(folder / ENV_STATE_FILE)
        if why is not None:
            self.rollout.restart(self.env_seeds(checkpoint.step))
        if reasons := [reason for reason in self.ranks.all_gather(why) if reason]:
            self.resume_notes.append(
                f'env "{self.rollout.env.label}" is not a function of its seeds, so its games begin anew: the saved '
                f"ones could not be played again ({reasons[0]})"
            )

    def _load_games(self, path: Path) -> str | None:
        """Restores the games of a checkpoint; returns None, or why they must begin anew ("": they were not saved)."""
        if not path.exists():
            return ""
        players = [*self.learner.rollout_policies(0.0), *self.fixed_players]
        try:
            self.rollout.load(read_arrays(path), players)
        except GamesDiffer as error:
            return str(error)
        return None

    def _explain_divergence(self, step: int, batch: RolloutBatch, error: FloatingPointError) -> str:
        policy = getattr(error, "policy", "")
        seats = ", ".join(seat for seat, name in self.seats.items() if name == policy)
        kept = self.run.next_step
        checkpoint = f"the last good checkpoint is after {kept} steps" if kept else "there is no checkpoint yet"
        return (
            f"step {step + 1}: {error} (seats: {seats or 'all'}); {checkpoint} in {self.run.path}. "
            f"{nonfinite_loss_advice(self.rollout.env, batch)}"
        )


def play_eval(
    env: VectorEnv,
    players: Sequence[VectorPolicy],
    episodes: int,
    seed: int,
    *,
    first_env_seed: int = 0,
    teams: Sequence[str] = (),
) -> dict[str, Any]:
    """Plays evaluation episodes and returns their metrics. Env copy i has the seed `first_env_seed` + i; `seed` is the
    seed of the players, `teams` are those of the seats, in order. Raises RunFailed if an episode does not end.

    Counts the same number of first episodes of every env copy, `episodes` in all. Counting the episodes that end first
    would favour short ones.
    """
    rollout = VectorRollout(env, first_env_seed + np.arange(env.num_envs))
    parts: list[EndedEpisodes] = []
    each = -(-episodes // env.num_envs)
    chunk = 0
    while not parts or not all_episodes_done(parts, env.num_envs, each):
        batch = rollout.collect(players, 32, derive_seed(seed, chunk))
        rollout.check_episodes_end()
        parts.append({name: values.copy() for name, values in batch.episode_stats.items()})
        chunk += 1
    return evaluation_metrics(parts, env.seats, each, episodes, teams)
