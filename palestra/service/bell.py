"""Wake-up socket between two processes: one byte means "check the store". A lost byte delays an answer by milliseconds
and loses nothing.

Each end detects that the other process has exited, since the operating system closes its socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from typing import Self


class Bell:
    """One end of a wake-up socket pair."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.gone = False  # the other process has exited
        end.setblocking(False)

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """Returns the two connected ends."""
        ours, theirs = socket.socketpair()
        return cls(ours), cls(theirs)

    def ring(self) -> None:
        """Wakes the other end."""
        # a full buffer means that the other end has not read yet; any other error, that it exited or was replaced
        with contextlib.suppress(OSError):
            self.end.send(b"!")

    def wait(self, seconds: float) -> None:
        """Blocks until the other end wakes this one, it is gone, or `seconds` have passed."""
        if select.select([self.end], [], [], seconds)[0]:
            self._hush()

    async def heard(self, seconds: float) -> None:
        """Asynchronous `wait`. If the other end is gone, sleeps for `seconds`."""
        if self.gone:
            await asyncio.sleep(seconds)
            return
        loop, ringing = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self.end, ringing.set)
        try:
            async with asyncio.timeout(seconds):
                await ringing.wait()
                self._hush()
        except TimeoutError:
            pass
        finally:
            loop.remove_reader(self.end)

    def _hush(self) -> None:
        try:
            while data := self.end.recv(4096):
                if len(data) < 4096:
                    return
            self.gone = True
        except BlockingIOError:
            pass
        except ConnectionResetError:
            self.gone = True
