"""The rules of Leduc poker (Southey et al., 2005) for two players, as in OpenSpiel."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from palestra.envs.rules.base import CHANCE, TERMINAL, Rules

FOLD = 0
CALL = 1
RAISE = 2
DECK_SIZE = 6  # card // 2 is the rank
RANKS = "JQK"
SUITS = "sh"
# per round
MAX_MOVES = 4
MAX_RAISES = 2
INFO_STATE_SIZE = 2 + 2 * DECK_SIZE + 2 * 2 * MAX_MOVES


class LeducState(NamedTuple):
    """A state: the cards dealt so far, and the moves of both betting rounds."""

    cards: tuple[int, ...] = ()  # of the two players, then the public card, as far as dealt
    first_round: tuple[int, ...] = ()  # moves of the first round
    second_round: tuple[int, ...] = ()

    @property
    def moves(self) -> tuple[int, ...]:
        """The moves of the current round."""
        return self.second_round if len(self.cards) > 2 else self.first_round


class LeducRules(Rules[LeducState]):
    """Six cards (three ranks, two suits), an ante of 1, bets of 2 and then 4, one public card between the two rounds.

    In turn a player folds (only to a bet), calls or checks, or raises (at most twice a round). A pair with the public
    card wins, otherwise the higher rank; equal ranks split. The information state is float32 [30]: player (one-hot),
    own card (one-hot), public card (one-hot), and each call or raise (one-hot).
    """

    name = "leduc_poker"
    num_players = 2
    action_names = ("fold", "call", "raise")

    def initial_state(self) -> LeducState:
        return LeducState()

    def current_player(self, state: LeducState) -> int:
        if len(state.cards) < 2:
            return CHANCE
        if _ends_in_fold(state.moves):
            return TERMINAL
        if len(state.moves) < 2 or state.moves[-1] != CALL:  # a call ends the round, unless it is its first move
            return len(state.moves) % 2
        if len(state.cards) == 2:
            return CHANCE
        return TERMINAL

    def legal_actions(self, state: LeducState) -> list[int]:
        actions = [CALL]
        if state.moves and state.moves[-1] == RAISE:
            actions = [FOLD, CALL]
        if state.moves.count(RAISE) < MAX_RAISES:
            actions.append(RAISE)
        return actions

    def chance_outcomes(self, state: LeducState) -> list[tuple[int, float]]:
        left = [card for card in range(DECK_SIZE) if card not in state.cards]
        return [(card, 1 / len(left)) for card in left]

    def next_state(self, state: LeducState, action: int) -> LeducState:
        cards, first, second = state
        if self.current_player(state) == CHANCE:
            return LeducState((*cards, action), first, second)
        if len(cards) == 2:
            return LeducState(cards, (*first, action))
        return LeducState(cards, first, (*second, action))

    def returns(self, state: LeducState) -> tuple[float, ...]:
        first, second = (card // 2 for card in state.cards[:2])
        stakes = _stakes(state)
        if _ends_in_fold(state.moves):
            winner = len(state.moves) % 2
        elif first == second:
            return 0.0, 0.0
        else:
            public = state.cards[2] // 2
            winner = int(second == public or (first != public and second > first))
        lost = float(stakes[1 - winner])
        if winner == 0:
            return lost, -lost
        return -lost, lost

    def info_state(self, state: LeducState, player: int) -> np.ndarray:
        view = np.zeros(INFO_STATE_SIZE, np.float32)
        view[player] = 1
        if player < len(state.cards):
            view[2 + state.cards[player]] = 1
        if len(state.cards) > 2:
            view[2 + DECK_SIZE + state.cards[2]] = 1
        for number, moves in enumerate((state.first_round, state.second_round)):
            for move, action in enumerate(moves):
                if action != FOLD:
                    view[2 + 2 * DECK_SIZE + 2 * (MAX_MOVES * number + move) + action - CALL] = 1
        return view

    def info_state_text(self, state: LeducState, player: int) -> str:
        card = _card_name(state.cards[player]) if player < len(state.cards) else "nothing"
        text = f"You are player {player}. You hold {card}. Moves: {self._moves_text(state.first_round)}."
        if len(state.cards) < 3:
            return text
        return f"{text} The table shows {_card_name(state.cards[2])}. Then: {self._moves_text(state.second_round)}."

    def _moves_text(self, moves: tuple[int, ...]) -> str:
        """Returns the moves as text, without folds: `info_state` does not encode folds either, so
        both stay equivalent."""
        return " ".join(self.action_names[action] for action in moves if action != FOLD) or "none"


def _ends_in_fold(moves: tuple[int, ...]) -> bool:
    return bool(moves) and moves[-1] == FOLD


def _stakes(state: LeducState) -> list[int]:
    stakes = [1, 1]
    for bet, moves in ((2, state.first_round), (4, state.second_round)):
        for move, action in enumerate(moves):
            if action != FOLD:
                stakes[move % 2] = stakes[1 - move % 2] + bet * (action == RAISE)
    return stakes


def _card_name(card: int) -> str:
    return RANKS[card // 2] + SUITS[card % 2]
