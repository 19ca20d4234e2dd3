"""What the commands share in talking to a person."""

from __future__ import annotations

import os
import time
from importlib.util import find_spec

import typer
from rich.console import Console
from rich.markup import escape

RANK = int(os.environ.get("RANK", "0"))  # among the processes that torchrun started: the first speaks for all
console = Console(quiet=RANK > 0)


def say(text: str) -> None:
    """Prints a line as it is: not wrapped, so that a path or command can be copied, and brackets are no markup."""
    console.print(text, soft_wrap=True, markup=False, highlight=False)


def needs(what: str, extra: str, *packages: str) -> None:
    """Raises ValueError, with the extra that brings them, where one of the packages is not installed."""
    if missing := [name for name in packages if not find_spec(name)]:
        raise ValueError(f"{what} needs {', '.join(missing)}: pip install 'palestra[{extra}]'")


class friendly:
    """Within, a user's mistake is one red line and exit code 2, not a traceback, unless PALESTRA_TRACEBACK is set."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, ValueError) and not os.environ.get("PALESTRA_TRACEBACK"):
            if RANK:
                time.sleep(3)  # what all find wrong the first says, and torchrun then ends the others
            who = f"error on rank {RANK}:" if RANK else "error:"
            Console(stderr=True).print(f"[red]{who}[/] {escape(str(error))}", highlight=False, soft_wrap=True)
            raise typer.Exit(2) from error
