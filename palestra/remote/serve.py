"""`palestra serve-envs`: the worker processes of an env server and their supervisor.

Envs run in worker processes that listen on the same port (SO_REUSEPORT); the kernel assigns each connection to one of
them, and all its sessions stay there. The parent process supervises the workers: it replaces a worker that dies or
whose event loop is blocked for longer than the call limit, and kills workers that do not end on SIGTERM. Sessions of a
lost worker are lost; their clients replay them on another one.
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
PAUSE = 1.0  # seconds before a dead worker is replaced
PULSE = 0.5  # seconds between heartbeats of a worker
START = 120.0  # seconds until a worker's first heartbeat is due
LATE = 5.0  # seconds after the grace period until a running worker is killed
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Options:
    """Options of `palestra serve-envs`.

    `token`: the token itself. `lease`: seconds after which a silent client's sessions are closed. `grace`: seconds that
    open sessions have to end after SIGTERM.
    """

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
        """Returns the listen settings of a worker. Raises ValueError if the TLS files are incomplete or unreadable."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return Door(f"{host}:{self.port}", self.workers, _tls(self.cert, self.key), self.token, self.lease)


def serve(options: Options, say: Say = print) -> None:
    """Serves until SIGTERM or SIGINT, then drains: opens no sessions, waits up to the grace period, kills workers that
    have not ended, and returns. A second signal ends everything at once.

    Raises ValueError if an env is unknown, the TLS files are missing, the port is taken, or a worker fails at start.
    Exits with code 1 if workers had to be killed.
    """
    Sessions(options.envs)
    options.door()
    with _reserved(options) as port:
        Workers(replace(options, port=port), say).run()


# ---- a worker


def _worker(options: Options, parent: Connection) -> None:
    """Main function of a worker process. It sends heartbeats to `parent` and exits when that pipe closes."""

    async def work() -> None:
        asyncio.get_running_loop().add_reader(parent.fileno(), os._exit, 1)
        await _work(options, parent)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent sends SIGTERM
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)  # also ends a worker with a blocked event loop
    asyncio.run(work())


async def _work(options: Options, parent: Connection) -> None:
    sessions = Sessions(options.envs, options.bounds)
    server = EnvServer(sessions, options.door())
    gc.freeze()  # imported modules are permanent: exclude them from garbage collection
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
    """Sends heartbeats while the event loop runs and the thread pool has free threads."""
    os.set_blocking(parent.fileno(), False)
    while True:
        if not sessions.clogged:
            with suppress(BlockingIOError):  # the pipe is full: the parent is stopped
                os.write(parent.fileno(), b".")
        await asyncio.sleep(PULSE)


# ---- the supervisor


@dataclass(eq=False)
class Worker:
    """A worker process, the parent's end of its pipe, and the deadline of its next heartbeat (`time.monotonic`, s)."""

    process: BaseProcess
    pipe: Connection
    until: float
    serves: bool = False

    @classmethod
    def start(cls, options: Options) -> Worker:
        """Starts a worker process."""
        context = multiprocessing.get_context("spawn")  # gRPC does not support fork
        ours, theirs = context.Pipe()
        process = context.Process(target=_worker, args=(options, theirs))
        process.start()
        theirs.close()
        return cls(process, ours, time.monotonic() + START)

    def hear(self, limit: float) -> None:
        """Reads received heartbeats; the next one is then due within `limit` seconds."""
        with suppress(OSError):  # the worker has died; `ended` reports it
            if self.pipe.poll() and os.read(self.pipe.fileno(), 2**16):
                self.until, self.serves = time.monotonic() + limit, True

    def ended(self) -> bool:
        """Returns True if the process has exited."""
        return not self.process.is_alive()


class Workers:
    """Supervisor of the workers: starts, monitors, replaces and stops them."""

    def __init__(self, options: Options, say: Say) -> None:
        self.options, self.say = options, say
        self.workers: list[Worker] = []
        self.over: float | None = None  # after a stop signal: `time.monotonic` time at which running workers are killed
        self.killed = 0

    def run(self) -> None:
        """Runs until a stop signal has been handled.

        Raises ValueError if a worker ends before it serves. Exits with code 1 if workers had to be killed.
        """
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
        """Signal handler: the first signal terminates the workers, the second kills them and exits."""
        if self.over:
            self._kill(self.workers)
            os._exit(128 + number)
        self.over, self.killed = time.monotonic() + self.options.grace + LATE, 0
        for worker in self.workers:
            worker.process.terminate()

    def _first(self) -> None:
        """Waits for first heartbeats. Raises ValueError if a worker has ended."""
        self._listen()
        for worker in self.workers:
            if worker.ended():
                if self.over:
                    sys.exit(0)
                raise ValueError(
                    f"an env worker ended before it served (exit code {worker.process.exitcode}): see above"
                )

    def _look(self) -> None:
        """Waits briefly, then replaces dead and hanging workers. After a stop signal it only removes them."""
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
    """Reserves the port for the workers: binds it with SO_REUSEPORT without listening. Yields the port number."""
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
