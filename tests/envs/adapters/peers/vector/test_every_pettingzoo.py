"""Every env in the registries of PettingZoo and MPE2 is played through the adapter, turn-based and parallel."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from helpers.random_play import play_at_random

with warnings.catch_warnings(action="ignore"):
    import ale_py
    import pettingzoo.env_registry  # noqa: F401 - fills the registries
    from mpe2.all_modules import mpe_environments
    from pettingzoo.env_registry.registration import aec_registry, parallel_registry
    from pettingzoo.utils.all_modules import all_environments

    from palestra.envs.adapters.pettingzoo.games import PettingZooEnv
    from palestra.envs.vector_check import check_vector_env

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

REGISTRIES = {"aec": aec_registry, "parallel": parallel_registry}
# Their second `reset(seed)` starts another game than the first: it does not reset everything.
NOT_REPEATABLE = {"atari/maze_craze-v3", "butterfly/knights_archers_zombies-v11"}


def forms(id: str) -> list[str]:
    """The registries that contain the env. Atari games are parallel; their turn-based forms are converted from
    those."""
    return [form for form, registry in REGISTRIES.items() if id in registry and (form, id[:5]) != ("aec", "atari")]


def options(form: str, id: str) -> dict[str, Any]:
    """Options with which games end within the steps of the check, except in the classics, which have no such option."""
    limit = {} if id.startswith("classic/") else {"max_cycles": 5}
    roms = {"auto_rom_install_path": str(Path(ale_py.__file__).parent)} if id.startswith("atari/") else {}
    return {"env_type": form, "id": id} | limit | roms


def test_registries_hold_every_module() -> None:
    ids = {id.rpartition("_")[0] for id in all_environments}
    assert ids == {id.rpartition("-")[0] for id in aec_registry} and parallel_registry.keys() <= aec_registry.keys()


@pytest.mark.parametrize(("form", "id"), [(form, id) for id in sorted(aec_registry) for form in forms(id)])
def test_every_env_of_pettingzoo_is_played(form: str, id: str) -> None:
    def make(games: int) -> PettingZooEnv:
        return PettingZooEnv(games, env="pettingzoo:make", options=options(form, id))

    if id in NOT_REPEATABLE:
        play_at_random(make(2), 60)
        return
    limited, atari = form == "parallel" and not id.startswith("classic/"), id.startswith("atari/")
    steps = 40 if id.startswith("classic/") else 12
    check_vector_env(make, num_envs=2, steps=steps, expect_end=limited, check_independence=not atari)


@pytest.mark.parametrize("form", ["env", "parallel_env"])
@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("id", sorted(mpe_environments))
def test_every_env_of_mpe2_is_played(form: str, continuous: bool, id: str) -> None:
    path = f"{mpe_environments[id].__name__}:{form}"
    given = {"max_cycles": 3, "continuous_actions": continuous}
    check_vector_env(lambda games: PettingZooEnv(games, env=path, options=given), num_envs=2, steps=25)
