"""Folders as bytes, to send them from one machine to another: a mapping from relative path to file contents."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from palestra.core.files import path_inside

FileBundle = dict[str, np.ndarray]  # uint8 arrays [bytes]: Ray's object store passes them without a copy


def pack_folder(folder: Path) -> FileBundle:
    """Returns all files of `folder` and its subfolders: relative path -> uint8 array [bytes]."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): np.fromfile(path, np.uint8) for path in files}


def content_hash(files: FileBundle) -> str:
    """Returns the SHA-256 of the files' paths and contents, in hexadecimal."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{len(name)} {name} {files[name].nbytes} ".encode())
        digest.update(files[name].data)
    return digest.hexdigest()


def num_bytes(files: FileBundle) -> int:
    """Returns the bytes of all files."""
    return sum(data.nbytes for data in files.values())


def unpack_folder(files: FileBundle, folder: Path) -> Path:
    """Writes `files` into `folder`, creating it if needed, and returns `folder`."""
    for name, data in files.items():
        path = path_inside(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        data.tofile(path)
    folder.mkdir(parents=True, exist_ok=True)  # in case there are no files
    return folder
