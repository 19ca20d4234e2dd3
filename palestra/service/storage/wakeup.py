"""Wake-up socket between two processes: one byte means "check the store". A lost byte delays an answer by milliseconds
and loses nothing.

Each end detects the end of what the other sends: the other process has exited, since the operating system closes its
socket then, or it asks this one to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from typing import Self


class WakeupSocket:
    """One end of a wake-up socket pair."""

    def __init__(self, end: socket.socket) -> None:
        self.sock = end
        self.has_heard = False  # the other process was ready once
        self.peer_gone = False  # the other process has exited, or asks this one to end
        end.setblocking(False)

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """Returns the two connected ends."""
        ours, theirs = socket.socketpair()
        return cls(ours), cls(theirs)

    def wake(self) -> None:
        """Wakes the other end."""
        # a full buffer means that the other end has not read yet; any other error, that it exited or was replaced
        with contextlib.suppress(OSError):
            self.sock.send(b"!")

    def ask_to_end(self) -> None:
        """Asks the other process to end. It can still wake this end."""
        with contextlib.suppress(OSError):  # it has exited
            self.sock.shutdown(socket.SHUT_WR)

    def wait(self, seconds: float) -> None:
        """Blocks until the other end wakes this one, it is gone, or `seconds` have passed."""
        if select.select([self.sock], [], [], seconds)[0]:
            self.read()

    async def wait_async(self, seconds: float, ringing: asyncio.Event) -> None:
        """Asynchronous `wait`, which also ends when `ringing` is set. If the other end is gone, sleeps for
        `seconds`."""
        if self.peer_gone:
            await asyncio.sleep(seconds)
            return
        loop = asyncio.get_running_loop()
        loop.add_reader(self.sock, ringing.set)
        try:
            async with asyncio.timeout(seconds):
                await ringing.wait()
                self.read()
        except TimeoutError:
            pass
        finally:
            loop.remove_reader(self.sock)

    def read(self) -> None:
        """Reads what the other end has sent, without waiting."""
        try:
            while data := self.sock.recv(4096):
                self.has_heard = True
                if len(data) < 4096:
                    return
            self.peer_gone = True
        except BlockingIOError:
            pass
        except ConnectionResetError:
            self.peer_gone = True
