"""Monitor of a running program: feeds stdin, collects output, measures resources and detects exceeded limits.

Totals over all its processes are measured 100 times per second for a busy program, down to 10 times for a sleeping one.
Between measurements the kernel's own limits hold (`program.orders`).
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

SOONEST, LATEST = 0.01, 0.1  # seconds between measurements
THREADS = 16  # threads per process
STARVED = 2.0  # largest extension of the wall limit, as a multiple of it, for time spent waiting for a CPU
PIECE = 2**16


class Watch:
    """Monitor of one program. `ended`: the limit that it exceeded, if any. `seconds`: wall time since its start."""

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
        """Writes `sent` to stdin; returns when the program ends, exceeds a limit, or the requester disconnects."""
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
        """Returns stdout and stderr, each cut to `limits.output` bytes.

        Call it after all processes have been killed.
        """
        for stream, said in self._outputs.items():
            while len(said) <= self.limits.output and self._read(stream):
                pass
            stream.close()
        self.program.stdin.close()
        stdout, stderr = (bytes(said[: self.limits.output]) for said in self._outputs.values())
        return stdout, stderr

    def _feed(self, unsent: memoryview, events: selectors.BaseSelector) -> memoryview:
        """Writes up to PIECE bytes; closes the program's stdin after the last. Returns the rest."""
        try:
            unsent = unsent[os.write(self.program.stdin.fileno(), unsent[:PIECE]) :]
        except BrokenPipeError:  # the program has closed its stdin
            unsent = unsent[:0]
        if not unsent:
            events.unregister(self.program.stdin)
            self.program.stdin.close()
        return unsent

    def _read(self, stream: IO[bytes]) -> bool:
        """Reads up to PIECE available bytes; returns False if none were read."""
        piece = stream.read(PIECE)
        said = self._outputs[stream]
        said += piece or b""
        if len(said) > self.limits.output:
            self.ended = self.ended or "output"
        return bool(piece)

    def _look(self) -> None:
        """Measures the program's resources, compares them with the limits and schedules the next measurement."""
        limits, now = self.limits, time.monotonic()
        processes = tree.processes(tree.below())
        holds = held(processes)
        used = tree.usage(processes, limits.memory - holds.kernel)
        cpu = used.cpu + tree.cpu_of_the_dead()
        crowd = used.processes > limits.processes + self.program.own or used.threads > THREADS * limits.processes
        starved = used.starved + tree.starved(os.getpid())  # includes this process: the program may wait for its input
        left = limits.wall + min(starved, STARVED * limits.wall) - self.seconds
        if cpu > limits.cpu:
            self.ended = "cpu"
        elif used.memory + holds.kernel > limits.memory or crowd:
            self.ended = "memory"
        elif self.over_disk(holds):
            self.ended = "output"
        elif left <= 0:
            self.ended = "wall"
        took = time.monotonic() - now  # measuring a folder with many files is slow
        self._pause = max(SOONEST if cpu > self._cpu else min(2 * self._pause, LATEST), 4 * took)
        self._cpu, self._next = cpu, now + took + min(self._pause, max(left, SOONEST / 10))


def _death(pid: int) -> int | None:
    """Returns a descriptor that becomes readable when the process exits; None on systems without pidfd."""
    return os.pidfd_open(pid) if sys.platform == "linux" else None
