"""Defaults that configs of algorithms inherit."""

import inspect
from collections.abc import Iterator

import pytest

from palestra.vector.algorithms.sac import SAC
from palestra.vector.config import VectorConfig
from palestra.vector.learners.nets import AlgorithmConfig


def subclasses(cls: type[AlgorithmConfig]) -> Iterator[type[AlgorithmConfig]]:
    for sub in cls.__subclasses__():
        yield sub
        yield from subclasses(sub)


VectorConfig.model_rebuild()  # all algorithms are imported
CONFIGS = sorted(set(subclasses(AlgorithmConfig)), key=lambda cls: cls.__name__)


@pytest.mark.parametrize("cls", CONFIGS, ids=lambda cls: cls.__name__)
def test_a_default_is_that_of_the_nearest_class(cls):
    """Pydantic takes the fields of the first base, also those that this has from a base of all: with two bases, a
    default of the second would be lost."""
    for name, field in cls.model_fields.items():
        nearest = next(base for base in cls.__mro__ if name in inspect.get_annotations(base))
        if issubclass(nearest, AlgorithmConfig):
            assert field.default == nearest.model_fields[name].default, (name, nearest.__name__)


def test_sac_takes_an_update_for_every_fourth_step_of_sixteen_games():
    assert (SAC().rollout_length, SAC().gradient_steps) == (8, 32)
