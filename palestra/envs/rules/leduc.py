"""The rules of Leduc poker (Southey et al., 2005) for two players, as in OpenSpiel."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from palestra.envs.rules.base import CHANCE, OVER, Rules

FOLD, CALL, RAISE = 0, 1, 2
CARDS = 6  # card // 2 is the rank
RANKS, SUITS = "JQK", "sh"
MOST_MOVES, MOST_RAISES = 4, 2  # per round
VIEW = 2 + 2 * CARDS + 2 * 2 * MOST_MOVES


class Deal(NamedTuple):
    """A state: the cards dealt so far, and the moves of both betting rounds."""

    cards: tuple[int, ...] = ()  # of the two players, then the public card, as far as dealt
    first: tuple[int, ...] = ()  # moves of the first round
    second: tuple[int, ...] = ()


class LeducRules(Rules[Deal]):
    """Six cards (three ranks, two suits), an ante of 1, bets of 2 and then 4, one public card between the two rounds.

    In turn a player folds (only to a bet), calls or checks, or raises (at most twice a round). A pair with the public
    card wins, otherwise the higher rank; equal ranks split. The information state is float32 [30]: player (one-hot),
    own card (one-hot), public card (one-hot), and each call or raise (one-hot).
    """

    name = "leduc_poker"
    players = 2
    actions = ("fold", "call", "raise")

    def initial(self) -> Deal:
        return Deal()

    def turn(self, state: Deal) -> int:
        if len(state.cards) < 2:
            return CHANCE
        if len(state.cards) == 2:
            if _folded(state.first):
                return OVER
            return CHANCE if _called(state.first) else len(state.first) % 2
        return OVER if _folded(state.second) or _called(state.second) else len(state.second) % 2

    def legal(self, state: Deal) -> list[int]:
        moves = state.first if len(state.cards) == 2 else state.second
        answers = [FOLD, CALL] if moves and moves[-1] == RAISE else [CALL]
        return [*answers, RAISE] if moves.count(RAISE) < MOST_RAISES else answers

    def chances(self, state: Deal) -> list[tuple[int, float]]:
        left = [card for card in range(CARDS) if card not in state.cards]
        return [(card, 1 / len(left)) for card in left]

    def next(self, state: Deal, action: int) -> Deal:
        cards, first, second = state
        if self.turn(state) == CHANCE:
            return Deal((*cards, action), first, second)
        return Deal(cards, (*first, action)) if len(cards) == 2 else Deal(cards, first, (*second, action))

    def returns(self, state: Deal) -> tuple[float, ...]:
        first, second = (card // 2 for card in state.cards[:2])
        stakes, moves = _stakes(state), state.second if len(state.cards) > 2 else state.first
        if _folded(moves):
            winner = len(moves) % 2
        elif first == second:
            return 0.0, 0.0
        else:
            public = state.cards[2] // 2
            winner = 0 if first == public or (second != public and first > second) else 1
        lost = float(stakes[1 - winner])
        return (lost, -lost) if winner == 0 else (-lost, lost)

    def view(self, state: Deal, player: int) -> np.ndarray:
        view = np.zeros(VIEW, np.float32)
        view[player] = 1
        if player < len(state.cards):
            view[2 + state.cards[player]] = 1
        if len(state.cards) > 2:
            view[2 + CARDS + state.cards[2]] = 1
        for number, moves in enumerate((state.first, state.second)):
            for move, action in enumerate(moves):
                if action != FOLD:
                    view[2 + 2 * CARDS + 2 * (MOST_MOVES * number + move) + action - CALL] = 1
        return view

    def words(self, state: Deal, player: int) -> str:
        card = _named(state.cards[player]) if player < len(state.cards) else "nothing"
        public = f" The table shows {_named(state.cards[2])}." if len(state.cards) > 2 else ""
        first, second = (self._told(moves) for moves in (state.first, state.second))
        later = f" Then: {second}." if public else ""
        return f"You are player {player}. You hold {card}. Moves: {first}.{public}{later}"

    def _told(self, moves: tuple[int, ...]) -> str:
        """Returns the moves as text, without folds: `view` does not encode folds either, so both stay equivalent."""
        return " ".join(self.actions[action] for action in moves if action != FOLD) or "none"


def _folded(moves: tuple[int, ...]) -> bool:
    return bool(moves) and moves[-1] == FOLD


def _called(moves: tuple[int, ...]) -> bool:
    """True if the round is over: a call ends it, unless it is the first move of the round."""
    return len(moves) > 1 and moves[-1] == CALL


def _stakes(state: Deal) -> list[int]:
    stakes = [1, 1]
    for bet, moves in ((2, state.first), (4, state.second)):
        for move, action in enumerate(moves):
            if action != FOLD:
                stakes[move % 2] = stakes[1 - move % 2] + bet * (action == RAISE)
    return stakes


def _named(card: int) -> str:
    return RANKS[card // 2] + SUITS[card % 2]
