"""Alpha-rank (Omidshafiei et al., 2019): the stationary distribution of a process in which one population at a time
switches to another member.

Shapes: `E` deviations.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np

from palestra.populations.normal_form.payoff_tensors import PayoffTensors

MAX_PROFILES = 6000  # the chain's matrix has MAX_PROFILES^2 entries, 288 MB
MIN_FIXATION = 1e-100  # lower bound of fixation probabilities: keeps the chain irreducible under very strong selection
# tolerances at which a sweep counts as converged, as in OpenSpiel
RTOL = 1e-5
ATOL = 1e-8
BLOCK_SIZE = 64


class Deviations(NamedTuple):
    """All deviations of a single player: start and end profile and that player's gain [E] each, the number of profiles,
    and the number of deviations from each profile (`num_per_profile`), which are tried equally often."""

    start_E: np.ndarray
    end_E: np.ndarray
    gain_E: np.ndarray
    num_profiles: int
    num_per_profile: int


def alpha_rank(
    payoffs: PayoffTensors, *, alpha: float | Literal["infinite", "sweep"] = "infinite", m: int = 50
) -> np.ndarray:
    """Returns the stationary distribution over profiles, float64 [m_0, ..., m_n-1].

    In the chain, a player's population of `m` individuals switches to another member with the probability of fixation
    under selection of intensity `alpha` (eq. 2 and 3 of the paper).

    With `infinite`, every gaining deviation is taken and losing ones are rare mistakes, in the limit of rarity (Rowland
    et al., 2019, sec. 2); this does not depend on the units of payoffs. `sweep` doubles alpha until the distribution no
    longer changes. Raises ValueError for a table of more than 6000 profiles.
    """
    return _rank(_moves(payoffs), alpha, m).reshape(payoffs[0].shape)


def _moves(payoffs: PayoffTensors) -> Deviations:
    shape = payoffs[0].shape
    numbers = np.arange(payoffs[0].size).reshape(shape)
    starts = []
    ends = []
    gains = []
    for player, table in enumerate(payoffs):
        here, worth = (np.moveaxis(array, player, -1).reshape(-1, shape[player]) for array in (numbers, table))
        one, other = np.nonzero(~np.eye(shape[player], dtype=bool))
        starts.append(here[:, one].ravel())
        ends.append(here[:, other].ravel())
        gains.append((worth[:, other] - worth[:, one]).ravel())
    each = sum(shape) - len(shape)
    return Deviations(np.concatenate(starts), np.concatenate(ends), np.concatenate(gains), payoffs[0].size, each)


def _rank(moves: Deviations, alpha: float | str, m: int) -> np.ndarray:
    if moves.num_profiles > MAX_PROFILES:
        raise ValueError(
            f"alpha-rank of {moves.num_profiles} profiles needs a matrix of {moves.num_profiles**2 * 8 / 1e9:.1f} GB; "
            f"the limit is {MAX_PROFILES} profiles: use another solver, prd or cce"
        )
    scale = float(np.abs(moves.gain_E).max(initial=0.0))
    if scale == 0:
        return np.full(moves.num_profiles, 1 / moves.num_profiles)
    if alpha == "infinite":
        return _limit(moves, (_move_probs(moves.gain_E, 10.0**-digits) for digits in range(3, 14)))
    if alpha == "sweep":
        return _limit(moves, (_fixation(moves.gain_E, 2.0**power / scale, m) for power in range(-10, 40)))
    return _limit(moves, [_fixation(moves.gain_E, float(alpha), m)])


def _limit(moves: Deviations, chances: Iterable[np.ndarray]) -> np.ndarray:
    """Returns the stationary distribution of the first chain whose distribution equals the previous chain's within
    tolerance, or else of the last chain."""
    share = np.zeros(0)
    for chance_E in chances:
        before = share
        chain = np.zeros((moves.num_profiles, moves.num_profiles))
        chain[moves.start_E, moves.end_E] = chance_E / moves.num_per_profile
        share = stationary_distribution(chain)
        if before.size and np.allclose(share, before, RTOL, ATOL):
            break
    return share


def _move_probs(gain_E: np.ndarray, mistake: float) -> np.ndarray:
    tied = np.abs(gain_E) <= 1e-12 * np.abs(gain_E).max()
    return np.where(tied, 0.5, np.where(gain_E > 0, 1 - mistake, mistake))


def _fixation(gain_E: np.ndarray, alpha: float, m: int) -> np.ndarray:
    """Returns (1 - e^-u) / (1 - e^-mu) [E], u = alpha gain, written so that large losses do not overflow."""
    size = np.maximum(alpha * np.abs(gain_E), 1e-14)
    chance = np.expm1(-size) / np.expm1(-m * size)
    return np.maximum(np.where(gain_E < 0, chance * np.exp(-(m - 1) * size), chance), MIN_FIXATION)


def stationary_distribution(chain: np.ndarray) -> np.ndarray:
    """Returns the stationary distribution float64 [N] of an irreducible chain [N, N], which is overwritten; its
    diagonal is not read.

    Elimination without subtraction (Grassmann, Taksar & Heyman, 1985): each probability is exact to relative rounding
    error, however rare some transitions are. Computed in blocks for speed.
    """
    size = len(chain)
    for stop in range(size, 0, -BLOCK_SIZE):
        first = max(stop - BLOCK_SIZE, 0)
        for state in range(stop - 1, max(first, 1) - 1, -1):
            chain[:state, state] /= chain[state, :state].sum()
            chain[first:state, :state] += chain[first:state, state, None] * chain[state, :state]
            if first:
                chain[:first, first:state] += chain[:first, state, None] * chain[state, first:state]
        if first:
            chain[:first, :first] += chain[:first, first:stop] @ chain[first:stop, :first]
    share = np.ones(size)
    for state in range(1, size):
        share[state] = share[:state] @ chain[:state, state]
    return share / share.sum()
