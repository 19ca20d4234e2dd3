"""Leduc poker (Southey et al., 2005) for two players, as in OpenSpiel."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import numpy as np

from palestra.core.accel.jit import jit
from palestra.envs.batch.native import NativeEnv, store_ended
from palestra.envs.batch.rng import RNG_WORDS
from palestra.envs.rules.leduc import CALL, DECK_SIZE, FOLD, INFO_STATE_SIZE, MAX_MOVES, MAX_RAISES, RAISE, RANKS
from palestra.envs.vector.kuhn import clear_games, deal_cards
from palestra.envs.vector_base import Discrete, empty_step

PUBLIC_CARD = 2  # index of the public card in the deck, after the players' cards
ROUND, TURN, MOVES, RAISES, ACTION = range(5)  # columns of `play`; moves and raises count within the round
STATE_SIZE = 3 * DECK_SIZE + 2 * 2 * MAX_MOVES


class LeducArrays(NamedTuple):
    """The arrays that the kernels change: first the env's own state, then the arrays of the frame."""

    rng: np.ndarray
    cards: np.ndarray  # [B, 6] the deck: a card for each player, the public card, the rest
    play: np.ndarray  # [B, 5] round, player to move, moves, raises, last action
    stakes: np.ndarray  # [B, 2]
    obs: np.ndarray
    action_mask: np.ndarray
    agent_mask: np.ndarray
    state: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    final_obs: np.ndarray
    final_state: np.ndarray


@jit
def _begin_games(t: LeducArrays, chosen: np.ndarray) -> None:
    """Deals, takes antes and writes the first observations of the chosen games."""
    clear_games(t.obs, t.state, chosen)
    for b in range(len(chosen)):
        if chosen[b]:
            deal_cards(t.rng[b], t.cards[b], PUBLIC_CARD + 1)
            t.play[b, ROUND], t.play[b, TURN], t.play[b, MOVES], t.play[b, RAISES] = 0, 0, 0, 0
            for n in range(2):
                t.stakes[b, n] = 1
                t.obs[b, n, n], t.obs[b, n, 2 + t.cards[b, n]] = 1, 1
                t.state[b, DECK_SIZE * n + t.cards[b, n]] = 1


@jit
def _choose(t: LeducArrays, actions: np.ndarray) -> None:
    """Reads the action of the player to move (call if it is illegal) and writes it to the history;
    folds are not written."""
    for b in range(len(t.play)):
        turn = t.play[b, TURN]
        action = actions[b, turn]
        if not (FOLD <= action <= RAISE and t.action_mask[b, turn, action]):
            action = CALL
        t.play[b, ACTION] = action
        if action != FOLD:
            at = 2 * (MAX_MOVES * t.play[b, ROUND] + t.play[b, MOVES]) + action - CALL
            t.obs[b, 0, 2 + 2 * DECK_SIZE + at], t.obs[b, 1, 2 + 2 * DECK_SIZE + at] = 1, 1
            t.state[b, 3 * DECK_SIZE + at] = 1


@jit
def _move(t: LeducArrays) -> None:
    """Makes the chosen move and marks the games that it ended. A call ends the round unless it is
    the round's first move."""
    for b in range(len(t.play)):
        turn = t.play[b, TURN]
        action = t.play[b, ACTION]
        closed = action == CALL and t.play[b, MOVES] > 0
        t.terminated[b] = action == FOLD or (closed and t.play[b, ROUND] == 1)
        if action != FOLD:
            t.stakes[b, turn] = t.stakes[b, 1 - turn]
        if action == RAISE:
            t.stakes[b, turn] += 2 * (t.play[b, ROUND] + 1)
            t.play[b, RAISES] += 1
        if closed and not t.terminated[b]:
            t.play[b, ROUND], t.play[b, TURN], t.play[b, MOVES], t.play[b, RAISES] = 1, 0, 0, 0
        elif not t.terminated[b]:
            t.play[b, TURN], t.play[b, MOVES] = 1 - turn, t.play[b, MOVES] + 1


@jit
def _pay(t: LeducArrays) -> None:
    """Writes the rewards. The remaining player wins the other's stake, or the better hand does (a
    pair beats any single card); equal hands split."""
    for b in range(len(t.play)):
        t.rewards[b, 0], t.rewards[b, 1] = 0, 0
        if not t.terminated[b]:
            continue
        first = t.cards[b, 0] // 2
        second = t.cards[b, 1] // 2
        public = t.cards[b, PUBLIC_CARD] // 2
        if t.play[b, ACTION] == FOLD:
            winner = 1 - t.play[b, TURN]
        elif first != second:
            winner = int(second == public or (first != public and second > first))
        else:
            continue
        lost = t.stakes[b, 1 - winner]
        t.rewards[b, winner], t.rewards[b, 1 - winner] = lost, -lost


@jit
def _write(t: LeducArrays) -> None:
    """Writes the public card, the player to move and the action mask; both seats get the mask of the player to move."""
    for b in range(len(t.play)):
        turn = t.play[b, TURN]
        for n in range(2):
            t.agent_mask[b, n] = n == turn
            t.action_mask[b, n, FOLD] = t.stakes[b, turn] < t.stakes[b, 1 - turn]
            t.action_mask[b, n, RAISE] = t.play[b, RAISES] < MAX_RAISES
        if t.play[b, ROUND] == 1:
            public = t.cards[b, PUBLIC_CARD]
            t.obs[b, 0, 2 + DECK_SIZE + public], t.obs[b, 1, 2 + DECK_SIZE + public] = 1, 1
            t.state[b, 2 * DECK_SIZE + public] = 1


@jit
def _step(t: LeducArrays, actions: np.ndarray) -> None:
    _choose(t, actions)
    _move(t)
    _pay(t)
    store_ended(t, t.terminated)
    _begin_games(t, t.terminated)
    _write(t)


class LeducPoker(NativeEnv):
    """Leduc poker: six cards (three ranks, two suits), an ante of 1, two betting rounds with raises of 2 and 4, one
    public card between them.

    In turn a player folds (0; legal if there is a bet to answer), calls or checks (1), or raises (2; at most twice per
    round). A pair with the public card wins, else the higher rank. Rewards, at the end of the game, are chips won or
    lost. An illegal action is a call. An observation is OpenSpiel's information state: the seat number, its card, the
    public card (one-hot, zeros before it is shown), then for each of four moves of both rounds call or raise. The state
    is the card of both players, the public card, then the moves in the same form. `internal_state["cards"]` (int8 [B,
    6]) are the players' cards, then the public card, already drawn at the start.

    Raises ValueError if `num_envs` is below 1.
    """

    name: ClassVar[str] = "leduc_poker"
    action_names = ("fold", "call", "raise")
    seats = ("player_0", "player_1")
    observation_shapes = ((INFO_STATE_SIZE,), (INFO_STATE_SIZE,))
    action_spaces = (Discrete(3), Discrete(3))
    state_size = STATE_SIZE

    def __init__(self, num_envs: int = 64) -> None:
        self.num_envs = num_envs
        self.vector_step = empty_step(num_envs, 2, (INFO_STATE_SIZE,), num_actions=3, state_size=STATE_SIZE)
        self.internal_state = {
            "rng": np.zeros((num_envs, RNG_WORDS), np.uint64),
            "cards": np.zeros((num_envs, DECK_SIZE), np.int8),
            "play": np.zeros((num_envs, 5), np.int8),
            "stakes": np.zeros((num_envs, 2), np.int8),
        }
        self._table = self.build_table(LeducArrays)

    def render(self, game: int) -> str:
        """Returns the card and the stake of each player, and the public card once it is dealt."""
        cards = self.internal_state["cards"][game]
        stakes = self.internal_state["stakes"][game]
        rows = [f"{seat}  {RANKS[cards[n] // 2]}  {stakes[n]} in the pot" for n, seat in enumerate(self.seats)]
        dealt = self.internal_state["play"][game, ROUND] == 1
        return "\n".join([*rows, f"public    {RANKS[cards[PUBLIC_CARD] // 2] if dealt else '-'}"])

    def _begin(self) -> None:
        self.internal_state["cards"][:] = np.arange(DECK_SIZE)
        _begin_games(self._table, np.ones(self.num_envs, bool))
        _write(self._table)

    def _advance(self, actions: np.ndarray) -> None:
        _step(self._table, actions.astype(np.int32, copy=False))
