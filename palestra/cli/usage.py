"""Messages for options that a command does not have, and `palestra help`."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

UsageError: Any = typer.BadParameter.__base__  # of the copy of Click that typer uses


class CommandWithHints(TyperCommand):
    """A command that, if it has `--set`, names it for an unknown option `--steps` and an argument `steps=10`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            found = re.search(r"option:? '?--([\w.-]+)|argument\(s\) \(([\w.]+=\S+)\)", error.message)
            if found and any("--set" in parameter.opts for parameter in self.params):
                setting = found[2] or f"{found[1].replace('-', '_')}=..."
                error.message += f"; a setting of the config is changed with --set {setting}"
            raise


def print_help(
    context: typer.Context, command: Annotated[list[str] | None, typer.Argument(help="a command")] = None
) -> None:
    """Print the help of palestra, or of a command."""
    assert context.parent is not None
    context.parent.command.main([*(command or []), "--help"], prog_name=context.parent.info_name)
