"""The entry point of training, for the command line and for Python: it finds the kind of run that a config describes,
creates or resumes the run, and trains."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from palestra.api.console import RANK, print_line
from palestra.api.extend import extend_config
from palestra.api.run_kinds import RunKind, run_kind
from palestra.core.config import Tree, check_folder_name, check_no_credentials, dump, override, parse, validate
from palestra.core.failures import write_error_file
from palestra.envs import is_vector_config
from palestra.envs.local import LOCAL_PREFIX
from palestra.runs import Run, check_config, diff_settings, explain_disk_errors, find_run
from palestra.runs.mirror.copy import mirror_run
from palestra.runs.mirror.store import check_store_url
from palestra.runs.sinks.factory import check_sinks
from palestra.runs.sinks.log_tailer import follow_run


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
    """A run that is open for training. `train(callbacks)` returns False if it was stopped."""

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
    kind = request.kind
    config = request.config
    setup = kind.build(config)
    for note in setup.notes:
        print_line(note)
    with (
        explain_disk_errors(),
        kind.open(setup, partial(_run_folder, request)) as run,
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
            run.replace_config(dump(validate(request.kind.config_type, request.stored)))
        on_error.pop_all()
    return run


def resumed_tree(path: Path, settings: Sequence[str]) -> Tree:
    """Returns the config of the run at `path`, changed by settings such as "steps=200". Raises
    ValueError as `find_run`, `check_config` and `extend_config` do."""
    tree = parse(check_config(find_run(path)), str(path / "config.yaml"))
    if not settings:
        return tree
    return extend_config(tree, settings, path)


def run_to_resume(request: LaunchRequest) -> Path | None:
    """Returns the run of the requested name, for a job that is started again; None if there is
    none. Raises ValueError if its config differs in more than `backend` and `mirror`."""
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
        change = f"mirror={json.dumps(mirror)}"
        if mirror == "none":
            change = "mirror=null"
        elif isinstance(tree.get("mirror"), dict):
            change = f"mirror.url={json.dumps(mirror)}"
        places = [*places, change]
    return override(tree, places)


def validate_config(kind: RunKind, tree: Tree) -> Any:
    """Returns the validated config. Raises ValueError, in one line for the other kind of env."""
    try:
        return validate(kind.config_type, tree)
    except ValueError:
        if mixed := _wrong_kind_message(tree):
            raise ValueError(mixed) from None
        raise


def _wrong_kind_message(tree: Tree) -> str:
    """Returns the message for a config whose policy types do not fit the kind of its env; "" if they do."""
    from palestra.core.config import type_choices
    from palestra.text.config import TextConfig
    from palestra.vector.config import VectorConfig

    policies = tree.get("policies")
    env = tree.get("env")
    if "population" in tree or not isinstance(policies, dict) or not isinstance(env, dict):
        return ""
    types = {str(policy.get("type")) for policy in policies.values() if isinstance(policy, dict)}
    talking = set(type_choices(TextConfig, "policies"))
    nets = set(type_choices(VectorConfig, "policies"))
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
