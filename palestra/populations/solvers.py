"""Meta-solvers by name: from a payoff table to the mixtures that members are trained against.

Every solver answers both ways: `solve` gives a distribution for each player, `solve_joint` one over who is whose. For a
solver that makes players independent the second is the product of the first; for one that correlates them (`joint`)
the first are the second's marginals, which may be no equilibrium.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from palestra.config import Strict
from palestra.populations.normal_form.alpha_rank import alpha_rank
from palestra.populations.normal_form.convex import Objective
from palestra.populations.normal_form.correlated import coarse_correlated_equilibrium, correlated_equilibrium
from palestra.populations.normal_form.dynamics import fictitious_play, projected_replicator, regret_matching, uniform
from palestra.populations.normal_form.tables import Payoff, checked, joint_of, marginals
from palestra.populations.normal_form.zero_sum import nash


class Solver(Strict):
    """Mean payoffs in, one array [m_0, ..., m_n-1] for each player; strategies out."""

    joint: ClassVar[bool] = False

    @abstractmethod
    def solve(self, payoffs: Payoff) -> list[np.ndarray]:
        """A distribution [m_i] for each player. Raises ValueError for a table that this solver is not for."""

    def solve_joint(self, payoffs: Payoff) -> np.ndarray:
        """A distribution [m_0, ..., m_n-1] over who is whose."""
        return joint_of(self.solve(payoffs))


class JointSolver(Solver):
    """A solver that correlates the players."""

    joint: ClassVar[bool] = True

    @abstractmethod
    def solve_joint(self, payoffs: Payoff) -> np.ndarray:
        """A distribution [m_0, ..., m_n-1] over who is whose."""

    def solve(self, payoffs: Payoff) -> list[np.ndarray]:
        """The marginals of the joint distribution."""
        return marginals(self.solve_joint(payoffs))


class Uniform(Solver):
    """Every member alike: PSRO with it is fictitious play over members."""

    type: Literal["uniform"] = "uniform"

    def solve(self, payoffs: Payoff) -> list[np.ndarray]:
        return uniform(checked(payoffs))


class Nash(Solver):
    """Nash equilibrium of a two-player constant-sum table, by linear programming."""

    type: Literal["nash"] = "nash"
    ties: Literal["vertex", "entropy"] = "vertex"  # of several equilibria: the solver's first, or the most random

    def solve(self, payoffs: Payoff) -> list[np.ndarray]:
        return nash(checked(payoffs), ties=self.ties)


class FictitiousPlay(Solver):
    """Each player's average over rounds of best answers to the others' averages."""

    type: Literal["fictitious_play"] = "fictitious_play"
    iterations: int = Field(10_000, ge=1)

    def solve(self, payoffs: Payoff) -> list[np.ndarray]:
        return fictitious_play(checked(payoffs), iterations=self.iterations)


class RegretMatching(Solver):
    """Each player's average over rounds of regret matching."""

    type: Literal["regret_matching"] = "regret_matching"
    iterations: int = Field(10_000, ge=1)
    gamma: float = Field(1e-6, ge=0, le=1)  # share of uniform play

    def solve(self, payoffs: Payoff) -> list[np.ndarray]:
        return regret_matching(checked(payoffs), iterations=self.iterations, gamma=self.gamma)


class ProjectedReplicator(Solver):
    """Each player's average along projected replicator dynamics: PSRO's own solver (Lanctot et al., 2017)."""

    type: Literal["prd"] = "prd"
    iterations: int = Field(50_000, ge=1)
    dt: float = Field(1e-3, gt=0)
    gamma: float = Field(1e-6, ge=0)  # least probability of a member

    def solve(self, payoffs: Payoff) -> list[np.ndarray]:
        return projected_replicator(checked(payoffs), iterations=self.iterations, dt=self.dt, gamma=self.gamma)


class AlphaRank(JointSolver):
    """Alpha-rank: how often evolution sits at each profile; any number of players."""

    type: Literal["alpha_rank"] = "alpha_rank"
    alpha: float | Literal["infinite", "sweep"] = "infinite"  # intensity of selection; a sweep raises it until it tells
    m: int = Field(50, ge=2)  # individuals in a population; infinite alpha does not depend on it

    def solve_joint(self, payoffs: Payoff) -> np.ndarray:
        return alpha_rank(checked(payoffs), alpha=self.alpha, m=self.m)


class CorrelatedEquilibrium(JointSolver):
    """The most random correlated equilibrium: no player gains by another member where it is told one."""

    type: Literal["ce"] = "ce"
    objective: Objective = "gini"
    epsilon: float = Field(0.0, ge=0)  # what a player may gain, in units of return

    def solve_joint(self, payoffs: Payoff) -> np.ndarray:
        return correlated_equilibrium(checked(payoffs), objective=self.objective, epsilon=self.epsilon)


class CoarseCorrelatedEquilibrium(JointSolver):
    """The most random coarse correlated equilibrium: no player gains by a member fixed beforehand."""

    type: Literal["cce"] = "cce"
    objective: Objective = "gini"
    epsilon: float = Field(0.0, ge=0)

    def solve_joint(self, payoffs: Payoff) -> np.ndarray:
        return coarse_correlated_equilibrium(checked(payoffs), objective=self.objective, epsilon=self.epsilon)


SolverConfig = Annotated[
    Uniform
    | Nash
    | FictitiousPlay
    | RegretMatching
    | ProjectedReplicator
    | AlphaRank
    | CorrelatedEquilibrium
    | CoarseCorrelatedEquilibrium,
    Field(discriminator="type"),
]
