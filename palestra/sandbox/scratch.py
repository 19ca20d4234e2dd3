"""A program's folder: made, filled, measured, read back and removed, whatever the program made of it."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

MOST_FILES = 4096  # files and folders that a program may have


def fill(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def own(folder: Path, user: int) -> None:
    """Gives the folder and all in it to `user`."""
    for path in [str(folder), *(entry.path for entry in _walk(folder))]:
        os.chown(path, user, user)


def over(folder: Path, most: int) -> bool:
    """Whether more than `most` bytes lie in the folder, or too many files."""
    size = 0
    try:
        for number, entry in enumerate(_walk(folder)):
            size += entry.stat(follow_symlinks=False).st_blocks * 512
            if size > most or number >= MOST_FILES:
                return True
    except FileNotFoundError:  # the program removes while we count: the next count sees
        return False
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
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                yield entry
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        return file.read() if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
