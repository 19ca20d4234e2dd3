"""A bargaining game: two players divide items that each values privately (DeVault et al., 2015; Lewis et al., 2017:
"Deal or No Deal"), in the conventions of OpenSpiel's `bargaining`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from palestra.envs.rules.base import CHANCE, OVER, Rules

ITEMS = ("book", "hat", "ball")
Worth = tuple[int, ...]  # value of one item of each kind


class Talk(NamedTuple):
    """A state: the private values that chance has drawn, and the moves so far."""

    deal: int = -1  # index into `deals`, -1 before the draw
    moves: tuple[int, ...] = ()


class BargainingRules(Rules[Talk]):
    """There are `counts` items of each kind (book, hat, ball); all together have value `total` for either player.

    Chance draws the values: every kind has value for at least one player, and at least one kind for both. In turn a
    player offers a division, by naming what it would keep, or agrees to the other's last offer. At the last of `turns`
    moves the player can only agree or refuse. An agreed division pays each player the value of its share; without
    agreement both get 0. Not zero-sum. The information state, float32 [2 + K * (total + 1) + turns * A] for K kinds and
    A actions, holds the player (one-hot), the values of the kinds (one-hot each) and every move so far (one-hot each).

    Raises ValueError if `counts` or `turns` is out of range, or no values exist that sum to `total` for both players.
    """

    name = "bargaining"
    players = 2

    def __init__(self, counts: tuple[int, ...] = (1, 2), total: int = 6, turns: int = 4) -> None:
        if not 1 <= len(counts) <= len(ITEMS) or min(counts) < 1:
            raise ValueError(f"counts: {counts} is no pool of items; give 1 to {len(ITEMS)} counts of 1 or more")
        if turns < 2:
            raise ValueError(f"turns: {turns} is too small, one offers and the other answers; use 2 or more")
        self.counts, self.total, self.turns = tuple(counts), total, turns
        self.offers = list(product(*(range(count + 1) for count in self.counts)))
        self.agree, self.refuse = len(self.offers), len(self.offers) + 1
        self.actions = (*("keep-" + "-".join(map(str, offer)) for offer in self.offers), "agree", "refuse")
        self.deals = _deals(self.counts, total)
        if not self.deals:
            raise ValueError(
                f"total: items in counts {self.counts} cannot be worth {total} to both, each of use to one and one to "
                "both; choose a total that the counts add up to in more ways"
            )

    def initial(self) -> Talk:
        return Talk()

    def turn(self, state: Talk) -> int:
        if state.deal < 0:
            return CHANCE
        closed = bool(state.moves) and state.moves[-1] >= self.agree
        return OVER if closed else len(state.moves) % 2

    def legal(self, state: Talk) -> list[int]:
        if len(state.moves) == self.turns - 1:
            return [self.agree, self.refuse]
        return list(range(self.agree + bool(state.moves)))

    def chances(self, state: Talk) -> list[tuple[int, float]]:
        return [(deal, 1 / len(self.deals)) for deal in range(len(self.deals))]

    def next(self, state: Talk, action: int) -> Talk:
        return Talk(action) if state.deal < 0 else Talk(state.deal, (*state.moves, action))

    def returns(self, state: Talk) -> tuple[float, ...]:
        if state.moves[-1] == self.refuse:
            return 0.0, 0.0
        offerer, kept = len(state.moves) % 2, self.offers[state.moves[-2]]
        rest = [count - keep for count, keep in zip(self.counts, kept, strict=True)]
        shares = (kept, rest) if offerer == 0 else (rest, kept)
        first, second = (_worth(worth, share) for worth, share in zip(self.deals[state.deal], shares, strict=True))
        return float(first), float(second)

    def view(self, state: Talk, player: int) -> np.ndarray:
        kinds, actions = len(self.counts), len(self.actions)
        worths, moves = np.zeros((kinds, self.total + 1), np.float32), np.zeros((self.turns, actions), np.float32)
        if state.deal >= 0:
            worths[np.arange(kinds), self.deals[state.deal][player]] = 1
        moves[np.arange(len(state.moves)), list(state.moves)] = 1
        return np.concatenate([np.eye(2, dtype=np.float32)[player], worths.ravel(), moves.ravel()])

    def words(self, state: Talk, player: int) -> str:
        pool = ", ".join(_counted(count, item) for count, item in zip(self.counts, ITEMS, strict=False))
        worth = "not known yet"
        if state.deal >= 0:
            worths = zip(ITEMS, self.deals[state.deal][player], strict=False)
            worth = ", ".join(f"a {item} {points}" for item, points in worths)
        moves = " ".join(self.actions[move] for move in state.moves) or "none"
        return f"You are player {player}. To divide: {pool}. Worth to you: {worth}. Moves: {moves}."


def _worth(worth: Worth, share: Sequence[int]) -> int:
    """Returns the value of a share."""
    return sum(points * count for points, count in zip(worth, share, strict=True))


def _deals(counts: tuple[int, ...], total: int) -> list[tuple[Worth, Worth]]:
    """Returns all pairs of item values that chance may draw, by the rule of OpenSpiel's instances."""
    worths = [worth for worth in product(range(total + 1), repeat=len(counts)) if _worth(worth, counts) == total]
    return [
        (first, second)
        for first, second in product(worths, repeat=2)
        if all(map(max, first, second)) and any(map(min, first, second))
    ]


def _counted(count: int, item: str) -> str:
    return f"{count} {item}" + ("s" if count > 1 else "")
