"""Advantage and credit estimators: pure functions of values (float64), independent of episodes.

A table `q` [K, ..., K] holds the value of every joint answer of N seats; axis i indexes the answers of seat i. NaN is
the value of one that was lost: means are over the others. The credit of a seat has the table's shape: its credit in
each joint answer. `docs/algorithms/credit.md` derives how the
kinds of credit relate.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain, combinations
from math import comb
from typing import Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
GroupBaseline = Literal["mean", "others", "max", "none"]
FLAT = 1e-8  # standard deviations below this are rounding errors
ROLE_BASELINE_DECAY = 0.95  # of the moving average of a role's returns (SPIRAL, Liu et al., 2025)


def group_advantages(
    values: Sequence[float], *, baseline: GroupBaseline = "mean", scale: Literal["std", "none"] = "std"
) -> list[float]:
    """Returns each value's difference from the group's mean, in standard deviations with `scale: std` (Shao et al.,
    2024, sec. 4.1.2); with `baseline: others` from the mean of the other values (Ahmadian et al., 2024, eq. 6); with
    `max` from the largest value (MAReMax of CoMLRL, Liu et al., 2025). These are all 0 if the values do not differ.
    With `none` it returns the values themselves (REINFORCE).

    The standard deviation is the population form; `max` and `none` are not scaled. [1, 0, 0, 0] gives [1.73, -0.58,
    -0.58, -0.58]; without scaling `others` gives [1, -0.33, -0.33, -0.33], `max` [0, -1, -1, -1].
    """
    array = np.asarray(values, np.float64)
    if baseline == "none":
        return array.tolist()
    centred = array - array.mean()
    spread = centred.std()
    if baseline == "max" and spread >= FLAT:
        return (array - array.max()).tolist()
    if spread < FLAT:
        return [0.0] * len(array)
    if baseline == "others":
        centred = centred * len(array) / (len(array) - 1)
    return (centred / spread if scale == "std" else centred).tolist()


def process_advantages(
    rewards: Sequence[Sequence[float]],
    *,
    gamma: float = 1.0,
    baseline: GroupBaseline = "mean",
    scale: Literal["std", "none"] = "std",
) -> list[list[float]]:
    """Returns the advantage of each turn of each sibling, from the `rewards` of the turns: all rewards of the group are
    normalised together, and a turn's advantage is the sum of its own and the later ones (process supervision, Shao et
    al., 2024, sec. 4.1.3), discounted by `gamma` per turn.

    Rewards [0, 1] and [0, 0] have the mean 1/4 and the deviation sqrt(3)/4; advantages are [1.15, 1.73] and [-1.15,
    -0.58]. Siblings with equal returns have advantages too if the rewards of their turns differ.
    """
    flat = list(chain.from_iterable(rewards))
    normalised = iter(group_advantages(flat, baseline=baseline, scale=scale)) if flat else iter(())
    return [returns_to_go([next(normalised) for _ in own], gamma) for own in rewards]


def turn_advantages(
    rewards: Sequence[Sequence[float]],
    *,
    gamma: float = 1.0,
    baseline: GroupBaseline = "mean",
    scale: Literal["std", "none"] = "std",
) -> list[list[float]]:
    """Returns the advantage of each turn of each sibling: its discounted return to go, compared with the returns to go
    of the siblings at the same turn. A turn that only one sibling reached has advantage 0, unless the baseline is
    `none`."""
    turns = [range(len(own)) for own in rewards]
    return state_advantages(turns, rewards, gamma=gamma, baseline=baseline, scale=scale)


def state_advantages(
    states: Sequence[Sequence[Hashable]],
    rewards: Sequence[Sequence[float]],
    *,
    gamma: float = 1.0,
    baseline: GroupBaseline = "mean",
    scale: Literal["std", "none"] = "std",
) -> list[list[float]]:
    """Returns the advantage of each turn of each trajectory: its discounted return to go, compared with the returns to
    go of all turns in the same state (GiGPO's step-level advantage, Feng et al., 2025, eq. 7). A state that occurs once
    has advantage 0, unless the baseline is `none`.

    Two trajectories with states [s, t] and [s, u] and rewards [0, 1] and [0, 0] have advantages [1, 0] and [-1, 0].
    """
    returns = [returns_to_go(own, gamma) for own in rewards]
    places: dict[Hashable, list[tuple[int, int]]] = {}
    for number, visited in enumerate(states):
        for turn, state in enumerate(visited):
            places.setdefault(state, []).append((number, turn))
    advantages = [[0.0] * len(own) for own in returns]
    for there in places.values():
        values = [returns[number][turn] for number, turn in there]
        for (number, turn), advantage in zip(
            there, group_advantages(values, baseline=baseline, scale=scale), strict=True
        ):
            advantages[number][turn] = advantage
    return advantages


def returns_to_go(rewards: Sequence[float], gamma: float = 1.0) -> list[float]:
    """Returns, for each turn, its reward and the later ones, discounted by `gamma` per turn."""
    returns = []
    later = 0.0
    for reward in reversed(rewards):
        later = float(reward) + gamma * later
        returns.append(later)
    return returns[::-1]


def batch_advantages(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    """Returns each value's difference from the mean over all groups (REINFORCE++, Hu et al., 2025; `batch_spread` is
    the standard deviation it is divided by); all 0 if the values do not differ. A group may have one value."""
    flat = np.concatenate([np.zeros(0), *map(np.asarray, groups)])
    if not len(flat) or flat.std() < FLAT:
        return [[0.0] * len(group) for group in groups]
    return [(np.asarray(group) - flat.mean()).tolist() for group in groups]


def batch_spread(advantages: Sequence[Sequence[float]]) -> float:
    """Returns the population standard deviation of the advantages of all answers; 1 if they do not differ."""
    flat = np.concatenate([np.zeros(1), *map(np.asarray, advantages)])[1:]
    return float(flat.std()) if len(flat) and flat.std() > FLAT else 1.0


def role_advantages(
    values: Sequence[float], average: float, decay: float = ROLE_BASELINE_DECAY
) -> tuple[list[float], float]:
    """Returns each return's difference from the moving average of its role's returns, and the updated average
    (role-conditioned advantage estimation, SPIRAL, Liu et al., 2025: b <- decay b + (1 - decay) R, then A = R - b).

    As in the paper, a return first updates the average and is then compared with it. The advantage is thus `decay`
    times the difference from the average of the earlier returns: a constant factor, no bias. From average 0, returns 1
    and -1 have advantages 0.95 and -0.9975, and the average is then -0.0025.
    """
    advantages = []
    for value in values:
        average = decay * average + (1 - decay) * float(value)
        advantages.append(float(value) - average)
    return advantages, average


def known_mean(table: Array, axis: int | tuple[int, ...], *, keepdims: bool = False) -> Array:
    """Returns the mean over axes of the entries that are not NaN; NaN where none is."""
    known = ~np.isnan(table)
    count = known.sum(axis=axis, keepdims=keepdims)
    total = np.where(known, table, 0.0).sum(axis=axis, keepdims=keepdims)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def counterfactual_credit(q: Array, seat: int) -> Array:
    """Returns the counterfactual credit of one seat [K, ..., K]: q(a) minus its mean over the seat's own answers with
    the others' answers fixed (difference rewards, Wolpert & Tumer, 2002; COMA, Foerster et al., 2018, eq. 4, with the
    policy's expectation taken over its own samples)."""
    return q - known_mean(q, seat, keepdims=True)


def shapley_credit(q: Array, seat: int) -> Array:
    """Returns the seat's Shapley value (Shapley, 1953) in the game of each joint answer [K, ..., K]. The value of a
    coalition is the mean of q with its seats' answers fixed and the other seats averaged over all of theirs.

    The values of all seats in a joint answer sum to q(a) minus the mean of q. For N seats the sum runs over 2^(N-1)
    coalitions.
    """
    others = [axis for axis in range(q.ndim) if axis != seat]
    value = np.zeros_like(q)
    for size in range(len(others) + 1):
        weight = 1 / (q.ndim * comb(len(others), size))
        for free in combinations(others, size):  # seats outside the coalition, averaged over
            joined, without = (known_mean(q, axes, keepdims=True) for axes in (free, (*free, seat)))
            value = value + weight * (joined - without)
    return np.where(np.isnan(q), np.nan, value)


def credit_in_context(credit: Array, seat: int, joints_JN: npt.NDArray[np.int64]) -> Array:
    """Returns the mean credit [K] of each of a seat's answers, with the other seats' answers fixed to those of the J
    joint answers `joints_JN` [J, N] int64."""
    by_answer = np.moveaxis(credit, seat, 0)
    return known_mean(np.array([by_answer[(slice(None), *np.delete(joint, seat))] for joint in joints_JN]), 0)


def total_effect_index(q: Array, seat: int) -> float:
    """Returns the share of the table's variance that averaging over the seat's answer removes: the total-effect index
    (Homma & Saltelli, 1996). 0 if the seat's answer has no effect, 1 if everything depends on it. Interactions count
    for every seat involved, so the sum over seats may exceed 1."""
    variance = np.nanvar(q)
    return float(np.nanvar(counterfactual_credit(q, seat)) / variance) if variance > FLAT**2 else 0.0


# ---- tokens
#
# A sequence is every token of one seat along one trajectory, answer after answer, as if its `T` tokens had been sampled
# in a row; `M` tokens are those of several sequences. Time counts these tokens: other seats' tokens cost no discount.


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
    advantages_T = np.empty_like(errors)
    later = 0.0
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
