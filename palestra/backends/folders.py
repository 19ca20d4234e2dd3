"""Folders on their way from one machine to another: their files' bytes, by path."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from palestra.files import path_inside

Files = dict[str, np.ndarray]  # arrays of bytes: they pass Ray's object store without a copy


def packed(folder: Path) -> Files:
    """The files of a folder, those of folders in it too."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): np.fromfile(path, np.uint8) for path in files}


def unpacked(files: Files, folder: Path) -> Path:
    """`folder`, with these files in it."""
    for name, data in files.items():
        path = path_inside(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        data.tofile(path)
    folder.mkdir(parents=True, exist_ok=True)  # where there are none
    return folder
