"""Measures kernel memory and unnamed files held by processes beyond their own pages."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import chain

from palestra.sandbox.process_tree import PAGE_BYTES, ProcessInfo

PIPE_BYTES = 16 * PAGE_BYTES  # bytes of a pipe's buffer; the seccomp filter refuses to enlarge it
MAPPING_BYTES = 256  # bytes of kernel memory per mapping
# mappings of a process; bytes read of /proc/PID/maps, about 1,500 lines
MAX_MAPPINGS = 2**16
MAX_MAPS_BYTES = 2**17
DELETED = b" (deleted)\n"


@dataclass(frozen=True)
class HeldResources:
    """Resources held by processes.

    `kernel_bytes`: largest buffer size of their pipes and sockets plus kernel memory of their mappings, in bytes.
    `unnamed_file_bytes`: bytes of unnamed regular files. `num_unmeasured_files`: number of mapped, unnamed files that
    are not open; their size is unknown.
    """

    kernel_bytes: int = 0
    unnamed_file_bytes: int = 0
    num_unmeasured_files: int = 0


def measure_held_resources(processes: Iterable[ProcessInfo]) -> HeldResources:
    """Sums the resources of `processes`; a resource held by several counts once."""
    processes = list(processes)
    files = chain.from_iterable(_open_files(process) for process in processes)
    open_files = {(one.st_dev, one.st_ino): one for one in files}
    texts = [_mappings(process) for process in processes]
    unnamed = {one.st_ino: one for one in open_files.values() if stat.S_ISREG(one.st_mode) and one.st_nlink == 0}
    lines = chain.from_iterable(text.split(b"\n") for text in texts if DELETED in text)
    gone = [line.split() for line in lines if line.endswith(DELETED.rstrip())]
    mapped = {int(fields[4]) for fields in gone if len(fields) > 5}
    return HeldResources(
        kernel_bytes=sum(map(_buffer, open_files.values())) + MAPPING_BYTES * sum(map(_count, texts)),
        unnamed_file_bytes=sum(one.st_blocks * 512 for one in unnamed.values()),
        num_unmeasured_files=len(mapped - unnamed.keys()),
    )


def _open_files(process: ProcessInfo) -> list[os.stat_result]:
    found = []
    try:
        for name in os.listdir(f"{process.proc_folder}/fd"):
            found.append(os.stat(f"{process.proc_folder}/fd/{name}"))
    except OSError:  # closed, or the process is gone
        pass
    return found


def _buffer(file: os.stat_result) -> int:
    if stat.S_ISSOCK(file.st_mode):
        return 2 * _socket_buffer()  # the last message may exceed the buffer by its size
    return PIPE_BYTES if stat.S_ISFIFO(file.st_mode) else 0


@cache
def _socket_buffer() -> int:
    """Returns the bytes of a socket's send buffer; the seccomp filter refuses to change it."""
    with open("/proc/sys/net/core/wmem_default", encoding="ascii") as file:
        return int(file.read())


def _mappings(process: ProcessInfo) -> bytes:
    try:
        with open(f"{process.proc_folder}/maps", "rb") as file:
            return file.read(MAX_MAPS_BYTES)
    except OSError:  # gone
        return b""


def _count(text: bytes) -> int:
    return text.count(b"\n") if len(text) < MAX_MAPS_BYTES else MAX_MAPPINGS
