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
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait

from palestra.core.http.listen import url_host
from palestra.core.http.origin_middleware import is_loopback
from palestra.envs.remote.server import EnvServer, EnvServerOptions
from palestra.envs.remote.sessions import EnvSessions
from palestra.parallel.processes import PipeProcess, join_or_kill

PrintLine = Callable[[str], None]
RESTART_DELAY_S = 1.0  # seconds before a dead worker is replaced
HEARTBEAT_INTERVAL_S = 0.5  # seconds between heartbeats of a worker
START_TIMEOUT_S = 120.0  # seconds until a worker's first heartbeat is due
KILL_DELAY_S = 5.0  # seconds after the grace period until a running worker is killed
PR_SET_PDEATHSIG = 1  # option of prctl


def serve(options: EnvServerOptions, print_line: PrintLine = print) -> None:
    """Serves until SIGTERM or SIGINT, then drains: opens no sessions, waits up to the grace period, kills workers that
    have not ended, and returns. A second signal ends everything at once.

    Raises ValueError if an env is unknown, the TLS files are missing, the port is taken, or a worker fails at start.
    Exits with code 1 if workers had to be killed.
    """
    EnvSessions(options.envs)
    options.read_tls()
    with _reserved(options) as port:
        WorkerSupervisor(replace(options, port=port), print_line).run()


# ---- a worker


def _worker(parent: Connection, options: EnvServerOptions) -> None:
    """Main function of a worker process. It sends heartbeats to `parent` and exits when that pipe closes."""

    async def work() -> None:
        asyncio.get_running_loop().add_reader(parent.fileno(), os._exit, 1)
        await _work(options, parent)

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # also ends a worker with a blocked event loop
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    asyncio.run(work())


async def _work(options: EnvServerOptions, parent: Connection) -> None:
    sessions = EnvSessions(options.envs, options.limits)
    server = EnvServer(sessions, options)
    gc.freeze()  # imported modules are permanent: exclude them from garbage collection
    stop_event = asyncio.Event()
    # A service manager may send SIGTERM to the workers too: a second one must not cut the grace period short.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop_event.set)
    await server.start()
    beating = asyncio.create_task(_beat(sessions, parent))
    await stop_event.wait()
    with suppress(TimeoutError):
        async with asyncio.timeout(options.grace_s):
            await server.drain()
    await server.stop()
    beating.cancel()


async def _beat(sessions: EnvSessions, parent: Connection) -> None:
    """Sends heartbeats while the event loop runs and the thread pool has free threads."""
    os.set_blocking(parent.fileno(), False)
    while True:
        if not sessions.is_overloaded:
            with suppress(BlockingIOError):  # the pipe is full: the parent is stopped
                os.write(parent.fileno(), b".")
        await asyncio.sleep(HEARTBEAT_INTERVAL_S)


# ---- the supervisor


@dataclass(eq=False)
class EnvWorkerProcess:
    """A worker process and the deadline of its next heartbeat (`time.monotonic`, s)."""

    child: PipeProcess
    heartbeat_deadline: float
    is_serving: bool = False

    @classmethod
    def start(cls, options: EnvServerOptions) -> EnvWorkerProcess:
        """Starts a worker process."""
        return cls(PipeProcess(_worker, options), time.monotonic() + START_TIMEOUT_S)

    def read_heartbeats(self, timeout_s: float) -> None:
        """Reads received heartbeats; the next one is then due within `timeout_s` seconds."""
        with suppress(OSError):  # the worker has died; `has_exited` reports it
            if self.child.pipe.poll() and os.read(self.child.pipe.fileno(), 2**16):
                self.heartbeat_deadline = time.monotonic() + timeout_s
                self.is_serving = True

    def has_exited(self) -> bool:
        """Returns True if the process has exited."""
        return not self.child.process.is_alive()


class WorkerSupervisor:
    """Supervisor of the workers: starts, monitors, replaces and stops them."""

    def __init__(self, options: EnvServerOptions, print_line: PrintLine) -> None:
        self.options = options
        self.print_line = print_line
        self.workers: list[EnvWorkerProcess] = []
        # after a stop signal: `time.monotonic` time at which running workers are killed
        self.kill_time: float | None = None
        self.num_killed = 0

    def run(self) -> None:
        """Runs until a stop signal has been handled.

        Raises ValueError if a worker ends before it serves. Exits with code 1 if workers had to be killed.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._tell)
        self.workers = [EnvWorkerProcess.start(self.options) for _ in range(self.options.num_workers)]
        try:
            while not all(worker.is_serving for worker in self.workers):
                self._first()
            self.print_line(_ready(self.options, self.options.port))
            while self.workers:
                self._look()
        finally:
            self._kill(self.workers)
        if self.num_killed and self.kill_time:
            self.print_line(
                f"{self.num_killed} env workers had not ended {KILL_DELAY_S:g} s after the grace period: killed"
            )
            sys.exit(1)

    def _tell(self, number: int, _: object) -> None:
        """Signal handler: the first signal terminates the workers, the second kills them and exits."""
        if self.kill_time:
            self._kill(self.workers)
            os._exit(128 + number)
        self.kill_time = time.monotonic() + self.options.grace_s + KILL_DELAY_S
        self.num_killed = 0
        for worker in self.workers:
            worker.child.process.terminate()

    def _first(self) -> None:
        """Waits for first heartbeats. Raises ValueError if a worker has ended."""
        self._listen()
        for worker in self.workers:
            if worker.has_exited():
                if self.kill_time:
                    sys.exit(0)
                raise ValueError(f"an env worker ended before it served ({worker.child.exit_reason()}): see above")

    def _look(self) -> None:
        """Waits briefly, then replaces dead and hanging workers. After a stop signal it only removes them."""
        before = time.monotonic()
        self._listen()
        now = time.monotonic()
        for worker in self.workers:  # if this process was suspended, so were they
            worker.heartbeat_deadline += max(0.0, now - before - HEARTBEAT_INTERVAL_S)
        if not self.kill_time:
            self._kill([worker for worker in self.workers if now > worker.heartbeat_deadline])
        elif now > self.kill_time:
            self._kill(self.workers)
        for worker in [worker for worker in self.workers if worker.has_exited()]:
            self.workers.remove(worker)
            worker.child.pipe.close()
            if not self.kill_time:
                self._replace(worker)

    def _listen(self) -> None:
        children = [worker.child for worker in self.workers]
        wait([*(c.process.sentinel for c in children), *(c.pipe for c in children)], timeout=HEARTBEAT_INTERVAL_S)
        for worker in self.workers:
            worker.read_heartbeats(self.options.limits.call_timeout_s)

    def _replace(self, worker: EnvWorkerProcess) -> None:
        why = "hung" if time.monotonic() > worker.heartbeat_deadline else "died"
        self.print_line(
            f"an env worker {why} ({worker.child.exit_reason()}); its sessions are lost, another is started"
        )
        time.sleep(RESTART_DELAY_S)
        if not self.kill_time:
            self.workers.append(EnvWorkerProcess.start(self.options))

    def _kill(self, workers: list[EnvWorkerProcess]) -> None:
        for worker in workers:
            self.num_killed += join_or_kill(worker.child.process, 0.0)


@contextmanager
def _reserved(options: EnvServerOptions) -> Iterator[int]:
    """Reserves the port for the workers: binds it with SO_REUSEPORT without listening. Yields the port number."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    if not hasattr(socket, "SO_REUSEPORT"):
        raise ValueError("envs are served on systems where processes can share a port (SO_REUSEPORT): Linux, macOS")
    try:
        with socket.create_server((options.host, options.port), family=family) as alone:
            port = alone.getsockname()[1]
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((options.host, port))
    except OSError as error:
        raise ValueError(f"cannot listen at {options.host}:{options.port}: {error}. Choose another --port.") from error
    with listener:
        yield port


def _ready(options: EnvServerOptions, port: int) -> str:
    line = f"serving {', '.join(options.envs)} at {url_host(options.host)}:{port}"
    if is_loopback(options.host):
        return line
    if not options.token:
        return f"{line}  (without a token, anyone who reaches this machine may play, and run, its envs)"
    if not options.cert:
        return f"{line}  (without TLS, the token can be read on the way)"
    return line
