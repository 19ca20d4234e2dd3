"""Frozen members that play many rows in one batched call: networks of one shape, tabular policies, the uniform policy.

Shapes: `B` games, `N` seats, `R` rows to act for, `M` members of a group, `K` blocks of `W` rows, `V` numbers of an
observation, `I` information states, `A` actions, `H` recurrent units.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from palestra.compiled import inline, kernel
from palestra.envs.vector.base import Frame, VectorEnv
from palestra.envs.vector.check import random_actions
from palestra.nets.heads import Head
from palestra.nets.layers import Net
from palestra.nets.normalise import RunningNorm
from palestra.nets.seating import Seating

LEAST = 8  # minimum rows of a block: fewer rows cost as much
MINUS_ZERO = -(2**31)  # bits of the float32 -0.0, read as an int32


@dataclass(frozen=True)
class NetMember:
    """A saved network, for seats of the shape of `seating`'s. `best` plays the most likely actions instead of sampling.
    `live` marks a network that is still in training; every call uses its current weights."""

    seating: Seating
    net: Net
    head: Head
    norm: RunningNorm | None = None
    best: bool = False
    live: bool = False

    @property
    def shape(self) -> object:
        """Equal for members that can be evaluated in one batch."""
        if self.live:
            return id(self.net)
        sizes = tuple((name, tuple(p.shape[1:])) for name, p in self.net.named_parameters())
        seen = (self.seating.view, self.seating.space, self.seating.seat_id, self.norm is None)
        return sizes, self.net.body.activation, type(self.head), self.best, seen


@dataclass(frozen=True)
class TableMember:
    """A tabular policy: action probabilities [I, A] at the information states of `views`."""

    views: Views
    table: np.ndarray

    @property
    def shape(self) -> object:
        return id(self.views)


@dataclass(frozen=True)
class UniformMember:
    """Plays uniformly random legal actions."""

    shape: object = "uniform"


FrozenMember = NetMember | TableMember | UniformMember


@dataclass
class Rows:
    """Rows [R] that a group acts for: seat `seats[r]` of game `games[r]`, played by the group's member `members[r]`
    (int64 each). `memory` [R, H] float32 is the recurrent state; `fresh` [R] bool marks the first step of a game."""

    frame: Frame
    games: np.ndarray
    seats: np.ndarray
    members: np.ndarray
    memory: Tensor  # [R, H]
    fresh: np.ndarray
    rng: np.random.Generator
    generator: torch.Generator


class Group(Protocol):
    """Members that are evaluated together. A recurrent group (`memory` > 0 units) acts for all rows at every step, to
    update their states."""

    @property
    def memory(self) -> int: ...
    def act(self, rows: Rows) -> tuple[np.ndarray, Tensor | None]:
        """Returns actions [R, ...] (int or float32) and the new recurrent states [R, H] (None without)."""
        ...


def group_of(env: VectorEnv, members: Sequence[FrozenMember]) -> Group:
    """Returns the group that plays `members`, which must have the same shape."""
    if nets := [member for member in members if isinstance(member, NetMember)]:
        return NetGroup(nets)
    tables = [member for member in members if isinstance(member, TableMember)]
    return TableGroup(tables) if tables else UniformGroup(env)


class UniformGroup:
    """Plays uniformly random legal actions."""

    memory = 0

    def __init__(self, env: VectorEnv) -> None:
        self.env = env

    def act(self, rows: Rows) -> tuple[np.ndarray, None]:
        return random_actions(self.env, rows.frame, rows.rng)[rows.games, rows.seats], None


# ---- networks


class NetGroup:
    """Networks of one shape. Rows are arranged in blocks of one member each, and all blocks pass through one batched
    product: the cost is at most twice that of the rows, however unevenly they are distributed over the members."""

    def __init__(self, members: Sequence[NetMember]) -> None:
        first = members[0]
        self.seating, self.head, self.best, self.norm = first.seating, first.head, first.best, first.norm
        self.memory, self.alone = first.net.memory_units, len(members) == 1
        self.net = first.net
        if not self.alone:
            self.net = copy.deepcopy(first.net).requires_grad_(False)
            parts = [dict(member.net.named_parameters()) for member in members]
            self.weights = {name: torch.cat([own[name].detach() for own in parts]) for name in parts[0]}
            norms = [member.norm for member in members if member.norm]
            known = zip(*[(norm.mean, norm.deviation()) for norm in norms], strict=True)
            self.scales = [torch.cat(kept).float() for kept in known]

    @torch.no_grad()
    def act(self, rows: Rows) -> tuple[np.ndarray, Tensor | None]:
        who, place, width = blocks(rows.members)
        shape = (len(who), width)
        x = _put(self._views(rows), place, shape)
        if not self.alone:
            self._become(torch.from_numpy(who))
        x = self._normalised(x, who)
        if self.memory:
            anew = _put(torch.from_numpy(rows.fresh), place, shape)[:, None]
            unrolled, memories = self.net.unroll(x[:, None], _put(rows.memory, place, shape), anew)
            assert memories is not None
            out, memory = unrolled[:, 0], memories[:, 0].flatten(0, 1)[place]
        else:
            out, memory = self.net(x), None
        legal = None if rows.frame.legal is None else torch.from_numpy(rows.frame.legal[rows.games, rows.seats])
        out = out.flatten(0, 1)[place]
        chosen = self.head.mode(out, legal) if self.best else self.head.sample(out, legal, rows.generator)[0]
        return chosen.numpy(), memory

    def _views(self, rows: Rows) -> Tensor:
        """Returns the networks' inputs [R, *inputs]."""
        obs = torch.from_numpy(rows.frame.obs[rows.games, rows.seats])
        if len(self.seating.view) == 1:
            obs = obs[:, : self.seating.view[0]]
        if not self.seating.seat_id:
            return obs
        return torch.cat([obs, torch.eye(self.seating.of)[torch.from_numpy(rows.seats)]], -1)

    def _become(self, who: Tensor) -> None:
        """Sets the weights of the network to those of the member of each block."""
        for name, parameter in self.net.named_parameters():
            parameter.data = self.weights[name].index_select(0, who)

    def _normalised(self, x: Tensor, who: np.ndarray) -> Tensor:
        if self.norm is None:
            return x
        if self.alone:
            return self.norm.normalise(x)
        mean, deviation = (scale[who][:, None] for scale in self.scales)
        return (x.float() - mean) / deviation


def blocks(members: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Assigns rows [R] to blocks of one member each; returns the member of each block [K], each row's index [R] in the
    concatenated blocks, and the rows per block: the average number of rows of a member, at least `LEAST`."""
    counts = np.bincount(members)
    width = max(LEAST, -(-len(members) // int(np.count_nonzero(counts))))
    order = np.argsort(members, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(members)) - np.repeat(np.cumsum(counts) - counts, counts)
    many = -(-counts // width)
    first = np.cumsum(many) - many
    return np.repeat(np.arange(len(counts)), many), first[members] * width + rank, width


def _put(x: Tensor, place: np.ndarray, shape: tuple[int, int]) -> Tensor:
    """Scatters rows [R, ...] into blocks [K, W, ...]; the rest is zero."""
    filled = x.new_zeros(shape[0] * shape[1], *x.shape[1:])
    filled[torch.from_numpy(place)] = x
    return filled.view(*shape, *x.shape[1:])


# ---- tables


class Views:
    """An index of information states by observation: `views` [I, V] float32, all distinct. Raises ValueError for a
    duplicate."""

    def __init__(self, views: np.ndarray) -> None:
        self.views = np.ascontiguousarray(views, np.float32)
        self.bits = self.views.view(np.int32)
        self.slots = np.full(1 << (2 * len(views)).bit_length(), -1, np.int64)
        if (twice := _fill(self.slots, self.bits)) >= 0:
            raise ValueError(f"information state {twice} looks like an earlier one, so no table can tell them apart")

    def find(self, rows: np.ndarray) -> np.ndarray:
        """Returns the information states of observations [R, V], int64 [R]; -1 for an unknown one."""
        bits = np.ascontiguousarray(rows, np.float32).view(np.int32)
        return np.array([_find(self.slots, self.bits, row) for row in bits], np.int64)


class TableGroup:
    """Tabular policies over the same information states. Looking up a row costs about as much as a step of the env."""

    memory = 0

    def __init__(self, members: Sequence[TableMember]) -> None:
        self.views = members[0].views
        self.tables = np.stack([np.asarray(member.table, np.float32) for member in members])

    def act(self, rows: Rows) -> tuple[np.ndarray, None]:
        """Returns actions [R] int32. Raises ValueError if an observation is not in the tables."""
        where, obs = (rows.games, rows.seats, rows.members), rows.frame.obs.view(np.int32)
        actions = np.empty(len(rows.games), np.int32)
        lost = _draw(self.views.slots, self.views.bits, self.tables, obs, where, rows.rng.random(len(actions)), actions)
        if lost >= 0:
            raise ValueError(
                f"a member is a table that does not know what seat {rows.seats[lost]} sees: it is of another game, or "
                "of other options of this one"
            )
        return actions, None


@inline
def _word(bits: int) -> int:
    """Returns the bits of a float32, with -0 mapped to 0."""
    return 0 if bits == MINUS_ZERO else bits


@kernel
def _slot(bits: np.ndarray, slots: np.ndarray) -> int:
    """Returns the first hash slot of an observation."""
    code = np.uint64(14695981039346656037)  # FNV-1a
    for word in bits:
        code = (code ^ np.uint64(np.uint32(_word(word)))) * np.uint64(1099511628211)
    return np.int64((code ^ (code >> np.uint64(32))) & np.uint64(len(slots) - 1))  # type: ignore[return-value]


@kernel
def _find(slots: np.ndarray, views: np.ndarray, bits: np.ndarray) -> int:
    """Returns the index of an observation, or -1."""
    at = _slot(bits, slots)
    while slots[at] >= 0:
        same, view = True, views[slots[at]]
        for i in range(len(bits)):
            if _word(view[i]) != _word(bits[i]):
                same = False
                break
        if same:
            return slots[at]
        at = (at + 1) & (len(slots) - 1)
    return -1


@kernel
def _fill(slots: np.ndarray, views: np.ndarray) -> int:
    """Inserts all observations; returns the index of a duplicate, or -1."""
    for number in range(len(views)):
        if _find(slots, views, views[number]) >= 0:
            return number
        at = _slot(views[number], slots)
        while slots[at] >= 0:
            at = (at + 1) & (len(slots) - 1)
        slots[at] = number
    return -1


@kernel
def _draw(
    slots: np.ndarray,
    views: np.ndarray,
    tables: np.ndarray,
    obs: np.ndarray,
    where: tuple,
    dice: np.ndarray,
    actions: np.ndarray,
) -> int:
    """Samples actions [R] from tables [M, I, A]; returns the first row with an unknown observation, or -1."""
    games, seats, members = where
    size = views.shape[1]
    for r in range(len(games)):
        number = _find(slots, views, obs[games[r], seats[r], :size])
        if number < 0:
            return r
        chances, total = tables[members[r], number], 0.0
        for action in range(len(chances)):
            if chances[action] > 0.0:
                actions[r] = action
                total += chances[action]
                if dice[r] < total:
                    break
    return -1
