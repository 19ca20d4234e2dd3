"""One program while it runs: what goes in, what comes out, what it uses, and which limit it goes over.

Totals over all its processes are measured, from 100 times a second for one that works to 10 times for one that sleeps;
between two looks the kernel's own limits hold (`program.orders`).
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
import time
from collections.abc import Callable
from typing import IO

from palestra.sandbox import tree
from palestra.sandbox.base import Ended, Limits
from palestra.sandbox.held import Held, held
from palestra.sandbox.program import Program

SOONEST, LATEST = 0.01, 0.1  # seconds between two looks
THREADS = 16  # for each process
STARVED = 2.0  # times its wall limit that a program is given on top, at most, while others have the processors
PIECE = 2**16


class Watch:
    """`ended` is the limit that the program went over, if any; `seconds` the time since it started."""

    def __init__(
        self, limits: Limits, over_disk: Callable[[Held], bool], program: Program, asker: socket.socket
    ) -> None:
        self.limits, self.over_disk, self.program, self.asker = limits, over_disk, program, asker
        self.ended: Ended | None = None
        self.began = time.monotonic()
        self._outputs = {program.stdout: bytearray(), program.stderr: bytearray()}
        self._cpu, self._pause, self._next = 0.0, SOONEST, self.began

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def until_the_end(self, sent: bytes) -> None:
        """Feeds the program `sent` and returns once it is over, or is to be."""
        unsent, death = memoryview(sent), _death(self.program.pid)
        with selectors.DefaultSelector() as events:
            events.register(self.asker, selectors.EVENT_READ)
            events.register(self.program.stdin, selectors.EVENT_WRITE)
            for stream in (self.program.stdin, *self._outputs):
                os.set_blocking(stream.fileno(), False)
            for stream in self._outputs:
                events.register(stream, selectors.EVENT_READ)
            if death:
                events.register(death, selectors.EVENT_READ)
            over = False
            while not over and not self.ended:
                ready = {key.fileobj for key, _ in events.select(max(0.0, self._next - time.monotonic()))}
                if self.program.stdin in ready:
                    unsent = self._feed(unsent, events)
                for stream in self._outputs.keys() & ready:
                    if not self._read(stream):
                        events.unregister(stream)
                if time.monotonic() >= self._next:
                    self._look()
                heard = events.get_map().keys() & {stream.fileno() for stream in self._outputs}
                over = self.asker in ready or (death in ready if death else not heard)
        if death:
            os.close(death)

    def close(self) -> tuple[bytes, bytes]:
        """All that a program wrote, to stdout and stderr, which is dead with all that it started."""
        for stream, said in self._outputs.items():
            while len(said) <= self.limits.output and self._read(stream):
                pass
            stream.close()
        self.program.stdin.close()
        stdout, stderr = (bytes(said[: self.limits.output]) for said in self._outputs.values())
        return stdout, stderr

    def _feed(self, unsent: memoryview, events: selectors.BaseSelector) -> memoryview:
        """Writes some; closes the program's stdin after the last."""
        try:
            unsent = unsent[os.write(self.program.stdin.fileno(), unsent[:PIECE]) :]
        except BrokenPipeError:  # it does not read
            unsent = unsent[:0]
        if not unsent:
            events.unregister(self.program.stdin)
            self.program.stdin.close()
        return unsent

    def _read(self, stream: IO[bytes]) -> bool:
        """Reads a piece, if there is one; False at the end."""
        piece = stream.read(PIECE)
        said = self._outputs[stream]
        said += piece or b""
        if len(said) > self.limits.output:
            self.ended = self.ended or "output"
        return bool(piece)

    def _look(self) -> None:
        """Compares what the program uses with its limits."""
        limits, now = self.limits, time.monotonic()
        processes = tree.processes(tree.below())
        holds = held(processes)
        used = tree.usage(processes, limits.memory - holds.kernel)
        cpu = used.cpu + tree.cpu_of_the_dead()
        crowd = used.processes > limits.processes + self.program.own or used.threads > THREADS * limits.processes
        starved = used.starved + tree.starved(os.getpid())  # ours too: the program waits for us to feed it
        left = limits.wall + min(starved, STARVED * limits.wall) - self.seconds
        if cpu > limits.cpu:
            self.ended = "cpu"
        elif used.memory + holds.kernel > limits.memory or crowd:
            self.ended = "memory"
        elif self.over_disk(holds):
            self.ended = "output"
        elif left <= 0:
            self.ended = "wall"
        took = time.monotonic() - now  # a folder full of files takes long to look at
        self._pause = max(SOONEST if cpu > self._cpu else min(2 * self._pause, LATEST), 4 * took)
        self._cpu, self._next = cpu, now + took + min(self._pause, max(left, SOONEST / 10))


def _death(pid: int) -> int | None:
    """A descriptor that can be read once the process is dead; None where there is no such thing."""
    return os.pidfd_open(pid) if sys.platform == "linux" else None
