"""Monitor of a running program: feeds stdin, collects output, measures resources and detects exceeded limits.

Totals over all its processes are measured 100 times per second for a busy program, down to 10 times for a sleeping one.
Between measurements the kernel's own limits hold (`program.boot_message`).
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
import time
from collections.abc import Callable
from typing import IO

from palestra.sandbox import process_tree
from palestra.sandbox.base import EndReason, ResourceLimits
from palestra.sandbox.kernel_memory import HeldResources, measure_held_resources
from palestra.sandbox.program import RunningProgram

# seconds between measurements
MIN_INTERVAL_S = 0.01
MAX_INTERVAL_S = 0.1
THREADS_PER_PROCESS = 16  # threads per process
MAX_WALL_EXTENSION = 2.0  # largest extension of the wall limit, as a multiple of it, for time spent waiting for a CPU
CHUNK_BYTES = 2**16


class ProcessMonitor:
    """Monitor of one program. `exceeded_limit` is the limit that it exceeded, if any."""

    def __init__(
        self,
        limits: ResourceLimits,
        exceeds_disk: Callable[[HeldResources], bool],
        program: RunningProgram,
        requester: socket.socket,
    ) -> None:
        self.limits = limits
        self.exceeds_disk = exceeds_disk
        self.program = program
        self.requester = requester
        self.exceeded_limit: EndReason | None = None
        self.started_at = time.monotonic()
        self._outputs = {program.stdout: bytearray(), program.stderr: bytearray()}
        self._cpu = 0.0
        self._pause = MIN_INTERVAL_S
        self._next = self.started_at

    @property
    def seconds(self) -> float:
        """Wall time since the start."""
        return time.monotonic() - self.started_at

    def run_until_end(self, stdin: bytes) -> None:
        """Writes `stdin` to stdin; returns when the program ends, exceeds a limit, or the requester disconnects."""
        unsent = memoryview(stdin)
        # becomes readable when the program exits
        death = os.pidfd_open(self.program.pid) if sys.platform == "linux" else None
        with selectors.DefaultSelector() as events:
            events.register(self.requester, selectors.EVENT_READ)
            events.register(self.program.stdin, selectors.EVENT_WRITE)
            for stream in (self.program.stdin, *self._outputs):
                os.set_blocking(stream.fileno(), False)
            for stream in self._outputs:
                events.register(stream, selectors.EVENT_READ)
            if death:
                events.register(death, selectors.EVENT_READ)
            over = False
            while not over and not self.exceeded_limit:
                ready = {key.fileobj for key, _ in events.select(max(0.0, self._next - time.monotonic()))}
                if self.program.stdin in ready:
                    unsent = self._feed(unsent, events)
                for stream in self._outputs.keys() & ready:
                    if not self._read(stream):
                        events.unregister(stream)
                if time.monotonic() >= self._next:
                    self._look()
                heard = events.get_map().keys() & {stream.fileno() for stream in self._outputs}
                over = self.requester in ready or (death in ready if death else not heard)
        if death:
            os.close(death)

    def close(self) -> tuple[bytes, bytes]:
        """Returns stdout and stderr, each cut to `limits.output` bytes.

        Call it after all processes have been killed.
        """
        for stream, output in self._outputs.items():
            while len(output) <= self.limits.output and self._read(stream):
                pass
            stream.close()
        self.program.stdin.close()
        stdout, stderr = (bytes(output[: self.limits.output]) for output in self._outputs.values())
        return stdout, stderr

    def _feed(self, unsent: memoryview, events: selectors.BaseSelector) -> memoryview:
        """Writes up to CHUNK_BYTES bytes; closes the program's stdin after the last. Returns the rest."""
        try:
            unsent = unsent[os.write(self.program.stdin.fileno(), unsent[:CHUNK_BYTES]) :]
        except BrokenPipeError:  # the program has closed its stdin
            unsent = unsent[:0]
        if not unsent:
            events.unregister(self.program.stdin)
            self.program.stdin.close()
        return unsent

    def _read(self, stream: IO[bytes]) -> bool:
        """Reads up to CHUNK_BYTES available bytes; returns False if none were read."""
        piece = stream.read(CHUNK_BYTES)
        output = self._outputs[stream]
        output += piece or b""
        if len(output) > self.limits.output:
            self.exceeded_limit = self.exceeded_limit or "output"
        return bool(piece)

    def _look(self) -> None:
        """Measures the program's resources, compares them with the limits and schedules the next measurement."""
        limits = self.limits
        now = time.monotonic()
        processes = process_tree.measure_processes(process_tree.descendants())
        holds = measure_held_resources(processes)
        used = process_tree.total_usage(processes, limits.memory - holds.kernel_bytes)
        cpu = used.cpu_s + process_tree.reaped_cpu_s()
        crowd = (
            used.num_processes > limits.processes + self.program.num_backend_processes
            or used.num_threads > THREADS_PER_PROCESS * limits.processes
        )
        starved = used.cpu_wait_s + process_tree.cpu_wait_s(
            os.getpid()
        )  # includes this process: the program may wait for its input
        left = limits.wall + min(starved, MAX_WALL_EXTENSION * limits.wall) - self.seconds
        if cpu > limits.cpu:
            self.exceeded_limit = "cpu"
        elif used.memory_bytes + holds.kernel_bytes > limits.memory or crowd:
            self.exceeded_limit = "memory"
        elif self.exceeds_disk(holds):
            self.exceeded_limit = "output"
        elif left <= 0:
            self.exceeded_limit = "wall"
        took = time.monotonic() - now  # measuring a folder with many files is slow
        self._pause = max(MIN_INTERVAL_S if cpu > self._cpu else min(2 * self._pause, MAX_INTERVAL_S), 4 * took)
        self._cpu, self._next = cpu, now + took + min(self._pause, max(left, MIN_INTERVAL_S / 10))
