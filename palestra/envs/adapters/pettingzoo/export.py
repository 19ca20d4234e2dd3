"""Vector envs as PettingZoo envs: one game as a ParallelEnv or an AECEnv."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pettingzoo

from palestra.envs.adapters.gymnasium import gymnasium_space, observation_box, with_action_mask
from palestra.envs.vector_base import Discrete, VectorEnv, VectorStep, zero_actions
from palestra.envs.vector_check import MakeVectorEnv


def to_parallel(make_env: MakeVectorEnv) -> pettingzoo.ParallelEnv:
    """Returns one game of `make_env(1)` as a ParallelEnv. Every agent gives an action at every step; actions of agents
    that do not act are ignored. Observations are dictionaries with an `action_mask` if the env has masks; an agent's
    last info has `is_success` if the env reports it."""
    return _ToParallel(make_env(1))


def to_aec(make_env: MakeVectorEnv) -> pettingzoo.AECEnv:
    """Returns one game of `make_env(1)` as an AECEnv: exactly the seats that act take turns."""
    return _ToAEC(make_env(1))


class _ToPettingZoo:
    """One game of a vector env: its spaces and step results in PettingZoo's form."""

    render_mode: ClassVar[None] = None

    def __init__(self, env: VectorEnv) -> None:
        self.inner = env
        self.vector_step = env.reset(np.zeros(1, np.int64))
        self.metadata = {"name": env.name or type(env).__name__, "is_parallelizable": True, "render_modes": []}
        self.possible_agents: list[str] = list(env.seats)
        self.agents: list[str] = []
        self.action_spaces = {
            seat: gymnasium_space(space) for seat, space in zip(env.seats, env.action_spaces, strict=True)
        }
        self.observation_spaces = {seat: self._observation_space(n) for n, seat in enumerate(env.seats)}
        if env.state_size:
            self.state_space = observation_box((env.state_size,), False)
        self._seeds = np.random.default_rng()
        self._over = False

    def _observation_space(self, n: int) -> Any:
        observation = observation_box(self.inner.observation_shapes[n], self.vector_step.obs.dtype == np.uint8)
        space = self.inner.action_spaces[n]
        if self.vector_step.action_mask is None or not isinstance(space, Discrete):
            return observation
        return with_action_mask(observation, space.n)

    def begin_episode(self, seed: int | None) -> None:
        """Starts the episode of `seed`; for None, the next seed derived from the last one given."""
        if seed is None:
            seed = int(self._seeds.integers(2**31))
        else:
            self._seeds = np.random.default_rng(seed)
        self.vector_step = self.inner.reset(np.array([seed]))
        self._over = False
        self.agents = list(self.possible_agents)

    def play_step(self, actions: dict[str, Any]) -> VectorStep:
        by_seat = zero_actions(self.inner.action_spaces, (1,))
        for n, seat in enumerate(self.possible_agents):
            if (action := actions.get(seat)) is not None:
                by_seat.reshape(len(self.possible_agents), -1)[n, : np.size(action)] = action
        self.vector_step = self.inner.step(by_seat)
        self._over = bool(self.vector_step.done[0])
        return self.vector_step

    def observe(self, agent: str) -> Any:
        n = self.possible_agents.index(agent)
        obs = self.vector_step.final_obs if self._over else self.vector_step.obs
        observation = obs[0, n, : self.inner.observation_shapes[n][0]].copy()
        space = self.inner.action_spaces[n]
        if self.vector_step.action_mask is None or not isinstance(space, Discrete):
            return observation
        return {
            "observation": observation,
            "action_mask": self.vector_step.action_mask[0, n, : space.n].astype(np.int8),
        }

    def episode_ends(self) -> tuple[dict[str, bool], dict[str, bool]]:
        """Returns the agents that the step terminated and those that it truncated: none before the
        game is over for all."""
        vector_step = self.vector_step
        dead = np.full(len(self.possible_agents), vector_step.terminated[0])
        if self._over and vector_step.seat_terminated is not None:
            dead |= vector_step.seat_terminated[0]
        terminated = dead.tolist()
        cut = [bool(vector_step.truncated[0]) and not ended for ended in terminated]
        agents = self.possible_agents
        return dict(zip(agents, terminated, strict=True)), dict(zip(agents, cut, strict=True))

    def end_info(self, n: int) -> dict[str, Any]:
        if not self._over or self.vector_step.success is None:
            return {}
        own = np.broadcast_to(self.vector_step.success[0], len(self.possible_agents))[n]
        if np.isnan(own):
            return {}
        return {"is_success": bool(own)}

    def state(self) -> np.ndarray:
        state = self.vector_step.final_state if self._over else self.vector_step.state
        if state is None:
            raise ValueError(f"{self.metadata['name']} has no global state: use an env with a state_size")
        return state[0].copy()

    def observation_space(self, agent: str) -> Any:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> Any:
        return self.action_spaces[agent]

    def close(self) -> None:
        self.inner.close()


class _ToParallel(_ToPettingZoo, pettingzoo.ParallelEnv):
    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self.begin_episode(seed)
        return {agent: self.observe(agent) for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        vector_step = self.play_step(actions)
        agents = self.agents
        if self._over:
            self.agents = []
        terminated, truncated = self.episode_ends()
        return (
            {agent: self.observe(agent) for agent in agents},
            {agent: float(vector_step.rewards[0, n]) for n, agent in enumerate(agents)},
            terminated,
            truncated,
            {agent: self.end_info(n) for n, agent in enumerate(agents)},
        )


class _ToAEC(_ToPettingZoo, pettingzoo.AECEnv):
    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.begin_episode(seed)
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, dict[str, Any]] = {agent: {} for agent in self.agents}
        self._ask()

    def _ask(self) -> None:
        """Starts a round in which the agents that act are selected one after the other."""
        self._waiting = [agent for n, agent in enumerate(self.agents) if self.vector_step.agent_mask[0, n]]
        self._given: dict[str, Any] = {}
        self.agent_selection = self._waiting[0]

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[agent] = 0.0
        self._clear_rewards()
        self._given[agent] = action
        self._waiting.remove(agent)
        if self._waiting:
            self.agent_selection = self._waiting[0]
            return
        self._play_round()
        self._accumulate_rewards()

    def _play_round(self) -> None:
        vector_step = self.play_step(self._given)
        self.terminations, self.truncations = self.episode_ends()
        for n, agent in enumerate(self.agents):
            self.rewards[agent] = float(vector_step.rewards[0, n])
            self.infos[agent] = self.end_info(n)
        if not self._over:
            self._ask()
