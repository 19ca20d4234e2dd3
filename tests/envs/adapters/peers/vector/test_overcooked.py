"""palestra's Overcooked compared with JaxMARL's, from the same states with the same actions."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

with warnings.catch_warnings(action="ignore"):
    from environments.overcooked.overcooked_games import LAYOUTS, RECORDED, read_recordings, replay
    from environments.overcooked.overcooked_jaxmarl import record

    from palestra.environments.overcooked.env import Overcooked
    from palestra.envs.adapters.jaxmarl import JaxMarlEnv

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("layout", LAYOUTS)
def test_games_equal_jaxmarl(layout: str) -> None:
    """8,000 joint steps in each layout: 20 games of 400 steps."""
    happened = replay(LAYOUTS[layout], record(layout, 20, 400, seed=7))
    assert happened["shaped 3"] and happened["put down"] >= 10 and happened["both moved, neither went"] >= 10


def test_recorded_games_equal_the_package() -> None:
    for seed, (layout, one) in enumerate(read_recordings(RECORDED).items()):
        again = record(layout, 16, 100, seed)
        assert all(np.array_equal(value, getattr(again, name)) for name, value in vars(one).items())


@pytest.mark.filterwarnings("ignore:OvercookedV2 is now released:DeprecationWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_seats_and_spaces_equal_the_adapters(layout: str) -> None:
    theirs, env = JaxMarlEnv(1, id="overcooked", map=layout), Overcooked(1, layout=LAYOUTS[layout])
    assert env.seats == theirs.seats and env.action_spaces == theirs.action_spaces
    assert env.observation_shapes == theirs.observation_shapes and env.state_size == theirs.state_size
    seeds = np.array([0])
    assert (theirs.reset(seeds).action_mask is None) == (env.reset(seeds).action_mask is None)
