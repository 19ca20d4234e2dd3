"""Matchmaking: mixtures by hand, and their properties."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from palestra.populations.plans.matchmaking import (
    HistoryMatchmaker,
    LatestMatchmaker,
    MatchmakerConfig,
    MetaSolverMatchmaker,
    PFSPMatchmaker,
    pfsp,
)

NAMES = ["m0", "m1", "m2", "m3"]
RATES = {"m0": 0.9, "m1": 0.5, "m2": 0.2, "m3": 1.0}


@pytest.mark.parametrize(
    ("weighting", "weights"),
    [  # Vinyals et al. (2019) at win rates 0.9, 0.5, 0.2, 1
        ("squared", [0.01, 0.25, 0.64, 0]),
        ("variance", [0.09, 0.25, 0.16, 0]),
        ("linear", [0.1, 0.5, 0.8, 0]),
        ("capped", [0.1, 0.5, 0.5, 0]),
    ],
)
def test_pfsp_by_hand(weighting, weights):
    want = np.array(weights) / sum(weights)
    assert pfsp(np.array(list(RATES.values())), weighting) == pytest.approx(want)
    mix = PFSPMatchmaker(weighting=weighting).mix(NAMES, RATES, {})
    assert mix == pytest.approx(dict(zip(NAMES[:3], want[:3], strict=True))) and "m3" not in mix


@pytest.mark.parametrize("weighting", ["squared", "variance", "linear", "capped"])
@settings(max_examples=20)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=9))
def test_pfsp_is_a_distribution(weighting, rates):
    shares = pfsp(np.array(rates), weighting)
    assert (shares >= 0).all() and shares.sum() == pytest.approx(1)


def test_pfsp_is_uniform_for_a_learner_that_beats_all():
    assert pfsp(np.ones(4), "squared").tolist() == [0.25] * 4
    assert pfsp(np.array([0.0, 1.0]), "variance").tolist() == [0.5, 0.5]


def test_unknown_opponents_have_win_rate_one_half():
    assert PFSPMatchmaker(weighting="linear").mix(["a", "b"], {"a": 0.75}, {}) == pytest.approx(
        {"a": 1 / 3, "b": 2 / 3}
    )


def test_history_matchmaker_by_hand():
    assert LatestMatchmaker().mix(NAMES, {}, {}) == {"m3": 1.0}
    assert HistoryMatchmaker().mix(NAMES, {}, {}) == dict.fromkeys(NAMES, 0.25)
    assert HistoryMatchmaker(delta=0).mix(NAMES, {}, {}) == {"m3": 1.0}
    assert HistoryMatchmaker(delta=0.5).mix(NAMES, {}, {}) == {"m2": 0.5, "m3": 0.5}
    assert HistoryMatchmaker(delta=0.6).mix(NAMES, {}, {}) == pytest.approx({"m1": 1 / 3, "m2": 1 / 3, "m3": 1 / 3})


def test_meta_solver_matchmaker_uses_the_solution():
    assert MetaSolverMatchmaker().mix(NAMES, {}, {"m1": 0.25, "m2": 0.75}) == {"m1": 0.25, "m2": 0.75}


def test_matchmakers_are_selected_by_type():
    made = TypeAdapter(MatchmakerConfig).validate_python({"type": "history", "delta": 0.3})
    assert made == HistoryMatchmaker(delta=0.3)
    with pytest.raises(ValueError, match="delta: should be less than or equal to 1"):
        HistoryMatchmaker(delta=1.5)


def test_invalid_win_rates_are_refused():
    with pytest.raises(ValueError, match="win rates from 0 to 1"):
        pfsp(np.array([0.5, 1.2]))
    with pytest.raises(ValueError, match="win rates from 0 to 1"):
        pfsp(np.array([]))
