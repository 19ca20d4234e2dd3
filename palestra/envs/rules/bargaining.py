"""A bargaining game: two players divide items that each values privately (DeVault et al., 2015; Lewis et al., 2017:
"Deal or No Deal"), in the conventions of OpenSpiel's `bargaining`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from palestra.envs.rules.base import CHANCE, TERMINAL, Rules
from palestra.envs.support.options import check_at_least

ITEMS = ("book", "hat", "ball")
ItemValues = tuple[int, ...]  # value of one item of each kind


class BargainingState(NamedTuple):
    """A state: the private values that chance has drawn, and the moves so far."""

    valuation: int = -1  # index into `valuations`, -1 before the draw
    moves: tuple[int, ...] = ()


class BargainingRules(Rules[BargainingState]):
    """Rules of bargaining over `counts` items of each kind (book, hat, ball); all together have value `total` for
    either player.

    Chance draws the values: every kind has value for at least one player, and at least one kind for both. In turn a
    player offers a division, by naming what it would keep, or agrees to the other's last offer. At the last of `turns`
    moves the player can only agree or refuse. An agreed division pays each player the value of its share; without
    agreement both get 0. Not zero-sum. The information state, float32 [2 + K * (total + 1) + turns * A] for K kinds and
    A actions, holds the player (one-hot), the values of the kinds (one-hot each) and every move so far (one-hot each).

    Raises ValueError if `counts` or `turns` is out of range, or no values exist that sum to `total` for both players.
    """

    name = "bargaining"
    num_players = 2

    def __init__(self, counts: tuple[int, ...] = (1, 2), total: int = 6, turns: int = 4) -> None:
        if not 1 <= len(counts) <= len(ITEMS) or min(counts) < 1:
            raise ValueError(f"counts: {counts} is not a pool of items; give 1 to {len(ITEMS)} counts of 1 or more")
        check_at_least("turns", turns, 2, "one offers and the other answers")
        self.counts = tuple(counts)
        self.total = total
        self.turns = turns
        self.offers = list(product(*(range(count + 1) for count in self.counts)))
        self.agree_action, self.refuse_action = len(self.offers), len(self.offers) + 1
        self.action_names = (*("keep-" + "-".join(map(str, offer)) for offer in self.offers), "agree", "refuse")
        self.valuations = _deals(self.counts, total)
        if not self.valuations:
            raise ValueError(
                f"total: items in counts {self.counts} cannot be worth {total} to both, each of use to one and one to "
                "both; choose a total that the counts add up to in more ways"
            )

    def initial_state(self) -> BargainingState:
        return BargainingState()

    def current_player(self, state: BargainingState) -> int:
        if state.valuation < 0:
            return CHANCE
        if state.moves and state.moves[-1] >= self.agree_action:
            return TERMINAL
        return len(state.moves) % 2

    def legal_actions(self, state: BargainingState) -> list[int]:
        if len(state.moves) == self.turns - 1:
            return [self.agree_action, self.refuse_action]
        return list(range(self.agree_action + bool(state.moves)))

    def chance_outcomes(self, state: BargainingState) -> list[tuple[int, float]]:
        return [(deal, 1 / len(self.valuations)) for deal in range(len(self.valuations))]

    def next_state(self, state: BargainingState, action: int) -> BargainingState:
        if state.valuation < 0:
            return BargainingState(action)
        return BargainingState(state.valuation, (*state.moves, action))

    def returns(self, state: BargainingState) -> tuple[float, ...]:
        if state.moves[-1] == self.refuse_action:
            return 0.0, 0.0
        offerer = len(state.moves) % 2
        kept = self.offers[state.moves[-2]]
        shares = [tuple(count - keep for count, keep in zip(self.counts, kept, strict=True))] * 2
        shares[offerer] = kept
        worths = self.valuations[state.valuation]
        return tuple(float(_share_value(worth, share)) for worth, share in zip(worths, shares, strict=True))

    def info_state(self, state: BargainingState, player: int) -> np.ndarray:
        kinds = len(self.counts)
        actions = len(self.action_names)
        worths = np.zeros((kinds, self.total + 1), np.float32)
        moves = np.zeros((self.turns, actions), np.float32)
        if state.valuation >= 0:
            worths[np.arange(kinds), self.valuations[state.valuation][player]] = 1
        moves[np.arange(len(state.moves)), list(state.moves)] = 1
        return np.concatenate([np.eye(2, dtype=np.float32)[player], worths.ravel(), moves.ravel()])

    def info_state_text(self, state: BargainingState, player: int) -> str:
        pool = ", ".join(f"{n} {item}" + "s" * (n > 1) for n, item in zip(self.counts, ITEMS, strict=False))
        worth = "not known yet"
        if state.valuation >= 0:
            worths = zip(ITEMS, self.valuations[state.valuation][player], strict=False)
            worth = ", ".join(f"a {item} {points}" for item, points in worths)
        moves = " ".join(self.action_names[move] for move in state.moves) or "none"
        return f"You are player {player}. To divide: {pool}. Worth to you: {worth}. Moves: {moves}."


def _share_value(worth: ItemValues, share: Sequence[int]) -> int:
    """Returns the value of a share."""
    return sum(points * count for points, count in zip(worth, share, strict=True))


def _deals(counts: tuple[int, ...], total: int) -> list[tuple[ItemValues, ItemValues]]:
    """Returns all pairs of item values that chance may draw, by the rule of OpenSpiel's instances."""
    worths = [worth for worth in product(range(total + 1), repeat=len(counts)) if _share_value(worth, counts) == total]
    return [
        (first, second)
        for first, second in product(worths, repeat=2)
        if all(map(max, first, second)) and any(map(min, first, second))
    ]
