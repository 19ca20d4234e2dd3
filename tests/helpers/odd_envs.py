"""Envs of PettingZoo, Gymnasium and texts with one oddity each, all with returns known by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pettingzoo
from gymnasium import spaces

from palestra.core.types import Step
from palestra.envs import Env

LENGTH = 8  # steps of a game


class Line(gymnasium.Env):
    """Pays 1 in each of `LENGTH` steps and shows the time; with `odd`, something is odd."""

    observation_space, action_space = spaces.Box(0, 100, (2,)), spaces.Discrete(3)

    def __init__(self, odd: str = "") -> None:
        self.odd = odd
        if odd == "tuple of actions":
            self.action_space = spaces.Tuple((spaces.Discrete(3), spaces.Box(0, 1, (2,))))

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.time, self.over = 0, False
        self.draw = random.SystemRandom().random() if self.odd == "ignores its seed" else (seed or 0) % 97
        return self.seen(), self.info()

    def seen(self) -> Any:
        return {
            "wrong shape": np.zeros(1 + (self.time < 3), np.float32),
            "text": "red" if self.time == 3 else np.zeros(2, np.float32),
            "nan": np.full(2, np.nan if self.time == 3 else 0, np.float32),
            "masked": np.ma.masked_array([1.0, 2.0], [False, self.time == 3]),
            "complex": np.array([1.0, 2.0 + 1j * (self.time == 3)]),
            "large integer": np.array([1, 2**24 + (self.time == 3)]),
        }.get(self.odd, np.array([self.time, self.draw], np.float32))

    def info(self) -> dict[str, Any]:
        if self.odd == "no legal action":
            return {"action_mask": np.array([0, self.time != 3, 0], np.int8)}
        return {}

    def step(self, action: int) -> Any:
        if self.over:
            raise RuntimeError("step after the end of the episode")
        self.time += 1
        self.over = self.odd != "endless" and self.time >= LENGTH
        if self.odd == "ends by chance":
            self.over = self.time >= 3 and random.SystemRandom().random() < 0.2
        paid: Any = {
            "no reward": None,
            "array of one number": np.array([1.0]),
            "array": np.ones(3),
            "text reward": "1",
            "nan reward": np.nan,
        }.get(self.odd, 1.0)
        if self.odd == "old api":
            return self.seen(), paid, self.over, self.info()
        return self.seen(), paid, self.over, False, self.info()


for oddity in (
    *("", "endless", "ignores its seed", "ends by chance", "wrong shape", "text", "nan", "no legal action"),
    *("masked", "complex", "large integer", "tuple of actions"),
    *("no reward", "array of one number", "array", "text reward", "nan reward", "old api"),
):
    gymnasium.register(f"odd-{oddity.replace(' ', '-') or 'plain'}", lambda oddity=oddity: Line(oddity))


class Pair(pettingzoo.ParallelEnv):
    """Two agents that are paid 1 in each of `LENGTH` steps in which they are there; with `odd`, something is odd in
    step 3, or at the end."""

    metadata: dict[str, Any] = {"name": "pair"}
    render_mode = None

    def __init__(self, odd: str = "") -> None:
        self.odd, self.possible_agents = odd, ["a", "b"]

    def observation_space(self, agent: str) -> spaces.Space:
        box = spaces.Box(0, 10, (1,))
        if self.odd != "no legal action":
            return box
        return spaces.Dict({"observation": box, "action_mask": spaces.Box(0, 1, (3,), np.int8)})

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.time, self.agents = 0, ["a"] if self.odd in ("late", "all observed") else ["a", "b"]
        return ({} if self.odd == "nobody at first" else self.seen()), {agent: {} for agent in self.agents}

    def view(self, agent: str) -> Any:
        now = np.array([self.time], np.float32)
        if self.odd == "ignores its seed":
            now[0] += random.SystemRandom().random()
        if self.odd == "no legal action":
            stuck = agent == "b" and self.time == 3
            return {"observation": now, "action_mask": np.array([0, not stuck, 0], np.int8)}
        return None if self.odd == "none" and self.time == 3 else now

    def seen(self) -> dict[str, Any]:
        if self.odd == "empty" and self.time == 3:
            return {}
        seen = {agent: self.view(agent) for agent in self.agents}
        if self.odd == "all observed":
            seen = {agent: self.view(agent) for agent in self.possible_agents}
        if self.odd == "unknown observation" and self.time == 3:
            seen["c"] = self.view("a")
        return seen

    def step(self, actions: dict[str, Any]) -> Any:
        assert set(actions) == set(self.agents), (actions, self.agents)
        self.time += 1
        over, there = self.time >= LENGTH, list(self.agents)
        rewards: dict[str, Any] = {agent: 1.0 for agent in there}
        if self.odd in ("late", "all observed") and self.time == 3:
            self.agents = ["a", "b"]
        if self.odd == "unknown reward" and self.time == 3:
            rewards["c"] = 1.0
        if self.odd == "no reward" and self.time == 3:
            rewards["b"] = None
        if self.odd == "array of one number":
            rewards = {agent: np.array([1.0]) for agent in there}
        if self.odd == "empty" and self.time == 3:
            rewards = {}
        if self.odd == "listed":
            rewards = list(rewards.values())  # type: ignore[assignment]
        if over and self.odd == "silent end":
            self.agents = []
            return {}, rewards, {}, {}, {}
        seen, ended = self.seen(), dict.fromkeys(there, over)
        if self.odd == "b dies unseen" and self.time == 3:
            seen["b"], ended["b"] = None, True
        infos: dict[str, Any] = {agent: {} for agent in seen}
        self.agents = [agent for agent in self.agents if not ended.get(agent)]
        if self.odd == "old api":
            return seen, rewards, ended, infos
        return seen, rewards, ended, dict.fromkeys(there, False), infos


def pair(odd: str = "") -> Pair:
    return Pair(odd)


class Turns(pettingzoo.AECEnv):
    """Two agents move in turn, four moves each, and are paid 1 after each round. `odd`: "rewards kept" are set in the
    second move of a round and accumulated only then; "rewards booked" are only in what `last` reports; "rewards not
    booked" only in `rewards`; "ended agents stay": step(None) does not remove them; "unknown reward" pays agent c."""

    metadata: dict[str, Any] = {"name": "turns", "is_parallelizable": False}

    def __init__(self, odd: str = "") -> None:
        self.odd, self.possible_agents, self.render_mode = odd, ["a", "b"], None

    def observation_space(self, agent: str) -> spaces.Space:
        return spaces.Box(0, 10, (1,))

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(2)

    def observe(self, agent: str) -> np.ndarray:
        return np.array([self.time], np.float32)

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents, self.time, self.agent_selection = list(self.possible_agents), 0, "a"
        self.rewards, self._cumulative_rewards = dict.fromkeys(self.agents, 0.0), dict.fromkeys(self.agents, 0.0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self.infos: dict[str, Any] = {agent: {} for agent in self.agents}

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent]:
            if self.odd != "ended agents stay":
                self._was_dead_step(action)
            return
        self._cumulative_rewards[agent] = 0.0
        self.time += 1
        pays = float(self.time % 2 == 0)
        if pays or self.odd != "rewards kept":
            self.rewards = dict.fromkeys(self.agents, 0.0 if self.odd == "rewards booked" else pays)
        if pays and self.odd != "rewards not booked":
            for each in self.agents:
                self._cumulative_rewards[each] += 1.0
        if self.odd == "unknown reward":
            self.rewards["c"] = 1.0
        if self.odd == "ended agents stay" and self.time == 3:
            self.terminations["b"] = True
        if self.time >= LENGTH:
            self.terminations = dict.fromkeys(self.agents, True)
        self.agent_selection = "b" if agent == "a" else "a"

    def render(self) -> None:
        pass

    def close(self) -> None:
        pass


def turns(odd: str = "") -> Turns:
    return Turns(odd)


class Words(Env):
    """One seat, two answers, each paid 1; `odd` is odd in the second step."""

    name = "words"
    seats = ("agent",)

    def __init__(self, odd: str = "") -> None:
        self.odd = odd

    def reset(self, seed: int) -> Step:
        self.time = 0
        odd: dict[str, Callable[[], Any]] = {
            "list of messages": lambda: [{"role": "user", "content": "1 + 1?"}],
            "none seen": lambda: None,
        }
        return Step({"agent": odd.get(self.odd, lambda: "1 + 1?")()})

    def step(self, actions: dict[str, str]) -> Step:
        self.time += 1
        rewards: dict[str, Any] = {
            "unknown reward": {"Agent": 1.0},
            "no reward": {"agent": None},
            "text reward": {"agent": "1.0"},
            "array reward": {"agent": np.array([1.0])},
        }.get(self.odd, {"agent": 1.0})
        return Step({} if self.time == 2 and self.odd != "endless" else {"agent": "more"}, rewards)
