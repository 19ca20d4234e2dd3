"""The `palestra` command line. Heavy imports are deferred until a command needs them, so that --help is fast."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer
from rich.table import Table

import palestra
from palestra.cli.agents import publish, serve_agent
from palestra.cli.config import describe_config
from palestra.cli.dashboard import dashboard
from palestra.cli.envs import serve_envs
from palestra.cli.league import league
from palestra.cli.play import collect, evaluate, play
from palestra.cli.report import plot, report, sync
from palestra.cli.runs import runs
from palestra.cli.serve import keys, serve, serve_sampler
from palestra.cli.templates import demo, init
from palestra.cli.train import train
from palestra.launch.console import console

TRAIN, RESULTS, AGENTS, SERVERS, REFERENCE = "Train", "See what was learned", "Use agents", "Servers", "Look up"

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"palestra {palestra.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Train multiple agents together."""
    sys.path.insert(0, os.getcwd())  # so that module:Class finds a user's env in the working directory


def info() -> None:
    """Show versions, the device, and the available envs, bases, algorithms and sandbox."""
    import torch
    import transformers

    from palestra.builders.text_config import TextConfig
    from palestra.builders.vector_config import VectorConfig
    from palestra.config import type_choices
    from palestra.engine.models import SHIPPED_BASES_DIR
    from palestra.envs import TEXT_ENVS, VECTOR_ENVS
    from palestra.launch.population import PopulationConfig

    table = Table(show_header=False)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({torch.get_num_threads()} threads)"
    bases = sorted(p.parent.name for p in SHIPPED_BASES_DIR.glob("*/config.json"))
    for row in (
        ("palestra", palestra.__version__),
        ("torch, transformers", f"{torch.__version__}, {transformers.__version__}"),
        ("device", device),
        ("envs in words", ", ".join(sorted(TEXT_ENVS)) + ", or module:Class"),
        ("vectorised games", ", ".join(sorted(VECTOR_ENVS)) + ", or module:Class"),
        ("bases", ", ".join(bases) + ", a local folder, or a hub name"),
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


def _add(panel: str, **commands: Callable[..., None]) -> None:
    """Adds commands by name to a panel of the help; `_` in a name stands for a hyphen."""
    for name, command in commands.items():
        app.command(name.replace("_", "-"), rich_help_panel=panel)(command)


_add(TRAIN, demo=demo, init=init, train=train)
_add(RESULTS, runs=runs, eval=evaluate, dashboard=dashboard, report=report, plot=plot, sync=sync)
app.add_typer(league, name="league", rich_help_panel=RESULTS)
_add(AGENTS, play=play, collect=collect, publish=publish, serve_agent=serve_agent)
_add(SERVERS, serve=serve, serve_envs=serve_envs, serve_sampler=serve_sampler)
app.add_typer(keys, name="keys", rich_help_panel=SERVERS)
_add(REFERENCE, config=describe_config, info=info)
