"""Random payoff tables through every meta-solver: none fails, and from an equilibrium no player gains by leaving."""

from __future__ import annotations

import numpy as np
import pytest

from palestra.populations import solvers
from palestra.populations.normal_form.payoff_tensors import cce_gains, ce_gains, joint_distribution, marginals

MAX_GAIN = 1e-6  # in units of payoffs whose largest is about 1 to 3
CHUNK = 50  # tables of one test
DYNAMICS = (
    solvers.Uniform(),
    solvers.FictitiousPlay(iterations=50),
    solvers.RegretMatching(iterations=50),
    solvers.ProjectedReplicator(iterations=50),
)
KINDS = ("integer", "rounded", "near ties", "normal")


def payoffs(seed: int) -> list[np.ndarray]:
    """Payoffs of 2 players with 2 to 10 members, in turn zero-sum and not, or of 3 players with 2 to 4."""
    rng = np.random.default_rng(seed)
    kind = KINDS[seed % len(KINDS)]
    players = 3 if seed % 5 == 4 else 2
    shape = tuple(rng.integers(2, 11 if players == 2 else 5, players))
    tables = [table(rng, kind, shape) for _ in range(players)]
    return tables if seed % 3 == 0 or players == 3 else [tables[0], float(kind == "rounded") - tables[0]]


def table(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    if kind == "rounded":
        return np.round(rng.random(shape), 2)
    if kind == "normal":
        return rng.normal(size=shape)
    noise = rng.normal(size=shape) * 10.0 ** -rng.integers(6, 11) if kind == "near ties" else 0.0
    return rng.integers(-2, 3, shape) + noise


def check_table(seed: int) -> None:
    """Both objectives are solved for: one for each of `ce` and `cce`, in turn."""
    tables = payoffs(seed)
    one, other = ("gini", "entropy") if seed % 2 else ("entropy", "gini")
    ce = solvers.CorrelatedEquilibrium(objective=one).solve_joint(tables)
    cce = solvers.CoarseCorrelatedEquilibrium(objective=other).solve_joint(tables)
    check_gain(ce, ce_gains(tables), f"ce {one} of {seed}")
    check_gain(cce, cce_gains(tables), f"cce {other} of {seed}")
    if len(tables) == 2 and np.ptp(tables[0] + tables[1]) < 1e-9:
        for tie_break in ("vertex", "entropy"):
            nash = solvers.Nash(tie_break=tie_break).solve(tables)
            check_gain(joint_distribution(nash), cce_gains(tables), f"nash {tie_break} of {seed}")
    for solver in (*DYNAMICS, solvers.AlphaRank()):
        joint = solver.solve_joint(tables)
        assert (joint >= 0).all() and joint.sum() == pytest.approx(1), f"{solver.type} of {seed}"
        assert all(mine.sum() == pytest.approx(1) for mine in marginals(joint))


def check_gain(joint: np.ndarray, gains: np.ndarray, label: str) -> None:
    assert (joint >= 0).all() and abs(joint.sum() - 1) < 1e-8, label
    assert float((gains @ joint.ravel()).max(initial=0.0)) <= MAX_GAIN, label


@pytest.mark.parametrize("first", range(0, 500, CHUNK))
def test_solvers_find_equilibria_of_random_tables(first: int) -> None:
    for seed in range(first, first + CHUNK):
        check_table(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(500, 10_500, 500))
def test_solvers_find_equilibria_of_ten_thousand_tables(first: int) -> None:
    for seed in range(first, first + 500):
        check_table(seed)
