"""The rules of Kuhn poker (Kuhn, 1950) for two or more players, as in OpenSpiel."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from palestra.envs.rules.base import CHANCE, TERMINAL, Rules

PASS = 0
BET = 1
MAX_PLAYERS = 4
RANKS = "TJQKA"


class KuhnState(NamedTuple):
    """A state: the cards dealt so far, and the moves."""

    cards: tuple[int, ...] = ()  # one for each player in order, as far as dealt
    moves: tuple[int, ...] = ()


class KuhnRules(Rules[KuhnState]):
    """One card for each player from a deck of `num_players` + 1; an ante of 1 and at most one bet of 1.

    In turn each player passes or bets, until all have passed or all others have answered the bet. The highest card
    among those who bet (among all, if no player bet) wins the pot. The information state is float32 [6 * players - 1]:
    player (one-hot), own card (one-hot), and each move (one-hot). Raises ValueError for fewer than 2 or more than 4
    players.
    """

    name = "kuhn_poker"
    action_names = ("pass", "bet")

    def __init__(self, players: int = 2) -> None:
        check_players(players)
        self.num_players = players
        self.ranks = RANKS[-players - 1 :] if players > 2 else "JQK"

    def initial_state(self) -> KuhnState:
        return KuhnState()

    def current_player(self, state: KuhnState) -> int:
        if len(state.cards) < self.num_players:
            return CHANCE
        last = self.num_players
        if BET in state.moves:
            last += state.moves.index(BET)
        if len(state.moves) == last:
            return TERMINAL
        return len(state.moves) % self.num_players

    def legal_actions(self, state: KuhnState) -> list[int]:
        return [PASS, BET]

    def chance_outcomes(self, state: KuhnState) -> list[tuple[int, float]]:
        left = [card for card in range(self.num_players + 1) if card not in state.cards]
        return [(card, 1 / len(left)) for card in left]

    def next_state(self, state: KuhnState, action: int) -> KuhnState:
        if len(state.cards) < self.num_players:
            return KuhnState((*state.cards, action))
        return KuhnState(state.cards, (*state.moves, action))

    def returns(self, state: KuhnState) -> tuple[float, ...]:
        stakes = [1] * self.num_players
        for move, action in enumerate(state.moves):
            stakes[move % self.num_players] += action
        winner = max(range(self.num_players), key=lambda player: (stakes[player], state.cards[player]))
        return tuple(float(sum(stakes) * (player == winner) - stake) for player, stake in enumerate(stakes))

    def info_state(self, state: KuhnState, player: int) -> np.ndarray:
        view = np.zeros(2 * self.num_players + 1 + 2 * (2 * self.num_players - 1), np.float32)
        view[player] = 1
        if player < len(state.cards):
            view[self.num_players + state.cards[player]] = 1
        for move, action in enumerate(state.moves):
            view[2 * self.num_players + 1 + 2 * move + action] = 1
        return view

    def info_state_text(self, state: KuhnState, player: int) -> str:
        card = self.ranks[state.cards[player]] if player < len(state.cards) else "nothing"
        moves = " ".join(self.action_names[action] for action in state.moves) or "none"
        return f"You are player {player}. You hold {card}. Moves: {moves}."


def check_players(players: int) -> None:
    """Raises ValueError for a number of players that cannot play."""
    if not 2 <= players <= MAX_PLAYERS:
        raise ValueError(f"players: {players} cannot play Kuhn poker here; use 2 to {MAX_PLAYERS}")
