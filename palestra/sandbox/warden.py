"""Fork server of the sandbox: a small process that forks a supervisor process (keeper.py) for each run.

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
import sys
import tempfile
import time
import traceback
from collections import deque
from pathlib import Path

from palestra.sandbox import mounts, scratch, tree
from palestra.sandbox.keeper import BACKENDS, keep

ROOT = "palestra-sandbox-"
YOUNG = 60.0  # seconds within which a new folder may not be locked yet by its fork server
AT_ONCE = 64  # concurrent runs; most slow programs sleep


class Warden:
    """Queue of waiting runs (their sockets) and process ids of the active supervisors."""

    def __init__(self, door: socket.socket, root: Path) -> None:
        self.door, self.root, self.mounts = door, root, mounts.works(root)
        self.waiting: deque[socket.socket] = deque()
        self.keepers: set[int] = set()
        self.bell, self._ring = os.pipe()
        for end in (self.bell, self._ring):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._ring, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        """Forks supervisors until the control socket is closed and all runs have ended."""
        is_open = True
        while is_open or self.waiting or self.keepers:
            ready, _, _ = select.select([self.bell] + [self.door] * is_open, [], [])
            if self.bell in ready:
                os.read(self.bell, 4096)
                self._bury()
            if self.door in ready:
                is_open = self._admit()
            while self.waiting and len(self.keepers) < AT_ONCE:
                self._begin(self.waiting.popleft())

    def _admit(self) -> bool:
        """Receives one run request; returns False if the control socket is closed."""
        byte, sockets, _, _ = socket.recv_fds(self.door, 1, 1)
        self.waiting.extend(socket.socket(fileno=descriptor) for descriptor in sockets)
        return bool(byte)

    def _begin(self, asker: socket.socket) -> None:
        pid = os.fork()
        if pid == 0:
            self._become_keeper(asker)
        self.keepers.add(pid)
        asker.close()

    def _become_keeper(self, asker: socket.socket) -> None:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in (self.door.fileno(), self.bell, self._ring, *(run.fileno() for run in self.waiting)):
                os.close(descriptor)
            keep(asker, self.root / str(os.getpid()), mounts=self.mounts)
            code = 0
        except ConnectionError:  # the requester disconnected before sending its request
            code = 0
        finally:
            if code:
                traceback.print_exc()
            os._exit(code)  # never return: the child must not become a second fork server

    def _bury(self) -> None:
        """Reaps dead supervisors and cleans up after those that failed or were killed."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            self.keepers.discard(pid)
            if status:
                self._clear(pid)

    def _clear(self, keeper: int) -> None:
        tree.kill(spare=self.keepers)
        if (folder := self.root / str(keeper)).exists():
            scratch.remove(folder)


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
    """Removes the folders of fork servers that were killed."""
    for root in Path(tempfile.gettempdir()).glob(f"{ROOT}*"):
        with contextlib.suppress(FileNotFoundError):  # another process removed it
            old = time.time() - root.stat().st_mtime > YOUNG
            if old and root.stat().st_uid == os.getuid() and _hold(root):
                scratch.remove(root)


def main() -> None:
    """Main function of the fork server; its control socket is stdin."""
    for backend in BACKENDS.values():
        if not backend.missing():
            backend.load()
    tree.adopt()
    door = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(0, 1)
    _clear_up()
    root = Path(tempfile.mkdtemp(prefix=ROOT))
    _hold(root)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    gc.freeze()
    try:
        Warden(door, root).serve()
    finally:
        shutil.rmtree(root, ignore_errors=True)
