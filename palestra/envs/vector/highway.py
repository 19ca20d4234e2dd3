"""Driving in highway-env, several vehicles at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import highway_env  # noqa: F401 - registers its envs

from palestra.envs.vector.gymnasium import GymnasiumGame, made
from palestra.envs.vector.loop import at_least_one
from palestra.envs.vector.processes import Hosted


class HighwayGame(GymnasiumGame):
    """One road. Each vehicle is a seat, with its own reward where the env has one for each (the intersections), else
    with the reward that the env gives to all."""

    def __init__(self, id: str, vehicles: int, config: dict[str, Any]) -> None:
        super().__init__(partial(driven, id, vehicles, config))

    def rewards(self, reward: Any, info: dict[str, Any]) -> Sequence[float]:
        return super().rewards(info.get("agents_rewards", reward), info)


def driven(id: str, vehicles: int, config: dict[str, Any]) -> Any:
    """The env of highway-env in which `vehicles` act and see, each as the env's only one would."""
    first: Any = made(id, {"config": config})
    alone = first.unwrapped.config
    first.close()
    several = {
        "controlled_vehicles": vehicles,
        "action": _several("MultiAgentAction", "action_config", alone["action"]),
        "observation": _several("MultiAgentObservation", "observation_config", alone["observation"]),
    }
    return made(id, {"config": config | several})


def _several(kind: str, key: str, each: dict[str, Any]) -> dict[str, Any]:
    return each if each["type"] == kind else {"type": kind, key: each}


class HighwayEnv(Hosted):
    """The env `id` of highway-env ("highway-fast-v0", "merge-v1", "roundabout-v1", "intersection-multi-agent-v2", ...)
    with as many `vehicles` as seats; `config` is highway-env's own. It is slow: spread it over `processes`.

    Outside the intersections the shared reward is what highway-env computes for the first vehicle.
    """

    name: ClassVar[str] = "highway"

    def __init__(
        self,
        games: int = 8,
        *,
        id: str = "intersection-multi-agent-v2",
        vehicles: int = 2,
        config: dict[str, Any] | None = None,
        processes: int = 0,
    ) -> None:
        at_least_one("vehicles", vehicles)
        super().__init__(partial(HighwayGame, id, vehicles, config or {}), games, processes)
