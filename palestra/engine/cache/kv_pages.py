"""Memory of the KV cache: pools of pages, and the bytes that all of them may take.

A page holds the keys and values of `PAGE_TOKENS` successive tokens of one sequence. A pool is dense: when sequences
leave, its last pages move into the gaps. Its memory follows what is in use: it grows by an eighth, and shrinks when a
third is free. It is then copied layer by layer, so that a copy takes the memory of one layer only. An empty pool keeps
its memory, for later sequences. A pool that `stays` doubles and does not shrink, so that its memory rarely moves: CUDA
graphs are recorded for where it is.

Shapes: `N` pages of a pool, `P` tokens of a page, `h` key-value heads, `D` head width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from torch import Tensor

from palestra.core.accel.malloc import mapped_zeros

PAGE_TOKENS = 32  # with fewer, the small products of attention take longer; with more, last pages waste memory
SLACK_DIVISOR = 8  # a pool that grows or shrinks gets 1/8 more pages than it needs


class CacheFull(Exception):
    """The budget of the KV cache has no room for an allocation."""


class CacheMemory:
    """Bytes in use by the pools and the prefix store of one cache, and their limit (None: no limit)."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.used = 0

    def check(self, size: int) -> None:
        """Raises CacheFull if `size` more bytes exceed the limit."""
        if self.limit is not None and self.used + size > self.limit:
            raise CacheFull(
                f"the KV cache's {self.limit / 2**20:,.1f} MiB have {(self.limit - self.used) / 2**20:,.1f} MiB free, "
                f"and {size / 2**20:,.1f} MiB are needed. Raise its budget (kv_cache_gib)."
            )

    def claim(self, size: int) -> None:
        """Counts `size` more bytes. Raises CacheFull if they exceed the limit."""
        self.check(size)
        self.used += size

    def release(self, size: int) -> None:
        """Counts `size` bytes less."""
        self.used -= size


@dataclass(eq=False)
class CacheSlot:
    """Location of one sequence: its pages in `pool`, in order, with the first `length` positions filled."""

    pool: PagePool
    pages: list[int] = field(default_factory=list)
    length: int = 0

    @property
    def capacity(self) -> int:
        """Number of tokens that its pages hold."""
        return len(self.pages) * PAGE_TOKENS

    def rows(self, positions_T: np.ndarray) -> np.ndarray:
        """Returns the rows [h, T] of the positions `positions_T` in `kv.view(-1, D)`, `kv` being the keys or the values
        of a layer of the pool."""
        page_T = np.array(self.pages, np.int64)[positions_T // PAGE_TOKENS]
        heads = np.arange(self.pool.kv_heads)[:, None]
        return (page_T * self.pool.kv_heads + heads) * PAGE_TOKENS + positions_T % PAGE_TOKENS


class PagePool:
    """Keys and values `kv[layer] [2, N, h, P, D]` of pages, in the engine's dtype; the first `num_used` belong to
    sequences."""

    def __init__(self, memory: CacheMemory, layers: int, empty: Tensor, *, stays: bool = False) -> None:
        """`empty` [2, 0, h, P, D] has the pool's shape, device and dtype."""
        self.memory = memory
        self.kv = [empty] * layers
        self.stays = stays
        self._owners: list[tuple[CacheSlot, int]] = []  # the sequence of each page in use, and the page's index in it

    @property
    def kv_heads(self) -> int:
        return self.kv[0].shape[2]

    @property
    def num_used(self) -> int:
        return len(self._owners)

    @property
    def num_pages(self) -> int:
        """Number of pages that the pool has memory for."""
        return min(kv.shape[1] for kv in self.kv)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers."""
        return len(self.kv) * self._layer_page_bytes

    @property
    def _layer_page_bytes(self) -> int:
        shape = self.kv[0].shape
        return 2 * shape[2] * shape[3] * shape[4] * self.kv[0].element_size()

    @property
    def bytes(self) -> int:
        """Allocated memory in bytes."""
        return sum(kv.nbytes for kv in self.kv)

    def reserve(self, count: int) -> None:
        """Makes room for `count` more pages, and some beyond if the budget allows it, so that copies are rare. Raises
        CacheFull if there is no room."""
        need = self.num_used + count
        if need <= self.num_pages:
            return
        for spare in [*([need] if self.stays else []), need // SLACK_DIVISOR]:
            with contextlib.suppress(CacheFull):
                return self._resize(need + spare)
        self._resize(need)

    def add(self, slot: CacheSlot, count: int) -> None:
        """Appends `count` pages to `slot`, for which there must be room."""
        assert slot.pool is self and self.num_used + count <= self.num_pages
        for _ in range(count):
            slot.pages.append(len(self._owners))
            self._owners.append((slot, len(slot.pages) - 1))

    def move_in(self, slots: Sequence[CacheSlot]) -> None:
        """Moves `slots`, which are all in one other pool, to this pool. Raises CacheFull if there is no room."""
        source = slots[0].pool
        old = list(chain.from_iterable(slot.pages for slot in slots))
        self.reserve(len(old))
        first = self.num_used
        counts = [len(slot.pages) for slot in slots]
        for mine, theirs in zip(self.kv, source.kv, strict=True):
            mine[:, first : first + len(old)] = theirs[:, old]
        source._drop(slots)
        for slot, count in zip(slots, counts, strict=True):
            slot.pool = self
            self.add(slot, count)
        source._shrink()  # last: it may run out of memory, and then nothing is lost

    def remove(self, slots: Sequence[CacheSlot]) -> None:
        """Takes the pages of `slots` away, and shrinks the pool if a third of it is free."""
        self._drop(slots)
        self._shrink()

    def trim(self) -> None:
        """Frees the unused part of the pool if the budget has room for the copy."""
        if self.num_used < self.num_pages:
            with contextlib.suppress(CacheFull):
                self._resize(self.num_used)

    def free(self) -> None:
        """Frees the memory of an empty pool. The pool object may live on: slots of past requests refer to it."""
        self.memory.release(self.bytes)
        self.kv = [kv.new_empty((2, 0, *kv.shape[2:])) for kv in self.kv]

    def _drop(self, slots: Sequence[CacheSlot]) -> None:
        gone = set(chain.from_iterable(slot.pages for slot in slots))
        size = self.num_used - len(gone)
        if moved := [page for page in range(size, self.num_used) if page not in gone]:
            gaps = sorted(page for page in gone if page < size)
            for kv in self.kv:
                kv[:, gaps] = kv[:, moved]
            for page, gap in zip(moved, gaps, strict=True):
                slot, number = self._owners[gap] = self._owners[page]
                slot.pages[number] = gap
        del self._owners[size:]
        for slot in slots:
            slot.pages = []

    def _shrink(self) -> None:
        if not self.stays and 0 < 3 * self.num_used <= 2 * self.num_pages:
            with contextlib.suppress(CacheFull):
                self._resize(self.num_used + self.num_used // SLACK_DIVISOR)

    def _resize(self, size: int) -> None:
        """Copies the pool to one of `size` pages, a layer at a time. Pages beyond those in use are zero: a mask does
        not keep NaN out."""
        page = self._layer_page_bytes
        used = self.num_used
        more = max(0, size - self.num_pages) * self.page_bytes
        self.memory.check(more + min(size, self.num_pages) * page)  # all at once: not after some layers
        for layer, old in enumerate(self.kv):
            self.memory.claim(size * page)
            try:
                new = mapped_zeros((2, size, *old.shape[2:]), old)
            except Exception:
                self.memory.release(size * page)
                raise
            new[:, :used] = old[:, :used]
            self.memory.release(old.nbytes)
            self.kv[layer] = new
