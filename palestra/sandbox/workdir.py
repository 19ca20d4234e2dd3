"""The working folder of a program: creation, measurement, reading and removal, safe against hostile contents."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from palestra.sandbox.base import RunRequest
from palestra.sandbox.kernel_memory import HeldResources
from palestra.sandbox.mounts import mount
from palestra.sandbox.process_tree import PAGE_BYTES

MAX_FILES = 4096  # files and folders that a program may have
# space of the file system above the limits, so that exceeding them can be seen
SLACK_BYTES = 2**16
SLACK_FILES = 64
NUM_OWN_FILES = 2  # the root of the file system, and the folder


def create(folder: Path, request: RunRequest, *, mounts: bool) -> None:
    """Creates the folder with the request's files; with `mounts`, in a new tmpfs over the folder's parent."""
    if mounts:
        given = sum(PAGE_BYTES * (len(data) // PAGE_BYTES + 1) for data in request.files.values())
        names = sum(len(PurePosixPath(name).parts) for name in request.files)
        size = max(request.limits.disk, given) + SLACK_BYTES
        files = max(MAX_FILES, names) + SLACK_FILES
        mount(folder.parent, size, files)
    folder.mkdir()
    for name, data in request.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def change_owner(folder: Path, user: int) -> None:
    """Changes owner and group of the folder and its contents to `user`."""
    for path in [str(folder), *(entry.path for entry in _walk(folder))]:
        os.chown(path, user, user)


def mount_exceeds_limit(folder: Path, max_bytes: int, _: HeldResources) -> bool:
    """Returns True if a folder with its own file system uses more than `max_bytes` bytes or `MAX_FILES` files."""
    used = os.statvfs(folder)
    too_many = used.f_files - used.f_ffree > MAX_FILES + NUM_OWN_FILES
    return (used.f_blocks - used.f_bfree) * used.f_frsize > max_bytes or too_many


def exceeds_limit(folder: Path, max_bytes: int, held: HeldResources) -> bool:
    """Returns True for more than `max_bytes` in folder and unnamed files, or more than `MAX_FILES` files."""
    size = held.unnamed_file_bytes
    if held.num_unmeasured_files or size > max_bytes:
        return True
    try:
        for number, entry in enumerate(_walk(folder)):
            with contextlib.suppress(FileNotFoundError):  # the program removed it meanwhile
                size += entry.stat(follow_symlinks=False).st_blocks * 512
            if size > max_bytes or number >= MAX_FILES:
                return True
    except OSError:  # nested beyond the longest path, or not accessible
        return True
    return False


def read_files(folder: Path, max_bytes: int) -> dict[str, bytes]:
    """Reads the folder's regular files by relative path, as far as they fit into `max_bytes` bytes."""
    found: dict[str, bytes] = {}
    try:
        for entry in _walk(folder):
            size = entry.stat(follow_symlinks=False).st_size
            if entry.is_file(follow_symlinks=False) and size <= max_bytes:
                found[os.path.relpath(entry.path, folder)] = _read(entry.path)
                max_bytes -= size
    except OSError:  # not accessible or too deep: return what was read so far
        pass
    return dict(sorted(found.items()))


def read_heads(folder: Path, sizes: Mapping[str, int]) -> dict[str, bytes]:
    """Reads the first bytes, by name in `sizes`, of regular files directly in the folder; leaves out anything else."""
    found: dict[str, bytes] = {}
    for name, size in sizes.items():
        path = folder / name
        try:
            if stat.S_ISREG(path.lstat().st_mode):
                found[name] = _read(str(path), size)
        except OSError:  # missing, or not accessible
            continue
    return found


def remove(folder: Path) -> None:
    """Removes the folder, also if it is nested very deeply or shut to its owner, where shutil.rmtree fails."""
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*command, "--", str(folder)], check=False, stderr=subprocess.DEVNULL)


def _walk(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yields all entries below the folder; does not follow symbolic links."""
    waiting = [str(folder)]
    while waiting:
        with contextlib.suppress(FileNotFoundError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                yield entry
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)


def _read(path: str, most: int = -1) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        return file.read(most) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
