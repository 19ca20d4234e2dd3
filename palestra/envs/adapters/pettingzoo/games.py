"""PettingZoo envs, parallel and turn-based, as vector envs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pettingzoo
from pettingzoo.utils.conversions import aec_to_parallel_wrapper
from pettingzoo.utils.wrappers import AssertOutOfBoundsWrapper, OrderEnforcingWrapper

from palestra.core.config.user_modules import import_object
from palestra.envs.adapters.gymnasium import (
    action_decoder,
    can_use_action_masks,
    check_by_agent,
    flat_box_size,
    obs_encoder,
    read_result,
    refuse_late_mask,
    render_package_env,
    split_action_mask,
    without_action_mask,
)
from palestra.envs.adapters.observations import fit_in_one_array, images_by_seat
from palestra.envs.adapters.wrappers import Wrappers, reset_arguments, wrap
from palestra.envs.batch.subproc_vector import PackageVectorEnv
from palestra.envs.batch.sync_vector import SingleStep, VectorEnvSpec, require_flag, to_action_mask, to_array, to_reward
from palestra.envs.vector_base import Discrete, RenderFrame

MAX_REMOVALS = 10_000  # steps of agents that have ended, in a row
CHECKED_PAYMENTS = 100  # rewards of a turn-based env that are compared with what `last` reports; it takes time
ONLY_BOOL = {bool}
SUCCESS_KEY = "is_success"  # key in the infos, as in Gymnasium

# Redundant with the checks of `SyncVectorEnv`: actions in bounds, reset first.
CHECK_WRAPPERS = (AssertOutOfBoundsWrapper, OrderEnforcingWrapper)


class _PettingZooGame:
    """Base of parallel and turn-based envs. If an observation is a dictionary with an `action_mask`, its `observation`
    is used, or all other parts if none is called so; the mask may also be in the info. The success of an agent in a
    game is the last `is_success` that its infos gave; an agent may give none. With `state` the env's global state is
    used. Raises ValueError if it is not one-dimensional."""

    def __init__(self, env: Any, infos: dict[Any, dict[str, Any]], state: bool) -> None:
        self.env = env
        if not getattr(env, "possible_agents", None):
            raise ValueError(
                f"{env} has no possible_agents: its seats are unknown without them; define them in the env"
            )
        self.agents = list(env.possible_agents)
        self.seat_numbers = {agent: seat for seat, agent in enumerate(self.agents)}
        seen = [split_action_mask(env.observation_space(agent)) for agent in self.agents]
        self.has_dict_obs = [is_masked for _, is_masked in seen]
        encoders = [obs_encoder(space, str(agent)) for (space, _), agent in zip(seen, self.agents, strict=True)]
        self.obs_encoders = fit_in_one_array(encoders, self.agents)
        self.action_decoders = [action_decoder(env.action_space(agent), str(agent)) for agent in self.agents]
        masked_spaces = [
            choice.space
            for agent, is_masked, choice in zip(self.agents, self.has_dict_obs, self.action_decoders, strict=True)
            if is_masked or "action_mask" in _info(infos, agent)
        ]
        self.spec = VectorEnvSpec(
            tuple(str(agent) for agent in self.agents),
            tuple(encoder.shape for encoder in self.obs_encoders),
            tuple(choice.space for choice in self.action_decoders),
            state_size=_state_size(env) if state else 0,
            uint8_observations=all(encoder.is_uint8 for encoder in self.obs_encoders),
            has_action_mask=can_use_action_masks(masked_spaces, str(env)),
            reports_success="by_seat",
            has_seat_terminated=len(self.agents) > 1,
            observation_images=images_by_seat(self.obs_encoders),
        )
        self.seat_success = np.full(len(self.agents), np.nan, np.float32)  # in the current episode
        if state and not self.spec.state_size:
            raise ValueError(
                f"state: {env} has no global state that is a row of numbers, so critics would see all observations "
                "instead: leave state out, or wrap the env so that its state() returns a row"
            )
        self.terminated_agents: set[Any] = set()  # in the current episode
        self.truncated_agents: set[Any] = set()
        # the env's observations need no unpacking
        self.has_plain_obs = not any(self.has_dict_obs) and not self.spec.has_action_mask

    def check_agents(self, named: Collection[Any], what: str) -> None:
        """Raises ValueError if the env names an agent that is not one of its `possible_agents`."""
        for agent in named:
            if agent not in self.seat_numbers:
                raise ValueError(
                    f"{self.env} {what} {agent!r}, which is none of its possible_agents "
                    f"({', '.join(map(str, self.agents))}): correct the one or the other"
                )

    def flags(self, flags: dict[Any, Any], what: str) -> dict[Any, bool]:
        """Returns the flags of agents. Raises ValueError for agents that are unknown, and for what is no flag."""
        self.check_agents(flags, f"{what} agent")
        if ONLY_BOOL.issuperset(map(type, flags.values())):
            return flags
        return {agent: require_flag(flag, f"what {what} agent {agent}") for agent, flag in flags.items()}

    def check_unpaid(self, rewards: dict[Any, Any]) -> None:
        """Raises ValueError if one of these rewards, of agents that were gone before the step, is
        not 0: the return of an agent ends with it."""
        for agent, reward in rewards.items():
            if to_reward(reward, str(agent)):
                raise ValueError(
                    f"{self.env} pays agent {agent} {reward} after it has terminated: pay it with its last step, or "
                    "let it stay until then, with an action without effect"
                )

    def encode_seat(self, seat: int, seen: Any, info: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns observation and action mask (None if the env has no masks) of one seat."""
        if seen is None:
            raise ValueError(
                f'{self.env} shows agent "{self.agents[seat]}" None: show it an observation of its space; only an '
                "agent that has terminated needs none"
            )
        mask = info.get("action_mask")
        if self.has_dict_obs[seat]:
            mask = seen["action_mask"]
            seen = without_action_mask(seen)
        observation = self.obs_encoders[seat].encode(seen)
        space = self.spec.action_spaces[seat]
        if not self.spec.has_action_mask or not isinstance(space, Discrete):
            if "action_mask" in info:
                refuse_late_mask(str(self.env))
            return observation, None
        if mask is None:
            return observation, np.ones(space.n, bool)
        return observation, to_action_mask(mask, space, self.spec.seats[seat])

    def state(self) -> np.ndarray | None:
        if not self.spec.state_size:
            return None
        return np.asarray(to_array(self.env.state(), "the global state"), np.float32)

    def single_step(
        self,
        observations: list[np.ndarray | None],
        agent_mask: list[bool],
        action_mask: list[np.ndarray | None],
    ) -> SingleStep:
        return SingleStep(
            observations, agent_mask, action_mask=action_mask, state=self.state(), success=self.seat_success
        )

    def clear_ended(self) -> None:
        """Clears the agents that ended, and those that reported success, in the last game."""
        self.terminated_agents.clear()
        self.truncated_agents.clear()
        self.seat_success[:] = np.nan

    def record_success(self, infos: dict[Any, dict[str, Any]]) -> None:
        """Records the successes that agents report in these infos."""
        for agent, info in infos.items():
            if info and SUCCESS_KEY in info and agent in self.seat_numbers:
                self.seat_success[self.seat_numbers[agent]] = require_flag(
                    info[SUCCESS_KEY], f"{SUCCESS_KEY} of agent {agent}"
                )

    def record_ended(self, terminated: dict[Any, bool], truncated: dict[Any, bool]) -> None:
        """Records the agents that a step ended; agents that the env terminates and truncates at
        once count as terminated."""
        self.truncated_agents.update(
            agent for agent, flag in truncated.items() if flag and agent not in self.terminated_agents
        )
        self.terminated_agents.update(agent for agent, flag in terminated.items() if flag)
        self.truncated_agents -= self.terminated_agents

    def check_ended_stay_away(self, live: Collection[Any]) -> None:
        """Raises ValueError if one of the agents `live`, which act next, has ended before: PettingZoo forbids it, and
        algorithms use 0 as the future of an agent that has terminated."""
        if back := (self.terminated_agents | self.truncated_agents).intersection(live):
            raise ValueError(
                f"{self.env} lets agent {min(map(str, back))} act again after it ended, which PettingZoo forbids: "
                "terminate or truncate an agent only when it is gone for the rest of the episode; one that waits may "
                "have an action without effect"
            )

    def write_ends(self, step: SingleStep, over: bool, paid: Collection[Any] = ()) -> None:
        """Writes which agents have terminated and, if the game is `over`, whether it was terminated or truncated. As
        long as the game goes on, the agents `paid`, which may still get rewards, do not count as terminated."""
        if self.terminated_agents:
            going_on = () if over else paid
            gone = self.terminated_agents.difference(going_on)
            step.seat_terminated = [agent in gone for agent in self.agents]
        step.truncated = over and bool(self.truncated_agents)
        step.terminated = over and not self.truncated_agents

    def render(self) -> RenderFrame | None:
        return render_package_env(self.env)

    def close(self) -> None:
        self.env.close()


def _info(infos: Mapping[Any, Any], agent: Any) -> Mapping[str, Any]:
    """Returns the info of an agent, empty if the env gives it none (or None)."""
    return infos.get(agent) or {}


def _state_size(env: Any) -> int:
    """Returns the length of the global state of an env after its reset, since some envs have no
    `state_space`; 0 if it has no one-dimensional state."""
    if (space := getattr(env, "state_space", None)) is not None:
        return flat_box_size(space)
    try:
        state = env.state()
    except (AttributeError, NotImplementedError):
        return 0
    if np.ndim(state) != 1:
        return 0
    return len(state)


class ParallelGame(_PettingZooGame):
    """A parallel env. An agent that was terminated or truncated does not act again; if a step reports both, it was
    terminated. One that was terminated must get no further reward, one that was truncated may get some. The
    agents in `env.agents` with an observation act next; if a step shows none, all of them act on what they saw last.
    The game is over when the last agent has ended, and truncated if any agent was. Raises ValueError if an agent that
    has ended acts again or has terminated and is paid, and for agents that are not in `possible_agents`."""

    def __init__(self, env: Any, state: bool = False, reset_options: dict[str, Any] | None = None) -> None:
        self.reset_arguments = reset_arguments(reset_options)
        infos = read_result(env.reset(seed=0, **self.reset_arguments), 2, f"{env}.reset")[1]
        super().__init__(env, infos, state)

    def reset(self, seed: int) -> SingleStep:
        self.clear_ended()
        seen, infos = read_result(self.env.reset(seed=seed, **self.reset_arguments), 2, "reset")
        check_by_agent(self.env, observations=seen)
        self.check_agents(seen, "observes agent")
        live = {agent for agent in self.env.agents if agent in seen}
        if not live:
            raise ValueError(f"{self.env} shows none of its `agents` an observation after its reset: one must act")
        return self._build_step(seen, infos, live)

    def step(self, actions: np.ndarray) -> SingleStep:
        live = self.live_agents
        choices = zip(self.agents, self.action_decoders, actions, strict=True)
        written = {agent: choice.decode(action) for agent, choice, action in choices if agent in live}
        seen, rewards, terminated, truncated, infos = read_result(self.env.step(written), 5, "step")
        check_by_agent(self.env, observations=seen, rewards=rewards, terminations=terminated, truncations=truncated)
        self.check_agents(rewards, "pays agent")
        self.check_agents(seen, "observes agent")
        self.check_agents(self.env.agents, "plays with agent")
        terminated = self.flags(terminated, "terminates")
        truncated = self.flags(truncated, "truncates")
        self.check_unpaid({agent: rewards[agent] for agent in self.terminated_agents if agent in rewards})
        self._check_given(live, rewards, {agent for agent, flag in (*terminated.items(), *truncated.items()) if flag})
        left = {agent for agent in self.env.agents if not (terminated.get(agent, False) or truncated.get(agent, False))}
        live = left.intersection(seen) or left - self.terminated_agents - self.truncated_agents
        self.check_ended_stay_away(live)
        self.record_ended(terminated, truncated)
        step = self._build_step(seen, infos, live)
        step.rewards = [to_reward(rewards.get(agent, 0.0), str(agent)) for agent in self.agents]
        self.write_ends(step, over=not live)
        return step

    def _check_given(self, acted: Collection[Any], rewards: Collection[Any], ended: Collection[Any]) -> None:
        """Raises ValueError if an agent that acted gets no reward and others do, or it is gone and has not ended."""
        for agent in acted:
            if rewards and agent not in rewards:
                raise ValueError(f"{self.env} gives agent {agent}, which acted, no reward: give it one, which may be 0")
            if agent not in ended and agent not in self.env.agents:
                raise ValueError(
                    f"{self.env} drops agent {agent} from its agents without a flag: set its termination or its "
                    "truncation to True in that step"
                )

    def _build_step(self, seen: dict[Any, Any], infos: dict[Any, dict[str, Any]], live: set[Any]) -> SingleStep:
        """Builds the result of a step; `live_agents` are the agents that act next. Optimised: it
        runs after every step of envs that may themselves be as fast."""
        self.live_agents = live
        self.record_success(infos)
        observations: list[np.ndarray | None] = [None] * len(self.agents)
        action_mask: list[np.ndarray | None] = [None] * len(self.agents)
        for seat, agent in enumerate(self.agents):
            if agent not in seen or (seen[agent] is None and agent in self.terminated_agents):
                continue
            if self.has_plain_obs and seen[agent] is not None:
                if "action_mask" in _info(infos, agent):
                    refuse_late_mask(str(self.env))
                observations[seat] = self.obs_encoders[seat].encode(seen[agent])
            else:
                observations[seat], action_mask[seat] = self.encode_seat(seat, seen[agent], _info(infos, agent))
        return self.single_step(observations, [agent in live for agent in self.agents], action_mask)


class AECGame(_PettingZooGame):
    """A turn-based (AEC) env. Only the agent that acts gets a new observation, and all agents at the beginning and the
    end of the game. Rewards are those of the step in which they occur, for all agents. An agent that was terminated
    gets rewards until its turn, when the env removes it, as PettingZoo's `last` reports them; its seat terminates then.
    Raises ValueError if an agent that has ended acts again."""

    def __init__(self, env: Any, state: bool = False, reset_options: dict[str, Any] | None = None) -> None:
        self.reset_arguments = reset_arguments(reset_options)
        env.reset(seed=0, **self.reset_arguments)
        super().__init__(env, env.infos, state)
        self.booked: set[str] = set()  # how much of its rewards the env adds to what `last` reports
        self.unchecked_payments = CHECKED_PAYMENTS

    def reset(self, seed: int) -> SingleStep:
        self.clear_ended()
        self.env.reset(seed=seed, **self.reset_arguments)
        self.present = set(self.env.agents)  # others join later
        self.booked_before = self.booked_rewards()
        return self._build_step(list(self.env.agents), self.env.agent_selection)

    def step(self, actions: np.ndarray) -> SingleStep:
        """Optimised: each attribute is read once, since it passes through all wrappers of the env."""
        env = self.env
        mover = self.mover
        seat = self.seat_numbers[mover]
        env.step(self.action_decoders[seat].decode(actions[seat]))
        agents = env.agents
        given = env.rewards
        terminated = env.terminations
        truncated = env.truncations
        self.present.update(agents, (mover,))
        self.check_agents(self.present, "plays with agent")
        self.check_agents(given, "pays agent")
        paid = {agent: to_reward(given.get(agent, 0.0), str(agent)) for agent in self.present}
        if not paid.keys() >= given.keys():
            self.check_unpaid({agent: given[agent] for agent in given if agent not in paid})
        if self.unchecked_payments > 0:
            self.check_booked(paid, self.booked_before | {mover: 0.0})  # the env clears those of the agent that acts
        terminated = self.flags(terminated, "terminates")
        truncated = self.flags(truncated, "truncates")
        self.record_ended(terminated, truncated)
        self.record_success(env.infos)
        over = all(terminated[agent] or truncated[agent] for agent in agents)
        if not over and (self.terminated_agents or self.truncated_agents):
            remove_ended(env)
            self.check_ended_stay_away([env.agent_selection])
            self.booked_before = self.booked_rewards()
            agents = env.agents
        self.present = set(agents)
        selected = env.agent_selection
        step = self._build_step(list(agents) if over else [selected], selected)
        step.rewards = [paid.get(agent, 0.0) for agent in self.agents]
        self.write_ends(step, over, agents)
        return step

    def booked_rewards(self) -> dict[Any, float]:
        """Returns a copy of the rewards that `last` reports, by agent."""
        return dict(getattr(self.env, "_cumulative_rewards", ()))

    def check_booked(self, paid: dict[Any, float], before: dict[Any, float]) -> None:
        """Raises ValueError if what a step `paid` is not what it added to the rewards that `last` reports, which were
        `before`, as PettingZoo's own test does. An env that never adds anything there means its `rewards`."""
        after = self.booked_before = self.booked_rewards()
        if after == before and not any(paid.values()):
            return
        for agent, reward in paid.items():
            added = after.get(agent, 0.0) - before.get(agent, 0.0)
            if reward or added:
                self.unchecked_payments -= 1
                if abs(added - reward) <= 1e-6 * (1 + abs(reward)):
                    self.booked.add("all")
                else:
                    self.booked.add("other" if added else "none")
            if len(self.booked) > 1 or "other" in self.booked:
                raise ValueError(
                    f"{self.env} pays agent {agent} {reward:g} in `rewards` and adds {added:g} to what `last` reports: "
                    "set `rewards` in every step and call _accumulate_rewards() once, as pettingzoo.test.api_test wants"
                )

    def _build_step(self, observed: list[Any], selected: Any) -> SingleStep:
        self.mover = selected
        infos = self.env.infos
        observations: list[np.ndarray | None] = [None] * len(self.agents)
        action_mask: list[np.ndarray | None] = [None] * len(self.agents)
        for agent in observed:
            seat = self.seat_numbers[agent]
            info = _info(infos, agent)
            observations[seat], action_mask[seat] = self.encode_seat(seat, self.env.observe(agent), info)
        return self.single_step(observations, [agent == selected for agent in self.agents], action_mask)


def load_game(
    path: str,
    options: dict[str, Any] | None = None,
    state: bool = False,
    wrappers: Wrappers = None,
    reset_options: dict[str, Any] | None = None,
) -> ParallelGame | AECGame:
    """Returns the game that the factory "module:function" makes with `options`, within `wrappers`;
    `state` adds its global state. Raises ValueError if `path` names no factory, the factory or a
    wrapper fails, or it makes no PettingZoo env."""
    module, _, factory = path.partition(":")
    if not module or not factory:
        raise ValueError(
            f'"{path}" names no factory: env is "module:function", such as "{module or path}:parallel_env" or '
            f'"{module or path}:env"'
        )
    try:
        env = import_object(path)(**(options or {}))
    except Exception as error:  # a factory may fail in any way
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f'"{path}" cannot be made with {options or "no options"}: {why}') from error
    return game_of(wrap(env, wrappers, "supersuit"), path, state, reset_options)


def game_of(
    env: Any, label: str, state: bool = False, reset_options: dict[str, Any] | None = None
) -> ParallelGame | AECGame:
    """Returns the game of a PettingZoo env. Raises ValueError if `env`, which `label` made, is none."""
    if type(env) is aec_to_parallel_wrapper:
        env = LeanParallelWrapper(env)
    if isinstance(env, pettingzoo.ParallelEnv):
        return ParallelGame(env, state, reset_options)
    if isinstance(env, pettingzoo.AECEnv):
        return AECGame(strip_check_wrappers(env), state, reset_options)
    raise ValueError(f'"{label}" makes {type(env).__name__}, neither a ParallelEnv nor an AECEnv of PettingZoo')


def games_of(make: Callable[[], Any], num_envs: int, label: str) -> PackageVectorEnv:
    """Returns `num_envs` copies of the PettingZoo env that `make` makes, as a vector env."""
    return PackageVectorEnv(lambda: game_of(make(), label), num_envs, 0, label)


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
                raise ValueError(f"{env} continues with {env.agent_selection}, not {agent}: play its turn-based form")
            env.step(actions[agent])
            for rewarded in env.agents:
                rewards[rewarded] += env.rewards[rewarded]
        ends = {**env.terminations}, {**env.truncations}, {**env.infos}
        seen = {agent: env.observe(agent) for agent in env.agents}
        if env.agents:
            remove_ended(env)
        self.agents = env.agents
        return seen, rewards, *ends


def remove_ended(env: Any) -> None:
    """Steps a turn-based env until an agent is selected that has not ended, or none is left. Raises
    ValueError if the env does not remove those that have."""
    for _ in range(MAX_REMOVALS):
        agent = env.agent_selection
        if not (env.terminations[agent] or env.truncations[agent]):
            return
        env.step(None)
        if not env.agents:
            return
    raise ValueError(
        f"{env} selects agent {env.agent_selection} again and again, which has ended: step(None) must remove it from "
        "`agents` and select another (_was_dead_step does)"
    )


def strip_check_wrappers(env: Any) -> Any:
    """Returns the turn-based `env` without its outer wrappers that only check: every attribute
    access passes through them, which takes a third of the time of a step of a small env."""
    while type(env) in CHECK_WRAPPERS:
        env = env.env
    return env


class PettingZooEnv(PackageVectorEnv):
    """The PettingZoo env that the factory `env` ("module:function") makes with `options`, parallel or turn-based. The
    factory "pettingzoo:make" with the options `env_type` and `id` makes an env of PettingZoo's registry. With `state`,
    central critics get the env's global state, computed in every step; else they get all observations. `wrappers` are
    SuperSuit's by name or "module:Class", from the inside outwards, with their options. Every reset gets
    `reset_options`.

    Games repeat exactly only if the env's own `reset(seed)` resets everything; in knights_archers_zombies and Atari's
    maze_craze it does not.
    """

    name: ClassVar[str] = "pettingzoo"

    def __init__(
        self,
        num_envs: int = 16,
        *,
        env: str = "mpe2.simple_spread_v3:parallel_env",
        options: dict[str, Any] | None = None,
        reset_options: dict[str, Any] | None = None,
        state: bool = False,
        wrappers: list[dict[str, Any]] | None = None,
        num_processes: int = 0,
    ) -> None:
        make = partial(load_game, env, options, state, wrappers, reset_options)
        super().__init__(make, num_envs, num_processes, env)
