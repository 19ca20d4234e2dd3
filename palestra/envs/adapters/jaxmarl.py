"""JaxMARL environments: all games in one compiled step on JAX's device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import jaxmarl
import numpy as np
from jaxmarl.environments import spaces
from jaxmarl.environments.overcooked import overcooked_layouts
from jaxmarl.environments.smax import map_name_to_scenario

from palestra.envs.batch.sync_vector import VectorEnvSpec, clip_actions, episode_seed
from palestra.envs.support.options import check_at_least
from palestra.envs.vector_base import Arrays, Continuous, Discrete, MultiDiscrete, Space, VectorEnv, VectorStep

TIME_LIMITED_PREFIXES = ("MPE_", "overcooked", "coin_game", "storm")  # envs that end only by their time limit


class CompiledEnv:
    """One env as pure functions, vectorised and compiled: `reset(keys)` and `step(carry, actions)`.

    The carry of a game is its key, its state, its step count and the seats that have terminated (bool [N]); its output
    is a dictionary of frame arrays.
    """

    def __init__(self, id: str, env: Any) -> None:
        # some envs number their agents
        self.id = id
        self.env = env
        self.agents = tuple(env.agents)
        self.seats = tuple(str(agent) for agent in self.agents)
        self.is_smax = hasattr(env, "num_allies")
        self.has_scripted_enemies = self.is_smax and id != "SMAX"  # the env plays one side
        self.has_seat_terminated = len(self.seats) > 1 and not self.is_smax  # dead units share the reward of the living
        self.action_spaces = tuple(_space_of(env.action_space(agent)) for agent in self.agents)
        if len({type(space) for space in self.action_spaces}) > 1:
            raise ValueError(
                f'JaxMARL\'s "{id}" has agents with different kinds of actions, and is played with one kind: choose '
                "options that give all agents the same, or play it as an env of PettingZoo"
            )
        self.action_mask_fn = _masks(env) if isinstance(self.action_spaces[0], Discrete) else None
        carried, shown = jax.eval_shape(self.reset_one, jax.random.PRNGKey(0))
        self.carry_structure = jax.tree.structure(carried)
        self.spec = VectorEnvSpec(
            self.seats,
            tuple((size,) for size in self.observation_sizes),
            self.action_spaces,
            shown["state"].shape[0] if "state" in shown else 0,
            has_action_mask="action_mask" in shown,
            reports_success=self.has_scripted_enemies,
            has_seat_terminated=self.has_seat_terminated,
        )
        self.reset, self.step = jax.jit(jax.vmap(self.reset_one)), jax.jit(jax.vmap(self.step_one))

    def reset_one(self, key: Any) -> tuple[Any, dict[str, Any]]:
        """Starts an episode from a key; returns its carry and its output."""
        key, here = jax.random.split(key)
        obs, state = self.env.reset(here)
        return (key, state, jnp.int32(0), jnp.zeros(len(self.seats), bool)), self.observe(obs, state, {})

    def step_one(self, carry: Any, actions: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """Plays one joint step; returns the carry and output (of the next episode if this one
        ended), and the results of the step: rewards, ends and final observations."""
        key, state, steps, gone = carry
        key, here = jax.random.split(key)
        seat_actions = {agent: self._seat_action(n, actions[n]) for n, agent in enumerate(self.agents)}
        obs, state, rewards, done, _ = self.env.step_env(here, state, seat_actions)
        over = jnp.asarray(done["__all__"], bool)
        last = self.observe(obs, state, done)
        cut = over & self._hit_time_limit(state, steps + 1)
        came = {"truncated": cut, "terminated": over & ~cut, "final_obs": last["obs"]}
        gone = self._terminated_seats(gone, done, over, cut)
        if self.has_seat_terminated:
            came["seat_terminated"] = gone
        came["rewards"] = jnp.stack([jnp.asarray(rewards[agent], jnp.float32).reshape(()) for agent in self.agents])
        if "state" in last:
            came["final_state"] = last["state"]
        if self.has_scripted_enemies:
            ours, theirs = self._alive(state)
            came["success"] = over & ours & ~theirs
        going = (key, state, steps + 1, gone), last
        carry, shown = jax.tree.map(lambda new, old: jnp.where(over, new, old), self.reset_one(key), going)
        return carry, shown, came

    def observe(self, obs: Any, state: Any, done: Any) -> dict[str, Any]:
        """Returns observations, agent mask, action mask and global state as frame arrays. The parts of an observation
        that is a dictionary are concatenated in the order of their names. Raises ValueError if an agent has none."""
        if isinstance(obs, Mapping) and (missing := [agent for agent in self.agents if agent not in obs]):
            raise ValueError(
                f'JaxMARL\'s "{self.id}" returns {", ".join(map(str, obs))} and no observation of agent {missing[0]}: '
                "seats need one each; choose an env that has them, such as storm_2p or storm_np in place of storm"
            )
        rows = [_row(obs[agent]) for agent in self.agents]
        self.observation_sizes = [len(row) for row in rows]
        live = [~_is_done(done, agent) for agent in self.agents]
        shown = {"obs": _pad_rows(rows), "agent_mask": jnp.stack(live)}
        if self.action_mask_fn is not None:
            masks = self.action_mask_fn(state)
            shown["action_mask"] = _pad_rows([masks[agent] for agent in self.agents]).astype(bool)
        if self.id == "hanabi":
            shown["agent_mask"] = ~shown["action_mask"][:, -1]  # the other players can only take the last action, no-op
        if isinstance(obs, dict) and "world_state" in obs:
            shown["state"] = jnp.asarray(obs["world_state"], jnp.float32)
        return shown

    def _seat_action(self, n: int, action: Any) -> Any:
        space = self.action_spaces[n]
        if isinstance(space, Discrete):
            return action
        return action[: space.width]

    def _terminated_seats(self, gone: Any, done: Any, over: Any, cut: Any) -> Any:
        """Returns the seats that have terminated: those that had before (`gone`), those that are done before the game
        is over, and all when it is over without being truncated. JaxMARL calls every seat done at the time limit."""
        ended = jnp.stack([_is_done(done, agent) for agent in self.agents])
        return gone | jnp.where(over, ~cut, ended)

    def _alive(self, state: Any) -> tuple[Any, Any]:
        """Returns whether any ally and any enemy of SMAX is alive."""
        if self.has_scripted_enemies:
            state = state.state
        alive = state.unit_alive
        return alive[: self.env.num_allies].any(), alive[self.env.num_allies :].any()

    def _hit_time_limit(self, state: Any, steps: Any) -> Any:
        """True if a game that is over was truncated by its time limit."""
        if self.is_smax:
            ours, theirs = self._alive(state)
            return ours & theirs
        limit = getattr(self.env, "max_steps", getattr(self.env, "episode_length", np.inf))
        return self.id.startswith(TIME_LIMITED_PREFIXES) or steps >= limit


class JaxMarlEnv(VectorEnv):
    """The JaxMARL env `id`, made with `options`. `map` is the name of an SMAX scenario or an Overcooked layout.
    `scale` multiplies the rewards: a won game of SMAX returns 2, one of SMAC 20.

    JaxMARL reports only that a game is done: games that end by their time limit count as truncated, all others as
    terminated (`time_limit: ends` of the algorithm trains as JaxMARL's own learners do). Against SMAX's heuristic
    enemy, `success` means that all enemies fell and an ally survived; dead units do not act. The state is SMAX's world
    state. In Hanabi exactly the player to move acts. `save` is exact.

    Raises ValueError if JaxMARL cannot make the env, or if it has no observation for each agent.
    """

    name: ClassVar[str] = "jaxmarl"

    def __init__(
        self,
        num_envs: int = 64,
        *,
        id: str = "MPE_simple_spread_v3",
        map: str | None = None,
        options: dict[str, Any] | None = None,
        scale: float = 1.0,
    ) -> None:
        check_at_least("num_envs", num_envs, 1, "nothing is played in fewer")
        self.num_envs = num_envs
        self.compiled = compiled_env(id, map, options or {})
        self.reward_scale = scale
        self.adopt_spaces(self.compiled.spec)
        self.vector_step = self.compiled.spec.empty_step(num_envs)

    def reset(self, seeds: np.ndarray) -> VectorStep:
        keys = jnp.stack([jax.random.PRNGKey(episode_seed(int(seed), 0)) for seed in seeds])
        self._carried, shown = self.compiled.reset(keys)
        self.vector_step.clear_results()
        return self._write_step(shown)

    def step(self, actions: np.ndarray) -> VectorStep:
        clipped = clip_actions(self.action_spaces, actions, self.vector_step.action_mask)
        self._carried, shown, came = self.compiled.step(self._carried, clipped)
        frame = self._write_step(came | shown)
        frame.rewards *= self.reward_scale
        return frame

    def save(self) -> Arrays:
        leaves = {f"leaf.{n}": np.array(leaf) for n, leaf in enumerate(jax.tree.leaves(self._carried))}
        return leaves | {f"frame.{name}": array for name, array in self.vector_step.copy().arrays().items()}

    def load(self, saved: Mapping[str, np.ndarray]) -> VectorStep:
        leaves = [jnp.asarray(saved[f"leaf.{n}"]) for n in range(self.compiled.carry_structure.num_leaves)]
        self._carried = jax.tree.unflatten(self.compiled.carry_structure, leaves)
        return self._write_step({name: saved[f"frame.{name}"] for name in self.vector_step.arrays()})

    def _write_step(self, values: Mapping[str, Any]) -> VectorStep:
        for name, value in values.items():
            getattr(self.vector_step, name)[:] = value
        return self.vector_step


_COMPILED_ENVS: dict[str, CompiledEnv] = {}  # by id, map and options: compilation takes longer than play


def compiled_env(id: str, map: str | None, options: dict[str, Any]) -> CompiledEnv:
    """Returns the compiled functions of an env, cached. Raises ValueError if JaxMARL cannot make the env."""
    key = repr((id, map, sorted(options.items())))
    if key not in _COMPILED_ENVS:
        try:
            env = jaxmarl.make(id, **(options | _options_of_map(id, map)))
        except (ValueError, TypeError, ImportError) as error:
            raise ValueError(f'JaxMARL cannot make "{id}" with {options or "no options"}: {error}') from error
        _COMPILED_ENVS[key] = CompiledEnv(id, env)
    return _COMPILED_ENVS[key]


def _options_of_map(id: str, map: str | None) -> dict[str, Any]:
    """Returns the env option that `map` stands for; none if it is None."""
    if map is None:
        return {}
    try:
        if "SMAX" in id:
            return {"scenario": map_name_to_scenario(map)}
        if id == "overcooked":
            return {"layout": overcooked_layouts[map]}
    except KeyError:
        raise ValueError(f'no map "{map}"') from None
    if id == "overcooked_v2":
        return {"layout": map}
    raise ValueError("it takes no map: only SMAX and Overcooked do")


def _masks(env: Any) -> Any:
    """Returns the env's function from a state to action masks; None if it has none."""
    masks = getattr(env, "get_legal_moves", env.get_avail_actions)
    try:
        jax.eval_shape(masks, jax.eval_shape(env.reset, jax.random.PRNGKey(0))[1])
    except NotImplementedError:
        return None
    return masks


def _is_done(done: Mapping[Any, Any], agent: Any) -> Any:
    """Returns the flag of an agent as an array [], False if the env gives none."""
    return jnp.asarray(done.get(agent, False), bool).reshape(())


def _row(observation: Any) -> Any:
    """Returns an observation as one row float32."""
    return jnp.concatenate([jnp.asarray(leaf, jnp.float32).reshape(-1) for leaf in jax.tree.leaves(observation)])


def _pad_rows(rows: list[Any]) -> Any:
    """Stacks rows of different lengths into one array, padded with zeros."""
    most = max(len(row) for row in rows)
    return jnp.stack([jnp.pad(row, (0, most - len(row))) for row in rows])


def _space_of(space: Any) -> Space:
    if isinstance(space, spaces.Discrete):
        return Discrete(int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        return MultiDiscrete(tuple(int(n) for n in space.num_categories))
    low, high = (
        np.broadcast_to(np.asarray(bound, float), space.shape).reshape(-1) for bound in (space.low, space.high)
    )
    return Continuous(tuple(low.tolist()), tuple(high.tolist()))
