"""The seccomp filter of grader processes: the system calls they may make once they work on an answer.

A whitelist, stricter than the sandbox's filter for programs: compute, use memory, read files, write to open
descriptors. Creating or changing files, starting or signalling processes, creating sockets and resetting limits or
timers are refused. This is the second line of defence: answers are never evaluated, so no code of a model runs there.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator

from palestra.sandbox import syscalls
from palestra.sandbox.seccomp import (
    ALLOW,
    ARCH_OFFSET,
    CALL_OFFSET,
    EPERM,
    EQUAL,
    ERRNO,
    KILL,
    LOAD,
    MACHINES,
    RETURN,
    instruction,
)

JUMP_IF_ANY_BIT = 0x45  # BPF_JMP | BPF_JSET: jump if any bit of the mask is set
THIRD_ARGUMENT_OFFSET = 32  # offset of the third argument in seccomp_data
WRITE_FLAGS = (
    0o1 | 0o2 | 0o100 | 0o1000 | 0o2000 | 0o20000000
)  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_APPEND, O_TMPFILE
OPENAT_NUMBERS = (257, 56)

# fmt: off
ALLOWED_SYSCALLS = (
    "read", "pread64", "write", "close", "lseek", "fstat", "stat", "lstat", "newfstatat", "statx", "readlink",
    "readlinkat", "getdents64", "getcwd", "mmap", "mprotect", "munmap", "mremap", "madvise", "brk",
    "rt_sigprocmask", "rt_sigreturn", "futex", "sched_yield", "getpid", "gettid", "clock_gettime", "clock_getres",
    "clock_nanosleep", "gettimeofday", "getrusage", "times", "getrandom", "exit", "exit_group",
)
# fmt: on
SYSCALL_NUMBERS = syscalls.ALLOWED | syscalls.CHECKED | syscalls.FAKED


def seccomp_filter() -> bytes:
    """Returns the BPF filter for this machine, 8 bytes per instruction; empty on unsupported platforms."""
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        return b""
    return b"".join(_instructions(*MACHINES[platform.machine()]))


def _instructions(column: int, arch: int) -> Iterator[bytes]:
    yield instruction(LOAD, ARCH_OFFSET)
    yield from (instruction(EQUAL, arch, skip_if_true=1), instruction(RETURN, KILL))
    yield instruction(LOAD, CALL_OFFSET)
    for name in ALLOWED_SYSCALLS:
        if (number := SYSCALL_NUMBERS[name][column]) is not None:
            yield from (instruction(EQUAL, number, skip_if_false=1), instruction(RETURN, ALLOW))
    yield instruction(EQUAL, OPENAT_NUMBERS[column], skip_if_false=3)
    yield instruction(LOAD, THIRD_ARGUMENT_OFFSET)
    yield from (instruction(JUMP_IF_ANY_BIT, WRITE_FLAGS, skip_if_true=1), instruction(RETURN, ALLOW))
    yield instruction(RETURN, ERRNO | EPERM)
