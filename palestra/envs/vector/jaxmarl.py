"""JaxMARL environments: all games in one compiled step on JAX's device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import jaxmarl
import numpy as np
from jaxmarl.environments import spaces
from jaxmarl.environments.overcooked import overcooked_layouts
from jaxmarl.environments.smax import map_name_to_scenario

from palestra.envs.vector.base import Arrays, Continuous, Discrete, Frame, MultiDiscrete, Space, VectorEnv
from palestra.envs.vector.loop import GameSpec, at_least_one, game_seed, within

CLOCKED = ("MPE_", "overcooked", "coin_game", "storm")  # envs that end only by their time limit


class Rules:
    """One env as pure functions, vectorised and compiled: `reset(keys)` and `step(carried, actions)`.

    The carry of a game is its key, its state and its step count; its output is a dictionary of frame arrays.
    """

    def __init__(self, id: str, env: Any) -> None:
        self.id, self.env, self.seats = id, env, tuple(env.agents)
        self.units = hasattr(env, "num_allies")
        self.enemies = self.units and id != "SMAX"  # the env plays one side
        self.deaths = len(self.seats) > 1 and not self.units  # dead units share the reward of the living
        self.actions = tuple(_space_of(env.action_space(seat)) for seat in self.seats)
        self.masks = _masks(env) if isinstance(self.actions[0], Discrete) else None
        carried, shown = jax.eval_shape(self.begin, jax.random.PRNGKey(0))
        self.tree = jax.tree.structure(carried)
        self.spec = GameSpec(
            self.seats,
            tuple((size,) for size in self.sizes),
            self.actions,
            shown["state"].shape[0] if "state" in shown else 0,
            masks="legal" in shown,
            success=self.enemies,
            deaths=self.deaths,
        )
        self.reset, self.step = jax.jit(jax.vmap(self.begin)), jax.jit(jax.vmap(self.play))

    def begin(self, key: Any) -> tuple[Any, dict[str, Any]]:
        """Starts an episode from a key; returns its carry and its output."""
        key, here = jax.random.split(key)
        obs, state = self.env.reset(here)
        return (key, state, jnp.int32(0)), self.shown(obs, state, {})

    def play(self, carried: Any, actions: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """Plays one joint step; returns the carry and output (of the next episode if this one ended), and the results
        of the step: rewards, ends and final observations."""
        key, state, steps = carried
        key, here = jax.random.split(key)
        given = {seat: self._given(n, actions[n]) for n, seat in enumerate(self.seats)}
        obs, state, rewards, done, _ = self.env.step_env(here, state, given)
        over, last = jnp.asarray(done["__all__"], bool), self.shown(obs, state, done)
        cut = over & self._by_clock(state, steps + 1)
        came = {"truncated": cut, "terminated": over & ~cut, "final_obs": last["obs"]}
        if self.deaths:
            came["seat_terminated"] = self._dead(done, over, cut)
        came["rewards"] = jnp.stack([jnp.asarray(rewards[seat], jnp.float32).reshape(()) for seat in self.seats])
        if "state" in last:
            came["final_state"] = last["state"]
        if self.enemies:
            ours, theirs = self._alive(state)
            came["success"] = over & ours & ~theirs
        going = (key, state, steps + 1), last
        carried, shown = jax.tree.map(lambda new, old: jnp.where(over, new, old), self.begin(key), going)
        return carried, shown, came

    def shown(self, obs: Any, state: Any, done: Any) -> dict[str, Any]:
        """Returns observations, agent mask, action mask and global state as frame arrays."""
        rows = [jnp.asarray(obs[seat], jnp.float32).reshape(-1) for seat in self.seats]
        self.sizes = [len(row) for row in rows]
        live = [~jnp.asarray(done.get(seat, False), bool).reshape(()) for seat in self.seats]
        shown = {"obs": _padded(rows), "acting": jnp.stack(live)}
        if self.masks is not None:
            masks = self.masks(state)
            shown["legal"] = _padded([masks[seat] for seat in self.seats]).astype(bool)
        if self.id == "hanabi":
            shown["acting"] = ~shown["legal"][:, -1]  # the other players can only take the last action, no-op
        if "world_state" in obs:
            shown["state"] = jnp.asarray(obs["world_state"], jnp.float32)
        return shown

    def _given(self, n: int, action: Any) -> Any:
        space = self.actions[n]
        if isinstance(space, Discrete):
            return action
        return action[: len(space.low if isinstance(space, Continuous) else space.sizes)]

    def _dead(self, done: Any, over: Any, cut: Any) -> Any:
        """Returns the seats that have terminated: those done before the game is over, unless it was truncated."""
        gone = jnp.stack([jnp.asarray(done.get(seat, False), bool).reshape(()) for seat in self.seats])
        return jnp.where(over, ~cut, gone)

    def _alive(self, state: Any) -> tuple[Any, Any]:
        """Returns whether any ally and any enemy of SMAX is alive."""
        alive = (state.state if self.enemies else state).unit_alive
        return alive[: self.env.num_allies].any(), alive[self.env.num_allies :].any()

    def _by_clock(self, state: Any, steps: Any) -> Any:
        """True if a game that is over was truncated by its time limit."""
        if self.units:
            ours, theirs = self._alive(state)
            return ours & theirs
        return self.id.startswith(CLOCKED) or steps >= getattr(self.env, "max_steps", np.inf)


class JaxMarlEnv(VectorEnv):
    """The JaxMARL env `id`, made with `options`. `map` is the name of an SMAX scenario or an Overcooked layout. `scale`
    multiplies the rewards: a won game of SMAX returns 2, one of SMAC 20.

    JaxMARL reports only that a game is done: games that end by their time limit count as truncated, all others as
    terminated. With `clock: ends` both are terminated, as in JaxMARL's own learners: the value after the limit is then
    0. Against SMAX's heuristic enemy, `success` means that all enemies fell and an ally survived; dead units do not
    act. The state is SMAX's world state. In Hanabi exactly the player to move acts. `save` is exact.

    Raises ValueError if JaxMARL cannot make the env.
    """

    name: ClassVar[str] = "jaxmarl"

    def __init__(
        self,
        games: int = 64,
        *,
        id: str = "MPE_simple_spread_v3",
        map: str | None = None,
        options: dict[str, Any] | None = None,
        scale: float = 1.0,
        clock: Literal["cuts", "ends"] = "cuts",
    ) -> None:
        at_least_one("games", games)
        self.games, self.rules, self.scale, self.clock = games, rules_of(id, map, options or {}), scale, clock
        spec = self.rules.spec
        self.seats, self.views, self.actions, self.state_size = spec.seats, spec.views, spec.actions, spec.state_size
        self.frame = spec.frame(games)

    def reset(self, seeds: np.ndarray) -> Frame:
        keys = jnp.stack([jax.random.PRNGKey(game_seed(int(seed), 0)) for seed in seeds])
        self._carried, shown = self.rules.reset(keys)
        ends = ["rewards", "terminated", "truncated", *(["success"] if self.rules.enemies else [])]
        ends += [] if self.frame.seat_terminated is None else ["seat_terminated"]
        return self._written(shown | dict.fromkeys(ends, 0))

    def step(self, actions: np.ndarray) -> Frame:
        given = within(self.actions, actions, self.frame.legal)
        self._carried, shown, came = self.rules.step(self._carried, given)
        frame = self._written(came | shown)
        frame.rewards *= self.scale
        if self.clock == "ends":
            frame.terminated |= frame.truncated
            frame.truncated[:] = False
            if frame.seat_terminated is not None:
                frame.seat_terminated |= frame.terminated[:, None]
        return frame

    def save(self) -> Arrays:
        leaves = {f"leaf.{n}": np.array(leaf) for n, leaf in enumerate(jax.tree.leaves(self._carried))}
        frame = {f"frame.{name}": array for name, array in vars(self.frame.copy()).items() if array is not None}
        return leaves | frame

    def load(self, saved: Mapping[str, np.ndarray]) -> Frame:
        leaves = [jnp.asarray(saved[f"leaf.{n}"]) for n in range(self.rules.tree.num_leaves)]
        self._carried = jax.tree.unflatten(self.rules.tree, leaves)
        kept = [name for name, array in vars(self.frame).items() if array is not None]
        return self._written({name: saved[f"frame.{name}"] for name in kept})

    def _written(self, parts: Mapping[str, Any]) -> Frame:
        for name, value in parts.items():
            getattr(self.frame, name)[:] = value
        return self.frame


_RULES: dict[str, Rules] = {}  # by id, map and options: compilation takes longer than play


def rules_of(id: str, map: str | None, options: dict[str, Any]) -> Rules:
    """Returns the compiled functions of an env, cached. Raises ValueError if JaxMARL cannot make the env."""
    key = repr((id, map, sorted(options.items())))
    if key not in _RULES:
        try:
            env = jaxmarl.make(id, **(options if map is None else options | _mapped(id, map)))
        except (ValueError, TypeError, ImportError) as error:
            raise ValueError(f'JaxMARL cannot make "{id}" with {options or "no options"}: {error}') from error
        _RULES[key] = Rules(id, env)
    return _RULES[key]


def _mapped(id: str, map: str) -> dict[str, Any]:
    """Returns the env option that `map` stands for."""
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


def _padded(rows: list[Any]) -> Any:
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
