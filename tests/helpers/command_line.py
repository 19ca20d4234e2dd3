"""Runs the command line in this process, so that torch is loaded once for all tests, and checks whether it accepts a
command written in a document or a script."""

import itertools
import re
import shlex
from pathlib import Path
from typing import Any

import typer
from click.testing import Result
from typer.testing import CliRunner

from palestra.api.run_kinds import run_kind
from palestra.cli.main import app
from palestra.core.config import load, override, validate
from palestra.core.config.shipped import find_config

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)|(?:src|href)=\"([^\"]+)\"")  # of Markdown or HTML: its target
GROUP: Any = typer.main.get_command(app)
UsageError: Any = typer.BadParameter.__base__  # the copy of Click that typer contains


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


def refusal(line: str) -> str | None:
    """The message with which `palestra` would refuse a shell line, or None: also if the line does not call it, or has
    placeholders as in `<host>`, `$seed` or `...`."""
    lexer = shlex.shlex(re.sub(r"(^|\s)#.*", "", line), posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    words = list(lexer)
    open_ended = any("..." in word or "$" in word or word in ("<", "cd") for word in words)
    if "palestra" not in words or open_ended:
        return None
    called = words[words.index("palestra") + 1 :]
    called = list(itertools.takewhile(lambda word: not set(word) <= set("|&;>()"), called))
    try:
        check_command(called)
    except (UsageError, ValueError) as error:
        return f"{line}: {error}"
    return None


def check_command(words: list[str]) -> None:
    """Raises UsageError or ValueError for a command that would be refused."""
    command, context, name = GROUP, None, "palestra"
    while hasattr(command, "commands"):
        context = command.make_context(name, list(words), parent=context)
        found, command, words = command.resolve_command(context, [*context._protected_args, *context.args])
        name = str(found)
    given = command.make_context(name, words, parent=context).params
    if name == "train" and given["config"] and given["config"].parts[0] in ("configs", "results"):
        tree = override(load(find_config(given["config"])), given["settings"] or [])
        validate(run_kind(tree).config_type, tree)
