"""Matrix games, one-shot or repeated, the two-step game of QMIX and the m-step game of MAVEN."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from palestra.core.accel.jit import jit
from palestra.envs.batch.native import NativeEnv, store_ended
from palestra.envs.batch.rng import RNG_WORDS
from palestra.envs.support.options import check_at_least
from palestra.envs.vector.kuhn import clear_games
from palestra.envs.vector_base import Discrete, empty_step

MatrixName = Literal[
    "rock_paper_scissors", "matching_pennies", "prisoners_dilemma", "stag_hunt", "coordination", "climbing", "penalty"
]
# Rows are the actions of player_0. A single number is the payoff of both seats. The first five are OpenSpiel's
# (prisoners cooperate, then defect; hunters hunt the stag, then the hare), the last two are from Claus and Boutilier
# (1998), with k = -100.
PAYOFFS: dict[str, list[Any]] = {
    "rock_paper_scissors": [[(0, 0), (-1, 1), (1, -1)], [(1, -1), (0, 0), (-1, 1)], [(-1, 1), (1, -1), (0, 0)]],
    "matching_pennies": [[(1, -1), (-1, 1)], [(-1, 1), (1, -1)]],
    "prisoners_dilemma": [[(5, 5), (0, 10)], [(10, 0), (1, 1)]],
    "stag_hunt": [[(2, 2), (0, 1)], [(1, 0), (1, 1)]],
    "coordination": [[1, 0], [0, 1]],
    "climbing": [[11, -30, 0], [-30, 7, 6], [0, 0, 5]],
    "penalty": [[10, 0, -100], [0, 2, 0], [-100, 0, 10]],
}
SEATS = ("player_0", "player_1")
# states of the two-step game
START = 0
CERTAIN = 1
TWO_STEP_PAYOFFS = np.array([[[0, 0], [0, 0]], [[7, 7], [7, 7]], [[0, 1], [1, 8]]], np.float64)  # by state


class MatrixArrays(NamedTuple):
    """The arrays that the kernels change: first the env's own state, then the arrays of the frame."""

    place: np.ndarray  # [B] rounds played; in games of several states the number of the state
    obs: np.ndarray
    state: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    final_obs: np.ndarray
    final_state: np.ndarray


@jit
def _step_round(t: MatrixArrays, payoff: np.ndarray, rounds: int, actions: np.ndarray) -> None:
    """Writes the rewards and the last joint action, one-hot: in observations the seat's own action
    first, in the state player_0's."""
    rows = payoff.shape[0]
    columns = payoff.shape[1]
    for b in range(len(t.place)):
        row = min(max(actions[b, 0], 0), rows - 1)
        column = min(max(actions[b, 1], 0), columns - 1)
        t.rewards[b, 0], t.rewards[b, 1] = payoff[row, column, 0], payoff[row, column, 1]
        for at in range(rows + columns):
            t.obs[b, 0, at], t.obs[b, 1, at], t.state[b, at] = 0, 0, 0
        t.obs[b, 0, row], t.obs[b, 0, rows + column] = 1, 1
        t.obs[b, 1, column], t.obs[b, 1, columns + row] = 1, 1
        t.state[b, row], t.state[b, rows + column] = 1, 1
        t.place[b] += 1
        t.state[b, rows + columns] = t.place[b] / rounds
        t.terminated[b] = t.place[b] == rounds
        if t.terminated[b]:
            t.place[b] = 0
    store_ended(t, t.terminated)
    clear_games(t.obs, t.state, t.terminated)


@jit
def _write_place(place: np.ndarray, obs: np.ndarray, state: np.ndarray) -> None:
    for b in range(len(place)):
        for at in range(state.shape[1]):
            here = place[b] == at
            obs[b, 0, at], obs[b, 1, at], state[b, at] = here, here, here


@jit
def _step_two(t: MatrixArrays, actions: np.ndarray) -> None:
    for b in range(len(t.place)):
        first = int(actions[b, 0] == 1)
        second = int(actions[b, 1] == 1)
        reward = TWO_STEP_PAYOFFS[t.place[b], first, second]
        t.rewards[b, 0], t.rewards[b, 1] = reward, reward
        t.terminated[b] = t.place[b] != START
        t.place[b] = START if t.terminated[b] else CERTAIN + first
    store_ended(t, t.terminated)
    _write_place(t.place, t.obs, t.state)


@jit
def _step_m(t: MatrixArrays, steps: int, actions: np.ndarray) -> None:
    """Plays a step of the m-step game. State 0 is the start, followed by the steps - 1 states of
    the left branch and as many of the right one."""
    for b in range(len(t.place)):
        first = int(actions[b, 0] == 1)
        second = int(actions[b, 1] == 1)
        at = t.place[b]
        branch = first if at == START else int(at >= steps)
        last = at in (steps - 1, 2 * steps - 2)
        reward = int(first == branch and second == branch)
        if last and branch == 0:
            reward = 1 + 3 * (first and second)
        t.rewards[b, 0], t.rewards[b, 1] = reward, reward
        t.terminated[b] = last or not reward
        following = at + 1 if at != START else 1 + branch * (steps - 1)
        t.place[b] = START if t.terminated[b] else following
    store_ended(t, t.terminated)
    _write_place(t.place, t.obs, t.state)


class _Tabular(NativeEnv):
    """Two seats that act simultaneously; without chance, so all games are alike."""

    seats = SEATS

    def __init__(self, num_envs: int, choices: tuple[int, int], view: int, state: int) -> None:
        self.num_envs = num_envs
        self.state_size = state
        self.observation_shapes = ((view,), (view,))
        self.action_spaces = (Discrete(choices[0]), Discrete(choices[1]))
        num_actions = None if choices[0] == choices[1] else max(choices)  # None: no action mask
        self.vector_step = empty_step(num_envs, 2, (view,), num_actions=num_actions, state_size=state)
        if self.vector_step.action_mask is not None:
            self.vector_step.action_mask[:] = np.arange(max(choices)) < np.array(choices)[:, None]
        self.internal_state = {"rng": np.zeros((num_envs, RNG_WORDS), np.uint64), "place": np.zeros(num_envs, np.int64)}
        self._table = self.build_table(MatrixArrays)

    def _begin(self) -> None:
        self._table.place[:], self._table.obs[:], self._table.state[:] = 0, 0, 0


class _PlaceGame(_Tabular):
    """A game whose observations and state are the place that it is in, one-hot."""

    def _begin(self) -> None:
        super()._begin()
        _write_place(self._table.place, self._table.obs, self._table.state)


class MatrixGame(_Tabular):
    """Both seats choose simultaneously and get the payoffs of a matrix, `rounds` times.

    `game` names the matrix (default rock_paper_scissors), or `payoff` is one: a row for each action of player_0 with an
    entry for each action of player_1, either one number for both seats or a pair. There are rewards in every round. An
    observation is the joint action of the last round, one-hot, the seat's own first; zeros in the first round. The
    state is the same with player_0's action first, then the elapsed share of `rounds`. An action out of range becomes
    the nearest one.

    Raises ValueError if both `game` and `payoff` are given, for an unknown game, an invalid matrix, or `rounds` below
    1.
    """

    name: ClassVar[str] = "matrix"

    def __init__(
        self, num_envs: int = 64, *, game: MatrixName | None = None, payoff: list[Any] | None = None, rounds: int = 1
    ) -> None:
        if game is not None and payoff is not None:
            raise ValueError(f'game: "{game}" has a payoff of its own; give game or payoff, not both')
        if game is not None and game not in PAYOFFS:
            raise ValueError(f'game: no table is called "{game}"; use {", ".join(PAYOFFS)}, or give payoff')
        check_at_least("rounds", rounds, 1, "a game is played at least once")
        if payoff is None:
            payoff = PAYOFFS[game or "rock_paper_scissors"]
        self.payoff = _table(payoff)
        self.rounds = rounds
        rows, columns, _ = self.payoff.shape
        super().__init__(num_envs, (rows, columns), rows + columns, rows + columns + 1)

    def _advance(self, actions: np.ndarray) -> None:
        _step_round(self._table, self.payoff, self.rounds, actions.astype(np.int32, copy=False))


class TwoStepGame(_PlaceGame):
    """The cooperative two-step game of Rashid et al. (2018), whose action values a sum of per-agent values cannot
    represent.

    In the first step only the action of player_0 counts: after 0 every joint action of the second step earns 7, after 1
    the second step earns [[0, 1], [1, 8]]. Each seat gets the whole reward; the best return is 8. Observation of both
    seats and state: which of the three states the game is in, one-hot. An action out of range is 0.
    """

    name: ClassVar[str] = "two_step"

    def __init__(self, num_envs: int = 64) -> None:
        super().__init__(num_envs, (2, 2), 3, 3)

    def _advance(self, actions: np.ndarray) -> None:
        _step_two(self._table, actions.astype(np.int32, copy=False))


class MStepGame(_PlaceGame):
    """The cooperative m-step game of Mahajan et al. (2019; the rules are those of their code with two good branches),
    which needs committed exploration.

    The first joint action chooses a branch: both 0 the left, both 1 the right; repeating it earns 1 in each of `steps`
    steps, any other joint action 0 and the end. Only the last step of the left branch differs: both 1 earns 4, anything
    else 1. The best return is `steps` + 3; the right branch returns `steps`. Each seat gets the whole reward.
    Observation of both seats and state: which of the 2 `steps` - 1 states the game is in, one-hot; the start, the left
    branch, the right one. An action out of range is 0. Raises ValueError for fewer than 2 steps.
    """

    name: ClassVar[str] = "m_step"

    def __init__(self, num_envs: int = 64, *, steps: int = 10) -> None:
        check_at_least("steps", steps, 2, "a branch is chosen in the first step")
        self.steps = steps
        super().__init__(num_envs, (2, 2), 2 * steps - 1, 2 * steps - 1)

    def _advance(self, actions: np.ndarray) -> None:
        _step_m(self._table, self.steps, actions.astype(np.int32, copy=False))


def _table(payoff: list[Any]) -> np.ndarray:
    """Returns the payoffs of each seat, float64 [A, A, 2], from rows of numbers or pairs."""
    rows = [row if isinstance(row, Sequence) and not isinstance(row, str) else [] for row in payoff]
    if not rows or not rows[0] or len({len(row) for row in rows}) > 1:
        raise ValueError(
            "payoff: give a list of rows, all of one length, a row for each action of player_0 and in it an entry for "
            "each action of player_1, for example [[1, 0], [0, 1]]"
        )
    return np.array([[_pair(entry) for entry in row] for row in rows], np.float64)


def _pair(entry: Any) -> tuple[float, float]:
    pair = (entry, entry)
    if isinstance(entry, list | tuple):
        pair = tuple(entry)
    if len(pair) != 2 or not all(isinstance(value, int | float) and math.isfinite(value) for value in pair):
        raise ValueError(
            f"payoff: {entry!r} is neither a finite number, which both seats get, nor one for each of the two"
        )
    return pair
