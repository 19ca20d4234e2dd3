"""Disk errors as one line: what could not be written, why, and how to fix it."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from palestra.core.files import DamagedFile
from palestra.runs.settings import CONFIG_FILE, resume_command

REMEDIES = {
    errno.ENOSPC: "free some space on that disk",
    errno.EDQUOT: "free some space of your quota",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
    errno.EROFS: "make that disk writable",
    errno.EACCES: "make the folder writable for this user",
    errno.EPERM: "make the folder writable for this user",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.EIO: "check that disk",
    errno.ENOENT: "bring the file back from a copy",
    errno.EISDIR: "remove that folder",
    errno.ENOTDIR: "remove that file",
    errno.EEXIST: "name a folder",
}
ERRNO_PATTERN = re.compile(r"os error (\d+)|code: (\d+)")  # errno in error messages of safetensors


@contextmanager
def explain_disk_errors(run: Path | None = None) -> Iterator[None]:
    """Context that turns a disk error into DamagedFile, with a remedy and how to resume `run`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = _number(error)
        if number not in REMEDIES:
            raise
        what = f"cannot write {run or 'the run'}"
        if isinstance(error, OSError) and error.filename:
            what = f"cannot use {error.filename}"
        remedy = REMEDIES[number]
        if run and (run / CONFIG_FILE).exists():
            remedy += f", then resume with: {resume_command(run)}"
        raise DamagedFile(f"{what}: {os.strerror(number)}; {remedy}") from error


def _number(error: OSError | SafetensorError) -> int:
    if isinstance(error, OSError):
        return error.errno or 0
    found = ERRNO_PATTERN.search(str(error))
    if found is None:
        return 0
    return int(found[1] or found[2])
