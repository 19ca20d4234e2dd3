"""The final strategies of a run of each kind of population, and what `publish` and `league exploit` make of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import invoke
from helpers.terminal_text import plain

import palestra as pl
from palestra.core.config import load
from palestra.evaluation.final_strategies import describe_mixtures, final_mixtures
from palestra.evaluation.report.population_data import read_record
from palestra.populations.build.validation import validate_population

NET: dict[str, Any] = {
    "type": "net",
    "policy": {"hidden": [4]},
    "algorithm": {"type": "ppo", "rollout_length": 4, "epochs": 1, "minibatches": 1},
}
RPS = {"type": "matrix", "game": "rock_paper_scissors", "num_envs": 16}


def trained(root: Path, population: dict[str, Any], oracle: dict[str, Any] | None = None, **more: Any) -> Path:
    env = more.pop("env", {"type": "kuhn_poker", "num_envs": 16})
    config = {"env": env, "population": population, "oracle": oracle or {"type": "exact"}, **more}
    return pl.train(**config, backend={"type": "inline"}, root=root, name="run").path


def strategies(path: Path) -> Any:
    return final_mixtures(read_record(path), validate_population(load(path / "config.yaml")).population)


@pytest.mark.parametrize("of", ["average", "latest"])
def test_published_policy_of_fictitious_play_has_the_nash_conv_of_the_run(of: str, tmp_path: Path) -> None:
    plan = {"type": "self_play", "slices": 12, "matchmaker": {"type": "history"}, "nash_conv_of": of}
    run = trained(tmp_path, plan)
    done = invoke("publish", run, "--out", tmp_path / "policy.json")
    last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if "nash_conv" in line][-1]
    policy = pl.GamePolicy.load(tmp_path / "policy.json")
    assert policy.nash_conv == pytest.approx(last["nash_conv"], abs=1e-9)
    assert (policy.nash_conv < 0.2) == (of == "average")
    names = ["uniform", *(f"player_0-{n}" for n in range(1, 13))] if of == "average" else ["player_0-12"]
    assert policy.mixtures["player_0"] == pytest.approx(dict.fromkeys(names, 1 / len(names)))
    expected = (
        "player_0: a mixture of 13 members" if of == "average" else "player_0: player_0-12; player_1: player_1-12"
    )
    assert expected in plain(done.output)


def test_final_strategy_of_psro_is_its_last_meta_strategy(tmp_path: Path) -> None:
    run = trained(tmp_path, {"type": "psro", "iterations": 3})
    last = [line for line in read_record(run).metrics if line["policy"] == "player_1" and "value" in line][-1]
    mix = {key[4:]: p for key, p in last.items() if key.startswith("mix/") and p > 0}
    assert strategies(run)["player_1"] == mix and sum(mix.values()) == pytest.approx(1)


def test_final_strategy_of_a_league_is_the_newest_main_agent(tmp_path: Path) -> None:
    plan = {"type": "league", "slices": 2, "min_slices": 1, "max_slices": 1, "env_steps": 64, "games_per_cell": 0}
    run = trained(tmp_path, plan, NET, env=RPS)
    assert read_record(run).members[-1].info["role"] == "league_exploiter"
    assert strategies(run) == {"agent": {"main_0-2": 1.0}}
    done = invoke("league", "exploit", run, "--steps", 64, "--games", 4, "--backend", "inline")
    assert done.exit_code == 0 and "final strategies: agent: main_0-2" in plain(done.output), done.output


@pytest.mark.parametrize("best", [0, 1, 2])
def test_final_strategy_of_pbt_is_the_best_rated_learner(best: int, tmp_path: Path) -> None:
    plan = {
        "type": "pbt",
        "num_learners": 3,
        "slices": 1,
        "env_steps": 64,
        "search": {"lr": {"low": 1e-3, "high": 1e-2}},
    }
    run = trained(tmp_path, plan, NET, env=RPS)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rated = [line | {"rating": 0.9 if line["policy"] == f"learner_{best}" else 0.2} for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rated))
    assert strategies(run) == {"agent": {f"learner_{best}-1": 1.0}}


def test_run_without_a_final_strategy_is_refused(tmp_path: Path) -> None:
    plan = {
        "type": "league",
        "slices": 1,
        "main_exploiters": 0,
        "league_exploiters": 0,
        "env_steps": 64,
        "games_per_cell": 0,
    }
    run = trained(tmp_path, plan, NET, env=RPS)
    members = json.loads((run / "population.json").read_text())
    (run / "population.json").write_text(json.dumps(members[:1]))
    with pytest.raises(ValueError, match="has no frozen copy of a main agent yet: train it for longer"):
        strategies(run)


def test_mixtures_are_listed_by_name_unless_they_are_long() -> None:
    many = dict.fromkeys("abcde", 0.2)
    text = describe_mixtures({"row": {"a": 0.25, "b": 0.75}, "column": many})
    assert text == "row: a 0.25, b 0.75; column: a mixture of 5 members"
