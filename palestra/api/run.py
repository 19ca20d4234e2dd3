"""The entry point of training, for the command line and for Python: it finds the kind of run that a config describes,
creates or resumes the run, and trains."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from palestra.api.console import RANK, console, print_line, styled_text
from palestra.api.extend import complete_message, extend_config
from palestra.api.progress import PopulationBar, ProgressBar, format_summary
from palestra.core.config import Tree, check_folder_name, check_no_credentials, dump, override, parse, validate
from palestra.core.failures import write_error_file
from palestra.core.files import read_lines
from palestra.core.stop_signals import STOP_SIGNALS
from palestra.core.types import Episode, Metrics
from palestra.envs import is_vector_config
from palestra.envs.local import LOCAL_PREFIX
from palestra.parallel.tasks import TaskResult
from palestra.populations.scheduler import PlanCallback
from palestra.runs import Run, check_config, diff_settings, explain_disk_errors, find_run
from palestra.runs.checkpoints import TASKS_FILE
from palestra.runs.loop import Callback
from palestra.runs.mirror.copy import mirror_run
from palestra.runs.mirror.store import check_store_url
from palestra.runs.sinks.factory import check_sinks
from palestra.runs.sinks.log_tailer import follow_run

STOPPING = "stopping after this step; again to stop now"


class RunKind(NamedTuple):
    """The functions that build and execute one kind of run: language agents, neural networks in vectorised envs, or
    populations.

    `config` is the config model; `check` and `build` build a setup from it, `check` without starting processes;
    `execute(setup, run, config, callbacks)` trains with a progress bar and returns False if it was stopped early;
    `open_context` opens the run's folder.
    """

    name: Literal["text", "vector", "population"]
    config: Any
    check: Callable[[Any], Any]
    build: Callable[[Any], Any]
    execute: Callable[..., bool]
    open_context: Callable[[Callable[[], Any]], Any] = lambda open_run: open_run()


@dataclass(frozen=True)
class LaunchRequest:
    """A checked and resolved training request: a config of `kind`, and the run to resume (None: a new one in
    `root`). `stored`, if given, becomes the config of the resumed run. With `exact_name` a new run has exactly
    `name`, or is refused."""

    kind: RunKind
    config: Any
    tree: Tree
    resume: Path | None = None
    name: str | None = None
    root: Path = Path("runs")
    stored: Tree | None = None
    exact_name: bool = False

    def check(self) -> None:
        """Raises ValueError if the parts of the config do not fit together. Starts no process."""
        from palestra.envs.remote.address import with_short_waits

        self.kind.check(validate_config(self.kind, with_short_waits(self.tree)))


class OpenRun(NamedTuple):
    """A run that is open for training. `train(callbacks)` trains the remaining steps; it returns False if it was
    stopped early."""

    kind: RunKind
    run: Any
    train: Callable[..., bool]


def run_request(
    tree: Tree,
    *,
    resume: Path | None = None,
    name: str | None = None,
    root: str | Path = "runs",
    stored: Tree | None = None,
) -> LaunchRequest:
    """Returns the checked request for the run that `tree` describes. Raises ValueError for mistakes in the config."""
    if resume is None:
        check_no_credentials(tree)  # first: other messages quote values
    kind = run_kind(tree)
    config = validate_config(kind, tree)
    if is_vector_config(tree):
        from palestra.core.accel.jit import require_compiler

        require_compiler()  # before a run's folder is made and other processes start
    check_sinks(config.sinks)
    if config.mirror:
        check_store_url(config.mirror.url)
    _check_env_is_importable(config)
    return LaunchRequest(kind, config, tree, resume, name, Path(root), stored)


def _check_env_is_importable(config: Any) -> None:
    """Raises ValueError if other processes would have to create an env whose class only this process has."""
    envs = (getattr(config, "envs", None) or {"env": config.env}).values()
    local = next((env["type"] for env in envs if str(env.get("type", "")).startswith(LOCAL_PREFIX)), None)
    backend = getattr(config, "backend", None)
    parallel = {
        f"backend: {{type: {getattr(backend, 'type', '')}}}": backend is not None and backend.type != "inline",
        "num_processes:": getattr(config, "num_processes", 1) > 1,
        "num_actors:": getattr(config, "num_actors", 0) > 0,
        "env.at:": any(env.get("at") for env in envs),
    }
    if local and (used := [key for key, on in parallel.items() if on]):
        raise ValueError(
            f'{used[0]} uses other processes, and env "{local}" exists only in this one, since its class cannot be '
            "imported by name: move the class to a module and use it from there, or train in this process "
            "(backend={'type': 'inline'})"
        )


@contextmanager
def open_run(request: LaunchRequest) -> Iterator[OpenRun]:
    """Context that builds everything, creates or resumes the run, mirrors it and feeds its sinks. An exception inside
    is also written to the run's error.txt."""
    kind, config = request.kind, request.config
    setup = kind.build(config)
    for note in getattr(setup, "notes", ()):
        print_line(note)
    with (
        explain_disk_errors(),
        kind.open_context(partial(_run_folder, request)) as run,
        explain_disk_errors(run.path),
        nullcontext() if RANK else write_error_file(run.path),
        mirror_run(run.path, None if RANK else config.mirror, print_line),
        follow_run(run.path, [] if RANK else config.sinks, print_line),  # ends first: its offsets are mirrored too
    ):
        yield OpenRun(kind, run, partial(kind.execute, setup, run, config))


def _run_folder(request: LaunchRequest) -> Run:
    config = request.config
    if not request.resume:
        name = check_folder_name(request.name or config.name)
        meta = {"seed": config.seed}
        return Run.create(request.root, dump(config), name, meta, exact_name=request.exact_name)
    with ExitStack() as on_error:
        run = on_error.enter_context(Run.open(request.resume))
        if request.stored:
            run.check_resume()  # before the config changes
            run.replace_config(dump(validate(request.kind.config, request.stored)))
        on_error.pop_all()
    return run


def resumed_tree(path: Path, settings: Sequence[str]) -> Tree:
    """Returns the config of the run at `path`, extended by settings such as "steps=200".

    Raises ValueError if `path` is not a run, or the settings change anything but its length.
    """
    tree = parse(check_config(find_run(path)), str(path / "config.yaml"))
    return extend_config(tree, settings, is_vector_config(tree)) if settings else tree


def run_to_resume(request: LaunchRequest) -> Path | None:
    """Returns the existing run with the name of the requested one, for a job that is started again; None if there is
    none.

    Raises ValueError if the two configs differ, except for `backend` and `mirror`, which may change at every resume.
    """
    path = request.root / check_folder_name(request.name or request.config.name)
    if not (path / "config.yaml").is_file():
        return None
    trees = [parse(text, str(path / "config.yaml")) for text in (check_config(path), dump(request.config))]
    stored, new = ({key: value for key, value in tree.items() if key not in ("backend", "mirror")} for tree in trees)
    if changed := diff_settings(stored, new):
        raise ValueError(
            f"--auto-resume: the run {path} has another config ({'; '.join(changed[:3])}): give the new one another "
            f"--name, or continue the old one with --resume {path}"
        )
    return path


def place_tree(tree: Tree, places: Sequence[str], mirror: str | None = None) -> Tree:
    """Returns the config with settings of `backend`, and with the URL of `mirror` changed ("none": no mirror); both may
    change at every resume."""
    if places and "population" not in tree and is_vector_config(tree):
        raise ValueError(
            "--backend, --workers and --address place the tasks of a population or the episodes of language agents; "
            "this config has neither"
        )
    if mirror:
        key = "mirror.url" if isinstance(tree.get("mirror"), dict) and mirror != "none" else "mirror"
        places = [*places, f"{key}={'null' if mirror == 'none' else json.dumps(mirror)}"]
    return override(tree, places)


# ---- kinds of runs


def run_kind(tree: Tree) -> RunKind:
    """Returns the kind of run that a config describes, from its population or env.

    Raises ValueError under torchrun for kinds that start processes themselves.
    """
    if "population" in tree:
        _refuse_torchrun("workers run a population's tasks: palestra train ... --workers N")
        from palestra.populations.build.build import build_population
        from palestra.populations.build.validation import population_config

        config, build = population_config(tree), build_population
        return RunKind("population", config, build, build, _execute_population)
    if is_vector_config(tree):
        _refuse_torchrun("networks train on several processes with num_processes: N in the config")
        from palestra.runs import loop
        from palestra.vector import config as vector_config
        from palestra.vector.build import build as vector

        execute = partial(_execute, loop.restore_checkpoint, loop.run_training)
        build_functions = vector.check_vector_run, vector.build_vector_run
        return RunKind("vector", vector_config.VectorConfig, *build_functions, execute)
    from palestra.text import config as text_config
    from palestra.text.build import build as text
    from palestra.text.build.distributed import build as build_text
    from palestra.text.training.ranks import distributed_run, restore_checkpoint, run_training

    execute = partial(_execute, restore_checkpoint, run_training)
    return RunKind("text", text_config.TextConfig, text.build, build_text, execute, distributed_run)


def _refuse_torchrun(instead: str) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(f"torchrun is for language agents; {instead}")


def validate_config(kind: RunKind, tree: Tree) -> Any:
    """Returns the validated config. Raises ValueError for mistakes, with one line for a config that was written for the
    other kind of env."""
    try:
        return validate(kind.config, tree)
    except ValueError:
        if mixed := _wrong_kind_message(tree):
            raise ValueError(mixed) from None
        raise


def _wrong_kind_message(tree: Tree) -> str:
    """Returns the message for a config whose policy types do not fit the kind of its env; "" if they do."""
    from palestra.core.config import type_choices
    from palestra.text.config import TextConfig
    from palestra.vector.config import VectorConfig

    policies, env = tree.get("policies"), tree.get("env")
    if "population" in tree or not isinstance(policies, dict) or not isinstance(env, dict):
        return ""
    types = {str(policy.get("type")) for policy in policies.values() if isinstance(policy, dict)}
    talking, nets = set(type_choices(TextConfig, "policies")), set(type_choices(VectorConfig, "policies"))
    if is_vector_config(tree) and types & (talking - nets):
        return (
            f'env "{env["type"]}" is a vector env, which small networks play, and this config has language agents: '
            "start from one of configs/games, or name a text env (`palestra info` lists them)"
        )
    if not is_vector_config(tree) and types & (nets - talking):
        return (
            f'env "{env.get("type")}" is a text env, which language agents play, and this config has small networks: '
            "start from configs/demo.yaml, or name a vector env (`palestra info` lists them)"
        )
    return ""


# ---- training with a progress bar


def _execute(
    restore: Callable[[Any, Any], int],
    train: Callable[..., bool],
    setup: Any,
    run: Any,
    config: Any,
    callbacks: Sequence[Callback] = (),
) -> bool:
    """Trains a text or vector run, starting from its newest checkpoint. Returns False if it was stopped early."""
    start = restore(setup, run)
    what = f"{config.env_label}, {', '.join(setup.policy_names)} by {config.algorithm_label}"
    console.print(styled_text("run ", (str(run.path), "bold"), f": {what}"), soft_wrap=True)
    for line in [*run.skipped_checkpoints, *getattr(setup, "resume_notes", ())]:
        print_line(line)
    if start >= setup.steps:
        tree = config.model_dump(mode="json")
        print_line(complete_message(tree, is_vector_config(tree)))
    elif start:
        console.print(f"resuming after {start} steps")
    elif run.num_discarded_steps:
        print_line(f"no checkpoint yet: starts from the beginning, {run.num_discarded_steps} steps are lost")
    with (
        ProgressBar(setup.steps, start, config.model_dump(mode="json"), console) as bar,
        StopOnInterrupt() as interrupted,
    ):
        return train(setup, run, CallbackList([bar, *callbacks]), _stop_requested(interrupted, callbacks))


def _execute_population(setup: Any, run: Any, config: Any, callbacks: Sequence[Callback] = ()) -> bool:
    """Runs the remaining tasks of a population plan. Returns False if it was stopped early."""
    from palestra.populations.build.build import run_population

    what = f"{config.env_label}, {config.population.type} by {config.oracle.type}, {setup.at_once} at once"
    console.print(styled_text("run ", (str(run.path), "bold"), f": {what}"), soft_wrap=True)
    if start := len(read_lines(run.path / TASKS_FILE)):
        console.print(f"resuming after {start} tasks")
    with PopulationBar(setup.plan.summary, console) as bar, StopOnInterrupt() as interrupted:
        tasks = TaskCallbacks(bar, CallbackList(callbacks))
        done = run_population(setup, run, tasks, _stop_requested(interrupted, callbacks))
    if done and start and len(read_lines(run.path / TASKS_FILE)) == start:
        print_line(complete_message(config.model_dump(mode="json")))
    if done:
        console.print(format_summary(setup.plan.summary()))
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

    def on_eval(self, step: int, name: str, metrics: Mapping[str, Any]) -> None:
        for callback in self.callbacks:
            callback.on_eval(step, name, metrics)


class TaskCallbacks(PlanCallback):
    """Calls the progress bar of a population and `callback.on_step` after each of its tasks."""

    def __init__(self, bar: PlanCallback, callback: Callback) -> None:
        self.bar, self.callback = bar, callback

    def on_task_done(self, number: int, done: TaskResult, lines: Mapping[str, Metrics]) -> None:
        self.bar.on_task_done(number, done, lines)
        self.callback.on_step(number, lines)


class StopOnInterrupt:
    """Context that yields a function which returns True after the first Ctrl-C or SIGTERM; a second one raises
    KeyboardInterrupt.

    Under torchrun repeated signals count once: torchrun forwards its signals, and kills processes that take more than
    half a minute. Only the main thread receives signals: in other threads the function always returns False.
    """

    def __enter__(self) -> Callable[[], bool]:
        self.stop_requested, self.under_torchrun = False, "RANK" in os.environ
        is_main = threading.current_thread() is threading.main_thread()
        self.before = {each: signal.signal(each, self._request_stop) for each in STOP_SIGNALS if is_main}
        return lambda: self.stop_requested

    def _request_stop(self, *_: object) -> None:
        if self.stop_requested:
            return
        self.stop_requested = True
        if not self.under_torchrun:
            for each in self.before:
                signal.signal(each, _interrupt)
        with suppress(RuntimeError):  # the signal came while a line was being printed
            print_line(STOPPING)

    def __exit__(self, *_: object) -> None:
        for each, handler in self.before.items():
            signal.signal(each, handler)


def _interrupt(*_: object) -> None:
    """Raises KeyboardInterrupt. asyncio replaces Python's own handler by one that waits for the training pass in
    progress, but does not replace this one."""
    logging.getLogger("asyncio").addFilter(_is_no_interrupt)
    raise KeyboardInterrupt


def _is_no_interrupt(record: logging.LogRecord) -> bool:
    """Returns False for asyncio's report of a task in which KeyboardInterrupt was raised; it has a long traceback."""
    return not (record.exc_info and isinstance(record.exc_info[1], KeyboardInterrupt))
