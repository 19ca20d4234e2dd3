"""Games of hunters against prey, of two opponents in turns, and the same as texts, with results known by hand."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pettingzoo
from gymnasium import spaces

from palestra.core.types import Seat, Step
from palestra.envs import Env
from palestra.envs.adapters.workflow import WorkflowContext, WorkflowResult

CAUGHT = [True, True, False, True]  # whether prey is caught, by the seed of the game modulo 4


class Hunt(pettingzoo.ParallelEnv):
    """Two hunters and their prey, which is caught in step 3 of 4 of the games of `CAUGHT` and leaves them then. The
    second hunter succeeds only in games whose seed is divisible by 4. With `odd` the infos are others."""

    metadata: dict[str, Any] = {"name": "hunt"}
    render_mode = None

    def __init__(self, odd: str = "") -> None:
        self.odd = odd
        self.possible_agents = ["hunter_0", "hunter_1", "prey"]

    def observation_space(self, agent: str) -> spaces.Space:
        return spaces.Box(0, 10, (1,))

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.game = seed or 0
        self.time = 0
        self.agents = list(self.possible_agents)
        return self.seen(), {agent: {} for agent in self.agents}

    def seen(self) -> dict[str, Any]:
        return {agent: np.array([self.time], np.float32) for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        self.time += 1
        agents = list(self.agents)
        is_caught = CAUGHT[self.game % 4] and self.time == 3
        ends = {agent: self.time == 4 or (agent == "prey" and is_caught) for agent in agents}
        rewards = {agent: float(is_caught) * (-2.0 if agent == "prey" else 1.0) for agent in agents}
        seen = self.seen()
        self.agents = [agent for agent in agents if not ends[agent]]
        infos = {agent: self.info(agent) if ends[agent] else {} for agent in agents}
        return seen, rewards, ends, dict.fromkeys(agents, False), infos

    def info(self, agent: str) -> dict[str, Any]:
        won = {
            "hunter_0": CAUGHT[self.game % 4],
            "hunter_1": self.game % 4 == 0,
            "prey": not CAUGHT[self.game % 4],
        }[agent]
        if self.odd == "hunters only" and agent == "prey":
            return {}
        if self.odd == "none" or (self.odd == "only true" and not won):
            return {}
        if self.odd == "text":
            return {"is_success": "yes"}
        return {"is_success": won}


class Tug(pettingzoo.ParallelEnv):
    """Two sides of two pull a rope once, or let go: a side earns what it pulls more than the other. With `is_shown`,
    also as an option of a reset, agents see whether they are on the right."""

    metadata: dict[str, Any] = {"name": "tug"}
    render_mode = None
    possible_agents = ["left_0", "right_0", "left_1", "right_1"]

    def __init__(self, is_shown: bool = False) -> None:
        self.is_shown = is_shown

    def observation_space(self, agent: str) -> spaces.Space:
        return spaces.Box(0, 1, (1,))

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = list(self.possible_agents)
        is_shown = (options or {}).get("is_shown", self.is_shown)
        seen = {agent: np.full(1, is_shown and agent.startswith("right"), np.float32) for agent in self.agents}
        return seen, {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        pulled = sum(int(action) if agent.startswith("left") else -int(action) for agent, action in actions.items())
        rewards = {agent: float(pulled if agent.startswith("left") else -pulled) for agent in self.agents}
        seen = {agent: np.zeros(1, np.float32) for agent in self.agents}
        ended = dict.fromkeys(self.agents, True)
        infos: dict[str, Any] = {agent: {} for agent in self.agents}
        self.agents = []
        return seen, rewards, ended, dict.fromkeys(ended, False), infos


class Duel(pettingzoo.AECEnv):
    """Two agents act twice each; first wins unless the seed is 2 modulo 3, second never."""

    metadata: dict[str, Any] = {"name": "duel"}
    render_mode = None

    def __init__(self) -> None:
        self.possible_agents = ["first", "second"]

    def observation_space(self, agent: str) -> spaces.Space:
        return spaces.Box(0, 10, (1,))

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(2)

    def observe(self, agent: str) -> Any:
        return np.array([self.time], np.float32)

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.game = seed or 0
        self.time = 0
        self.agents = list(self.possible_agents)
        self.agent_selection = "first"
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, dict[str, Any]] = {agent: {} for agent in self.agents}

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent]:
            self._was_dead_step(action)
            return
        self.time += 1
        self._cumulative_rewards[agent] = 0.0
        self._clear_rewards()
        if self.time == 4:
            won = float(self.game % 3 < 2)
            self.rewards = {"first": won, "second": -won}
            self.terminations = dict.fromkeys(self.agents, True)
            self.infos = {"first": {"is_success": bool(won)}, "second": {"is_success": False}}
        self.agent_selection = "second" if agent == "first" else "first"
        self._accumulate_rewards()


class Shared(gymnasium.Env):
    """Two seats, one step; each succeeds by action 1, or with `is_one` both by that of the first."""

    observation_space = spaces.Tuple((spaces.Box(0, 1, (1,)), spaces.Box(0, 1, (1,))))
    action_space = spaces.Tuple((spaces.Discrete(2), spaces.Discrete(2)))

    def __init__(self, is_one: bool = False) -> None:
        self.is_one = is_one

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        return (np.zeros(1, np.float32),) * 2, {}

    def step(self, action: Any) -> Any:
        won = [bool(part == 1) for part in action]
        success = won[0] if self.is_one else won
        return (np.zeros(1, np.float32),) * 2, 0.0, True, False, {"is_success": success}


gymnasium.register("shared-v0", Shared)


class Quarrel(Env):
    """Pro and con speak once each; pro wins the instances that are divisible by 3, nobody those of remainder 1, con the
    others. With `odd`, success is reported in another way."""

    name = "quarrel"
    seats = ("pro", "con")

    def __init__(self, odd: str = "") -> None:
        self.odd = odd

    def reset(self, seed: int) -> Step:
        self.seed = seed
        self.spoken = 0
        return Step({"pro": "speak"})

    def step(self, actions: dict[Seat, Any]) -> Step:
        self.spoken += 1
        if self.spoken == 1:
            return Step({"con": "speak"})
        side = {0: "pro", 1: "", 2: "con"}[self.seed % 3]
        success: Any = {seat: seat == side for seat in self.seats}
        if self.odd == "pro only":
            success = {"pro": side == "pro", "con": None}
        elif self.odd == "one":
            success = side == "pro"
        elif self.odd == "unknown seat":
            success = {"judge": True}
        elif self.odd == "text":
            success = {"pro": "yes"}
        rewards = {seat: float(seat == side) - float(bool(side) and seat != side) for seat in self.seats}
        return Step({}, rewards, info={"success": success})


def settle(play: WorkflowContext) -> WorkflowResult:
    """A program of two opponents that ends at once."""
    return WorkflowResult(success={"pro": True, "con": False})
