"""GRPO credit: groups and advantages by hand, and a test of each defect published for AT-GRPO's own code."""

import asyncio
import json
import re
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from helpers.toys import Spoken
from hypothesis import given
from hypothesis import strategies as st

from palestra.core.config import validate
from palestra.core.losses import LOSSES, LossInputs
from palestra.core.types import Answer, Episode, Node, Step
from palestra.engine.training.micro_batch import micro_batches
from palestra.envs.base import Env
from palestra.text.algorithms.grpo import GRPO, overlong_penalty
from palestra.text.build.build import with_max_length
from palestra.text.config import TextConfig
from palestra.text.credit.estimators import batch_spread, group_advantages
from palestra.text.rollouts.tree_rollout import Branching, EpisodeRunner, EpisodeSpec

names = count()


def answer(policy="p@0", ids=None):
    """An answer with tokens that no other answer has."""
    ids = [next(names), 7] if ids is None else ids
    n = len(ids)
    return Answer("x", policy, np.array([1, 2], np.int32), np.array(ids, np.int32), np.full(n, -0.25, np.float32))


def tree_of(*nodes, seats=None, error=None):
    """An episode from (parent, seat answers by policy, local rewards, team reward, over) in order."""
    episode = Episode("hand", 0, seats or {"a": "p", "b": "q"}, error=error)
    for parent, policies, local, team, over in nodes:
        depth = 0 if parent is None else episode.nodes[parent].depth + 1
        answers = {seat: answer(policy) for seat, policy in policies.items()}
        episode.nodes.append(Node(len(episode.nodes), parent, depth, {}, answers, local, team, done=over))
    return episode


def advantages(episode, seat):
    return [node.advantages.get(seat) for node in episode.nodes]


# ---- advantages of one group


@pytest.mark.parametrize("given", [[1.0], [1.0, 2.0, 3.0], None, "ab", [1.0, None], [0.5, float("nan")], [[1], [2]]])
def test_advantages_of_ones_own_rule_are_one_number_for_each_sibling(given):
    class Odd(GRPO):
        def advantages(self, values, group):
            return given

    tree = tree_of(*((None, {"a": "p"}, {"a": float(i)}, 0.0, True) for i in range(2)))
    with pytest.raises(
        ValueError, match=r"Odd\.advantages returned .*: return a list with a finite number for each of"
    ):
        Odd(branch_at="root", group_size=2).build_samples([tree], "p")


def test_advantages_by_hand():
    root3 = 3**0.5
    assert group_advantages([1, 0, 0, 0]) == pytest.approx([root3, -1 / root3, -1 / root3, -1 / root3])
    assert group_advantages([3, 1]) == pytest.approx([1, -1])  # sample std would give 0.707
    assert group_advantages([0, 0, 1, 5], scale="none") == pytest.approx([-1.5, -1.5, -0.5, 3.5])
    assert group_advantages([2, 2, 2]) == [0, 0, 0]
    assert group_advantages([-1.5]) == [0]


def test_leave_one_out_advantages_by_hand():
    """RLOO: of 1, 0, 0, 0 the first is 1 above the mean of the others; each other one is 1/3 below the mean of its
    others."""
    assert group_advantages([1, 0, 0, 0], baseline="others", scale="none") == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert group_advantages([3, 1], baseline="others", scale="none") == pytest.approx([2, -2])
    assert group_advantages([2, 2], baseline="others", scale="none") == [0, 0]


def test_advantages_from_the_largest_and_from_nothing_by_hand():
    assert group_advantages([1, 0, 3], baseline="max", scale="none") == [-2, -3, 0]
    assert group_advantages([2, 2], baseline="max", scale="none") == [0, 0]
    assert group_advantages([1, 0, 3], baseline="none", scale="none") == [1, 0, 3]
    assert group_advantages([2, 2], baseline="none", scale="none") == [2, 2]


def test_batch_deviation_by_hand():
    """Of -1, 1, -3, 3 and the zeros of a group with equal values the mean square is 20 / 6."""
    assert batch_spread([[-1, 1], [-3, 3], [0, 0]]) == pytest.approx((20 / 6) ** 0.5)
    assert batch_spread([]) == batch_spread([[0.0, 0.0]]) == 1


values = st.lists(st.floats(-100, 100).map(lambda x: round(x, 3)), min_size=2, max_size=9)


@given(values)
def test_advantages_sum_to_zero_and_increase_with_the_value(rewards):
    for scale in ("std", "none"):
        result = group_advantages(rewards, scale=scale)
        assert sum(result) == pytest.approx(0, abs=1e-6)
        for r, a in zip(rewards, result, strict=True):
            assert (a > 0) >= (r > np.mean(rewards) + 1e-6)
            assert (a < 0) >= (r < np.mean(rewards) - 1e-6)


@given(values, st.integers(-(10**9), 10**9))
def test_advantages_are_invariant_to_a_shift(rewards, shift):
    shifted = group_advantages([r + shift for r in rewards])
    assert shifted == pytest.approx(group_advantages(rewards), abs=1e-2)


@given(values, st.floats(1e-3, 1e6))
def test_standardised_advantages_are_invariant_to_a_scale(rewards, factor):
    assert group_advantages([r * factor for r in rewards]) == pytest.approx(group_advantages(rewards), abs=1e-4)


@given(values, st.randoms(use_true_random=False))
def test_advantages_follow_the_order_of_the_values(rewards, rng):
    order = list(range(len(rewards)))
    rng.shuffle(order)
    straight, shuffled = group_advantages(rewards), group_advantages([rewards[i] for i in order])
    assert shuffled == pytest.approx([straight[i] for i in order])


@pytest.mark.parametrize("value", [0.1, 1e9 + 0.1, -3e12, 1e-30])
@pytest.mark.parametrize("k", [2, 3, 7, 8])
def test_equal_values_give_zero_advantages(value, k):
    assert not any(group_advantages([value] * k))


def test_values_equal_up_to_rounding_give_zero_advantages():
    assert not any(group_advantages([0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1, 0.6]))


# ---- groups of whole trajectories


def two_lines(alpha):
    """Root branching: two trajectories of two turns; seat a acts first, then b."""
    a, b = {"a": "p@0"}, {"b": "q@0"}
    episode = tree_of(
        (None, a, {"a": 1.0}, 0.0, False),
        (None, a, {"a": 0.0, "b": 5.0}, 1.0, False),  # b is rewarded before it ever acts
        (0, b, {"b": 2.0, "a": 0.5}, 2.0, True),
        (1, b, {}, 0.0, True),
    )
    return episode, list(GRPO(branch_at="root", group_size=2, team_weight=alpha).groups(episode))


def test_trajectory_value_is_team_plus_own_rewards():
    _, groups = two_lines(alpha=0.5)
    assert [g.seat for g in groups] == ["a", "b"]
    assert groups[0].values == pytest.approx([1.0 + 0.5 * 0 + 0.5 + 0.5 * 2, 0.0 + 0.5 * 1])  # not b's 2.0 and 5.0
    assert groups[1].values == pytest.approx([0.5 * 2 + 2.0, 0.5 * 1 + 5.0])
    assert [[n.id for n in nodes] for g in groups for nodes in g.nodes] == [[0], [1], [2], [3]]


def test_roles_of_one_policy_share_the_advantage_of_their_trajectory():
    """MATPO: one policy plans, and works once in the first trajectory and twice in the second; the reward is the
    team's."""
    plan, work = {"planner": "p@0"}, {"worker": "p@0"}
    episode = tree_of(
        (None, plan, {}, 0.0, False),
        (None, plan, {}, 0.0, False),
        (0, work, {}, 1.0, True),
        (1, work, {}, 0.0, False),
        (3, work, {}, 0.0, True),
        seats={"planner": "p", "worker": "p"},
    )
    samples, _ = GRPO(branch_at="root", group_size=2).build_samples([episode], "p")
    assert advantages(episode, "planner")[:2] == pytest.approx([1, -1])
    assert advantages(episode, "worker")[2:] == pytest.approx([1, -1, -1])
    assert sorted(sample.advantages[0] for sample in samples) == pytest.approx([-1, -1, -1, 1, 1])


def winner_calls_worker():
    """One policy plans four times; only the first plan, which succeeds, calls a worker."""
    plan, work = {"planner": "p@0"}, {"worker": "p@0"}
    return tree_of(
        (None, plan, {}, 0.0, False),
        *[(None, plan, {}, 0.0, True)] * 3,
        (0, work, {}, 1.0, True),
        seats={"planner": "p@0", "worker": "p@0"},
    )


def test_a_worker_that_one_trajectory_called_has_the_advantage_of_all_siblings():
    """MATPO: of returns 1, 0, 0, 0 the first is root 3 deviations above the mean, for both seats."""
    episode, algorithm = winner_calls_worker(), GRPO(branch_at="root", group_size=4)
    samples, metrics = algorithm.build_samples([episode], "p")
    root3 = 3**0.5
    assert advantages(episode, "planner")[:4] == pytest.approx([root3, *[-1 / root3] * 3])
    assert advantages(episode, "worker")[4] == pytest.approx(root3)
    assert len(samples) == 5 and metrics == {"groups": 2.0, "zero_std_fraction": 0.0}
    assert algorithm.has_signal(episode)


def test_a_worker_is_credited_if_the_first_trajectory_does_not_call_it():
    episode = winner_calls_worker()
    episode.nodes[0].done, episode.nodes[3].done, episode.nodes[4].parent = True, False, 3
    samples, _ = GRPO(branch_at="root", group_size=4, scale="none").build_samples([episode], "p")
    assert advantages(episode, "worker")[4] == pytest.approx(0.75) and len(samples) == 5


def test_batch_deviation_is_of_answers():
    """Advantages 3/4, -1/4, -1/4, -1/4 of plans, and 3/4 of the one worker's answer."""
    episode = winner_calls_worker()
    GRPO(branch_at="root", group_size=4, scale="batch").build_samples([episode], "p")
    deviation = np.std([0.75, -0.25, -0.25, -0.25, 0.75])
    assert advantages(episode, "worker")[4] == pytest.approx(0.75 / deviation)


@pytest.mark.parametrize(
    ("settings", "worker"),
    [
        ({"baseline": "batch", "scale": "none"}, 1 - 2 / 5),  # the mean of five answers' values
        ({"baseline": "role", "scale": "none"}, 0.95),
        ({"supervision": "turn"}, 0.0),  # no sibling has a first turn of the worker to compare with
    ],
)
def test_other_measures_are_of_siblings_in_which_the_seat_acted(settings, worker):
    episode = winner_calls_worker()
    GRPO(branch_at="root", group_size=4, **settings).build_samples([episode], "p")
    assert advantages(episode, "worker")[4] == pytest.approx(worker)


def test_a_worker_of_its_own_policy_is_compared_with_its_own_siblings():
    episode = winner_calls_worker()
    episode.seats["worker"] = "q@0"
    episode.nodes[4].answers["worker"].policy = "q@0"
    GRPO(branch_at="root", group_size=4).build_samples([episode], "q")
    assert advantages(episode, "worker")[4] == 0


def test_other_seats_rewards_do_not_count():
    episode, _ = two_lines(alpha=0)
    GRPO(branch_at="root", group_size=2, team_weight=0).build_samples([episode], "q")
    for node in episode.nodes:
        node.rewards.pop("a", None)
    before = advantages(episode, "b")
    GRPO(branch_at="root", group_size=2, team_weight=0).build_samples([episode], "q")
    assert advantages(episode, "b") == before == [None, None, pytest.approx(-1), pytest.approx(1)]


def test_all_answers_of_a_trajectory_share_its_advantage():
    a = {"a": "p@0"}
    episode = tree_of(
        (None, a, {}, 0.0, False), (None, a, {}, 0.0, False), (0, a, {}, 1.0, True), (1, a, {}, 0.0, True)
    )
    samples, figures = GRPO(branch_at="root", group_size=2).build_samples([episode], "p")
    assert advantages(episode, "a") == pytest.approx([1, -1, 1, -1])
    assert figures == {"groups": 1.0, "zero_std_fraction": 0.0}
    order = [0, 2, 1, 3]
    for sample, i in zip(samples, order, strict=True):
        node = episode.nodes[i]
        assert sample.token_ids.tolist() == node.answers["a"].token_ids.tolist()
        assert sample.prompt_ids.tolist() == [1, 2]
        np.testing.assert_allclose(sample.advantages, [node.advantages["a"]] * 2)
        np.testing.assert_allclose(sample.logprobs, [-0.25, -0.25])


def test_trajectories_without_the_seat_are_not_in_its_group():
    a, b = {"a": "p@0"}, {"b": "q@0"}
    episode = tree_of(
        (None, a, {}, 9.0, True),  # ends before b's turn
        (None, a, {}, 0.0, False),
        (None, a, {}, 0.0, False),
        (1, b, {}, 1.0, True),
        (2, b, {}, 0.0, True),
    )
    groups = {g.seat: g for g in GRPO(branch_at="root", group_size=3).groups(episode)}
    assert groups["a"].values == [9.0, 1.0, 0.0]
    assert groups["b"].values == [1.0, 0.0]


# ---- groups of turns


def chain(policy="p@0"):
    """Turn branching; the sibling of the highest value, the second of each turn, continues."""
    a, b = {"a": policy}, {"b": "q@0"}
    return tree_of(
        (None, a, {"a": 0.0}, 0.0, False),
        (None, a, {"a": 1.0}, 0.0, False),
        (1, b, {"b": 0.0}, 3.0, True),
        (1, b, {"b": 3.0}, 4.0, True),
    )


def test_turn_groups_are_siblings_by_episode_parent_and_seat():
    groups = list(GRPO(branch_at="turn", group_size=2, team_weight=2.0).groups(chain()))
    assert [(g.seat, g.values) for g in groups] == [("a", [0.0, 1.0]), ("b", [6.0, 11.0])]
    assert [[n.id for n in nodes] for g in groups for nodes in g.nodes] == [[0], [1], [2], [3]]


def test_turn_value_is_the_step_reward_if_one_sibling_continues():
    """The later reward of 4.0 of the continued sibling must not be compared with siblings that were not continued."""
    assert next(iter(GRPO(branch_at="turn", continue_from="best", group_size=2).groups(chain()))).values == [0.0, 1.0]
    assert next(iter(GRPO(branch_at="turn", continue_from="random", group_size=2).groups(chain()))).values == [0.0, 1.0]


def test_simultaneous_seats_form_separate_groups():
    both = {"a": "p@0", "b": "q@0"}
    episode = tree_of((None, both, {"a": 1.0}, 0.0, True), (None, both, {"b": 1.0}, 0.0, True))
    algorithm = GRPO(branch_at="turn", group_size=2)
    algorithm.build_samples([episode], "p")
    algorithm.build_samples([episode], "q")
    assert advantages(episode, "a") == pytest.approx([1, -1])
    assert advantages(episode, "b") == pytest.approx([-1, 1])


def test_full_tree_value_adds_the_mean_of_its_children():
    a = {"a": "p@0"}
    episode = tree_of(
        (None, a, {}, 1.0, False),  # 0: 1 + mean(2 + mean(8, 0), 3) = 1 + mean(6, 3) = 5.5
        (None, a, {}, 2.0, False),  # 1: 2 + mean(1, 0) = 2.5
        (0, a, {}, 2.0, False),  # 2: 2 + mean(8, 0) = 6
        (0, a, {}, 3.0, True),  # 3
        (1, a, {}, 1.0, True),  # 4
        (1, a, {}, 0.0, True),  # 5
        (2, a, {}, 8.0, True),  # 6
        (2, a, {}, 0.0, True),  # 7
    )
    groups = list(GRPO(branch_at="turn", continue_from="all", group_size=2).groups(episode))
    assert [g.values for g in groups] == [[5.5, 2.5], [6.0, 3.0], [1.0, 0.0], [8.0, 0.0]]
    GRPO(branch_at="turn", continue_from="all", group_size=2, scale="none").build_samples([episode], "p")
    assert advantages(episode, "a") == pytest.approx([1.5, -1.5, 1.5, -1.5, 0.5, -0.5, 4.0, -4.0])
    # along every trajectory the advantages add up to what it earned above the tree's mean, 4
    for leaf in episode.leaves():
        line = episode.trajectory(leaf)
        assert sum(n.advantages["a"] for n in line) == pytest.approx(sum(n.team_reward for n in line) - 4)


def test_lookahead_counts_team_and_own_rewards_only():
    episode = tree_of(
        (None, {"a": "p@0"}, {"a": 1.0}, 0.0, False),
        (None, {"a": "p@0"}, {}, 0.0, True),
        (0, {"b": "q@0"}, {"b": 100.0, "a": 4.0}, 2.0, True),
        (0, {"b": "q@0"}, {}, 0.0, True),
    )
    groups = {
        (g.seat, g.nodes[0][0].id): g.values
        for g in GRPO(branch_at="turn", continue_from="all", group_size=2).groups(episode)
    }
    assert groups == {("a", 0): [1.0 + (4.0 + 2.0) / 2, 0.0], ("b", 2): [102.0, 0.0]}


@pytest.mark.parametrize("at", ["root", "turn"])
def test_failed_episodes_give_no_samples(at):
    episode = chain()
    episode.error = "RuntimeError: boom"
    samples, figures = GRPO(branch_at=at, group_size=2).build_samples([episode], "p")
    assert samples == [] and figures == {"groups": 0.0, "zero_std_fraction": 0.0}
    assert not any(node.advantages for node in episode.nodes)


@pytest.mark.parametrize("at", ["root", "turn"])
def test_episode_in_which_only_a_fixed_policy_differs_has_no_signal(at):
    """A frozen opponent's name has no version. Answers of b differ in reward, those of a do not."""
    both = {"a": "p@0", "b": "rival"}
    episode = tree_of((None, both, {"b": 1.0}, 0.0, True), (None, both, {"b": 0.0}, 0.0, True), seats=both)
    algorithm = GRPO(branch_at=at, group_size=2, flat_groups="refill")
    assert not algorithm.has_signal(episode)
    samples, _ = algorithm.build_samples([episode], "p")
    assert not any(sample.has_gradient for sample in samples)
    episode.nodes[0].rewards["a"] = 1.0
    assert algorithm.has_signal(episode)


@pytest.mark.parametrize(("flat_groups", "trained"), [("count", [0, 0, 1, 1]), ("skip", [1, 1]), ("refill", [1, 1])])
def test_flat_group_has_no_gradient_and_is_counted(flat_groups, trained):
    a = {"a": "p@0"}
    flat = tree_of((None, a, {}, 1.0, True), (None, a, {}, 1.0, True))
    algorithm = GRPO(branch_at="turn", group_size=2, flat_groups=flat_groups)
    samples, figures = algorithm.build_samples([flat, chain()], "p")
    assert figures == {"groups": 2.0, "zero_std_fraction": 0.5}
    assert [sample.has_gradient for sample in samples] == trained and advantages(flat, "a") == [0.0, 0.0]


def test_batch_scaling_uses_one_deviation():
    """Two groups, with values 0 and 2 and values 0 and 6: centred they are -1, 1, -3, 3, with a deviation of sqrt(5).
    With one deviation per group both would be -1 and 1."""
    a = {"a": "p@0"}
    one, other = (tree_of((None, a, {}, 0.0, True), (None, a, {}, high, True)) for high in (2.0, 6.0))
    GRPO(branch_at="turn", group_size=2, scale="batch").build_samples([one, other], "p")
    assert advantages(one, "a") == pytest.approx([-1 / 5**0.5, 1 / 5**0.5])
    assert advantages(other, "a") == pytest.approx([-3 / 5**0.5, 3 / 5**0.5])


# ---- baselines beyond the group


def alone(value, policy="p@0", seat="a"):
    """An episode of one answer."""
    return tree_of((None, {seat: policy}, {}, value, True))


def test_batch_baseline_covers_answers_without_siblings():
    """REINFORCE++: 0, 1 and 5 are -2, -1 and 3 from their mean, with a deviation of sqrt(14 / 3)."""
    episodes = [alone(0.0), alone(1.0), alone(5.0)]
    samples, figures = GRPO(group_size=1, baseline="batch", scale="batch").build_samples(episodes, "p")
    deviation = (14 / 3) ** 0.5
    assert [sample.advantages[0] for sample in samples] == pytest.approx(
        [-2 / deviation, -1 / deviation, 3 / deviation]
    )
    assert figures == {"groups": 3.0, "zero_std_fraction": 0.0}
    assert [advantages(e, "a") for e in episodes] == pytest.approx(np.array([[-2], [-1], [3]]) / deviation)


def test_batch_baseline_uses_own_episodes_only():
    """Returns of another policy in the same step are not part of the baseline."""
    episodes = [alone(0.0), alone(2.0), alone(100.0, policy="q@0")]
    samples, _ = GRPO(group_size=1, baseline="batch", scale="none").build_samples(episodes, "p")
    assert [sample.advantages[0] for sample in samples] == [-1, 1]


def test_role_average_persists_between_steps():
    """By env and seat, in the memory that is saved with the run: 0 -> 0.05 -> 0.0975 in the first step's two games."""
    algorithm, memory = GRPO(branch_at="root", group_size=1, baseline="role", scale="none"), {}
    first, _ = algorithm.build_samples([alone(1.0), alone(1.0), alone(-1.0, seat="b")], "p", memory)
    assert [s.advantages[0] for s in first] == pytest.approx([0.95, 0.9025, -0.95])
    assert memory == {"roles": {"hand": {"a": pytest.approx(0.0975), "b": pytest.approx(-0.05)}}}
    memory = json.loads(json.dumps(memory))
    other = alone(1.0)
    other.env = "another"
    again, _ = algorithm.build_samples([alone(1.0), other], "p", memory)
    assert [s.advantages[0] for s in again] == pytest.approx([0.95 * (1 - 0.0975), 0.95])
    assert memory["roles"]["another"] == {"a": pytest.approx(0.05)}


def test_role_baseline_uses_the_trajectory_return():
    """With root branching the return is that of the whole trajectory, and every turn of the seat has its advantage."""
    a, b = {"a": "p@0"}, {"b": "q@0"}
    line = tree_of((None, a, {"a": 1.0}, 0.0, False), (0, b, {}, 0.0, False), (1, a, {}, 2.0, True))
    samples, _ = GRPO(branch_at="root", group_size=1, baseline="role", scale="none").build_samples([line], "p", {})
    assert [s.advantages.tolist() for s in samples] == [pytest.approx([0.95 * 3] * 2)] * 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 1}, "no sibling to compare it with"),
        ({"group_size": 1, "baseline": "others", "scale": "none"}, "no sibling to compare it with"),
        ({"group_size": 1, "baseline": "role"}, "set scale: batch or none"),
        ({"baseline": "batch"}, "set scale: batch or none"),
        ({"baseline": "max"}, "set scale: batch or none"),
        ({"baseline": "none"}, "set scale: batch or none"),
        ({"baseline": "none", "scale": "none", "flat_groups": "refill"}, "set baseline: mean or others"),
        ({"baseline": "role", "scale": "none", "credit": "shapley"}, "set baseline: mean or others"),
        ({"branch_at": "root", "joints": "crossed"}, "set branch_at: turn"),
        ({"branch_at": "root", "credit": "counterfactual"}, "set branch_at: turn"),
    ],
)
def test_incompatible_settings_are_refused_with_the_reason(settings, message):
    with pytest.raises(ValueError, match=message):
        GRPO(**settings)


# ---- weights of tokens and answers


def sample_weights(samples):
    """Each sample's share of the batch's mean: per token, and in all."""
    (pack,) = micro_batches(samples, 10**6)
    return [
        (share, share * len(sample.token_ids)) for sample, share in zip(pack.samples, pack.token_weights, strict=True)
    ]


def two_lengths(stop="stop"):
    episode = tree_of((None, {"a": "p@0"}, {}, 0.0, True), (None, {"a": "p@0"}, {}, 1.0, True))
    for node, length in zip(episode.nodes, (1, 3), strict=True):
        node.answers["a"] = answer(ids=range(length))
    episode.nodes[1].answers["a"].stop_reason = stop
    return episode


def test_loss_aggregation_weights_tokens_or_answers_equally():
    """Of answers of 1 and 3 tokens: a quarter for each token, or a half for each answer."""
    by_token, _ = GRPO(group_size=2).build_samples([two_lengths()], "p")
    assert sample_weights(by_token) == [(0.25, 0.25), (0.25, 0.75)]
    by_answer, _ = GRPO(group_size=2, loss_aggregation="sequence").build_samples([two_lengths()], "p")
    assert sample_weights(by_answer) == pytest.approx(np.array([(0.5, 0.5), (1 / 6, 0.5)]))
    assert [s.advantages[0] for s in by_answer] == [s.advantages[0] for s in by_token] == [-1, 1]


def test_truncated_answers_count_in_the_group_without_gradient():
    episode = two_lengths("length")
    samples, _ = GRPO(group_size=2, overlong="drop", kl_coef=0.1).build_samples([episode], "p")
    assert [(len(s.token_ids), s.has_gradient) for s in samples] == [(1, True), (3, False)]
    assert samples[0].advantages[0] == -1 and sample_weights(samples)[0] == (0.25, 0.25)
    assert advantages(episode, "a") == [-1, 1]
    assert len(GRPO(group_size=2).build_samples([two_lengths("length")], "p")[0]) == 2


def test_overlong_buffer_beyond_the_limit_is_refused():
    """With it, an answer of two tokens would be penalised. The limit may also be that of the policies, known after
    validation."""
    message = "overlong_buffer: 64 is longer than the token limit of 16"
    with pytest.raises(ValueError, match=message):
        GRPO(overlong="penalty", max_completion_length=16, overlong_buffer=64)
    policy = {"type": "lora", "sampling": {"max_tokens": 16}}
    late = {"type": "grpo", "overlong": "penalty", "overlong_buffer": 64}
    config = {"env": {"type": "guess_number"}, "policies": {"agent": policy}, "algorithm": late}
    with pytest.raises(ValueError, match=message):
        with_max_length(validate(TextConfig, config), {"agent"})
    assert GRPO(overlong="penalty", max_completion_length=16, overlong_buffer=16).overlong_buffer == 16


def test_token_limit_is_that_of_the_policies_that_play():
    policies = {name: {"type": "lora", "sampling": {"max_tokens": n}} for name, n in [("agent", 16), ("other", 32)]}
    tree = {"env": {"type": "guess_number"}, "policies": policies, "algorithm": {"type": "grpo", "overlong": "penalty"}}
    config = validate(TextConfig, tree)
    assert with_max_length(config, {"agent"}).algorithm.max_completion_length == 16
    with pytest.raises(ValueError, match=r"max_tokens are 16, 32, .* set algorithm\.max_completion_length"):
        with_max_length(config, {"agent", "other"})


def test_a_constant_normaliser_divides_by_the_token_limit():
    """Dr. GRPO: the sums over answers of 1 and 3 tokens, divided by 2 answers times the limit of 8 tokens."""
    algorithm = GRPO(group_size=2, loss_aggregation="constant", max_completion_length=8)
    samples, _ = algorithm.build_samples([two_lengths()], "p")
    assert sample_weights(samples) == [(1 / 16, 1 / 16), (1 / 16, 3 / 16)]
    with pytest.raises(ValueError, match="set max_completion_length"):
        GRPO(group_size=2, loss_aggregation="constant").build_samples([two_lengths()], "p")


def test_overlong_penalty_by_hand():
    """DAPO, eq. 13, with a limit of 20 tokens and a buffer of 4: 0 up to 16 tokens, then a quarter for each."""
    assert [overlong_penalty(n, 20, 4) for n in (1, 16, 17, 19, 20, 25)] == [0, 0, 0.25, 0.75, 1, 1]


def test_overlong_penalty_lowers_the_value():
    """Rewards 0 and 1 for 1 and 3 tokens, of at most 3: with a buffer of 2 the second answer loses all of its reward,
    and the advantages of the group are not zero, although the penalty is not a reward."""
    episode = two_lengths()
    algorithm = GRPO(group_size=2, overlong="penalty", max_completion_length=3, overlong_buffer=2)
    assert next(iter(algorithm.groups(episode))).values == [0, 0] and algorithm.has_signal(episode)
    whole = algorithm.model_copy(update={"branch_at": "root"})
    assert next(iter(whole.groups(episode))).values == [0, 0]
    (penalty,) = algorithm.model_copy(update={"overlong_buffer": None}).penalties
    node = Node(0, None, 0, {}, {"a": answer(ids=[1, 2])}, {})
    assert penalty(node, "a") == 0


# ---- crossed joints


def crossing_of(table, local=None, chosen=None):
    """One joint step of seats a and b, whose siblings are all pairs of their answers, with the team rewards `table`."""
    rows, columns = len(table), len(table[0])
    own = {"a": [answer("p@0") for _ in range(rows)], "b": [answer("q@0") for _ in range(columns)]}
    episode = Episode("hand", 0, {"a": "p", "b": "q"})
    for i in range(rows):
        for j in range(columns):
            answers = {"a": own["a"][i], "b": own["b"][j]}
            rewards = local(i, j) if local else {}
            node = Node(len(episode.nodes), None, 0, {}, answers, rewards, table[i][j], done=True)
            node.chosen = (i, j) == (chosen or (0, 0))
            episode.nodes.append(node)
    return episode


TABLE = [[4.0, 0.0], [0.0, 2.0]]


def credits(episode, seat, **settings):
    """The samples' advantages of the policy at `seat`, unscaled, and the metrics."""
    samples, figures = GRPO(group_size=2, scale="none", **settings).build_samples([episode], {"a": "p", "b": "q"}[seat])
    return [float(sample.advantages[0]) for sample in samples], figures


def test_shared_answer_is_one_sample_with_the_mean_value():
    """The rows 4, 0 and 0, 2 have the values 2 and 1."""
    episode = crossing_of(TABLE)
    given, figures = credits(episode, "a", joints="crossed")
    assert given == [0.5, -0.5] and figures["groups"] == 1
    assert advantages(episode, "a") == [0.5, 0.5, -0.5, -0.5]
    assert credits(episode, "b", joints="crossed")[0] == [0.5, -0.5]
    assert advantages(episode, "b") == [0.5, -0.5, 0.5, -0.5]


def test_credit_is_relative_to_the_continued_joint():
    """From (0, 0): a's answers change the value to 4 and 0; for Shapley, the mean of that and of 0.5 and -0.5."""
    assert credits(crossing_of(TABLE), "a", credit="counterfactual")[0] == [2, -2]
    assert credits(crossing_of(TABLE, chosen=(1, 1)), "a", credit="counterfactual")[0] == [-1, 1]
    assert credits(crossing_of(TABLE), "a", credit="shapley")[0] == [1.25, -1.25]
    assert credits(crossing_of(TABLE, chosen=(1, 1)), "b", credit="shapley")[0] == [-0.25, 0.25]
    assert credits(crossing_of(TABLE), "a", credit="counterfactual", baseline="others")[0] == [4, -4]


def test_credit_is_the_group_mean_if_all_joints_continue():
    for credit in ("counterfactual", "shapley"):
        episode = crossing_of(TABLE)
        for node in episode.nodes:
            node.chosen = True
        assert credits(episode, "a", credit=credit, continue_from="all")[0] == [0.5, -0.5]


def test_each_seat_is_credited_with_its_own_mixed_reward():
    """a is paid 10 for its first answer, which is no part of b's credit."""
    episode = crossing_of(TABLE, local=lambda i, j: {"a": 10.0 * (i == 0)})
    assert credits(episode, "a", credit="counterfactual")[0] == [7, -7]
    assert credits(episode, "b", credit="counterfactual")[0] == [2, -2]


def test_metrics_give_the_contribution_of_each_seat():
    """At (0, 0), of value 2.5 above the mean. a's counterfactuals 2, -1, -2 and 1 have a mean square of 2.5, of the
    table's variance of 2.75."""
    _, figures = credits(crossing_of(TABLE), "a", credit="shapley")
    assert figures == pytest.approx(
        {"groups": 1, "zero_std_fraction": 0, "counterfactual/a": 2, "shapley/a": 1.25, "influence/a": 2.5 / 2.75}
    )
    _, figures = credits(crossing_of(TABLE, chosen=(1, 0)), "b", joints="crossed")
    assert figures["counterfactual/b"] == -1 and figures["shapley/b"] == -0.25 and "shapley/a" not in figures


def test_influence_metric_reveals_a_lazy_seat():
    """The team reward depends on a's answer alone."""
    lazy = crossing_of([[3.0, 3.0], [1.0, 1.0]])
    given, figures = credits(lazy, "b", credit="counterfactual")
    assert given == [0, 0] and (figures["influence/b"], figures["shapley/b"], figures["zero_std_fraction"]) == (0, 0, 1)
    assert credits(lazy, "a", credit="counterfactual")[1]["influence/a"] == 1


def test_all_credits_equal_group_advantages_for_one_seat():
    plain = chain()
    expected = advantages(plain, "a") if GRPO(group_size=2).build_samples([plain], "p") else None
    for settings in ({"joints": "crossed"}, {"credit": "counterfactual"}, {"credit": "shapley"}):
        episode = chain()
        for node in episode.nodes:
            node.chosen = node.id in (1, 3)
        _, figures = GRPO(group_size=2, **settings).build_samples([episode], "p")
        assert advantages(episode, "a")[:2] == pytest.approx(expected[:2]) and len(figures) == 2


@pytest.mark.parametrize("settings", [{"joints": "crossed"}, {"credit": "counterfactual"}, {"credit": "shapley"}])
def test_crossed_credit_sets_crossed_joints(settings):
    assert GRPO(**settings).branching.joints == "crossed" and GRPO().branching.joints == "paired"
    pairs = crossing_of(TABLE)
    pairs.nodes = [pairs.nodes[0], pairs.nodes[3]]
    with pytest.raises(ValueError, match="2 siblings are not every combination of what a, b answered"):
        GRPO(group_size=2, **settings).build_samples([pairs], "p")


def test_equal_texts_are_separate_answers():
    """Two draws of one text are two samples, as in any group: answers are shared, texts are not."""
    episode = crossing_of(TABLE)
    for node in episode.nodes:
        for said in node.answers.values():
            said.token_ids = np.array([5], np.int32)
    assert len(credits(episode, "a", joints="crossed")[0]) == 2


TABLE_OF_NAMES = Path(__file__).parents[3] / "docs" / "algorithms" / "grpo.md"


def test_every_documented_preset_is_a_config():
    rows = re.findall(r"^\| ([^|]+) \| `(\{[^`]+\})`", TABLE_OF_NAMES.read_text(encoding="utf-8"), re.MULTILINE)
    found = {name.split(" (")[0]: GRPO.model_validate(yaml.safe_load(config)) for name, config in rows}
    assert len(found) == 20 and found["GRPO, process supervision"].supervision == "process"
    assert found["RAE"].baseline == "role" and found["RLOO"].scale == "none"
    assert found["GSPO"].loss_options == pytest.approx(
        {"clip_low_threshold": 0.9997, "clip_high_threshold": 1.0004, "importance_cap": 2.0}
    )
    assert found["AT-GRPO"].branching == Branching("turn", 4, "best", 0.1, 1.0)


@pytest.mark.parametrize(
    ("settings", "loss", "options"),
    [
        ({}, "clipped_policy", {"clip": 0.2}),
        ({"clip_high": 0.28, "dual_clip": 3.0}, "clipped_policy", {"clip": 0.2, "clip_high": 0.28, "dual_clip": 3.0}),
        ({"surrogate": "cispo", "clip_high": 3.0, "kl_coef": 0.1}, "cispo", {"clip_high_threshold": 4.0, "kl": 0.1}),
        ({"surrogate": "cispo"}, "cispo", {}),
        ({"surrogate": "gspo", "clip": 1.0}, "gspo", {"clip_low_threshold": 0.0, "clip_high_threshold": 2.0}),
        (
            {"surrogate": "gspo", "clip": 3e-4, "clip_high": 4e-4},
            "gspo",
            {"clip_low_threshold": 0.9997, "clip_high_threshold": 1.0004},
        ),
    ],
)
def test_each_surrogate_maps_to_its_loss_and_bounds(settings, loss, options):
    algorithm = GRPO(**settings)
    assert algorithm.loss is LOSSES[loss]
    assert algorithm.loss_options == pytest.approx(options | {"importance_cap": 2.0})
    for free in ({"importance_cap": None}, {"old_logprobs": "sampler"}):
        assert GRPO(**settings, **free).loss_options == pytest.approx(options)


def test_cispo_bounds_ratios_by_4_unless_clip_high_is_set():
    """One of 3 is within, one of 9 is not. With `clip` for both bounds 1.2 would be the largest."""
    ratio = torch.tensor([3.0, 9.0])
    logp = torch.zeros(2, requires_grad=True)
    tokens = LossInputs(logp, torch.zeros(2), -ratio.log(), None, torch.ones(2), torch.ones(2))
    for settings, expected in (({}, [-3.0, -4.0]), ({"clip_high": 0.5}, [-1.5, -1.5])):
        algorithm = GRPO(surrogate="cispo", **settings)
        loss, _ = algorithm.loss(tokens, **algorithm.loss_options)
        (slope,) = torch.autograd.grad(loss, logp)
        assert slope.tolist() == pytest.approx(expected)


def test_setting_of_another_surrogate_is_refused():
    with pytest.raises(ValueError, match="dual_clip applies only to surrogate: clipped"):
        GRPO(surrogate="gspo", dual_clip=3.0)


def test_policy_versions_match_and_other_names_do_not():
    assert len(GRPO(branch_at="turn", group_size=2).build_samples([chain("p@17")], "p")[0]) == 2
    assert GRPO(branch_at="turn", group_size=2).build_samples([chain("pp@17")], "p")[0] == []


def test_answers_without_tokens_get_an_advantage_but_no_sample():
    episode = chain()
    for node in episode.nodes:
        for said in node.answers.values():
            said.token_ids = np.zeros(0, np.int32)
    assert GRPO(branch_at="turn", group_size=2).build_samples([episode], "p")[0] == []
    assert advantages(episode, "a")[:2] == pytest.approx([-1, 1])


# ---- the router: three seats, two policies


class Council(Env):
    """Three seats speak in turn, twice; each is paid the number after the point of its answer."""

    name = "council"
    seats = ("x", "y", "z")

    def reset(self, seed):
        self.seed, self.said = seed, []
        return self.ask({})

    def ask(self, rewards):
        if len(self.said) == 6:
            return Step({}, rewards)
        return Step({self.seats[len(self.said) % 3]: f"{self.seed} {self.said}"}, rewards)

    def step(self, actions):
        ((seat, text),) = actions.items()
        self.said.append(text)
        return self.ask({seat: float(text.split(".")[1])})


@pytest.mark.parametrize("at", ["root", "turn"])
def test_learners_get_exactly_their_own_answers(at):
    shared = Spoken("shared@3", lambda query, i: f"{len(shared.queries)}.{(query.seed + i) % 9973}")
    alone = Spoken("alone@3", lambda query, i: f"{len(alone.queries)}.{(query.seed + i) % 9973}")
    algorithm = GRPO(branch_at=at, group_size=4)
    matches = [EpisodeSpec(i, {"x": shared, "y": alone, "z": shared}, i) for i in range(3)]
    episodes = asyncio.run(EpisodeRunner(Council, "council").play_all(matches, algorithm.branching))
    for policy in (shared, alone):
        samples, _ = algorithm.build_samples(episodes, policy.name.split("@")[0])
        taught = sorted(bytes(s.token_ids.astype(np.uint8)) for s in samples)
        said = sorted(bytes(a.token_ids.astype(np.uint8)) for a in policy.spoken)
        assert taught == said and len(said) == len(set(said)) == 3 * 4 * (4 if policy is shared else 2)
        for sample in samples:
            assert (sample.logprobs == -0.5).all() and len(set(sample.advantages.tolist())) == 1


# ---- published defects of the authors' code, one test each


class Relay(Env):
    """In each turn a says a digit, then b; both are added to a sum that all seats observe. Deterministic.

    Each seat has its own digit as local reward, so different siblings have different rewards.
    """

    name = "relay"
    seats = ("a", "b")

    def __init__(self, turns=3):
        self.turns = turns

    def reset(self, seed):
        self.seed, self.sum, self.turn, self.heard = seed, 0, 0, "-"
        return self.ask("a", {})

    def ask(self, seat, rewards):
        seen = f"instance {self.seed} turn {self.turn} sum {self.sum} heard {self.heard}"
        return Step({seat: seen} if self.turn < self.turns else {}, rewards, info={"sum": self.sum})

    def step(self, actions):
        ((seat, text),) = actions.items()
        self.sum, self.heard = self.sum + int(text), text
        self.turn += seat == "b"
        return self.ask("b" if seat == "a" else "a", {seat: float(text)})


def digit(query, i):
    """K different digits that depend on the seed, so that the best sibling varies."""
    return str((query.seed + 2 * i) % 9 + 1)


def relay(branching, instances=(5,), turns=3):
    team = {"a": Spoken("a@0", digit), "b": Spoken("b@0", digit)}
    matches = [EpisodeSpec(i, team, 11 + i) for i in instances]
    return asyncio.run(EpisodeRunner(lambda: Relay(turns), "relay").play_all(matches, branching))


TREES = [
    Branching(),
    Branching("root", 4),
    *(Branching("turn", 4, keep, 0.5) for keep in ("best", "random", "epsilon")),
]
FULL = Branching("turn", 2, "all")


@pytest.mark.parametrize("branching", [*TREES, FULL], ids=str)
def test_defect_1_second_seat_observes_the_first_in_the_same_turn(branching):
    (episode,) = relay(branching)
    heard = [(n, episode.nodes[n.parent]) for n in episode.nodes if "b" in n.answers]
    assert heard
    for node, first in heard:
        assert node.observations["b"].endswith(f"heard {first.answers['a'].text}")
        turn = node.observations["b"].split(" sum")[0]
        assert first.observations["a"].startswith(turn)  # the same turn, not the one before


@pytest.mark.parametrize("branching", TREES[2:], ids=str)
def test_defect_2_siblings_of_every_seat_differ_in_reward_and_advantage(branching):
    (episode,) = relay(branching)
    algorithm = GRPO(branch_at="turn", group_size=4, continue_from=branching.continue_from)
    groups = list(algorithm.groups(episode))
    assert [g.seat for g in groups] == ["a", "b"] * 3
    for group in groups:
        assert len(set(group.values)) == 4
        assert group.values == [float(nodes[0].answers[group.seat].text) for nodes in group.nodes]
    for seat in "ab":
        samples, figures = algorithm.build_samples([episode], seat)
        assert len(samples) == 12 and figures["zero_std_fraction"] == 0
        assert all(sample.advantages.any() for sample in samples)
        for siblings in (episode.children(n.parent) for n in episode.nodes if seat in n.answers):
            assert len({n.advantages[seat] for n in siblings}) == 4


@pytest.mark.parametrize("branching", [*TREES, FULL], ids=str)
def test_defect_3_episode_continues_from_the_chosen_sibling(branching):
    (episode,) = relay(branching)
    parents = {node.parent for node in episode.nodes}
    assert {n.id for n in episode.nodes if n.chosen and not n.done} == parents - {None}
    for node in episode.nodes:
        before = episode.trajectory(node)[:-1]
        ((_, seen),) = node.observations.items()
        said = sum(int(a.text) for n in before for a in n.answers.values())
        assert f"turn {len(before) // 2} sum {said} " in seen
    for leaf in episode.leaves():
        assert leaf.info["sum"] == sum(int(a.text) for n in episode.trajectory(leaf) for a in n.answers.values())


@pytest.mark.parametrize("branching", [*TREES, FULL], ids=str)
def test_defect_4_a_group_never_spans_two_instances_or_observations(branching):
    episodes = relay(branching, instances=range(6))
    algorithm = GRPO(branch_at=branching.branch_at, group_size=4, continue_from=branching.continue_from)
    for episode in episodes:
        for group in algorithm.groups(episode):
            firsts = {nodes[0].observations[group.seat] for nodes in group.nodes}
            assert len({text.split(" turn")[0] for text in firsts}) == 1
            if branching.branch_at == "turn" or group.seat == "a":
                assert len(firsts) == 1  # the identical prompt
    together = [s for e in episodes for s in algorithm.build_samples([e], "a")[0]]
    for one, other in zip(algorithm.build_samples(episodes, "a")[0], together, strict=True):
        np.testing.assert_array_equal(one.advantages, other.advantages)  # no episode changes the credit of another
