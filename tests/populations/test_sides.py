"""Populations of sides: several seats that a member plays as a whole."""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from helpers.toy_populations import league_mixture
from typer.testing import CliRunner

import palestra as pl
from palestra.cli.main import app
from palestra.core.config import validate
from palestra.evaluation.final_strategies import final_mixtures
from palestra.evaluation.report.population_data import read_record
from palestra.populations.build.build import PopulationConfig, build_population, sides_of_run
from palestra.populations.plans.league import League, LeagueConfig
from palestra.populations.plans.pbt import PBTConfig
from palestra.populations.population import Member, Population, Sides
from palestra.populations.task_json import CROSSPLAY_FILE, read_crossplay
from palestra.populations.tasks import PlayTask, TrainTask
from palestra.runs import read_lines

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


LEAGUE = {
    "type": "league",
    "slices": 2,
    "min_slices": 1,
    "max_slices": 2,
    "league_exploiters": 1,
    "env_steps": 512,
    "games_per_cell": 40,
}
PLANS = {
    "psro": PSRO,
    "self_play": {"type": "self_play", "slices": 2, "env_steps": 512, "nash_conv_every": 0},
    "league": LEAGUE,
    "pbt": {"type": "pbt", "num_learners": 2, "slices": 2, "select_every": 1, "env_steps": 512, "truncation": 0.5},
}
NEWEST = {"league": "main_0-2", "pbt": "learner_1-2"}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.few(2)
def test_sides_train_against_each_other(tmp_path: Path, plan: dict[str, Any]) -> None:
    config = validate(PopulationConfig, TREE | {"population": plan})
    assert sides_of_run(config) == Sides(("left", "right"), ((0, 2), (1, 3)))
    run = pl.train(config, root=tmp_path)
    crossed = CliRunner().invoke(app, ["league", "crossplay", str(run.path), "--games", "50"])
    assert crossed.exit_code == 0, crossed.output
    shown = CliRunner().invoke(app, ["league", "standings", str(run.path)])
    assert shown.exit_code == 0, shown.output
    for side in ("left", "right"):
        newest = NEWEST.get(plan["type"])
        assert (f"{side}_{newest}" if newest else f"{side}-2") in shown.output


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.few(2)
def test_one_population_plays_both_sides(tmp_path: Path, plan: dict[str, Any]) -> None:
    """Each member's games are of whole sides, and a member against itself earns nothing."""
    config = validate(PopulationConfig, TREE | {"symmetric": True, "population": plan})
    assert sides_of_run(config) == Sides(("agent", "agent"), ((0, 2), (1, 3)))
    run = pl.train(config, root=tmp_path)
    record = read_record(run.path, ("agent", "agent"))
    assert {member.player for member in record.members} == {"", "agent"}
    crossed = CliRunner().invoke(app, ["league", "crossplay", str(run.path), "--games", "50"])
    assert crossed.exit_code == 0, crossed.output
    cells = [cell for _, cell in read_crossplay(run.path / CROSSPLAY_FILE)]
    assert cells and all(sum(cell.mean) == pytest.approx(0) for cell in cells)


def test_learners_of_a_league_of_sides_meet_the_other_side_only(tmp_path: Path) -> None:
    """In all slices and games; each side has learners of every role, and the run's result has a member of each."""
    run = pl.train(validate(PopulationConfig, TREE | {"population": LEAGUE}), root=tmp_path)
    other = {"left": "right", "right": "left"}
    record = read_record(run.path, ("left", "right"))
    trained = [done.task for done in record.tasks if isinstance(done.task, TrainTask)]
    roles = ("main", "main_exploiter", "league_exploiter")
    learners = {f"{side}_{role}_0" for side in other for role in roles}
    assert {task.learner for task in trained} == learners
    for task in trained:
        assert task.learner.startswith(task.player) and not task.self_play
        assert list(task.opponents.mixes) == [other[task.player]]
        for name in task.opponents.names():
            assert name == "uniform" or name.startswith(other[task.player])
    cells = [cell for done in record.tasks if isinstance(done.task, PlayTask) for cell in done.task.cells]
    assert cells
    for left, right in cells:
        assert left == "uniform" or left.startswith("left")
        assert right == "uniform" or right.startswith("right")
    final = final_mixtures(record, LeagueConfig())
    assert final == {side: {f"{side}_main_0-2": 1.0} for side in other}


def test_main_exploiters_of_a_side_target_the_main_agents_of_the_other() -> None:
    population = Population(("hunters", "prey"))
    population.add(Member("uniform", ""))
    plan = League(LeagueConfig(explore_share=0.0), population, ("hunters", "prey"))
    mixture = partial(league_mixture, plan.logic)
    main, exploiter = plan.learners["hunters_main_0"], plan.learners["hunters_main_exploiter_0"]
    assert mixture(main) == mixture(exploiter) == {"uniform": 1.0}  # nobody has trained
    prey = plan.learners["prey_main_0"]
    prey.latest = "prey_main_0-1"
    assert mixture(exploiter) == {"prey_main_0": 1.0}
    assert mixture(main) == {"uniform": 0.5, "prey_main_0": 0.5}
    assert mixture(prey) == {"uniform": 1.0}
    population.add(Member("prey_main_exploiter_0-1", "prey", "members/x"))
    plan.learners["prey_main_exploiter_0"].frozen_copies.append("prey_main_exploiter_0-1")
    plan.win_rates.add("hunters_main_0", "prey_main_exploiter_0-1", games=100, points=20)
    assert mixture(main)["prey_main_exploiter_0-1"] > 0.15  # the exploiter that targets hunters, and beats them
    assert "prey_main_exploiter_0-1" not in mixture(prey)


def test_a_league_of_two_single_seats_has_an_exact_distance(tmp_path: Path) -> None:
    """Best responses of each player of Kuhn poker to the other's: a NashConv once both have a main agent's copy."""
    tree = {
        "env": {"type": "kuhn_poker"},
        "seats": {"player_0": "first", "player_1": "second"},
        "population": LEAGUE | {"slices": 3, "nash_conv_every": 1},
        "oracle": {"type": "exact"},
        "backend": {"type": "inline"},
    }
    run = pl.train(validate(PopulationConfig, tree), root=tmp_path)
    found = [line["nash_conv"] for line in read_lines(run.path / "metrics.jsonl") if "nash_conv" in line]
    assert found and all(0 <= gap <= 4 for gap in found)


def test_learners_of_a_side_copy_one_another_only(tmp_path: Path) -> None:
    plan = PLANS["pbt"] | {"slices": 4}
    run = pl.train(validate(PopulationConfig, TREE | {"population": plan}), root=tmp_path)
    record = read_record(run.path, ("left", "right"))
    trained = [done.task for done in record.tasks if isinstance(done.task, TrainTask)]
    copied = [task for task in trained if task.copied_from]
    assert copied
    assert all(task.copied_from.startswith(task.player) for task in copied)
    final = final_mixtures(record, PBTConfig())
    assert [next(iter(mix)).partition("_")[0] for mix in final.values()] == ["left", "right"]


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
        ({"symmetric": True, "seats": {"left_*": "left"}}, r"equally many seats \(left has 2, right_0 has 1, right_1"),
        (
            {"symmetric": True, "oracle": TREE["oracle"] | {"policy": {"seat_one_hot": True}}},
            "leave seat_one_hot out",
        ),
        ({"population": {"type": "league"}, "seats": {"left_*": "left"}}, "or two sides.* has players left, right_0"),
        ({"population": PLANS["pbt"] | {"self_play": 0.5}}, "self_play: 0.5 has no effect between sides"),
        (
            {"population": PLANS["pbt"] | {"search": {"speed": {"low": 0.1, "high": 1}}}},
            'population.search.speed: "speed" is not a setting of a2c',
        ),
        (
            {"population": PLANS["pbt"] | {"search": {"gamma": {"low": 0.5, "high": 3}}}},
            "population.search.gamma: algorithm.gamma: .* less than or equal to 1",
        ),
        ({"population": PSRO | {"nash_conv_every": 1}}, "seats gives one several: set population.nash_conv_every: 0"),
        ({"oracle": TREE["oracle"] | {"payoffs": "exact"}}, "exact results are of players with one seat"),
    ],
)
def test_sides_that_cannot_be_are_refused_with_the_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_population(validate(PopulationConfig, TREE | changes))
