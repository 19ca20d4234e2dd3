"""`palestra train`: trains the agents of a config, or resumes a run."""

from __future__ import annotations

import os
import shlex
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from palestra.api.console import RANK, console, interruptible, print_line, user_errors
from palestra.cli.mirror import fetch_and_print
from palestra.cli.report import print_cycles
from palestra.cli.runs import Root, print_alarms
from palestra.runs.settings import resume_command

if TYPE_CHECKING:
    from palestra.api.run import LaunchRequest
    from palestra.core.config import Tree

Settings = Annotated[list[str] | None, typer.Option("--set", help="change a setting: `--set algorithm.group_size=4`")]


def train(  # noqa: PLR0913 - a parameter for each option
    config: Annotated[
        Path | None,
        typer.Argument(help="a YAML config, whose keys `palestra config` describes; not needed with --resume"),
    ] = None,
    settings: Settings = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="length of the run: training steps of language agents, env steps of networks, iterations of PSRO",
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(help="resume this run from its last checkpoint; a mirror URL is downloaded to --root first"),
    ] = None,
    name: Annotated[str | None, typer.Option(help="name of the run (default: the config's)")] = None,
    auto_resume: Annotated[
        bool,
        typer.Option(
            "--auto-resume",
            help="resume the run of this name in --root if it is there, with this config; else start it: for jobs that "
            "a cluster starts again",
        ),
    ] = False,
    root: Root = Path("runs"),
    engine: Annotated[
        str | None,
        typer.Option(
            help="train on the server at this URL (`palestra serve`, Tinker, MinT), instead of in this process"
        ),
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="backend of rollouts, or of a population's tasks: inline, local or ray")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="number of parallel workers")] = None,
    address: Annotated[
        str | None, typer.Option(help="address of a Ray cluster; without it a local one is started")
    ] = None,
    mirror: Annotated[
        str | None,
        typer.Option(
            help="folder of runs in an object store to mirror the run to: s3://bucket/runs (default: no mirror)"
        ),
    ] = None,
    traces: Annotated[
        str | None,
        typer.Option(
            help="send OpenTelemetry traces to the collector at this URL: http://localhost:4318 (OTLP over HTTP)"
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="check the config, also with the servers that it names, print it, and stop"),
    ] = False,
) -> None:
    """Train the agents of a config.

    Examples:

        palestra train configs/demo.yaml
        palestra train configs/demo.yaml --steps 20 --set policies.planner.lr=3e-4
        palestra train configs/demo.yaml --engine http://127.0.0.1:8000
        palestra train configs/demo.yaml --backend ray --workers 4 --address auto
        palestra train configs/populations/kuhn_psro.yaml --workers 2
        palestra train --resume runs/demo
        palestra train --resume runs/demo --steps 200    # with more steps than it had
        palestra train configs/demo.yaml --mirror s3://bucket/runs
        palestra train --resume s3://bucket/runs/demo    # on another machine
        palestra train configs/demo.yaml --name demo --auto-resume    # starts the run, or resumes it
        torchrun --nproc-per-node 4 -m palestra train configs/demo.yaml

    `palestra config` describes every key of a config: `palestra config text` for a run, `palestra config grpo` for an
    algorithm.

    Ctrl-C or SIGTERM ends the run after the current step, with a checkpoint; a second one ends it at once.
    """
    places = [("type", backend), ("workers", workers), ("address", address)]
    changes = [*(settings or []), *([f"engine={engine}"] if engine else [])]
    with user_errors(), _interruptible(None):
        from palestra.core.config import check_no_credentials

        check_no_credentials({"--traces": traces, "--address": address, "--mirror": mirror, "--engine": engine})
        path, found_mirror = _find_run_to_resume(resume, root) if resume else (None, None)
    with user_errors(), console.busy(lambda: "" if dry_run else "starting"), _interruptible(path):
        # A file that cannot be read is refused before torch is loaded.
        tree = _config_tree(config, path, changes, steps)

        from palestra.api.run import place_tree, resumed_tree, run_request, run_to_resume
        from palestra.core.config import dump
        from palestra.core.tracing import tracing_to

        def with_places(tree: Tree) -> Tree:
            """Returns the config with the places and the mirror of the options."""
            return place_tree(
                tree, [f"backend.{key}={value}" for key, value in places if value], mirror or found_mirror
            )

        stored = tree if changes or steps else None
        request = run_request(with_places(tree), resume=path, name=name, root=root, stored=stored)
        if auto_resume and not resume:
            _bring_mirrored(request)
            request = replace(request, exact_name=True)
            if interrupted := run_to_resume(request):
                request = run_request(with_places(resumed_tree(interrupted, [])), resume=interrupted)
        if not dry_run:
            with tracing_to(traces):
                return _train(request)
        request.check()
        if RANK == 0:
            print(dump(request.config), end="")


def train_tree(tree: Tree, *, name: str, root: Path) -> None:
    """Trains a new run of a config."""
    from palestra.api.run import run_request

    with console.busy(lambda: "starting"), _interruptible(None):
        _train(run_request(tree, name=name, root=root))


def _find_run_to_resume(resume: str, root: Path) -> tuple[Path, str | None]:
    """Returns the folder of the run to resume, which is brought from a store if `resume` is a URL, and the folder of
    runs in that store (None: a path was given)."""
    from palestra.runs.mirror import is_store_url

    if not is_store_url(resume):
        return Path(resume), None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"torchrun starts several processes, and one must bring the run: palestra fetch {resume} --root {root}, "
            "then --resume the folder"
        )
    return fetch_and_print(resume, root), resume.rstrip("/").rpartition("/")[0]


def _bring_mirrored(request: LaunchRequest) -> None:
    """Brings the run of a request's name from its mirror, if that has one and the request's folder of runs has none."""
    mirror = request.config.mirror
    path = request.root / (request.name or request.config.name)
    if mirror is None or path.exists() or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return
    from palestra.runs.mirror.store import RunStore, run_url

    store = RunStore(run_url(mirror.url, path.name))
    copy = store.read_state()
    if copy and copy.progress:
        fetch_and_print(store.url, request.root)


def _config_tree(path: Path | None, resume: Path | None, settings: list[str], steps: int | None) -> dict[str, Any]:
    """Config tree of a new run, or of a resumed one, which `settings` and `steps` may extend. Raises ValueError if both
    or neither is named."""
    from palestra.core.config import load, override

    if (path is None) == (resume is None):
        raise ValueError("name a config to start a run, or --resume RUN to resume one")

    def read(settings: list[str]) -> dict[str, Any]:
        if path:
            return override(load(path), settings)
        from palestra.api.run import resumed_tree

        return resumed_tree(resume, settings)  # type: ignore[arg-type]

    tree = read(settings)
    if steps is None:
        return tree
    from palestra.api.extend import required_length_setting

    return read([*settings, f"{required_length_setting(tree, '--steps')}={steps}"])


def _train(request: LaunchRequest) -> None:
    """Trains a run, then prints its results. Raises RunFailed if nothing was learned."""
    from palestra.api.run import open_run

    with open_run(request) as opened, _interruptible(opened.run.path):
        done = opened.train()
        if RANK:
            return
        if not done:
            print_line(f"stopped; resume with: {resume_command(opened.run.path)}")
        elif opened.kind.name == "population":
            _print_population(opened.run.path, request.config)
        else:
            _print_results(opened.run.path)


def _print_results(path: Path) -> None:
    """Prints the results and alarms of a run and draws its curves. Raises RunFailed if nothing was learned."""
    from palestra.core.failures import RunFailed
    from palestra.evaluation.report.run_charts import plot_run
    from palestra.evaluation.report.run_report import explain_no_update, summary_table

    console.print(summary_table(path))
    print_line(f"curves: {plot_run(path)}")
    print_alarms(path)
    if why := explain_no_update(path):
        raise RunFailed(why)


def _print_population(path: Path, config: Any) -> None:
    from palestra.evaluation.report.population_plots import plot_population

    print_line(f"figures: {plot_population(path)}")
    if config.population.type != "xdo":  # whose members play no games
        print_cycles(path)
        print_line(f"standings: palestra league standings {shlex.quote(str(path))}")


def _interruptible(run: Path | None) -> AbstractContextManager[None]:
    """Context in which Ctrl-C prints one line and exits with 130. `run` None: there is none yet."""
    if run is None:
        return interruptible(" before the run began")
    return interruptible(f"; resume from the last checkpoint with: {resume_command(run)}")
