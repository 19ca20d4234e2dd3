"""Payoff tensors: expected returns of strategies, and gains by deviation.

A strategy is a distribution [m_i] over a player's members; a joint distribution is over member profiles [m_0, ...,
m_n-1].
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

PayoffTensors = Sequence[np.ndarray]  # one array [m_0, ..., m_n-1] for each player


def check_payoffs(payoffs: PayoffTensors) -> list[np.ndarray]:
    """Returns the payoffs as float64 arrays. Raises ValueError unless there is one array for each axis, all of one
    shape, not empty and finite."""
    tables = [np.asarray(table, float) for table in payoffs]
    if not tables or any(table.shape != tables[0].shape for table in tables) or tables[0].ndim != len(tables):
        shapes = [table.shape for table in tables]
        raise ValueError(f"payoffs of shapes {shapes} are not a game: n players need n arrays, each with n axes")
    if 0 in tables[0].shape:
        raise ValueError(f"payoffs of shape {tables[0].shape}: a player has no member to choose")
    if not all(np.isfinite(table).all() for table in tables):
        raise ValueError(
            "some payoffs are not finite: a cell without games is NaN; play its games first, or use mean(0.0)"
        )
    return tables


def joint_distribution(strategies: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    """Returns the joint distribution [m_0, ..., m_n-1] of strategies [m_i]; one that is joint unchanged."""
    if isinstance(strategies, np.ndarray):
        return strategies
    joint = np.ones(())
    for strategy in strategies:
        joint = np.multiply.outer(joint, strategy)
    return joint


def marginals(joint: np.ndarray) -> list[np.ndarray]:
    """Returns each player's marginal [m_i] of a joint distribution."""
    axes = range(joint.ndim)
    return [joint.sum(axis=tuple(other for other in axes if other != player)) for player in axes]


def own_axis_first(payoffs: PayoffTensors) -> list[np.ndarray]:
    """Returns the payoffs with each player's own members along the first axis, as `member_returns` expects."""
    return [np.ascontiguousarray(np.moveaxis(table, player, 0)) for player, table in enumerate(payoffs)]


def member_returns(fronts: Sequence[np.ndarray], strategies: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns each member's return [m_i] against the others' strategies; `fronts` from `own_axis_first`."""
    earned = []
    for player, value in enumerate(fronts):
        for other in reversed([*strategies[:player], *strategies[player + 1 :]]):
            value = value @ other
        earned.append(value)
    return earned


def cce_gains(payoffs: PayoffTensors) -> np.ndarray:
    """Returns the gains from committing to a member in advance, float64 [rows, cells], one row for each player and
    member.

    A joint distribution [cells] is a coarse correlated equilibrium if every row's expected value is at most 0.
    """
    rows = []
    for player, table in enumerate(payoffs):
        for member in range(table.shape[player]):
            rows.append((table.take([member], axis=player) - table).ravel())
    return np.array(rows)


def ce_gains(payoffs: PayoffTensors) -> np.ndarray:
    """Returns the gains from playing another member than the recommended one, float64 [rows, cells], one row for each
    player and pair of members.

    A joint distribution [cells] is a correlated equilibrium if every row's expected value is at most 0 (Aumann, 1974).
    """
    rows = [np.zeros((0, payoffs[0].size))]
    for player, table in enumerate(payoffs):
        recommended = np.indices(table.shape)[player]
        for member in range(table.shape[player]):
            gain = table.take([member], axis=player) - table
            others = [one for one in range(table.shape[player]) if one != member]
            rows.append(
                np.array([np.where(recommended == one, gain, 0).ravel() for one in others]).reshape(-1, table.size)
            )
    return np.concatenate(rows)
