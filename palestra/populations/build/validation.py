"""Chooses the config class of a population run, so that runs of networks import no transformers."""

from __future__ import annotations

from collections.abc import Mapping

from palestra.core.config import Tree, is_changed, validate
from palestra.populations.build.build import PopulationConfig


def population_config(tree: Tree) -> type[PopulationConfig]:
    """Returns the config class of a population run, that of language agents unless its oracle is another."""
    oracle = tree.get("oracle")
    if isinstance(oracle, Mapping) and oracle.get("type") in ("net", "exact"):
        return PopulationConfig
    from palestra.populations.build.language import LanguagePopulationConfig

    return LanguagePopulationConfig


def validate_population(tree: Tree) -> PopulationConfig:
    """Returns the config of a population run. Raises ValueError for an unknown key or value, and for a length of
    training that is the other kind of agent's."""
    config = validate(population_config(tree), tree)
    plan = config.population
    if not config.trains_language_agents and is_changed(plan, "train_steps"):
        raise ValueError(
            f"population.train_steps is for language agents, and oracle.type is {config.oracle.type}: set "
            "population.env_steps"
        )
    if config.trains_language_agents and is_changed(plan, "env_steps"):
        raise ValueError(
            "population.env_steps is for networks, and oracle.type is language: set population.train_steps, or "
            "oracle.steps and oracle.episodes"
        )
    return config
