"""The `palestra` command line. Heavy imports are deferred until a command needs them, so that --help is fast."""

from __future__ import annotations

import atexit
import gc
import os
import re
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import palestra
from palestra.cli.agents import publish, serve_agent
from palestra.cli.arena import arena
from palestra.cli.collect import collect
from palestra.cli.config import describe_config
from palestra.cli.dashboard import dashboard
from palestra.cli.envs import serve_envs
from palestra.cli.evaluate import evaluate
from palestra.cli.grid import grid
from palestra.cli.info import info
from palestra.cli.league import league
from palestra.cli.mirror import fetch
from palestra.cli.play import play, render
from palestra.cli.report import plot, report, sync
from palestra.cli.runs import runs
from palestra.cli.serve import keys, serve, serve_sampler
from palestra.cli.templates import demo, init
from palestra.cli.train import train
from palestra.core.stop_signals import interrupt_on_sigterm

UsageError: Any = typer.BadParameter.__base__  # of the copy of Click that typer uses


class CommandWithHints(TyperCommand):
    """A command that, if it has `--set`, names it for an unknown option `--lr` and an argument `steps=10`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            match = re.search(r"option:? '?--([\w.-]+)|argument\(s\) \(([\w.]+=\S+)\)", error.message)
            if match and any("--set" in parameter.opts for parameter in self.params):
                setting = match[2] or f"{match[1].replace('-', '_')}=..."
                error.message += f"; a setting of the config is changed with --set {setting}"
            raise


def print_help(
    context: typer.Context, command: Annotated[list[str] | None, typer.Argument(help="a command")] = None
) -> None:
    """Print the help of palestra, or of a command."""
    assert context.parent is not None
    context.parent.command.main([*(command or []), "--help"], prog_name=context.parent.info_name)


TRAIN = "Train"
RESULTS = "Results"
AGENTS = "Use agents"
SERVERS = "Servers"
REFERENCE = "Reference"
# Commands that may import what a config names as module:Class from the working folder. The others only look.
PLAYING = ("train", "grid", "eval", "league", "play", "arena", "render", "collect", "serve-envs", "config")

# Else Python walks all objects of the imported modules once more before it ends: a second for torch and transformers.
atexit.register(gc.freeze)

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
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Multi-agent reinforcement learning for language models and small networks."""
    interrupt_on_sigterm()
    if context.invoked_subcommand in PLAYING:
        from palestra.core.config.user_modules import allow_modules_in

        allow_modules_in(os.getcwd())


def _add(panel: str, **commands: Callable[..., None]) -> None:
    """Adds commands by name to a panel of the help; `_` in a name stands for a hyphen."""
    for name, command in commands.items():
        app.command(name.replace("_", "-"), cls=CommandWithHints, rich_help_panel=panel)(command)


_add(TRAIN, demo=demo, init=init, train=train, grid=grid)
_add(RESULTS, runs=runs, eval=evaluate, dashboard=dashboard, report=report, plot=plot, sync=sync, fetch=fetch)
app.add_typer(league, name="league", rich_help_panel=RESULTS)
_add(AGENTS, play=play, arena=arena, render=render, collect=collect, publish=publish, serve_agent=serve_agent)
_add(SERVERS, serve=serve, serve_envs=serve_envs, serve_sampler=serve_sampler)
app.add_typer(keys, name="keys", rich_help_panel=SERVERS)
_add(REFERENCE, config=describe_config, info=info)
app.command("help", hidden=True)(print_help)
