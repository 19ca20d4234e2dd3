"""Meta-solvers by name, which compute the mixtures that responses train against from a payoff table.

Every solver has two methods: `solve` returns one distribution for each player, `solve_joint` a joint distribution over
member profiles. For solvers with independent players the joint distribution is the product of the players'; for solvers
that correlate players (`is_joint`), `solve` returns its marginals, which may not be an equilibrium.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from palestra.core.config import StrictModel
from palestra.populations.normal_form.alpha_rank import alpha_rank
from palestra.populations.normal_form.convex import Objective
from palestra.populations.normal_form.equilibria import correlated_equilibrium, nash
from palestra.populations.normal_form.iterative_solvers import (
    fictitious_play,
    projected_replicator,
    regret_matching,
    uniform_strategies,
)
from palestra.populations.normal_form.payoff_tensors import PayoffTensors, check_payoffs, joint_distribution, marginals


class MetaSolver(StrictModel):
    """Computes strategies from mean payoffs, one array [m_0, ..., m_n-1] for each player. Strategies are float64."""

    is_joint: ClassVar[bool] = False

    @abstractmethod
    def solve(self, payoffs: PayoffTensors) -> list[np.ndarray]:
        """Returns a distribution [m_i] for each player. Raises ValueError if the solver cannot handle the table."""

    def solve_joint(self, payoffs: PayoffTensors) -> np.ndarray:
        """Returns a joint distribution over member profiles [m_0, ..., m_n-1]."""
        return joint_distribution(self.solve(payoffs))


class JointMetaSolver(MetaSolver):
    """A solver whose joint distribution correlates the players."""

    is_joint: ClassVar[bool] = True

    @abstractmethod
    def solve_joint(self, payoffs: PayoffTensors) -> np.ndarray:
        """Returns a joint distribution over member profiles [m_0, ..., m_n-1]."""

    def solve(self, payoffs: PayoffTensors) -> list[np.ndarray]:
        """Returns the marginals [m_i] of the joint distribution."""
        return marginals(self.solve_joint(payoffs))


class Uniform(MetaSolver):
    """Uniform over each player's members. PSRO with it is fictitious play over members."""

    type: Literal["uniform"] = "uniform"

    def solve(self, payoffs: PayoffTensors) -> list[np.ndarray]:
        return uniform_strategies(check_payoffs(payoffs))


class Nash(MetaSolver):
    """Nash equilibrium of a two-player constant-sum table, by linear programming."""

    type: Literal["nash"] = "nash"
    tie_break: Literal["vertex", "entropy"] = "vertex"
    """Choice among several equilibria: `vertex` is the first that the simplex method finds, `entropy` the most random
    one."""

    def solve(self, payoffs: PayoffTensors) -> list[np.ndarray]:
        return nash(check_payoffs(payoffs), ties=self.tie_break)


class FictitiousPlay(MetaSolver):
    """Fictitious play: each player's average over rounds of best responses to the others' averages."""

    type: Literal["fictitious_play"] = "fictitious_play"
    iterations: int = Field(10_000, ge=1)
    """Rounds."""

    def solve(self, payoffs: PayoffTensors) -> list[np.ndarray]:
        return fictitious_play(check_payoffs(payoffs), iterations=self.iterations)


class RegretMatching(MetaSolver):
    """Each player's average over rounds of regret matching."""

    type: Literal["regret_matching"] = "regret_matching"
    iterations: int = Field(10_000, ge=1)
    """Rounds."""
    gamma: float = Field(1e-6, ge=0, le=1)
    """Share of uniform play in every round."""

    def solve(self, payoffs: PayoffTensors) -> list[np.ndarray]:
        return regret_matching(check_payoffs(payoffs), iterations=self.iterations, gamma=self.gamma)


class ProjectedReplicator(MetaSolver):
    """Each player's average along projected replicator dynamics, PSRO's original solver (Lanctot et al., 2017)."""

    type: Literal["prd"] = "prd"
    iterations: int = Field(50_000, ge=1)
    """Euler steps."""
    dt: float | None = Field(None, gt=0)
    """Step size; null: 0.001 if the largest difference of a player's payoffs is between 1 and 50; 0.001 divided by a
    smaller difference, and 0.05 divided by a larger one."""
    gamma: float = Field(1e-6, ge=0)
    """Lower bound of every member's probability."""

    def solve(self, payoffs: PayoffTensors) -> list[np.ndarray]:
        return projected_replicator(check_payoffs(payoffs), iterations=self.iterations, dt=self.dt, gamma=self.gamma)


class AlphaRank(JointMetaSolver):
    """Alpha-rank: the stationary distribution of an evolutionary process over profiles; any number of players."""

    type: Literal["alpha_rank"] = "alpha_rank"
    alpha: float | Literal["infinite", "sweep"] = "infinite"
    """Intensity of selection; `sweep` doubles it until the distribution no longer changes."""
    population_size: int = Field(50, ge=2)
    """Individuals in each population; not used with infinite `alpha`."""

    def solve_joint(self, payoffs: PayoffTensors) -> np.ndarray:
        return alpha_rank(check_payoffs(payoffs), alpha=self.alpha, m=self.population_size)


class MostRandomEquilibrium(JointMetaSolver):
    """The most random of all equilibria of a kind."""

    type: Literal["ce", "cce"]
    objective: Objective = "gini"
    """Measure of randomness: Gini impurity or entropy."""
    epsilon: float = Field(0.0, ge=0)
    """Gain by deviation that is allowed, in units of return."""

    def solve_joint(self, payoffs: PayoffTensors) -> np.ndarray:
        tables = check_payoffs(payoffs)
        return correlated_equilibrium(tables, self.type, objective=self.objective, epsilon=self.epsilon)


class CorrelatedEquilibrium(MostRandomEquilibrium):
    """The most random correlated equilibrium: no player gains by playing another member than the recommended one."""

    type: Literal["ce"] = "ce"


class CoarseCorrelatedEquilibrium(MostRandomEquilibrium):
    """The most random coarse correlated equilibrium: no player gains by choosing a member before recommendations."""

    type: Literal["cce"] = "cce"


MetaSolverConfig = Annotated[
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
