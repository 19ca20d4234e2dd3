"""The `palestra` command line. Heavy imports are deferred until a command needs them, so that --help is fast."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from palestra.cli.agents import publish, serve_agent
from palestra.cli.dashboard import dashboard
from palestra.cli.envs import serve_envs
from palestra.cli.league import league
from palestra.cli.play import collect, evaluate, play
from palestra.cli.report import plot, print_alarms, print_cycles, report, sync
from palestra.cli.serve import keys, serve, serve_sampler
from palestra.launch.console import RANK, console, print_line, user_errors

if TYPE_CHECKING:
    from palestra.launch.run import RunRequest

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False
)

Settings = Annotated[list[str] | None, typer.Option("--set", help="change a setting: `--set algorithm.group_size=4`")]
Root = Annotated[Path, typer.Option(help="the folder that holds runs")]


@app.callback()
def main() -> None:
    """Train multiple agents together."""
    sys.path.insert(0, os.getcwd())  # so that module:Class finds a user's env in the working directory


@app.command()
def train(
    config: Annotated[Path | None, typer.Argument(help="a YAML config; not needed with --resume")] = None,
    settings: Settings = None,
    resume: Annotated[
        Path | None, typer.Option(help="go on with this run, exactly where its last checkpoint is")
    ] = None,
    name: Annotated[str | None, typer.Option(help="name of the run (default: the config's)")] = None,
    root: Root = Path("runs"),
    engine: Annotated[
        str | None, typer.Option(help="train on the server at this URL (`palestra serve`, Tinker, MinT), not in here")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="where episodes are played, or a population's tasks done: inline, local or ray")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="how many play, or do a population's tasks, at once")
    ] = None,
    address: Annotated[str | None, typer.Option(help="of a Ray cluster; without it one is started here")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="check the config, print it resolved, and stop")] = False,
) -> None:
    """Train the agents of a config.

    Examples:

        palestra train configs/demo.yaml

        palestra train configs/demo.yaml --set steps=20 --set policies.planner.lr=3e-4

        palestra train configs/demo.yaml --engine http://127.0.0.1:8000

        palestra train configs/demo.yaml --backend ray --workers 4 --address auto

        palestra train configs/populations/kuhn_psro.yaml --workers 2

        palestra train --resume runs/demo

        palestra train --resume runs/demo --set steps=200    # with more steps than it had

        torchrun --nproc-per-node 4 -m palestra train configs/demo.yaml

    Ctrl-C ends the run after the current step, with a checkpoint; a second Ctrl-C ends it at once.
    """
    places = [("type", backend), ("workers", workers), ("address", address)]
    changes = [*(settings or []), *([f"engine={engine}"] if engine else [])]
    with user_errors(), _interruptible(resume):
        from palestra.config import dump
        from palestra.launch.run import place_tree, run_request

        tree = _config_tree(config, resume, changes)
        placed = place_tree(tree, [f"backend.{key}={value}" for key, value in places if value])
        request = run_request(placed, resume=resume, name=name, root=root, stored=tree if changes else None)
        if not dry_run:
            return _train(request)
        request.check()
        if RANK == 0:
            print(dump(request.config), end="")


def _config_tree(path: Path | None, resume: Path | None, settings: list[str]) -> dict[str, Any]:
    """Config tree of a new run, or of a resumed one, which `settings` may extend. Raises ValueError if both or neither
    is named."""
    from palestra.config import load, override
    from palestra.launch.run import resumed_tree

    if (path is None) == (resume is None):
        raise ValueError("name a config to start a run, or --resume RUN to go on with one")
    return resumed_tree(resume, settings) if resume else override(load(path), settings)  # type: ignore[arg-type]


def _train(request: RunRequest) -> None:
    """Trains a run, then prints its results. Raises RunFailed if nothing was learned."""
    from palestra.launch.run import open_run

    with open_run(request) as opened, _interruptible(opened.run.path):
        done = opened.train()
        if RANK:
            return
        if not done:
            again = f"palestra train --resume {shlex.quote(str(opened.run.path))}"
            print_line(f"stopped; go on with: {again}")
        elif opened.kind.name == "population":
            _print_population(opened.run.path, request.config)
        else:
            _print_results(opened.run.path)


def _print_results(path: Path) -> None:
    """Prints the results and alarms of a run and draws its curves. Raises RunFailed if nothing was learned."""
    from palestra.report.run_charts import plot_run
    from palestra.report.run_report import explain_no_update, summary_table
    from palestra.rollouts.failures import RunFailed

    console.print(summary_table(path))
    print_line(f"curves: {plot_run(path)}")
    print_alarms(path)
    if why := explain_no_update(path):
        raise RunFailed(why)


def _print_population(path: Path, config: Any) -> None:
    from palestra.report.population_plots import plot_population

    print_line(f"pictures: {plot_population(path)}")
    if config.population.type != "xdo":  # whose members play no games
        print_cycles(path)
        print_line(f"who beats whom: palestra league standings {shlex.quote(str(path))}")


@contextmanager
def _interruptible(run: Path | None) -> Iterator[None]:
    """Context in which a Ctrl-C that ends the run at once prints one line and exits with code 130. `run` is None before
    there is a run."""
    try:
        yield
    except KeyboardInterrupt:
        again = f"go on from the last checkpoint with: palestra train --resume {shlex.quote(str(run))}"
        print_line(f"interrupted; {again}" if run else "interrupted before the run began")
        raise typer.Exit(130) from None


@app.command()
def runs(root: Root = Path("runs")) -> None:
    """List the runs in a folder."""
    from palestra.runs import list_runs

    table = Table("run", "created", "steps", "checkpoint", "last evaluation")
    for run in list_runs(root):
        if run.damage:
            print_line(f"{run.path.name} is damaged: {run.damage}")
            continue
        last = run.evals[-1] if run.evals else None
        exam = eval_label(last) if last else "-"
        kept = f"after {run.checkpoint.step + 1}" if run.checkpoint else "-"
        table.add_row(run.path.name, run.created[:19].replace("T", " "), str(run.steps), kept, exam)
    console.print(table if table.row_count else f"no runs in {root}/")


def eval_label(exam: dict[str, Any]) -> str:
    """Formats an evaluation's name and main metric."""
    if "success" in exam:
        return f"{exam['name']} {exam['success']:.1%}"
    seats = {"": exam["return"]} if "return" in exam else exam["returns"]
    return " ".join([exam["name"], *(f"{seat} {own:.2f}".strip() for seat, own in seats.items())])


@app.command()
def info() -> None:
    """Show versions, the device, and the available envs, bases, algorithms and sandbox."""
    import torch
    import transformers

    import palestra
    from palestra.builders.text_config import TextConfig
    from palestra.builders.vector import VectorConfig
    from palestra.config import type_choices
    from palestra.engine.models import SHIPPED_BASES_DIR
    from palestra.engine.packaged_bases import PACKAGED_BASES, is_installed
    from palestra.envs import TEXT_ENVS, VECTOR_ENVS
    from palestra.launch.population import PopulationConfig

    table = Table(show_header=False)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({torch.get_num_threads()} threads)"
    bases = sorted(p.parent.name for p in SHIPPED_BASES_DIR.glob("*/config.json"))
    bases += [name if is_installed(name) else f"{name} ({base.install})" for name, base in PACKAGED_BASES.items()]
    for row in (
        ("palestra", palestra.__version__),
        ("torch, transformers", f"{torch.__version__}, {transformers.__version__}"),
        ("device", device),
        ("envs in words", ", ".join(sorted(TEXT_ENVS)) + ", or module:Class"),
        ("vectorised games", ", ".join(sorted(VECTOR_ENVS)) + ", or module:Class"),
        ("bases", ", ".join(bases) + ", a local folder, a GGUF file, or a hub name"),
        (
            "algorithms",
            f"{', '.join(type_choices(TextConfig, 'algorithm'))}; for networks "
            f"{', '.join(type_choices(VectorConfig, 'algorithm'))}",
        ),
        (
            "policies",
            f"{', '.join(type_choices(TextConfig, 'policies'))}; for networks "
            f"{', '.join(type_choices(VectorConfig, 'policies'))}",
        ),
        ("populations", ", ".join(type_choices(PopulationConfig, "population"))),
        ("sandbox", _sandbox()),
    ):
        table.add_row(*row)
    console.print(table)


def _sandbox() -> str:
    """Name of the sandbox that is available here, or why there is none."""
    from palestra.sandbox import open_sandbox

    try:
        return open_sandbox().name
    except ValueError as error:
        return f"none: {error}"


app.command(name="eval")(evaluate)
for command in (collect, dashboard, play, plot, publish, report, serve, serve_agent, serve_envs, serve_sampler, sync):
    app.command()(command)
app.add_typer(keys, name="keys")
app.add_typer(league, name="league")
