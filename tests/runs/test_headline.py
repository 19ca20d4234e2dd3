"""Names of a run's metrics distinguish search from training, and greedy evaluation from sampled training."""

import pytest

from palestra.runs.headline import (
    algorithm_label,
    eval_interval,
    eval_label,
    format_eval,
    headline_eval,
    held_out_label,
    total_steps,
    training_return_label,
    training_success_label,
)

SEARCH = {"type": "grpo", "branch_at": "turn", "continue_from": "best", "group_size": 8}


@pytest.mark.parametrize(
    ("config", "label"),
    [
        ({"algorithm": SEARCH}, "search success (best of 8)"),
        ({"algorithm": SEARCH | {"continue_from": "epsilon", "group_size": 4}}, "search success (best of 4)"),
        ({"algorithm": SEARCH | {"continue_from": "random"}}, "training success"),
        ({"algorithm": SEARCH | {"branch_at": "root"}}, "training success"),
        ({"algorithm": {"type": "ppo"}}, "training success"),
        ({"stages": [{"algorithm": {"type": "sft"}}, {"algorithm": SEARCH}]}, "search success (best of 8)"),
        ({"algorithm": SEARCH, "stages": [{"algorithm": {"type": "sft"}}]}, "training success"),
        ({"algorithm": SEARCH, "stages": [{"algorithm": None}]}, "search success (best of 8)"),
        ({"algorithm": {"type": "mine:Mine", "group_size": 8}}, "training success (may be of a search)"),
        ({"algorithm": {"type": "mine:Mine", "branch_at": "root"}}, "training success"),
        ({}, "training success"),
    ],
)
def test_training_success_of_branching_runs_is_labelled_search(config, label):
    assert training_success_label(config) == label


def test_algorithms_and_steps_are_those_of_the_stages():
    stages = [{"algorithm": {"type": "sft"}, "steps": 2}, {"algorithm": None}, {"algorithm": {"type": "ppo"}}]
    config = {"algorithm": {"type": "grpo"}, "steps": 5, "stages": [*stages, {"algorithm": {"type": "ppo"}}]}
    assert algorithm_label(config) == "sft, then grpo, then ppo" and total_steps(config) == 17
    assert [algorithm_label(config, steps) for steps in (0, 2, 3)] == ["sft", "sft", "sft, then grpo"]
    assert algorithm_label({"algorithm": {"type": "grpo"}, "steps": 5, "stages": []}, 3) == "grpo"
    assert (algorithm_label({}), total_steps({})) == ("", None)


def test_returns_are_labelled_greedy_or_sampled():
    config = {"env_steps": 1000, "evals": {"test": {"greedy": True}, "noisy": {"greedy": False}}}
    assert eval_label(config, "test") == "test (greedy)" and eval_label(config, "noisy") == "noisy"
    assert training_return_label(config) == "training return (sampled actions)"
    assert training_return_label({"algorithm": SEARCH}) == "search return (best of 8)"
    assert eval_label({"evals": {"test": {}}}, "test") == "test" and training_return_label({}) == "training return"


def test_headline_prefers_the_test_split():
    assert headline_eval(["dev", "test"]) == "test" and headline_eval(["dev"]) == "dev" and headline_eval([]) is None


def test_evaluation_metrics_are_formatted_as_text():
    assert format_eval({"success": 0.853}) == "85.3%" and format_eval({"return": -12.4}) == "-12.40"
    assert format_eval({"returns": {"a": 1.0, "b": -1.0}}) == "a 1.00 b -1.00"


def test_the_interval_of_an_evaluation_is_a_95_percent_interval():
    low, high = eval_interval({"success": 0.8, "episodes": 10.0})
    assert (round(low, 2), round(high, 2)) == (0.49, 0.94)  # Wilson (1927)
    assert eval_interval({"success": 0.5, "episodes": 100.0, "failed": 60.0}) == pytest.approx((0.352, 0.648), abs=1e-3)
    assert eval_interval({"return": 2.0, "deviation": 1.0, "episodes": 100.0}) == pytest.approx((1.804, 2.196))
    assert eval_interval({"returns": {"a": 1.0}, "episodes": 9.0}) is None
    assert eval_interval({"success": 7.0, "episodes": 9.0}) is None  # not a share: the file was edited
    assert eval_interval({"success": 0.5, "episodes": 9.0, "failed": "x"}) is None
    assert eval_interval({"success": 0.5, "episodes": 9.0, "samples": 0}) is None


def test_held_out_is_mentioned_once():
    assert held_out_label({}, "dev") == "held-out dev" and held_out_label({}, "held_out") == "held out"
    config = {"env_steps": 1000, "evals": {"held_out": {"greedy": True}}}
    assert held_out_label(config, "held_out") == "held out (greedy)"
