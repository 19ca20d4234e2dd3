"""The training loop of every run: collect, update, log, evaluate, checkpoint, stop.

A trainer (`Trainer`) does the work of one kind of run: text/training/trainer.py trains language agents,
text/training/async_rollouts.py does so while episodes are played ahead, vector/trainer.py trains networks in vectorised
envs. This module imports neither torch nor any concrete env, algorithm or backend.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from palestra.core.tracing import end_shared_span, shared_span, span
from palestra.core.types import Episode, Metrics
from palestra.core.user_functions import check_overrides
from palestra.parallel.process_group import ProcessGroup
from palestra.runs import Checkpoint
from palestra.runs.null_run import AnyRun
from palestra.runs.settings import resume_command

CHECKPOINT_INTERVAL_S = 600.0  # seconds of training that a killed run loses at most, if it can be saved at any step


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

    def on_progress(self, what: str, done: int, total: int) -> None:
        """Called when a part of a step begins, and after each of its episodes: `what` is "playing", "training" (both in
        text runs) or "evaluating NAME"; `done` of `total` episodes have ended (`total` 0: they are not counted)."""

    def on_eval(self, step: int, name: str, metrics: Mapping[str, Any]) -> None:
        """Called after evaluation `name`, played after step `step` (-1: before training)."""


def check_callbacks(callbacks: Any) -> None:
    """Raises ValueError unless `callbacks` are of subclasses of `Callback`, with its hooks only."""
    hooks = [name for name in vars(Callback) if name.startswith("on_")]
    for callback in callbacks if isinstance(callbacks, list | tuple) else [callbacks]:
        if not isinstance(callback, Callback) or callback is callbacks:
            raise ValueError(
                f"callbacks must be a list of objects of subclasses of palestra.Callback, with {', '.join(hooks)}, and "
                f"one is {callback!r:.60}"
            )
        name = type(callback).__name__
        if unknown := [hook for hook in dir(callback) if hook.startswith("on_") and hook not in hooks]:
            raise ValueError(f"callback {name} has {unknown[0]}, which is never called: there are {', '.join(hooks)}")
        check_overrides(type(callback), f"callback {name}")


@dataclass(kw_only=True)
class Evaluation:
    """A held-out evaluation, played every `every` steps (0: only before and after training)."""

    name: str
    episodes: int
    every: int = 0

    def is_due(self, step: int, steps: int) -> bool:
        """True before the first step (`step` = -1), after the last, and after every `every` steps in between."""
        return step + 1 in (0, steps) or (self.every > 0 and (step + 1) % self.every == 0)


Collected = TypeVar("Collected")
Update = TypeVar("Update")


class Trainer(Protocol[Collected, Update]):
    """Protocol of a trainer: one step of a run of its kind, and its checkpoints. The loop calls `collect`, `update`
    and, for logged steps, `log`, all inside `open`, and passes on what each returns.

    Evaluations, checkpoints and stops happen only after logged steps: after every `log_every` steps and the last.
    """

    @property
    def ranks(self) -> ProcessGroup:
        """The processes that run this loop on the same run."""

    @property
    def notes(self) -> Sequence[str]:
        """Lines for the user about the run, to be printed before it starts."""

    @property
    def resume_notes(self) -> Sequence[str]:
        """Lines for the user about the checkpoint that `load` read."""

    @property
    def policy_names(self) -> Sequence[str]:
        """Names of the policies that are trained."""

    @property
    def steps(self) -> int:
        """Number of training steps of the run."""

    @property
    def log_every(self) -> int: ...

    @property
    def checkpoint_every(self) -> int:
        """Steps between checkpoints; a multiple of `log_every`."""

    @property
    def can_save_any_time(self) -> bool:
        """True if `save` leaves the training that follows as it is, so that the clock may decide when to call it."""

    @property
    def keep_every(self) -> int:
        """Steps between checkpoints that are never pruned; a multiple of `log_every`. 0: only the last."""

    @property
    def evals(self) -> Sequence[Evaluation]:
        """The held-out evaluations that this process plays."""

    def open(self, run: AnyRun, callback: Callback) -> AbstractContextManager[None]:
        """Context for the steps from `run.next_step` on; holds the processes and event loops that they need."""

    def collect(self, step: int) -> Collected:
        """Plays and returns the episodes or the rollout of `step`."""

    def update(self, step: int, collected: Collected) -> Update:
        """Trains on what `collect` returned; returns what is logged. Raises RunFailed."""

    def log(self, step: int, updates: Sequence[Update]) -> Mapping[str, Metrics]:
        """Writes metrics and timings of the steps since the last logged one, of which `updates` are the results, to
        the run. Returns the metrics by policy, and those of all together as "team"."""

    def evaluate(self, step: int, evaluation: Any) -> dict[str, Any]:
        """Plays one of `evals` after `step`; returns its metrics. Raises RunFailed if many fail."""

    def save(self, step: int, folder: Path) -> None:
        """Writes the state after `step`: a folder for each of `policy_names`, and the rest of the training state."""

    def load(self, checkpoint: Checkpoint) -> None:
        """Restores the state that `save` wrote."""


def run_training(
    trainer: Trainer[Collected, Update],
    run: AnyRun,
    callback: Callback | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    *,
    checkpoint_interval_s: float = CHECKPOINT_INTERVAL_S,
) -> bool:
    """Trains from `run.next_step` on, inside the trainer's context. `should_stop` is called after each logged step and
    requests an early end.

    A checkpoint is written after every `checkpoint_every` and `keep_every` steps, and after a logged step that ends
    `checkpoint_interval_s` seconds or more after the last checkpoint. All ranks stop after the step in which
    `should_stop` returns True on one of them.

    Returns True if all steps are done, False if `should_stop` returned True; the run then has a checkpoint of its last
    step. Raises RunFailed if training cannot continue.
    """
    callback = callback or Callback()
    any_rank = trainer.ranks.any_rank
    saved_at = time.monotonic()
    updates: list[Update] = []  # since the last logged step
    with trainer.open(run, callback), trainer.ranks.explain_lost_rank(resume_command(run.path)):
        if run.next_step == 0:
            play_evals(trainer, run, -1, callback)
        for step in range(run.next_step, trainer.steps):
            updates.append(train_step(trainer, step))
            done = step + 1
            last = done == trainer.steps
            if done % trainer.log_every and not last:
                continue
            callback.on_step(step, trainer.log(step, updates))
            updates.clear()
            play_evals(trainer, run, step, callback)
            run.sync()
            stopping = any_rank(should_stop()) and not last
            waited = any_rank(time.monotonic() - saved_at >= checkpoint_interval_s)
            is_overdue = waited and not any_rank(not trainer.can_save_any_time)
            keep = last or (trainer.keep_every > 0 and done % trainer.keep_every == 0)
            if keep or stopping or is_overdue or done % trainer.checkpoint_every == 0:
                save_checkpoint(trainer, run, step, keep=keep)
                saved_at = time.monotonic()
            if stopping:
                return False
    return True


def train_step(trainer: Trainer[Collected, Update], step: int) -> Update:
    """Collects the data of `step` and trains on them; returns what is logged of the step."""
    with step_span(step):
        with span("collect"):
            collected = trainer.collect(step)
        with span("update"):
            update = trainer.update(step, collected)
    end_shared_span(f"step {step}")
    return update


def step_span(step: int) -> AbstractContextManager[Any]:
    """Context in which the span of `step` is current; it begins with the first episode that the step trains on."""
    return shared_span(f"step {step}", "step", step=step)


def play_evals(
    trainer: Trainer[Any, Any], run: AnyRun, step: int, callback: Callback, *, due_only: bool = True
) -> None:
    """Plays the evaluations due after `step` (without `due_only` all), and logs their metrics."""
    for evaluation in trainer.evals:
        if not due_only or evaluation.is_due(step, trainer.steps):
            callback.on_progress(f"evaluating {evaluation.name}", 0, 0)
            with span("evaluate", evaluation=evaluation.name, step=step):
                metrics = trainer.evaluate(step, evaluation)
            run.log_eval(step, evaluation.name, metrics)
            callback.on_eval(step, evaluation.name, metrics)


def save_checkpoint(trainer: Trainer[Any, Any], run: AnyRun, step: int, *, keep: bool) -> None:
    """Writes a checkpoint after `step`. With `keep` it is never pruned."""
    names = {name: name for name in trainer.policy_names}
    with span("checkpoint", step=step):
        run.checkpoint(step, lambda folder: trainer.save(step, folder), names, keep=keep)


def restore_checkpoint(trainer: Trainer[Any, Any], run: AnyRun) -> int:
    """Restores run and trainer from the newest intact checkpoint, on every rank; returns the next
    step. Raises ValueError if none of the checkpoints can be loaded, or a rank does not have it."""
    ranks = trainer.ranks
    with ranks.explain_lost_rank(resume_command(run.path)):
        checkpoint = run.resume()
        run.next_step, checkpoint = ranks.broadcast((run.next_step, checkpoint))
        if checkpoint and not ranks.all_ranks(checkpoint.path.exists()):
            raise ValueError(
                f"{checkpoint.path} is not on the machine of every rank: keep runs in a folder that all machines share"
            )
        if checkpoint:
            with checkpoint.explain_load_errors():
                trainer.load(checkpoint)
    return run.next_step


@dataclass
class PhaseTimer:
    """Wall-clock and CPU seconds by phase."""

    wall_s: dict[str, float] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)

    def add_since(self, phase: str, start: tuple[float, float], share: float = 1.0) -> None:
        """Adds a share of the time since `start`, a result of `read_clocks`, to `phase`."""
        wall, cpu = read_clocks()
        self.wall_s[phase] = self.wall_s.get(phase, 0.0) + share * (wall - start[0])
        self.cpu_s[phase] = self.cpu_s.get(phase, 0.0) + share * (cpu - start[1])

    @classmethod
    def sum(cls, timers: Sequence[PhaseTimer]) -> PhaseTimer:
        """Returns a timer with the seconds of all `timers`."""
        total = cls()
        for timer in timers:
            for phase, seconds in timer.wall_s.items():
                total.wall_s[phase] = total.wall_s.get(phase, 0.0) + seconds
                total.cpu_s[phase] = total.cpu_s.get(phase, 0.0) + timer.cpu_s[phase]
        return total

    def metrics(self) -> Metrics:
        """Returns the seconds as metrics `<phase>_s` (wall clock) and `<phase>_cpu_s`."""
        wall = {f"{phase}_s": seconds for phase, seconds in self.wall_s.items()}
        return wall | {f"{phase}_cpu_s": seconds for phase, seconds in self.cpu_s.items()}


def read_clocks() -> tuple[float, float]:
    """Returns the current wall-clock and CPU time of this process, in seconds."""
    return time.perf_counter(), time.process_time()
