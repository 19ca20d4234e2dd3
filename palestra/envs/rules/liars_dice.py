"""The rules of liar's dice for two players, as in OpenSpiel."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np

from palestra.envs.rules.base import CHANCE, TERMINAL, Rules
from palestra.envs.support.options import check_at_least


class LiarsDiceState(NamedTuple):
    """A state: the dice of both players, and the bids so far."""

    dice: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # faces from 0, sorted for each player
    bids: tuple[int, ...] = ()  # the final call of a lie included


class LiarsDiceRules(Rules[LiarsDiceState]):
    """Each player rolls `dice` dice of `faces` faces in secret; bids on all dice go up until one is called a lie.

    Bid "2x5" claims that at least two dice show a five; the highest face is wild and counts as any. The player who is
    right wins 1, the other loses 1. The information state is float32 [2 + dice * faces + B + 1] for B bids: player
    (one-hot), each own die (one-hot), and the bids and the call made so far. Raises ValueError if `dice` < 1 or `faces`
    < 2.
    """

    name = "liars_dice"
    num_players = 2

    def __init__(self, dice: int = 1, faces: int = 6) -> None:
        check_dice(dice, faces)
        self.dice = dice
        self.faces = faces
        bids = [f"{count}x{face}" for count, face in product(range(1, 2 * dice + 1), range(1, faces + 1))]
        self.action_names = (*bids, "liar")
        self.liar_action = len(bids)

    def initial_state(self) -> LiarsDiceState:
        return LiarsDiceState()

    def current_player(self, state: LiarsDiceState) -> int:
        if len(state.dice[1]) < self.dice:
            return CHANCE
        if self.liar_action in state.bids:
            return TERMINAL
        return len(state.bids) % 2

    def legal_actions(self, state: LiarsDiceState) -> list[int]:
        if not state.bids:
            return list(range(self.liar_action))
        return list(range(state.bids[-1] + 1, self.liar_action + 1))

    def chance_outcomes(self, state: LiarsDiceState) -> list[tuple[int, float]]:
        return [(face, 1 / self.faces) for face in range(self.faces)]

    def next_state(self, state: LiarsDiceState, action: int) -> LiarsDiceState:
        first, second = state.dice
        if len(first) < self.dice:
            return LiarsDiceState((_add_die(first, action), second))
        if len(second) < self.dice:
            return LiarsDiceState((first, _add_die(second, action)))
        return LiarsDiceState(state.dice, (*state.bids, action))

    def returns(self, state: LiarsDiceState) -> tuple[float, ...]:
        bid = state.bids[-2]
        caller = (len(state.bids) - 1) % 2
        face = bid % self.faces
        shown = sum(state.dice, ())
        true = sum(die in (face, self.faces - 1) for die in shown) > bid // self.faces
        if (caller == 0) != true:
            return 1.0, -1.0
        return -1.0, 1.0

    def info_state(self, state: LiarsDiceState, player: int) -> np.ndarray:
        own = 2 + self.dice * self.faces
        view = np.zeros(own + self.liar_action + 1, np.float32)
        view[player] = 1
        for die, face in enumerate(state.dice[player]):
            view[2 + self.faces * die + face] = 1
        view[[own + bid for bid in state.bids]] = 1
        return view

    def info_state_text(self, state: LiarsDiceState, player: int) -> str:
        dice = " ".join(str(face + 1) for face in state.dice[player]) or "none"
        bids = " ".join(self.action_names[bid] for bid in state.bids) or "none"
        return f"You are player {player}. Your dice: {dice}. Bids: {bids}."


def check_dice(dice: int, faces: int) -> None:
    """Raises ValueError unless each player has a die, of at least two faces."""
    check_at_least("dice", dice, 1, "each player bids on at least one of its own")
    check_at_least("faces", faces, 2, "dice of fewer than 2 hide nothing")


def _add_die(dice: tuple[int, ...], face: int) -> tuple[int, ...]:
    return tuple(sorted((*dice, face)))
