"""Games of payoff tables: OpenSpiel's, those of the papers, and the two-step game by hand."""

from itertools import product
from typing import Any

import numpy as np
import pyspiel
import pytest

from palestra.envs.vector.matrix import MatrixGame, MStepGame, TwoStepGame
from palestra.envs.vector_check import check_vector_env

THEIRS = {
    "rock_paper_scissors": "matrix_rps",
    "matching_pennies": "matrix_mp",
    "prisoners_dilemma": "matrix_pd",
    "stag_hunt": "matrix_sh",
    "coordination": "matrix_coordination",
}


def table(env: MatrixGame) -> np.ndarray:
    """The rewards [A, A, 2] of each seat, from playing every joint action of a one-shot game."""
    rows, columns = (space.n for space in env.action_spaces)  # type: ignore[union-attr]
    env.reset(np.arange(env.num_envs))
    frame = env.step(np.array(list(product(range(rows), range(columns)))))
    assert frame.terminated.all()
    return frame.rewards.reshape(rows, columns, 2).copy()


@pytest.mark.parametrize("game", THEIRS)
def test_payoffs_equal_openspiel(game: Any) -> None:
    theirs = pyspiel.load_matrix_game(THEIRS[game])
    env = MatrixGame(theirs.num_rows() * theirs.num_cols(), game=game)
    assert np.array_equal(table(env), np.stack([theirs.row_utilities(), theirs.col_utilities()], 2))


def test_payoffs_equal_claus_and_boutilier() -> None:
    climbing, penalty = table(MatrixGame(9, game="climbing")), table(MatrixGame(9, game="penalty"))
    assert climbing[..., 0].tolist() == [[11, -30, 0], [-30, 7, 6], [0, 0, 5]]
    assert penalty[..., 0].tolist() == [[10, 0, -100], [0, 2, 0], [-100, 0, 10]]
    assert np.array_equal(climbing[..., 0], climbing[..., 1]) and np.array_equal(penalty[..., 0], penalty[..., 1])


def test_custom_payoff_table() -> None:
    own = table(MatrixGame(6, payoff=[[1, [2, 3], (0.5, -4)], [(5, 6), 7, -1]]))
    assert own.tolist() == [[[1, 1], [2, 3], [0.5, -4]], [[5, 6], [7, 7], [-1, -1]]]


def test_rounds_by_hand() -> None:
    env = MatrixGame(1, payoff=[[0, 1, 2], [3, 4, 5]], rounds=2)
    frame = env.reset(np.array([0]))
    assert frame.action_mask is not None and frame.state is not None and frame.final_state is not None
    assert frame.action_mask[0].tolist() == [[True, True, False], [True, True, True]] and frame.agent_mask.all()
    assert not frame.obs.any() and not frame.state.any()
    env.step(np.array([[1, 2]]))
    assert frame.rewards[0].tolist() == [5, 5] and not frame.done[0]
    assert frame.obs[0].tolist() == [[0, 1, 0, 0, 1], [0, 0, 1, 0, 1]] and frame.state[0].tolist() == [
        0,
        1,
        0,
        0,
        1,
        0.5,
    ]
    env.step(np.array([[0, 1]]))
    assert frame.rewards[0].tolist() == [1, 1] and frame.terminated[0] and not frame.truncated[0]
    assert frame.final_obs[0].tolist() == [[1, 0, 0, 1, 0], [0, 1, 0, 1, 0]]
    assert frame.final_state[0].tolist() == [1, 0, 0, 1, 0, 1]
    assert not frame.obs.any() and not frame.state.any()
    assert not env.step(np.array([[0, 0]])).done[0]  # the next game has two rounds again


def test_out_of_range_actions_are_clipped() -> None:
    env = MatrixGame(2, payoff=[[1, 2], [3, 4]])
    env.reset(np.arange(2))
    assert env.step(np.array([[-5, 9], [2, -1]])).rewards[:, 0].tolist() == [2, 3]


@pytest.mark.parametrize(
    ("actions", "total"),
    [
        *[([[0, a], [b, c]], 7) for a, b, c in product((0, 1), repeat=3)],
        ([[1, 0], [0, 0]], 0),
        ([[1, 1], [0, 1]], 1),
        ([[1, 0], [1, 0]], 1),
        ([[1, 1], [1, 1]], 8),
    ],
)
def test_two_step_game_by_hand(actions: list[list[int]], total: float) -> None:
    env = TwoStepGame(1)
    frame = env.reset(np.array([0]))
    assert frame.state is not None and frame.final_state is not None
    assert frame.obs[0].tolist() == [[1, 0, 0]] * 2 and frame.state[0].tolist() == [1, 0, 0]
    env.step(np.array(actions[:1]))
    where = [0.0, 0, 1] if actions[0][0] else [0.0, 1, 0]
    assert not frame.rewards.any() and not frame.done[0]
    assert frame.obs[0].tolist() == [where] * 2 and frame.state[0].tolist() == where
    env.step(np.array(actions[1:]))
    assert frame.rewards[0].tolist() == [total, total] and frame.terminated[0] and not frame.truncated[0]
    assert frame.final_obs[0].tolist() == [where] * 2 and frame.final_state[0].tolist() == where
    assert frame.obs[0].tolist() == [[1, 0, 0]] * 2 and frame.state[0].tolist() == [1, 0, 0]


def test_two_step_game_maps_out_of_range_actions_to_zero() -> None:
    env = TwoStepGame(1)
    env.reset(np.array([0]))
    env.step(np.array([[9, 1]]))
    assert env.vector_step.obs[0, 0].tolist() == [0, 1, 0]
    assert env.step(np.array([[-1, 5]])).rewards[0, 0] == 7


@pytest.mark.parametrize(
    ("actions", "rewards"),
    [
        ("00 00 00 11", [1, 1, 1, 4]),
        ("00 00 00 00", [1, 1, 1, 1]),
        ("00 00 00 01", [1, 1, 1, 1]),
        ("00 00 11", [1, 1, 0]),
        ("00 10", [1, 0]),
        ("01", [0]),
        ("10", [0]),
        ("11 11 11 11", [1, 1, 1, 1]),
        ("11 11 11 00", [1, 1, 1, 0]),
        ("11 11 11 01", [1, 1, 1, 0]),
        ("11 00", [1, 0]),
    ],
)
def test_m_step_game_by_hand(actions: str, rewards: list[int]) -> None:
    env = MStepGame(1, steps=4)
    frame = env.reset(np.array([0]))
    assert frame.state is not None and frame.final_state is not None
    branch, joint = int(actions[0]), actions.split()
    for step, pair in enumerate(joint):
        at = step if branch == 0 or step == 0 else 3 + step
        here = [float(n == at) for n in range(7)]
        assert frame.obs[0].tolist() == [here] * 2 and frame.state[0].tolist() == here
        env.step(np.array([[int(pair[0]), int(pair[1])]]))
        assert frame.rewards[0].tolist() == [rewards[step]] * 2
        assert frame.terminated[0] == (step + 1 == len(joint)) and not frame.truncated[0]
    assert frame.final_obs[0].tolist() == [here] * 2 and frame.final_state[0].tolist() == here
    assert frame.obs[0].tolist() == [[1.0] + [0.0] * 6] * 2


def test_m_step_game_refuses_one_step() -> None:
    with pytest.raises(ValueError, match="steps: 1 is too small"):
        MStepGame(1, steps=1)


@pytest.mark.parametrize(
    "make",
    [
        MatrixGame,
        TwoStepGame,
        MStepGame,
        lambda games: MStepGame(games, steps=2),
        lambda games: MatrixGame(games, game="penalty", rounds=3),
        lambda games: MatrixGame(games, payoff=[[(1, 2), 0, 3]], rounds=5),
    ],
)
def test_envs_pass_the_vector_env_check(make: Any) -> None:
    check_vector_env(make, steps=50)


SHAPE, ENTRY = "payoff: give a list of rows", "is neither a finite number"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_envs": 0}, "num_envs: 0 is too small"),
        ({"rounds": 0}, "rounds: 0 is too small"),
        ({"game": "chicken"}, 'no table is called "chicken"; use rock_paper_scissors, '),
        ({"game": "climbing", "payoff": [[1]]}, "give game or payoff, not both"),
        ({"payoff": []}, SHAPE),
        ({"payoff": [[]]}, SHAPE),
        ({"payoff": [1, 2]}, SHAPE),
        ({"payoff": [[1, 2], [3]]}, SHAPE),
        ({"payoff": [[1, "a"]]}, "'a' " + ENTRY),
        ({"payoff": [[(1, 2, 3)]]}, ENTRY),
        ({"payoff": [[float("nan")]]}, "nan " + ENTRY),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MatrixGame(**options)


def test_two_step_game_refuses_zero_num_envs() -> None:
    with pytest.raises(ValueError, match="num_envs: 0 is too small"):
        TwoStepGame(0)
