"""Credit where a sibling was lost: worked by hand for every estimator, from trees with a lost node."""

import numpy as np
import pytest

from palestra.core.types import Answer, Episode, Node
from palestra.text.algorithms.dpo import DPO
from palestra.text.algorithms.grpo import GRPO
from palestra.text.algorithms.kto import KTO
from palestra.text.algorithms.ppo import PPO
from palestra.text.algorithms.sft import SFT
from palestra.text.credit.estimators import counterfactual_credit, shapley_credit, total_effect_index

LOST = np.nan
Q = np.array([[1.0, LOST], [0.0, 0.5]])  # the known entries have the mean 1/2


def said(policy, *ids):
    tokens = np.array(ids, np.int32)
    return Answer(f"{ids}", f"{policy}@1", np.array([1, 2], np.int32), tokens, np.full(len(ids), -1.0, np.float32))


def played(values, branch_at="root"):
    """An episode of one step for each value; None: the sibling was lost."""
    nodes = [
        Node(i, None, 0, {"a": "?"}, {"a": said("p", 5 + i)}, {"a": value or 0.0}, done=value is not None)
        for i, value in enumerate(values)
    ]
    for node, value in zip(nodes, values, strict=True):
        node.error, node.chosen = ("ValueError: broke", False) if value is None else (None, True)
    return Episode("hand", 0, {"a": "p@1"}, nodes)


def advantages(algorithm, values):
    samples, _ = algorithm.build_samples([played(values)], "p")
    return {int(s.token_ids[0]) - 5: round(float(s.advantages[0]), 4) for s in samples}


@pytest.mark.parametrize("branch_at", ["root", "turn"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {0: 1.2247, 2: -1.2247, 3: 0.0}),  # 2, 0 and 1: mean 1, deviation sqrt(2/3)
        ({"scale": "none"}, {0: 1.0, 2: -1.0, 3: 0.0}),
        ({"scale": "none", "baseline": "others"}, {0: 1.5, 2: -1.5, 3: 0.0}),  # 2 - (0 + 1) / 2
        ({"scale": "none", "baseline": "max"}, {0: 0.0, 2: -2.0, 3: -1.0}),
        ({"scale": "none", "baseline": "none"}, {0: 2.0, 2: 0.0, 3: 1.0}),
        ({"scale": "batch", "baseline": "batch"}, {0: 1.2247, 2: -1.2247, 3: 0.0}),
    ],
)
def test_group_without_a_lost_sibling(branch_at, options, expected):
    assert advantages(GRPO(branch_at=branch_at, group_size=4, **options), [2.0, None, 0.0, 1.0]) == expected


@pytest.mark.parametrize("supervision", ["process", "turn"])
def test_turns_of_trajectories_without_a_lost_one(supervision):
    """Of one turn each, these are the advantages of the returns."""
    algorithm = GRPO(branch_at="root", group_size=4, supervision=supervision, scale="none")
    assert advantages(algorithm, [2.0, None, 0.0, 1.0]) == {0: 1.0, 2: -1.0, 3: 0.0}


def test_a_last_sibling_has_nothing_to_be_compared_with():
    assert advantages(GRPO(group_size=3), [None, 1.0, None]) == {1: 0.0}
    assert KTO(group_size=3).build_samples([played([None, 1.0, None])], "p")[0] == []
    assert len(KTO(group_size=3).build_samples([played([1.0])], "p")[0]) == 1  # a recorded answer stands alone


def test_pairs_sequences_and_imitation_leave_a_lost_sibling_out():
    episodes = [played([2.0, None, 0.0])]
    pairs, _ = DPO(branch_at="root", group_size=3, pairs="all").build_samples(episodes, "p")
    assert [s.token_ids.tolist() for s in pairs] == [[5], [7]]
    signs, _ = KTO(branch_at="root", group_size=3).build_samples(episodes, "p")
    assert [(int(s.token_ids[0]), float(s.advantages[0])) for s in signs] == [(5, 1.0), (7, -1.0)]
    sequences, _ = PPO(group_size=3).build_samples(episodes, "p")
    assert [(int(s.token_ids[0]), float(s.advantages[0])) for s in sequences] == [(5, 2.0), (7, 0.0)]
    best, _ = SFT(imitate="best", group_size=3).build_samples(episodes, "p")
    assert [s.token_ids.tolist() for s in best] == [[5]]


def test_crossed_credit_of_a_table_with_a_lost_entry_by_hand():
    """Coalitions are worth 1/2 (none), 1 and 1/4 (seat 0 alone), 1/2 and 1/2 (seat 1 alone)."""
    np.testing.assert_allclose(counterfactual_credit(Q, 0), [[0.5, LOST], [-0.5, 0.0]])
    np.testing.assert_allclose(counterfactual_credit(Q, 1), [[0.0, LOST], [-0.25, 0.25]])
    np.testing.assert_allclose(shapley_credit(Q, 0), [[0.5, LOST], [-0.375, -0.125]])
    np.testing.assert_allclose(shapley_credit(Q, 1), [[0.0, LOST], [-0.125, 0.125]])
    np.testing.assert_allclose(shapley_credit(Q, 0) + shapley_credit(Q, 1), Q - 0.5)
    assert total_effect_index(Q, 0) == pytest.approx(1.0)  # variances 1/6 and 1/6


@pytest.mark.parametrize(
    ("credit", "first", "second"),
    [
        ("group", [1.0, 0.25], [0.5, 0.5]),  # the mean over the known joint answers with an answer
        ("counterfactual", [0.5, -0.5], [0.0]),  # beside the chosen (0, 0); (0, 1) is lost
        ("shapley", [0.5, -0.375], [0.0]),
    ],
)
def test_crossed_groups_with_a_lost_joint_answer(credit, first, second):
    answers = {seat: [said(seat, 5), said(seat, 6)] for seat in "ab"}
    nodes = []
    for number, (i, j) in enumerate(np.ndindex(2, 2)):
        value = Q[i, j]
        node = Node(number, None, 0, {}, {"a": answers["a"][i], "b": answers["b"][j]}, team_reward=np.nan_to_num(value))
        node.chosen, node.done = number == 0, not np.isnan(value)
        node.error = "ValueError: broke" if np.isnan(value) else None
        nodes.append(node)
    episode = Episode("hand", 0, {"a": "a@1", "b": "b@1"}, nodes)
    algorithm = GRPO(group_size=2, joints="crossed", credit=credit)
    one, other = algorithm.groups(episode)
    np.testing.assert_allclose(one.values, first)
    np.testing.assert_allclose(other.values, second)
    _, metrics = algorithm.build_samples([episode], "a")
    assert metrics["counterfactual/a"] == 0.5 and metrics["shapley/a"] == 0.5
