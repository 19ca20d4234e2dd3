"""Weights of named reward terms: by hand, and in runs."""

import contextlib
import json

import pytest
from helpers.toys import Whisper

import palestra
from palestra.core.failures import RunFailed
from palestra.core.types import Episode, Node, Step
from palestra.envs.reward_terms import REWARD_TERMS_KEY
from palestra.runs import load_episodes, read_lines
from palestra.text.rollouts.reward_weights import FadingWeight, reweigh, weights_at
from palestra.text.rollouts.sources import EnvSource
from palestra.text.rollouts.tree_rollout import EpisodeRunner


def test_only_terms_are_weighted():
    terms = {"a": {"form": -0.5, "facts": 2.0}, "b": {"facts": 1.0}}
    step = Step({}, rewards={"a": 1.5, "b": 1.0, "c": 7.0}, team_reward=3.0, info={REWARD_TERMS_KEY: terms, "turn": 2})
    weighted = reweigh(step, {"form": 0.0, "facts": 0.5})
    assert weighted.rewards == {"a": 1.0, "b": 0.5, "c": 7.0} and weighted.team_reward == 3.0
    assert weighted.info == {REWARD_TERMS_KEY: {"a": {"form": -0.0, "facts": 1.0}, "b": {"facts": 0.5}}, "turn": 2}
    assert reweigh(step, {"form": 2.0}).rewards == {"a": 1.0, "b": 1.0, "c": 7.0}
    assert reweigh(step, {}) is step and reweigh(Step({}), {"form": 2.0}) == Step({})


def test_unnamed_part_of_a_reward_is_not_weighted():
    step = Step({}, rewards={"a": 5.0}, info={REWARD_TERMS_KEY: {"a": {"form": -1.0}}})  # 6 has no name
    assert reweigh(step, {"form": 0.0}).rewards == {"a": 6.0}


def test_weights_fade_linearly_and_then_stay():
    weights = {"form": FadingWeight(start=1.0, end=0.2, steps=4), "facts": 3.0}
    forms = [weights_at(weights, step)["form"] for step in (0, 1, 2, 4, 9)]
    assert forms == pytest.approx([1.0, 0.8, 0.6, 0.2, 0.2]) and weights_at(weights, 9)["facts"] == 3.0


def config(**changes):
    lora = {"type": "lora", "base": "tiny", "rank": 2, "sampling": {"max_tokens": 3}}
    return {
        "steps": 3,
        "episodes": 2,
        "env": {"type": "math_relay", "shots": 0},
        "policies": {"first": {"type": "expert"}, "second": lora},
        "algorithm": {"type": "grpo", "branch_at": "root", "group_size": 2, "old_logprobs": "trainer"},
        "evals": {"dev": {"episodes": 2, "every": 1}},
        "checkpoint_every": 1,
        "max_failed": 1,
    } | changes


def messages_by_step(run):
    """The rewards of right messages by training step: the first seat is an expert, and always right."""
    episodes = [load_episodes(file) for file in sorted((run / "episodes").glob("*.parquet"))]
    return [{node.rewards["first"] for e in step for node in e.nodes if "first" in node.rewards} for step in episodes]


def test_run_fades_a_term_in_training_and_not_in_evaluations(tmp_path):
    weights = {"message": {"start": 2.0, "end": 0.0, "steps": 2}}
    with contextlib.suppress(RunFailed):  # the tiny base may learn nothing in so few steps
        palestra.train(config(reward_weights=weights), root=tmp_path)
    (path,) = tmp_path.iterdir()
    assert messages_by_step(path) == [{2.0}, {1.0}, {0.0}]
    evals = [line["returns"]["first"] for line in read_lines(path / "evals.jsonl")]
    assert set(evals) == {1.0}


@pytest.mark.parametrize("more", [{}, {"staleness": 1}, {"backend": {"type": "inline"}}], ids=str)
@pytest.mark.few(1)
def test_weight_fades_over_the_steps_of_a_run_with_stages(tmp_path, more):
    """One step of eight episodes, then three of two."""
    weights = {"message": {"start": 2.0, "end": 0.0, "steps": 4}}
    stages = [{"steps": 1, "episodes": 8}, {"steps": 3, "episodes": 2}]
    with contextlib.suppress(RunFailed):
        palestra.train(config(reward_weights=weights, stages=stages, **more), root=tmp_path)
    (path,) = tmp_path.iterdir()
    assert messages_by_step(path) == [{2.0}, {1.5}, {1.0}, {0.5}]


def episode_with(*terms, error=None):
    info = {REWARD_TERMS_KEY: {"a": dict.fromkeys(terms, 1.0)}}
    return Episode("toy", 0, {"a": "a@0"}, [Node(0, None, 0, {}, {}, done=True, info=info)], error)


def test_terms_are_checked_in_the_first_step_of_a_run_only():
    """A resumed run, and each stage, has a new source, and the memory of the run."""

    def source(**weights):
        runners = {"toy": EpisodeRunner(Whisper, "toy")}
        return EnvSource(runners, dict, 0, reward_weights=weights or {"form": 0.5}, episodes=2)

    memory = {}
    source().observe([episode_with("facts", error="broken")], memory)  # no episode to check
    with pytest.raises(ValueError, match=r"reward_weights names form, and no reward .* it has facts"):
        source().observe([episode_with("facts"), episode_with("form", error="broken")], memory)
    with pytest.raises(ValueError, match=r"names reward_model, and .* it has facts"):  # added after play
        source(reward_model=0.5).observe([episode_with("facts", "reward_model", "env")], memory)
    source().observe([episode_with("facts"), episode_with("form")], memory)
    source().observe([episode_with("facts"), episode_with("facts")], json.loads(json.dumps(memory)))


def test_unused_term_is_refused_after_the_first_step(tmp_path):
    with pytest.raises(ValueError, match=r"reward_weights names mesage, and no reward .* it has message"):
        palestra.train(config(reward_weights={"mesage": 0.5}), root=tmp_path)
