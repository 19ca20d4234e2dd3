"""Every scenario of VMAS is played through the adapter, with continuous and with discrete actions."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.random_play import play_at_random

with warnings.catch_warnings(action="ignore"):
    import vmas

    from palestra.envs.adapters.vmas import VmasEnv
    from palestra.envs.vector_check import check_vector_env

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

MODULES = Path(vmas.__file__).parent.glob("scenarios/**/*.py")
SCENARIOS = sorted(path.stem for path in MODULES if path.stem != "__init__")
# Its rewards compare the first action of an episode with the last action before it, also across `reset`.
NOT_REPEATABLE = "road_traffic"


def test_all_listed_scenarios_are_among_the_modules() -> None:
    assert {*vmas.scenarios, *vmas.mpe_scenarios, *vmas.debug_scenarios} <= set(SCENARIOS) and len(SCENARIOS) > 40


@pytest.mark.parametrize("continuous", [True, False])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_scenario_is_played(scenario: str, continuous: bool) -> None:
    given: dict[str, Any] = {"continuous_actions": continuous}
    make = lambda games: VmasEnv(games, scenario=scenario, steps=5, options=given)  # noqa: E731
    if scenario == NOT_REPEATABLE:
        played, again = play_at_random(make(2), 7), play_at_random(make(2), 7)
        assert all(np.array_equal(one.rewards, two.rewards) for one, two in zip(played, again, strict=True))
        return
    check_vector_env(make, num_envs=2, steps=7, check_independence=False)
