"""The rules of Kuhn poker (Kuhn, 1950) for two or more players, as in OpenSpiel."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from palestra.envs.rules.base import CHANCE, OVER, Rules

PASS, BET = 0, 1
MOST_PLAYERS = 4
RANKS = "TJQKA"


class Deal(NamedTuple):
    """A state: the cards dealt so far, and the moves."""

    cards: tuple[int, ...] = ()  # one for each player in order, as far as dealt
    moves: tuple[int, ...] = ()


class KuhnRules(Rules[Deal]):
    """One card for each player from a deck of `players` + 1; an ante of 1 and at most one bet of 1.

    In turn each player passes or bets, until all have passed or all others have answered the bet. The highest card
    among those who bet (among all, if no player bet) wins the pot. The information state is float32 [6 * players - 1]:
    player (one-hot), own card (one-hot), and each move (one-hot). Raises ValueError for fewer than 2 or more than 4
    players.
    """

    name = "kuhn_poker"
    actions = ("pass", "bet")

    def __init__(self, players: int = 2) -> None:
        if not 2 <= players <= MOST_PLAYERS:
            raise ValueError(f"players: {players} cannot play Kuhn poker here; use 2 to {MOST_PLAYERS}")
        self.players = players
        self.ranks = RANKS[-players - 1 :] if players > 2 else "JQK"

    def initial(self) -> Deal:
        return Deal()

    def turn(self, state: Deal) -> int:
        if len(state.cards) < self.players:
            return CHANCE
        last = self.players + max(_first_bet(state), 0)
        return OVER if len(state.moves) == last else len(state.moves) % self.players

    def legal(self, state: Deal) -> list[int]:
        return [PASS, BET]

    def chances(self, state: Deal) -> list[tuple[int, float]]:
        left = [card for card in range(self.players + 1) if card not in state.cards]
        return [(card, 1 / len(left)) for card in left]

    def next(self, state: Deal, action: int) -> Deal:
        if len(state.cards) < self.players:
            return Deal((*state.cards, action))
        return Deal(state.cards, (*state.moves, action))

    def returns(self, state: Deal) -> tuple[float, ...]:
        stakes = [1] * self.players
        for move, action in enumerate(state.moves):
            stakes[move % self.players] += action
        winner = max(range(self.players), key=lambda player: (stakes[player], state.cards[player]))
        return tuple(float(sum(stakes) * (player == winner) - stake) for player, stake in enumerate(stakes))

    def view(self, state: Deal, player: int) -> np.ndarray:
        view = np.zeros(2 * self.players + 1 + 2 * (2 * self.players - 1), np.float32)
        view[player] = 1
        if player < len(state.cards):
            view[self.players + state.cards[player]] = 1
        for move, action in enumerate(state.moves):
            view[2 * self.players + 1 + 2 * move + action] = 1
        return view

    def words(self, state: Deal, player: int) -> str:
        card = self.ranks[state.cards[player]] if player < len(state.cards) else "nothing"
        moves = " ".join(self.actions[action] for action in state.moves) or "none"
        return f"You are player {player}. You hold {card}. Moves: {moves}."


def _first_bet(state: Deal) -> int:
    return state.moves.index(BET) if BET in state.moves else -1
