"""The command line, run in this process: torch is loaded once for all tests."""

from __future__ import annotations

from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from palestra.cli.main import app


def invoke(*arguments: object, **options: Any) -> Result:
    """Runs `palestra ARGUMENTS...`; returns its output and exit code, or the exception that it raised."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **options)


def palestra(*arguments: object) -> str:
    """Runs a command that must succeed; returns what it printed."""
    done = invoke(*arguments)
    assert done.exit_code == 0, done.output
    return done.output


def refused(*arguments: object) -> str:
    """Runs a command that must be refused; returns its error message on one line."""
    done = invoke(*arguments)
    assert done.exit_code == 2 and "Traceback" not in done.output, done.output
    return " ".join(done.stderr.split())
