"""A mixture of frozen members as opponents: each game samples its members and keeps them until its end.

Shapes: `B` games, `S` seats of the mixture, `L` line-ups, `F` games that ended, `H` recurrent units.
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
    """Samples the members of new games."""

    def draw(self, rng: np.random.Generator, games: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns a tag [games] int64, which identifies the draw to the caller, and the index of a member for every
        seat, int64 [games, S]."""
        ...


class Independent:
    """Samples every seat independently, from its own probabilities over members (by index). Raises ValueError for
    invalid probabilities."""

    def __init__(self, mixes: Sequence[Mapping[int, float]]) -> None:
        self.numbers = [np.array(list(mix)) for mix in mixes]
        self.bounds = [bounds(list(mix.values())) for mix in mixes]

    def draw(self, rng: np.random.Generator, games: int) -> tuple[np.ndarray, np.ndarray]:
        dice = rng.random((len(self.numbers), games))
        drawn = [n[np.searchsorted(b, d)] for n, b, d in zip(self.numbers, self.bounds, dice, strict=True)]
        return np.zeros(games, np.int64), np.stack(drawn, 1)


class Jointly:
    """Samples one of several line-ups [L, S] of members, as for a correlated meta-strategy; the tag is its index.
    Raises ValueError for invalid probabilities."""

    def __init__(self, lineups: Sequence[Sequence[int]], probabilities: Sequence[float]) -> None:
        self.lineups, self.bounds = np.array(lineups), bounds(probabilities)

    def draw(self, rng: np.random.Generator, games: int) -> tuple[np.ndarray, np.ndarray]:
        drawn = np.searchsorted(self.bounds, rng.random(games))
        return drawn, self.lineups[drawn]


class SelfPlay:
    """Samples like `others`, except that in a share of all games member `number` plays every seat; the tag is then
    -1."""

    def __init__(self, others: Lots, share: float, number: int) -> None:
        self.others, self.share, self.number = others, share, number

    def draw(self, rng: np.random.Generator, games: int) -> tuple[np.ndarray, np.ndarray]:
        tags, drawn = self.others.draw(rng, games)
        alone = rng.random(games) < self.share
        return np.where(alone, -1, tags), np.where(alone[:, None], self.number, drawn)


class Schedule:
    """Plays line-ups [L, S] in turn, each exactly `times[l]` times; the tag is the line-up's index. Further games are
    played by the last line-up with tag -1 and must not be counted: thus every scheduled game counts, long or short."""

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
    """Plays `seats` by the members of `cast`. The members of a game are sampled at its first step.

    The recurrent state of a game is one row of numbers [1 + S * (1 + H)] float32: the tag, the member of each seat, and
    the recurrent state of members that have one. Games thus continue with the same members after `Sweeper.load`.
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
        """Seeds all random numbers, and clears the record of played members."""
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
        """Returns the recurrent states of the members [B, S, H], a view of `memory`."""
        return memory[:, 1 + len(self.seats) :].view(len(memory), len(self.seats), self.units)

    def played(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Returns tags [F] and members of each seat [F, S] (int64) of the games that ended in the last rollout, in the
        order of `batch.games`."""
        times, games = batch.ends
        whole = np.stack(self._played)[times, games]
        return whole[:, 0], whole[:, 1:]


def bounds(probabilities: Sequence[float]) -> np.ndarray:
    """Returns the inner boundaries of the normalised cumulative distribution, float64 [n-1], for sampling with
    `searchsorted`. Raises ValueError for invalid probabilities."""
    found = np.asarray(probabilities, np.float64)
    if not len(found) or not np.isfinite(found).all() or (found < 0).any() or found.sum() <= 0:
        raise ValueError(f"{list(probabilities)} are no probabilities: none may be negative, and one must be above 0")
    return np.cumsum(found[:-1]) / found.sum()
