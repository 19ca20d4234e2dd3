"""Keys and values of finished conversations, so that a later turn computes only its new tokens.

Shapes: `L` layers, `h` key-value heads, `T` tokens, `D` head width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from torch import Tensor

from palestra.engine.cache.kv_pages import CacheFull, CacheMemory


@dataclass(eq=False)
class StoredPart:
    """Keys and values [L, 2, h, T, D] of a part of a conversation, which `num_entries` entries share."""

    kv_L2hTD: Tensor
    num_entries: int = 0

    @property
    def num_tokens(self) -> int:
        return self.kv_L2hTD.shape[3]


class PrefixStore:
    """Conversations as lists of parts: a part that several share, such as a prompt, is stored once.

    Beyond `capacity` tokens, or the limit of `memory`, the least recently used entries are dropped. `owner` is the id
    of the snapshot that computed an entry: the same tokens have other keys and values under another adapter.
    """

    def __init__(self, capacity: int, memory: CacheMemory | None = None) -> None:
        self.capacity = capacity
        self.num_tokens = 0
        self.memory = memory or CacheMemory()
        self._entries: OrderedDict[tuple[int, bytes], list[StoredPart]] = OrderedDict()

    @property
    def bytes(self) -> int:
        """Memory in bytes."""
        parts = set(chain.from_iterable(self._entries.values()))
        return sum(part.kv_L2hTD.nbytes for part in parts)

    def put(self, owner: int, ids: np.ndarray, parts: Sequence[StoredPart]) -> None:
        """Stores the keys and values of the tokens `ids` [T], in parts. Entries longer than the capacity, or for which
        the cache has no room, are not stored."""
        key = (owner, ids.astype(np.int64).tobytes())
        if key in self._entries or len(ids) > self.capacity:
            return
        new = [part for part in parts if not part.num_entries]
        try:
            self.memory.claim(sum(part.kv_L2hTD.nbytes for part in new))
        except CacheFull:
            return
        self._entries[key] = list(parts)
        self.num_tokens += sum(part.num_tokens for part in new)
        for part in parts:
            part.num_entries += 1
        while self.num_tokens > self.capacity:
            self.drop_oldest()

    def drop_oldest(self) -> bool:
        """Drops the least recently used entry; returns False if there is none."""
        if not self._entries:
            return False
        _, dropped = self._entries.popitem(last=False)
        for part in dropped:
            part.num_entries -= 1
            if not part.num_entries:
                self.num_tokens -= part.num_tokens
                self.memory.release(part.kv_L2hTD.nbytes)
        return True

    def longest_prefix(self, owner: int, ids: np.ndarray) -> list[StoredPart]:
        """Returns the parts of the longest stored proper prefix of `ids`; empty if there is none."""
        raw = ids.astype(np.int64).tobytes()
        for size in sorted({len(tokens) for _, tokens in self._entries}, reverse=True):
            key = (owner, raw[:size])
            if size < len(raw) and key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key]
        return []

    def clear(self) -> None:
        while self.drop_oldest():
            pass
