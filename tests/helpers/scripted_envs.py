"""Envs of three steps whose results are plain, but for one value at one place, which a test gives."""

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pettingzoo
from gymnasium import spaces

from palestra.core.types import Step
from palestra.envs import Env

LENGTH, ODD_TIME = 3, 2  # steps of a game; the step after which the value is met
SPACES = {
    "box": spaces.Box(-10, 10, (2,)),
    "discrete": spaces.Discrete(3),
    "multi discrete": spaces.MultiDiscrete([3, 2]),
    "image": spaces.Box(0, 255, (36, 36, 1), np.uint8),
    "dict": spaces.Dict(a=spaces.Box(-10, 10, (2,)), b=spaces.Box(-10, 10, (1,))),
    "tuple": spaces.Tuple((spaces.Box(-10, 10, (2,)),)),
}
PLAIN = {
    "box": np.zeros(2, np.float32),
    "discrete": 1,
    "multi discrete": np.array([1, 1]),
    "image": np.zeros((36, 36, 1), np.uint8),
    "dict": {"a": np.zeros(2), "b": np.zeros(1)},
    "tuple": (np.zeros(2),),
}


class ScriptedGym(gymnasium.Env):
    """One agent; `place` is "reward", "terminated", "truncated", "is_success", "action_mask" or a key of SPACES."""

    action_space = spaces.Discrete(3)

    def __init__(self, place: str, value: Any) -> None:
        self.place, self.value = place, value
        self.kind = place if place in SPACES else "box"
        self.observation_space = SPACES[self.kind]

    def at(self, place: str, plain: Any) -> Any:
        return self.value if place == self.place and self.time == ODD_TIME else plain

    def shown(self) -> Any:
        infos = {"is_success": False, "action_mask": np.ones(3, np.int8)}
        return self.at(self.kind, PLAIN[self.kind]), {
            name: self.at(name, plain) for name, plain in infos.items() if name == self.place
        }

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.time = 0
        return self.shown()

    def step(self, action: int) -> Any:
        self.time += 1
        seen, info = self.shown()
        over = self.time >= LENGTH
        return seen, self.at("reward", 1.0), self.at("terminated", over), self.at("truncated", False), info


gymnasium.register("any-step", ScriptedGym)


class ScriptedPair(pettingzoo.ParallelEnv):
    """Agents a and b; b is gone after the first step. `place` is a part of what `step` returns, or "agents", `agent`
    the one that the value is of."""

    metadata: dict[str, Any] = {"name": "scripted"}
    render_mode = None

    def __init__(self, place: str, agent: str, value: Any) -> None:
        self.place, self.agent, self.value, self.possible_agents = place, agent, value, ["a", "b"]

    def observation_space(self, agent: str) -> spaces.Space:
        return SPACES["box"]

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(3)

    def at(self, place: str, plain: dict[str, Any]) -> dict[str, Any]:
        is_odd = place == self.place and self.time == ODD_TIME
        return plain | {self.agent: self.value} if is_odd else plain

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.time, self.agents = 0, ["a", "b"]
        return {agent: PLAIN["box"] for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        self.time += 1
        there = [agent for agent in self.agents if agent != self.agent or self.place != "agents"]
        ended = {agent: self.time >= LENGTH or agent == "b" for agent in there}
        parts = (
            self.at("observations", {agent: PLAIN["box"] for agent in there}),
            self.at("rewards", dict.fromkeys(there, 1.0)),
            self.at("terminations", ended),
            self.at("truncations", dict.fromkeys(there, False)),
            {agent: {} for agent in there},
        )
        self.agents = [*self.at("agents", {agent: 0 for agent in there if not ended[agent]})]
        return parts


class ScriptedTurns(pettingzoo.AECEnv):
    """Agents a and b in turns, six moves. `place` is an attribute of the env or "observe", `agent` the one that the
    value is of."""

    metadata: dict[str, Any] = {"name": "scripted turns", "is_parallelizable": False}
    render_mode = None

    def __init__(self, place: str, agent: str, value: Any) -> None:
        self.place, self.agent, self.value, self.possible_agents = place, agent, value, ["a", "b"]

    def observation_space(self, agent: str) -> spaces.Space:
        return SPACES["box"]

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(3)

    def at(self, place: str, plain: dict[str, Any]) -> dict[str, Any]:
        is_odd = place == self.place and self.time == ODD_TIME
        return plain | {self.agent: self.value} if is_odd else plain

    def observe(self, agent: str) -> Any:
        return self.at("observe", {agent: PLAIN["box"]})[agent]

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents, self.time, self.agent_selection = ["a", "b"], 0, "a"
        self.infos: dict[str, Any] = {agent: {} for agent in self.agents}
        self.write()

    def write(self) -> None:
        self.rewards = self.at("rewards", dict.fromkeys(self.agents, 1.0))
        over = self.time >= 2 * LENGTH
        self.terminations = self.at("terminations", dict.fromkeys(self.agents, over))
        self.truncations = self.at("truncations", dict.fromkeys(self.agents, False))

    def step(self, action: Any) -> None:
        if self.terminations[self.agent_selection] or self.truncations[self.agent_selection]:
            self._was_dead_step(action)
            return
        self.time += 1
        self.write()
        self.agent_selection = "b" if self.agent_selection == "a" else "a"


class ScriptedText(Env):
    """One seat, three answers. `place` is a field of the second step, or a key of its info, or "seat" for a reward of a
    seat with the name `value`."""

    name = "scripted text"
    seats = ("agent",)

    def __init__(self, place: str, value: Any) -> None:
        self.place, self.value = place, value

    def reset(self, seed: int) -> Step:
        self.time = 0
        return Step({"agent": "1 + 1?"})

    def step(self, actions: dict[str, Any]) -> Step:
        self.time += 1
        seen = {} if self.time == LENGTH else {"agent": "more"}
        fields: dict[str, Any] = {"observations": seen, "rewards": {"agent": 1.0}, "info": {}}
        if self.time == ODD_TIME:
            places: dict[str, Callable[[], dict[str, Any]]] = {
                "reward": lambda: {"rewards": {"agent": self.value}},
                "seat": lambda: {"rewards": {self.value: 1.0}},
                "observation": lambda: {"observations": {"agent": self.value}},
                "observed seat": lambda: {"observations": {"agent": "more", self.value: "x"}},
                "team_reward": lambda: {"team_reward": self.value},
                "truncated": lambda: {"truncated": self.value},
                "legal seat": lambda: {"legal_actions": {self.value: ["x"]}},
            }
            fields |= places.get(self.place, lambda: {"info": {self.place: self.value}})()
        return Step(**fields)
