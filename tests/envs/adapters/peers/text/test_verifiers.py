"""Envs of verifiers through palestra's adapter: verifiers runs the episodes, palestra's policies answer."""

from __future__ import annotations

import asyncio
import os
import random
from typing import Any

import pytest

from palestra.core.chat import Chat
from palestra.envs import check_env
from palestra.envs.adapters.verifiers import Verifiers
from palestra.envs.support.splits import SPLIT_SHARES
from palestra.text.policies.scripted import ScriptedPolicy
from palestra.text.rollouts.tree_rollout import Branching, EpisodeRunner, EpisodeSpec

pytestmark = pytest.mark.peers
WORDS = 27  # of the toy task set
PAIR = {"taskset": "toy_verifiers", "env": "toy_verifiers_team"}


def repeat(query: Any, rng: random.Random) -> str:
    """Answers with the last message without its first word."""
    return query.observation.messages[-1]["content"].split(" ", 1)[1]


def play(script: Any = repeat, seed: int = 3, branching: Branching | None = None, **options: Any) -> Any:
    env = Verifiers(**{"taskset": "toy_verifiers"} | options)
    seats = dict.fromkeys(env.seats, ScriptedPolicy(script))
    arena = EpisodeRunner(lambda: Verifiers(**{"taskset": "toy_verifiers"} | options), "verifiers")
    return asyncio.run(arena.play(EpisodeSpec(seed, seats, seed), branching or Branching()))


def test_task_is_prompted_answered_and_scored() -> None:
    episode = play()
    (node,) = episode.nodes
    chat = node.observations["agent"]
    assert episode.error is None and isinstance(chat, Chat)
    assert [message["role"] for message in chat.messages] == ["system", "user"]
    terms = node.info["reward_terms"]["agent"]  # one for each reward function of the task set
    assert node.rewards == {"agent": 1.0} and sum(terms.values()) == 1.0 and "program" not in terms
    assert node.info == {"metrics": {"length": 3.0}, "success": True, "reward_terms": {"agent": terms}}
    wrong = play(["nothing"])
    assert wrong.nodes[0].rewards == {"agent": 0.0} and wrong.success == 0


def test_each_agent_of_an_env_is_a_seat() -> None:
    episode = play(**PAIR)
    assert episode.error is None and episode.success == 1
    assert [list(node.answers) for node in episode.nodes] == [["guide"], ["walker"], ["walker"]]
    assert episode.nodes[-1].rewards == {"guide": 1.0, "walker": 1.0}
    asked = episode.nodes[-1].observations["walker"]
    assert [message["role"] for message in asked.messages] == ["system", "user", "assistant", "user"]


def test_siblings_are_tried_at_every_turn() -> None:
    lines = play(lambda query, rng: rng.choice([repeat(query, rng), "no"]), branching=Branching("turn", 3), **PAIR)
    assert lines.error is None and len(lines.children(None)) == 3
    assert {leaf.rewards["walker"] for leaf in lines.leaves()} <= {0.0, 1.0}


@pytest.mark.parametrize("options", [{}, PAIR | {"split": "test"}], ids=str)
def test_env_passes_the_env_check(options: dict[str, Any]) -> None:
    def speaker(seat: str, chat: Chat, rng: random.Random) -> str:
        return rng.choice(["aca", "no", chat.messages[-1]["content"]])

    check_env(lambda: Verifiers(**{"taskset": "toy_verifiers"} | options), seeds=range(2), act=speaker)


def test_every_task_is_in_one_split() -> None:
    kept = [Verifiers(taskset="toy_verifiers", split=split).tasks for split in SPLIT_SHARES]
    assert sorted(task.data.idx for tasks in kept for task in tasks) == list(range(WORDS))
    assert len(Verifiers(taskset="toy_verifiers", split="all").tasks) == WORDS
    assert len(Verifiers(taskset="toy_verifiers", split="all", tasks=5).tasks) == 5


def test_role_with_its_own_model_is_not_a_seat() -> None:
    env = Verifiers(**PAIR, config={"guide": {"model": "some/model"}})
    assert env.seats == ("walker",)
    with pytest.raises(ValueError, match="has a model of its own"):
        Verifiers(taskset="toy_verifiers", config={"agent": {"model": "some/model"}})


def test_verifiers_config_is_passed_through() -> None:
    """The walker has one turn: the second is refused, and its first answer is scored."""
    episode = play(config={"walker": {"max_turns": 1}}, **PAIR)
    assert [list(node.answers) for node in episode.nodes] == [["guide"], ["walker"]]
    assert episode.error is None and episode.nodes[-1].rewards == {"guide": 1.0, "walker": 0.0}
    with pytest.raises(ValueError, match="max_tunrs"):
        Verifiers(taskset="toy_verifiers", config={"agent": {"max_tunrs": 1}})


def test_verifiers_failure_gives_a_failed_episode() -> None:
    episode = play(config={"taskset": {"task": {"rewards": {"broken": {"fn": "helpers.toy_verifiers:broken"}}}}})
    assert "verifiers reports this episode as failed" in episode.error and "out of order" in episode.error


def test_keys_do_not_stay_in_the_environment() -> None:
    play()
    assert not [name for name in os.environ if name.startswith("PALESTRA_API_KEY")]


def test_unsupported_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot make taskset no_such_words"):
        Verifiers(taskset="no_such_words")
    with pytest.raises(ValueError, match="none of the 1 tasks of toy_verifiers is in split"):
        [Verifiers(taskset="toy_verifiers", split=split, tasks=1) for split in SPLIT_SHARES]
