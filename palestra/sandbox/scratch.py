"""A program's folder: made, filled, measured, read back and removed, whatever the program made of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from palestra.sandbox.base import Request
from palestra.sandbox.held import Held
from palestra.sandbox.mounts import mount
from palestra.sandbox.tree import PAGE

MOST_FILES = 4096  # files and folders that a program may have
SLACK, SLACK_FILES = 2**16, 64  # room in the file system above the limits: a program that uses some of it is over them
OWN_FILES = 2  # the root of the file system, and the folder


def make(folder: Path, request: Request, *, mounts: bool) -> None:
    """Makes and fills the folder; with `mounts`, in a file system of its own over the folder's parent."""
    if mounts:
        given = sum(PAGE * (len(data) // PAGE + 1) for data in request.files.values())
        names = sum(len(PurePosixPath(name).parts) for name in request.files)
        size, files = max(request.limits.disk, given) + SLACK, max(MOST_FILES, names) + SLACK_FILES
        mount(folder.parent, size, files)
    folder.mkdir()
    fill(folder, request.files)


def fill(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def own(folder: Path, user: int) -> None:
    """Gives the folder and all in it to `user`."""
    for path in [str(folder), *(entry.path for entry in _walk(folder))]:
        os.chown(path, user, user)


def over_mount(folder: Path, most: int, _: Held) -> bool:
    """True if a folder in a file system of its own takes more than `most` bytes, or too many files."""
    used = os.statvfs(folder)
    too_many = used.f_files - used.f_ffree > MOST_FILES + OWN_FILES
    return (used.f_blocks - used.f_bfree) * used.f_frsize > most or too_many


def over(folder: Path, most: int, held: Held) -> bool:
    """True if more than `most` bytes lie in the folder and in files that the program holds without a name, or too
    many files."""
    size = held.files
    if held.hidden or size > most:
        return True
    try:
        for number, entry in enumerate(_walk(folder)):
            with contextlib.suppress(FileNotFoundError):  # the program removes while we count
                size += entry.stat(follow_symlinks=False).st_blocks * 512
            if size > most or number >= MOST_FILES:
                return True
    except OSError:  # deeper than a path can be long, or shut to us
        return True
    return False


def contents(folder: Path, most: int) -> dict[str, bytes]:
    """The regular files in the folder by their relative paths; without those that would take it over `most` bytes."""
    found: dict[str, bytes] = {}
    try:
        for entry in _walk(folder):
            size = entry.stat(follow_symlinks=False).st_size
            if entry.is_file(follow_symlinks=False) and size <= most:
                found[os.path.relpath(entry.path, folder)] = _read(entry.path)
                most -= size
    except OSError:  # shut to us, or too deep: what was found until then
        pass
    return dict(sorted(found.items()))


def heads(folder: Path, sizes: Mapping[str, int]) -> dict[str, bytes]:
    """The first bytes of files in the folder itself, so many of each. Anything but a regular file is left out."""
    found: dict[str, bytes] = {}
    for name, size in sizes.items():
        path = folder / name
        try:
            if stat.S_ISREG(path.lstat().st_mode):
                found[name] = _read(str(path), size)
        except OSError:  # missing, or shut to us
            continue
    return found


def remove(folder: Path) -> None:
    """Removes the folder. Python's own way fails at folders nested very deep and at those shut to their owner."""
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*command, "--", str(folder)], check=False, stderr=subprocess.DEVNULL)


def _walk(folder: Path) -> Iterator[os.DirEntry[str]]:
    """All entries below the folder; links are not followed."""
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
