"""Every env in JaxMARL's registry is played through the adapter, or refused by it for the reason stated here."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

with warnings.catch_warnings(action="ignore"):
    from jaxmarl.registration import registered_envs

    from palestra.envs.adapters.jaxmarl import JaxMarlEnv
    from palestra.envs.vector_check import check_vector_env

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

ROBOTARIUM = [id for id in registered_envs if id.startswith("JaxRobotarium_")]
REFUSED = {
    "storm": "and no observation of agent 0",
    # The enemies' policy is a Flax module, which cannot be named in a config.
    "LearnedPolicyEnemySMAX": "missing 2 required positional arguments: 'policy' and 'params'",
    # Their package is a git submodule of JaxMARL, which the distribution on PyPI does not contain.
    **dict.fromkeys(ROBOTARIUM, "requires the jaxrobotarium package"),
    # JaxMARL has deprecated its Brax envs, as Brax itself has.
    **dict.fromkeys(["ant_4x2", "halfcheetah_6x1", "hopper_3x1", "humanoid_9|8", "walker2d_2x3"], "requires brax"),
}
SHORT: dict[str, dict[str, Any]] = {  # options with which games end within the steps of the check
    "overcooked": {"max_steps": 9},
    "overcooked_v2": {"max_steps": 9},
    "coin_game": {"num_inner_steps": 4, "num_outer_steps": 2},
    "storm_2p": {"num_inner_steps": 4, "num_outer_steps": 2},
    "storm_np": {"num_inner_steps": 4, "num_outer_steps": 2},
}


def test_every_refused_env_is_registered() -> None:
    assert REFUSED.keys() | SHORT.keys() <= set(registered_envs)


@pytest.mark.parametrize("id", sorted(REFUSED))
def test_refusals_say_why(id: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[id]):
        JaxMarlEnv(1, id=id)


@pytest.mark.timeout(1200)  # seconds; storm_np compiles for 30 s on an idle core, for minutes on a busy one
@pytest.mark.parametrize("id", sorted(set(registered_envs) - REFUSED.keys()))
def test_every_env_is_played(id: str) -> None:
    """Without the check of single games, for which the env would be compiled again."""
    options = SHORT.get(id, {})
    make = lambda games: JaxMarlEnv(games, id=id, options=options)  # noqa: E731
    check_vector_env(make, num_envs=2, steps=20, check_independence=False, expect_end=id in SHORT)
    assert all(isinstance(seat, str) for seat in make(2).seats)
