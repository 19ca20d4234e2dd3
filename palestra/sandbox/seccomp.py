"""The seccomp filter of sandboxed programs: an allow list of system calls as a BPF program.

It covers what file and network rules leave open: other processes of the same user, kernel memory that no limit counts,
unnamed files, sockets, and locks and flags of outside files. It is installed in addition to the backend's own filter;
the kernel applies the stricter result. Calls that libraries make without need (modes, dates, locks) return success
without effect.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from palestra.sandbox.syscalls import ALLOWED, CHECKED, FAKED

EPERM = 1
EACCES = 13
EINVAL = 22
ENOTTY = 25
ENOSYS = 38
EOPNOTSUPP = 95
ALLOW = 0x7FFF_0000
KILL = 0x8000_0000
ERRNO = 0x0005_0000
LOAD = 0x20
AND = 0x54
EQUAL = 0x15
AT_LEAST = 0x35
RETURN = 0x06
# offsets in struct seccomp_data: call number, architecture, arguments
CALL_OFFSET = 0
ARCH_OFFSET = 4
ARGUMENTS_OFFSET = 16
MACHINES = {"x86_64": (0, 0xC000_003E), "aarch64": (1, 0xC000_00B7)}
FIRST_COMMON_NUMBER = 424  # from here on numbers are equal on all machines, and the C library handles ENOSYS
MASK_ALL = 0xFFFF_FFFF

# MAP_SHARED | MAP_ANONYMOUS, MAP_HUGETLB
SHARED_ANONYMOUS = 0x21
MAP_HUGETLB = 0x4_0000
TMPFILE = 0x40_0000  # the bit of O_TMPFILE that no other flag has
FILE_TYPE_MASK = 0xF000
FIFO = 0x1000
NAMESPACE_FLAGS = 0x7E02_0000  # CLONE_NEWNS and all other namespace flags of `clone`
# CLONE_THREAD without and with CLONE_FILES
THREAD = 0x1_0000
THREAD_WITH_FILES = 0x1_0400
AF_UNIX = 1
SIGCHLD = 17
FCNTL_FAKED = (6, 7, 37, 38)  # F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW
# F_DUPFD to F_GETLK, F_GETOWN, F_OFD_GETLK, F_DUPFD_CLOEXEC, sizes, seals
FCNTL_ALLOWED = (0, 1, 2, 3, 4, 5, 9, 36, 1030, 1032, 1034)
# TCGETS(2), window, FIONREAD, FIONBIO, close-on-exec
IOCTL_ALLOWED = (0x5401, 0x802C_542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
REFUSED_UNMOUNTED = ("execve", "execveat", "fallocate")  # refused if the folder is not a separate file system
XATTR_CALLS = ("getxattr", "lgetxattr", "fgetxattr", "listxattr", "llistxattr", "flistxattr")
PRCTL_ALLOWED = (1, 2, 3, 15, 16, 37, 39, 42)  # parent-death signal, thread names, and queries


class Rule(NamedTuple):
    """Returns `action` if the low 32 bits of argument number `argument`, masked with `mask`, equal one of `values`."""

    argument: int
    mask: int
    values: tuple[int, ...]
    action: int


SELF_ONLY = ((Rule(0, MASK_ALL, (0,), ALLOW),), ERRNO | EPERM)  # the first argument is a process id: 0 is the caller
# By system call: the rules in order, and the answer if none matches.
ARGUMENT_RULES: dict[str, tuple[tuple[Rule, ...], int]] = {
    # Shared anonymous memory stays allocated when its pages are unmapped, and then counts for no process.
    "mmap": (
        (
            Rule(3, SHARED_ANONYMOUS, (SHARED_ANONYMOUS,), ERRNO | EPERM),
            Rule(3, MAP_HUGETLB, (MAP_HUGETLB,), ERRNO | EPERM),
        ),
        ALLOW,
    ),
    "fallocate": (
        (Rule(1, MASK_ALL, (0,), ALLOW),),
        ERRNO | EOPNOTSUPP,
    ),  # RLIMIT_FSIZE does not apply beyond a file's end
    "open": ((Rule(1, TMPFILE, (TMPFILE,), ERRNO | EOPNOTSUPP),), ALLOW),
    "openat": ((Rule(2, TMPFILE, (TMPFILE,), ERRNO | EOPNOTSUPP),), ALLOW),
    "mknod": ((Rule(1, FILE_TYPE_MASK, (FIFO,), ALLOW),), ERRNO | EPERM),
    "mknodat": ((Rule(2, FILE_TYPE_MASK, (FIFO,), ALLOW),), ERRNO | EPERM),
    **dict.fromkeys(XATTR_CALLS, ((), ERRNO | EOPNOTSUPP)),
    # Files held by a thread with its own descriptor table would not be measured: only the first thread is.
    "clone": (
        (Rule(0, THREAD_WITH_FILES, (THREAD,), ERRNO | EPERM), Rule(0, NAMESPACE_FLAGS, (0,), ALLOW)),
        ERRNO | EPERM,
    ),
    "socketpair": ((Rule(0, MASK_ALL, (AF_UNIX,), ALLOW),), ERRNO | EACCES),
    "sendto": ((Rule(5, MASK_ALL, (0,), ALLOW),), ERRNO | EACCES),  # no address: to the peer only
    "fcntl": ((Rule(1, MASK_ALL, FCNTL_FAKED, ERRNO), Rule(1, MASK_ALL, FCNTL_ALLOWED, ALLOW)), ERRNO | EPERM),
    "ioctl": ((Rule(1, MASK_ALL, IOCTL_ALLOWED, ALLOW),), ERRNO | ENOTTY),
    "prctl": ((Rule(0, MASK_ALL, PRCTL_ALLOWED, ALLOW),), ERRNO | EINVAL),
    # If a parent ignores SIGCHLD, the CPU time of its dead children is lost.
    "rt_sigaction": ((Rule(0, MASK_ALL, (SIGCHLD,), ERRNO | EPERM),), ALLOW),
    "prlimit64": SELF_ONLY,
    "sched_setparam": SELF_ONLY,
    "sched_setscheduler": SELF_ONLY,
    "sched_setaffinity": SELF_ONLY,
    "sched_setattr": SELF_ONLY,
}


def seccomp_filter(*, mounts: bool) -> bytes:
    """Returns the BPF filter for this machine, 8 bytes per instruction.

    Without `mounts` (the program's folder is not a separate file system) it also refuses `REFUSED_UNMOUNTED`: a program
    could otherwise execute a file that cannot be read, which makes a process that cannot be measured, or allocate much
    of the disk between two measurements. Raises ValueError on machines other than x86-64 and aarch64.
    """
    machine = platform.machine()
    if machine not in MACHINES:
        raise ValueError(f"no filter of system calls for {machine}; known: {', '.join(MACHINES)}")
    return b"".join(_instructions(*MACHINES[machine], () if mounts else REFUSED_UNMOUNTED))


def _instructions(column: int, arch: int, refused: tuple[str, ...]) -> Iterator[bytes]:
    yield instruction(LOAD, ARCH_OFFSET)
    yield from (instruction(EQUAL, arch, skip_if_true=1), instruction(RETURN, KILL))
    yield instruction(LOAD, CALL_OFFSET)
    yield from _answer((numbers[column] for name, numbers in ALLOWED.items() if name not in refused), ALLOW)
    for name, (steps, otherwise) in ARGUMENT_RULES.items():
        if (number := CHECKED[name][column]) is not None and name not in refused:
            body = [*chain.from_iterable(_step(step) for step in steps), instruction(RETURN, otherwise)]
            yield from (instruction(EQUAL, number, skip_if_false=len(body)), *body)
    yield from _answer((numbers[column] for numbers in FAKED.values()), ERRNO)
    yield from (
        instruction(AT_LEAST, FIRST_COMMON_NUMBER, skip_if_false=1),
        instruction(RETURN, ERRNO | ENOSYS),
        instruction(RETURN, ERRNO | EPERM),
    )


def _answer(numbers: Iterable[int | None], action: int) -> Iterator[bytes]:
    """Yields the instructions that return `action` for the calls of these numbers."""
    for first, last in _ranges(numbers):
        yield instruction(AT_LEAST, last + 1, skip_if_true=2)
        yield instruction(AT_LEAST, first, skip_if_false=1)
        yield instruction(RETURN, action)


def _step(rule: Rule) -> Iterator[bytes]:
    yield from (instruction(LOAD, ARGUMENTS_OFFSET + 8 * rule.argument), instruction(AND, rule.mask))
    for value in rule.values:
        yield from (instruction(EQUAL, value, skip_if_false=1), instruction(RETURN, rule.action))


def _ranges(numbers: Iterable[int | None]) -> list[tuple[int, int]]:
    """Returns first and last number of each run of consecutive numbers."""
    found: list[tuple[int, int]] = []
    for number in sorted(number for number in numbers if number is not None):
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def instruction(code: int, value: int, *, skip_if_true: int = 0, skip_if_false: int = 0) -> bytes:
    """Encodes a BPF instruction; `skip_if_...` are the numbers of instructions to skip after a test."""
    return struct.pack("=HBBI", code, skip_if_true, skip_if_false, value)
