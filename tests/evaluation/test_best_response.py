"""Learned responses: mean returns with their standard errors against exact values, and the algorithm that trains a
response."""

import math
from pathlib import Path

import pytest

import palestra as pl
from palestra.evaluation.best_response import NUM_ENVS, RESPONSE, _mean_returns, _response_tree, learn_best_responses
from palestra.evaluation.game_policy import enumerate_game, policy_table
from palestra.evaluation.target import find_target
from palestra.evaluation.vector import open_vector_eval
from palestra.populations.tabular.game_tree import end_probabilities, realization_plan


def train(root: Path, env: str, **algorithm: object) -> Path:
    """A run of one rollout, in which a network hardly learns."""
    run = pl.train(
        env={"type": env, "num_envs": 32},
        policies={"default": {"type": "net", "hidden": [8], "lr": 1e-3}},
        algorithm={"type": "ppo", "rollout_length": 16} | algorithm,
        env_steps=512,
        root=root,
        name="duel",
    )
    return run.path


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.few(1)
def test_mean_return_and_standard_error_equal_exact_play(greedy: bool, tmp_path: Path) -> None:
    """Mean and variance of a game's return follow from the tree. The standard error from 10 batches has 9 degrees of
    freedom, so it is between 0.33 and 1.8 times the true one in 999 of 1,000 evaluations."""
    target, episodes = find_target(train(tmp_path, "leduc_poker")), 2_000
    with open_vector_eval(target, {}, {}, num_envs=NUM_ENVS, greedy=greedy) as setup:
        tree = enumerate_game(setup.env_config)
        policy = policy_table(target, setup.env, tree, setup.policy_names, greedy)
        found = _mean_returns(setup.env, setup.players(setup.policy_names), episodes, 0)
    likely = end_probabilities(tree, realization_plan(tree, policy))
    exact = likely @ tree.returns
    errors = ((likely @ tree.returns**2 - exact**2) / episodes) ** 0.5
    assert errors.min() > 0.01
    for (mean, stderr), value, error in zip(found, exact, errors, strict=True):
        assert mean == pytest.approx(value, abs=4 * error)
        assert 0.33 < stderr / error < 1.8


@pytest.mark.parametrize(
    ("env", "algorithm", "response"),
    [
        pytest.param("kuhn_poker", {"type": "trpo"}, "trpo", marks=pytest.mark.slow),
        pytest.param("kuhn_poker", {"type": "pqn"}, "pqn", marks=pytest.mark.slow),
        ("two_step", {"type": "pqn", "mixer": "vdn"}, "pqn"),
        ("two_step", {"type": "qmix"}, "ppo"),
        pytest.param("kuhn_poker", {"type": "nfsp"}, "ppo", marks=pytest.mark.slow),
    ],
)
def test_response_is_trained_by_the_algorithm_of_the_run(
    env: str, algorithm: dict[str, str], response: str, tmp_path: Path
) -> None:
    run = train(tmp_path, env, **algorithm)
    with open_vector_eval(find_target(run), {}, {}, num_envs=4, greedy=False) as setup:
        seats = list(setup.env.seats)
        assert _response_tree(setup, seats[0], 512, 0)["algorithm"]["type"] == response
    if response == "ppo":
        return  # which other tests train
    found = learn_best_responses(find_target(run), steps=512, episodes=20)
    assert [one.player for one in found] == seats and all(math.isfinite(one.gain) for one in found)


def test_response_is_trained_by_the_algorithm_of_its_seat(tmp_path: Path) -> None:
    """Where policies have algorithms of their own: one that trains a policy alone, else PPO."""
    net = {"type": "net", "hidden": [8]}
    run = pl.train(
        env={"type": "kuhn_poker", "num_envs": 32},
        policies={"player_0": net | {"algorithm": "a2c"}, "player_1": net | {"algorithm": "nfsp"}},
        algorithm={"type": "ppo", "rollout_length": 16},
        env_steps=512,
        root=tmp_path,
        name="duel",
    )
    with open_vector_eval(find_target(run.path), {}, {}, num_envs=4, greedy=False) as setup:
        trees = [_response_tree(setup, seat, 512, 0) for seat in setup.env.seats]
    assert [tree["algorithm"]["type"] for tree in trees] == ["a2c", "ppo"]
    assert all("algorithm" not in tree["policies"][RESPONSE] for tree in trees)
