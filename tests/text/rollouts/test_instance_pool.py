"""A pool of instances: probabilities and running success by hand, and learning with sampling by learnability."""

import asyncio
import json
import random
from collections import Counter
from math import exp

import numpy as np
import pytest
from helpers.toys import Spoken, Whisper

from palestra.core.config import dump, parse, validate
from palestra.core.types import TEAM, Answer, Episode, Node, Step
from palestra.envs.base import Env
from palestra.runs import Run, list_checkpoints, load_episodes, read_lines
from palestra.runs.loop import restore_checkpoint, run_training
from palestra.text.algorithms.grpo import GRPO
from palestra.text.build.build import build
from palestra.text.config import TextConfig
from palestra.text.rollouts.instance_pool import POOL_KEY, InstancePool, sibling_success
from palestra.text.rollouts.sources import EnvSource
from palestra.text.rollouts.tree_rollout import EpisodeRunner


def episode_with(*success, error=None, chosen=1):
    """An episode whose siblings ended with `success`; play continued from sibling `chosen`."""
    nodes = [Node(i, None, 0, {}, {}, done=True, chosen=i < chosen, info={"success": s}) for i, s in enumerate(success)]
    return Episode("train", 0, {}, nodes, error)


def test_probabilities_by_hand():
    """p(1 - p) for .5, .9, 0 and one that was never played (taken as .5): .25, .09, 0 and .25, of .59."""
    memory = {POOL_KEY: {"train": {"0": 0.5, "1": 0.9, "2": 0.0}}}
    expected = 0.2 / 4 + 0.8 * np.array([0.25, 0.09, 0.0, 0.25]) / 0.59
    assert InstancePool(size=4, floor=0.2).probabilities("train", memory) == pytest.approx(expected)
    assert InstancePool(size=4, sampling="uniform").probabilities("train", memory) == pytest.approx([0.25] * 4)
    assert InstancePool(size=4).probabilities("other", memory) == pytest.approx([0.25] * 4)
    solved = {POOL_KEY: {"train": {"0": 1.0, "1": 0.0}}}
    assert InstancePool(size=2).probabilities("train", solved) == pytest.approx([0.5, 0.5])


def test_running_success_by_hand():
    """From .5 half of the way to 1 is .75, and from there half of the way to 0 is .375; a failed episode changes
    nothing."""
    pool, memory = InstancePool(size=4), {}
    outcomes = [
        (2, episode_with(1, 1)),
        (2, episode_with(0, 0)),
        (3, episode_with(1, 0, 0, 0)),
        (1, episode_with(1, error="broken")),
    ]
    metrics = pool.observe("train", outcomes, memory)
    assert memory == {POOL_KEY: {"train": {"2": 0.375, "3": 0.375}}}
    learnability = (2 * 0.375 * 0.625 + 2 * 0.25) / 4
    assert metrics == pytest.approx(
        {"pool_seen": 0.5, "pool_solved": 0, "pool_unsolved": 0, "pool_learnability": learnability}
    )
    pool.observe("train", [(0, episode_with(0))] * 3, memory)
    assert pool.observe("train", [(1, episode_with(1))] * 4, memory)["pool_unsolved"] == 0.25
    assert pool.observe("train", [], memory)["pool_solved"] == 0.25


def test_success_counts_all_siblings_not_only_the_best():
    assert sibling_success(episode_with(1, 0, 0, 0, chosen=1)) == 0.25
    assert sibling_success(episode_with(1, error="broken")) is None
    assert sibling_success(Episode("train", 0, {}, [Node(0, None, 0, {}, {}, done=True)])) is None


def test_env_without_success_is_refused():
    silent = Episode("train", 0, {}, [Node(0, None, 0, {}, {}, done=True)])
    with pytest.raises(ValueError, match=r'env "train" reports none .* or set sampling: uniform'):
        InstancePool(size=4).observe("train", [(0, silent)], {})
    assert InstancePool(size=4, sampling="uniform").observe("train", [(0, silent)], {})["pool_seen"] == 0


def test_draws_follow_the_probabilities_and_stay_in_the_pool():
    pool, memory = InstancePool(size=3, floor=0.1), {POOL_KEY: {"train": {"0": 0.5, "1": 0.9, "2": 1.0}}}
    policy = Spoken("p", lambda query, i: "1")
    source = EnvSource(
        {"train": EpisodeRunner(Whisper, "train")}, lambda: {"guide": policy, "walker": policy}, 3, pool=pool
    )
    drawn = Counter(spec.instance - (3 << 32) for _, spec in source.episode_specs(range(4000), memory))
    expected = pool.probabilities("train", memory)
    assert [drawn[i] / 4000 for i in range(3)] == pytest.approx(expected.tolist(), abs=0.03)
    whole = source.episode_specs(range(50), memory)
    alone = [source.episode_specs([number], memory)[0] for number in range(50)]
    assert [spec.instance for _, spec in alone] == [spec.instance for _, spec in whole]
    assert len({spec.seed for _, spec in whole}) == 50  # a second visit samples again


# ---- learning


class Mixed(Env):
    """One answer, right or wrong. Of 200 instances the policy knows 90, can learn 20, and 90 accept no answer."""

    name = "mixed"
    seats = ("agent",)

    def reset(self, seed):
        self.index = seed % 2**32
        return Step({"agent": str(self.index)})

    def step(self, actions):
        right = actions["agent"] == "right" and self.index < 110
        return Step({}, {}, float(right), info={"success": right})


class Table:
    """A policy with one logit for each instance: -1.5 if it can be learned, otherwise 4."""

    name = "agent"

    def __init__(self):
        self.logits = np.where((np.arange(200) >= 90) & (np.arange(200) < 110), -1.5, 4.0)

    def success(self):
        """The true share of right answers at the instances that can be learned."""
        return float(np.mean(1 / (1 + np.exp(-self.logits[90:110]))))

    async def act(self, query):
        index = int(query.observation)
        p, rng = 1 / (1 + exp(-self.logits[index])), random.Random(query.seed)
        drawn = [rng.random() < p for _ in range(query.n)]
        ids = [np.array([index, right], np.int32) for right in drawn]
        return [
            Answer("right" if right else "wrong", "agent", np.ones(1, np.int32), i, np.zeros(2, np.float32))
            for right, i in zip(drawn, ids, strict=True)
        ]

    def learn(self, samples, lr=0.3):
        step = np.zeros(200)
        for sample in samples:
            index, right = sample.token_ids
            p = 1 / (1 + exp(-self.logits[index]))
            step[index] += lr * float(sample.advantages[0]) * (right - p)
        self.logits += step


def train_policy(sampling, seed, steps=120):
    """The policy after `steps` steps of 8 episodes of 8 siblings."""
    policy, memory = Table(), {}
    pool = InstancePool(size=200, sampling=sampling)
    source = EnvSource({"mixed": EpisodeRunner(Mixed, "mixed")}, lambda: {"agent": policy}, seed, pool=pool)
    algorithm = GRPO(branch_at="root", group_size=8, scale="none")

    async def train():
        for step in range(steps):
            episodes = await source.play(range(8 * step, 8 * step + 8), algorithm.branching, memory)
            policy.learn(algorithm.build_samples(episodes, "agent")[0])
            source.observe(episodes, memory)

    asyncio.run(train())
    return policy.success()


@pytest.mark.slow
def test_learnability_beats_uniform_sampling_if_few_instances_can_be_learned(check_score):
    """With 960 episodes uniform sampling visits each instance 4.8 times; a tenth of them can be learned. The share of
    right answers there rises from .18 to .58 ± .07 over seeds, and with learnability to .83 ± .03."""
    before = Table().success()
    uniform = [train_policy("uniform", seed) for seed in range(2)]
    learnability = [train_policy("learnability", seed) for seed in range(2)]
    check_score(np.mean(uniform) - before, "uniform")
    check_score(np.mean(learnability) - np.mean(uniform))


# ---- a run


def config(base, **tree):
    speech = {"type": "lora", "base": str(base), "lr": 1e-2, "sampling": {"max_tokens": 2}}
    whole = {
        "name": "pool",
        "steps": 6,
        "episodes": 6,
        "env": {"type": "helpers.toys:Whisper"},
        "instance_pool": {"size": 5},
        "policies": {"guide": dict(speech), "walker": dict(speech)},
        "algorithm": {"type": "grpo", "group_size": 4},
        "checkpoint_every": 2,
    }
    return validate(TextConfig, whole | tree)


def test_run_keeps_and_resumes_its_pool(base, tmp_path):
    with Run.create(tmp_path / "one", dump(config(base)), "pool") as run:
        assert run_training(build(config(base)), run)
    lines = [line for line in read_lines(run.path / "metrics.jsonl") if line["policy"] == TEAM]
    assert lines[-1]["pool_seen"] == 1 and 0 < lines[-1]["pool_learnability"] <= 0.25
    played = [e.seed for step in range(6) for e in load_episodes(run.path / "episodes" / f"step-{step:06d}.parquet")]
    assert set(played) == set(range(5))
    memory = json.loads((list_checkpoints(run.path)[-1].path / "algorithm_state.json").read_text())
    assert set(memory[POOL_KEY]["train"]) == {"0", "1", "2", "3", "4"}

    calls = iter(range(100))
    with Run.create(tmp_path / "other", dump(config(base)), "pool") as stopped:
        assert not run_training(build(config(base)), stopped, should_stop=lambda: next(calls) == 3)
    with Run.open(stopped.path) as again:
        setup = build(validate(TextConfig, parse(again.config)))
        restore_checkpoint(setup, again)
        assert run_training(setup, again)
    assert (stopped.path / "metrics.jsonl").read_bytes() == (run.path / "metrics.jsonl").read_bytes()
