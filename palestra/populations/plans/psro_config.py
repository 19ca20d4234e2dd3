"""Config of PSRO, and what it requires of a population."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from palestra.core.config import StrictModel
from palestra.populations.plans.iterative_plan import check_population
from palestra.populations.plans.solvers import MetaSolverConfig, Nash
from palestra.populations.population import Player, Population

CORRELATED_SOLVERS = ("ce", "cce")  # solvers for which responses train against the joint distribution


class PSROConfig(StrictModel):
    """Policy-space response oracles: number of iterations, the solver, and how responses are trained and evaluated.

    With a joint solver, exact responses that gain almost nothing or equal another member are left out; with `ce` also
    learned responses whose gain, estimated from their returns in training, is within its standard error. The run ends
    once the responses to all recommended members were left out, or with a warning when the solver's table is full.
    """

    type: Literal["psro"] = "psro"
    iterations: int = Field(20, ge=1)
    """Iterations, each with one or more responses for each player."""
    meta_solver: MetaSolverConfig = Nash()
    """Meta-solver that computes the meta-strategy from the payoff table."""
    env_steps: int = Field(100_000, ge=1)
    """Env steps of each response, over all its slices."""
    train_steps: int = Field(0, ge=0)
    """Training steps of each slice, for language agents; replaces `env_steps` if above 0."""
    slices: int = Field(1, ge=1)
    """Number of slices in which a response is trained; with `pipeline_levels` above 1, opponents are updated between
    them."""
    start: Literal["fresh", "last", "best"] = "fresh"
    """Initial weights of a response: `fresh` (new weights), those of its player's `last` member, or of the `best`
    member against the meta-strategy."""
    self_play: float = Field(0.0, ge=0, lt=1)
    """Probability that a game's opponents are the response's own current weights; needs `symmetric: true`."""
    max_responses: int = Field(4, ge=1)
    """With `ce`, the largest number of responses of each player in an iteration, to the members that are recommended
    most often; if these responses add no member, the next iteration trains those to the other members. Without a limit
    the number of members can double in every iteration."""
    rectified: bool = False
    """PSRO_rN: one response for each member in the meta-strategy, against the opponents that the member beats. Only for
    two seats."""
    pipeline_levels: int = Field(1, ge=1)
    """Number of iterations whose responses train at once (pipeline PSRO)."""
    games_per_cell: int = Field(1000, ge=1)
    """Games of each payoff cell."""
    adaptive_games: int = Field(0, ge=0)
    """Additional games per iteration, played in the cells where the meta-strategy is most uncertain."""
    cells_per_task: int = Field(16, ge=1)
    """Payoff cells per task of games."""
    nash_conv_every: int = Field(1, ge=0)
    """Measure NashConv every n iterations; 0: never. Needs a game with exact rules."""
    stop_nash_conv: float = Field(0.0, ge=0)
    """The run ends once NashConv is at most this (0: never). With a joint solver: once the gap to an equilibrium, as
    measured by responses to all recommended members, is at most this."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.pipeline_levels > 1 and (self.rectified or self.is_correlated):
            raise ValueError(
                f"pipeline_levels: {self.pipeline_levels} trains responses before the meta-strategy is final, and with "
                f"rectified: true or meta_solver {self.meta_solver.type} the final one determines their number: set "
                "pipeline_levels: 1"
            )
        if self.rectified and self.is_correlated:
            raise ValueError(
                f"rectified: true needs a mixture of each player, which meta_solver {self.meta_solver.type} does not "
                "give: use another meta_solver, or rectified: false"
            )
        return self

    @property
    def is_correlated(self) -> bool:
        """True if responses train against a joint distribution (`ce`, `cce`)."""
        return self.meta_solver.type in CORRELATED_SOLVERS


def check_psro(config: PSROConfig, population: Population, seats: Sequence[Player]) -> None:
    """Raises ValueError if the config does not fit the seats, or a player has no member."""
    check_population(population, config.self_play)
    if config.rectified and len(seats) != 2:
        raise ValueError(f"rectified: true is for games with two seats; this one has {len(seats)}")
    if config.meta_solver.type == "nash" and len(seats) != 2:
        raise ValueError(
            f"meta_solver nash is for two seats; this game has {len(seats)}: use prd, alpha_rank, ce or cce"
        )
    if config.is_correlated and len(population.players) < len(seats):
        raise ValueError(
            f"meta_solver {config.meta_solver.type} assigns members to all seats, so every seat needs a "
            "population: set symmetric: false, or use another meta_solver"
        )
