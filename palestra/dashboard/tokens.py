"""Text of token ids, by the tokenizer of the policy's base model.

Finds the bases that ship with palestra, packaged ones once they are converted, and those in the local Hugging Face
cache. File paths in a config are not followed: a run's files may come from an untrusted source.
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

from palestra.core.config.shipped import SHIPPED_BASES_DIR
from palestra.engine.bases.packaged_bases import packaged_folder

BASE_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")


class Vocabulary:
    """The tokenizer of one base model."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(path))

    @classmethod
    @lru_cache(maxsize=8)
    def load(cls, base: str) -> Self | None:
        """Returns the vocabulary of a base by its name; None if it is not on this machine."""
        path = next((path for path in _places(base) if path.is_file()), None)
        return cls(path) if path else None

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Returns one text per id; joined they are the whole text. "" for a token that ends inside a multi-byte
        character."""
        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(self.tokenizer, number) or "" for number in ids]


def _places(base: str) -> list[Path]:
    if not BASE_NAME.fullmatch(base):
        return []
    if folder := packaged_folder(base):
        return [folder / "tokenizer.json"]
    if "/" not in base:
        return [SHIPPED_BASES_DIR / base / "tokenizer.json"]
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    folder = home / "hub" / f"models--{base.replace('/', '--')}" / "snapshots"
    return sorted(folder.glob("*/tokenizer.json"))
