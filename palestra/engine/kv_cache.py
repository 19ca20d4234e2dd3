"""KV cache of the sampler: each prompt is stored once for all of its answers, each answer separately.

Sequences are stored in pools by capacity, which doubles as they grow, so that a long sequence does not enlarge the
others. A pool is dense: when sequences leave, the last ones move into the gaps, and a pool that is three quarters free
shrinks. An empty pool keeps its memory until `free_empty_pools`, for later sequences. Prompts are also separated by
their number of answers, since attention pads each prompt of a pool to the largest number of answers of one of them.
Memory is thus at most a small multiple of what the live sequences need.

All pools and the prefix store together stay within a budget in bytes, also while sequences are copied: a pool takes at
most 1/`POOLS_PER_BUDGET` of it, and further sequences of its capacity go to another pool. An allocation beyond the
budget first takes unused memory from other pools and from the prefix store, and then raises `CacheFull`; what is in the
cache stays as it is.

Shapes: `L` layers, `N` sequences of a pool's capacity, `C` tokens of capacity per sequence, `h` key-value heads, `D`
head width, `T` tokens.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")
MIN_CAPACITY = 16  # minimum capacity of a sequence in tokens
POOLS_PER_BUDGET = 16
DEFAULT_BUDGET_DIVISOR = 2  # the default budget is half of the free memory


class CacheFull(Exception):
    """The budget of the KV cache has no room for an allocation."""


def default_cache_bytes(free: int) -> int:
    """Returns the default budget of a cache in bytes, where `free` bytes of memory are free."""
    return free // DEFAULT_BUDGET_DIVISOR


def capacity_of(tokens: int) -> int:
    """Returns the capacity in tokens of the pool that holds a sequence of `tokens` tokens."""
    return _power(tokens, MIN_CAPACITY, 2)


class CacheMemory:
    """Bytes in use by the pools and the prefix store of one cache, and their limit (None: no limit)."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit, self.used = limit, 0

    def claim(self, size: int) -> None:
        """Counts `size` more bytes. Raises CacheFull if they exceed the limit."""
        if self.limit is not None and self.used + size > self.limit:
            raise CacheFull(
                f"the KV cache's {self.limit / 2**20:,.1f} MiB have {(self.limit - self.used) / 2**20:,.1f} MiB free, "
                f"and {size / 2**20:,.1f} MiB are needed. Raise its budget (kv_cache_gib)."
            )
        self.used += size

    def release(self, size: int) -> None:
        """Counts `size` bytes less."""
        self.used -= size


@dataclass(eq=False)
class CacheSlot:
    """Location of one sequence: index `index` of `pool`, with `length` positions filled."""

    pool: CachePool
    index: int = -1
    length: int = 0

    @property
    def kv_L2hTD(self) -> Tensor:
        """View of the sequence's keys and values. It is invalid after other sequences leave the pool."""
        return self.pool.kv[:, :, self.index, :, : self.length]


@dataclass(eq=False)
class CachePool:
    """Keys and values `kv [L, 2, N, h, C, D]` of at most `max_slots` sequences, in the engine's dtype; the first
    `len(slots)` indices belong to `slots`."""

    kv: Tensor
    memory: CacheMemory
    max_slots: int
    slots: list[CacheSlot] = field(default_factory=list)

    @property
    def capacity(self) -> int:
        """Capacity of each sequence in tokens."""
        return self.kv.shape[4]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one sequence."""
        layers, _, _, h, room, width = self.kv.shape
        return layers * 2 * h * room * width * self.kv.element_size()

    @property
    def bytes(self) -> int:
        """Allocated memory in bytes."""
        return self.kv.shape[2] * self.slot_bytes

    @property
    def num_free(self) -> int:
        """Number of further sequences that the pool may hold."""
        return self.max_slots - len(self.slots)

    def reserve(self, count: int) -> None:
        """Makes room for `count` more sequences. The pool doubles if the budget allows it, so that copies are rare.
        Raises CacheFull if there is no room."""
        need, have = len(self.slots) + count, self.kv.shape[2]
        if need <= have:
            return
        try:
            self._resize(max(need, min(2 * have, self.max_slots)))
        except CacheFull:
            self._resize(need)

    def add(self, slots: Sequence[CacheSlot]) -> None:
        """Appends `slots`, without keys and values."""
        self.reserve(len(slots))
        for index, slot in enumerate(slots, len(self.slots)):
            slot.pool, slot.index = self, index
        self.slots += slots

    def move_in(self, slots: Sequence[CacheSlot]) -> None:
        """Moves `slots`, which are all in one other pool, to this pool."""
        source, first, longest = slots[0].pool, len(self.slots), max(slot.length for slot in slots)
        self.reserve(len(slots))
        index_M = source._indices(slots)
        for mine, theirs in zip(self.kv, source.kv, strict=True):  # by layer: copies of all would need much memory
            mine[:, first : first + len(slots), :, :longest] = theirs[:, index_M, :, :longest]
        source._drop(slots)
        self.add(slots)
        source._shrink()  # last: it may run out of memory, and then nothing is lost

    def remove(self, slots: Sequence[CacheSlot]) -> None:
        """Removes `slots`, and shrinks the pool if it is mostly free."""
        self._drop(slots)
        self._shrink()

    def trim(self) -> None:
        """Frees the unused part of the pool if the budget has room for the copy."""
        if len(self.slots) < self.kv.shape[2]:
            with contextlib.suppress(CacheFull):
                self._resize(len(self.slots))

    def _drop(self, slots: Sequence[CacheSlot]) -> None:
        gone = {slot.index for slot in slots}
        size = len(self.slots) - len(gone)
        moved = [slot for slot in self.slots[size:] if slot.index not in gone]
        if moved:
            gaps, longest = sorted(index for index in gone if index < size), max(slot.length for slot in moved)
            target = torch.as_tensor(gaps, device=self.kv.device)
            self.kv[:, :, target, :, :longest] = self.kv[:, :, self._indices(moved), :, :longest]
            for slot, gap in zip(moved, gaps, strict=True):
                slot.index, self.slots[gap] = gap, slot
        del self.slots[size:]

    def _shrink(self) -> None:
        if 0 < 4 * len(self.slots) <= self.kv.shape[2]:
            with contextlib.suppress(CacheFull):
                self._resize(2 * len(self.slots))

    def _indices(self, slots: Sequence[CacheSlot]) -> Tensor:
        return torch.as_tensor([slot.index for slot in slots], device=self.kv.device)

    def _resize(self, size: int) -> None:
        old, before = self.kv, self.bytes
        self.memory.claim(size * self.slot_bytes)
        try:
            self.kv = old.new_zeros(*old.shape[:2], size, *old.shape[3:])
        except Exception:
            self.memory.release(size * self.slot_bytes)
            raise
        kept = min(size, old.shape[2])
        self.kv[:, :, :kept] = old[:, :, :kept]
        self.memory.release(before)


class KVCache:
    """KV cache: pools of prompts, by capacity and number of answers, and pools of answers, by capacity. `memory` is its
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
    ) -> None:
        self._empty = torch.zeros(layers, 2, 0, kv_heads, 0, width, device=device, dtype=dtype)
        self.memory = memory or CacheMemory()
        self.store = store or PrefixStore(0, self.memory)
        self.token_bytes = layers * 2 * kv_heads * width * self._empty.element_size()
        self._pools: dict[tuple[int, int], list[CachePool]] = {}  # by capacity, and number of answers (0: an answer)

    @property
    def bytes(self) -> int:
        """Allocated memory in bytes, without the prefix store."""
        return sum(pool.bytes for pool in self._all_pools())

    @property
    def free_bytes(self) -> int | None:
        """Memory in bytes for further sequences, counting what is allocated and not used; None without a limit."""
        if self.memory.limit is None:
            return None
        return self.memory.limit - sum(len(pool.slots) * pool.slot_bytes for pool in self._all_pools())

    def bytes_of(self, tokens: int) -> int:
        """Returns the memory in bytes of a sequence of `tokens` tokens."""
        return capacity_of(tokens) * self.token_bytes

    def allocate_prompts(self, lengths: Sequence[int], answer_counts: Sequence[int]) -> list[CacheSlot]:
        """Allocates slots for prompts of `lengths` tokens with `answers` answers each. Raises CacheFull if there is no
        room for all of them."""
        keys = [_prompt_key(n, k) for n, k in zip(lengths, answer_counts, strict=True)]
        slots = self._allocate(keys)
        for slot, length in zip(slots, lengths, strict=True):
            slot.length = length
        return slots

    def allocate_answers(self, tokens: Sequence[int]) -> list[CacheSlot]:
        """Allocates slots for answers of at least `tokens` tokens each. Raises CacheFull if there is no room for all of
        them."""
        return self._allocate([(capacity_of(n), 0) for n in tokens])

    def grow(self, answers: Sequence[CacheSlot]) -> None:
        """Makes room for one more token in each of `answers`. Raises CacheFull if there is no room for all of them;
        some may have grown."""
        full = [slot for slot in answers if slot.length == slot.pool.capacity]
        for pool, slots in _by_pool(full).items():
            self._move(slots, (2 * pool.capacity, 0))

    def regroup(self, prompts: Sequence[CacheSlot], answer_counts: Sequence[int]) -> None:
        """Moves `prompts` to the pools for their new numbers of answers. If there is no room they stay: that costs
        time only."""
        moves: dict[tuple[CachePool, tuple[int, int]], list[CacheSlot]] = defaultdict(list)
        for slot, k in zip(prompts, answer_counts, strict=True):
            key = _prompt_key(slot.length, k)
            if slot.pool not in self._pools.get(key, ()):
                moves[slot.pool, key].append(slot)
        for (_, key), slots in moves.items():
            try:
                self._move(slots, key)
            except CacheFull:
                return

    def free(self, slots: Sequence[CacheSlot]) -> None:
        """Frees `slots`."""
        for pool, group in _by_pool(slots).items():
            pool.remove(group)

    def free_empty_pools(self) -> None:
        """Frees the memory of empty pools."""
        for key, pools in list(self._pools.items()):
            self._pools[key] = [pool for pool in pools if pool.slots]
            self.memory.release(sum(pool.bytes for pool in pools if not pool.slots))
            if not self._pools[key]:
                del self._pools[key]

    def zero(self, slots: Sequence[CacheSlot]) -> None:
        """Zeroes the memory of `slots`. It may hold NaN, which a mask does not keep out of the next sequences there."""
        for slot in slots:
            slot.pool.kv[:, :, slot.index] = 0

    def _all_pools(self) -> Iterator[CachePool]:
        for pools in self._pools.values():
            yield from pools

    def _allocate(self, keys: Sequence[tuple[int, int]]) -> list[CacheSlot]:
        def allocate() -> list[CacheSlot]:
            counts: dict[tuple[int, int], int] = defaultdict(int)
            for key in keys:
                counts[key] += 1
            parts = {key: self._pools_for(key, count) for key, count in counts.items()}
            for pools in parts.values():
                for pool, count in pools:
                    pool.reserve(count)  # reserve all before adding any: memory may run out
            made: dict[tuple[int, int], list[CacheSlot]] = {}
            for key, pools in parts.items():
                made[key] = []
                for pool, count in pools:
                    slots = [CacheSlot(pool) for _ in range(count)]
                    pool.add(slots)
                    made[key] += slots
            rest = {key: iter(slots) for key, slots in made.items()}
            return [next(rest[key]) for key in keys]

        return self._reclaiming(allocate)

    def _move(self, slots: Sequence[CacheSlot], key: tuple[int, int]) -> None:
        """Moves slots of one pool to pools of `key`, as many at a time as fit into one."""
        rest = list(slots)

        def move() -> None:
            while rest:
                pool, count = self._pools_for(key, len(rest))[0]
                pool.move_in(rest[:count])
                del rest[:count]

        self._reclaiming(move)

    def _reclaiming(self, action: Callable[[], T]) -> T:
        """Runs `action`, and again if it finds the cache full: after unused memory is freed, and then for as long as
        the store has entries to drop."""
        again = False
        while True:
            try:
                return action()
            except CacheFull:
                self.free_empty_pools()
                self._trim()  # also what the action had reserved before it failed
                if again and not self.store.drop_oldest():
                    raise
                again = True

    def _trim(self) -> None:
        for pool in self._all_pools():
            pool.trim()

    def _pools_for(self, key: tuple[int, int], count: int) -> list[tuple[CachePool, int]]:
        """Returns pools of `key`, with how many of `count` more sequences each takes; new ones if the others are
        full."""
        pools, found = self._pools.setdefault(key, []), []
        for pool in pools:
            if count and pool.num_free:
                found.append((pool, min(count, pool.num_free)))
                count -= found[-1][1]
        while count:
            pools.append(self._new_pool(key[0]))
            found.append((pools[-1], min(count, pools[-1].num_free)))
            count -= found[-1][1]
        return found

    def _new_pool(self, capacity: int) -> CachePool:
        layers, _, _, h, _, width = self._empty.shape
        limit = self.memory.limit
        most = 2**31 if limit is None else max(1, limit // POOLS_PER_BUDGET // (capacity * self.token_bytes))
        return CachePool(self._empty.new_zeros(layers, 2, 0, h, capacity, width), self.memory, most)


def _by_pool(slots: Sequence[CacheSlot]) -> dict[CachePool, list[CacheSlot]]:
    groups: dict[CachePool, list[CacheSlot]] = defaultdict(list)
    for slot in slots:
        groups[slot.pool].append(slot)
    return groups


def _prompt_key(tokens: int, answers: int) -> tuple[int, int]:
    return capacity_of(tokens), _power(answers, 1, 4)


def _power(need: int, least: int, base: int) -> int:
    """Returns the first of `least`, `least * base`, `least * base**2`, ... that is at least `need`."""
    size = least
    while size < need:
        size *= base
    return size


class PrefixStore:
    """Keys and values of finished conversations, so that a later turn computes only its new tokens.

    Beyond `capacity` tokens, or the limit of `memory`, the least recently used entries are dropped. `owner` is the id
    of the snapshot that computed an entry: the same tokens have other keys and values under another adapter.
    """

    def __init__(self, capacity: int, memory: CacheMemory | None = None) -> None:
        self.capacity, self.num_tokens, self.memory = capacity, 0, memory or CacheMemory()
        self._entries: OrderedDict[tuple[int, bytes], Tensor] = OrderedDict()

    def put(self, owner: int, ids: np.ndarray, kv_L2hTD: Tensor) -> None:
        """Stores the keys and values [L, 2, h, T, D] of the tokens `ids` [T]; entries longer than the capacity, or for
        which the cache has no room, are not stored."""
        key = (owner, ids.astype(np.int64).tobytes())
        if key in self._entries or len(ids) > self.capacity:
            return
        try:
            self.memory.claim(kv_L2hTD.nbytes)
        except CacheFull:
            return
        self._entries[key] = kv_L2hTD
        self.num_tokens += len(ids)
        while self.num_tokens > self.capacity:
            self.drop_oldest()

    def drop_oldest(self) -> bool:
        """Drops the least recently used entry; returns False if there is none."""
        if not self._entries:
            return False
        _, dropped = self._entries.popitem(last=False)
        self.num_tokens -= dropped.shape[-2]
        self.memory.release(dropped.nbytes)
        return True

    def longest_prefix(self, owner: int, ids: np.ndarray) -> Tensor | None:
        """Returns keys and values [L, 2, h, T, D] of the longest stored proper prefix of `ids`, or None."""
        raw = ids.astype(np.int64).tobytes()
        for length in sorted({kv.shape[-2] for kv in self._entries.values()}, reverse=True):
            key = (owner, raw[: 8 * length])
            if length < len(ids) and key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key]
        return None

    def clear(self) -> None:
        while self.drop_oldest():
            pass
