"""`palestra` in processes that start quickly: forks of one process that has imported the modules of training and
serving.

Each has its own memory, session, signals and exit code, like a process started from nothing, but saves the seconds of
the imports. Where `os.pidfd_open` is missing (macOS), processes are started from nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import forkserver
from multiprocessing.connection import arbitrary_address
from pathlib import Path
from typing import Any

SIGNALS = {signal.SIGINT, signal.SIGTERM}
PALESTRA = [sys.executable, "-c", "from palestra.cli.main import app; app()"]
IMPORTS = (
    "palestra.testing",
    "palestra.text.build.distributed",
    "palestra.parallel.torch_group",
    "palestra.service.serve",
    "palestra.service.worker.worker",
    "palestra.text.tinker.client",
    "palestra.cli.train",
    "palestra.api.run",
    "palestra.api.extend",
    "palestra.runs.mirror.copy",
    "palestra.evaluation.report.run_report",
    "palestra.runs.sinks.factory",
    "matplotlib.figure",
    "pandas",  # which pyarrow imports if it is installed
)


def start_palestra(
    *arguments: object,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    with_stderr: bool = True,
    forked: bool = True,
) -> Any:
    """`palestra ARGUMENTS` as a process in its own session: a Popen, or an object with its methods. Its stderr is a
    separate pipe, or goes to stdout (`with_stderr=False`). Without `forked` it is started from nothing, and orders sets
    of strings differently than forks, which share Python's hash seed."""
    words, environment = [str(argument) for argument in arguments], dict(os.environ if env is None else env)
    if forked and hasattr(os, "pidfd_open"):
        return _fork_server().start(words, str(cwd or Path.cwd()), environment, with_stderr)
    stderr = subprocess.PIPE if with_stderr else subprocess.STDOUT
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": stderr, "text": True, "start_new_session": True}
    return subprocess.Popen([*PALESTRA, *words], cwd=cwd, env=environment, **pipes)


def run_palestra(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """`palestra ARGUMENTS`, run to its end; for `options` see `start_palestra`."""
    process = start_palestra(*arguments, **options)
    out, err = process.communicate()
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


class ForkedProcess:
    """A fork, with the attributes and methods of `subprocess.Popen` that tests use."""

    def __init__(self, server: ForkServer, pid: int, outputs: list[int]) -> None:
        self.server, self.pid, self.returncode = server, pid, None
        self.handle = os.pidfd_open(pid)
        self.files = [os.fdopen(output) for output in outputs]
        self.stdout = self.files[0]
        self.texts: list[str] = []

    def poll(self) -> int | None:
        """Returns the exit code, the negative number of the signal that ended the process, or None while it runs."""
        if self.returncode is None and select.select([self.handle], [], [], 0)[0]:
            self.returncode = self.server.exit_code(self.pid)
            os.close(self.handle)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """Returns the exit code once the process has ended. Raises TimeoutExpired after `timeout` seconds."""
        if self.returncode is None and not select.select([self.handle], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("palestra", timeout or 0.0)
        return self.poll()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Returns the rest of stdout and stderr once the process has ended. Raises TimeoutExpired after `timeout`
        seconds."""
        until = time.monotonic() + (1e6 if timeout is None else timeout)
        if not self.texts:
            texts = [""] * len(self.files)

            def read(number: int) -> None:
                with self.files[number] as file:
                    texts[number] = file.read()

            threads = [threading.Thread(target=read, args=(i,), daemon=True) for i in range(len(texts))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(until - time.monotonic())
                if thread.is_alive():
                    raise subprocess.TimeoutExpired("palestra", timeout or 0.0)
            self.texts = texts
        self.wait(max(0.0, until - time.monotonic()))
        return self.texts[0], self.texts[1] if len(self.texts) > 1 else ""

    def send_signal(self, number: int) -> None:
        """Sends a signal unless the process has ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self.handle, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class ForkServer:
    """The process that forks; it ends with this one."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        tests = Path(__file__).parents[1]
        program = f"from helpers import warm_processes; warm_processes.serve({theirs.fileno()})"
        paths = {"PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", program]
        self.process = subprocess.Popen(command, env=os.environ | paths, pass_fds=[theirs.fileno()])
        theirs.close()

    def start(self, words: list[str], cwd: str, env: dict[str, str], with_stderr: bool) -> ForkedProcess:
        """Returns a process that runs `palestra WORDS`."""
        pipes = [os.pipe() for _ in range(2 if with_stderr else 1)]
        request = json.dumps({"words": words, "cwd": cwd, "env": env}).encode()
        socket.send_fds(self.socket, [request], [write for _, write in pipes])
        for _, write in pipes:
            os.close(write)
        return ForkedProcess(self, json.loads(self.socket.recv(100)), [read for read, _ in pipes])

    def exit_code(self, pid: int) -> int:
        """Returns the exit code of a process that has ended, or the negative number of the signal that ended it."""
        self.socket.send(json.dumps({"ended": pid}).encode())
        return int(json.loads(self.socket.recv(100)))


@cache
def _fork_server() -> ForkServer:
    return ForkServer()


def serve(descriptor: int) -> None:
    """The program of the fork server: it forks for each request until the other end is closed."""
    requests = socket.socket(fileno=descriptor)
    for name in IMPORTS:
        if find_spec(name.split(".")[0]):
            import_module(name)
    gc.freeze()  # a fork would copy every page of the modules at its first collection
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends pytest, and with it this process
    while True:
        data, outputs, _, _ = socket.recv_fds(requests, 1 << 18, 2)
        if not data:
            return
        request = json.loads(data)
        if "ended" in request:
            _, status = os.waitpid(request["ended"], 0)
            requests.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            requests.close()
            _end(_exit_code(request, outputs))
        for output in outputs:
            os.close(output)
        requests.send(json.dumps(pid).encode())


def _exit_code(request: dict[str, Any], outputs: list[int]) -> int:
    """Runs the command line in a fork; returns the exit code that Python would end with."""
    try:
        _run(request, outputs)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _end(code: int) -> None:
    """Ends a fork as Python does, but leaves the modules' memory to the system: freeing it takes half a second."""
    threading._shutdown()  # joins the threads
    atexit._run_exitfuncs()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _run(request: dict[str, Any], outputs: list[int]) -> None:
    """Runs the command line in a fork."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(OSError):
        os.close(0)
    os.open(os.devnull, os.O_RDONLY)
    os.dup2(outputs[0], 1)
    os.dup2(outputs[-1], 2)
    for output in outputs:
        os.close(output)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[:0] = [path for path in request["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    _start_fork_server()
    sys.argv = ["palestra", *request["words"]]
    import_module("palestra.cli.main").app()


def _start_fork_server() -> None:
    """Forks multiprocessing's fork server of this process, which would otherwise import the modules anew."""
    server: Any = forkserver._forkserver
    address = arbitrary_address("AF_UNIX")
    alive, ours = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        pid = os.fork()
        if pid == 0:
            os.close(ours)
            with contextlib.suppress(SystemExit):
                forkserver.main(listener.detach(), alive, None)
            os._exit(0)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.close(alive)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, ours, pid
