"""A mixture of frozen members at the seats of others: each game draws who plays, and keeps them to its end.

Shapes: `B` games, `S` seats of the mixture, `L` line-ups, `F` games that ended, `H` units of memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from palestra.envs.vector.base import Continuous, Frame, VectorEnv
from palestra.nets.heads import head_for
from palestra.policies.frozen import FrozenMember, Rows, group_of
from palestra.types import Batch


class Lots(Protocol):
    """Who plays in games that begin."""

    def draw(self, rng: np.random.Generator, games: int) -> tuple[np.ndarray, np.ndarray]:
        """A tag [games], by which the caller knows them again, and the number of a member for every seat [games, S]."""
        ...


class Independent:
    """Every seat draws by itself, from its own probabilities over members (by number)."""

    def __init__(self, mixes: Sequence[Mapping[int, float]]) -> None:
        self.numbers = [np.array(list(mix)) for mix in mixes]
        self.bounds = [bounds(list(mix.values())) for mix in mixes]

    def draw(self, rng: np.random.Generator, games: int) -> tuple[np.ndarray, np.ndarray]:
        dice = rng.random((len(self.numbers), games))
        drawn = [n[np.searchsorted(b, d)] for n, b, d in zip(self.numbers, self.bounds, dice, strict=True)]
        return np.zeros(games, np.int64), np.stack(drawn, 1)


class Jointly:
    """One of some line-ups [L, S] of members, as a correlated meta-strategy has it; the tag is its number."""

    def __init__(self, lineups: Sequence[Sequence[int]], probabilities: Sequence[float]) -> None:
        self.lineups, self.bounds = np.array(lineups), bounds(probabilities)

    def draw(self, rng: np.random.Generator, games: int) -> tuple[np.ndarray, np.ndarray]:
        drawn = np.searchsorted(self.bounds, rng.random(games))
        return drawn, self.lineups[drawn]


class SelfPlay:
    """As `others` draw, but in a share of all games member `number` sits at every seat; the tag is then -1."""

    def __init__(self, others: Lots, share: float, number: int) -> None:
        self.others, self.share, self.number = others, share, number

    def draw(self, rng: np.random.Generator, games: int) -> tuple[np.ndarray, np.ndarray]:
        tags, drawn = self.others.draw(rng, games)
        alone = rng.random(games) < self.share
        return np.where(alone, -1, tags), np.where(alone[:, None], self.number, drawn)


class Schedule:
    """Line-ups [L, S] in turn, each `times[l]` times and no more; the tag is its number. Games beyond are played on by
    the last line-up, under the tag -1: whoever counts leaves them out. So every game of the schedule counts, long or
    short."""

    def __init__(self, lineups: np.ndarray, times: np.ndarray) -> None:
        rounds = np.concatenate([np.arange(n) for n in times])
        self.lineups, self.begun = lineups, 0
        self.order = np.repeat(np.arange(len(times)), times)[np.argsort(rounds, kind="stable")]

    def draw(self, rng: np.random.Generator, games: int) -> tuple[np.ndarray, np.ndarray]:
        tags = np.full(games, -1)
        due = self.order[self.begun : self.begun + games]
        tags[: len(due)] = due
        self.begun += len(due)
        return tags, self.lineups[tags]


class Mixture:
    """Plays `seats` by members of a cast. A game draws its members at its first moment.

    What it remembers of a game is one row of numbers: the tag, the member of each seat, and what a member with memory
    remembers there; so games go on with the same members after `Sweeper.load`.
    """

    def __init__(
        self,
        env: VectorEnv,
        seats: Sequence[int],
        cast: Mapping[str, FrozenMember],
        lots: Lots,
        name: str = "mixture",
    ) -> None:
        self.seats, self.name, self.lots = list(seats), name, lots
        self.names, self._numbers = list(cast), np.array(self.seats)
        spaces = [env.actions[seat] for seat in self.seats]
        width = max(head_for(space).width for space in spaces)
        self._shape, self._dtype = (width,) * bool(width), np.float32 if isinstance(spaces[0], Continuous) else np.int32
        alike: dict[object, list[int]] = {}
        for number, member in enumerate(cast.values()):
            alike.setdefault(member.shape, []).append(number)
        members = list(cast.values())
        self.groups = [group_of(env, [members[number] for number in own]) for own in alike.values()]
        self.group, self.place = np.empty(len(members), np.int64), np.empty(len(members), np.int64)
        for number, own in enumerate(alike.values()):
            self.group[own], self.place[own] = number, np.arange(len(own))
        self.units = max(group.memory for group in self.groups)
        self._played: list[np.ndarray] = []

    def begin(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self._played.clear()

    def empty(self, games: int) -> Tensor:
        return torch.zeros(games, 1 + len(self.seats) * (1 + self.units))

    def act(self, frame: Frame, memory: Tensor, fresh: np.ndarray) -> tuple[np.ndarray, None, Tensor]:
        S = len(self.seats)
        if fresh.any() or self.units:
            memory = memory.clone()
        if fresh.any():
            tags, drawn = self.lots.draw(self.rng, int(fresh.sum()))
            memory[torch.from_numpy(fresh), : 1 + S] = torch.from_numpy(np.column_stack([tags, drawn])).float()
        now = memory[:, : 1 + S].numpy().astype(np.int64)
        self._played.append(now)
        actions, numbers = np.zeros((len(fresh), S, *self._shape), self._dtype), now[:, 1:]
        for i, group in enumerate(self.groups):
            own = self.group[numbers] == i
            games, places = np.nonzero(own if group.memory else own & frame.acting[:, self.seats])
            if len(games):
                remembered = self._remembered(memory)[games, places, : group.memory]
                members, seats = self.place[numbers[games, places]], self._numbers[places]
                rows = Rows(frame, games, seats, members, remembered, fresh[games], self.rng, self.generator)
                chosen, kept = group.act(rows)
                actions[(games, places) if chosen.ndim == 1 else (games, places, slice(chosen.shape[1]))] = chosen
                if kept is not None:
                    self._remembered(memory)[games, places, : group.memory] = kept
        return actions, None, memory

    def _remembered(self, memory: Tensor) -> Tensor:
        """What members remember [B, S, H], a part of `memory`."""
        return memory[:, 1 + len(self.seats) :].view(len(memory), len(self.seats), self.units)

    def played(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Tags [F] and members of each seat [F, S] of the games that ended in the last sweep, in the order of
        `batch.games`."""
        times, games = batch.ends
        whole = np.stack(self._played)[times, games]
        return whole[:, 0], whole[:, 1:]


def bounds(probabilities: Sequence[float]) -> np.ndarray:
    """Where a number from 0 to 1 falls says what was drawn: the sums of probabilities but for the last, scaled to one.
    Raises ValueError for what are none."""
    found = np.asarray(probabilities, np.float64)
    if not len(found) or not np.isfinite(found).all() or (found < 0).any() or found.sum() <= 0:
        raise ValueError(f"{list(probabilities)} are no probabilities: none may be negative, and one must be above 0")
    return np.cumsum(found[:-1]) / found.sum()
