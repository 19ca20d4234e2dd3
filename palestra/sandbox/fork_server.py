"""The fork server: a small process that forks a child for each request.

A request is a program to run: the child is its supervisor (supervisor.py). Or it names a function to call here, which
prepares the request in this process and returns what its child does: what one request loads, the others have.

Forking the main process, with its gigabytes and threads, would be slow and unsafe; starting a new Python for each run
would double its time.

`python -c ...` runs `main`. A byte with an attached socket on stdin is a request, `RUN` or `CALL`. When stdin closes,
the fork server ends after its children; those end when their requesters disconnect. The fork server removes the
processes and folders of supervisors that were killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import selectors
import shutil
import signal
import socket
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from palestra.sandbox import cgroup, mounts, process_tree, sandlock, workdir
from palestra.sandbox.base import CALL
from palestra.sandbox.supervisor import supervise

FOLDER_PREFIX = "palestra-sandbox-"
LOCK_GRACE_S = 60.0  # seconds within which a new folder may not be locked yet by its fork server
MAX_CHILDREN = 64  # at once: further requests wait; most slow programs sleep

Serve = Callable[[socket.socket], object]
"""Serves one request, in a child. Raises ConnectionError if the requester has disconnected."""


class ForkServer:
    """Forks a child for each socket that arrives at the control socket; supervisors have a folder each in `root`."""

    def __init__(self, control_socket: socket.socket, root: Path) -> None:
        self.control_socket = control_socket
        self.root = root
        self.can_mount = mounts.is_supported(root)
        self.group = cgroup.open_group(root.name)
        if self.group:
            _hold(self.group)
        self.unread_calls: dict[socket.socket, bytearray] = {}  # calls whose line has not arrived whole
        self.pending: deque[tuple[bytes, socket.socket]] = deque()  # the line of a call, b"" for a program
        self.children: set[int] = set()
        self.wakeup_fd, self._wakeup_write_fd = os.pipe()
        for end in (self.wakeup_fd, self._wakeup_write_fd):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wakeup_write_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.is_open = True
        self.events = selectors.DefaultSelector()
        self.events.register(self.wakeup_fd, selectors.EVENT_READ)
        self.events.register(control_socket, selectors.EVENT_READ)

    def serve(self) -> None:
        """Forks children until the control socket is closed and all of them have ended."""
        while self.is_open or self.unread_calls or self.pending or self.children:
            for key, _ in self.events.select():
                if key.fileobj == self.wakeup_fd:
                    os.read(self.wakeup_fd, 4096)
                    self._reap()
                elif key.fileobj == self.control_socket:
                    self._admit()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._read_call(key.fileobj)
            while self.pending and len(self.children) < MAX_CHILDREN:
                self._begin(*self.pending.popleft())

    def _admit(self) -> None:
        """Receives one socket, or that the control socket is closed."""
        kind, sockets, _, _ = socket.recv_fds(self.control_socket, 1, 1)
        if not kind:
            self.is_open = False
            self.events.unregister(self.control_socket)
        for requester in [socket.socket(fileno=descriptor) for descriptor in sockets]:
            if kind == CALL:
                self.unread_calls[requester] = bytearray()
                self.events.register(requester, selectors.EVENT_READ)
            else:
                self.pending.append((b"", requester))

    def _read_call(self, requester: socket.socket) -> None:
        """Reads what has arrived of a call's line; waiting for the rest would delay all others."""
        try:
            data = requester.recv(2**16)
        except ConnectionError:
            data = b""
        line = self.unread_calls[requester]
        line += data
        if data and not line.endswith(b"\n"):
            return
        del self.unread_calls[requester]
        self.events.unregister(requester)
        if data:
            self.pending.append((bytes(line), requester))
        else:
            requester.close()

    def _begin(self, line: bytes, requester: socket.socket) -> None:
        """Forks the child that serves this socket: the call in `line`, or a program."""
        with requester:
            serve = _prepare_call(line) if line else self._supervise
            pid = os.fork()
            if pid == 0:
                self._run_child(serve, requester)
            self.children.add(pid)

    def _supervise(self, requester: socket.socket) -> None:
        supervise(requester, self.root / str(os.getpid()), mounts=self.can_mount, group=self.group)

    def _run_child(self, serve: Serve, requester: socket.socket) -> None:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.events.close()
            for descriptor in (
                self.control_socket.fileno(),
                self.wakeup_fd,
                self._wakeup_write_fd,
                *(waiting.fileno() for waiting in self.unread_calls),
                *(waiting.fileno() for _, waiting in self.pending),
            ):
                os.close(descriptor)
            serve(requester)
            code = 0
        except ConnectionError:  # the requester disconnected before sending its request
            code = 0
        finally:
            if code:
                traceback.print_exc()
            os._exit(code)  # never return: the child must not become a second fork server

    def _reap(self) -> None:
        """Reaps children that have ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            self.children.discard(pid)
            if status:
                # the child has failed or was killed
                process_tree.kill_descendants(exclude=self.children)
                if (folder := self.root / str(pid)).exists():
                    workdir.remove(folder)
                if self.group:
                    cgroup.remove(self.group / str(pid))


def _prepare_call(line: bytes) -> Serve:
    """Calls what a request, a line of JSON, names with it; returns what the child does."""
    request: dict[str, Any] = json.loads(line)
    module, _, function = request["call"].partition(":")
    serve: Serve = getattr(import_module(module), function)(request)
    return serve


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
    if not sandlock.missing():
        sandlock.load()
    process_tree.become_subreaper()
    control_socket = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)  # from here on stdin and stdout lead nowhere
    os.dup2(0, 1)
    _clear_up()
    root = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    _hold(root)
    gc.freeze()
    try:
        server = ForkServer(control_socket, root)
        try:
            server.serve()
        finally:
            if server.group:
                cgroup.remove(server.group)
    finally:
        shutil.rmtree(root, ignore_errors=True)
