"""Leduc poker (Southey et al., 2005) for two players, as in OpenSpiel."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import numpy as np

from palestra.compiled import kernel
from palestra.envs.vector.base import Discrete, empty_frame
from palestra.envs.vector.kuhn import blank, deal, keep_last
from palestra.envs.vector.native import NativeEnv
from palestra.envs.vector.rng import WORDS

FOLD, CALL, RAISE = 0, 1, 2
CARDS = 6  # card // 2 is its rank
PUBLIC = 2  # index of the public card in the deck, after the players' cards
ROUND, TURN, MOVES, RAISES, ACTION = range(5)  # columns of `play`; moves and raises count within the round
MOST_MOVES, MOST_RAISES = 4, 2  # in a round
VIEW = 2 + 2 * CARDS + 2 * 2 * MOST_MOVES
STATE = 3 * CARDS + 2 * 2 * MOST_MOVES


class Table(NamedTuple):
    """The arrays that the kernels change: first the env's own state, then the arrays of the frame."""

    rng: np.ndarray
    cards: np.ndarray  # [B, 6] the deck: a card for each player, the public card, the rest
    play: np.ndarray  # [B, 5] round, player to move, moves, raises, last action
    stakes: np.ndarray  # [B, 2]
    obs: np.ndarray
    legal: np.ndarray
    acting: np.ndarray
    state: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    final_obs: np.ndarray
    final_state: np.ndarray


@kernel
def _begin_games(t: Table, chosen: np.ndarray) -> None:
    """Deals, takes antes and writes the first observations of the chosen games."""
    rng, cards, play, stakes, obs, state = t.rng, t.cards, t.play, t.stakes, t.obs, t.state
    blank(obs, state, chosen)
    for b in range(len(chosen)):
        if chosen[b]:
            deal(rng[b], cards[b], PUBLIC + 1)
            play[b, ROUND], play[b, TURN], play[b, MOVES], play[b, RAISES] = 0, 0, 0, 0
            for n in range(2):
                stakes[b, n] = 1
                obs[b, n, n], obs[b, n, 2 + cards[b, n]] = 1, 1
                state[b, CARDS * n + cards[b, n]] = 1


@kernel
def _choose(t: Table, actions: np.ndarray) -> None:
    """Reads the action of the player to move (call if it is illegal) and writes it to the history; folds are not
    written."""
    play, legal, obs, state = t.play, t.legal, t.obs, t.state
    for b in range(len(play)):
        turn = play[b, TURN]
        action = actions[b, turn]
        if not (FOLD <= action <= RAISE and legal[b, turn, action]):
            action = CALL
        play[b, ACTION] = action
        if action != FOLD:
            at = 2 * (MOST_MOVES * play[b, ROUND] + play[b, MOVES]) + action - CALL
            obs[b, 0, 2 + 2 * CARDS + at], obs[b, 1, 2 + 2 * CARDS + at] = 1, 1
            state[b, 3 * CARDS + at] = 1


@kernel
def _move(t: Table) -> None:
    """Makes the chosen move and marks the games that it ended. A call ends the round unless it is the round's first
    move."""
    play, stakes, over = t.play, t.stakes, t.terminated
    for b in range(len(play)):
        turn, action = play[b, TURN], play[b, ACTION]
        closed = action == CALL and play[b, MOVES] > 0
        over[b] = action == FOLD or (closed and play[b, ROUND] == 1)
        if action != FOLD:
            stakes[b, turn] = stakes[b, 1 - turn]
        if action == RAISE:
            stakes[b, turn] += 2 * (play[b, ROUND] + 1)
            play[b, RAISES] += 1
        if closed and not over[b]:
            play[b, ROUND], play[b, TURN], play[b, MOVES], play[b, RAISES] = 1, 0, 0, 0
        elif not over[b]:
            play[b, TURN], play[b, MOVES] = 1 - turn, play[b, MOVES] + 1


@kernel
def _pay(t: Table) -> None:
    """Writes the rewards. The remaining player wins the other's stake, or the better hand does (a pair beats any single
    card); equal hands split."""
    cards, play, stakes, rewards, over = t.cards, t.play, t.stakes, t.rewards, t.terminated
    for b in range(len(play)):
        rewards[b, 0], rewards[b, 1] = 0, 0
        if not over[b]:
            continue
        first, second, public = cards[b, 0] // 2, cards[b, 1] // 2, cards[b, PUBLIC] // 2
        if play[b, ACTION] == FOLD:
            winner = 1 - play[b, TURN]
        elif first != second:
            winner = 0 if first == public or (second != public and first > second) else 1
        else:
            continue
        lost = stakes[b, 1 - winner]
        rewards[b, winner], rewards[b, 1 - winner] = lost, -lost


@kernel
def _write(t: Table) -> None:
    """Writes the public card, the player to move and the action mask; both seats get the mask of the player to move."""
    cards, play, stakes, obs, state = t.cards, t.play, t.stakes, t.obs, t.state
    acting, legal = t.acting, t.legal
    for b in range(len(play)):
        turn = play[b, TURN]
        for n in range(2):
            acting[b, n] = n == turn
            legal[b, n, FOLD] = stakes[b, turn] < stakes[b, 1 - turn]
            legal[b, n, RAISE] = play[b, RAISES] < MOST_RAISES
        if play[b, ROUND] == 1:
            public = cards[b, PUBLIC]
            obs[b, 0, 2 + CARDS + public], obs[b, 1, 2 + CARDS + public] = 1, 1
            state[b, 2 * CARDS + public] = 1


@kernel
def _step(t: Table, actions: np.ndarray) -> None:
    _choose(t, actions)
    _move(t)
    _pay(t)
    keep_last(t.obs, t.final_obs, t.state, t.final_state, t.terminated)
    _begin_games(t, t.terminated)
    _write(t)


class LeducPoker(NativeEnv):
    """Leduc poker: six cards (three ranks, two suits), an ante of 1, two betting rounds with raises of 2 and 4, one
    public card between them.

    In turn a player folds (0; legal if there is a bet to answer), calls or checks (1), or raises (2; at most twice per
    round). A pair with the public card wins, else the higher rank. Rewards, at the end of the game, are chips won or
    lost. An illegal action is a call. An observation is OpenSpiel's information state: the seat number, its card, the
    public card (one-hot, zeros before it is shown), then for each of four moves of both rounds call or raise. The state
    is the card of both players, the public card, then the moves in the same form. `memory["cards"]` (int8 [B, 6]) are
    the players' cards, then the public card, already drawn at the start.

    Raises ValueError if `games` is below 1.
    """

    name: ClassVar[str] = "leduc_poker"
    seats = ("player_0", "player_1")
    views = ((VIEW,), (VIEW,))
    actions = (Discrete(3), Discrete(3))
    state_size = STATE

    def __init__(self, games: int = 64) -> None:
        if games < 1:
            raise ValueError(f"games: {games} is too small, nothing is played in fewer than 1; use 1 or more")
        self.games = games
        self.frame = empty_frame(games, 2, (VIEW,), actions=3, state=STATE)
        self.memory = {
            "rng": np.zeros((games, WORDS), np.uint64),
            "cards": np.zeros((games, CARDS), np.int8),
            "play": np.zeros((games, 5), np.int8),
            "stakes": np.zeros((games, 2), np.int8),
        }
        frame = {name: getattr(self.frame, name) for name in Table._fields if name not in self.memory}
        self._table = Table(**self.memory, **frame)

    def _begin(self) -> None:
        self.memory["cards"][:] = np.arange(CARDS)
        _begin_games(self._table, np.ones(self.games, bool))
        _write(self._table)

    def _advance(self, actions: np.ndarray) -> None:
        _step(self._table, actions.astype(np.int32, copy=False))
