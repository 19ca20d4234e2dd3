"""Digests of the user's files that a config names: a run that goes on tells which of them changed since it began."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from palestra.core.config.user_modules import is_installed

NUM_BLOCKS = 64
BLOCK_BYTES = 16_384
MODEL_FILES = ("config.json", "adapter_config.json")  # a folder with one of them is a model or an adapter
OBJECT = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_]\w*")


def input_digests(tree: Any) -> dict[str, str]:
    """Returns the digests of the files that the values of a config name, by value: plain files, folders of models and
    adapters, and files of the modules of "module:name" that are loaded and not installed."""
    digests: dict[str, str] = {}
    for value in dict.fromkeys(_texts(tree)):
        files = _input_files(value)
        if files:
            digests[value] = _digest(files)
    return digests


def _texts(tree: Any) -> Iterator[str]:
    """Yields every text in a tree of mappings and lists."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict):
        for branch in tree.values():
            yield from _texts(branch)
    elif isinstance(tree, list):
        for branch in tree:
            yield from _texts(branch)


def _input_files(value: str) -> list[Path]:
    """Returns the files that a value of a config names; none if it names none."""
    if named := OBJECT.fullmatch(value):
        module = sys.modules.get(named[1])
        file = getattr(module, "__file__", None)
        if file is None or named[1].startswith("palestra.") or is_installed(file):
            return []
        return [Path(file)]
    try:
        path = Path(value)
        if path.is_file():
            return [path]
        if any((path / name).is_file() for name in MODEL_FILES):
            return sorted(file for file in path.iterdir() if file.is_file())
    except (OSError, ValueError):  # too long for a name, or not one: a prompt, for example
        pass
    return []


def _digest(files: list[Path]) -> str:
    """Returns a digest of the files' names, sizes and contents, of which large ones are sampled in `NUM_BLOCKS` blocks
    at equal distances."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as opened:
            if size <= NUM_BLOCKS * BLOCK_BYTES:
                digest.update(opened.read())
                continue
            for block in range(NUM_BLOCKS):
                opened.seek(block * (size - BLOCK_BYTES) // (NUM_BLOCKS - 1))
                digest.update(opened.read(BLOCK_BYTES))
    return digest.hexdigest()
