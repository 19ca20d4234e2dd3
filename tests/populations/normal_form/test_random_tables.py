"""Random payoff tables through every meta-solver: no failures, no gains from deviating from an equilibrium, and
equality with OpenSpiel's solvers."""

import numpy as np
import pytest
from open_spiel.python.algorithms import projected_replicator_dynamics as spiel_prd
from open_spiel.python.algorithms import regret_matching as spiel_regrets
from open_spiel.python.egt import alpharank as spiel_ranks

from palestra.populations.normal_form.payoff_tensors import cce_gains, ce_gains, joint_distribution, marginals
from palestra.populations.plans import solvers

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
    """Payoffs of 2 players with 2 to 10 members, alternately zero-sum and general-sum, or of 3 players with 2 to 4."""
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


def check_table(seed: int, ce_objectives: tuple[str, ...], cce_objectives: tuple[str, ...]) -> None:
    """Solves the table of `seed` with every solver, `ce` and `cce` with these objectives."""
    tables = payoffs(seed)
    for objective in ce_objectives:
        ce = solvers.CorrelatedEquilibrium(objective=objective).solve_joint(tables)
        check_gain(ce, ce_gains(tables), f"ce {objective} of {seed}")
    for objective in cce_objectives:
        cce = solvers.CoarseCorrelatedEquilibrium(objective=objective).solve_joint(tables)
        check_gain(cce, cce_gains(tables), f"cce {objective} of {seed}")
    if len(tables) == 2 and np.ptp(tables[0] + tables[1]) < 1e-9:
        for tie_break in ("vertex", "entropy"):
            nash = solvers.Nash(tie_break=tie_break).solve(tables)
            check_gain(joint_distribution(nash), cce_gains(tables), f"nash {tie_break} of {seed}")
    for solver in (*DYNAMICS, *(solvers.AlphaRank(alpha=alpha) for alpha in ("infinite", "sweep", 1.0))):
        joint = solver.solve_joint(tables)
        assert (joint >= 0).all() and joint.sum() == pytest.approx(1), f"{solver.type} of {seed}"
        assert all(mine.sum() == pytest.approx(1) for mine in marginals(joint))


def check_gain(joint: np.ndarray, gains: np.ndarray, label: str) -> None:
    assert (joint >= 0).all() and abs(joint.sum() - 1) < 1e-8, label
    assert float((gains @ joint.ravel()).max(initial=0.0)) <= MAX_GAIN, label


def check_against_openspiel(seed: int) -> bool:
    """Compares the iterative solvers and alpha-rank with OpenSpiel's. Returns False where its alpha-rank raises.

    Regret matching at exact ties depends on rounding, so only tables without ties are compared there."""
    tables = payoffs(seed)
    if KINDS[seed % len(KINDS)] == "normal":
        theirs = spiel_regrets.regret_matching(tables, iterations=50)
        check_equal(solvers.RegretMatching(iterations=50).solve(tables), theirs, 1e-9, f"regret matching of {seed}")
    ours = solvers.ProjectedReplicator(iterations=50, dt=0.05, gamma=0.02).solve(tables)
    theirs = spiel_prd.projected_replicator_dynamics(tables, prd_iterations=50, prd_dt=0.05, prd_gamma=0.02)
    check_equal(ours, theirs, 1e-9, f"prd of {seed}")
    try:
        rank = spiel_ranks.compute(tables, alpha=1.0)[2]
    except ValueError:
        return False
    check_equal([solvers.AlphaRank(alpha=1.0).solve_joint(tables).ravel()], [rank], 1e-5, f"alpha_rank of {seed}")
    return True


def check_equal(ours: list[np.ndarray], theirs: list[np.ndarray], within: float, label: str) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(np.asarray(other), abs=within), label


@pytest.mark.parametrize("first", [pytest.param(i, marks=[pytest.mark.slow] * (i > 0)) for i in range(0, 500, CHUNK)])
def test_solvers_find_equilibria_of_random_tables(first: int) -> None:
    for seed in range(first, first + CHUNK):
        one, other = ("gini", "entropy") if seed % 2 else ("entropy", "gini")
        check_table(seed, (one,), (other,))


def test_table_with_binding_rows_is_solved_without_a_warning() -> None:
    """A corner slightly violates one row of near ties, while other rows are met with equality along the whole way back
    into the constraints."""
    check_table(1270, ("gini", "entropy"), ("gini", "entropy"))


def test_strategies_equal_openspiel() -> None:
    answered = [check_against_openspiel(seed) for seed in range(40)]
    assert sum(answered) >= 20


@pytest.mark.slow
@pytest.mark.parametrize("first", range(500, 10_500, 500))
def test_solvers_find_equilibria_of_ten_thousand_tables(first: int) -> None:
    """Both objectives of `ce` and `cce` on every table, and OpenSpiel's strategies on every tenth."""
    for seed in range(first, first + 500):
        check_table(seed, ("gini", "entropy"), ("gini", "entropy"))
        if seed % 10 == 0 or seed % 20 == 3:
            check_against_openspiel(seed)
