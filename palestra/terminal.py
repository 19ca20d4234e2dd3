"""What the commands share in talking to a person."""

from __future__ import annotations

import os

import typer
from rich.console import Console
from rich.markup import escape

console = Console()


def say(text: str) -> None:
    """Prints a line as it is: not wrapped, so that a path or command can be copied, and brackets are no markup."""
    console.print(text, soft_wrap=True, markup=False, highlight=False)


class friendly:
    """Within, a user's mistake is one red line and exit code 2, not a traceback, unless PALESTRA_TRACEBACK is set."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, ValueError) and not os.environ.get("PALESTRA_TRACEBACK"):
            Console(stderr=True).print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
            raise typer.Exit(2) from error
