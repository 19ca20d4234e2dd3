"""A reward model: its loss by hand, its inputs, and a policy that learns from the rewards of a model trained on
pairs."""

import asyncio

import numpy as np
import pytest
import torch

from palestra.core.config import dump, load, validate
from palestra.core.losses import LossInputs
from palestra.core.types import TEAM, Answer, Episode, Node
from palestra.envs.reward_terms import REWARD_TERMS_KEY
from palestra.runs import Run, load_episodes, read_lines
from palestra.runs.loop import restore_checkpoint, run_training
from palestra.text.algorithms.reward_model import RewardModel
from palestra.text.build.build import build
from palestra.text.config import TextConfig
from palestra.text.losses import bradley_terry_loss
from palestra.text.rollouts.learned_reward import LearnedRewardConfig, LearnedRewardSource
from palestra.text.rollouts.tree_rollout import Branching


def said(ids, policy="agent@0"):
    return Answer("x", policy, np.array([1, 2]), np.array(ids), np.zeros(len(ids), np.float32))


def turn(values, ids):
    nodes = [
        Node(i, None, 0, {}, {"agent": said(i_)}, {"agent": v}, 1.0, done=True)
        for i, (v, i_) in enumerate(zip(values, ids, strict=True))
    ]
    return Episode("hand", 0, {"agent": "agent"}, nodes)


def test_loss_by_hand():
    """Rewards 2 and 1, and 0 and 1: margins 1 and -1. The sums 3 and 1 have squares that add up to 10."""
    value = torch.tensor([2.0, 1.0, 0.0, 1.0])
    tokens = LossInputs(
        value,
        value,
        value,
        None,
        torch.tensor([1.0, -1.0, 1.0, -1.0]),
        torch.full([4], 0.25),
        group_M=torch.tensor([0, 0, 1, 1]),
        value_M=value,
    )
    loss, metrics = bradley_terry_loss(tokens)
    sigmoid = 1 / (1 + np.exp(-1))
    assert loss.item() == pytest.approx(-(np.log(sigmoid) + np.log(1 - sigmoid)) / 2)
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(
        {"accuracy": 0.5, "margin": 0.0, "chosen_reward": 1.0, "rejected_reward": 1.0}
    )
    assert bradley_terry_loss(tokens, center_coef=0.1)[0].item() == pytest.approx(loss.item() + 0.1 * 5)
    with pytest.raises(ValueError, match="values of a head"):
        bradley_terry_loss(tokens._replace(value_M=None))


def test_pairs_are_scored_after_their_last_token():
    episode = turn([0.0, 3.0, 1.0], [[5], [6, 7], [8]])
    samples, metrics = RewardModel().build_samples([episode], "agent")
    assert [(s.prompt_ids.tolist(), s.token_ids.tolist(), s.advantages.tolist(), s.group) for s in samples] == [
        ([1, 2, 6, 7], [7], [1.0], 0),
        ([1, 2, 5], [5], [-1.0], 0),
    ]
    assert metrics == {"groups": 1.0, "pairs": 1.0, "zero_std_fraction": 0.0}
    assert [node.advantages["agent"] for node in episode.nodes] == [-1.0, 1.0, 0.0]
    assert len(RewardModel(pairs="all").build_samples([episode], "agent")[0]) == 6


class Recorded:
    def __init__(self, episode):
        self.episode = episode

    async def play(self, numbers, branching, memory, on_episode=None):
        return [self.episode]


@pytest.mark.parametrize(("env_weight", "rewards"), [(0.0, [2.0, 4.0]), (0.5, [2.5, 5.5])])
def test_learned_rewards_replace_or_join_those_of_the_env(env_weight, rewards):
    """An answer's reward is its number of tokens, twice."""

    async def score(answers):
        return [len(answer.token_ids) for answer in answers]

    episode = turn([1.0, 3.0], [[5], [6, 7]])
    config = LearnedRewardConfig(path="x", weight=2.0, env_weight=env_weight)
    source = LearnedRewardSource(Recorded(episode), score, config, {"agent"})
    asyncio.run(source.play([0], Branching(), {}))
    assert [node.rewards["agent"] for node in episode.nodes] == rewards
    assert [node.team_reward for node in episode.nodes] == [env_weight] * 2
    terms = [node.info[REWARD_TERMS_KEY]["agent"] for node in episode.nodes]
    assert terms == [{"env": env_weight, "reward_model": 2.0}, {"env": 3 * env_weight, "reward_model": 4.0}]


@pytest.mark.parametrize(("env_weight", "loss"), [(0.0, 0.0), (0.5, -0.5)])
def test_env_weight_applies_to_rewards_at_the_steps_of_others(env_weight, loss):
    """The winner's move ends the game: the loser gets -1 there, without an answer. An opponent's rewards are kept."""

    async def score(answers):
        return [len(answer.token_ids) for answer in answers]

    first = Node(0, None, 0, {}, {"red": said([5])})
    last = Node(1, 0, 1, {}, {"blue": said([5, 6])}, {"red": -1.0, "blue": 1.0, "opponent": -1.0}, done=True)
    episode = Episode("hand", 0, {"red": "agent@0", "blue": "agent@0", "opponent": "script"}, [first, last])
    source = LearnedRewardSource(
        Recorded(episode), score, LearnedRewardConfig(path="x", env_weight=env_weight), {"agent"}
    )
    asyncio.run(source.play([0], Branching(), {}))
    assert first.rewards == {"red": 1.0}
    assert last.rewards == {"red": loss, "blue": 2.0 + env_weight, "opponent": -1.0}
    assert last.info[REWARD_TERMS_KEY] == {"red": {"env": loss}, "blue": {"env": env_weight, "reward_model": 2.0}}


# ---- from pairs to a reward model to a policy


def config(base, **tree):
    whole = {
        "env": {"type": "helpers.toys:Odd"},
        "policies": {"agent": {"type": "lora", "base": str(base), "lr": 1e-2, "sampling": {"max_tokens": 1}}},
        "episodes": 32,
    }
    return validate(TextConfig, whole | tree)


def run_of(config, root):
    with Run.create(root, dump(config), config.name) as run:
        assert run_training(build(config), run)
        return run.path


@pytest.fixture(scope="module")
def pairs(base, tmp_path_factory):
    """Two runs of a policy that does not learn: pairs to train on, and others."""
    still = {"agent": {"type": "lora", "base": str(base), "lr": 0.0, "sampling": {"max_tokens": 1}}}
    algorithm = {"type": "grpo", "group_size": 4}
    return [
        run_of(config(base, policies=still, algorithm=algorithm, steps=8, seed=seed), tmp_path_factory.mktemp("pairs"))
        for seed in (1, 2)
    ]


@pytest.fixture(scope="module")
def judge(base, pairs, tmp_path_factory):
    tree = {"algorithm": {"type": "reward_model", "pairs": "all"}, "data": str(pairs[0]), "steps": 16}
    return run_of(config(base, **tree), tmp_path_factory.mktemp("judge"))


@pytest.mark.slow
def test_reward_model_prefers_the_better_of_held_out_answers(judge, pairs):
    """The pairs are of another run: other prompts, and one answer of each pair is right."""
    setup = build(validate(TextConfig, load(judge / "config.yaml")))
    with Run.open(judge) as run:
        restore_checkpoint(setup, run)
    episodes = [e for step in range(8) for e in load_episodes(pairs[1] / "episodes" / f"step-{step:06d}.parquet")]
    samples, _ = RewardModel().build_samples(episodes, "agent")
    values = np.concatenate(asyncio.run(setup.learners["agent"].values(samples)))
    assert len(values) > 100 and np.mean(values[::2] > values[1::2]) > 0.8
    lines = [line for line in read_lines(judge / "metrics.jsonl") if line["policy"] == "agent"]
    assert lines[0]["loss"] == pytest.approx(np.log(2), abs=1e-4) and lines[-1]["accuracy"] > 0.8


@pytest.mark.slow
def test_policy_learns_the_task_from_the_reward_model_alone(base, judge, tmp_path):
    """The env's own reward has weight 0 in training, and measures success; chance is 1/2."""
    tree = {
        "algorithm": {"type": "grpo", "group_size": 8, "branch_at": "root"},
        "reward_model": {"path": str(judge)},
        "evals": {"test": {"episodes": 200, "env": {"split": "test"}}},
        "steps": 12,
    }
    run = run_of(config(base, **tree), tmp_path)
    before, after = [line["success"] for line in read_lines(run / "evals.jsonl")]
    assert before < 0.7 and after > 0.9
    lines = read_lines(run / "metrics.jsonl")
    learned = [line["reward/reward_model"] for line in lines if line["policy"] == "agent"]
    assert learned[-1] > learned[0]
    assert [line["team_return"] for line in lines if line["policy"] == TEAM] == [0.0] * 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": {"type": "grpo"}}, "continue_from: best chooses by rewards during play"),
        ({"reward_model": {"path": "nowhere"}}, "nowhere is not a run with a checkpoint"),
        ({"reward_model": {"path": "{pairs}"}}, "has no reward model: train one with algorithm"),
        ({"data": "{pairs}"}, "data: is recorded"),
    ],
)
@pytest.mark.few(1)
def test_unusable_reward_models_are_refused(base, judge, pairs, changes, message):
    tree = {"algorithm": {"type": "grpo", "branch_at": "root"}, "reward_model": {"path": str(judge)}} | changes
    if "{pairs}" in str(changes):
        tree |= {"data": str(pairs[0])} if "data" in changes else {"reward_model": {"path": str(pairs[0])}}
    with pytest.raises(ValueError, match=message):
        build(config(base, **tree))
