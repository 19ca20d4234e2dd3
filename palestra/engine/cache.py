"""Keys and values of what is being sampled: a prompt once for all of its answers, and each answer's own.

Sequences lie in pools by the room they have, which doubles as they grow, so that a long one takes room for itself
alone. A pool is dense: when sequences leave, the last ones move into their places, and a pool of which three quarters
are free shrinks. One that is empty keeps its memory until `trim`, for those that come next.
Prompts are kept apart by the number of their answers too, as attention pads each prompt of a pool to the most answers
that one of them has. Memory is thus at most a small multiple of what the live sequences need.

Shapes: `L` layers, `N` sequences a pool has room for, `C` tokens each of them has room for, `h` key-value heads, `D`
head width, `T` tokens.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

LEAST = 16  # tokens that every sequence has room for


@dataclass(eq=False)
class Slot:
    """Place of one sequence: `length` positions are filled at `index` of `pool`."""

    pool: Pool
    index: int = -1
    length: int = 0

    @property
    def kv_L2hTD(self) -> Tensor:
        """Its keys and values, which move when other sequences leave the pool."""
        return self.pool.kv[:, :, self.index, :, : self.length]


@dataclass(eq=False)
class Pool:
    """Keys and values `kv [L, 2, N, h, C, D]` of sequences; the first `len(slots)` places are taken, by `slots`."""

    kv: Tensor
    slots: list[Slot] = field(default_factory=list)

    @property
    def room(self) -> int:
        """Tokens that each sequence has room for."""
        return self.kv.shape[4]

    def reserve(self, count: int) -> None:
        """Makes room for `count` more; it at least doubles, so that copies are few."""
        need, have = len(self.slots) + count, self.kv.shape[2]
        if need > have:
            self._resize(max(need, 2 * have))

    def add(self, slots: Sequence[Slot]) -> None:
        self.reserve(len(slots))
        for index, slot in enumerate(slots, len(self.slots)):
            slot.pool, slot.index = self, index
        self.slots += slots

    def take(self, slots: Sequence[Slot]) -> None:
        """Moves `slots` here from the one pool that they are in."""
        source, first, longest = slots[0].pool, len(self.slots), max(slot.length for slot in slots)
        self.reserve(len(slots))
        moved = source.kv[:, :, self._indices(slots), :, :longest]
        source._drop(slots)
        self.add(slots)
        self.kv[:, :, first : len(self.slots), :, :longest] = moved
        source._shrink()  # last: memory may not suffice for it, and nothing is lost

    def remove(self, slots: Sequence[Slot]) -> None:
        self._drop(slots)
        self._shrink()

    def _drop(self, slots: Sequence[Slot]) -> None:
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

    def _indices(self, slots: Sequence[Slot]) -> Tensor:
        return torch.as_tensor([slot.index for slot in slots], device=self.kv.device)

    def _resize(self, size: int) -> None:
        old = self.kv
        self.kv = old.new_zeros(*old.shape[:2], size, *old.shape[3:])
        kept = min(size, old.shape[2])
        self.kv[:, :, :kept] = old[:, :, :kept]


class Cache:
    """Pools of prompts, by their room and the number of their answers, and of answers, by their room."""

    def __init__(self, layers: int, kv_heads: int, width: int, device: torch.device, dtype: torch.dtype) -> None:
        self._empty = torch.zeros(layers, 2, 0, kv_heads, 0, width, device=device, dtype=dtype)
        self._prompts: dict[tuple[int, int], Pool] = {}
        self._answers: dict[int, Pool] = {}

    @property
    def bytes(self) -> int:
        pools = [*self._prompts.values(), *self._answers.values()]
        return sum(pool.kv.numel() * pool.kv.element_size() for pool in pools)

    def prompts(self, lengths: Sequence[int], answers: Sequence[int]) -> list[Slot]:
        """Places for prompts of these lengths that have so many answers each."""
        return self._placed([Slot(self._prompt_pool(n, k), length=n) for n, k in zip(lengths, answers, strict=True)])

    def answers(self, tokens: Sequence[int]) -> list[Slot]:
        """Places for answers that will have so many tokens, or more."""
        return self._placed([Slot(self._answer_pool(n)) for n in tokens])

    def grow(self, answers: Sequence[Slot]) -> None:
        """Makes room for another token of each of `answers`."""
        full = [slot for slot in answers if slot.length == slot.pool.room]
        for pool, slots in _by_pool(full).items():
            self._answer_pool(2 * pool.room).take(slots)

    def regroup(self, prompts: Sequence[Slot], answers: Sequence[int]) -> None:
        """Moves `prompts` to where they belong now that they have so many answers each."""
        moves: dict[tuple[Pool, Pool], list[Slot]] = defaultdict(list)
        for slot, k in zip(prompts, answers, strict=True):
            pool = self._prompt_pool(slot.length, k)
            if pool is not slot.pool:
                moves[slot.pool, pool].append(slot)
        for (_, pool), slots in moves.items():
            pool.take(slots)

    def free(self, slots: Sequence[Slot]) -> None:
        for pool, group in _by_pool(slots).items():
            pool.remove(group)

    def trim(self) -> None:
        """Gives back the memory of empty pools."""
        self._prompts = {key: pool for key, pool in self._prompts.items() if pool.slots}
        self._answers = {key: pool for key, pool in self._answers.items() if pool.slots}

    def wipe(self, slots: Sequence[Slot]) -> None:
        """Zeroes the places of `slots`, which may hold NaN: a mask does not keep that from the next ones there."""
        for slot in slots:
            slot.pool.kv[:, :, slot.index] = 0

    def _placed(self, slots: list[Slot]) -> list[Slot]:
        groups = _by_pool(slots)
        for pool, group in groups.items():
            pool.reserve(len(group))  # all or none: memory may not suffice
        for pool, group in groups.items():
            pool.add(group)
        return slots

    def _prompt_pool(self, tokens: int, answers: int) -> Pool:
        key = _power(tokens, LEAST, 2), _power(answers, 1, 4)
        if key not in self._prompts:
            self._prompts[key] = self._pool(key[0])
        return self._prompts[key]

    def _answer_pool(self, tokens: int) -> Pool:
        room = _power(tokens, LEAST, 2)
        if room not in self._answers:
            self._answers[room] = self._pool(room)
        return self._answers[room]

    def _pool(self, room: int) -> Pool:
        layers, _, _, h, _, width = self._empty.shape
        return Pool(self._empty.new_zeros(layers, 2, 0, h, room, width))


def _by_pool(slots: Sequence[Slot]) -> dict[Pool, list[Slot]]:
    groups: dict[Pool, list[Slot]] = defaultdict(list)
    for slot in slots:
        groups[slot.pool].append(slot)
    return groups


def _power(need: int, least: int, base: int) -> int:
    """The first of `least`, `least * base`, `least * base**2`, ... that is at least `need`."""
    size = least
    while size < need:
        size *= base
    return size


class PrefixStore:
    """Keys and values of finished conversations, so that a later turn computes only its new tokens.

    Least recently used ones are dropped beyond `capacity` tokens. `owner` is the snapshot that computed them: the same
    tokens under another adapter are other keys and values.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.tokens = capacity, 0
        self._entries: OrderedDict[tuple[int, bytes], Tensor] = OrderedDict()

    def put(self, owner: int, ids: np.ndarray, kv_L2hTD: Tensor) -> None:
        key = (owner, ids.astype(np.int64).tobytes())
        if key in self._entries or len(ids) > self.capacity:
            return
        self._entries[key] = kv_L2hTD
        self.tokens += len(ids)
        while self.tokens > self.capacity:
            _, dropped = self._entries.popitem(last=False)
            self.tokens -= dropped.shape[-2]

    def longest(self, owner: int, ids: np.ndarray) -> Tensor | None:
        """Keys and values of the longest stored proper prefix of `ids`, or None."""
        raw = ids.astype(np.int64).tobytes()
        for length in sorted({kv.shape[-2] for kv in self._entries.values()}, reverse=True):
            key = (owner, raw[: 8 * length])
            if length < len(ids) and key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key]
        return None

    def clear(self) -> None:
        self._entries.clear()
        self.tokens = 0
