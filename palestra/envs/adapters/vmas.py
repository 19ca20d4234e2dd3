"""VMAS scenarios: continuous worlds stepped as tensors."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import vmas

from palestra.envs.batch.sync_vector import VectorEnvSpec, clip_actions, combine_seeds
from palestra.envs.support.options import check_at_least
from palestra.envs.vector_base import Continuous, Discrete, MultiDiscrete, Space, VectorEnv, VectorStep


class VmasEnv(VectorEnv):
    """The VMAS `scenario` ("balance", "navigation", "football", ...), truncated after `steps`, made with `options`:
    those of `vmas.make_env` ("continuous_actions": False for discrete actions) and of the scenario ("n_agents": 4).

    VMAS draws from one random stream for all games. If all games end together, one draw starts the next episodes, else
    each game draws its own; draws during play are for all games. A rollout is thus a function of the seeds and the
    actions, but a game does not play as it would alone; in `road_traffic` the first rewards after a reset also depend
    on the last actions before it. The env cannot be saved.

    Raises ValueError if VMAS cannot make the scenario, or if `num_envs` or `steps` is below 1.
    """

    name: ClassVar[str] = "vmas"

    def __init__(
        self,
        num_envs: int = 64,
        *,
        scenario: str = "simple_spread",
        steps: int = 100,
        options: dict[str, Any] | None = None,
    ) -> None:
        check_at_least("num_envs", num_envs, 1, "nothing is played in fewer")
        check_at_least("steps", steps, 1, "nothing is played in fewer")
        self.num_envs = num_envs
        self.env = _make_env(scenario, num_envs, steps, options or {})
        self.seats = tuple(str(agent.name) for agent in self.env.agents)
        self.action_spaces = tuple(_space_of(self.env.get_agent_action_space(agent)) for agent in self.env.agents)
        rows = [_row(view, num_envs) for view in self.env.reset(seed=0)]
        self.observation_shapes = tuple((row.shape[1],) for row in rows)
        self.vector_step = VectorEnvSpec(self.seats, self.observation_shapes, self.action_spaces).empty_step(num_envs)

    def reset(self, seeds: np.ndarray) -> VectorStep:
        self._seed = combine_seeds(*(int(seed) for seed in seeds))
        self._drawn = 0
        self.vector_step.clear_results()
        self._write(self.vector_step.obs, self.env.reset(seed=self._next_seed()))
        return self.vector_step

    def step(self, actions: np.ndarray) -> VectorStep:
        frame = self.vector_step
        clipped = clip_actions(self.action_spaces, actions)
        self.env.seed(self._next_seed())  # all envs of the process share the stream: reseed it for this step
        by_seat = [
            clipped[:, n].reshape(self.num_envs, -1)[:, : space.width or 1]
            for n, space in enumerate(self.action_spaces)
        ]
        seen, rewards, terminated, truncated, _ = self.env.step(by_seat)
        for n, reward in enumerate(rewards):
            frame.rewards[:, n] = reward.numpy().reshape(self.num_envs)  # some scenarios pay [games, 1]
        frame.terminated[:] = terminated.numpy()
        frame.truncated[:] = truncated.numpy() & ~frame.terminated
        self._write(frame.obs, seen)
        over = np.flatnonzero(frame.done)
        if len(over):
            frame.final_obs[over] = frame.obs[over]
            self._begin(over)
        return frame

    def _begin(self, over: np.ndarray) -> None:
        """Starts the next episode of the games `over`."""
        if len(over) == self.num_envs:
            self._write(self.vector_step.obs, self.env.reset())
            return
        for b in over:
            self.env.reset_at(int(b), return_observations=False)
        seen = self.env.get_from_scenario(get_observations=True, get_rewards=False, get_infos=False, get_dones=False)[0]
        self._write(self.vector_step.obs, seen, over)

    def _next_seed(self) -> int:
        self._drawn += 1
        return combine_seeds(self._seed, self._drawn)

    def _write(self, obs: np.ndarray, seen: Any, rows: Any = slice(None)) -> None:
        for n, view in enumerate(seen):
            obs[rows, n, : self.observation_shapes[n][0]] = _row(view, self.num_envs)[rows]


def _make_env(scenario: str, games: int, steps: int, options: dict[str, Any]) -> Any:
    fixed = {"num_envs": games, "max_steps": steps, "terminated_truncated": True}
    try:
        return vmas.make_env(scenario, **(fixed | options))
    except (AssertionError, FileNotFoundError, TypeError, ValueError) as error:
        raise ValueError(f'VMAS cannot make "{scenario}" with {options or "no options"}: {error}') from error


def _row(view: Any, games: int) -> np.ndarray:
    """Returns the observations of one agent in all games [B, size]; dictionary entries are concatenated."""
    entries = view.values() if isinstance(view, dict) else [view]
    return np.concatenate([entry.detach().numpy().reshape(games, -1) for entry in entries], 1)


def _space_of(space: Any) -> Space:
    if hasattr(space, "nvec"):
        return MultiDiscrete(tuple(int(n) for n in space.nvec))
    if hasattr(space, "n"):
        return Discrete(int(space.n))
    return Continuous(tuple(space.low.tolist()), tuple(space.high.tolist()))
