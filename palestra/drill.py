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
from palestra.policies.vector import Player
from palestra.rollouts.actors import Actors
from palestra.rollouts.failures import RunFailed
from palestra.rollouts.play import derive
from palestra.rollouts.scores import Games, Tally, enough, figures_of
from palestra.rollouts.sweep import Sweeper, remedy
from palestra.runs import Checkpoint
from palestra.train import Clock, Watcher, now
from palestra.types import TEAM, Batch, Metrics, Seat


class GamesLearner(Protocol):
    """All trained policies of a run and their update rule."""

    @property
    def names(self) -> Sequence[str]:
        """Names of the policies."""
        ...

    def players(self, progress: float) -> Sequence[Player]:
        """Players for training rollouts; `progress` is the elapsed share of the run, from 0 to 1."""
        ...

    def greedy(self) -> Sequence[Player]:
        """Players for evaluation, which act greedily."""
        ...

    def update(self, batch: Batch, progress: float) -> dict[str, Metrics]:
        """Trains on one rollout. Returns metrics by policy. Raises FloatingPointError if a loss is not finite."""
        ...

    def members(self) -> dict[str, Callable[[Path], None]]:
        """Functions that write each policy's acting weights to a folder, by name."""
        ...

    def write(self, folder: Path) -> None:
        """Writes the training state."""
        ...

    def read(self, folder: Path) -> None:
        """Restores the training state."""
        ...


@dataclass
class GamesExam:
    """A held-out evaluation of `episodes` episodes in `env`, after every `every` steps (0: only before and after
    training). `players` returns players for all seats."""

    name: str
    env: VectorEnv
    episodes: int
    players: Callable[[], Sequence[Player]]
    every: int = 0

    def due(self, step: int, steps: int) -> bool:
        """True before the first step (`step` = -1), after the last, and after every `every` steps in between."""
        return step + 1 in (0, steps) or (self.every > 0 and (step + 1) % self.every == 0)


def just(thing: Any) -> list[Any]:
    """All-gather for a single process: a list with `thing` alone."""
    return [thing]


@dataclass
class Drill:
    """Everything a run consists of.

    A step is one rollout of `horizon` joint steps in every env copy, and one update on it. Metrics are logged every
    `log_every` steps. `others` play the seats that are not trained. This is process `rank` of `processes`; `gather`
    all-gathers one object per process.
    """

    sweeper: Sweeper | Actors
    learner: GamesLearner
    others: Sequence[Player]
    exams: Sequence[GamesExam]
    seats: Mapping[Seat, str]
    seed: int
    steps: int
    horizon: int
    log_every: int = 1
    checkpoint_every: int = 100
    keep_every: int = 0
    rank: int = 0
    processes: int = 1
    gather: Callable[[Any], list[Any]] = just

    @property
    def names(self) -> list[str]:
        """Names of the policies that are trained."""
        return list(self.learner.names)

    @property
    def games(self) -> int:
        """Number of env copies in this process."""
        return self.sweeper.env.games

    def seeds(self, *key: object) -> np.ndarray:
        """Seeds of this process's env copies, int64 [B], derived from `key`. They are at least 2**33; evaluations use
        seeds below 2**32."""
        first = derive(self.seed, "games", self.rank, *key) >> 1 | 1 << 33
        return first + np.arange(self.games)


class Record(Protocol):
    """The part of a run that the loop writes to."""

    next_step: int

    @property
    def path(self) -> Path: ...
    def log(self, step: int, policy: str, metrics: Mapping[str, Any]) -> None: ...
    def time(self, step: int, policy: str, figures: Mapping[str, Any]) -> None: ...
    def eval(self, step: int, name: str, figures: Mapping[str, Any]) -> None: ...
    def sync(self) -> None: ...
    def resume(self) -> Checkpoint | None: ...
    def checkpoint(
        self, step: int, write: Callable[[Path], None], info: Mapping[str, Any] | None = None, keep: bool = False
    ) -> Any: ...


def drill(setup: Drill, run: Record, watcher: Watcher | None = None, stop: Callable[[], bool] = lambda: False) -> bool:
    """Runs the loop from `run.next_step` on. `stop` is called after each logged step and requests an early end.

    Returns True if all steps are done, False if `stop` returned True; the run then has a checkpoint. Raises RunFailed
    if an env fails, a reward is not finite, or a loss is not finite; the message names step, policy, seats and the last
    checkpoint.
    """
    watcher = watcher or Watcher()
    if run.next_step == 0:
        examine(setup, run, -1, watcher)
    tally, clock = Tally(setup.learner.names, setup.seats), Clock()
    for step in range(run.next_step, setup.steps):
        progress, start = step / setup.steps, now()
        players = [*setup.learner.players(progress), *setup.others]
        batch = setup.sweeper.sweep(players, setup.horizon, derive(setup.seed, "sweep", step, setup.rank))
        clock.since("rollout", start)
        start = now()
        try:
            figures = setup.learner.update(batch, progress)
        except FloatingPointError as error:
            raise RunFailed(_diverged(setup, run, step, batch, error)) from error
        tally.add(batch, figures)
        clock.since("train", start)
        done = step + 1
        if done % setup.log_every and done != setup.steps:
            continue
        metrics = log(setup, run, step, tally, clock)
        watcher.step(step, metrics)
        examine(setup, run, step, watcher)
        run.sync()
        tally, clock = Tally(setup.learner.names, setup.seats), Clock()
        last = done == setup.steps
        stopping = setup.gather(stop())[0] and not last
        if last or stopping or done % setup.checkpoint_every == 0:
            save(setup, run, step, keep=last or bool(setup.keep_every and done % setup.keep_every == 0))
        if stopping:
            return False
    return True


def log(setup: Drill, run: Record, step: int, tally: Tally, clock: Clock) -> Metrics:
    """Writes metrics of each policy and of all together to the run. Returns the latter."""
    lines = Tally.merged(setup.gather(tally)).lines()
    env_steps = float((step + 1) * setup.horizon * setup.games * setup.processes)
    for name, line in lines.items():
        run.log(step, name, {"env_steps": env_steps} | line)
    played = lines[TEAM]["env_steps_here"]
    run.time(step, TEAM, clock.figures() | {"env_steps_per_s": played / sum(clock.wall.values())})
    return lines[TEAM] | {"env_steps": env_steps}


def examine(setup: Drill, run: Record, step: int, watcher: Watcher) -> None:
    """Plays the evaluations that are due after `step` and writes their metrics to the run."""
    for exam in setup.exams:
        if exam.due(step, setup.steps):
            figures = play_exam(exam.env, exam.players(), exam.episodes, derive(setup.seed, "exam", exam.name))
            run.eval(step, exam.name, figures)
            watcher.exam(step, exam.name, figures)


def play_exam(env: VectorEnv, players: Sequence[Player], episodes: int, seed: int) -> dict[str, Any]:
    """Plays evaluation episodes, with seeds from 0 on, and returns their metrics.

    Counts the same number of first episodes of every env copy, `episodes` in all. Counting the first episodes to end
    instead would favour short ones.
    """
    sweeper = Sweeper(env, np.arange(env.games))
    tally: list[Games] = []
    each = -(-episodes // env.games)
    chunk = 0
    while not tally or not enough(tally, env.games, each):
        batch = sweeper.sweep(players, 32, derive(seed, chunk))
        tally.append({name: values.copy() for name, values in batch.games.items()})
        chunk += 1
    return figures_of(tally, env.seats, each, episodes)


def _diverged(setup: Drill, run: Record, step: int, batch: Batch, error: FloatingPointError) -> str:
    policy = getattr(error, "policy", "")
    seats = ", ".join(seat for seat, name in setup.seats.items() if name == policy)
    kept = run.next_step
    checkpoint = f"the last good checkpoint is after step {kept}" if kept else "there is no checkpoint yet"
    return (
        f"step {step + 1}: {error} (seats: {seats or 'all'}); {checkpoint} in {run.path}. "
        f"{remedy(setup.sweeper.env, batch)}"
    )


def save(setup: Drill, run: Record, step: int, *, keep: bool) -> None:
    """Writes a checkpoint after `step`: a folder per trained policy, and one per process with the training state.

    If the env cannot save its state, its episodes start over both here and after a resume, so that both continue
    equally.
    """
    games = setup.sweeper.save()
    if games is None:
        setup.sweeper.restart(setup.seeds(step))

    def write(folder: Path) -> None:
        folder = Path(setup.gather(str(folder))[0])
        if setup.rank == 0:
            for name, write_member in setup.learner.members().items():
                write_member(folder / name)
        setup.learner.write(folder / f"training-{setup.rank}")
        if games is not None:
            write_arrays(folder / f"training-{setup.rank}" / "games.safetensors", games)
        setup.gather(None)  # the folder is complete when all have written

    run.checkpoint(step, write, {"names": {name: name for name in setup.learner.names}}, keep=keep)


def restore(setup: Drill, run: Record) -> int:
    """Restores the run, learner and env state from the newest intact checkpoint. Returns the next step to train.

    Raises ValueError if the run has checkpoints and none can be loaded.
    """
    checkpoint = run.resume()
    run.next_step, checkpoint = setup.gather((run.next_step, checkpoint))[0]
    if checkpoint:
        with checkpoint.loading():
            _load(setup, checkpoint.path / f"training-{setup.rank}", run.next_step - 1)
    return run.next_step


def _load(setup: Drill, folder: Path, step: int) -> None:
    """Restores learner and env state as they were after `step`."""
    setup.learner.read(folder)
    if (folder / "games.safetensors").exists():
        saved = read_arrays(folder / "games.safetensors")
        setup.sweeper.load(saved, [*setup.learner.players(0.0), *setup.others])
    else:
        setup.sweeper.restart(setup.seeds(step))
