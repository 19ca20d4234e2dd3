"""Dynamic sampling: which episodes are replaced, and how often."""

import asyncio

import numpy as np
import pytest
from helpers.toys import Spoken

from palestra.core.types import TEAM, Answer, Step
from palestra.envs.base import Env
from palestra.runs import Run, read_lines
from palestra.runs.loop import restore_checkpoint, run_training
from palestra.text.algorithms.grpo import GRPO
from palestra.text.rollouts.instance_pool import InstancePool
from palestra.text.rollouts.metrics import episode_metrics
from palestra.text.rollouts.refill import play_refilled
from palestra.text.rollouts.sources import ATTEMPT_STRIDE, SUCCESS_KEY, EnvSource
from palestra.text.rollouts.tree_rollout import EpisodeRunner
from palestra.text.training.trainer import Stage, TextTrainer


class Stubborn(Env):
    """One turn that pays the number in the answer, except in the instances of `FLAT`, where all answers earn the
    same."""

    name = "stubborn"
    seats = ("a",)
    FLAT: set[int] = set()

    def reset(self, seed):
        self.seed = seed
        return Step({"a": "go"})

    def step(self, actions):
        return Step({}, {"a": 1.0 if self.seed in self.FLAT else float(actions["a"])})


def source():
    team = {"a": Spoken("a@0", lambda query, i: str(i))}
    return EnvSource({"train": EpisodeRunner(Stubborn, "train")}, lambda: team, seed=0)


def play(numbers, flat, monkeypatch, **settings):
    monkeypatch.setattr(Stubborn, "FLAT", set(flat))
    algorithm = GRPO(branch_at="root", group_size=2, **settings)
    heard = []
    episodes, replaced = asyncio.run(play_refilled(source(), algorithm, numbers, {}, heard.append))
    assert sorted(map(id, heard)) == sorted(map(id, [*episodes, *replaced]))
    return [episode.seed for episode in episodes], episodes, heard


def test_flat_episodes_are_replaced_in_place(monkeypatch):
    """Of 0, 1, 2 the second is flat, and so is the first replacement."""
    flat = [1, 1 + ATTEMPT_STRIDE]
    seeds, episodes, heard = play(range(3), flat, monkeypatch, flat_groups="refill")
    assert seeds == [0, 1 + 2 * ATTEMPT_STRIDE, 2] and len(heard) == 5
    assert [e.nodes[0].info.get("redraws", 0) for e in episodes] == [0, 2, 0]
    assert episode_metrics(episodes)["redraws"] == 2
    assert play([1], flat, monkeypatch, flat_groups="refill")[0] == [1 + 2 * ATTEMPT_STRIDE]


def test_last_refill_attempt_is_kept(monkeypatch):
    flat = [1 + attempt * ATTEMPT_STRIDE for attempt in range(9)]
    seeds, episodes, _ = play(range(2), flat, monkeypatch, flat_groups="refill", refill_attempts=3)
    assert seeds == [0, 1 + 3 * ATTEMPT_STRIDE] and episode_metrics(episodes)["redraws"] == 3


@pytest.mark.parametrize("kind", ["count", "skip"])
def test_no_refill_without_flat_groups(monkeypatch, kind):
    seeds, episodes, heard = play(range(2), [0, 1], monkeypatch, flat_groups=kind)
    assert seeds == [0, 1] and len(heard) == 2 and "redraws" not in episode_metrics(episodes)


def test_batch_baselines_have_no_flat_groups():
    with pytest.raises(ValueError, match="flat_groups: refill needs values that are compared with their siblings'"):
        GRPO(group_size=1, baseline="batch", scale="batch", flat_groups="refill")


# ---- curricula, which also observe replaced episodes


class Coin(Env):
    """One turn. In instances of `SOLVED` every answer is right, in others only "1"."""

    name = "coin"
    seats = ("agent",)
    SOLVED = range(1, 10)

    def reset(self, seed):
        self.index = seed % 2**32
        return Step({"agent": "go"})

    def step(self, actions):
        right = self.index in self.SOLVED or actions["agent"] == "1"
        return Step({}, {}, float(right), info={"success": right})


class Solved(Coin):
    """Every answer is right."""

    SOLVED = range(2**32)


class Tossed:
    """A policy that answers 0 or 1 with equal probability, with one token."""

    name = "agent@0"

    async def act(self, query):
        drawn = np.random.default_rng(query.seed).integers(2, size=query.n)
        one, ids = np.zeros(1, np.float32), np.ones(1, np.int32)
        return [Answer(str(each), self.name, ids, ids, one) for each in drawn]


def coins(flat_groups, *, steps=30, envs=(Coin,), **options):
    """A run without learners, with steps of four episodes."""
    games = EnvSource(
        {kind.__name__: EpisodeRunner(kind, kind.__name__) for kind in envs}, lambda: {"agent": Tossed()}, 0, **options
    )
    algorithm = GRPO(branch_at="root", group_size=2, flat_groups=flat_groups)
    return TextTrainer([Stage(games, algorithm, steps, 4)], {}, [], 0, checkpoint_every=10)


def train_setup(setup, folder, should_stop=lambda: False):
    with Run.create(folder, "") as run:
        run_training(setup, run, should_stop=should_stop)
        return run.path


@pytest.mark.parametrize("flat_groups", ["count", "refill"])
def test_pool_counts_successes_of_replaced_episodes(tmp_path, flat_groups):
    """Nine of ten instances are solved: of these, refill keeps only the last attempt."""
    pool = InstancePool(size=10)
    setup = coins(flat_groups, pool=pool)
    train_setup(setup, tmp_path)
    assert pool.probabilities("Coin", setup.algorithm_state)[0] > 0.6


def test_frontier_counts_successes_of_replaced_episodes(tmp_path):
    setup = coins("refill", steps=15, envs=(Coin, Solved), curriculum="frontier")
    path = train_setup(setup, tmp_path)
    assert setup.algorithm_state[SUCCESS_KEY]["Solved"] == 1.0
    lines = [line for line in read_lines(path / "metrics.jsonl") if line["policy"] == TEAM]
    assert lines[0]["Solved.success"] == 1.0 and lines[-1]["Coin.share"] > 0.9


def test_a_refilled_pool_resumes_exactly(tmp_path):
    whole = train_setup(coins("refill", pool=InstancePool(size=10)), tmp_path / "whole")
    calls = iter(range(100))
    stopped = train_setup(coins("refill", pool=InstancePool(size=10)), tmp_path / "stopped", lambda: next(calls) == 12)
    with Run.open(stopped) as again:
        setup = coins("refill", pool=InstancePool(size=10))
        restore_checkpoint(setup, again)
        assert again.next_step < 30 and run_training(setup, again)
    assert (stopped / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
