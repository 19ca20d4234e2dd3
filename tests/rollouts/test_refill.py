"""Dynamic sampling: which episodes are played again, and how often."""

import asyncio

import pytest
from toys import Spoken

from palestra.algorithms.text.grpo import GRPO
from palestra.envs.base import Env
from palestra.rollouts.metrics import episode_metrics
from palestra.rollouts.refill import ATTEMPT_STRIDE, play_refilled
from palestra.rollouts.sources import EnvSource
from palestra.rollouts.tree_rollout import EpisodeRunner
from palestra.types import Step


class Stubborn(Env):
    """One turn, paid for the number said in every instance that `FLAT` does not name; there all earn the same."""

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
    episodes = asyncio.run(play_refilled(source(), algorithm, numbers, {}, heard.append))
    return [episode.seed for episode in episodes], episodes, heard


def test_flat_episodes_are_replaced_in_place(monkeypatch):
    """Of 0, 1, 2 the second is flat, and so is the first instance played for it."""
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
    with pytest.raises(ValueError, match="flat_groups: refill is of values compared with their siblings'"):
        GRPO(group_size=1, baseline="batch", scale="batch", flat_groups="refill")
