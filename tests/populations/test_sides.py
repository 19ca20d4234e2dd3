"""Populations of sides: several seats that a member plays as a whole."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import palestra as pl
from palestra.cli.main import app
from palestra.core.config import validate
from palestra.populations.build.build import PopulationConfig, build_population, players_by_side

TREE: dict[str, Any] = {
    "name": "tug",
    "env": {"type": "pettingzoo", "env": "helpers.toy_teams:Tug", "num_envs": 16},
    "seats": {"left_*": "left", "right_*": "right"},
    "population": {
        "type": "psro",
        "iterations": 2,
        "env_steps": 512,
        "games_per_cell": 40,
        "nash_conv_every": 0,
    },
    "oracle": {
        "type": "net",
        "policy": {"hidden": [16], "lr": 3e-3},
        "algorithm": {"type": "a2c", "rollout_length": 1, "gamma": 1.0},
    },
    "backend": {"type": "inline"},
}
PSRO = TREE["population"]


@pytest.mark.parametrize("plan", [PSRO, {"type": "self_play", "slices": 2, "env_steps": 512, "nash_conv_every": 0}])
def test_sides_train_against_each_other(tmp_path: Path, plan: dict[str, Any]) -> None:
    config = validate(PopulationConfig, TREE | {"population": plan})
    assert players_by_side(config) == ("left", "right")
    run = pl.train(config, root=tmp_path)
    crossed = CliRunner().invoke(app, ["league", "crossplay", str(run.path), "--games", "50"])
    assert crossed.exit_code == 0, crossed.output
    shown = CliRunner().invoke(app, ["league", "standings", str(run.path)])
    assert shown.exit_code == 0, shown.output
    assert "left-1" in shown.output and "right-2" in shown.output


def test_hunters_and_prey_of_different_shape(tmp_path: Path) -> None:
    env = {"type": "simple_tag", "num_envs": 8}
    seats = {"adversary_*": "hunters", "agent_*": "prey"}
    plan = PSRO | {"iterations": 1, "env_steps": 200, "games_per_cell": 8, "meta_solver": {"type": "prd"}}
    run = pl.train(validate(PopulationConfig, TREE | {"env": env, "seats": seats, "population": plan}), root=tmp_path)
    _, *rows = (run.path / "payoffs.csv").read_text().splitlines()
    cells = [tuple(row.split(",")[:2]) for row in rows]
    assert sorted(cells) == sorted(product(["uniform", "hunters-1"], ["uniform", "prey-1"]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"seats": {"middle_*": "left"}},
            'seats names "middle_\\*", but env "pettingzoo" plays left_0, right_0, left_1',
        ),
        ({"seats": {"*": "all"}}, "seats gives all seats to all, which has no opponent then"),
        ({"symmetric": True}, "symmetric: true has one population for every seat, without sides"),
        ({"population": {"type": "league"}}, "population.type league has one population for every seat"),
        ({"population": PSRO | {"nash_conv_every": 1}}, "seats gives one several: set population.nash_conv_every: 0"),
        ({"oracle": TREE["oracle"] | {"payoffs": "exact"}}, "exact results are of players with one seat"),
    ],
)
def test_sides_that_cannot_be_are_refused_with_the_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_population(validate(PopulationConfig, TREE | changes))
