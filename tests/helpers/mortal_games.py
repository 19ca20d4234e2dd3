"""Games of PettingZoo and Gymnasium whose agents end at different times, with values known by hand."""

from typing import Any

import gymnasium
import numpy as np
import pettingzoo
from gymnasium import spaces

LENGTH = 10
VIEW = spaces.Box(0, 1, (2,), np.float32)


def view(agent: int) -> np.ndarray:
    """The observation of an agent: only its identity, so its last observation has the value of its first."""
    return np.eye(2, dtype=np.float32)[agent]


class Parting(pettingzoo.ParallelEnv):
    """Agent "early" is paid 1 for the first step, which ends it as given by `flags`: terminated, truncated or both.
    Agent "late" is paid nothing, and is truncated after `length` steps (with `dies` it terminates instead). So the
    value of "early" is 1, of "late" 0. The last observation of "early" is filled with `last`, that of "late" after two
    steps with `broken`."""

    metadata: dict[str, Any] = {"name": "parting"}
    render_mode = None

    def __init__(
        self,
        flags: str = "terminated",
        dies: bool = False,
        length: int = LENGTH,
        box: bool = False,
        masks: bool = False,
        last: float | None = None,
        broken: float | None = None,
    ) -> None:
        self.info = {"action_mask": np.ones(2, np.int8)} if masks else {}
        self.possible_agents = ["early", "late"]
        self.flags, self.dies, self.length = flags, dies, length
        self.fill = {("early", 1): last, ("late", 2): broken}
        self.action = spaces.Box(-1, 1, (1,), np.float32) if box else spaces.Discrete(2)

    def observation_space(self, agent: str) -> spaces.Space:
        return VIEW

    def action_space(self, agent: str) -> spaces.Space:
        return self.action

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
        self.agents, self.time = list(self.possible_agents), 0
        return self.seen(), {agent: self.info for agent in self.agents}

    def seen(self) -> dict[str, np.ndarray]:
        seen = {agent: view(self.possible_agents.index(agent)) for agent in self.agents}
        for agent in self.agents:
            if (number := self.fill.get((agent, self.time))) is not None:
                seen[agent][:] = number
        return seen

    def step(self, actions: dict[str, Any]) -> tuple[dict, dict, dict, dict, dict]:
        assert set(actions) == set(self.agents)
        self.time += 1
        over = self.time >= self.length
        ended = {
            "early": ("terminated" in self.flags, "truncated" in self.flags),
            "late": (over and self.dies, over and not self.dies),
        }
        seen = self.seen()
        rewards = {agent: float(agent == "early") for agent in self.agents}
        terminated, truncated = ({agent: ended[agent][i] for agent in self.agents} for i in (0, 1))
        infos: dict[str, Any] = {agent: {} for agent in self.agents}
        self.agents = [agent for agent in self.agents if not any(ended[agent])]
        return seen, rewards, terminated, truncated, infos


class PartingTurns(pettingzoo.AECEnv):
    """The same in a turn-based env: "early" moves first, is paid 1 for it and terminates."""

    metadata: dict[str, Any] = {"name": "parting_turns", "is_parallelizable": False}
    render_mode = None

    def __init__(self, flags: str = "terminated", dies: bool = False, length: int = LENGTH) -> None:
        super().__init__()
        self.possible_agents = ["early", "late"]
        self.flags, self.dies, self.length = flags, dies, length

    def observation_space(self, agent: str) -> spaces.Space:
        return VIEW

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(2)

    def observe(self, agent: str) -> np.ndarray:
        return view(self.possible_agents.index(agent))

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents, self.time = list(self.possible_agents), 0
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, Any] = {agent: {} for agent in self.agents}
        self.agent_selection = "early"

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            if self.agents:
                self.agent_selection = self.agents[0]
            return
        self._clear_rewards()
        if agent == "early":
            self.rewards[agent] = 1.0
            self.terminations[agent], self.truncations[agent] = ("terminated" in self.flags, "truncated" in self.flags)
            return  # the agent that ended is selected, as PettingZoo requires
        self.time += 1
        if self.time >= self.length:
            self.terminations[agent], self.truncations[agent] = self.dies, not self.dies


class Trio(gymnasium.Env):
    """Three seats of one Gymnasium env, paid 1 for the first step. The first then terminates and the second is
    truncated; the third is truncated after `LENGTH` steps. Observations keep counting."""

    observation_space = spaces.Tuple([spaces.Box(0, LENGTH, (1,), np.float32)] * 3)
    action_space = spaces.Tuple([spaces.Discrete(2)] * 3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        self.time = 0
        return self.seen(), {}

    def seen(self) -> tuple[np.ndarray, ...]:
        return tuple(np.full(1, self.time, np.float32) for _ in range(3))

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict]:
        self.time += 1
        over = self.time == LENGTH
        ended = [True, False, False], [over, True, over]  # the first has terminated, also if it is truncated as well
        return self.seen(), [1.0, 1.0, 1.0], *ended, {}


def parting(**options: Any) -> Parting:
    return Parting(**options)


def parting_turns(**options: Any) -> PartingTurns:
    return PartingTurns(**options)
