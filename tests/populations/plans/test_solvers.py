"""Meta-solvers by name: one interface for solvers that correlate players and for those that do not."""

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from palestra.populations.normal_form.payoff_tensors import joint_distribution, marginals
from palestra.populations.plans.solvers import (
    AlphaRank,
    CoarseCorrelatedEquilibrium,
    CorrelatedEquilibrium,
    FictitiousPlay,
    MetaSolverConfig,
    Nash,
    ProjectedReplicator,
    RegretMatching,
    Uniform,
)

SOLVERS = [
    Uniform(),
    Nash(),
    Nash(tie_break="entropy"),
    FictitiousPlay(iterations=300),
    RegretMatching(iterations=300),
    ProjectedReplicator(iterations=300),
    AlphaRank(),
    AlphaRank(alpha="sweep"),
    AlphaRank(alpha=1.0, population_size=20),
    CorrelatedEquilibrium(),
    CorrelatedEquilibrium(objective="entropy"),
    CoarseCorrelatedEquilibrium(),
    CoarseCorrelatedEquilibrium(objective="entropy"),
]
RPS = np.array([[0.0, -1, 1], [1, 0, -1], [-1, 1, 0]])
EACH = pytest.mark.parametrize("solver", SOLVERS, ids=repr)


@EACH
def test_solvers_find_the_uniform_strategy_of_rock_paper_scissors(solver):
    for one in solver.solve([RPS, -RPS]):
        assert one == pytest.approx([1 / 3] * 3, abs=0.12)  # fictitious play's average cycles around it


@EACH
def test_strategies_and_joint_distribution_agree(solver):
    table = np.random.default_rng(1).normal(size=(3, 4))
    payoffs = [table, -table]
    strategies, joint = solver.solve(payoffs), solver.solve_joint(payoffs)
    assert [len(one) for one in strategies] == [3, 4] and joint.shape == (3, 4)
    for one, other in zip(strategies, marginals(joint), strict=True):
        assert one == pytest.approx(other) and one.sum() == pytest.approx(1) and (one >= 0).all()
    if not solver.is_joint:
        assert joint == pytest.approx(joint_distribution(strategies))


@EACH
def test_single_members_are_played_with_probability_one(solver):
    assert [one.tolist() for one in solver.solve([np.array([[0.5]]), np.array([[-0.5]])])] == [[1.0], [1.0]]


@EACH
def test_cells_without_games_are_refused(solver):
    with pytest.raises(ValueError, match="not finite"):
        solver.solve([np.array([[np.nan, 0.0]])] * 2)


@pytest.mark.parametrize("solver", [one for one in SOLVERS if not isinstance(one, Nash)], ids=repr)
def test_joint_solvers_support_any_number_of_players(solver):
    payoffs = list(np.random.default_rng(2).normal(size=(3, 2, 3, 2)))
    assert [len(one) for one in solver.solve(payoffs)] == [2, 3, 2]
    assert solver.solve_joint(payoffs).sum() == pytest.approx(1)


def test_settings_are_passed_to_the_solver():
    dilemma = [np.array([[3.0, 0], [5, 1]]), np.array([[3.0, 5], [0, 1]])]
    assert CorrelatedEquilibrium(epsilon=5).solve_joint(dilemma) == pytest.approx(np.full((2, 2), 0.25))
    assert CoarseCorrelatedEquilibrium(epsilon=5).solve_joint(dilemma) == pytest.approx(np.full((2, 2), 0.25))
    assert ProjectedReplicator(iterations=2000, dt=0.1, gamma=0.4).solve(dilemma)[0][0] == pytest.approx(0.4, abs=1e-2)
    assert RegretMatching(iterations=50, gamma=1).solve(dilemma)[0].tolist() == [0.5, 0.5]
    assert FictitiousPlay(iterations=1).solve(dilemma)[0].tolist() == [0, 1]
    assert AlphaRank(alpha=0.0).solve_joint(dilemma) == pytest.approx(np.full((2, 2), 0.25))
    loose, strict = (AlphaRank(alpha=1.0, population_size=m).solve_joint(dilemma)[1, 1] for m in (2, 50))
    assert loose < 0.9 < strict


def test_solvers_are_selected_by_type():
    read = TypeAdapter(MetaSolverConfig).validate_python
    assert read({"type": "prd", "dt": 0.01}) == ProjectedReplicator(dt=0.01)
    assert {read({"type": solver.type}).type for solver in SOLVERS} == {solver.type for solver in SOLVERS}
    with pytest.raises(ValidationError):
        read({"type": "alpha_rank", "alpha": "large"})
