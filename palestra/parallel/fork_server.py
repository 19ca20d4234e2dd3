"""Forks of a process that has only imported modules, in place of processes that import them anew: multiprocessing's
fork server, whose forks see the environment, the outputs and the end of the process that starts them."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, process
from multiprocessing.reduction import DupFd
from multiprocessing.util import get_temp_dir
from typing import Any

SAFE_PATH = "PYTHONSAFEPATH"  # unless set, a child imports `multiprocessing` itself from the working folder first
SOCKET_FOLDER = "PALESTRA_SOCKET_FOLDER"  # tells the server which folder to remove at its end
# What children spend seconds on importing: the server imports what its parent has.
PRELOADED = (
    "torch",
    "palestra.engine.bases.model",
    "palestra.service.worker.worker",
    "palestra.parallel.torch_group",
    "palestra.vector.rollouts.actors",
)
MAX_TEMP_DIR = 80  # bytes: the server's socket lies in it, and the address of a socket has 107
PREFIXES = ("GOMP", "HF_", "KMP", "LD_", "MALLOC", "MKL", "NUM", "OMP", "OPENBLAS", "PYTHON", "TORCH", "TRANSFORMERS")

_server_variables: list[dict[str, str]] = []  # of the server that was started


def can_fork() -> bool:
    """Returns whether a fork is as good as a new process here. The driver of a GPU does not survive a fork, a
    library reads its variables once, when it is imported, and the server needs a folder with a short name."""
    if sys.platform != "linux" or len(os.fsencode(get_temp_dir())) > MAX_TEMP_DIR:
        return False
    torch = sys.modules.get("torch")
    if torch and torch.accelerator.is_available():
        return False
    return not _server_variables or _server_variables[0] == _library_variables()


def _library_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)}


def ensure_fork_server() -> None:
    """Starts the fork server unless it runs. It looks for modules where this process does."""
    if not _server_variables:
        _server_variables.append(_library_variables())
    names = [name for name in PRELOADED if name in sys.modules]
    forkserver.set_forkserver_preload([*names, "palestra.parallel.frozen"])
    started: Any = process
    folders = [folder or started.ORIGINAL_DIR for folder in sys.path]
    variables = {SAFE_PATH: "1", "PYTHONPATH": os.pathsep.join(folders), SOCKET_FOLDER: get_temp_dir()}
    with changed_variables(variables):
        forkserver.ensure_running()


@contextmanager
def changed_variables(variables: dict[str, str]) -> Iterator[None]:
    """Changes variables of the environment while the block runs."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            restore_variable(name, value)


def restore_variable(name: str, value: str | None) -> None:
    """Sets a variable of the environment, or removes it (None)."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


class Caller:
    """The environment, standard output and standard error of the process that starts a fork. Unpickling it in the fork
    sets them there."""

    def __init__(self) -> None:
        self.environment = dict(os.environ)

    def __reduce__(self) -> tuple[Callable[..., Caller], tuple[object, ...]]:
        return _take_over, (self.environment, DupFd(1), DupFd(2))


def _take_over(environment: dict[str, str], *outputs: Any) -> Caller:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    for number, output in enumerate(outputs, 1):
        descriptor = output.detach()
        os.dup2(descriptor, number)
        os.close(descriptor)
    return Caller()


def run_forked(_: Caller, target: Callable[..., object], *arguments: Any) -> None:
    """Runs `target(*arguments)` in a fork, as a new process would."""
    server: Any = forkserver
    os.close(server._forkserver._forkserver_alive_fd)  # the server ends with its parent, whatever its forks do
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # else each fork draws what the others draw
    try:
        target(*arguments)
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out in forks
