"""Token-level GAE and standardised advantages: known answers, limits and properties."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from palestra.text.credit.estimators import explained_variance, gae, standardise
from palestra.vector.nets import advantages as vectorised


def row(*numbers):
    return np.array(numbers, np.float32)


# ---- generalised advantage estimates


def test_gae_by_hand():
    # errors: 0 + .5*2 - 1 = 0; 1 + .5*4 - 2 = 1; 2 - 4 = -2; each adds .5*.5 of the next estimate:
    # -2; 1 + .25*-2 = .5; 0 + .25*.5 = .125
    result = gae(row(0, 1, 2), row(1, 2, 4), gamma=0.5, gae_lambda=0.5)
    assert result.tolist() == [0.125, 0.5, -2.0] and result.dtype == np.float64


def test_single_token_advantage_is_reward_minus_value():
    assert gae(row(3), row(1.25), gamma=0.3, gae_lambda=0.7).tolist() == [1.75]


def test_rewards_affect_earlier_tokens_only():
    """With a reward of 8 at the second of three tokens, the first gets half and the last nothing."""
    assert gae(row(0, 8, 0), row(0, 0, 0), gamma=0.5, gae_lambda=1).tolist() == [4, 8, 0]
    assert gae(row(0, 8, 0), row(0, 0, 0), gamma=1, gae_lambda=0).tolist() == [0, 8, 0]


def test_value_raises_the_previous_and_lowers_its_own_advantage():
    """With one-step errors, 4 at the second of three states: gamma times 4 for the first token, -4 for the second."""
    assert gae(row(0, 0, 0), row(0, 4, 0), gamma=0.5, gae_lambda=0).tolist() == [2, -4, 0]


def test_value_after_the_last_token_is_zero():
    assert gae(row(0, 0), row(0, 4), gamma=1, gae_lambda=1).tolist() == [0, -4]


chains = st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=1, max_size=9).map(np.array)
shares = st.floats(0, 1)


@given(chains, shares)
def test_lambda_0_gives_td_errors(chain, gamma):
    rewards, values = chain.T
    for t, advantage in enumerate(gae(rewards, values, gamma=gamma, gae_lambda=0)):
        after = values[t + 1] if t + 1 < len(values) else 0.0
        assert advantage == pytest.approx(rewards[t] + gamma * after - values[t], abs=1e-9)


@given(chains, shares)
def test_lambda_1_gives_return_minus_value(chain, gamma):
    rewards, values = chain.T
    for t, advantage in enumerate(gae(rewards, values, gamma=gamma, gae_lambda=1)):
        after = sum(gamma**i * reward for i, reward in enumerate(rewards[t:]))
        assert advantage == pytest.approx(after - values[t], abs=1e-9)


@given(chains, shares, shares)
def test_gae_equals_its_defining_sum(chain, gamma, lam):
    rewards, values = chain.T
    errors = gae(rewards, values, gamma=gamma, gae_lambda=0)
    for t, advantage in enumerate(gae(rewards, values, gamma=gamma, gae_lambda=lam)):
        assert advantage == pytest.approx(sum((gamma * lam) ** i * e for i, e in enumerate(errors[t:])), abs=1e-9)


@given(chains, shares, shares)
def test_gae_equals_vector_gae_for_one_seat(chain, gamma, lam):
    rewards, values = torch.tensor(chain).T
    T = len(rewards)
    course = vectorised.AdvantageInputs(
        rewards.view(T, 1, 1),
        torch.cat([values, torch.tensor([7.0])]).view(T + 1, 1, 1),  # of the next game, which must have no effect
        torch.zeros(T, 1, 1, dtype=torch.float64),
        (torch.arange(T) == T - 1).view(T, 1),
        torch.ones(T + 1, 1, 1, dtype=torch.bool),
    )
    theirs, known = vectorised.gae(course, gamma=gamma, gae_lambda=lam)
    assert known.all()
    np.testing.assert_allclose(gae(*chain.T, gamma=gamma, gae_lambda=lam), theirs.flatten(), atol=1e-9)


def test_mismatched_lengths_are_refused():
    with pytest.raises(ValueError, match="2 rewards and 1 values"):
        gae(row(1, 2), row(1), gamma=1, gae_lambda=1)


# ---- standardisation over a step


def test_standardise_by_hand():
    """1, 2 and 3 differ from their mean by -1, 0 and 1, with a mean square of 2/3."""
    assert standardise(row(1, 2, 3)).tolist() == pytest.approx([-(1.5**0.5), 0, 1.5**0.5], abs=1e-6)


@pytest.mark.parametrize("numbers", [[5.0], [-2.0, -2.0], [0.1 + 0.2, 0.3]])
def test_standardise_maps_equal_values_to_zero(numbers):
    assert standardise(np.array(numbers)).tolist() == [0.0] * len(numbers)


@given(st.lists(st.integers(-99, 99), min_size=2, max_size=9, unique=True))
def test_standardise_gives_mean_0_deviation_1_and_keeps_order(numbers):
    result = standardise(np.array(numbers, np.float64))
    assert result.mean() == pytest.approx(0, abs=1e-9) and result.std() == pytest.approx(1)
    assert np.argsort(result).tolist() == np.argsort(numbers).tolist()


# ---- explained variance


def test_explained_variance_by_hand():
    returns = row(1, 3)
    assert explained_variance(row(1, 3), returns) == 1
    assert explained_variance(row(6, 8), returns) == 1  # a constant error does not matter
    assert explained_variance(row(2, 2), returns) == 0
    assert explained_variance(row(1.5, 2.5), returns) == 0.75  # a quarter of the variance is left
    assert explained_variance(row(3, 1), returns) == -3  # the residuals -2 and 2 have variance 4, the returns 1


def test_explained_variance_of_equal_returns_is_none():
    assert explained_variance(row(0, 1), row(2, 2)) is None
