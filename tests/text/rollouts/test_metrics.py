"""Metrics of text episodes, by hand."""

import pytest

from palestra.core.types import Answer, Episode, Node
from palestra.text.rollouts.metrics import (
    episode_metrics,
    episode_return,
    instance_outcomes,
    policy_metrics,
    seat_returns,
)

SEATS = {"red": "a@0", "blue": "a@0"}


def node(number, parent, depth, rewards, team=0.0, **more):
    answers = {seat: Answer("x", "a@0") for seat in rewards}
    made = Node(number, parent, depth, {seat: "?" for seat in rewards}, answers, rewards, **more)
    made.team_reward = team
    return made


def test_return_is_team_reward_plus_mean_seat_return():
    nodes = [node(0, None, 0, {"red": 1.0}, team=0.5), node(1, 0, 1, {"blue": 2.0}, team=4.0, done=True)]
    assert episode_return(Episode("e", 0, SEATS, nodes)) == pytest.approx(4.5 + 3.0 / 2)


def test_shared_prefix_counts_for_each_trajectory():
    """A shared step that earns 1, and two leaves that earn 0 and 4: trajectories of 1 and 5."""
    nodes = [node(0, None, 0, {"red": 0.0}, team=1.0)]
    nodes += [node(i, 0, 1, {"blue": 0.0}, team=4.0 * (i - 1), done=True) for i in (1, 2)]
    assert episode_return(Episode("e", 0, SEATS, nodes)) == 3.0


def test_siblings_off_the_played_path_do_not_count():
    nodes = [node(0, None, 0, {"red": 1.0}, done=True), node(1, None, 0, {"red": 9.0}, done=True)]
    nodes[1].chosen = False
    assert episode_return(Episode("e", 0, {"red": "a@0"}, nodes)) == 1.0


def test_failed_episode_keeps_its_return_so_far():
    nodes = [node(0, None, 0, {"red": 1.0}), node(1, 0, 1, {"red": 9.0})]
    nodes[1].chosen = False
    assert episode_return(Episode("e", 0, {"red": "a@0"}, nodes, error="boom")) == 1.0
    assert episode_return(Episode("e", 0, {}, [], error="boom")) == 0.0


def test_rewards_in_steps_of_others_count_once_for_each_trajectory():
    """Blue ends both trajectories that start with red's two answers, and red gets 1 and 3 for it: 4 in all, 2 for each
    of its answers. The team gets 10 and 20."""
    nodes = [node(i, None, 0, {"red": 0.5}) for i in (0, 1)]
    nodes += [node(2 + i, i, 1, {"blue": 0.0}, team=10.0 * (i + 1), done=True) for i in (0, 1)]
    for last, reward in zip(nodes[2:], (1.0, 3.0), strict=True):
        last.rewards["red"] = reward
    red = policy_metrics([Episode("e", 0, {"red": "r@0", "blue": "b@0"}, _played_by(nodes))], "r")
    assert (red["answers"], red["local_reward"], red["team_reward"]) == (2, 2.5, 15.0)


def test_rewards_in_steps_of_others_are_means_over_a_full_tree():
    """Red answers once; then blue answers twice in two ways each, and play continues from all: red's reward after
    blue's second answers, 1, 2, 3 and 6, has the mean 3."""
    nodes = [node(0, None, 0, {"red": 0.0})]
    nodes += [node(i, 0, 1, {"blue": 0.0}) for i in (1, 2)]
    nodes += [node(3 + i, 1 + i // 2, 2, {"blue": 0.0}, done=True) for i in range(4)]
    for last, reward in zip(nodes[3:], (1.0, 2.0, 3.0, 6.0), strict=True):
        last.rewards["red"] = reward
    red = policy_metrics([Episode("e", 0, {"red": "r@0", "blue": "b@0"}, _played_by(nodes))], "r")
    assert (red["answers"], red["local_reward"]) == (1, 3.0)


def _played_by(nodes):
    """Returns the nodes with an answer of its own, by policy r or b, at each node."""
    for one in nodes:
        one.answers = {seat: Answer("x", f"{seat[0]}@0") for seat in one.answers}
    return nodes


def _ended(success: float | None, error: str | None = None, instance: int = 0) -> Episode:
    info = {} if success is None else {"success": success}
    return Episode("toy", instance, {"a": "a@0"}, [Node(0, None, 0, {}, {}, done=True, info=info)], error)


def test_success_is_over_the_envs_that_report_it():
    """Two episodes of an env that reports success, one of them cut off, and one of an env that does not."""
    other = _ended(None)
    other.env = "other"
    assert episode_metrics([_ended(True), other])["success"] == 1.0
    assert episode_metrics([_ended(True), _ended(None), other])["success"] == 0.5
    assert "success" not in episode_metrics([other])


def _paid(instance, reward, error=None):
    node = Node(0, None, 0, {}, {}, {"a": reward}, done=True)
    return Episode("toy", instance, {"a": "a@0"}, [node], error)


def test_interval_of_returns_is_over_instances():
    """Samples of 1 and 3 on one instance, 5 and 7 on another: the means 2 and 6 have the standard error 2. With one
    sample per instance it is the usual one: 1, 3, 5 and 7 have the variance 20 / 3. With one sample less, the mean is
    11 / 3, and the deviations of the instances, -10 / 3 and 10 / 3, have the standard error sqrt(2 * 200 / 9) / 3."""
    found = seat_returns([_paid(0, 1.0), _paid(0, 3.0), _paid(1, 5.0), _paid(1, 7.0), _paid(2, 9.0, error="broken")])
    half = pytest.approx(1.96 * 2)
    assert found == {"returns": {"a": 4.0}, "returns_ci95": {"a": half}, "return_ci95": half}
    single = seat_returns([_paid(i, 1.0 + 2 * i) for i in range(4)])
    assert single["returns_ci95"]["a"] == pytest.approx(1.96 * (20 / 3 / 4) ** 0.5)
    fewer = seat_returns([_paid(0, 1.0), _paid(0, 3.0), _paid(1, 7.0)])
    assert fewer["returns_ci95"]["a"] == pytest.approx(1.96 * (2 * 200 / 9) ** 0.5 / 3)
    assert seat_returns([_paid(0, 1.0), _paid(0, 3.0)])["returns_ci95"] == {}


def test_outcomes_have_a_letter_for_each_instance_in_order():
    broken = Episode("toy", 2, {"a": "a@0"}, [], "KeyError: 'boom'")
    played = [_ended(True), _ended(False, instance=1), broken, _ended(True, instance=3)]
    assert instance_outcomes(played) == {"outcomes": "10x1"}
    assert instance_outcomes([*played, _ended(False)]) == {"outcomes": "10x1"}  # instance 0 again
    assert instance_outcomes([_ended(None)]) == {}  # the env reports no success
