"""EnvPool environments, stepped in batches by EnvPool's own threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import envpool
import numpy as np

from palestra.envs.adapters.gymnasium import action_decoder, is_integer_box, obs_encoder
from palestra.envs.batch.sync_vector import VectorEnvSpec, clip_actions, episode_seed
from palestra.envs.support.options import check_at_least
from palestra.envs.vector_base import Discrete, MultiDiscrete, Space, VectorEnv, VectorStep


class EnvPoolEnv(VectorEnv):
    """The EnvPool env `id`, made with `options` (among them `num_threads`).

    EnvPool has four kinds of env. With several players per game, each player is a seat ("player_0", ...): they take
    turns if the info has `current_player` (board and card games, with action masks), else they act simultaneously
    (multi-agent intersections). Envs that take one integer per agent (Jumanji's foraging, warehouse, connector) have
    one seat per agent ("agent_0", ...); these share one reward. All other envs have the one seat "agent".

    EnvPool starts the next episode one step late; here ended games are reset in the same step. A partial reset of a
    pool whose games have several players never returns, so such games have one pool each. EnvPool seeds its games when
    it makes them, so `reset` makes the pools anew; EnvPool itself derives the seeds of later episodes. The env cannot
    be saved.

    The parts of an observation that is a dictionary or a tuple, nested or not, are concatenated, those of a dictionary
    in the order of their names.

    Raises ValueError if EnvPool cannot make the env, or if it has action masks that are not for one integer of each
    seat.
    """

    name: ClassVar[str] = "envpool"

    def __init__(self, num_envs: int = 64, *, id: str = "Pong-v5", options: dict[str, Any] | None = None) -> None:
        check_at_least("num_envs", num_envs, 1, "nothing is played in fewer")
        self.num_envs = num_envs
        self.id = id
        self.options = options or {}
        self.pools: list[tuple[Any, np.ndarray]] = []  # each with the indices of its games
        pool = self._make_pool([0])
        obs, info = pool.reset()
        choice = action_decoder(pool.action_space, id).space
        self.has_joint_actions = is_integer_box(pool.action_space)
        kinds: tuple[Space, ...]
        if self.has_joint_actions:
            assert isinstance(choice, MultiDiscrete)
            kinds = tuple(Discrete(size) for size in choice.sizes)
            self.first_actions = pool.action_space.low.reshape(-1)
            self.seats = tuple(f"agent_{n}" for n in range(len(kinds)))
        else:
            players = pool.config.get("max_num_players", 1)
            self.seats = tuple(f"player_{n}" for n in range(players)) if players > 1 else ("agent",)
            kinds = (choice,) * players
        self.is_turn_based = "current_player" in info
        self._view = None if isinstance(obs, dict | tuple) else obs_encoder(pool.observation_space, id)
        size = self._observations(obs, 1).shape[2:]
        self.observation_shapes = (size,) * len(self.seats)
        self.action_spaces = kinds
        pixels = self._view is not None and self._view.is_uint8
        masks = self._masks(obs, info) is not None
        self.vector_step = VectorEnvSpec(
            self.seats, self.observation_shapes, self.action_spaces, uint8_observations=pixels, has_action_mask=masks
        ).empty_step(num_envs)
        pool.close()

    def reset(self, seeds: np.ndarray) -> VectorStep:
        self.close()
        numbers = [episode_seed(int(seed), 0) for seed in seeds]
        rows = [list(range(self.num_envs))]
        if len(self.seats) > 1 and not self.has_joint_actions:
            rows = [[b] for b in range(self.num_envs)]
        self.pools = [(self._make_pool([numbers[b] for b in games]), np.array(games)) for games in rows]
        self.vector_step.clear_results()
        for pool, games in self.pools:
            self._write_step(games, *pool.reset())
        return self.vector_step

    def step(self, actions: np.ndarray) -> VectorStep:
        frame = self.vector_step
        clipped = clip_actions(self.action_spaces, actions, self.vector_step.action_mask)
        for pool, rows in self.pools:
            pool.send(self._pool_actions(clipped[rows], rows))
        for pool, rows in self.pools:
            obs, rewards, terminated, truncated, info = pool.recv()
            frame.rewards[rows] = rewards.reshape(len(rows), -1)
            frame.terminated[rows], frame.truncated[rows] = terminated, np.asarray(truncated) & ~np.asarray(terminated)
            self._write_step(rows, obs, info)
        for pool, rows in self.pools:
            over = np.flatnonzero(frame.done[rows])
            if len(over):
                frame.final_obs[rows[over]] = frame.obs[rows[over]]
                self._write_step(rows[over], *pool.reset(over.astype(np.int32)))
        return frame

    def close(self) -> None:
        for pool, _ in self.pools:
            pool.close()
        self.pools = []

    def _pool_actions(self, actions: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Converts the actions of the games `rows` to EnvPool's layout."""
        if self.is_turn_based:
            return actions[np.arange(len(rows)), self.vector_step.agent_mask[rows].argmax(1)]
        if self.has_joint_actions:
            return actions + self.first_actions
        return actions.reshape(-1, *actions.shape[2:])

    def _make_pool(self, seeds: list[int]) -> Any:
        try:
            return envpool.make_gymnasium(self.id, num_envs=len(seeds), env_seed=seeds, **self.options)
        except (AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            options = self.options or "no options"
            raise ValueError(f'EnvPool cannot make "{self.id}" with {options}: {error}') from error

    def _write_step(self, rows: np.ndarray, obs: Any, info: dict[str, Any]) -> None:
        """Writes observations, agent mask and action mask of the games `rows` into the frame."""
        self.vector_step.obs[rows] = self._observations(obs, len(rows))
        mask = self._masks(obs, info)
        if self.is_turn_based:
            mover = np.asarray(info["current_player"])
            self.vector_step.agent_mask[rows] = mover[:, None] == np.arange(len(self.seats))
        if mask is not None and self.vector_step.action_mask is not None:
            self.vector_step.action_mask[rows] = mask

    def _observations(self, obs: Any, rows: int) -> np.ndarray:
        """Returns the observations [rows, N, *view]: each seat's own part if the env returns one
        per seat, else the whole observation for every seat."""
        if self._view is not None:
            seen = self._view.encode(obs)
            return seen.reshape(rows, len(self.seats), *seen.shape[1:])
        if isinstance(obs, dict) and "agents_view" in obs:
            return np.asarray(obs["agents_view"], np.float32).reshape(rows, len(self.seats), -1)
        leaves = [np.asarray(x, np.float32).reshape(rows, -1) for name, x in _leaves(obs) if name != "action_mask"]
        joined = np.concatenate(leaves, 1)[:, None]
        return np.broadcast_to(joined, (rows, len(self.seats), joined.shape[2]))

    def _masks(self, obs: Any, info: dict[str, Any]) -> np.ndarray | None:
        """Returns the action mask [rows, N, A], or None if the env has none. Raises ValueError for a mask of another
        shape or within a part of the observation, since forbidden actions would then be taken."""
        if self._view is None and (nested := [name for name, _ in _leaves(obs) if name.endswith(".action_mask")]):
            raise ValueError(
                f'EnvPool\'s "{self.id}" has the action_mask {nested[0]} within a part of its observation, which does '
                "not say whose actions it masks: choose an env with its action_mask beside the other parts"
            )
        mask = obs.get("action_mask") if isinstance(obs, dict) else info.get("legal_action_mask")
        if mask is None:
            return None
        sizes = {getattr(space, "n", 0) for space in self.action_spaces}
        size = max(sizes)
        shape = mask.shape[1:]
        if sizes != {size} or size == 0 or shape not in ((size,), (len(self.seats), size)):
            raise ValueError(
                f'EnvPool\'s "{self.id}" has an action_mask {list(shape)}, which is only used for one integer of '
                "each seat, all with equally many values: choose an env with such actions, or one that masks none"
            )
        return np.broadcast_to(mask.reshape(len(mask), -1, size), (len(mask), len(self.seats), size))


def _leaves(obs: Any, name: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Yields the arrays of an observation, which may be nested, with their names, joined by dots ("goal.x")."""
    if not isinstance(obs, dict | tuple):
        yield name, obs
        return
    items = sorted(obs.items()) if isinstance(obs, dict) else enumerate(obs)
    for key, value in items:
        yield from _leaves(value, f"{name}.{key}".removeprefix("."))
