"""Token-level advantages of language agents from rewards and values, on numpy arrays.

A sequence is every token of one seat along one trajectory, answer after answer, as if its `T` tokens had been sampled
in a row; `M` tokens are those of several sequences. Time counts these tokens: other seats' tokens cost no discount.
"""

from __future__ import annotations

import numpy as np


def gae(rewards_T: np.ndarray, values_T: np.ndarray, *, gamma: float, gae_lambda: float) -> np.ndarray:
    """Returns generalised advantage estimates [T] of one sequence (Schulman et al., 2016, eq. 16), float64, in units of
    reward.

    `values_T[t]` is the value of the state in which token t was sampled, `rewards_T[t]` the reward between it and the
    next token. The value after the last token is 0. `gae_lambda=0` trusts the critic and gives one-step TD errors,
    `gae_lambda=1` trusts the rewards and gives the return minus the value. Raises ValueError if the lengths differ.
    """
    if len(rewards_T) != len(values_T):
        raise ValueError(f"{len(rewards_T)} rewards and {len(values_T)} values are not of one sequence")
    values = np.append(np.asarray(values_T, np.float64), 0.0)
    errors = np.asarray(rewards_T, np.float64) + gamma * values[1:] - values[:-1]
    advantages_T, later = np.empty_like(errors), 0.0
    for t in range(len(errors) - 1, -1, -1):
        later = advantages_T[t] = errors[t] + gamma * gae_lambda * later
    return advantages_T


def standardise(advantages_M: np.ndarray) -> np.ndarray:
    """Returns advantages [M] with mean 0 and (population) standard deviation 1. All zero if they do not differ, as with
    a single token."""
    centred = advantages_M - advantages_M.mean()
    spread = centred.std()
    return centred / spread if spread > 1e-8 else np.zeros_like(centred)


def explained_variance(values_M: np.ndarray, returns_M: np.ndarray) -> float | None:
    """Returns the share of the returns' variance that the values explain: at most 1, 0 for a constant, negative if
    worse than a constant. None if the returns do not differ."""
    variance = returns_M.var()
    return float(1 - (returns_M - values_M).var() / variance) if variance > 1e-12 else None
