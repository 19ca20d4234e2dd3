"""`palestra serve-envs`: the processes of a server, from the first to the last.

Envs run in workers, processes that listen at the same port (SO_REUSEPORT): the system gives every connection to one of
them, and it stays there with all its sessions. The first process watches over them. It starts another for one that
dies, or that has not come back to its event loop for as long as a call of an env may take; and it ends those that do
not end on SIGTERM. Sessions of a worker that is gone are lost, and played again elsewhere by their clients.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from palestra.remote.env_server import Door, EnvServer
from palestra.remote.sessions import Bounds, Sessions

Say = Callable[[str], None]
PAUSE = 1.0  # seconds before a worker that died is started again
PULSE = 0.5  # seconds between two signs of life of a worker
START = 120.0  # seconds that a worker may take to its first one
LATE = 5.0  # seconds after the grace period that a worker may take to its end
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


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
    bounds: Bounds = field(default_factory=Bounds)

    def door(self) -> Door:
        """Raises ValueError where the files of TLS are not there."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return Door(f"{host}:{self.port}", self.workers, _tls(self.cert, self.key), self.token, self.lease)


def serve(options: Options, say: Say = print) -> None:
    """Serves until SIGTERM or SIGINT; then opens nothing more, lets sessions end within the grace period, kills workers
    that do not come to an end, and returns. A second signal ends it at once.

    Raises ValueError where an env is unknown, TLS's files are missing, or the port is taken.
    """
    Sessions(options.envs)
    options.door()
    with _reserved(options) as port:
        Workers(replace(options, port=port), say).run()


# ---- a worker


def _worker(options: Options, parent: Connection) -> None:
    """A worker process. It sends signs of life to `parent` once it serves; when that end closes, the parent is dead."""

    async def work() -> None:
        asyncio.get_running_loop().add_reader(parent.fileno(), os._exit, 1)
        await _work(options, parent)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent says when
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)  # also one that never comes back to its event loop
    asyncio.run(work())


async def _work(options: Options, parent: Connection) -> None:
    sessions = Sessions(options.envs, options.bounds)
    server = EnvServer(sessions, options.door())
    gc.freeze()  # modules stay: need not be looked through again and again
    told, again = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: (again if told.is_set() else told).set())
    await server.start()
    beating = asyncio.create_task(_beat(sessions, parent))
    await told.wait()
    ends = [asyncio.create_task(server.drain()), asyncio.create_task(again.wait())]
    await asyncio.wait(ends, timeout=options.grace, return_when=asyncio.FIRST_COMPLETED)
    for task in ends:
        task.cancel()
    await server.stop()
    beating.cancel()


async def _beat(sessions: Sessions, parent: Connection) -> None:
    """Says again and again that the event loop runs, and that threads are free to play."""
    os.set_blocking(parent.fileno(), False)
    while True:
        if not sessions.clogged:
            with suppress(BlockingIOError):  # the parent does not read: it is stopped
                os.write(parent.fileno(), b".")
        await asyncio.sleep(PULSE)


# ---- the process that watches over them


@dataclass(eq=False)
class Worker:
    """A worker process, the parent's end of its pipe, and until when a sign of life must come."""

    process: BaseProcess
    pipe: Connection
    until: float
    serves: bool = False

    @classmethod
    def start(cls, options: Options) -> Worker:
        context = multiprocessing.get_context("spawn")  # gRPC does not outlive a fork
        ours, theirs = context.Pipe()
        process = context.Process(target=_worker, args=(options, theirs))
        process.start()
        theirs.close()
        return cls(process, ours, time.monotonic() + START)

    def hear(self, limit: float) -> None:
        """Reads the signs of life that have come."""
        with suppress(OSError):  # of one that has died, as `ended` says
            if self.pipe.poll() and os.read(self.pipe.fileno(), 2**16):
                self.until, self.serves = time.monotonic() + limit, True

    def ended(self) -> bool:
        return not self.process.is_alive()


class Workers:
    """Keeps workers at work until told to end."""

    def __init__(self, options: Options, say: Say) -> None:
        self.options, self.say = options, say
        self.workers: list[Worker] = []
        self.over: float | None = None  # the time at which workers that still run are killed, once the server ends
        self.killed = 0

    def run(self) -> None:
        """Raises ValueError where a worker ends before it serves; exits with code 1 where some had to be killed."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._tell)
        self.workers = [Worker.start(self.options) for _ in range(self.options.workers)]
        try:
            while not all(worker.serves for worker in self.workers):
                self._first()
            self.say(_ready(self.options, self.options.port))
            while self.workers:
                self._look()
        finally:
            self._kill(self.workers)
        if self.killed and self.over:
            self.say(f"{self.killed} env workers had not ended {LATE:g} s after the grace period: killed")
            sys.exit(1)

    def _tell(self, number: int, _: object) -> None:
        """A signal: the first lets workers end, the second does not."""
        if self.over:
            self._kill(self.workers)
            os._exit(128 + number)
        self.over, self.killed = time.monotonic() + self.options.grace + LATE, 0
        for worker in self.workers:
            worker.process.terminate()

    def _first(self) -> None:
        """Waits for the workers' first signs of life."""
        self._listen()
        for worker in self.workers:
            if worker.ended():
                if self.over:
                    sys.exit(0)
                raise ValueError(
                    f"an env worker ended before it served (exit code {worker.process.exitcode}): see above"
                )

    def _look(self) -> None:
        """Waits a little, then replaces workers that died or hang; once told to end, only ends them."""
        self._listen()
        now = time.monotonic()
        if self.over:
            self._kill(self.workers if now > self.over else [])
        else:
            self._kill([worker for worker in self.workers if now > worker.until])
        for worker in [worker for worker in self.workers if worker.ended()]:
            self.workers.remove(worker)
            worker.pipe.close()
            if not self.over:
                self._replace(worker)

    def _listen(self) -> None:
        wait([*(w.process.sentinel for w in self.workers), *(w.pipe for w in self.workers)], timeout=PULSE)
        for worker in self.workers:
            worker.hear(self.options.bounds.call)

    def _replace(self, worker: Worker) -> None:
        why = "hung" if time.monotonic() > worker.until else "died"
        self.say(
            f"an env worker {why} (exit code {worker.process.exitcode}); its sessions are lost, another is started"
        )
        time.sleep(PAUSE)
        if not self.over:
            self.workers.append(Worker.start(self.options))

    def _kill(self, workers: list[Worker]) -> None:
        for worker in workers:
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
                self.killed += 1


@contextmanager
def _reserved(options: Options) -> Iterator[int]:
    """A port that workers may share, and nobody else takes: held, but not listened at."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    if not hasattr(socket, "SO_REUSEPORT"):
        raise ValueError("envs are served on systems where processes can share a port (SO_REUSEPORT): Linux, macOS")
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
