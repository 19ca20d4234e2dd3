"""The words behind token ids, by the tokenizer of the base that a policy stands on.

Bases that ship with palestra are known, and those of the hub that were downloaded before. Paths that a config names are
not followed: a run's files may come from anywhere.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Self

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

import palestra

SHIPPED = Path(palestra.__file__).parent / "bases"
PLAIN = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")


class Vocabulary:
    """What the ids of one tokenizer stand for."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(path))

    @classmethod
    @lru_cache(maxsize=8)
    def of(cls, base: str) -> Self | None:
        """The vocabulary of a base by its name; None where it is not on this machine."""
        path = next((path for path in _places(base) if path.is_file()), None)
        return cls(path) if path else None

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """A text for each id, which joined are the whole; "" where a letter ends only with a later one."""
        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(self.tokenizer, number) or "" for number in ids]


def _places(base: str) -> list[Path]:
    if not PLAIN.fullmatch(base):
        return []
    if "/" not in base:
        return [SHIPPED / base / "tokenizer.json"]
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    folder = home / "hub" / f"models--{base.replace('/', '--')}" / "snapshots"
    return sorted(folder.glob("*/tokenizer.json"))
