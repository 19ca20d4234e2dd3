"""Rewards by turn: process supervision and returns to go by hand, in played trees, and with a reward model."""

import numpy as np
import pytest

from palestra.core.config import dump, validate
from palestra.core.types import Answer, Episode, Node
from palestra.runs import Run, read_lines
from palestra.runs.loop import run_training
from palestra.text.algorithms.grpo import GRPO
from palestra.text.build.build import build
from palestra.text.config import TextConfig
from palestra.text.credit.estimators import process_advantages, returns_to_go, state_advantages, turn_advantages

ROOT3 = 3**0.5


def lines(*rewards, other=()):
    """An episode of one branch for each list of rewards of seat "a"; after the turns in `other` seat "b" acts, which
    earns a 1."""
    episode = Episode("hand", 0, {"a": "p", "b": "q"})
    for own in rewards:
        parent = None
        for turn, reward in enumerate(own):
            add = [("a", reward)] + ([("b", 1.0)] if turn in other else [])
            for seat, earned in add:
                node = len(episode.nodes)
                text = Answer(
                    "x", f"{'p' if seat == 'a' else 'q'}@0", *np.array([[1], [node]]), np.zeros(1, np.float32)
                )
                episode.nodes.append(Node(node, parent, turn, {}, {seat: text}, {"a": earned}))
                parent = node
        episode.nodes[-1].done = True
    return episode


def credit(episode, **settings):
    """The advantages of seat "a", in the order of the nodes, and the samples."""
    config = GRPO(branch_at="root", group_size=2, **settings)
    samples, metrics = config.build_samples([episode], "p")
    return [node.advantages["a"] for node in episode.nodes if "a" in node.answers], samples, metrics


def test_returns_to_go_by_hand():
    assert returns_to_go([1, 0, 2]) == [3, 2, 2]
    assert returns_to_go([1, 0, 2], 0.5) == [1.5, 1, 2]
    assert returns_to_go([]) == []


def test_process_advantages_by_hand():
    """The four rewards have mean 1/4 and deviation sqrt(3)/4: normalised [-1/sqrt 3, sqrt 3] and [-1/sqrt 3] * 2."""
    found = process_advantages([[0, 1], [0, 0]])
    assert np.allclose(found, [[ROOT3 - 1 / ROOT3, ROOT3], [-2 / ROOT3, -1 / ROOT3]])
    found = process_advantages([[0, 1], [0, 0]], gamma=0.5)
    assert np.allclose(found, [[ROOT3 / 2 - 1 / ROOT3, ROOT3], [-1.5 / ROOT3, -1 / ROOT3]])
    assert process_advantages([[0, 1], [0, 0]], scale="none") == [[0.5, 0.75], [-0.5, -0.25]]
    assert process_advantages([[0, 1], [2]], baseline="none", scale="none") == [[1, 1], [2]]
    assert process_advantages([[1], [1, 1]]) == [[0], [0, 0]]
    assert process_advantages([]) == []


def test_turn_advantages_by_hand():
    """Returns to go [1, 1], [3, 1] and [2]: the third line has no second turn."""
    found = turn_advantages([[0, 1], [2, 1], [2]], scale="none")
    assert found == [[-1, 0], [1, 0], [0]]
    assert turn_advantages([[0, 1], [0, 3]], gamma=0.5) == [[-1, -1], [1, 1]]
    assert turn_advantages([[1], [1, 5]]) == [[-1], [1, 0]]  # no other second turn to compare with
    assert turn_advantages([[1], [1, 5]], baseline="max", scale="none") == [[-5], [0, 0]]


def test_state_advantages_by_hand():
    """State s has returns to go 3 and 1, t 2 and 4 in two trajectories at different turns, u only one."""
    found = state_advantages([["s", "t"], ["s"], ["u", "t"]], [[1, 2], [1], [0, 4]], scale="none")
    assert found == [[1, -1], [-1], [0, 1]]
    assert state_advantages([["s", "t"], ["t"]], [[1, 2], [4]], gamma=0.5) == [[0, -1], [1]]
    assert state_advantages([["s"], ["t"]], [[1], [5]], baseline="none", scale="none") == [[1], [5]]
    assert state_advantages([], []) == []


def test_answers_of_two_episodes_to_one_observation_are_compared():
    """The siblings of an episode see other boards in their second turns, which an episode of another instance saw."""
    one, two = lines([0, 1], [0, 0]), lines([0, 0], [0, 0])
    boards = {0: "start", 1: "start", 2: "left", 3: "right"}
    for episode in (one, two):
        for node, board in zip(sorted(episode.nodes, key=lambda node: node.depth), boards.values(), strict=True):
            node.observations = {"a": board}
    algorithm = GRPO(branch_at="root", group_size=2, scale="none", supervision="state")
    samples, metrics = algorithm.build_samples([one, two], "p")
    by_board: dict[str, list[float]] = {}
    for node in [*one.nodes, *two.nodes]:
        by_board.setdefault(node.observations["a"], []).append(node.advantages["a"])
    assert sorted(by_board["start"]) == [-0.25, -0.25, -0.25, 0.75]
    assert sorted(by_board["left"]) == [-0.5, 0.5] and by_board["right"] == [0, 0]
    assert len(samples) == 8 and metrics["zero_std_fraction"] == 0


def test_states_are_compared_without_siblings():
    """With a group of one, two episodes that begin on one board are still compared with each other."""
    one, two = lines([1]), lines([0])
    for episode in (one, two):
        episode.nodes[0].observations = {"a": "start"}
    samples, _ = GRPO(branch_at="root", group_size=1, scale="none", supervision="state").build_samples([one, two], "p")
    assert [sample.advantages.tolist() for sample in samples] == [[0.5], [-0.5]]


def test_a_turn_is_credited_with_what_follows_it():
    """A good first turn and a bad second one: the return of the trajectory would hide both."""
    episode = lines([1, 0], [0, 1])
    assert credit(episode)[0] == [0, 0, 0, 0]
    assert credit(episode, supervision="turn")[0] == [0, -1, 0, 1]
    assert credit(episode, supervision="process")[0] == [0, -1, 0, 1]
    assert credit(episode, supervision="process", gamma=0.5)[0] == [0.5, -1, -0.5, 1]


def test_samples_have_the_advantages_of_their_turns():
    advantages, samples, metrics = credit(lines([0, 1], [0, 0]), supervision="process")
    assert [sample.advantages.tolist() for sample in samples] == [pytest.approx([a]) for a in advantages]
    assert metrics == {"groups": 1.0, "zero_std_fraction": 0.0}
    _, samples, metrics = credit(lines([1, 1], [1, 1]), supervision="process", flat_groups="skip")
    assert samples == [] and metrics["zero_std_fraction"] == 1.0


def test_turn_reward_includes_what_others_add_before_the_next_turn():
    """After the first turn of each trajectory seat b's answer earns seat a another 1."""
    assert credit(lines([0, 1], [0, 0], other=(0,)), supervision="turn", scale="none")[0] == [0.5, 0.5, -0.5, -0.5]
    found = credit(lines([0, 1], [0, 0], other=(0,)), supervision="process", scale="none")[0]
    assert found == [0.5, 0.25, -0.5, -0.75]  # rewards [1, 1] and [1, 0], less their mean of 3/4


def test_rewards_before_a_seats_first_turn_are_ignored():
    episode = lines([0, 1], [0, 0])
    node = episode.nodes[0]
    node.answers = {"b": Answer("x", "q@0", *np.array([[1], [9]]), np.zeros(1, np.float32))}
    node.rewards = {"a": 100.0}
    group = next(GRPO(branch_at="root", group_size=2).groups(episode))
    assert group.seat == "a" and group.turn_rewards == [[1.0], [0.0, 0.0]] and group.values == [101.0, 0.0]


def test_refill_keeps_an_episode_with_advantages_of_turns_alone():
    settings = {"branch_at": "root", "group_size": 2, "flat_groups": "refill"}
    episode = lines([1, 0], [0, 1])
    assert not GRPO(**settings).has_signal(episode)
    assert GRPO(**settings, supervision="process").has_signal(episode)
    assert not GRPO(**settings, supervision="turn").has_signal(lines([1, 0], [1, 0]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"supervision": "process", "branch_at": "turn"}, "set branch_at: root"),
        ({"supervision": "process", "branch_at": "root", "baseline": "others"}, "set baseline: mean or none"),
        ({"supervision": "turn", "branch_at": "root", "scale": "batch"}, "scale: std or none"),
        ({"supervision": "turn", "branch_at": "root", "kl_in_reward": True, "kl_coef": 0.1}, "kl_in_reward: false"),
        ({"gamma": 0.9, "branch_at": "root"}, "set supervision: process, turn or state"),
        ({"supervision": "state", "branch_at": "root", "flat_groups": "refill"}, "set flat_groups: count or skip"),
    ],
)
def test_incompatible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        GRPO(**settings)


@pytest.mark.slow
@pytest.mark.parametrize("supervision", ["process", "turn", "state"])
def test_policy_learns_from_rewards_of_turns(base, tmp_path, supervision):
    """Each of four turns of a seat earns 1 for an answer of one parity: the return is 2 by chance."""
    tree = {
        "steps": 12,
        "episodes": 8,
        "env": {"type": "helpers.toys:Chant", "turns": 4},
        "policies": {"all": {"type": "lora", "base": str(base), "lr": 1e-2, "sampling": {"max_tokens": 1}}},
        "seats": dict.fromkeys(("caller", "herald", "walker"), "all"),
        "algorithm": {"type": "grpo", "branch_at": "root", "group_size": 4, "supervision": supervision, "gamma": 0.5},
        "evals": {"test": {"episodes": 20}},
    }
    config = validate(TextConfig, tree)
    with Run.create(tmp_path, dump(config), config.name) as run:
        assert run_training(build(config), run)
    after = read_lines(run.path / "evals.jsonl")[-1]["returns"]
    assert min(after.values()) > 3.6
