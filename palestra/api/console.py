"""Console output shared by the commands."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from importlib.util import find_spec
from threading import Event, Thread
from typing import Any

import typer
from rich.console import Console
from rich.text import Text
from safetensors import SafetensorError

from palestra.core.chat import escape_control_chars
from palestra.core.config.credentials import hide_credentials

EXPECTED_ERRORS = (ValueError, ConnectionError)
READ_ERRORS = (OSError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, SafetensorError)
SILENCE_S = 9.0  # seconds without a line until a busy console prints its status
IMPORTS_S = 3.0  # seconds that passed in silence before the outermost context, while Python imported palestra
NOTEBOOK_COLUMNS = 80  # that fit into a cell's output
RANK = 0  # rank under torchrun, which sets a number: only rank 0 prints
if (_rank := os.environ.get("RANK", "")).isdecimal():
    RANK = int(_rank)


class PlainConsole(Console):
    """A console that prints text literally: without markup and emoji codes, and with control characters escaped. Use
    `styled_text` for colour."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)
        if self.is_jupyter:
            self.width = min(self.width, NOTEBOOK_COLUMNS)
        self._printed_at = time.monotonic()
        self._status: Callable[[], str] | None = None

    def print(self, *objects: Any, **options: Any) -> None:
        self._printed_at = time.monotonic()
        super().print(*objects, **options)

    @contextmanager
    def busy(self, status: Callable[[], str]) -> Iterator[None]:
        """Context in which a thread prints `status()`, and for how long the outermost context has lasted, after each
        ten seconds without a line; nothing while that is "". An inner context replaces the status of an outer one."""
        outer, self._status = self._status, status
        with ExitStack() as stack:
            stack.callback(setattr, self, "_status", outer)
            if outer is None:
                self._printed_at = time.monotonic() - IMPORTS_S
                done = Event()
                thread = Thread(target=self._break_silence, args=(done,), daemon=True)
                thread.start()
                stack.callback(thread.join)
                stack.callback(done.set)
            yield

    def _break_silence(self, done: Event) -> None:
        began = time.monotonic()
        while not done.wait(0.5):
            status = self._status
            is_silent = time.monotonic() - self._printed_at >= SILENCE_S
            if status and is_silent and (text := status()):
                self.print(f"{text}, {timedelta(seconds=round(time.monotonic() - began))}", soft_wrap=True)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(escape_control_chars(text), **options)


console = PlainConsole(quiet=RANK > 0)


def styled_text(*pieces: str | tuple[str, str]) -> Text:
    """Returns a line made of plain strings and (text, style) pairs, each printed literally."""
    pairs = [(piece, "") if isinstance(piece, str) else piece for piece in pieces]
    return Text.assemble(*((escape_control_chars(text), style) for text, style in pairs))


def print_line(text: str) -> None:
    """Prints a line without wrapping, so that paths and commands can be copied."""
    console.print(text, soft_wrap=True)


@contextmanager
def interruptible(remedy: str) -> Iterator[None]:
    """Context in which a Ctrl-C that ends the command at once prints one line with `remedy` and exits with code 130."""
    try:
        yield
    except KeyboardInterrupt:
        print_line(f"interrupted{remedy}")
        raise typer.Exit(130) from None


def require_packages(what: str, extra: str, *packages: str) -> None:
    """Raises ValueError, with the extra to install, if one of `packages` is missing."""
    if missing := [name for name in packages if not find_spec(name)]:
        raise ValueError(f"{what} needs {', '.join(missing)}: pip install 'palestra[{extra}]'")


@contextmanager
def user_errors(received: object = None) -> Iterator[None]:
    """Context that turns expected errors into one red line and an exit code, without a traceback.

    Exit code 2: a mistake of the user (ValueError). Exit code 1: a failed run (RunFailed, with the traceback of the
    first failure), damaged or unwritable files, an unreachable server, or lack of memory. `received` is what a command
    only reads, and somebody else may have made: any error of reading it counts as damage of it, and ends with exit code
    1. PALESTRA_TRACEBACK=1 keeps the traceback.
    """
    try:
        yield
    except Exception as error:
        from palestra.core.failures import RunFailed, is_out_of_memory
        from palestra.core.files import DamagedFile

        short = ""
        if is_out_of_memory(error):
            short = "out of memory, use a smaller model or batch: "
        elif received is not None and isinstance(error, READ_ERRORS) and not isinstance(error, EXPECTED_ERRORS):
            short = f"{type(error).__name__}: "
            names_file = isinstance(error, OSError) and error.filename  # which may be one that the command writes
            if not names_file:
                short = f"{received} is not as palestra writes it (PALESTRA_TRACEBACK=1 shows where): {short}"
        elif not isinstance(error, EXPECTED_ERRORS):
            raise
        if os.environ.get("PALESTRA_TRACEBACK"):
            raise
        if RANK:
            time.sleep(3)  # if all ranks have the error, rank 0 reports it first, and torchrun ends the others
        print_error(f"{short}{error}", *getattr(error, "__notes__", []))
        if isinstance(error, ValueError) and not isinstance(error, RunFailed | DamagedFile):  # the user's mistake
            raise typer.Exit(2) from error
        raise typer.Exit(1) from error


def print_error(message: str, *notes: str) -> None:
    """Prints an error to stderr, followed by notes."""
    who = f"error on rank {RANK}:" if RANK else "error:"
    loud = PlainConsole(stderr=True)
    loud.print(styled_text((who, "red"), f" {hide_credentials(message)}"), soft_wrap=True)
    for note in notes:
        loud.print(hide_credentials(note), soft_wrap=True)
