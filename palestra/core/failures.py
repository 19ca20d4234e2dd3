"""Failed episodes: bounded text of their exceptions, and the share of failures that ends a run."""

from __future__ import annotations

import asyncio
import os
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from errno import ENOMEM
from pathlib import Path
from typing import NamedTuple, Self

from palestra.core.config import hide_credentials
from palestra.core.files import atomic_write
from palestra.core.types import NO_REWARD, Episode

ERROR_FILE = "error.txt"  # in a run's folder: the error that ended it, with traceback

SEARCH_MARGIN = 50_000  # characters
MAX_MESSAGE_CHARS = 2000  # characters
MAX_TRACEBACK_CHARS = 8000  # characters; if it is longer, the middle is cut
TRACEBACK_FRAMES = 16  # innermost stack frames in a traceback
# Folders whose code is not the user's: palestra, Python and the installed packages.
LIBRARIES = (str(Path(__file__).parents[1]), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
# In messages of torch, the dynamic loader, oneDNN, Python's threads and C++ where memory has run out.
MEMORY_SIGNS = (
    "can't allocate memory",
    "out of memory",
    "failed to map segment",
    "could not create a primitive",
    "can't start new thread",
    "bad_alloc",
)


class RunFailed(ValueError):
    """Raised if a run cannot continue, or had no result. Notes hold the traceback of the first failure, if any. The
    command line exits with code 1, not with 2 as for a config error."""

    @classmethod
    def from_traceback(cls, message: str, trace: str | None) -> Self:
        """Returns the error with the traceback `trace` as a note."""
        error = cls(message)
        if trace:
            error.add_note(trace.rstrip())
        return error


class ErrorText(NamedTuple):
    """An exception as text: type and message, and traceback. Both are bounded in length and can be sent to other
    processes."""

    message: str
    traceback: str


@contextmanager
def exit_as_error() -> Iterator[None]:
    """Context that raises RuntimeError if a user's code in it raises what is no Exception, which would end a run:
    SystemExit as if it were done. Ctrl-C passes, and so does what cancels the code itself. If the code forks, the child
    that comes out of it ends: it would go on as the run."""
    process = os.getpid()
    try:
        yield
    except (Exception, KeyboardInterrupt, GeneratorExit):
        raise
    except SystemExit as error:
        raise RuntimeError(f"it called sys.exit({error.code!r})") from error
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and _is_being_cancelled():
            raise
        raise RuntimeError(f"it raised {type(error).__name__}: {error}") from error
    finally:
        if os.getpid() != process:
            os.write(2, b"a process that an env or a reward function has forked ends here: call os._exit in it\n")
            os._exit(1)


def _is_being_cancelled() -> bool:
    """Returns whether the running task was asked to end, rather than its code having raised CancelledError."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs on this thread
        return False
    return task is not None and task.cancelling() > 0


def one_line(error: BaseException) -> str:
    """Returns type and message of `error` in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def is_out_of_memory(error: BaseException | None) -> bool:
    """Returns whether `error` means that the machine's or the GPU's memory, or a limit of the process, ran out."""
    if isinstance(error, OSError):
        return error.errno == ENOMEM
    message = str(error).lower()
    ran_out = isinstance(error, RuntimeError | ImportError) and any(sign in message for sign in MEMORY_SIGNS)
    return ran_out or isinstance(error, MemoryError)


def describe_error(error: BaseException) -> ErrorText:
    """Returns the text of an exception, or of the first exception in an exception group; in one line, unless it is a
    RunFailed. The traceback begins with the user's code, if it leads through it; it is "" for a check of palestra."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    message = str(error)
    if not isinstance(error, RunFailed):
        message = f"{type(error).__name__}: {' '.join(line.strip() for line in message.splitlines())}"
    report = traceback.TracebackException.from_exception(error, limit=-TRACEBACK_FRAMES)
    _hide_library_frames(report, error)
    trace = ""
    if report.stack or report.__cause__ or hasattr(error, "__notes__"):
        trace = "".join(report.format())
    return ErrorText(
        _without_credentials(message, MAX_MESSAGE_CHARS, MAX_MESSAGE_CHARS // 2),
        _without_credentials(trace, MAX_TRACEBACK_CHARS, 1000),
    )


def _hide_library_frames(report: traceback.TracebackException, error: BaseException | None) -> None:
    """Removes the frames before a user's code from the report of an error and of its causes; all frames, if palestra
    itself raised a ValueError, or an error of its own, whose message says everything."""
    stack = report.stack
    if own := first_own_frame(stack):
        del stack[: stack.index(own)]
    elif _says_everything(error) and stack and _raises_here(stack[-1]):
        stack.clear()
    if (cause := report.__cause__ or report.__context__) and error:
        _hide_library_frames(cause, error.__cause__ or error.__context__)


def _says_everything(error: BaseException | None) -> bool:
    """Returns whether `error` is a ValueError or of palestra's own classes, such as that of an endpoint."""
    return isinstance(error, ValueError) or type(error).__module__.startswith("palestra.")


def _raises_here(frame: traceback.FrameSummary) -> bool:
    """Returns whether palestra's own code raised the error there, rather than met it (`int("x")`)."""
    return frame.filename.startswith(LIBRARIES[0]) and (frame.line or "").startswith("raise ")


def first_own_frame(stack: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """Returns the first frame that is in a user's code; None if there is none."""
    return next((frame for frame in stack if not frame.filename.startswith((*LIBRARIES, "<"))), None)


def describe_in_line(error: Exception) -> str:
    """Returns an exception of a user's code as one line: its type, message, and where the code raised it."""
    own = first_own_frame(traceback.extract_tb(error.__traceback__)[::-1])
    where = f" ({Path(own.filename).name}, line {own.lineno})" if own else ""
    return f"{describe_error(error).message}{where}"


def check_failures(episodes: Sequence[Episode], most: float, where: str) -> None:
    """Raises RunFailed, with the first failure and its traceback, if more than the share `most` of the episodes
    failed; of an episode that lost some of its branches, their share counts."""
    if sum(episode.failed_share for episode in episodes) > most * len(episodes):
        raise failure(
            episodes,
            where,
            "Fix the env or the policy, then resume with --resume; a larger max_failed "
            f"(now {most:g}) lets a run continue without the episodes that fail",
        )


def check_not_all_failed(episodes: Sequence[Episode], where: str) -> None:
    """Raises RunFailed, with the first failure and its traceback, if there are episodes and all of them failed."""
    if episodes and all(episode.error is not None for episode in episodes):
        raise failure(episodes, where, "Fix the env or the policy")


def failure(episodes: Sequence[Episode], where: str, fix: str) -> RunFailed:
    """Returns the error with the number of failed episodes and the first failure."""
    failed = [episode for episode in episodes if episode.failed_share]
    whole = sum(episode.error is not None for episode in failed)
    error = failed[0].error or next(n.error for n in failed[0].nodes if n.is_lost and n.error != NO_REWARD)
    lost = f" and {len(failed) - whole} lost some of their branches" if len(failed) > whole else ""
    of_env = f" of env {failed[0].env}" if len({episode.env for episode in episodes}) > 1 else ""
    first = f"the first (instance {failed[0].seed}{of_env}) with {(error or '').rstrip('.')}"
    message = f"{where}: {whole} of {len(episodes)} episodes failed{lost}, {first}. {fix}"
    return RunFailed.from_traceback(message, failed[0].traceback)


@contextmanager
def write_error_file(folder: Path) -> Iterator[None]:
    """Context in which an exception is also written to error.txt in `folder`. Removes the file of an earlier
    attempt."""
    (folder / ERROR_FILE).unlink(missing_ok=True)
    try:
        yield
    except Exception as error:
        message, trace = describe_error(error)
        if isinstance(error, RunFailed):  # its notes hold the traceback of the cause
            trace = hide_credentials("\n".join(getattr(error, "__notes__", [])))
        if folder.is_dir():  # it may have been moved
            atomic_write(folder / ERROR_FILE, f"{message}\n\n{trace}\n".encode(errors="backslashreplace"))
        raise


def _without_credentials(text: str, most: int, first: int) -> str:
    """Returns `text` without credentials and bounded. The search for them takes seconds in megabytes, so it reads what
    is returned and a margin, in which a cut may leave a part of one."""
    readable = _cut_middle(text, most + 2 * SEARCH_MARGIN, first + SEARCH_MARGIN)
    return _cut_middle(hide_credentials(readable), most, first)


def _cut_middle(text: str, most: int, first: int) -> str:
    """Returns `text`; if it is longer than `most` characters, its first `first` characters and its end."""
    if len(text) <= most:
        return text
    return f"{text[:first]}\n... (cut) ...\n{text[-(most - first) :]}"


class ContextLengthExceeded(ValueError):
    """A prompt and the longest answer to it do not fit into a model's context. A rollout truncates the trajectory."""
