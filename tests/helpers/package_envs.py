"""Small envs of PettingZoo and Gymnasium, as a user would write them."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv


class Meet(ParallelEnv[str, np.ndarray, int]):
    """Two agents on a line are paid when they meet."""

    metadata = {"name": "meet"}
    possible_agents = ["red", "blue"]

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(0, 4, (2,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.at = np.random.default_rng(seed).integers(0, 5, 2)
        self.agents, self.steps = list(self.possible_agents), 0
        return self._seen(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, int]) -> Any:
        self.steps += 1
        self.at = np.clip(self.at + [actions[agent] - 1 for agent in self.agents], 0, 4)
        met, agents = bool(self.at[0] == self.at[1]), self.agents
        over = met or self.steps == 8
        self.agents = [] if over else agents
        return self._seen(), *({agent: value for agent in agents} for value in (float(met), met, over and not met, {}))

    def _seen(self) -> dict[str, np.ndarray]:
        return {"red": self.at.astype(np.float32), "blue": self.at[::-1].astype(np.float32)}


class Unseeded(Meet):
    """Its start does not depend on the seed."""

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(None)


class Walk(gymnasium.Env[np.ndarray, int]):
    """One agent walks to the end of a line."""

    observation_space = spaces.Box(0, 4, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, length: int = 4) -> None:
        self.length = length

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.at = int(np.random.default_rng(seed).integers(0, self.length))
        self.steps = 0
        return np.array([self.at], np.float32), {}

    def step(self, action: int) -> Any:
        self.at, self.steps = max(0, self.at + (1 if action else -1)), self.steps + 1
        done = self.at >= self.length
        return np.array([self.at], np.float32), float(done), done, self.steps == 20 and not done, {}
