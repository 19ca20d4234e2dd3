"""KV cache of the sampler: each prompt is stored once for all of its answers, each answer separately.

Sequences are stored in pages (kv_pages.py), in one pool of answers and one of prompts for each number of answers (1,
up to 4, up to 16, ...), since attention pads each prompt of a pool to the largest number of answers of one of them.
With `one_pool` all are in one pool, which stays at its place as long as possible: recorded decoding steps
(decode_graphs.py) read the pages of each row by a table.

All pools and the prefix store together stay within a budget in bytes, also while pools are copied. An allocation beyond
the budget first takes unused memory from other pools and from the prefix store, and then raises `CacheFull`; what is in
the cache stays as it is.

Shapes: `L` layers, `h` key-value heads, `D` head width, `T` tokens.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from palestra.engine.cache.kv_pages import PAGE_TOKENS, CacheFull, CacheMemory, CacheSlot, PagePool
from palestra.engine.cache.prefix_store import PrefixStore

T = TypeVar("T")
ANSWERS = 0  # key of the pool of answers
DEFAULT_BUDGET_DIVISOR = 2  # the default budget is half of the free memory
# prompt tokens of a pass
MIN_PREFILL_TOKENS = 256
MAX_PREFILL_TOKENS = 8192
PREFILL_DIVISOR = 4


def default_cache_bytes(free: int) -> int:
    """Returns the default budget of a cache in bytes, where `free` bytes of memory are free."""
    return free // DEFAULT_BUDGET_DIVISOR


def budget_bytes(gib: float | None) -> int | None:
    """Returns a budget of `gib` GiB in bytes; None stands for the default budget."""
    return None if gib is None else int(gib * 2**30)


def token_bytes(layers: int, width: int, size: int) -> int:
    """Returns the bytes of a token's keys and values in `layers` layers, each `width` numbers of `size` bytes."""
    return layers * 2 * width * size


def default_prefill_tokens(budget: int, bytes_per_token: int) -> int:
    """Returns how many prompt tokens a pass has at most: a quarter of those that a cache of `budget` bytes holds. Where
    little memory is meant for keys and values, activations should not take more."""
    return min(MAX_PREFILL_TOKENS, max(MIN_PREFILL_TOKENS, budget // bytes_per_token // PREFILL_DIVISOR))


def pages_of(tokens: int) -> int:
    """Returns the number of pages of a sequence of `tokens` tokens."""
    return -(-tokens // PAGE_TOKENS)


class KVCache:
    """KV cache: pools of prompts, by number of answers, and a pool of answers, or `one_pool` of all. `memory` is its
    budget (None: no limit), which `store` shares (None: an empty store)."""

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        width: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        memory: CacheMemory | None = None,
        store: PrefixStore | None = None,
        one_pool: bool = False,
    ) -> None:
        self.memory = memory or CacheMemory()
        self.one_pool = one_pool
        self.store = store or PrefixStore(0, self.memory)
        self.layers = layers
        self.token_bytes = token_bytes(layers, kv_heads * width, dtype.itemsize)
        self._empty = torch.zeros(2, 0, kv_heads, PAGE_TOKENS, width, device=device, dtype=dtype)
        self._pools: dict[int, PagePool] = {}  # by the most answers to a prompt of the pool

    @property
    def bytes(self) -> int:
        """Allocated memory in bytes, without the prefix store."""
        return sum(pool.bytes for pool in self._pools.values())

    @property
    def free_bytes(self) -> int | None:
        """Memory in bytes for further sequences, counting what is allocated and not used; None without a limit."""
        if self.memory.limit is None:
            return None
        return self.memory.limit - sum(pool.num_used * pool.page_bytes for pool in self._pools.values())

    def bytes_of(self, tokens: int) -> int:
        """Returns the memory in bytes of a sequence of `tokens` tokens."""
        return pages_of(tokens) * PAGE_TOKENS * self.token_bytes

    def allocate_prompts(self, lengths: Sequence[int], answer_counts: Sequence[int]) -> list[CacheSlot]:
        """Allocates slots for prompts of `lengths` tokens with `answer_counts` answers each. Raises CacheFull if there
        is no room for all of them."""
        slots = self._allocate([self._prompt_key(k) for k in answer_counts], lengths)
        for slot, length in zip(slots, lengths, strict=True):
            slot.length = length
        return slots

    def allocate_answers(self, tokens: Sequence[int]) -> list[CacheSlot]:
        """Allocates slots for answers of at least `tokens` tokens each. Raises CacheFull if there is no room for all of
        them."""
        return self._allocate([ANSWERS] * len(tokens), tokens)

    def grow(self, answers: Sequence[CacheSlot]) -> None:
        """Makes room for one more token in each of `answers`. Raises CacheFull if there is no room for all of them;
        some may have grown."""
        full = _by_pool([slot for slot in answers if slot.length == slot.capacity])
        for pool, slots in full.items():
            self._reclaiming(partial(pool.reserve, len(slots)))
            for slot in slots:
                pool.add(slot, 1)

    def regroup(self, prompts: Sequence[CacheSlot], answer_counts: Sequence[int]) -> None:
        """Moves `prompts` to the pools for their new numbers of answers. If there is no room they stay: that costs
        time only."""
        moves: dict[tuple[PagePool, int], list[CacheSlot]] = defaultdict(list)
        for slot, k in zip(prompts, answer_counts, strict=True):
            if slot.pool is not self._pools.get(self._prompt_key(k)):
                moves[slot.pool, self._prompt_key(k)].append(slot)
        for (_, key), slots in moves.items():
            try:
                self._reclaiming(partial(self._move, slots, key))
            except CacheFull:
                return

    def free(self, slots: Sequence[CacheSlot]) -> None:
        for pool, group in _by_pool(slots).items():
            pool.remove(group)

    def free_empty_pools(self) -> None:
        for key, pool in list(self._pools.items()):
            if not pool.num_used:
                pool.free()
                del self._pools[key]

    def read(self, slot: CacheSlot, start: int = 0) -> Tensor:
        """Returns a copy of the keys and values [L, 2, h, T, D] of a sequence from position `start` on."""
        rows_hT = _rows(slot, np.arange(start, slot.length))
        layers = [_flat(kv).index_select(1, rows_hT.ravel()) for kv in slot.pool.kv]
        return torch.stack(layers).unflatten(2, rows_hT.shape)

    def write(self, slot: CacheSlot, start: int, kv_L2hTD: Tensor) -> None:
        """Writes keys and values to the positions of a sequence from `start` on."""
        rows_hT = _rows(slot, np.arange(start, start + kv_L2hTD.shape[3]))
        for kv, new_2hTD in zip(slot.pool.kv, kv_L2hTD, strict=True):
            _flat(kv).index_copy_(1, rows_hT.ravel(), new_2hTD.flatten(1, 2))

    def zero(self, slots: Sequence[CacheSlot]) -> None:
        """Zeroes the memory of `slots`. It may hold NaN, which a mask does not keep out of the next sequences there."""
        for slot in slots:
            for kv in slot.pool.kv:
                kv[:, slot.pages] = 0

    def _prompt_key(self, answers: int) -> int:
        """Returns the key of the pool of prompts with `answers` answers: the first of 1, 4, 16, ... that is at least
        that."""
        key = ANSWERS if self.one_pool else 1
        while 0 < key < answers:
            key *= 4
        return key

    def _pool(self, key: int) -> PagePool:
        if key not in self._pools:
            self._pools[key] = PagePool(self.memory, self.layers, self._empty, stays=self.one_pool)
        return self._pools[key]

    def _move(self, slots: Sequence[CacheSlot], key: int) -> None:
        self._pool(key).move_in(slots)

    def _allocate(self, keys: Sequence[int], lengths: Sequence[int]) -> list[CacheSlot]:
        pages: Counter[int] = Counter()
        for key, length in zip(keys, lengths, strict=True):
            pages[key] += pages_of(length)

        def reserve() -> None:
            for key, count in pages.items():
                self._pool(key).reserve(count)

        self._reclaiming(reserve)  # all before adding any: memory may run out
        slots = [CacheSlot(self._pool(key)) for key in keys]
        for slot, length in zip(slots, lengths, strict=True):
            slot.pool.add(slot, pages_of(length))
        return slots

    def _reclaiming(self, action: Callable[[], T]) -> T:
        """Runs `action`, and again if it finds the cache full: after unused memory is freed, and then for as long as
        the store has entries to drop."""
        again = False
        while True:
            try:
                return action()
            except CacheFull:
                self.free_empty_pools()
                for pool in self._pools.values():
                    pool.trim()  # also what the action had reserved before it failed
                if again and not self.store.drop_oldest():
                    raise
                again = True


def _by_pool(slots: Sequence[CacheSlot]) -> dict[PagePool, list[CacheSlot]]:
    groups: dict[PagePool, list[CacheSlot]] = defaultdict(list)
    for slot in slots:
        groups[slot.pool].append(slot)
    return groups


def _rows(slot: CacheSlot, positions_T: np.ndarray) -> Tensor:
    return torch.as_tensor(slot.rows(positions_T), device=slot.pool.kv[0].device)


def _flat(kv: Tensor) -> Tensor:
    """Returns a view [2, N*h*P, D] of a layer's keys and values."""
    return kv.flatten(1, 3)
