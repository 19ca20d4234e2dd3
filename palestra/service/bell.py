"""A bell between two processes: a byte that says "look at the store". A lost one costs milliseconds, not an answer.

Either end hears the other die, since the system closes its socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from typing import Self


class Bell:
    """One end of a pair."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.gone = False  # the other process
        end.setblocking(False)

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        ours, theirs = socket.socketpair()
        return cls(ours), cls(theirs)

    def ring(self) -> None:
        # a full buffer means that the other end has not yet looked; anything else, that it died or was replaced
        with contextlib.suppress(OSError):
            self.end.send(b"!")

    def wait(self, seconds: float) -> None:
        """Returns when the bell rings, the other end is gone, or the time is over."""
        if select.select([self.end], [], [], seconds)[0]:
            self._hush()

    async def heard(self, seconds: float) -> None:
        """`wait`, for a coroutine. Where the other end is gone, there is nothing to hear and the time passes."""
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
