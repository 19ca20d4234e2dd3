"""`palestra serve-envs`: the processes of a server, from the first to the last.

With several workers each is a process that listens at the same port (SO_REUSEPORT): the system gives every connection
to one of them, and it stays there with all its sessions. A worker that dies takes its sessions with it and is started
again.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from palestra.remote.env_server import Door, EnvServer
from palestra.remote.sessions import Sessions

Say = Callable[[str], None]
PAUSE = 1.0  # seconds before a worker that died is started again


@dataclass(frozen=True)
class Options:
    """What `palestra serve-envs` was asked for. `token` is the word itself; `grace` the seconds that open sessions
    have once the server is told to end."""

    envs: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 50051
    workers: int = 1
    cert: Path | None = None
    key: Path | None = None
    token: str | None = None
    lease: float = 60.0
    grace: float = 30.0

    def door(self) -> Door:
        """Raises ValueError where the files of TLS are not there."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return Door(f"{host}:{self.port}", self.workers, _tls(self.cert, self.key), self.token, self.lease)


def serve(options: Options, say: Say = print) -> None:
    """Serves until SIGTERM or SIGINT; then opens nothing more, lets sessions end within the grace period, and returns.

    Raises ValueError where an env is unknown, TLS's files are missing, or the port is taken.
    """
    sessions = Sessions(options.envs)
    options.door()
    if options.workers == 1:
        asyncio.run(_work(options, sessions, lambda port: say(_ready(options, port))))
        return
    with _reserved(options) as port:
        _keep_working(replace(options, port=port), say)


async def _work(options: Options, sessions: Sessions, ready: Callable[[int], None]) -> None:
    """One process's part, to its end."""
    server = EnvServer(sessions, options.door())
    gc.freeze()  # modules stay: need not be looked through again and again
    told, again = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: (again if told.is_set() else told).set())
    ready(await server.start())
    await told.wait()
    ends = [asyncio.create_task(server.drain()), asyncio.create_task(again.wait())]
    await asyncio.wait(ends, timeout=options.grace, return_when=asyncio.FIRST_COMPLETED)
    for task in ends:
        task.cancel()
    await server.stop()


# ---- several processes


def _worker(options: Options, parent: Connection) -> None:
    """A worker process; `parent` hears when it is ready, and when that end closes the parent is dead."""

    async def work() -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(parent.fileno(), os._exit, 1)
        await _work(options, Sessions(options.envs), parent.send)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent says when
    asyncio.run(work())


def _keep_working(options: Options, say: Say) -> None:
    """Keeps the workers running until it is told to end, and then waits for them."""
    told = False

    def tell(*_: object) -> None:
        nonlocal told
        told = True
        for process in processes:
            process.terminate()

    processes: dict[BaseProcess, Connection] = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, tell)
    try:
        for _ in range(options.workers):
            processes.update([_started(options)])
        for process, pipe in processes.items():
            _heard(process, pipe)
    except ValueError:
        tell()
        raise
    say(_ready(options, options.port))
    while processes:
        wait([process.sentinel for process in processes])
        for process in [process for process in processes if not process.is_alive()]:
            processes.pop(process).close()
            if not told:
                say(f"an env worker died (exit code {process.exitcode}); its sessions are lost, another is started")
                time.sleep(PAUSE)
            if not told:
                processes.update([_started(options)])


def _started(options: Options) -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context("spawn")  # gRPC does not outlive a fork
    ours, theirs = context.Pipe()
    process = context.Process(target=_worker, args=(options, theirs))
    process.start()
    theirs.close()
    return process, ours


def _heard(process: BaseProcess, pipe: Connection) -> None:
    try:
        pipe.recv()
    except EOFError:
        process.join()
        raise ValueError(f"an env worker ended before it served (exit code {process.exitcode}): see above") from None


@contextmanager
def _reserved(options: Options) -> Iterator[int]:
    """A port that workers may share, and nobody else takes: held, but not listened at."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    if not hasattr(socket, "SO_REUSEPORT"):
        raise ValueError("processes cannot share a port on this system: say --workers 1, and start several servers")
    try:
        with socket.create_server((options.host, options.port), family=family) as alone:
            port = alone.getsockname()[1]
        door = socket.socket(family)
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        door.bind((options.host, port))
    except OSError as error:
        raise ValueError(f"cannot listen at {options.host}:{options.port}: {error}. Choose another --port.") from error
    with door:
        yield port


def _tls(cert: Path | None, key: Path | None) -> tuple[bytes, bytes] | None:
    if (cert is None) != (key is None):
        raise ValueError("TLS needs both a certificate and its key: give --cert cert.pem and --key key.pem")
    if cert is None or key is None:
        return None
    try:
        return key.read_bytes(), cert.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {error.filename}, which --cert or --key names: {error.strerror}") from error


def _ready(options: Options, port: int) -> str:
    host = f"[{options.host}]" if ":" in options.host else options.host
    inside = options.token or options.host in ("127.0.0.1", "localhost", "::1")
    open_to = "" if inside else "  (without a token, everybody who reaches this machine may play, and run, its envs)"
    clear = (
        ""
        if not options.token or options.cert or options.host in ("127.0.0.1", "localhost", "::1")
        else ("  (without TLS, the token can be read on the way)")
    )
    return f"serving {', '.join(options.envs)} at {host}:{port}{open_to}{clear}"
