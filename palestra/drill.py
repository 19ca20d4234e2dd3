"""The loop for vectorised games: sweep, credit, learn, keep. It knows no env and no algorithm by name."""

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
    """All policies of a run that learn, and what teaches them."""

    @property
    def names(self) -> Sequence[str]: ...
    def players(self, progress: float) -> Sequence[Player]: ...
    def greedy(self) -> Sequence[Player]: ...
    def update(self, batch: Batch, progress: float) -> dict[str, Metrics]: ...
    def members(self) -> dict[str, Callable[[Path], None]]: ...
    def write(self, folder: Path) -> None: ...
    def read(self, folder: Path) -> None: ...


@dataclass
class GamesExam:
    """Held-out games: `episodes` of them, played at best by the learner's policies and by whom `others` names, after
    every `every` steps (0: only before and after)."""

    name: str
    env: VectorEnv
    episodes: int
    players: Callable[[], Sequence[Player]]
    every: int = 0

    def due(self, step: int, steps: int) -> bool:
        return step + 1 in (0, steps) or (self.every > 0 and (step + 1) % self.every == 0)


def just(thing: Any) -> list[Any]:
    """Every process's `thing`, where there is one process."""
    return [thing]


@dataclass
class Drill:
    """Everything a run consists of. A step is one sweep of `horizon` moves in all games, and what is learned from it;
    the log has a line for every `log_every` steps. `others` play the seats that do not learn. Of several `processes`
    this is number `rank`; `gather` gives each the things of all."""

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
        """The policies that learn."""
        return list(self.learner.names)

    @property
    def games(self) -> int:
        return self.sweeper.env.games

    def seeds(self, *key: object) -> np.ndarray:
        """Seeds of games that no exam has: those of exams are below 2**32."""
        first = derive(self.seed, "games", self.rank, *key) >> 1 | 1 << 33
        return first + np.arange(self.games)


class Record(Protocol):
    """What the loop needs of a run."""

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
    """Sweep, credit, learn, keep; from `run.next_step` on. True when all steps are done, False when `stop` said so (the
    run then has a checkpoint).

    Raises RunFailed where an env fails, where a reward is no finite number, and where a loss is none any more, naming
    step, policy, seats and the last checkpoint.
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
    """Writes a line for each policy and one for all together, which it returns."""
    lines = Tally.merged(setup.gather(tally)).lines()
    env_steps = float((step + 1) * setup.horizon * setup.games * setup.processes)
    for name, line in lines.items():
        run.log(step, name, {"env_steps": env_steps} | line)
    played = lines[TEAM]["env_steps_here"]
    run.time(step, TEAM, clock.figures() | {"env_steps_per_s": played / sum(clock.wall.values())})
    return lines[TEAM] | {"env_steps": env_steps}


def examine(setup: Drill, run: Record, step: int, watcher: Watcher) -> None:
    """Plays the exams that are due after `step` and notes their figures in the run."""
    for exam in setup.exams:
        if exam.due(step, setup.steps):
            figures = play_exam(exam.env, exam.players(), exam.episodes, derive(setup.seed, "exam", exam.name))
            run.eval(step, exam.name, figures)
            watcher.exam(step, exam.name, figures)


def play_exam(env: VectorEnv, players: Sequence[Player], episodes: int, seed: int) -> dict[str, Any]:
    """Figures of `episodes` games from seeds 0 on: the first so many of each place, so that long ones count as much."""
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
    """A checkpoint after `step`: a folder for each policy that learned, and one for what training goes on from. Games
    of an env that cannot be saved begin anew, here as after a resume."""
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
    """Takes the run back to its newest checkpoint, learner and games with it; returns the step to go on with."""
    checkpoint = run.resume()
    run.next_step, checkpoint = setup.gather((run.next_step, checkpoint))[0]
    if checkpoint:
        with checkpoint.loading():
            _load(setup, checkpoint.path / f"training-{setup.rank}", run.next_step - 1)
    return run.next_step


def _load(setup: Drill, folder: Path, step: int) -> None:
    """Learner and games as they were after `step`."""
    setup.learner.read(folder)
    if (folder / "games.safetensors").exists():
        saved = read_arrays(folder / "games.safetensors")
        setup.sweeper.load(saved, [*setup.learner.players(0.0), *setup.others])
    else:
        setup.sweeper.restart(setup.seeds(step))
