"""Sandbox backend bubblewrap, used if sandlock does not work: runs the program in its own Linux namespaces.

The program sees no network, no other process, and only the files that are bound into its namespace.

RLIMIT_NPROC caps the number of processes; it counts per user and user namespace, and bwrap creates a user namespace.
Started by root, bwrap creates none, since the kernel exempts root from the limit; each run gets its own user id
instead. Threads count as processes.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from palestra.sandbox import workdir
from palestra.sandbox.base import WORKDIR, RunRequest
from palestra.sandbox.program import (
    DEVICES,
    RunningProgram,
    boot_message,
    environment,
    interpreter_command,
    readable_paths,
    start_program,
)
from palestra.sandbox.seccomp import seccomp_filter

FIX = "install bubblewrap (apt-get install bubblewrap, dnf install bubblewrap)"
NOBODY_UID = 65534
FIRST_RUN_UID = 1_000_000_000  # first user id of runs started by root; real users have smaller ones
CAP_SYS_ADMIN = 21


def missing() -> str | None:
    """Returns why the backend cannot work here, as far as it is known without a trial, or None."""
    if sys.platform != "linux":
        return "it needs Linux"
    return None if shutil.which("bwrap") else "there is no program bwrap on the PATH"


def start(request: RunRequest, folder: Path, *, mounts: bool) -> tuple[RunningProgram, bytes]:
    """Starts the program in its own namespaces; returns it and the boot message for its stdin.

    `mounts`: its folder is a separate file system, mounted noexec.
    """
    user = FIRST_RUN_UID + os.getpid() if _is_admin() else 0
    if user:
        workdir.change_owner(folder, user)
    program = start_program(
        [*_wrap(folder, bool(user)), *interpreter_command()],
        WORKDIR,
        lambda code: 128 - code if code > 128 else code,  # bwrap returns 128 + n if signal n ended the program
        num_backend_processes=2,
        env={"PATH": os.environ.get("PATH", os.defpath)},
    )
    tasks = request.limits.processes + (not user)  # bwrap's init process counts in the user namespace
    return program, boot_message(request, seccomp_filter(mounts=mounts), user=user, tasks=tasks)


def _wrap(folder: Path, root: bool) -> Iterator[str]:
    yield from ("bwrap", "--die-with-parent", "--new-session")
    yield from ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try")
    if root:
        yield from ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
    else:
        yield from ("--unshare-user", "--uid", str(NOBODY_UID), "--gid", str(NOBODY_UID))
    yield "--clearenv"
    for name, value in environment(WORKDIR).items():
        yield from ("--setenv", name, value)
    for path in _parents(readable_paths()):
        yield from ("--perms", "0755", "--dir", path)
    for path in readable_paths():
        yield from ("--symlink", os.readlink(path), path) if os.path.islink(path) else ("--ro-bind", path, path)
    for device in filter(os.path.exists, DEVICES):
        yield from ("--dev-bind", device, device)
    yield from ("--bind", str(folder), WORKDIR, "--remount-ro", "/", "--chdir", WORKDIR, "--")


def _parents(paths: tuple[str, ...]) -> list[str]:
    """Returns the parent folders of the paths, outermost first.

    Created explicitly: bwrap would make them accessible to the owner only.
    """
    leading = set(chain.from_iterable(Path(path).parents for path in (*paths, *DEVICES)))
    return sorted(path for path in map(str, leading) if path != "/" and not _inside(path, paths))


def _inside(path: str, bound: tuple[str, ...]) -> bool:
    return any(f"{path}/".startswith(f"{one}/") for one in bound)


def _is_admin() -> bool:
    """Returns True if this process may mount without a user namespace: root with CAP_SYS_ADMIN."""
    with open("/proc/self/status", encoding="ascii") as file:
        held = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff:"))
    return os.geteuid() == 0 and bool(held >> CAP_SYS_ADMIN & 1)
