"""PettingZoo in both directions: its envs as vector envs, and vector envs as its envs."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pettingzoo
from pettingzoo.utils.conversions import aec_to_parallel_wrapper
from pettingzoo.utils.wrappers import AssertOutOfBoundsWrapper, OrderEnforcingWrapper

from palestra.envs.vector.base import Discrete, VectorEnv, VectorStep
from palestra.envs.vector.gymnasium import (
    action_decoder,
    can_use_action_mask,
    flat_box_size,
    gymnasium_space,
    obs_encoder,
    observation_box,
    split_action_mask,
    with_action_mask,
    zero_action,
)
from palestra.envs.vector.subproc_vector import PackageVectorEnv
from palestra.envs.vector.sync_vector import SingleStep, VectorEnvSpec

# ---- PettingZoo envs as vector envs

# Redundant with the checks of `SyncVectorEnv`: actions in bounds, reset first.
CHECK_WRAPPERS = (AssertOutOfBoundsWrapper, OrderEnforcingWrapper)


class _PettingZooGame:
    """Base of parallel and turn-based envs. If an observation is a dictionary with an `action_mask`, its `observation`
    is used; the mask may also be in the info. With `state` the env's global state is used if it is one-dimensional."""

    def __init__(self, env: Any, infos: dict[Any, dict[str, Any]], state: bool) -> None:
        self.env = env
        if not getattr(env, "possible_agents", None):
            raise ValueError(f"{env} does not say its possible_agents: an env whose agents are not known has no seats")
        self.agents = list(env.possible_agents)
        seen = [split_action_mask(env.observation_space(agent)) for agent in self.agents]
        self.has_dict_obs = [is_masked for _, is_masked in seen]
        self.obs_encoders = [
            obs_encoder(space, str(agent)) for (space, _), agent in zip(seen, self.agents, strict=True)
        ]
        self.action_decoders = [action_decoder(env.action_space(agent), str(agent)) for agent in self.agents]
        said = any(self.has_dict_obs) or any("action_mask" in info for info in infos.values())
        self.spec = VectorEnvSpec(
            tuple(str(agent) for agent in self.agents),
            tuple(view.shape for view in self.obs_encoders),
            tuple(choice.space for choice in self.action_decoders),
            state_size=flat_box_size(getattr(env, "state_space", None)) if state else 0,
            uint8_observations=all(view.is_uint8 for view in self.obs_encoders),
            has_action_mask=can_use_action_mask(
                said, [choice.space for choice in self.action_decoders], False, str(env)
            ),
            has_seat_terminated=len(self.agents) > 1,
        )
        self.terminated_agents: set[Any] = (
            set()
        )  # agents terminated in the current episode; `truncated_agents`: those truncated
        self.truncated_agents: set[Any] = set()
        self.has_plain_obs = (
            not any(self.has_dict_obs) and not self.spec.has_action_mask
        )  # the env's observations need no unpacking

    def encode_seat(self, seat: int, seen: Any, info: dict[str, Any]) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns observation and action mask (None if the env has no masks) of one seat."""
        view = self.obs_encoders[seat].encode(seen["observation"] if self.has_dict_obs[seat] else seen)
        space = self.spec.action_spaces[seat]
        if not self.spec.has_action_mask or not isinstance(space, Discrete):
            return view, None
        mask = seen["action_mask"] if self.has_dict_obs[seat] else info.get("action_mask")
        return view, np.ones(space.n, bool) if mask is None else np.asarray(mask, bool)

    def state(self) -> np.ndarray | None:
        return np.asarray(self.env.state(), np.float32) if self.spec.state_size else None

    def clear_ended(self) -> None:
        """Clears the agents that ended in the last game."""
        self.terminated_agents.clear()
        self.truncated_agents.clear()

    def record_ended(self, terminated: dict[Any, bool], truncated: dict[Any, bool]) -> None:
        """Records the agents that a step ended; agents that the env terminates and truncates at once count as
        terminated."""
        self.truncated_agents.update(
            agent for agent, flag in truncated.items() if flag and agent not in self.terminated_agents
        )
        self.terminated_agents.update(agent for agent, flag in terminated.items() if flag)
        self.truncated_agents -= self.terminated_agents

    def write_ends(self, step: SingleStep, over: bool) -> None:
        """Writes which agents have terminated and, if the game is `over`, whether it was terminated or truncated."""
        step.seat_terminated = (
            [agent in self.terminated_agents for agent in self.agents] if self.terminated_agents else None
        )
        step.truncated = over and bool(self.truncated_agents)
        step.terminated = over and not self.truncated_agents

    def close(self) -> None:
        self.env.close()


class ParallelGame(_PettingZooGame):
    """A parallel env. An agent that was terminated or truncated does not act again and gets no further reward; if a
    step reports both, it was terminated. The game is over when the last agent has ended, and truncated if any agent
    was."""

    def __init__(self, env: Any, state: bool = False) -> None:
        super().__init__(env, env.reset(seed=0)[1], state)

    def reset(self, seed: int) -> SingleStep:
        self.clear_ended()
        seen, infos = self.env.reset(seed=seed)
        return self._build_step(seen, infos, set(seen))

    def step(self, actions: np.ndarray) -> SingleStep:
        live = self.live_agents
        given = zip(self.agents, self.action_decoders, actions, strict=True)
        written = {agent: choice.decode(action) for agent, choice, action in given if agent in live}
        seen, rewards, terminated, truncated, infos = self.env.step(written)
        earning = (
            {agent for agent in rewards if agent not in self.terminated_agents} if self.terminated_agents else rewards
        )
        live = {agent for agent in seen if not (terminated.get(agent, False) or truncated.get(agent, False))}
        self.record_ended(terminated, truncated)
        step = self._build_step(seen, infos, live)
        step.rewards = [float(rewards[agent]) if agent in earning else 0.0 for agent in self.agents]
        self.write_ends(step, over=not live)
        return step

    def _build_step(self, seen: dict[Any, Any], infos: dict[Any, dict[str, Any]], live: set[Any]) -> SingleStep:
        """Builds the result of a step; `live_agents` are the agents that act next. Optimised: it runs after every step
        of envs that may themselves be as fast."""
        self.live_agents = live
        views: list[np.ndarray | None] = [None] * len(self.agents)
        action_mask: list[np.ndarray | None] = [None] * len(self.agents)
        for seat, agent in enumerate(self.agents):
            if agent not in seen:
                continue
            if self.has_plain_obs:
                views[seat] = self.obs_encoders[seat].encode(seen[agent])
            else:
                views[seat], action_mask[seat] = self.encode_seat(seat, seen[agent], infos.get(agent, {}))
        agent_mask = None if len(live) == len(self.agents) else [agent in live for agent in self.agents]
        return SingleStep(
            views, agent_mask, action_mask=action_mask if self.spec.has_action_mask else None, state=self.state()
        )


class AECGame(_PettingZooGame):
    """A turn-based (AEC) env. Only the agent that acts gets a new observation, and all agents at the end of the game.
    Rewards are those of the step in which they occur, for all agents."""

    def __init__(self, env: Any, state: bool = False) -> None:
        env.reset(seed=0)
        super().__init__(env, env.infos, state)

    def reset(self, seed: int) -> SingleStep:
        self.clear_ended()
        self.env.reset(seed=seed)
        return self._build_step(list(self.agents))

    def step(self, actions: np.ndarray) -> SingleStep:
        env, seat = self.env, self.agents.index(self.env.agent_selection)
        env.step(self.action_decoders[seat].decode(actions[seat]))
        rewards = [float(env.rewards.get(agent, 0.0)) for agent in self.agents]
        self.record_ended(env.terminations, env.truncations)
        over = all(env.terminations[agent] or env.truncations[agent] for agent in env.agents)
        while not over and (env.terminations[env.agent_selection] or env.truncations[env.agent_selection]):
            env.step(None)  # removes an agent that has ended
        step = self._build_step(list(env.agents) if over else [env.agent_selection])
        step.rewards = rewards
        self.write_ends(step, over)
        return step

    def _build_step(self, shown: list[Any]) -> SingleStep:
        views: list[np.ndarray | None] = [None] * len(self.agents)
        action_mask: list[np.ndarray | None] = [None] * len(self.agents)
        for agent in shown:
            seat = self.agents.index(agent)
            views[seat], action_mask[seat] = self.encode_seat(
                seat, self.env.observe(agent), self.env.infos.get(agent, {})
            )
        agent_mask = [agent == self.env.agent_selection for agent in self.agents]
        return SingleStep(
            views, agent_mask, action_mask=action_mask if self.spec.has_action_mask else None, state=self.state()
        )


def load_game(path: str, options: dict[str, Any] | None = None, state: bool = False) -> ParallelGame | AECGame:
    """Returns the game that the factory "module:function" makes with `options`; `state` adds its global state. Raises
    ValueError if `path` names no factory, the factory fails, or it makes no PettingZoo env."""
    module, _, factory = path.partition(":")
    if not module or not factory:
        raise ValueError(
            f'"{path}" names no factory: env is "module:function", such as "{module or path}:parallel_env" or '
            f'"{module or path}:env"'
        )
    try:
        env = getattr(importlib.import_module(module), factory)(**(options or {}))
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(f'"{path}" cannot be made with {options or "no options"}: {error}') from error
    if isinstance(env, pettingzoo.ParallelEnv):
        return ParallelGame(LeanParallelWrapper(env) if type(env) is aec_to_parallel_wrapper else env, state)
    if isinstance(env, pettingzoo.AECEnv):
        return AECGame(strip_check_wrappers(env), state)
    raise ValueError(f'"{path}" makes {type(env).__name__}, which is neither a ParallelEnv nor an AECEnv of PettingZoo')


class LeanParallelWrapper(aec_to_parallel_wrapper):
    """PettingZoo's parallel wrapper of turn-based envs in which all agents act in every round, without the unused
    observation that the wrapper computes before each turn: an eighth of the time of a step of a small env."""

    def __init__(self, env: aec_to_parallel_wrapper) -> None:
        super().__init__(strip_check_wrappers(env.aec_env))

    def step(self, actions: dict[Any, Any]) -> tuple[dict[Any, Any], ...]:
        env = self.aec_env
        rewards: dict[Any, float] = defaultdict(float)
        for agent in env.agents:
            if agent != env.agent_selection:
                raise ValueError(f"{env} goes on with {env.agent_selection}, not {agent}: play its turn-based form")
            env.step(actions[agent])
            for rewarded in env.agents:
                rewards[rewarded] += env.rewards[rewarded]
        said = {**env.terminations}, {**env.truncations}, {**env.infos}
        seen = {agent: env.observe(agent) for agent in env.agents}
        while env.agents and (env.terminations[env.agent_selection] or env.truncations[env.agent_selection]):
            env.step(None)  # removes an agent that has ended
        self.agents = env.agents
        return seen, rewards, *said


def strip_check_wrappers(env: Any) -> Any:
    """Returns the turn-based `env` without its outer wrappers that only check: every attribute access passes through
    them, which takes a third of the time of a step of a small env."""
    while type(env) in CHECK_WRAPPERS:
        env = env.env
    return env


class PettingZooEnv(PackageVectorEnv):
    """The PettingZoo env that the factory `env` ("module:function") makes with `options`, parallel or turn-based. The
    factory "pettingzoo:make" with the options `env_type` and `id` makes an env of PettingZoo's registry. With `state`,
    central critics get the env's global state, computed in every step; else they get all observations.

    Games repeat exactly only if the env's own `reset(seed)` resets everything; knights_archers_zombies does not.
    """

    name: ClassVar[str] = "pettingzoo"

    def __init__(
        self,
        num_envs: int = 16,
        *,
        env: str = "mpe2.simple_spread_v3:parallel_env",
        options: dict[str, Any] | None = None,
        state: bool = False,
        num_processes: int = 0,
    ) -> None:
        super().__init__(partial(load_game, env, options, state), num_envs, num_processes)


# ---- vector envs as PettingZoo envs

MakeVectorEnv = Callable[[int], VectorEnv]


def to_parallel(make_env: MakeVectorEnv) -> pettingzoo.ParallelEnv:
    """Returns one game of `make_env(1)` as a ParallelEnv. Every agent gives an action at every step; actions of agents
    that do not act are ignored. Observations are dictionaries with an `action_mask` if the env has masks; the last info
    has `success` if the env reports it."""
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
        self.observation_spaces = {seat: self._observed(n) for n, seat in enumerate(env.seats)}
        if env.state_size:
            self.state_space = observation_box((env.state_size,), False)
        self._seeds, self._over = np.random.default_rng(), False

    def _observed(self, n: int) -> Any:
        view, space = (
            observation_box(self.inner.observation_shapes[n], self.vector_step.obs.dtype == np.uint8),
            self.inner.action_spaces[n],
        )
        return (
            with_action_mask(view, space.n)
            if self.vector_step.action_mask is not None and isinstance(space, Discrete)
            else view
        )

    def begin_episode(self, seed: int | None) -> None:
        """Starts the episode of `seed`; for None, the next seed derived from the last one given."""
        if seed is not None:
            self._seeds = np.random.default_rng(seed)
        number = seed if seed is not None else int(self._seeds.integers(2**31))
        self.vector_step, self._over = self.inner.reset(np.array([number])), False
        self.agents = list(self.possible_agents)

    def play_step(self, actions: dict[str, Any]) -> VectorStep:
        given = [self._written(n, actions.get(seat)) for n, seat in enumerate(self.possible_agents)]
        if not isinstance(self.inner.action_spaces[0], Discrete):
            width = max(len(action) for action in given)
            given = [np.pad(action, (0, width - len(action))) for action in given]
        kind = np.float32 if given[0].dtype.kind == "f" else np.int32
        self.vector_step = self.inner.step(np.stack(given)[None].astype(kind))
        self._over = bool(self.vector_step.done[0])
        return self.vector_step

    def _written(self, n: int, action: Any) -> np.ndarray:
        return zero_action(self.action_spaces[self.possible_agents[n]]) if action is None else np.asarray(action)

    def observe(self, agent: str) -> Any:
        n = self.possible_agents.index(agent)
        obs = (self.vector_step.final_obs if self._over else self.vector_step.obs)[0, n]
        view = obs[: self.inner.observation_shapes[n][0]].copy() if obs.ndim == 1 else obs.copy()
        space = self.inner.action_spaces[n]
        if self.vector_step.action_mask is None or not isinstance(space, Discrete):
            return view
        return {"observation": view, "action_mask": self.vector_step.action_mask[0, n, : space.n].astype(np.int8)}

    def episode_ends(self) -> tuple[dict[str, bool], dict[str, bool]]:
        """Returns the agents that the step terminated and those that it truncated: none before the game is over for
        all."""
        frame, marked = self.vector_step, self.vector_step.seat_terminated
        dead = np.zeros(len(self.possible_agents), bool) if marked is None or not self._over else marked[0]
        terminated = (dead | frame.terminated[0]).tolist()
        cut = [bool(frame.truncated[0]) and not ended for ended in terminated]
        agents = self.possible_agents
        return dict(zip(agents, terminated, strict=True)), dict(zip(agents, cut, strict=True))

    def end_info(self) -> dict[str, Any]:
        return (
            {"success": bool(self.vector_step.success[0])}
            if self._over and self.vector_step.success is not None
            else {}
        )

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
        frame, agents = self.play_step(actions), self.agents
        self.agents = [] if self._over else agents
        terminated, truncated = self.episode_ends()
        return (
            {agent: self.observe(agent) for agent in agents},
            {agent: float(frame.rewards[0, n]) for n, agent in enumerate(agents)},
            terminated,
            truncated,
            {agent: self.end_info() for agent in agents},
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
        frame = self.play_step(self._given)
        self.terminations, self.truncations = self.episode_ends()
        for n, agent in enumerate(self.agents):
            self.rewards[agent] = float(frame.rewards[0, n])
            self.infos[agent] = self.end_info()
        if not self._over:
            self._ask()
