"""The comparison of two populations: its value, its error under noise, and the runs that it refuses."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import palestra as pl
from palestra.evaluation.compare import compare_populations, estimate_value


def noisy(truth: np.ndarray, rng: np.random.Generator, games: int) -> tuple[np.ndarray, np.ndarray]:
    """Means and standard errors of games that are won by 1 or lost, with these expected returns."""
    won = np.where(rng.random((*truth.shape, games)) < (1 + truth[..., None]) / 2, 1.0, -1.0)
    return won.mean(-1), won.std(-1, ddof=1) / np.sqrt(games)


def repeated(truth: np.ndarray, times: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    found = []
    for _ in range(times):
        (one, one_error), (two, two_error) = (noisy(truth, rng, 100) for _ in range(2))
        found.append(estimate_value([one, two], [one_error, two_error]))
    return np.array(found)


@pytest.mark.parametrize("shape", [(30, 5), (5, 30)])
@pytest.mark.few(1)
def test_members_of_equal_strength_have_the_value_0(shape: tuple[int, int]) -> None:
    """An equilibrium that is scored on its own games favours the side of 30 members by 0.046."""
    values, stderrs = repeated(np.zeros(shape), 100).T
    assert abs(values.mean()) < 4 * values.std() / 10 < 0.02
    assert 0.7 < stderrs.mean() / values.std() < 1.3


def test_value_of_a_known_game_under_noise() -> None:
    """Matching pennies, whose value is 0, plus 0.2."""
    values, _ = repeated(np.array([[0.7, -0.3], [-0.3, 0.7]]), 100).T
    assert values.mean() == pytest.approx(0.2, abs=0.02)


def test_single_table_is_exact() -> None:
    assert estimate_value([np.array([[1.0, -1.0], [-1.0, 1.0]]) + 0.25], [np.zeros((2, 2))]) == (0.25, 0.0)


def trained(root: Path, name: str, env: Any = None, **config: Any) -> Path:
    plan = {"type": "psro", "iterations": config.pop("iterations", 1), "games_per_cell": 2}
    plan |= config.pop("population", {})
    config = {"env": env or {"type": "kuhn_poker"}, "oracle": {"type": "exact"}, "population": plan} | config
    return pl.train(config, backend={"type": "inline"}, root=root, name=name).path


def test_exact_populations_have_a_value_without_an_error(tmp_path: Path) -> None:
    weak, strong = trained(tmp_path, "weak"), trained(tmp_path, "strong", iterations=6)
    found = compare_populations(strong, weak, 4)
    assert found.stderr == 0 < found.performance
    assert compare_populations(weak, strong, 4).performance == pytest.approx(-found.performance)
    assert {player: table.shape for player, table in found.returns.items()} == {"player_0": (7, 2), "player_1": (7, 2)}


def test_symmetric_population_is_not_compared_with_one_for_each_seat(tmp_path: Path) -> None:
    both, each = trained(tmp_path, "both", symmetric=True), trained(tmp_path, "each")
    for pair, values in (((both, each), "True in one and False"), ((each, both), "False in one and True")):
        with pytest.raises(ValueError, match=f"cannot be compared: symmetric is {values} in the other"):
            compare_populations(*pair, 4)


def test_general_sum_game_is_refused(tmp_path: Path) -> None:
    env = {"type": "matrix", "game": "prisoners_dilemma", "num_envs": 8}
    net = {"type": "net", "policy": {"hidden": [4]}, "algorithm": {"type": "ppo", "rollout_length": 4}}
    plan = {"env_steps": 64, "meta_solver": {"type": "uniform"}, "nash_conv_every": 0}
    run = trained(tmp_path, "pd", env, population=plan, oracle=net)
    with pytest.raises(ValueError, match="only populations of zero-sum games can be compared"):
        compare_populations(run, run, 4)
