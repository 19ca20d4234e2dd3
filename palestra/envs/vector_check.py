"""Contract check of `VectorEnv`, and random actions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from palestra.envs.step_layout import StepLayout, check_spec, num_choices
from palestra.envs.vector_base import (
    Continuous,
    Discrete,
    MultiDiscrete,
    VectorEnv,
    VectorStep,
    find_difference,
    zero_actions,
)

RANDOM_ACTION_BOUND = 1e3  # random play replaces infinite bounds by this
MakeVectorEnv = Callable[[int], VectorEnv]


def check_vector_env(
    make_env: MakeVectorEnv,
    *,
    num_envs: int = 5,
    steps: int = 200,
    seed: int = 0,
    check_independence: bool = True,
    expect_end: bool = True,
) -> None:
    """Plays `make_env(num_envs)` at random; raises ValueError with the violation and its fix if the env violates the
    contract.

    Checks: shape and dtype of every array; finite rewards, observations and state; a legal action for every seat that
    acts; zero padding of observations and action masks; equal seeds and actions give equal frames, in a second instance
    and after a second reset; other seeds give other games; an ended game continues with its next episode in the same
    step; with `check_independence`, a game plays as it would alone; after `save` and `load` the games continue exactly;
    with `expect_end`, at least one game ends within `steps`.
    """
    _Check(make_env, num_envs, steps, seed).run(check_independence, expect_end)


class _Check:
    def __init__(self, make_env: MakeVectorEnv, games: int, steps: int, seed: int) -> None:
        self.make = make_env
        self.num_envs = games
        self.steps = steps
        self.seeds = np.arange(games) * 7 + seed
        self.rng = np.random.default_rng(seed)

    def run(self, alone: bool, ends: bool) -> None:
        env = self.make(self.num_envs)
        self.env = env
        check_spec(env)
        self.layout = StepLayout(env)
        if env.num_envs != self.num_envs:
            self.fail(f"was asked for {self.num_envs} games and has {env.num_envs}", "take `num_envs` from the caller")
        frames, actions = self.play(env)
        self.replay(env, frames, actions, "after a second reset", "reset must set every array")
        self.check_save(env, frames, actions)
        env.close()
        twin = self.make(self.num_envs)
        self.replay(twin, frames, actions, "in a second instance", "draw all randomness from the seeds, share nothing")
        self.other_seeds(twin, frames)
        twin.close()
        if ends and not any(vector_step.done.any() for vector_step in frames):
            self.fail(f"no game ended within {self.steps} steps", "give it a limit, or let the check take more steps")
        if alone:
            self.one_by_one(frames, actions)

    def play(self, env: VectorEnv) -> tuple[list[VectorStep], list[np.ndarray]]:
        frames = [self.valid(env.reset(self.seeds)).copy()]
        actions = []
        if frames[0].done.any() or frames[0].rewards.any():
            self.fail("reports rewards or ends after reset", "set them to zero there")
        for _ in range(self.steps):
            actions.append(random_actions(env, frames[-1], self.rng))
            frames.append(self.valid(env.step(actions[-1].copy())).copy())
        return frames, actions

    def replay(self, env: VectorEnv, frames: list[VectorStep], actions: list[np.ndarray], where: str, fix: str) -> None:
        self.same(env.reset(self.seeds), frames[0], f"reset {where}", fix)
        for number, (action, vector_step) in enumerate(zip(actions, frames[1:], strict=True), 1):
            self.same(env.step(action.copy()), vector_step, f"step {number} {where}", fix)

    def check_save(self, env: VectorEnv, frames: list[VectorStep], actions: list[np.ndarray]) -> None:
        half = len(actions) // 2
        env.reset(self.seeds)
        for action in actions[:half]:
            env.step(action.copy())
        if (saved := env.save()) is None:
            return
        kept = {name: array.copy() for name, array in saved.items()}
        for action in actions[half:]:
            env.step(action.copy())
        fix = "save must copy every array that step changes"
        if any(not np.array_equal(saved[name], kept[name], equal_nan=kept[name].dtype.kind == "f") for name in kept):
            self.fail("changes the saved arrays when it plays on", fix)
        other = self.make(self.num_envs)
        self.same(other.load(saved), frames[half], "load", fix)
        for number, (action, vector_step) in enumerate(zip(actions[half:], frames[half + 1 :], strict=True), half + 1):
            self.same(other.step(action.copy()), vector_step, f"step {number}, continued from saved games", fix)
        other.close()

    def other_seeds(self, env: VectorEnv, frames: list[VectorStep]) -> None:
        """Fails if another seed gives the same first observations although the games differ from
        each other: games without chance pass."""
        first = frames[0].obs
        if np.array_equal(first[0], first[1]):
            return
        if np.array_equal(env.reset(self.seeds + 1000).obs, first):
            self.fail("begins the same games from other seeds", "draw each game from its own seed")

    def one_by_one(self, frames: list[VectorStep], actions: list[np.ndarray]) -> None:
        for game in (0, self.num_envs - 1):
            env = self.make(1)
            where = "of a game alone"
            fix = "let no game read or write another's arrays, and give each a random stream of its own"
            self.same(env.reset(self.seeds[game : game + 1]), _of(frames[0], game), f"reset {where}", fix)
            for number, (action, vector_step) in enumerate(zip(actions, frames[1:], strict=True), 1):
                self.same(
                    env.step(action[game : game + 1].copy()), _of(vector_step, game), f"step {number} {where}", fix
                )
            env.close()

    def valid(self, vector_step: VectorStep) -> VectorStep:
        try:
            self.layout.check(vector_step)
        except ValueError as error:
            raise ValueError(f"env {self.env.label}: {error}") from None
        self.check_ends(vector_step)
        self.check_finite(vector_step)
        self.check_decisions(vector_step)
        self.check_padding(vector_step)
        return vector_step

    def check_ends(self, vector_step: VectorStep) -> None:
        if (vector_step.terminated & vector_step.truncated).any():
            self.fail("reports a game as terminated and truncated at once", "leave it terminated")
        gone = vector_step.seat_terminated
        if gone is not None and (gone & vector_step.agent_mask)[~vector_step.done].any():
            self.fail("lets a seat act that has terminated", "mark it as not acting until the game is over")

    def check_finite(self, vector_step: VectorStep) -> None:
        for name in ("obs", "rewards", "state"):
            value = getattr(vector_step, name)
            if name == "obs" and vector_step.seat_terminated is not None:
                value = value[~vector_step.seat_terminated | vector_step.done[:, None]]
            if value is not None and not np.isfinite(value).all():
                self.fail(f"reports {name} that are not finite", "no nan and no infinity")

    def check_decisions(self, vector_step: VectorStep) -> None:
        if not vector_step.agent_mask.any(axis=1).all():
            self.fail("has a game in which no seat acts", "a game that is done must reset in the same step")
        legal = vector_step.action_mask
        if legal is not None and not (legal.any(axis=2) | ~vector_step.agent_mask).all():
            self.fail("lets a seat act that has no legal action", "mark at least one")

    def check_padding(self, vector_step: VectorStep) -> None:
        for seat, (name, shape, space) in enumerate(
            zip(self.env.seats, self.env.observation_shapes, self.env.action_spaces, strict=True)
        ):
            if vector_step.action_mask is not None:
                legal = vector_step.action_mask[:, seat]
                if isinstance(space, Discrete) and legal[:, space.n :].any():
                    self.fail(f"calls actions legal that seat {name} does not have", "mask the padding")
                if not isinstance(space, Discrete) and not legal.all():
                    self.fail(f"masks actions of seat {name}, which are not discrete", "set its action_mask to true")
            if len(shape) == 1 and vector_step.obs[:, seat, shape[0] :].any():
                self.fail(f"writes past the observation of seat {name}", "leave the padding zero")

    def same(self, vector_step: VectorStep, expected: VectorStep, where: str, fix: str) -> None:
        if part := find_difference(vector_step, expected):
            self.fail(f"differs in {part} at {where}", fix)

    def fail(self, what: str, fix: str) -> None:
        raise ValueError(f"env {self.env.label}: {what}. Fix: {fix}.")


def random_actions(env: VectorEnv, vector_step: VectorStep, rng: np.random.Generator) -> np.ndarray:
    """Returns uniform legal actions for all seats, also for seats that do not act, in the shape and
    dtype that `step` takes."""
    B = env.num_envs
    action_mask = vector_step.action_mask
    if all(isinstance(space, Discrete) for space in env.action_spaces):
        if action_mask is None:
            sizes = np.array([num_choices(space) for space in env.action_spaces])
            action_mask = np.broadcast_to(np.arange(sizes.max()) < sizes[:, None], (B, len(sizes), sizes.max()))
        return np.argmax(rng.random(action_mask.shape) * action_mask, axis=2).astype(np.int32)
    drawn = zero_actions(env.action_spaces, (B,))
    for seat, space in enumerate(env.action_spaces):
        if isinstance(space, MultiDiscrete):
            drawn[:, seat, : space.width] = rng.integers(0, space.sizes, (B, space.width))
        elif isinstance(space, Continuous):
            low = np.maximum(space.low, -RANDOM_ACTION_BOUND)
            high = np.minimum(space.high, RANDOM_ACTION_BOUND)
            drawn[:, seat, : space.width] = rng.uniform(low, high, (B, space.width))
        else:
            weights = rng.random((B, space.n))
            if action_mask is not None:
                weights = weights * action_mask[:, seat, : space.n]
            drawn[:, seat, 0] = weights.argmax(1)
    return drawn


def _of(vector_step: VectorStep, game: int) -> VectorStep:
    return vector_step.map_arrays(lambda value: value[game : game + 1])
