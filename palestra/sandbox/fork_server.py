"""Fork server of the sandbox: a small process that forks a supervisor process (supervisor.py) for each run.

Forking the main process, with its gigabytes and threads, would be slow and unsafe; starting a new Python for each run
would double its time.

`python -c ...` runs `main`. A byte with an attached socket on stdin requests a run. When stdin closes, the fork server
ends after its supervisors; those end when their requesters disconnect. The fork server removes the processes and
folders of supervisors that were killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import select
import shutil
import signal
import socket
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path

from palestra.sandbox import cgroup, mounts, process_tree, workdir
from palestra.sandbox.supervisor import BACKENDS, supervise

FOLDER_PREFIX = "palestra-sandbox-"
LOCK_GRACE_S = 60.0  # seconds within which a new folder may not be locked yet by its fork server
MAX_CONCURRENT_RUNS = 64  # concurrent runs; most slow programs sleep


class ForkServer:
    """Queue of waiting runs (their sockets) and process ids of the active supervisors."""

    def __init__(self, control_socket: socket.socket, root: Path) -> None:
        self.control_socket, self.root, self.can_mount = control_socket, root, mounts.is_supported(root)
        self.group = cgroup.open_group(root.name)
        if self.group:
            _hold(self.group)
        self.pending_runs: deque[socket.socket] = deque()
        self.supervisor_pids: set[int] = set()
        self.wakeup_fd, self._wakeup_write_fd = os.pipe()
        for end in (self.wakeup_fd, self._wakeup_write_fd):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wakeup_write_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        """Forks supervisors until the control socket is closed and all runs have ended."""
        is_open = True
        while is_open or self.pending_runs or self.supervisor_pids:
            ready, _, _ = select.select([self.wakeup_fd] + [self.control_socket] * is_open, [], [])
            if self.wakeup_fd in ready:
                os.read(self.wakeup_fd, 4096)
                self._reap()
            if self.control_socket in ready:
                is_open = self._admit()
            while self.pending_runs and len(self.supervisor_pids) < MAX_CONCURRENT_RUNS:
                self._begin(self.pending_runs.popleft())

    def _admit(self) -> bool:
        """Receives one run request; returns False if the control socket is closed."""
        byte, sockets, _, _ = socket.recv_fds(self.control_socket, 1, 1)
        self.pending_runs.extend(socket.socket(fileno=descriptor) for descriptor in sockets)
        return bool(byte)

    def _begin(self, asker: socket.socket) -> None:
        pid = os.fork()
        if pid == 0:
            self._run_supervisor(asker)
        self.supervisor_pids.add(pid)
        asker.close()

    def _run_supervisor(self, asker: socket.socket) -> None:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in (
                self.control_socket.fileno(),
                self.wakeup_fd,
                self._wakeup_write_fd,
                *(run.fileno() for run in self.pending_runs),
            ):
                os.close(descriptor)
            supervise(asker, self.root / str(os.getpid()), mounts=self.can_mount, group=self.group)
            code = 0
        except ConnectionError:  # the requester disconnected before sending its request
            code = 0
        finally:
            if code:
                traceback.print_exc()
            os._exit(code)  # never return: the child must not become a second fork server

    def _reap(self) -> None:
        """Reaps dead supervisors and cleans up after those that failed or were killed."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            self.supervisor_pids.discard(pid)
            if status:
                self._clear(pid)

    def _clear(self, supervisor: int) -> None:
        process_tree.kill_descendants(exclude=self.supervisor_pids)
        if (folder := self.root / str(supervisor)).exists():
            workdir.remove(folder)
        if self.group:
            cgroup.remove(self.group / str(supervisor))


def _hold(root: Path) -> bool:
    """Locks a folder until this process and its supervisors have exited; returns False if it is locked already."""
    descriptor = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return False
    return True


def _clear_up() -> None:
    """Removes the folders and cgroups of fork servers that were killed."""
    with contextlib.suppress(ValueError):  # refused when this one's group is opened
        if parent := cgroup.find_parent():
            _clear_abandoned(parent, cgroup.remove)
    _clear_abandoned(Path(tempfile.gettempdir()), workdir.remove)


def _clear_abandoned(parent: Path, remove: Callable[[Path], object]) -> None:
    for root in parent.glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):  # another process removed it
            old = time.time() - root.stat().st_mtime > LOCK_GRACE_S
            if old and root.stat().st_uid == os.getuid() and _hold(root):
                remove(root)


def main() -> None:
    """Main function of the fork server; its control socket is stdin."""
    for backend in BACKENDS.values():
        if not backend.missing():
            backend.load()
    process_tree.become_subreaper()
    listener = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(0, 1)
    _clear_up()
    root = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    _hold(root)
    gc.freeze()
    try:
        server = ForkServer(listener, root)
        try:
            server.serve()
        finally:
            if server.group:
                cgroup.remove(server.group)
    finally:
        shutil.rmtree(root, ignore_errors=True)
