"""An algorithm of a user's own, named by a config."""

import numpy as np
import pytest
from helpers.toy_algorithms import Median, Reinforce

from palestra.core.config import dump, parse, validate
from palestra.runs import Run, read_lines
from palestra.runs.episodes import load_episodes
from palestra.runs.loop import run_training
from palestra.text.build.build import build
from palestra.text.config import TextConfig

OWN = {"type": "helpers.toy_algorithms:Reinforce", "baseline": 0.25}


def config(base, algorithm, **more):
    speech = {"type": "lora", "base": str(base), "lr": 2e-2, "sampling": {"max_tokens": 1}}
    tree = {"episodes": 32, "steps": 4, "env": {"type": "helpers.toys:Whisper"}, "policies": {"default": speech}}
    return validate(TextConfig, tree | {"algorithm": algorithm} | more)


def test_custom_algorithm_trains_and_its_config_is_stored(base, tmp_path) -> None:
    own = config(base, OWN)
    assert isinstance(own.algorithm, Reinforce) and own.algorithm_label == "helpers.toy_algorithms:Reinforce"
    again = validate(TextConfig, parse(dump(own)))
    assert again == own and again.algorithm.baseline == 0.25
    with Run.create(tmp_path, dump(own), "own") as run:
        assert run_training(build(again), run)
    lines = [line for line in read_lines(run.path / "metrics.jsonl") if "worth" in line]
    assert len(lines) == own.steps and all(line["grad_norm"] > 0 for line in lines)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Renamed", "renamed_loss returned a metric return, which the run logs itself"),
        ("Detached", "detached_loss returned a tensor of shape .* without gradient as loss"),
    ],
)
def test_own_loss_returns_a_gradient_and_metrics_of_its_own(base, tmp_path, name, says) -> None:
    own = config(base, {"type": f"helpers.toy_algorithms:{name}"}, steps=1)
    with Run.create(tmp_path, dump(own), "own") as run, pytest.raises(ValueError, match=says):
        run_training(build(own), run)


def test_own_credit_rule_gives_the_advantages_of_groups(base, tmp_path) -> None:
    own = config(base, {"type": "helpers.toy_algorithms:Median", "branch_at": "root", "group_size": 3}, steps=1)
    assert isinstance(own.algorithm, Median)
    with Run.create(tmp_path, dump(own), "own") as run:
        assert run_training(build(validate(TextConfig, parse(dump(own)))), run)
    episodes = load_episodes(run.path / "episodes" / "step-000000.parquet")
    for group in (group for episode in episodes for group in own.algorithm.groups(episode)):
        advantages = [nodes[0].advantages[group.seat] for nodes in group.nodes]
        assert advantages == [value - np.median(group.values) for value in group.values]
    assert any(node.advantages["guide"] for episode in episodes for node in episode.nodes if "guide" in node.answers)


def test_stage_may_use_a_custom_algorithm(base) -> None:
    staged = config(base, {"type": "grpo"}, stages=[{"name": "own", "algorithm": OWN}])
    assert isinstance(next(staged.stage_configs()).algorithm, Reinforce)
    assert validate(TextConfig, parse(dump(staged))) == staged


@pytest.mark.parametrize(
    "algorithm, says",
    [
        ({"type": "helpers.toy_algorithms:Nobody"}, "cannot be loaded"),
        ({"type": "no_such_module:Mine"}, "there is no module no_such_module in "),
        ({"type": "helpers.toy_algorithms:Stranger"}, "is not a subclass of"),
        (OWN | {"base_line": 1}, "unknown key base_line: did you mean baseline?"),
        ({"type": "grop"}, "unknown algorithm.type 'grop': did you mean grpo?"),
    ],
)
def test_invalid_custom_algorithms_are_refused_with_the_reason(base, algorithm, says) -> None:
    with pytest.raises(ValueError) as caught:
        config(base, algorithm)
    assert says in str(caught.value)
