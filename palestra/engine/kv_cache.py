"""KV cache of the sampler: each prompt is stored once for all of its answers, each answer separately.

Sequences are stored in pools by capacity, which doubles as they grow, so that a long sequence does not enlarge the
others. A pool is dense: when sequences leave, the last ones move into the gaps, and a pool that is three quarters free
shrinks. An empty pool keeps its memory until `free_empty_pools`, for later sequences. Prompts are also separated by
their number of answers, since attention pads each prompt of a pool to the largest number of answers of one of them.
Memory is thus at most a small multiple of what the live sequences need.

Shapes: `L` layers, `N` sequences of a pool's capacity, `C` tokens of capacity per sequence, `h` key-value heads, `D`
head width, `T` tokens.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

MIN_CAPACITY = 16  # minimum capacity of a sequence in tokens


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
    """Keys and values `kv [L, 2, N, h, C, D]` of sequences, in the engine's dtype; the first `len(slots)` indices
    belong to `slots`."""

    kv: Tensor
    slots: list[CacheSlot] = field(default_factory=list)

    @property
    def capacity(self) -> int:
        """Capacity of each sequence in tokens."""
        return self.kv.shape[4]

    def reserve(self, count: int) -> None:
        """Makes room for `count` more sequences. The pool at least doubles, so that copies are rare."""
        need, have = len(self.slots) + count, self.kv.shape[2]
        if need > have:
            self._resize(max(need, 2 * have))

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
        moved = source.kv[:, :, self._indices(slots), :, :longest]
        source._drop(slots)
        self.add(slots)
        self.kv[:, :, first : len(self.slots), :, :longest] = moved
        source._shrink()  # last: it may run out of memory, and then nothing is lost

    def remove(self, slots: Sequence[CacheSlot]) -> None:
        """Removes `slots`, and shrinks the pool if it is mostly free."""
        self._drop(slots)
        self._shrink()

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
            self._resize(2 * len(self.slots))

    def _indices(self, slots: Sequence[CacheSlot]) -> Tensor:
        return torch.as_tensor([slot.index for slot in slots], device=self.kv.device)

    def _resize(self, size: int) -> None:
        old = self.kv
        self.kv = old.new_zeros(*old.shape[:2], size, *old.shape[3:])
        kept = min(size, old.shape[2])
        self.kv[:, :, :kept] = old[:, :, :kept]


class KVCache:
    """KV cache: pools of prompts, by capacity and number of answers, and pools of answers, by capacity."""

    def __init__(self, layers: int, kv_heads: int, width: int, device: torch.device, dtype: torch.dtype) -> None:
        self._empty = torch.zeros(layers, 2, 0, kv_heads, 0, width, device=device, dtype=dtype)
        self._prompts: dict[tuple[int, int], CachePool] = {}
        self._answers: dict[int, CachePool] = {}

    @property
    def bytes(self) -> int:
        """Allocated memory in bytes."""
        pools = [*self._prompts.values(), *self._answers.values()]
        return sum(pool.kv.numel() * pool.kv.element_size() for pool in pools)

    def allocate_prompts(self, lengths: Sequence[int], answer_counts: Sequence[int]) -> list[CacheSlot]:
        """Allocates slots for prompts of `lengths` tokens with `answers` answers each."""
        return self._placed(
            [CacheSlot(self._prompt_pool(n, k), length=n) for n, k in zip(lengths, answer_counts, strict=True)]
        )

    def allocate_answers(self, tokens: Sequence[int]) -> list[CacheSlot]:
        """Allocates slots for answers of at least `tokens` tokens each."""
        return self._placed([CacheSlot(self._answer_pool(n)) for n in tokens])

    def grow(self, answers: Sequence[CacheSlot]) -> None:
        """Makes room for one more token in each of `answers`."""
        full = [slot for slot in answers if slot.length == slot.pool.capacity]
        for pool, slots in _by_pool(full).items():
            self._answer_pool(2 * pool.capacity).move_in(slots)

    def regroup(self, prompts: Sequence[CacheSlot], answer_counts: Sequence[int]) -> None:
        """Moves `prompts` to the pools for their new numbers of answers."""
        moves: dict[tuple[CachePool, CachePool], list[CacheSlot]] = defaultdict(list)
        for slot, k in zip(prompts, answer_counts, strict=True):
            pool = self._prompt_pool(slot.length, k)
            if pool is not slot.pool:
                moves[slot.pool, pool].append(slot)
        for (_, pool), slots in moves.items():
            pool.move_in(slots)

    def free(self, slots: Sequence[CacheSlot]) -> None:
        """Frees `slots`."""
        for pool, group in _by_pool(slots).items():
            pool.remove(group)

    def free_empty_pools(self) -> None:
        """Frees the memory of empty pools."""
        self._prompts = {key: pool for key, pool in self._prompts.items() if pool.slots}
        self._answers = {key: pool for key, pool in self._answers.items() if pool.slots}

    def zero(self, slots: Sequence[CacheSlot]) -> None:
        """Zeroes the memory of `slots`. It may hold NaN, which a mask does not keep out of the next sequences there."""
        for slot in slots:
            slot.pool.kv[:, :, slot.index] = 0

    def _placed(self, slots: list[CacheSlot]) -> list[CacheSlot]:
        groups = _by_pool(slots)
        for pool, group in groups.items():
            pool.reserve(len(group))  # reserve all before adding any: memory may run out
        for pool, group in groups.items():
            pool.add(group)
        return slots

    def _prompt_pool(self, tokens: int, answers: int) -> CachePool:
        key = _power(tokens, MIN_CAPACITY, 2), _power(answers, 1, 4)
        if key not in self._prompts:
            self._prompts[key] = self._pool(key[0])
        return self._prompts[key]

    def _answer_pool(self, tokens: int) -> CachePool:
        room = _power(tokens, MIN_CAPACITY, 2)
        if room not in self._answers:
            self._answers[room] = self._pool(room)
        return self._answers[room]

    def _pool(self, room: int) -> CachePool:
        layers, _, _, h, _, width = self._empty.shape
        return CachePool(self._empty.new_zeros(layers, 2, 0, h, room, width))


def _by_pool(slots: Sequence[CacheSlot]) -> dict[CachePool, list[CacheSlot]]:
    groups: dict[CachePool, list[CacheSlot]] = defaultdict(list)
    for slot in slots:
        groups[slot.pool].append(slot)
    return groups


def _power(need: int, least: int, base: int) -> int:
    """Returns the first of `least`, `least * base`, `least * base**2`, ... that is at least `need`."""
    size = least
    while size < need:
        size *= base
    return size


class PrefixStore:
    """Keys and values of finished conversations, so that a later turn computes only its new tokens.

    Beyond `capacity` tokens the least recently used entries are dropped. `owner` is the id of the snapshot that
    computed an entry: the same tokens have other keys and values under another adapter.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.num_tokens = capacity, 0
        self._entries: OrderedDict[tuple[int, bytes], Tensor] = OrderedDict()

    def put(self, owner: int, ids: np.ndarray, kv_L2hTD: Tensor) -> None:
        """Stores the keys and values [L, 2, h, T, D] of the tokens `ids` [T]; entries longer than the capacity are not
        stored."""
        key = (owner, ids.astype(np.int64).tobytes())
        if key in self._entries or len(ids) > self.capacity:
            return
        self._entries[key] = kv_L2hTD
        self.num_tokens += len(ids)
        while self.num_tokens > self.capacity:
            _, dropped = self._entries.popitem(last=False)
            self.num_tokens -= dropped.shape[-2]

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
        self._entries.clear()
        self.num_tokens = 0
