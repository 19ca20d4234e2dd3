"""Chooses the config class of a population run, so that runs of networks import no transformers."""

from __future__ import annotations

from collections.abc import Mapping

from palestra.core.config import Tree, validate
from palestra.populations.build.build import PopulationConfig


def population_config(tree: Tree) -> type[PopulationConfig]:
    """Returns the config class of a population run: `LanguagePopulationConfig` unless its oracle trains networks or
    computes exact responses."""
    oracle = tree.get("oracle")
    if isinstance(oracle, Mapping) and oracle.get("type") in ("net", "exact"):
        return PopulationConfig
    from palestra.populations.build.language import LanguagePopulationConfig

    return LanguagePopulationConfig


def validate_population(tree: Tree) -> PopulationConfig:
    """Returns the config of a population run. Raises ValueError for an unknown key or value."""
    return validate(population_config(tree), tree)
