"""Config of a population run with all oracles, language agents included. Imports transformers."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from pydantic import Field

from palestra.parallel.tasks import WorkerFactory
from palestra.populations.build.build import ExactOracle, PopulationConfig
from palestra.populations.population import Sides
from palestra.populations.workers.lm_oracle import LanguageOracle, LanguageWorker
from palestra.populations.workers.net_oracle import NetOracle

OracleConfig = Annotated[NetOracle | ExactOracle | LanguageOracle, Field(discriminator="type")]


class LanguagePopulationConfig(PopulationConfig):
    """A run that trains a population."""

    oracle: OracleConfig  # type: ignore[assignment]
    """Training of members: networks or language agents."""

    @property
    def trains_language_agents(self) -> bool:
        return isinstance(self.oracle, LanguageOracle)

    def worker_factory(self, sides: Sides) -> WorkerFactory:
        if isinstance(self.oracle, LanguageOracle):
            return partial(LanguageWorker, self.oracle, sides, self.seed)
        return super().worker_factory(sides)
