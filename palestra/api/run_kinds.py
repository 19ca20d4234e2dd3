"""The kinds of runs: language agents, networks in vectorised envs, and populations.

Each is found by its config, builds the parts of a run, and trains with a progress bar. Their rooms load when used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

from palestra.api.console import console, print_line, styled_text
from palestra.api.extend import complete_message
from palestra.api.interrupt import StopOnInterrupt
from palestra.api.progress import LiveChart, PopulationBar, ProgressBar, format_summary
from palestra.core.config import Tree
from palestra.core.files import read_lines
from palestra.core.types import Episode, Metrics
from palestra.envs import is_vector_config
from palestra.runs import Run
from palestra.runs.checkpoints import TASKS_FILE
from palestra.runs.loop import Callback, Trainer, restore_checkpoint, run_training
from palestra.runs.null_run import AnyRun, run_on_rank_zero

if TYPE_CHECKING:
    from palestra.populations.build.build import PopulationConfig, PopulationSetup
    from palestra.text.config import TextConfig
    from palestra.text.training.trainer import TextTrainer
    from palestra.vector.config import VectorConfig
    from palestra.vector.trainer import VectorTrainer


class RunKind:
    """A kind of run: `config_type` is its config, from which it builds the parts of a run, its setup."""

    name: Literal["text", "vector", "population"]
    config_type: Any
    """Model of the config."""

    def check(self, config: Any) -> None:
        """Raises ValueError if the parts of the config do not fit together. Starts no process."""
        self.build(config)

    def build(self, config: Any) -> Any:
        """Returns the parts of the run. Raises ValueError if they do not fit together."""
        raise NotImplementedError

    def open(self, setup: Any, open_run: Callable[[], Run]) -> AbstractContextManager[AnyRun]:
        """Context with this process's view of the run that `open_run` opens."""
        return open_run()

    def execute(self, setup: Any, run: Any, config: Any, callbacks: Sequence[Callback] = ()) -> bool:
        """Trains the remaining steps with a progress bar. Returns False if the run was stopped early."""
        return train_with_progress(setup, run, config, callbacks)


class TextRuns(RunKind):
    """Runs of language agents, also under torchrun."""

    name = "text"

    def __init__(self) -> None:
        from palestra.text.config import TextConfig

        self.config_type = TextConfig

    def check(self, config: TextConfig) -> None:
        from palestra.text.build.build import build

        build(config)

    def build(self, config: TextConfig) -> TextTrainer:
        from palestra.text.build.distributed import build

        bases = dict.fromkeys(getattr(policy, "base", None) for policy in config.policies.values())
        what = "starting"
        if not config.engine and any(bases):
            what = f"loading {', '.join(filter(None, bases))}"
            print_line(what)
        with console.busy(lambda: what):
            return build(config)

    def open(self, setup: TextTrainer, open_run: Callable[[], Run]) -> AbstractContextManager[AnyRun]:
        return run_on_rank_zero(setup.ranks, open_run)


class VectorRuns(RunKind):
    """Runs of networks; their other processes start in `build`."""

    name = "vector"

    def __init__(self) -> None:
        from palestra.vector.config import VectorConfig

        self.config_type = VectorConfig

    def check(self, config: VectorConfig) -> None:
        from palestra.vector.build.build import check_vector_run

        check_vector_run(config)

    def build(self, config: VectorConfig) -> VectorTrainer:
        from palestra.vector.build.build import build_vector_run

        return build_vector_run(config)


class PopulationRuns(RunKind):
    """Runs of populations, whose members are networks or language agents."""

    name = "population"

    def __init__(self, config_type: type[PopulationConfig]) -> None:
        self.config_type = config_type

    def build(self, config: PopulationConfig) -> PopulationSetup:
        from palestra.populations.build.build import build_population

        return build_population(config)

    def execute(
        self, setup: PopulationSetup, run: Any, config: PopulationConfig, callbacks: Sequence[Callback] = ()
    ) -> bool:
        from palestra.populations.build.build import run_population

        what = (
            f"{config.env_label}, {config.population.type} by {config.oracle.type}, {setup.backend.num_at_once} at once"
        )
        console.print(styled_text("run ", (str(run.path), "bold"), f": {what}"), soft_wrap=True)
        if start := len(read_lines(run.path / TASKS_FILE)):
            console.print(f"resuming after {start} tasks")
            for line in run.resume_notes():
                print_line(line)
        each = CallbackList(callbacks)
        with PopulationBar(setup.plan.summary, each, console) as bar, StopOnInterrupt() as interrupted:
            done = run_population(setup, run, bar, _stop_requested(interrupted, callbacks))
        if done and start and len(read_lines(run.path / TASKS_FILE)) == start:
            print_line(complete_message(config.model_dump(mode="json")))
        if done:
            console.print(format_summary(setup.plan.summary()))
        return done


def run_kind(tree: Tree) -> RunKind:
    """Returns the kind of run of a config, by its population or env. Raises ValueError under
    torchrun for kinds that start processes themselves."""
    if "population" in tree:
        _refuse_torchrun("workers run a population's tasks: palestra train ... --workers N")
        from palestra.populations.build.validation import population_config

        return PopulationRuns(population_config(tree))
    if is_vector_config(tree):
        _refuse_torchrun("networks train on several processes with num_processes: N in the config")
        return VectorRuns()
    return TextRuns()


def _refuse_torchrun(instead: str) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(f"torchrun is for language agents; {instead}")


def train_with_progress(
    trainer: Trainer[Any, Any], run: Any, config: TextConfig | VectorConfig, callbacks: Sequence[Callback]
) -> bool:
    """Trains a run from its newest checkpoint on. Returns False if it was stopped early."""
    start = restore_checkpoint(trainer, run)
    tree = config.model_dump(mode="json")
    what = f"{config.env_label}, {', '.join(trainer.policy_names)} by {config.algorithm_label}"
    console.print(styled_text("run ", (str(run.path), "bold"), f": {what}"), soft_wrap=True)
    for line in [*run.skipped_checkpoints, *trainer.resume_notes]:
        print_line(line)
    if start >= trainer.steps:
        print_line(complete_message(tree))
    elif start:
        console.print(f"resuming after {start} steps")
        for line in run.resume_notes():
            print_line(line)
    elif not run.is_new:
        message = "no checkpoint yet: starts from the beginning"
        if run.num_discarded_steps:
            message += f", {run.num_discarded_steps} steps are lost"
        print_line(message)
    charts: list[LiveChart] = []
    if console.is_jupyter and start < trainer.steps:
        charts.append(LiveChart(run.path))
    with ProgressBar(trainer.steps, start, tree, console) as bar, StopOnInterrupt() as interrupted:
        each = CallbackList([bar, *charts, *callbacks])
        done = run_training(trainer, run, each, _stop_requested(interrupted, callbacks))
    for chart in charts:
        chart.draw()
    return done


def _stop_requested(interrupted: Callable[[], bool], callbacks: Sequence[Callback]) -> Callable[[], bool]:
    return lambda: interrupted() or any(callback.stop_requested for callback in callbacks)


class CallbackList(Callback):
    """Calls each of `callbacks`, in order."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks = callbacks

    def on_step(self, step: int, metrics: Mapping[str, Metrics]) -> None:
        for callback in self.callbacks:
            callback.on_step(step, metrics)

    def on_episode(self, episode: Episode) -> None:
        for callback in self.callbacks:
            callback.on_episode(episode)

    def on_progress(self, what: str, done: int, total: int) -> None:
        for callback in self.callbacks:
            callback.on_progress(what, done, total)

    def on_eval(self, step: int, name: str, metrics: Mapping[str, Any]) -> None:
        for callback in self.callbacks:
            callback.on_eval(step, name, metrics)
