"""Alpha-rank: games of the papers, chains by hand, and OpenSpiel's distributions on random tables."""

import numpy as np
import pytest

from palestra.populations.normal_form import alpha_rank as module
from palestra.populations.normal_form.alpha_rank import alpha_rank, stationary_distribution
from palestra.populations.normal_form.payoff_tensors import marginals

RPS = np.array([[0.0, -1, 1], [1, 0, -1], [-1, 1, 0]])


def tables(seed, shape):
    return list(np.random.default_rng(seed).normal(size=(len(shape), *shape)))


def test_rock_paper_scissors_is_uniform():
    for one in marginals(alpha_rank([RPS, -RPS])):
        assert one == pytest.approx([1 / 3] * 3)


def test_battle_of_the_sexes_has_half_mass_on_each_equilibrium():
    """Omidshafiei et al. (2019), fig. 8."""
    found = alpha_rank([np.array([[3.0, 0], [0, 2]]), np.array([[2.0, 0], [0, 3]])])
    assert found == pytest.approx(np.eye(2) / 2, abs=1e-5)


def test_prisoners_dilemma_ends_in_defection():
    found = alpha_rank([np.array([[3.0, 0], [5, 1]]), np.array([[3.0, 5], [0, 1]])])
    assert found[1, 1] == pytest.approx(1, abs=1e-5)


def test_three_player_coordination_game():
    payoff = np.zeros((2, 2, 2))
    payoff[0, 0, 0] = payoff[1, 1, 1] = 1
    found = alpha_rank([payoff] * 3)
    assert found[0, 0, 0] == pytest.approx(0.5, abs=1e-5) == found[1, 1, 1]


def test_fixation_by_hand():
    """Two members of one player, gain g of the first over the second: the chain's ratio is e^((m - 1) alpha g)."""
    first, second = alpha_rank([np.array([0.3, 0.1])], alpha=2.0, m=5)
    assert first / second == pytest.approx(np.exp(4 * 2.0 * 0.2))


def test_strong_selection_does_not_overflow():
    found = alpha_rank([1e3 * RPS, -1e3 * RPS], alpha=100.0)
    assert np.isfinite(found).all() and found.sum() == pytest.approx(1)


@pytest.mark.parametrize("alpha", ["infinite", "sweep"])
def test_result_is_invariant_to_payoff_scale(alpha):
    payoffs = tables(3, (3, 4))
    assert alpha_rank([1e5 * table for table in payoffs], alpha=alpha) == pytest.approx(
        alpha_rank(payoffs, alpha=alpha), abs=1e-6
    )


def test_constant_payoffs_give_a_uniform_distribution():
    for alpha in ("infinite", "sweep", 3.0):
        assert alpha_rank([np.ones((2, 3))] * 2, alpha=alpha) == pytest.approx(np.full((2, 3), 1 / 6))


def test_result_is_equivariant_to_permutations():
    payoffs = tables(4, (3, 2, 4))
    found, order = alpha_rank(payoffs), [2, 0, 1]
    assert alpha_rank([table[order] for table in payoffs]) == pytest.approx(found[order], abs=1e-6)
    turned = [np.moveaxis(payoffs[player], 0, -1) for player in (1, 2, 0)]
    assert alpha_rank(turned) == pytest.approx(np.moveaxis(found, 0, -1), abs=1e-6)


@pytest.mark.parametrize("shape", [(3, 3), (4, 2), (2, 3, 2), (2, 2, 2, 2)])
def test_result_equals_openspiel(shape):
    theirs = pytest.importorskip("open_spiel.python.egt.alpharank")
    payoffs = tables(len(shape), shape)
    assert alpha_rank(payoffs).ravel() == pytest.approx(theirs.sweep_pi_vs_epsilon(payoffs), abs=1e-5)
    for alpha in (0.1, 1.0):
        assert alpha_rank(payoffs, alpha=alpha).ravel() == pytest.approx(
            theirs.compute(payoffs, alpha=alpha)[2], abs=1e-6
        )
    with np.errstate(over="ignore"):  # in OpenSpiel's table
        swept, alpha = theirs.sweep_pi_vs_alpha(payoffs, return_alpha=True)
    assert alpha_rank(payoffs, alpha=alpha).ravel() == pytest.approx(swept, abs=1e-3)


def test_alpha_sweep_equals_strong_selection():
    """In generic games the limit of alpha exists, so the sweep's result equals that of any large alpha."""
    payoffs = tables(2, (3, 3))
    assert alpha_rank(payoffs, alpha="sweep") == pytest.approx(alpha_rank(payoffs, alpha=100.0), abs=1e-4)


# ---- chains


def test_stationary_distribution_by_hand():
    """From 0 to 1 with probability 1/10 and back with 1/2; 1 to 2 and back alike: shares 5 : 1 : 1."""
    chain = np.array([[0, 0.1, 0], [0.5, 0, 0.3], [0, 0.3, 0]])
    assert stationary_distribution(chain) == pytest.approx([5 / 7, 1 / 7, 1 / 7])


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 150])
def test_stationary_distribution_is_a_fixed_point(size):
    chain = np.random.default_rng(size).random((size, size))
    chain /= chain.sum(axis=1, keepdims=True)
    share = stationary_distribution(chain.copy())
    assert share @ chain == pytest.approx(share) and share.sum() == pytest.approx(1)


def test_stationary_distribution_with_tiny_transition_rates():
    """Two pairs of states with transitions of 1e-40 between them: an eigenvector routine would find two chains, but the
    answer is 2 : 2 : 1 : 1."""
    chain = np.zeros((4, 4))
    chain[0, 1] = chain[1, 0] = chain[2, 3] = chain[3, 2] = 1
    chain[0, 2], chain[2, 0] = 1e-40, 2e-40
    assert stationary_distribution(chain) == pytest.approx(np.array([2, 2, 1, 1]) / 6)


def test_too_large_tables_are_refused(monkeypatch):
    monkeypatch.setattr(module, "MAX_PROFILES", 8)
    with pytest.raises(ValueError, match="alpha-rank of 9 profiles"):
        alpha_rank([RPS, -RPS])
