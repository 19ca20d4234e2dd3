"""JaxMARL: its simple_spread or Overcooked, and IPPO as in its scripts: rollout and update are one compiled function.

The scripts are not part of its package, so this file has its own training: parameters shared by all seats, two networks
under one Adam with a clipped gradient, GAE, policy and value losses clipped on both sides. Compiling is not counted.
XLA uses all cores.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxmarl
import optax
from jaxmarl.wrappers.baselines import LogWrapper, MPELogWrapper
from peers.timing import Spec, measure, print_result, read_spec

GAMMA, LAM, CLIP, ENTROPY, VALUE = 0.99, 0.95, 0.2, 0.01, 0.5
CALL = 4  # batches in one call of the compiled function
Params = list[tuple[jax.Array, jax.Array]]


class Move(NamedTuple):
    """One step of all C columns (seats times games); arrays are [C, ...]."""

    obs: jax.Array
    action: jax.Array
    logp: jax.Array
    value: jax.Array
    reward: jax.Array
    done: jax.Array


def mlp_params(key: jax.Array, sizes: tuple[int, ...], gain: float) -> Params:
    """Orthogonal weights, the last layer's scaled by `gain`."""
    gains = [2**0.5] * (len(sizes) - 2) + [gain]
    keys = jax.random.split(key, len(gains))
    shapes = pairwise(sizes)
    return [
        (jax.nn.initializers.orthogonal(g)(k, shape), jnp.zeros(shape[1]))
        for g, k, shape in zip(gains, keys, shapes, strict=True)
    ]


def mlp(params: Params, x: jax.Array) -> jax.Array:
    for weight, bias in params[:-1]:
        x = jnp.tanh(x @ weight + bias)
    weight, bias = params[-1]
    return x @ weight + bias


def logp_of(logits: jax.Array, action: jax.Array) -> jax.Array:
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0]


def make_env(name: str) -> LogWrapper:
    if name != "overcooked":
        return MPELogWrapper(jaxmarl.make("MPE_simple_spread_v3"))
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # about a second version of the env
        return LogWrapper(jaxmarl.make("overcooked"))


class Ippo:
    """JaxMARL's IPPO in one compiled function, with the sizes of a spec."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.env = make_env(spec.env)
        first = self.env.agents[0]
        self.views, self.actions = math.prod(self.env.observation_space(first).shape), self.env.action_space(first).n
        self.adam = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-4, eps=1e-5))

    def begin(self, key: jax.Array) -> tuple[Any, ...]:
        """The initial state: parameters, the optimizer's state, games, first observations, a random key."""
        policy, critic, games, key = jax.random.split(key, 4)
        hidden = self.spec.hidden
        params = {
            "policy": mlp_params(policy, (self.views, *hidden, self.actions), 0.01),
            "critic": mlp_params(critic, (self.views, *hidden, 1), 1.0),
        }
        seen, games = jax.vmap(self.env.reset)(jax.random.split(games, self.spec.games))
        return params, self.adam.init(params), games, seen, key

    def columns(self, by_seat: dict[str, jax.Array]) -> jax.Array:
        """Concatenates the arrays [G, ...] of the seats to [seats * G, ...]."""
        return jnp.concatenate([by_seat[agent] for agent in self.env.agents])

    def seen_rows(self, seen: dict[str, jax.Array]) -> jax.Array:
        """Flat observations [seats * G, V], float32."""
        rows = self.columns(seen)
        return rows.reshape(len(rows), -1).astype(jnp.float32)

    def step(self, games: Any, action: jax.Array, key: jax.Array) -> tuple[Any, ...]:
        """Makes one joint step in each game; `action` has one action for each column."""
        by_seat = dict(zip(self.env.agents, action.reshape(self.env.num_agents, -1), strict=True))
        return jax.vmap(self.env.step)(jax.random.split(key, self.spec.games), games, by_seat)

    def play(self, params: Any, state: tuple[Any, ...], _: None) -> tuple[tuple[Any, ...], Move]:
        games, seen, key = state
        key, choose, go = jax.random.split(key, 3)
        obs = self.seen_rows(seen)
        logits, value = mlp(params["policy"], obs), mlp(params["critic"], obs)[:, 0]
        action = jax.random.categorical(choose, logits)
        seen, games, reward, done, _ = self.step(games, action, go)
        move = Move(obs, action, logp_of(logits, action), value, self.columns(reward), self.columns(done))
        return (games, seen, key), move

    def play_at_random(self, state: tuple[Any, ...], _: None) -> tuple[tuple[Any, ...], jax.Array]:
        games, seen, key = state
        key, choose, go = jax.random.split(key, 3)
        action = jax.random.randint(choose, (self.env.num_agents * self.spec.games,), 0, self.actions)
        seen, games, reward, _, _ = self.step(games, action, go)
        return (games, seen, key), self.columns(reward).mean()

    def credit(self, moves: Move, last: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Advantages and the critic's targets, [T, C]."""

        def back(later: tuple[jax.Array, jax.Array], move: Move) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            advantage, value = later
            goes_on = 1.0 - move.done
            delta = move.reward + GAMMA * value * goes_on - move.value
            advantage = delta + GAMMA * LAM * goes_on * advantage
            return (advantage, move.value), advantage

        _, advantages = jax.lax.scan(back, (jnp.zeros_like(last), last), moves, reverse=True, unroll=8)
        return advantages, advantages + moves.value

    def loss(self, params: Any, moves: Move, advantage: jax.Array, target: jax.Array) -> jax.Array:
        logits, value = mlp(params["policy"], moves.obs), mlp(params["critic"], moves.obs)[:, 0]
        near = moves.value + (value - moves.value).clip(-CLIP, CLIP)
        value_loss = 0.5 * jnp.maximum((value - target) ** 2, (near - target) ** 2).mean()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        ratio = jnp.exp(logp_of(logits, moves.action) - moves.logp)
        gain = jnp.minimum(ratio * advantage, ratio.clip(1 - CLIP, 1 + CLIP) * advantage).mean()
        logp = jax.nn.log_softmax(logits)
        entropy = -(jnp.exp(logp) * logp).sum(1).mean()
        return VALUE * value_loss - gain - ENTROPY * entropy

    def epoch(self, rows: tuple[Move, jax.Array, jax.Array], state: Any, key: jax.Array) -> tuple[Any, None]:
        """Makes one pass over all rows in a random order, in minibatches."""
        count = len(rows[1])
        order = jax.random.permutation(key, count)
        split = (self.spec.minibatches, count // self.spec.minibatches)
        parts = jax.tree.map(lambda x: x[order].reshape(*split, *x.shape[1:]), rows)

        def learn(state: tuple[Any, Any], part: tuple[Move, jax.Array, jax.Array]) -> tuple[Any, None]:
            params, adam = state
            updates, adam = self.adam.update(jax.grad(self.loss)(params, *part), adam, params)
            return (optax.apply_updates(params, updates), adam), None

        return jax.lax.scan(learn, state, parts)

    def update(self, state: tuple[Any, ...], _: None) -> tuple[tuple[Any, ...], jax.Array]:
        """Collects one batch and learns from it; returns the new state and the batch's mean reward."""
        params, adam, games, seen, key = state
        (games, seen, key), moves = jax.lax.scan(
            partial(self.play, params), (games, seen, key), None, self.spec.horizon
        )
        advantages, targets = self.credit(moves, mlp(params["critic"], self.seen_rows(seen))[:, 0])
        rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (moves, advantages, targets))
        key, order = jax.random.split(key)
        (params, adam), _ = jax.lax.scan(
            partial(self.epoch, rows), (params, adam), jax.random.split(order, self.spec.epochs)
        )
        return (params, adam, games, seen, key), moves.reward.mean()

    def call(self) -> Callable[[tuple[Any, ...]], tuple[tuple[Any, ...], jax.Array]]:
        """The function to compile: it maps a state to the state `CALL` batches later and a number that depends on all
        of them, so that none is optimised away."""
        steps = CALL * self.spec.horizon

        def train(state: tuple[Any, ...]) -> tuple[tuple[Any, ...], jax.Array]:
            state, metrics = jax.lax.scan(self.update, state, None, CALL)
            return state, metrics.sum()

        def sample(state: tuple[Any, ...]) -> tuple[tuple[Any, ...], jax.Array]:
            after, moves = jax.lax.scan(partial(self.play, state[0]), state[2:], None, steps)
            return (*state[:2], *after), sum(x.sum() for x in moves)

        def random(state: tuple[Any, ...]) -> tuple[tuple[Any, ...], jax.Array]:
            after, rewards = jax.lax.scan(self.play_at_random, state[2:], None, steps)
            return (*state[:2], *after), rewards.sum()

        return {"train": train, "sample": sample, "random": random}[self.spec.what]


def main() -> None:
    spec = read_spec()
    ippo = Ippo(spec)
    start = time.perf_counter()
    state = jax.jit(ippo.begin)(jax.random.key(0))
    compiled = jax.jit(ippo.call()).lower(state).compile()
    compile_s = time.perf_counter() - start

    def advance() -> int:
        nonlocal state
        state, number = compiled(state)
        number.block_until_ready()
        return CALL * spec.batch

    figures = measure(advance, spec.seconds) | {"compile_s": compile_s}
    own = "overcooked, cramped_room" if spec.env == "overcooked" else "MPE_simple_spread_v3"
    notes = f"own env {own}, equal batch, float32; {compile_s:.1f} s of compiling not counted"
    print_result(figures, ("jaxmarl", "jax"), notes)


if __name__ == "__main__":
    main()
