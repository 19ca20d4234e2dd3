"""Which system calls a sandboxed program may make, as a program for the kernel's filter (seccomp).

The filter closes what file and network rules leave open: what acts on other processes of the same user, memory that no
count sees, other kinds of sockets, the owner's rights over files. It stands on the backend's own rules; of two filters
the stricter answer holds.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Iterator

EPERM, EACCES, ENOSYS = 1, 13, 38
ALLOW, KILL, ERRNO = 0x7FFF_0000, 0x8000_0000, 0x0005_0000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
CALL, ARCH, FIRST = 0, 4, 16  # offsets in what the filter sees: the call's number, the machine, the first argument
X32 = 0x4000_0000  # calls of x86-64's other ABI carry this bit
AF_UNIX = 1
NAMESPACES = 0x7E02_0000  # CLONE_NEWNS and all others that `clone` takes

# Numbers on x86-64 and on aarch64, where None means that the call does not exist.
Numbers = dict[str, tuple[int | None, int | None]]
REFUSED: Numbers = {
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # memory that belongs to no process, and what outlives one
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # wide doors into the kernel
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "iopl": (172, None),
    "ioperm": (173, None),
    # the file system as a whole, and watching it
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "inotify_add_watch": (254, 27),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "sync": (162, 81),
    "syncfs": (306, 267),
    # the machine
    "reboot": (169, 142),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "syslog": (103, 116),
    "vhangup": (153, 58),
}
# Not done, but reported as done: refusing would break `shutil.copy` and the like, and no file outside may be touched.
PRETENDED: Numbers = {
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "lchown": (94, None),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
}
OWN_ONLY: Numbers = {  # first argument: a process, 0 for the caller
    "prlimit64": (302, 261),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
}
CLONE3, CLONE, SOCKET = (435, 435), (56, 220), (41, 198)
MACHINES = {"x86_64": (0, 0xC000_003E), "aarch64": (1, 0xC000_00B7)}


def rules() -> bytes:
    """The filter for this machine, 8 bytes an instruction. Raises ValueError on one whose numbers are not known."""
    machine = platform.machine()
    if machine not in MACHINES:
        raise ValueError(f"no filter of system calls for {machine}; known: {', '.join(MACHINES)}")
    return b"".join(_instructions(*MACHINES[machine]))


def _instructions(column: int, arch: int) -> Iterator[bytes]:
    yield _one(LOAD, ARCH)
    yield from (_one(EQUAL, arch, yes=1), _one(RETURN, KILL))
    yield _one(LOAD, CALL)
    if column == 0:
        yield from (_one(AT_LEAST, X32, no=1), _one(RETURN, ERRNO | ENOSYS))
    for calls, answer in ((REFUSED, EPERM), (PRETENDED, 0)):
        for numbers in calls.values():
            if (number := numbers[column]) is not None:
                yield from (_one(EQUAL, number, no=1), _one(RETURN, ERRNO | answer))
    # With clone3, flags lie in memory, which no filter reads; the C library then falls back to clone.
    yield from (_one(EQUAL, CLONE3[column], no=1), _one(RETURN, ERRNO | ENOSYS))
    yield from _unless(CLONE[column], ANY_BIT, NAMESPACES, allowed=False, answer=EPERM)
    yield from _unless(SOCKET[column], EQUAL, AF_UNIX, allowed=True, answer=EACCES)
    for numbers in OWN_ONLY.values():
        yield from _unless(numbers[column] or 0, EQUAL, 0, allowed=True, answer=EPERM)
    yield _one(RETURN, ALLOW)


def _unless(number: int, test: int, value: int, *, allowed: bool, answer: int) -> Iterator[bytes]:
    """The call is allowed if the test of its first argument's low half comes out as `allowed`."""
    yield _one(EQUAL, number, no=4)
    yield _one(LOAD, FIRST)
    yield _one(test, value, yes=int(allowed), no=int(not allowed))
    yield _one(RETURN, ERRNO | answer)
    yield _one(RETURN, ALLOW)


def _one(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    """An instruction; `yes` and `no` say how many to skip after a test."""
    return struct.pack("=HBBI", code, yes, no, value)
