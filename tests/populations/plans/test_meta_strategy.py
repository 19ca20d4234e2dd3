"""Meta-strategies, and the opponents of responses to them, by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.populations.normal_form.payoff_tensors import member_returns, own_axis_first
from palestra.populations.plans.meta_strategy import (
    MetaStrategy,
    beaten_opponents,
    drop_negligible,
    equilibrium_gap,
    meta_opponents,
)
from palestra.populations.tasks import Lineup, Opponents

TWO = ("red", "blue")
RPS = np.array([[0.0, -1, 1], [1, 0, -1], [-1, 1, 0]])
CHICKEN = np.array([[0.0, 7], [2, 6]])  # dare, yield


def aumann():
    """The correlated equilibrium of chicken with probability 1/3 each for (dare, yield), (yield, dare) and (yield,
    yield)."""
    return MetaStrategy(TWO, (("dare", "yield"), ("dare", "yield")), np.array([[0, 1], [1, 1]]) / 3, is_correlated=True)


def test_independent_players_play_each_others_mixtures():
    meta = MetaStrategy.independent(TWO, (["a", "b"], ["c", "d"]), [np.array([0.25, 0.75]), np.array([1.0, 0.0])])
    assert meta_opponents(meta, "red") == Opponents({"blue": {"c": 1.0}})
    assert meta_opponents(meta, "blue") == Opponents({"red": {"a": 0.25, "b": 0.75}})


def test_shared_population_plays_its_own_mixture():
    """Seats share the first one's, whatever the solver found for the second."""
    meta = MetaStrategy.independent(("all", "all"), (["a", "b"],) * 2, [np.array([0.5, 0.5]), np.array([1.0, 0.0])])
    assert meta_opponents(meta, "all") == Opponents({"all": {"a": 0.5, "b": 0.5}})
    assert meta.joint.tolist() == [[0.25, 0.25], [0.25, 0.25]]


def test_correlated_players_play_conditional_joint_lineups():
    assert meta_opponents(aumann(), "red").joint == (
        Lineup({"blue": "dare"}, pytest.approx(1 / 3)),
        Lineup({"blue": "yield"}, pytest.approx(2 / 3)),
    )
    against_yield = meta_opponents(aumann(), "red", recommended="yield")
    assert against_yield == Opponents(joint=(Lineup({"blue": "dare"}, 0.5), Lineup({"blue": "yield"}, 0.5)))
    assert meta_opponents(aumann(), "red", recommended="dare").joint == (Lineup({"blue": "yield"}, 1.0),)


def test_joint_lineups_of_three_players_name_two_others():
    joint = np.zeros((1, 2, 2))
    joint[0, 0, 1] = joint[0, 1, 0] = 0.5
    meta = MetaStrategy(("a", "b", "c"), (("a0",), ("b0", "b1"), ("c0", "c1")), joint, is_correlated=True)
    opponents = meta_opponents(meta, "a")
    assert opponents.joint == (Lineup({"b": "b0", "c": "c1"}, 0.5), Lineup({"b": "b1", "c": "c0"}, 0.5))
    assert opponents.names() == ["b0", "c1", "b1", "c0"]
    assert meta_opponents(meta, "b", recommended="b1").joint == (Lineup({"a": "a0", "c": "c0"}, 1.0),)


def test_equilibrium_gaps_of_chicken():
    """Recommended to yield, daring earns 3.5 and yielding 4; recommended to dare, 7 and 6: an equilibrium of value 5
    for each. Without the recommendation, daring and yielding earn 14/3 each, 1/3 less."""
    tables = [CHICKEN, CHICKEN.T]
    assert equilibrium_gap(aumann(), tables, coarse=False) == pytest.approx(0)
    assert equilibrium_gap(aumann(), tables, coarse=True) == pytest.approx(-2 / 3)
    pure = MetaStrategy(TWO, (("dare", "yield"),) * 2, np.array([[0.0, 0], [0, 1]]), is_correlated=True)
    assert (
        equilibrium_gap(pure, tables, coarse=False) == equilibrium_gap(pure, tables) == pytest.approx(2)
    )  # both gain by daring: 7 - 6


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.lists(st.integers(1, 4), min_size=2, max_size=3))
def test_gap_of_independent_players_is_nash_conv(seed, shape):
    rng = np.random.default_rng(seed)
    tables = [rng.normal(size=shape) for _ in shape]
    strategies = [rng.dirichlet(np.ones(m)) for m in shape]
    seats = tuple("abc"[: len(shape)])
    meta = MetaStrategy.independent(
        seats, [[f"{s}{i}" for i in range(m)] for s, m in zip(seats, shape, strict=True)], strategies
    )
    earned = member_returns(own_axis_first(tables), strategies)
    gains = [own.max() - own @ strategy for own, strategy in zip(earned, strategies, strict=True)]
    assert equilibrium_gap(meta, tables) == pytest.approx(sum(gains), abs=1e-9)


def test_rectified_responses_play_opponents_they_beat():
    """Of rock, paper and scissors with equal weights: rock plays itself and scissors, never paper."""
    names = (["rock", "paper", "scissors"],) * 2
    meta = MetaStrategy.independent(("all", "all"), names, [np.full(3, 1 / 3)] * 2)
    assert beaten_opponents(meta, [RPS, -RPS], "all", "rock") == Opponents({"all": {"rock": 0.5, "scissors": 0.5}})


def test_rectified_response_that_beats_none_plays_all():
    meta = MetaStrategy.independent(TWO, (["good", "bad"], ["foe"]), [np.array([1.0, 0.0]), np.array([1.0])])
    payoff = np.array([[1.0], [-1.0]])
    assert beaten_opponents(meta, [payoff, -payoff], "red", "bad") == Opponents({"blue": {"foe": 1.0}})


def test_best_member_has_the_highest_return():
    meta = MetaStrategy.independent(TWO, (["a", "b", "c"], ["d"]), [np.array([1.0, 0, 0]), np.array([1.0])])
    payoff = np.array([[0.0], [2.0], [2.0]])
    assert meta.best_member([payoff, -payoff], "red") == "c"  # the newer of equals


def test_negligible_probabilities_are_dropped():
    assert drop_negligible({"a": 0.5, "b": 0.5 - 1e-9, "c": 1e-9}) == {"a": pytest.approx(0.5), "b": pytest.approx(0.5)}
