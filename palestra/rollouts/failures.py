"""Failed episodes: the text kept of what they raised, and how many of them end a run."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

from palestra.files import atomic_write
from palestra.types import Episode

ERROR = "error.txt"  # in a run's folder: what ended it, with the traceback

LONGEST_MESSAGE = 2000  # characters kept of an error's message
LONGEST_TRACEBACK = 8000  # characters kept of a traceback, its end in any case
FRAMES = 16  # innermost calls kept of a traceback


class RunFailed(ValueError):
    """Raised where a run cannot go on, or came to nothing. Notes hold the traceback of the first failure, if any. The
    command line ends with exit code 1, not 2 as for a mistake in a config."""

    @classmethod
    def caused(cls, message: str, trace: str | None) -> Self:
        """The error with that traceback as its note."""
        error = cls(message)
        if trace:
            error.add_note(trace.rstrip())
        return error


class Fault(NamedTuple):
    """An exception as text: its type and message, and its traceback. Both are bounded, and can be sent anywhere."""

    message: str
    trace: str


def fault_of(error: BaseException) -> Fault:
    """The text of an exception; of a group, its first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    said = str(error) if isinstance(error, RunFailed) else f"{type(error).__name__}: {error}"
    trace = "".join(traceback.format_exception(error, limit=-FRAMES))
    return Fault(_bounded(said, LONGEST_MESSAGE, LONGEST_MESSAGE // 2), _bounded(trace, LONGEST_TRACEBACK, 1000))


def check_failures(episodes: Sequence[Episode], most: float, where: str) -> None:
    """Raises RunFailed, with the first failure and its traceback, where more than the share `most` of the episodes
    failed."""
    if sum(episode.error is not None for episode in episodes) > most * len(episodes):
        raise failure(
            episodes,
            where,
            "Mend the env or the policy, then go on with --resume; a larger max_failed "
            f"(now {most:g}) lets a run go on without the episodes that fail",
        )


def check_any(episodes: Sequence[Episode], where: str) -> None:
    """Raises RunFailed, with the first failure and its traceback, where there are episodes and all of them failed."""
    if episodes and all(episode.error is not None for episode in episodes):
        raise failure(episodes, where, "Mend the env or the policy")


def failure(episodes: Sequence[Episode], where: str, fix: str) -> RunFailed:
    """The error that says how many of the episodes failed, and the first of them how."""
    failed = [episode for episode in episodes if episode.error is not None]
    first = f'the first (instance {failed[0].seed} of env "{failed[0].env}") with {failed[0].error}'
    message = f"{where}: {len(failed)} of {len(episodes)} episodes failed, {first}. {fix}"
    return RunFailed.caused(message, failed[0].traceback)


@contextmanager
def kept_in(folder: Path) -> Iterator[None]:
    """Within, an exception is also written to error.txt in `folder`. One that an earlier attempt left is removed."""
    (folder / ERROR).unlink(missing_ok=True)
    try:
        yield
    except Exception as error:
        message, trace = fault_of(error)
        if isinstance(error, RunFailed):  # where it was raised is of no interest, and its cause is in its notes
            trace = "\n".join(getattr(error, "__notes__", []))
        atomic_write(folder / ERROR, f"{message}\n\n{trace}\n".encode(errors="backslashreplace"))
        raise


def _bounded(text: str, most: int, first: int) -> str:
    """`text`, or where it is longer than `most` characters its `first` ones and its end."""
    return text if len(text) <= most else f"{text[:first]}\n... (cut) ...\n{text[-(most - first) :]}"
