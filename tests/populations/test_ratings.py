"""Ratings: ladders with known Elo, and cycles that a rating cannot express."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from palestra.populations.payoffs import PayoffCell, PayoffTable
from palestra.populations.ratings import cross_play, cyclicity, fit_elo, openskill_ratings

NAMES = ["rock", "paper", "scissors"]
CYCLE = np.array([[0.0, 10, 90], [90, 0, 10], [10, 90, 0]])


def ladder(elo, games=1000.0):
    """Expected scores of these ratings."""
    points = games / (1 + 10 ** ((elo[None, :] - elo[:, None]) / 400))
    np.fill_diagonal(points, 0)
    return points


# ---- Elo


@settings(max_examples=12)
@example([600.0, 1987.0])
@given(st.lists(st.floats(600, 2000), min_size=2, max_size=7))
def test_elo_fit_recovers_known_ratings(planted):
    planted = np.array(planted)
    found = fit_elo(ladder(planted), mean=1500, prior_draws=0)
    assert found.elo_M - 1500 == pytest.approx(planted - planted.mean(), abs=1e-3)


def test_standard_errors_match_repeated_fits():
    """Two players, n even games: the difference of log-odds has variance 4 / n, half of it relative to the average."""
    assert fit_elo(np.array([[0, 50.0], [50, 0]]), prior_draws=0).stderr_M == pytest.approx(
        [400 / np.log(10) * 0.1] * 2
    )
    rng, planted = np.random.default_rng(0), np.array([1100.0, 1200, 1300, 1200])
    chance = ladder(planted, 1.0)
    fits, errors = [], []
    for _ in range(150):
        points = np.triu(rng.binomial(60, chance), 1).astype(float)
        fit = fit_elo(points + np.tril(60 - points.T, -1), prior_draws=0)
        fits.append(fit.elo_M)
        errors.append(fit.stderr_M)
    assert np.std(fits, axis=0) == pytest.approx(np.mean(errors, axis=0), rel=0.2)


def test_undefeated_member_has_a_finite_rating():
    points = np.array([[0, 10.0], [0, 0]])
    one, other = fit_elo(points).elo_M
    assert one - other == pytest.approx(400 * np.log10(10.5 / 0.5))
    with pytest.raises(ValueError, match="do not connect all members"):
        fit_elo(points, prior_draws=0)


def test_disconnected_members_are_refused():
    with pytest.raises(ValueError, match="some never met the others"):
        fit_elo(np.kron(np.eye(2), np.array([[0, 5.0], [5, 0]])))


def test_symmetric_cycle_has_equal_ratings():
    assert fit_elo(CYCLE).elo_M == pytest.approx([1200] * 3)


# ---- cycles


def test_cycle_is_reported():
    found = cyclicity(NAMES, CYCLE)
    assert found.share == pytest.approx(1) and found.groups == [NAMES]
    assert "rock, paper, scissors is beaten by another" in found.warning and "100%" in found.warning


def test_ladder_has_no_cyclicity():
    found = cyclicity(["a", "b", "c", "d"], ladder(np.array([1000.0, 1150, 1300, 1700])))
    assert found.share < 1e-4 and found.groups == [] and found.warning == ""


def test_partial_cyclicity_by_hand():
    """Log-odds of a ladder with steps of 1 and of a cycle of 1 are orthogonal: 1, 1, 2 and 1, 1, -1 have squared norms
    6 and 3, so a third of the sum is cyclic."""
    flow = np.array([[0, 2.0, 1], [-2, 0, 2], [-1, -2, 0]])
    games = 1e9
    points = games / (1 + np.exp(-flow))
    np.fill_diagonal(points, 0)
    assert cyclicity(NAMES, points).share == pytest.approx(1 / 3, abs=1e-3)


def test_insignificant_cycles_are_not_reported():
    """Three equals after ten games per pair: 6 : 4 all round may be chance; 600 : 400 is not."""
    lucky = np.array([[0, 6.0, 4], [4, 0, 6], [6, 4, 0]])
    assert cyclicity(NAMES, lucky).groups == [] and cyclicity(NAMES, 100 * lucky).groups == [NAMES]


def test_only_members_of_the_cycle_are_named():
    points = np.zeros((5, 5))
    points[:3, :3] = CYCLE
    points[3, :3], points[:3, 4], points[3, 4] = 100, 100, 100  # one beats all, one loses to all
    assert cyclicity([*NAMES, "best", "worst"], points).groups == [NAMES]


def test_no_games_give_no_cycle():
    assert cyclicity(NAMES, np.zeros((3, 3))) == (0.0, [], "")


# ---- OpenSkill


def test_openskill_ranks_by_results():
    skills = openskill_ratings([(("a", "b", "c"), (3, 2, 1)), (("c", "a"), (0, 1))] * 10)
    assert skills["a"].mu > skills["b"].mu > skills["c"].mu and skills["a"].sigma < 25 / 3


def test_openskill_by_hand():
    """One game of two newcomers (mu 25, sigma 25/3, beta 25/6), by Weng & Lin (2011, algorithm 4): the loser's and
    winner's mu move by sigma^2 / c * 1/2, c^2 = 2 sigma^2 + 2 beta^2."""
    skills = openskill_ratings([(("a", "b"), (1, 0))])
    sigma, beta = 25 / 3, 25 / 6
    move = sigma**2 / np.sqrt(2 * sigma**2 + 2 * beta**2) / 2
    assert skills["a"].mu == pytest.approx(25 + move, abs=0.01) and skills["b"].mu == pytest.approx(25 - move, abs=0.01)


def test_openskill_ignores_games_against_oneself():
    assert openskill_ratings([(("a", "a"), (1, 0))]) == {}


# ---- tables of two populations


def test_cross_play_table_by_hand():
    payoffs = PayoffTable(["all", "all"])
    for name in ("a", "b", "c"):
        payoffs.add_member("all", name)
    payoffs.add_games(["a", "c"], PayoffCell(2, (0.5, -0.5), (0.0, 0.0), (0, 0)))
    table = cross_play(payoffs, ["c"], ["a", "b"])
    assert table[0, 0] == -0.5 and np.isnan(table[0, 1])
