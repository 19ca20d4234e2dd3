"""The state outside a sandbox while hostile programs run in it, and a way to run them."""

import asyncio
import contextlib
import fcntl
import os
import resource
import shutil
import socket
import stat
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy
from sandbox.attempts import PRELUDE

from palestra.sandbox import ResourceLimits, RunResult, Sandbox

SECRET = "the answer is hidden here"
LIMITS = ResourceLimits(wall=1.5, cpu=0.75, memory=100 * 2**20, processes=8, output=4000, disk=2**20)
GET_FLAGS = 0x8008_6601  # FS_IOC_GETFLAGS
PACKAGES = str(Path(numpy.__file__).parents[1])
MISTAKES = ("NameError", "SyntaxError", "AttributeError", "TypeError", "IndentationError")


@dataclass
class World:
    """A file with a secret, a folder, servers and a process, none of which a program in the sandbox may change or
    read."""

    folder: Path
    victim: subprocess.Popen[bytes]
    visits: list[str] = field(default_factory=list)
    sockets: list[socket.socket] = field(default_factory=list)
    token: str = f"esc{os.getpid()}"

    def __post_init__(self) -> None:
        self.outside, self.library = self.folder / "outside", Path(os.__file__)
        self.secret, self.unix = self.folder / "private" / "secret", self.folder / "socket"
        self.abstract = f"palestra-{os.getpid()}"
        self._make()
        self.tcp = self._serve(socket.AF_INET, ("127.0.0.1", 0))
        self._serve(socket.AF_UNIX, str(self.unix))
        self._serve(socket.AF_UNIX, "\0" + self.abstract)
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.udp.setblocking(False)
        self.sockets.append(self.udp)
        self.before = self.state()

    def _make(self) -> None:
        self.outside.mkdir()
        self.secret.parent.mkdir()
        self.secret.write_text(SECRET)
        os.utime(self.secret, (1_000_000_000, 1_000_000_000))
        self.secret.chmod(0o644)

    def restore(self) -> None:
        """Restores the state after a control test, whose program succeeded."""
        self.victim.kill()
        self.victim.wait()
        self.victim = begin_victim()
        for path in (self.outside, self.secret.parent):
            shutil.rmtree(path)
        self._make()
        self.visits.clear()
        self.before = self.state()

    def _serve(self, family: int, address: object) -> int:
        server = socket.socket(family)
        server.bind(address)  # type: ignore[arg-type]
        server.listen()
        self.sockets.append(server)
        threading.Thread(target=self._count, args=(server,), daemon=True).start()
        return int(server.getsockname()[1]) if family == socket.AF_INET else 0

    def _count(self, server: socket.socket) -> None:
        while True:
            try:
                server.accept()[0].close()
            except OSError:
                return
            self.visits.append(str(server.family))

    def state(self) -> dict[str, object]:
        """Everything that a program could have changed."""
        found, library = self.secret.stat() if self.secret.exists() else None, self.library.stat()
        return {
            "secret": self.secret.read_text() if found else "",
            "its mode, owner and dates": found and (found.st_mode, found.st_uid, found.st_gid, found.st_mtime),
            "its attributes": found and (os.listxattr(self.secret), flags(self.secret)),
            "private": sorted(os.listdir(self.secret.parent)),
            "outside": sorted(os.listdir(self.outside)),
            "library": (stat.S_IMODE(library.st_mode), library.st_size, library.st_mtime, flags(self.library)),
            "victim": self._of_victim(),
            "visits": list(self.visits) + self._datagrams(),
        }

    def _of_victim(self) -> tuple[object, ...]:
        pid = self.victim.pid
        if self.victim.poll() is not None:
            return ("dead", self.victim.returncode)
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        return (
            "alive",
            limits,
            os.getpriority(os.PRIO_PROCESS, pid),
            os.sched_getaffinity(pid),
            os.sched_getscheduler(pid),
        )

    def _datagrams(self) -> list[str]:
        try:
            return [f"datagram {self.udp.recv(99)!r}"]
        except BlockingIOError:
            return []

    def survivors(self) -> list[str]:
        """Processes with the token in their names."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            path = process / "comm"
            with contextlib.suppress(OSError):  # the process has ended
                found += [str(path)] * (path.read_text().strip() == self.token)
        return found

    def prelude_values(self) -> tuple[object, ...]:
        port, udp = self.tcp, self.udp.getsockname()[1]
        places = (str(self.secret), str(self.outside), port, udp, self.abstract, str(self.unix))
        return (*places, self.victim.pid, self.token, str(self.library), PACKAGES)

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        for one in self.sockets:
            one.close()


def flags(path: Path) -> bytes:
    """The flags that `lsattr` prints; none if the file system has none."""
    with open(path, "rb") as file, contextlib.suppress(OSError):
        return fcntl.ioctl(file, GET_FLAGS, bytes(8))
    return b""


def begin_victim() -> subprocess.Popen[bytes]:
    """A process that dies of SIGUSR1, as most processes do."""
    code = "import signal, time; signal.signal(signal.SIGUSR1, signal.SIG_DFL); time.sleep(600)"
    return subprocess.Popen([sys.executable, "-S", "-c", code])


def attempt(backend: str, source: str, world: World, limits: ResourceLimits = LIMITS) -> RunResult:
    program = PRELUDE.format(world=world.prelude_values()) + source
    return asyncio.run(Sandbox(backend).run_python(program, limits=limits))
