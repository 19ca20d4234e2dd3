"""Frozen members that play many rows in one batched call: networks of one shape, tabular policies, the uniform policy.

Shapes: `B` games, `N` seats, `R` rows to act for, `M` members of a group, `K` blocks of `W` rows, `V` numbers of an
observation, `I` information states, `A` actions, `H` recurrent units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from palestra.core.accel.jit import jit, jit_inline
from palestra.envs.vector_base import VectorEnv, VectorStep
from palestra.envs.vector_check import random_actions
from palestra.vector.nets.entities import EntityLayout
from palestra.vector.nets.heads import ActionHead
from palestra.vector.nets.layers import Net, member_weights, with_member_weights
from palestra.vector.nets.normalise import RunningNorm
from palestra.vector.nets.seat_mapping import SeatMapping

MIN_BLOCK_ROWS = 8  # minimum rows of a block: fewer rows cost as much
NEGATIVE_ZERO_BITS = -(2**31)  # bits of the float32 -0.0, read as an int32


@dataclass(frozen=True)
class NetMember:
    """A saved network, for seats of the shape of `seat_mapping`'s. `greedy` plays the most likely actions instead of
    sampling. `live` marks a network that is still in training; every call uses its current weights."""

    seat_mapping: SeatMapping
    net: Net
    head: ActionHead
    norm: RunningNorm | None = None
    greedy: bool = False
    live: bool = False

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """The network's weights by name, without gradients; cached, since mixtures of many members read them often."""
        return {name: parameter.detach() for name, parameter in self.net.named_parameters()}

    @cached_property
    def group_key(self) -> object:
        """Equal for members that can be evaluated in one batch."""
        if self.live:
            return id(self.net)
        sizes = tuple((name, tuple(weight.shape[1:])) for name, weight in self.weights.items())
        seen = (
            self.seat_mapping.observation_shape,
            self.seat_mapping.action_space,
            self.seat_mapping.seat_id,
            self.seat_mapping.layout,
            self.norm is None,
        )
        return sizes, self.net.settings, type(self.head), self.greedy, seen


@dataclass(frozen=True)
class TableMember:
    """A tabular policy: action probabilities [I, A] at the information states of `index`."""

    index: InfoStateIndex
    table: np.ndarray

    @property
    def group_key(self) -> object:
        return id(self.index)


@dataclass(frozen=True)
class UniformMember:
    """Plays uniformly random legal actions."""

    group_key: object = "uniform"


FrozenMember = NetMember | TableMember | UniformMember


@dataclass
class ActBatch:
    """Rows [R] that a group acts for: seat `seat_index[r]` of game `env_index[r]`, played by the
    group's member `member_index[r]` (int64 each). `recurrent_state` is [R, H] float32; `is_first`
    [R] bool marks the first step of a game."""

    frame: VectorStep
    env_index: np.ndarray
    seat_index: np.ndarray
    member_index: np.ndarray
    recurrent_state: Tensor
    is_first: np.ndarray
    rng: np.random.Generator
    generator: torch.Generator


def build_group(env: VectorEnv, members: Sequence[FrozenMember]) -> NetGroup | TableGroup | UniformGroup:
    """Returns the group that plays `members`, which must have the same shape. A recurrent group
    (`recurrent_units` above 0) acts for all rows at every step, to update their states."""
    if nets := [member for member in members if isinstance(member, NetMember)]:
        return NetGroup(nets)
    tables = [member for member in members if isinstance(member, TableMember)]
    return TableGroup(tables) if tables else UniformGroup(env)


class UniformGroup:
    """Plays uniformly random legal actions."""

    recurrent_units = 0

    def __init__(self, env: VectorEnv) -> None:
        self.env = env

    def act(self, rows: ActBatch) -> tuple[np.ndarray, None]:
        return random_actions(self.env, rows.frame, rows.rng)[rows.env_index, rows.seat_index], None


# ---- networks


class NetGroup:
    """Networks of one shape. Rows are arranged in blocks of one member each, and all blocks pass through one batched
    product. Padding at most doubles the cost, however unevenly the rows are distributed over the members."""

    def __init__(self, members: Sequence[NetMember]) -> None:
        first = members[0]
        self.seat_mapping = first.seat_mapping
        self.head = first.head
        self.greedy = first.greedy
        self.norm = first.norm
        self.recurrent_units = first.net.recurrent_units
        self.single_member = len(members) == 1
        self.net = first.net
        if not self.single_member:
            self.weights = {name: torch.cat([member.weights[name] for member in members]) for name in first.weights}
            self.net = with_member_weights(first.net, member_weights(first.net, 0)).requires_grad_(False)
            norms = [member.norm for member in members if member.norm]
            known = zip(*[(norm.mean, norm.std(), torch.tensor([[norm.clip]])) for norm in norms], strict=True)
            self.scales = [torch.cat(column).float() for column in known]

    @torch.no_grad()
    def act(self, rows: ActBatch) -> tuple[np.ndarray, Tensor | None]:
        members, place, width = assign_blocks(rows.member_index)
        shape = (len(members), width)
        x = _put(self._views(rows), place, shape)
        if not self.single_member:
            self._become(torch.from_numpy(members))
        x = self._normalise_obs(x, members)
        if self.recurrent_units:
            anew = _put(torch.from_numpy(rows.is_first), place, shape)[:, None]
            unrolled, memories = self.net.unroll(x[:, None], _put(rows.recurrent_state, place, shape), anew)
            assert memories is not None
            out = unrolled[:, 0]
            memory = memories[:, 0].flatten(0, 1)[place]
        else:
            out = self.net(x)
            memory = None
        action_mask = None
        if (masks := rows.frame.action_mask) is not None:
            action_mask = torch.from_numpy(masks[rows.env_index, rows.seat_index])
        out = out.flatten(0, 1)[place]
        if self.greedy:
            return self.head.mode(out, action_mask).numpy(), memory
        return self.head.sample(out, action_mask, rows.generator)[0].numpy(), memory

    def _views(self, rows: ActBatch) -> Tensor:
        """Returns the networks' inputs [R, *inputs]."""
        obs = torch.from_numpy(rows.frame.obs[rows.env_index, rows.seat_index])
        if isinstance(self.seat_mapping.layout, EntityLayout):
            obs = self.seat_mapping.layout.arrange(obs, torch.from_numpy(rows.seat_index))
        elif len(self.seat_mapping.observation_shape) == 1:
            obs = obs[:, : self.seat_mapping.observation_shape[0]]
        if not self.seat_mapping.seat_id:
            return obs
        return torch.cat([obs, torch.eye(self.seat_mapping.num_seats)[torch.from_numpy(rows.seat_index)]], -1)

    def _become(self, members: Tensor) -> None:
        """Sets the weights of each block's network to the weights of the block's member in `members` [K]."""
        for name, parameter in self.net.named_parameters():
            parameter.data = self.weights[name].index_select(0, members)

    def _normalise_obs(self, x: Tensor, members: np.ndarray) -> Tensor:
        if self.norm is None:
            return x
        if self.single_member:
            return self.norm.normalise(x)
        mean, deviation, clip = (scale[members][:, None] for scale in self.scales)
        return ((x.float() - mean) / deviation).clamp(-clip, clip)


def assign_blocks(members: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Assigns rows [R] to blocks of one member each; returns the member of each block [K], each row's index [R] in the
    concatenated blocks, and the rows per block: the average number of rows of a member, at least `MIN_BLOCK_ROWS`."""
    counts = np.bincount(members)
    width = max(MIN_BLOCK_ROWS, -(-len(members) // int(np.count_nonzero(counts))))
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


class InfoStateIndex:
    """An index of information states by observation: `observations` [I, V] float32, all distinct.
    Raises ValueError for a duplicate."""

    def __init__(self, observations: np.ndarray) -> None:
        self.observations = np.ascontiguousarray(observations, np.float32)
        self.bits = self.observations.view(np.int32)
        self.slots = np.full(1 << (2 * len(observations)).bit_length(), -1, np.int64)
        if (twice := _fill(self.slots, self.bits)) >= 0:
            raise ValueError(
                f"information state {twice} has the observation of an earlier one, so a table cannot distinguish them"
            )

    def find(self, rows: np.ndarray) -> np.ndarray:
        """Returns the information states of observations [R, V], int64 [R]; -1 for an unknown one."""
        bits = np.ascontiguousarray(rows, np.float32).view(np.int32)
        return np.array([_find(self.slots, self.bits, row) for row in bits], np.int64)


class TableGroup:
    """Tabular policies over the same information states. Looking up a row costs about as much as a step of the env."""

    recurrent_units = 0

    def __init__(self, members: Sequence[TableMember]) -> None:
        self.index = members[0].index
        self.tables = np.stack([np.asarray(member.table, np.float32) for member in members])

    def act(self, rows: ActBatch) -> tuple[np.ndarray, None]:
        """Returns actions [R] int32. Raises ValueError if an observation is not in the tables."""
        where = (rows.env_index, rows.seat_index, rows.member_index)
        obs = rows.frame.obs.view(np.int32)
        actions = np.empty(len(rows.env_index), np.int32)
        lost = _draw(self.index.slots, self.index.bits, self.tables, obs, where, rows.rng.random(len(actions)), actions)
        if lost >= 0:
            raise ValueError(
                f"a tabular member has no entry for an observation of seat {rows.seat_index[lost]}: it is of another "
                "game, or of this game with other options"
            )
        return actions, None


@jit_inline
def _word(bits: int) -> int:
    """Returns the bits of a float32, with -0 mapped to 0."""
    return 0 if bits == NEGATIVE_ZERO_BITS else bits


@jit
def _slot(bits: np.ndarray, slots: np.ndarray) -> int:
    """Returns the first hash slot of an observation."""
    code = np.uint64(14695981039346656037)  # FNV-1a
    for word in bits:
        code = (code ^ np.uint64(np.uint32(_word(word)))) * np.uint64(1099511628211)
    return np.int64((code ^ (code >> np.uint64(32))) & np.uint64(len(slots) - 1))  # type: ignore[return-value]


@jit
def _find(slots: np.ndarray, observations: np.ndarray, bits: np.ndarray) -> int:
    """Returns the index of an observation, or -1."""
    at = _slot(bits, slots)
    while slots[at] >= 0:
        same = True
        observation = observations[slots[at]]
        for i in range(len(bits)):
            if _word(observation[i]) != _word(bits[i]):
                same = False
                break
        if same:
            return slots[at]
        at = (at + 1) & (len(slots) - 1)
    return -1


@jit
def _fill(slots: np.ndarray, observations: np.ndarray) -> int:
    """Inserts all observations; returns the index of a duplicate, or -1."""
    for number in range(len(observations)):
        if _find(slots, observations, observations[number]) >= 0:
            return number
        at = _slot(observations[number], slots)
        while slots[at] >= 0:
            at = (at + 1) & (len(slots) - 1)
        slots[at] = number
    return -1


@jit
def _draw(
    slots: np.ndarray,
    observations: np.ndarray,
    tables: np.ndarray,
    obs: np.ndarray,
    where: tuple[np.ndarray, np.ndarray, np.ndarray],
    dice: np.ndarray,
    actions: np.ndarray,
) -> int:
    """Samples actions [R] from tables [M, I, A]; returns the first row with an unknown observation, or -1."""
    games, seats, members = where
    size = observations.shape[1]
    for r in range(len(games)):
        number = _find(slots, observations, obs[games[r], seats[r], :size])
        if number < 0:
            return r
        chances = tables[members[r], number]
        total = 0.0
        for action in range(len(chances)):
            if chances[action] > 0.0:
                actions[r] = action
                total += chances[action]
                if dice[r] < total:
                    break
    return -1
