"""A mixture of frozen members as opponents: members are sampled at the start of each game and play it to its end.

Shapes: `B` games, `S` seats of the mixture, `L` line-ups, `F` games that ended, `H` recurrent units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from palestra.core.types import RolloutBatch
from palestra.envs.vector_base import VectorEnv, VectorStep, zero_actions
from palestra.vector.policies.frozen import ActBatch, FrozenMember, build_group


class OpponentSampler(Protocol):
    """Samples the members of new games."""

    def sample_members(self, rng: np.random.Generator, num_envs: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns a tag of each draw [games] and the member of each seat [games, S], int64."""


class IndependentSampler:
    """Samples every seat independently, from its own probabilities over members (by index). Raises
    ValueError for invalid probabilities."""

    def __init__(self, mixes: Sequence[Mapping[int, float]]) -> None:
        self.members = [np.array(list(mix)) for mix in mixes]
        self.bounds = [cumulative_bounds(list(mix.values())) for mix in mixes]

    def sample_members(self, rng: np.random.Generator, num_envs: int) -> tuple[np.ndarray, np.ndarray]:
        dice = rng.random((len(self.members), num_envs))
        drawn = [n[np.searchsorted(b, d)] for n, b, d in zip(self.members, self.bounds, dice, strict=True)]
        return np.zeros(num_envs, np.int64), np.stack(drawn, 1)


class JointSampler:
    """Samples one of several line-ups [L, S] of members, as for a correlated meta-strategy; the tag
    is its index. Raises ValueError for invalid probabilities."""

    def __init__(self, lineups: Sequence[Sequence[int]], probabilities: Sequence[float]) -> None:
        self.lineups = np.array(lineups)
        self.bounds = cumulative_bounds(probabilities)

    def sample_members(self, rng: np.random.Generator, num_envs: int) -> tuple[np.ndarray, np.ndarray]:
        drawn = np.searchsorted(self.bounds, rng.random(num_envs))
        return drawn, self.lineups[drawn]


class SelfPlaySampler:
    """Samples like `others`, except that in a share of all games member `number` plays every seat; the tag is then
    -1."""

    def __init__(self, others: OpponentSampler, share: float, number: int) -> None:
        self.others = others
        self.share = share
        self.number = number

    def sample_members(self, rng: np.random.Generator, num_envs: int) -> tuple[np.ndarray, np.ndarray]:
        tags, drawn = self.others.sample_members(rng, num_envs)
        alone = rng.random(num_envs) < self.share
        return np.where(alone, -1, tags), np.where(alone[:, None], self.number, drawn)


class SideSampler:
    """Samples like `sides`, each of whose members plays several seats: `columns` [S] are the sides of the seats."""

    def __init__(self, sides: OpponentSampler, columns: Sequence[int]) -> None:
        self.sides = sides
        self.columns = np.array(columns)

    def sample_members(self, rng: np.random.Generator, num_envs: int) -> tuple[np.ndarray, np.ndarray]:
        tags, drawn = self.sides.sample_members(rng, num_envs)
        return tags, drawn[:, self.columns]


class LineupSchedule:
    """Plays line-ups [L, S] in turn, each exactly `counts[l]` times; the tag is the line-up's
    index. Games started after that are played by the last line-up with tag -1 and must not be
    counted. Counting exactly the scheduled games avoids a bias towards short ones."""

    def __init__(self, lineups: np.ndarray, counts: np.ndarray) -> None:
        rounds = np.concatenate([np.arange(n) for n in counts])
        self.lineups = lineups
        self.num_started = 0
        self.order = np.repeat(np.arange(len(counts)), counts)[np.argsort(rounds, kind="stable")]

    def sample_members(self, rng: np.random.Generator, num_envs: int) -> tuple[np.ndarray, np.ndarray]:
        tags = np.full(num_envs, -1)
        due = self.order[self.num_started : self.num_started + num_envs]
        tags[: len(due)] = due
        self.num_started += len(due)
        return tags, self.lineups[tags]


class Mixture:
    """Plays `seats` by the members of `members_by_name`. The members of a game are sampled at its first step.

    The recurrent state of a game is one row of numbers [1 + S * (1 + H)] float32: the tag, the member of each seat, and
    the recurrent state of members that have one. Games thus continue with the same members after `VectorRollout.load`.
    """

    def __init__(
        self,
        env: VectorEnv,
        seats: Sequence[int],
        members_by_name: Mapping[str, FrozenMember],
        opponent_sampler: OpponentSampler,
        name: str = "mixture",
    ) -> None:
        self.seats = list(seats)
        self.name = name
        self.opponent_sampler = opponent_sampler
        self.names, self._numbers = list(members_by_name), np.array(self.seats)
        self._spaces = env.action_spaces
        alike: dict[object, list[int]] = {}
        for number, member in enumerate(members_by_name.values()):
            alike.setdefault(member.group_key, []).append(number)
        members = list(members_by_name.values())
        self.groups = [build_group(env, [members[number] for number in numbers]) for numbers in alike.values()]
        self.group = np.empty(len(members), np.int64)
        self.place = np.empty(len(members), np.int64)
        for number, numbers in enumerate(alike.values()):
            self.group[numbers], self.place[numbers] = number, np.arange(len(numbers))
        self.recurrent_units = max(group.recurrent_units for group in self.groups)
        self._played: list[np.ndarray] = []

    def reset_rng(self, seed: int) -> None:
        """Seeds all random numbers, and clears the record of played members."""
        self.rng = np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self._played.clear()

    def initial_state(self, num_envs: int) -> Tensor:
        return torch.zeros(num_envs, 1 + len(self.seats) * (1 + self.recurrent_units))

    def act(
        self, vector_step: VectorStep, recurrent_state: Tensor, is_first: np.ndarray
    ) -> tuple[np.ndarray, None, Tensor]:
        S = len(self.seats)
        if is_first.any() or self.recurrent_units:
            recurrent_state = recurrent_state.clone()
        if is_first.any():
            tags, drawn = self.opponent_sampler.sample_members(self.rng, int(is_first.sum()))
            recurrent_state[torch.from_numpy(is_first), : 1 + S] = torch.from_numpy(
                np.column_stack([tags, drawn])
            ).float()
        now = recurrent_state[:, : 1 + S].numpy().astype(np.int64)
        self._played.append(now)
        actions = zero_actions(self._spaces, (len(is_first),))[:, self.seats]
        numbers = now[:, 1:]
        for i, group in enumerate(self.groups):
            mine = self.group[numbers] == i
            games, places = np.nonzero(mine if group.recurrent_units else mine & vector_step.agent_mask[:, self.seats])
            if len(games):
                remembered = self._member_states(recurrent_state)[games, places, : group.recurrent_units]
                members = self.place[numbers[games, places]]
                seats = self._numbers[places]
                rows = ActBatch(
                    vector_step, games, seats, members, remembered, is_first[games], self.rng, self.generator
                )
                chosen, new_state = group.act(rows)
                if actions.ndim == 2:
                    actions[games, places] = chosen
                else:  # may be shorter than other seats' actions: one number if it is discrete
                    rows_of_numbers = chosen if chosen.ndim == 2 else chosen[:, None]
                    actions[games, places, : rows_of_numbers.shape[1]] = rows_of_numbers
                if new_state is not None:
                    self._member_states(recurrent_state)[games, places, : group.recurrent_units] = new_state
        return actions, None, recurrent_state

    def _member_states(self, memory: Tensor) -> Tensor:
        """Returns the recurrent states of the members [B, S, H], a view of `memory`."""
        return memory[:, 1 + len(self.seats) :].view(len(memory), len(self.seats), self.recurrent_units)

    def played_members(self, batch: RolloutBatch) -> tuple[np.ndarray, np.ndarray]:
        """Returns tags [F] and members of each seat [F, S] (int64) of the games that ended in the
        last rollout, in the order of `batch.episode_stats`."""
        times, games = batch.end_index
        ended = np.stack(self._played)[times, games]
        return ended[:, 0], ended[:, 1:]


def cumulative_bounds(probabilities: Sequence[float]) -> np.ndarray:
    """Returns the inner boundaries of the normalised cumulative distribution, float64 [n-1], for
    sampling with `searchsorted`. Raises ValueError for invalid probabilities."""
    probs = np.asarray(probabilities, np.float64)
    if not len(probs) or not np.isfinite(probs).all() or (probs < 0).any() or probs.sum() <= 0:
        raise ValueError(f"{list(probabilities)} are not probabilities: none may be negative, and one must be above 0")
    return np.cumsum(probs[:-1]) / probs.sum()
