"""highway-env with several controlled vehicles."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import highway_env  # noqa: F401 - registers its envs

from palestra.envs.adapters.gymnasium import GymnasiumGame, make_gymnasium_env
from palestra.envs.batch.subproc_vector import PackageVectorEnv
from palestra.envs.support.options import check_at_least


class HighwayGame(GymnasiumGame):
    """One road. Each controlled vehicle is a seat. Rewards are per vehicle if the env has them (the
    intersections), else the env's one reward goes to every seat."""

    def __init__(self, id: str, vehicles: int, config: dict[str, Any]) -> None:
        super().__init__(partial(make_multi_vehicle_env, id, vehicles, config))

    def rewards(self, reward: Any, info: dict[str, Any]) -> Sequence[float]:
        return super().rewards(info.get("agents_rewards", reward), info)


def make_multi_vehicle_env(id: str, vehicles: int, config: dict[str, Any]) -> Any:
    """Returns the highway-env env with `vehicles` controlled vehicles, each with the action and
    observation of the single-vehicle env."""
    first: Any = make_gymnasium_env(id, {"config": config})
    alone = first.unwrapped.config
    first.close()
    several = {
        "controlled_vehicles": vehicles,
        "action": _several("MultiAgentAction", "action_config", alone["action"]),
        "observation": _several("MultiAgentObservation", "observation_config", alone["observation"]),
    }
    return make_gymnasium_env(id, {"config": config | several})


def _several(kind: str, key: str, each: dict[str, Any]) -> dict[str, Any]:
    return each if each["type"] == kind else {"type": kind, key: each}


class HighwayEnv(PackageVectorEnv):
    """The highway-env env `id` ("highway-fast-v0", "merge-v1", "roundabout-v1", "intersection-multi-agent-v2", ...)
    with `vehicles` seats; `config` is passed to highway-env. It is slow: use several `num_processes`.

    Except in the intersections, the shared reward is the one that highway-env computes for the first vehicle. Raises
    ValueError if `vehicles` is below 1 or Gymnasium cannot make the env.
    """

    name: ClassVar[str] = "highway"

    def __init__(
        self,
        num_envs: int = 8,
        *,
        id: str = "intersection-multi-agent-v2",
        vehicles: int = 2,
        config: dict[str, Any] | None = None,
        num_processes: int = 0,
    ) -> None:
        check_at_least("vehicles", vehicles, 1, "nothing is played in fewer")
        super().__init__(partial(HighwayGame, id, vehicles, config or {}), num_envs, num_processes, id)
