"""Policies whose network plays all seats of a team: runs, evaluations, opponents, and loading from files."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from palestra.core.config import dump, validate
from palestra.evaluation.best_response import RESPONSE, _others, _response_tree
from palestra.evaluation.evaluate import evaluate
from palestra.evaluation.target import find_target
from palestra.evaluation.vector import open_vector_eval
from palestra.runs import Run, read_lines
from palestra.runs.loop import restore_checkpoint, run_training
from palestra.vector.build.build import build_vector_run
from palestra.vector.config import VectorConfig

TREE = {
    "name": "team",
    "env_steps": 64 * 20,
    "env": {"type": "simple_spread", "num_envs": 16, "max_cycles": 5},
    "policies": {"squad": {"type": "net", "hidden": [8], "lr": 1e-2, "encoder": "attention"}},
    "algorithm": {"type": "mat", "rollout_length": 20},
    "evals": {"held_out": {"episodes": 16, "every": 10_000, "replays": 0}},
}


def train_run(tree: Mapping[str, Any], root: Path) -> Path:
    config = validate(VectorConfig, tree)
    with Run.create(root, dump(config), config.name) as run:
        trainer = build_vector_run(config)
        restore_checkpoint(trainer, run)
        assert run_training(trainer, run)
        return run.path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_run(TREE, tmp_path_factory.mktemp("team"))


def test_evaluation_of_a_saved_team_equals_that_of_its_run(run: Path) -> None:
    """Three separate policies of one seat each would not observe each other, and play differently."""
    last = read_lines(run / "evals.jsonl")[-1]
    found = evaluate(run, episodes=16, greedy=True)
    assert found.metrics["return"] == pytest.approx(last["return"], abs=1e-6)
    assert set(found.policy_names.values()) == {"squad@" + found.policy_names["agent_0"].split("@")[1]}


def test_saved_team_plays_with_others(run: Path) -> None:
    found = evaluate(run, seats={"agent_1": "random"}, episodes=4)
    assert found.policy_names["agent_1"] == "random/agent_1" and found.policy_names["agent_2"].startswith("squad@")


def test_saved_team_plays_with_more_seats(run: Path) -> None:
    """It attends to entities, so observations may be longer."""
    found = evaluate(run, env={"agents": 5}, episodes=4)
    assert len(found.policy_names) == 5 and all(name.startswith("squad@") for name in found.policy_names.values())


def test_saved_team_is_one_frozen_player(run: Path, tmp_path: Path) -> None:
    """Beside a policy in training; seats of another frozen policy are separate players."""
    frozen = {"type": "frozen", "path": f"{run}:squad", "greedy": True}
    policies = {"new": {"type": "net", "hidden": [4]}, "old": frozen}
    tree = TREE | {"policies": policies, "seats": {"agent_0": "new", "*": "old"}, "algorithm": {"type": "ppo"}}
    with closing(build_vector_run(validate(VectorConfig, tree | {"evals": {}}))) as trainer:
        (player,) = trainer.fixed_players
        assert list(player.seats) == [1, 2] and player.name == "old/agent_1+agent_2"


def test_response_meets_the_others_as_a_team(run: Path) -> None:
    with open_vector_eval(find_target(run), {}, {}, num_envs=4, greedy=True) as setup:
        tree = _response_tree(setup, "agent_1", 100, 0)
        players = setup.players(_others(setup, "agent_1"))
    assert tree["seats"] == {"agent_0": "other_agent_0", "agent_1": RESPONSE, "agent_2": "other_agent_0"}
    assert list(tree["policies"]) == [RESPONSE, "other_agent_0"] and [list(one.seats) for one in players] == [[0, 2]]
