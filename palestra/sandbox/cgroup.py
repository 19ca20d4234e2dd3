"""A cgroup (version 2) for each run, where this process may make some: the kernel itself limits memory and tasks.

The monitor measures at intervals; a cgroup also limits between two measurements, counts kernel memory, and kills all
its processes at once. `cpu.max` is not set: it limits a rate, `cpu` a total.

A fork server makes one group, which holds a cgroup for each run. A cgroup that shares out memory and pids can hold no
processes itself, so the group lies in the nearest ancestor of this process's cgroup that shares them out already.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from palestra.sandbox.base import ResourceLimits
from palestra.sandbox.monitor import THREADS_PER_PROCESS

SETTING = "PALESTRA_CGROUP"  # "auto" (default: use a cgroup if possible), "off", or the folder of a delegated cgroup
CONTROLLERS = frozenset(("memory", "pids"))
SPARE_BYTES = 2**26  # bytes of memory.max above the limits, for the kernel's own memory and the starting process
SPARE_TASKS = 16  # tasks above the limits: processes of the backend, and the starting process
KILL_TIMEOUT_S = 5.0  # seconds to wait for the killed processes of a cgroup
PROC = Path("/proc/self")


def find_parent(setting: str | None = None, proc: Path = PROC) -> Path | None:
    """Returns the cgroup in which groups are made, or None if there is none and the setting names none.

    `setting`: as `PALESTRA_CGROUP` (None: its value). Raises ValueError if a named one cannot be used.
    """
    setting = os.environ.get(SETTING, "auto") if setting is None else setting
    if setting == "off":
        return None
    if setting != "auto":
        folder = Path(setting)
        if reason := _problem(folder, "cgroup.controllers"):
            raise ValueError(f"{SETTING}={setting}: {reason}. Name a delegated cgroup's folder, or set auto or off")
        return folder
    ancestors = (own, *own.parents) if (own := own_cgroup(proc)) else ()
    return next((one for one in ancestors if not _problem(one, "cgroup.subtree_control")), None)


def _problem(folder: Path, file: str) -> str | None:
    """Returns why groups cannot be made in a cgroup whose `file` must name the controllers, or None."""
    try:
        named = set((folder / file).read_text(encoding="ascii").split())
    except OSError as error:
        return f"it is not a cgroup of version 2 ({error.strerror})"
    if not named >= CONTROLLERS:
        return f"its {file} lacks {', '.join(sorted(CONTROLLERS - named))}"
    can_write = os.access(folder, os.W_OK) and os.access(folder / "cgroup.procs", os.W_OK)
    return None if can_write else "this user may not write there"


def own_cgroup(proc: Path = PROC) -> Path | None:
    """Returns the folder of this process's cgroup of version 2, or None if no such hierarchy is mounted."""
    try:
        mounts = [line.split() for line in (proc / "mountinfo").read_text(encoding="utf-8").splitlines()]
        entries = (proc / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # not on Linux
        return None
    found = [Path(fields[4]) for fields in mounts if fields[fields.index("-") + 1] == "cgroup2"]
    path = next((line.removeprefix("0::") for line in entries if line.startswith("0::")), None)
    return found[0] / path.lstrip("/") if found and path else None


def open_group(name: str) -> Path | None:
    """Makes the group of a fork server, tried once, and returns it; None if the setting names none and none can be
    made.

    Raises ValueError if a named one does not work.
    """
    if (parent := find_parent()) is None:
        return None
    group = parent / name
    try:
        group.mkdir()
        for folder in (parent, group):
            if _problem(folder, "cgroup.subtree_control"):
                (folder / "cgroup.subtree_control").write_text("+memory +pids", encoding="ascii")
        with entered_cgroup(make_run(group, "trial", ResourceLimits())):
            pass
        remove(group / "trial")
    except OSError as error:
        with contextlib.suppress(OSError):  # no cgroup, or never made
            remove(group)
        if os.environ.get(SETTING, "auto") == "auto":
            return None
        raise ValueError(f"{SETTING}={parent}: no cgroup can be used there ({error})") from error
    return group


def make_run(group: Path, name: str, limits: ResourceLimits) -> Path:
    """Makes the cgroup of a run with its limits. Files of the run's folder are memory too. Raises OSError."""
    folder = group / name
    folder.mkdir()
    values = {
        "memory.max": limits.memory + limits.disk + SPARE_BYTES,
        "memory.oom.group": 1,
        "pids.max": THREADS_PER_PROCESS * limits.processes + SPARE_TASKS,
    }
    for file, value in values.items():
        (folder / file).write_text(str(value), encoding="ascii")
    with contextlib.suppress(OSError):  # absent where the kernel does not count swap
        (folder / "memory.swap.max").write_text("0", encoding="ascii")
    return folder


@contextlib.contextmanager
def entered_cgroup(folder: Path, proc: Path = PROC) -> Iterator[None]:
    """Moves this process into a run's cgroup and back: processes that it starts meanwhile begin and stay there.

    Raises OSError if the kernel did not move it, as where `folder` is no cgroup.
    """
    if (own := own_cgroup(proc)) is None or not os.access(own / "cgroup.procs", os.W_OK):
        raise OSError(f"from {folder} this process could not return to its own cgroup {own}")
    (folder / "cgroup.procs").write_text("0", encoding="ascii")  # 0: the process that writes
    try:
        if (now := own_cgroup(proc)) is None or not now.exists() or not now.samefile(folder):
            raise OSError(f"{folder} is not a cgroup that a process can enter")
        yield
    finally:
        (own / "cgroup.procs").write_text("0", encoding="ascii")


def ran_out_of_memory(folder: Path) -> bool:
    """Returns True if the kernel killed a process of the cgroup for its memory."""
    return _number(folder / "memory.events", "oom_kill") > 0


def remove(folder: Path) -> bool:
    """Kills all processes in a cgroup and below, and removes it; returns False if it is still there."""
    end = time.monotonic() + KILL_TIMEOUT_S
    with contextlib.suppress(FileNotFoundError):
        for inner in (one for one in folder.iterdir() if one.is_dir()):
            remove(inner)
        (folder / "cgroup.kill").write_text("1", encoding="ascii")
        while _number(folder / "cgroup.events", "populated") and time.monotonic() < end:
            time.sleep(0.001)
        with contextlib.suppress(OSError):
            folder.rmdir()
    return not folder.exists()


def _number(file: Path, name: str) -> int:
    """Returns the number in the line `NAME NUMBER` of a file; 0 if there is none."""
    lines = file.read_text(encoding="ascii").splitlines() if file.exists() else ()
    return int(dict(line.split() for line in lines).get(name, 0))
