"""A server or a training run as processes that tests start, kill and start again."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from helpers.warm_processes import start_palestra

PUBLIC = "Qwen/Qwen3-0.6B"


class Server:
    """`palestra serve` with its data in `data`, always started at the same address."""

    def __init__(self, data: Path, *options: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        self.data = data
        self.words = ["serve", "--port", port, "--data", str(data), "--alias", f"{PUBLIC}=tiny", *options]
        self.url = f"http://127.0.0.1:{port}"
        self.start()

    def start(self) -> None:
        """Starts the process; returns once it listens. Its worker may take a few seconds more."""
        self.process = start_palestra(*self.words, with_stderr=False)
        line = self.process.stdout.readline()
        assert re.search(r"TINKER_BASE_URL=(\S+)", line), line + self.process.stdout.read()

    def workers(self) -> list[int]:
        return workers_of(self.process.pid)

    def kill(self, what: str = "all", when: Callable[[], None] = lambda: None) -> None:
        """Kills (SIGKILL) the "front" end, its "worker" or both at the same time ("all") as soon as `when` returns."""
        workers = self.workers()
        when()
        if what != "worker":
            self.process.kill()
        for pid in workers if what != "front" else ():
            os.kill(pid, signal.SIGKILL)
        if what != "worker":
            self.process.communicate()

    def stop(self) -> int:
        """Ends it by SIGTERM; returns the exit code."""
        self.process.terminate()
        self.process.communicate(timeout=90)
        return self.process.returncode


def children_of(pid: int) -> dict[int, str]:
    """The command lines of a process's children, by their ids."""
    found = subprocess.run(["ps", "-ww", "-o", "pid=,args=", "--ppid", str(pid)], capture_output=True, text=True)
    lines = [line.split(maxsplit=1) for line in found.stdout.splitlines()]
    return {int(line[0]): line[-1] for line in lines}


def workers_of(pid: int) -> list[int]:
    """The processes that `start_process` started in process `pid`: its children, or those of its fork server."""
    found: list[int] = []
    for child, command in children_of(pid).items():
        if "spawn_main" in command:
            found.append(child)
        elif "resource_tracker" not in command:
            found += children_of(child)
    return found


def signal_all(pid: int, number: int) -> list[psutil.Process]:
    """Sends a signal to a process and all its descendants, children first, as a service manager may; returns the
    descendants."""
    first = psutil.Process(pid)
    children = first.children(recursive=True)
    for child in [*reversed(children), first]:
        try:
            child.send_signal(number)
        except psutil.NoSuchProcess:
            continue
    return children


def left(processes: list[psutil.Process]) -> list[psutil.Process]:
    """The processes that have not ended within 20 seconds."""
    return psutil.wait_procs(processes, timeout=20)[1]


@contextmanager
def serving(data: Path, *options: str) -> Iterator[str]:
    """The address of a server that is stopped at the end."""
    server = Server(data, *options)
    try:
        yield server.url
    finally:
        server.stop()


@contextmanager
def playing(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`palestra play --browser`: the process and the address of its page while the block runs."""
    process = start_palestra("play", *arguments, "--browser", "--port", "0", with_stderr=False)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.match(r"play at: (\S+)", line)
        assert found, line + process.stdout.read()
        yield process, found[1]
    finally:
        process.kill()
        process.communicate()


def start(folder: Path, *arguments: object, forked: bool = True) -> Any:
    """`palestra train ARGUMENTS` as a process, started from nothing unless `forked`."""
    tests = Path(__file__).parents[1]  # imports this source tree, whatever is installed
    environment = os.environ | {"PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}", "OMP_NUM_THREADS": "1"}
    return start_palestra("train", *arguments, cwd=folder, env=environment, forked=forked)


def finish(process: Any) -> str:
    """Waits for exit code 0; returns the output."""
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    return out
