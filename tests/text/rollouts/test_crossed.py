"""Crossed joints: answers of seats that act at the same time are combined in all ways, and each answer is one
sample."""

import asyncio

import numpy as np
import pyarrow.parquet as pq
import pytest
from helpers.toys import Spoken

from palestra.core.types import Step
from palestra.envs.base import Env
from palestra.runs.episodes import SCHEMA, load_episodes, read_episodes, to_table
from palestra.runs.loop import PhaseTimer
from palestra.text.algorithms.grpo import GRPO
from palestra.text.policies.scripted import RandomPolicy
from palestra.text.rollouts.metrics import answers_of, policy_metrics
from palestra.text.rollouts.tree_rollout import Branching, EpisodeRunner, EpisodeSpec
from palestra.text.training.trainer import throughput


class Sums(Env):
    """Both seats answer with a number at the same time, then a alone, `turns` times; the team reward is the sum."""

    name = "sums"
    seats = ("a", "b")

    def __init__(self, turns=1):
        self.turns = turns

    def reset(self, seed):
        self.answers, self.left = [], 2 * self.turns
        return Step({"a": "both", "b": "both"})

    def step(self, actions):
        self.answers.append(sorted(actions.items()))
        self.left -= 1
        seen = {"a": str(self.answers)} | ({"b": str(self.answers)} if self.left % 2 == 0 else {})
        return Step(
            seen if self.left else {}, {"a": float(actions["a"])}, team_reward=sum(map(float, actions.values()))
        )


def grow(branching, *, turns=1, make_env=Sums, seats=("a", "b"), matches=1):
    team = {seat: Spoken(f"{seat}@1", lambda query, i: str(i)) for seat in seats}
    arena = EpisodeRunner(lambda: make_env(turns), "toy")
    return asyncio.run(arena.play_all([EpisodeSpec(i, team, i) for i in range(matches)], branching)), team


def texts_of(nodes):
    return ["".join(answer.text for answer in node.answers.values()) for node in nodes]


def test_siblings_are_all_combinations_of_the_answers():
    (episode,), team = grow(Branching("turn", 3, "best", joints="crossed"))
    first = episode.children(None)
    assert texts_of(first) == ["00", "01", "02", "10", "11", "12", "20", "21", "22"]
    # each sibling was stepped with its own actions
    assert [node.team_reward for node in first] == [0, 1, 2, 1, 2, 3, 2, 3, 4]
    assert [query.n for query in team["a"].queries] == [3, 3] and [query.n for query in team["b"].queries] == [3]
    for seat in "ab":
        own = {answer.text: answer for answer in team[seat].spoken[:3]}
        assert all(node.answers[seat] is own[node.answers[seat].text] for node in first)


def test_episode_continues_from_the_best_combination():
    (episode,), _ = grow(Branching("turn", 3, "best", joints="crossed"))
    assert [node.id for node in episode.nodes if node.chosen] == [8, 11]
    assert "('a', '2'), ('b', '2')" in episode.nodes[9].observations["a"]


def test_crossed_equals_paired_if_one_seat_acts():
    (episode,), _ = grow(Branching("turn", 3, "best", joints="crossed"))
    assert texts_of(episode.children(8)) == ["0", "1", "2"]


def test_paired_siblings_use_each_answer_once():
    (episode,), _ = grow(Branching("turn", 3, "best"))
    assert texts_of(episode.children(None)) == ["00", "11", "22"]
    (plain,), _ = grow(Branching(joints="crossed"))
    assert texts_of(plain.nodes) == ["00", "0"]  # with one answer each there is one combination


def test_full_tree_expands_every_combination():
    (episode,), _ = grow(Branching("turn", 2, "all", joints="crossed"), turns=2)
    assert [sum(node.depth == depth for node in episode.nodes) for depth in range(4)] == [4, 8, 32, 64]
    assert len(episode.leaves()) == 64 and episode.error is None


class Many(Env):
    """Thirteen seats that act at the same time."""

    seats = tuple("abcdefghijklm")

    def __init__(self, turns):
        self.turns = turns

    def reset(self, seed):
        return Step(dict.fromkeys(self.seats, "say"))

    def step(self, actions):
        return Step({}, team_reward=1.0)


def test_too_many_combinations_are_refused_before_sampling():
    (episode,), team = grow(Branching("turn", 2, "best", joints="crossed"), make_env=Many, seats=Many.seats)
    assert (
        "group_size: 2 answers of each of 13 seats (a, b, c" in episode.error
        and "make 8192 crossed joint answers" in episode.error
    )
    assert not team["a"].queries and not episode.nodes
    with pytest.raises(ValueError, match="more than the limit of 4096"):
        Branching(joints="crossed").joint_indices(65, ["a", "b"])
    assert len(Branching(joints="crossed").joint_indices(64, ["a", "b"])) == 4096


def test_crossed_trees_are_reproducible_from_the_seed():
    def drawn(seed):
        policy = RandomPolicy([str(i) for i in range(100)], length=1)
        arena = EpisodeRunner(lambda: Sums(2), "toy")
        branching = Branching("turn", 3, "epsilon", 0.5, joints="crossed")
        (episode,) = asyncio.run(arena.play_all([EpisodeSpec(0, {"a": policy, "b": policy}, seed)], branching))
        return texts_of(episode.nodes)

    assert drawn(1) == drawn(1) != drawn(2)


# ---- metrics


def test_metrics_count_a_shared_answer_once():
    """a answers 3 times with b and 3 times alone. Its first three earn (mean over b's) 0, 1, 2, and the team 1, 2, 3.
    The team reward while a is alone, 1 on average, also counts for each of b's answers."""
    episodes, _ = grow(Branching("turn", 3, "best", joints="crossed"))
    a, b = policy_metrics(episodes, "a"), policy_metrics(episodes, "b")
    assert (a["answers"], b["answers"]) == (6, 3)
    assert a["local_reward"] == pytest.approx((0 + 1 + 2 + 0 + 1 + 2) / 6)
    assert a["team_reward"] == pytest.approx((1 + 2 + 3 + 0 + 1 + 2) / 6) and b["team_reward"] == pytest.approx(2 + 1)
    assert a["tokens"] == len("a@1:0") and a["truncated_fraction"] == 0


def test_throughput_counts_a_shared_answer_once():
    episodes, team = grow(Branching("turn", 3, "best", joints="crossed"), matches=2)
    spoken = team["a"].spoken + team["b"].spoken
    assert {id(answer) for answer in answers_of(episodes)} == {id(answer) for answer in spoken} and len(spoken) == 18
    figures = throughput(episodes, PhaseTimer({"rollout": 2.0, "train": 2.0}))
    tokens = sum(len(answer.token_ids) for answer in spoken)
    assert figures == {"answers": 18.0, "tokens_per_s": tokens / 2, "answers_per_s": 18 / 4}
    assert throughput(episodes, PhaseTimer({"rollout": 1.0}), "b")["answers"] == 6


def test_shared_answers_survive_a_file_round_trip(tmp_path):
    """The credit of a file equals that of the original episode, although all answers have the same text."""
    episodes, _ = grow(Branching("turn", 4, "best", joints="crossed"), matches=2)
    for answer in answers_of(episodes):
        answer.token_ids = np.array([len(answer.text)], np.int32)
    pq.write_table(to_table(0, episodes), tmp_path / "e.parquet")
    loaded = load_episodes(tmp_path / "e.parquet")
    assert len(answers_of(loaded)) == len(answers_of(episodes)) == 2 * (4 + 4 + 4)
    algorithm = GRPO(group_size=4, credit="shapley", scale="none")
    for policy in "ab":
        ours, theirs = algorithm.build_samples(episodes, policy), algorithm.build_samples(loaded, policy)
        assert ours[1] == theirs[1] and len(ours[0]) == len(theirs[0]) > 0
        for one, other in zip(ours[0], theirs[0], strict=True):
            np.testing.assert_array_equal(one.advantages, other.advantages)


def test_file_without_draw_numbers_is_read(tmp_path):
    episodes, _ = grow(Branching("turn", 2, "best"))
    pq.write_table(to_table(0, episodes).drop_columns(["draw"]), tmp_path / "e.parquet")
    assert read_episodes(tmp_path / "e.parquet").schema.names == SCHEMA.names
    assert len(answers_of(load_episodes(tmp_path / "e.parquet"))) == 6


# ---- from crossed joints to samples


def test_each_crossed_answer_gives_one_sample():
    episodes, team = grow(Branching("turn", 3, "best", joints="crossed"), matches=2)
    for policy in "ab":
        samples, figures = GRPO(group_size=3, joints="crossed").build_samples(episodes, policy)
        taught = [id(sample.token_ids) for sample in samples if sample.has_gradient]
        assert len(taught) == len(set(taught))
        middle = [answer for answer in team[policy].spoken if answer.text == "1"]  # the value is the mean of its group
        assert len(taught) == len(team[policy].spoken) - len(middle)
        assert figures["zero_std_fraction"] == 0 and figures["influence/" + policy] == pytest.approx(expected(policy))


def expected(policy):
    """Of the score 2a + b, minus a/2: 1.5a + b, whose variances are in the ratio 2.25 : 1."""
    return {"a": 2.25 / 3.25, "b": 1 / 3.25}[policy]
