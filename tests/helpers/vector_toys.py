"""Small vector envs for tests, and training in them."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from palestra.core.types import RolloutBatch
from palestra.envs.batch.native import NativeEnv
from palestra.envs.batch.rng import RNG_WORDS, random_below, uniform
from palestra.envs.vector_base import Arrays, Continuous, Discrete, Space, VectorEnv, VectorStep, empty_step
from palestra.vector.algorithms.ppo import PPO
from palestra.vector.learners.policy_stack import NetPolicyConfig
from palestra.vector.policies.base import VectorPolicy
from palestra.vector.rollouts.rollout import VectorRollout

POLICY = NetPolicyConfig(hidden=[16], lr=1e-2)


def ppo(**settings: Any) -> PPO:
    """Returns PPO with four passes in four minibatches, and returns without normalisation: for batches that are too
    small for the defaults."""
    return PPO(**{"epochs": 4, "minibatches": 4, "value_norm": False} | settings)


class Countdown(VectorEnv):
    """A game lasts 2 to 5 steps, by its seed and number. A seat observes the game, the time, its own number and the sum
    of all actions so far, and is paid its action times its number plus one. Every third game is truncated, the others
    terminate; with `turns` seats act in turn; the last action is illegal in every second game.
    """

    name = "countdown"

    def __init__(self, games: int = 4, *, turns: bool = False, space: Space = Discrete(3), seats: int = 2) -> None:
        self.num_envs, self.turns, self.space = games, turns, space
        self.seats = tuple(f"seat{i}" for i in range(seats))
        self.observation_shapes, self.action_spaces, self.state_size = ((4,),) * seats, (space,) * seats, 2
        masks = space.n if isinstance(space, Discrete) else None
        self.vector_step = empty_step(games, seats, (4,), num_actions=masks, state_size=2, reports_success=True)
        self.seeds, self.number, self.time = (np.zeros(games, np.int64) for _ in range(3))
        self.total = np.zeros(games)

    def reset(self, seeds: np.ndarray) -> VectorStep:
        self.seeds[:], self.number[:], self.time[:], self.total[:] = seeds, 0, 0, 0
        for array in (
            self.vector_step.rewards,
            self.vector_step.terminated,
            self.vector_step.truncated,
            self.vector_step.success,
        ):
            array[:] = 0
        self.show(self.vector_step.obs, self.vector_step.state)
        return self.vector_step

    def length(self) -> np.ndarray:
        return 2 + (self.seeds + self.number) % 4

    def show(self, obs: np.ndarray, state: np.ndarray) -> None:
        for n in range(len(self.seats)):
            obs[:, n] = np.stack([self.seeds % 7 + self.number, self.time, np.full(self.num_envs, n), self.total], 1)
        state[:] = np.stack([self.total, self.time], 1)
        self.vector_step.agent_mask[:] = True
        if self.turns:
            self.vector_step.agent_mask[:] = np.arange(len(self.seats)) == (self.time % len(self.seats))[:, None]
        if self.vector_step.action_mask is not None:
            self.vector_step.action_mask[:] = True
            self.vector_step.action_mask[self.number % 2 == 1, :, -1] = False

    def step(self, actions: np.ndarray) -> VectorStep:
        frame = self.vector_step
        moved = actions.reshape(self.num_envs, len(self.seats), -1).sum(2) * frame.agent_mask
        frame.rewards[:] = moved * (np.arange(len(self.seats)) + 1)
        self.total += moved.sum(1)
        self.time += 1
        over = self.time >= self.length()
        cut = self.number % 3 == 2
        frame.terminated[:], frame.truncated[:] = over & ~cut, over & cut
        frame.success[:] = over & (self.total > 3)
        self.show(frame.final_obs, frame.final_state)
        self.number[over] += 1
        self.time[over], self.total[over] = 0, 0
        self.show(frame.obs, frame.state)
        return frame

    def save(self) -> Any:
        own = {"seeds": self.seeds, "number": self.number, "time": self.time, "total": self.total}
        kept = {key: value for key, value in vars(self.vector_step).items() if value is not None}
        return {key: value.copy() for key, value in (own | kept).items()}

    def load(self, saved: Mapping[str, np.ndarray]) -> VectorStep:
        for key in ("seeds", "number", "time", "total"):
            getattr(self, key)[:] = saved[key]
        for key, value in vars(self.vector_step).items():
            if value is not None:
                value[:] = saved[key]
        return self.vector_step


class Cues(NativeEnv):
    """Every game hides one of three cues: seat n is right to answer with the cue plus n, modulo 3, in the last of
    `steps` steps, and is paid 1 (with `team` all are paid the share of correct seats).

    An observation is the cue, one-hot, and the remaining share of the game; so is the state. With `fleeting` it shows
    the cue in the first step only. With `turns` one seat after the other acts, and the game ends when each has acted
    `steps` times; the last action of each counts.
    """

    name = "cues"

    def __init__(
        self,
        games: int = 32,
        *,
        seats: int = 2,
        steps: int = 1,
        fleeting: bool = False,
        team: bool = False,
        turns: bool = False,
    ) -> None:
        self.num_envs, self.steps, self.fleeting, self.team, self.turns = games, steps, fleeting, team, turns
        self.seats = tuple(f"seat{i}" for i in range(seats))
        self.observation_shapes, self.action_spaces = ((4,),) * seats, (Discrete(3),) * seats
        self.length = steps * seats if turns else steps
        self.state_size = 4
        self.vector_step = empty_step(games, seats, (4,), state_size=4, reports_success=True)
        self.internal_state: Arrays = {
            "rng": np.zeros((games, RNG_WORDS), np.uint64),
            "cue": np.zeros(games, np.int64),
            "time": np.zeros(games, np.int64),
            "right": np.zeros((games, seats), bool),
        }

    def _begin(self) -> None:
        self.internal_state["time"][:] = 0
        self.draw(np.arange(self.num_envs))
        self.show(self.vector_step.obs, self.vector_step.state)

    def draw(self, games: np.ndarray) -> None:
        for b in games:
            self.internal_state["cue"][b] = random_below(self.internal_state["rng"][b], 3)

    def show(self, obs: np.ndarray, state: np.ndarray | None) -> None:
        assert state is not None
        time, N = self.internal_state["time"], len(self.seats)
        rounds = time // N if self.turns else time
        seen = (rounds == 0) | (not self.fleeting)
        state[:, :3], state[:, 3] = np.eye(3)[self.internal_state["cue"]], 1 - rounds / self.steps
        obs[..., :3] = (state[:, :3] * seen[:, None])[:, None]
        obs[..., 3] = state[:, None, 3]
        self.vector_step.agent_mask[:] = (np.arange(N) == (time % N)[:, None]) | (not self.turns)

    def _advance(self, actions: np.ndarray) -> None:
        frame, memory = self.vector_step, self.internal_state
        asked = (memory["cue"][:, None] + np.arange(len(self.seats))) % 3
        memory["right"][:] = np.where(frame.agent_mask, actions == asked, memory["right"])
        memory["time"] += 1
        over = memory["time"] == self.length
        paid = memory["right"].astype(np.float32)
        paid = np.broadcast_to(paid.mean(1, keepdims=True), paid.shape) if self.team else paid
        frame.rewards[:] = np.where(over[:, None], paid, 0)
        frame.terminated[:], frame.success[:] = over, over & memory["right"].all(1)  # type: ignore[index]
        self.show(frame.final_obs, frame.final_state)
        memory["time"][over] = 0
        self.draw(np.flatnonzero(over))
        self.show(frame.obs, frame.state)


class Track(NativeEnv):
    """A cart at x with speed v must stop at 0: the reward is -x^2 per step, and an action from -1 to 1 pushes it. The
    game is truncated after `steps` steps."""

    name = "track"

    def __init__(self, games: int = 32, *, steps: int = 20) -> None:
        self.num_envs, self.steps, self.seats = games, steps, ("cart",)
        self.observation_shapes, self.action_spaces = ((2,),), (Continuous((-1.0,), (1.0,)),)
        self.vector_step = empty_step(games, 1, (2,))
        self.internal_state: Arrays = {
            "rng": np.zeros((games, RNG_WORDS), np.uint64),
            "cart": np.zeros((games, 2)),
            "time": np.zeros(games, np.int64),
        }

    def _begin(self) -> None:
        self.internal_state["time"][:] = 0
        self.place(np.arange(self.num_envs))
        self.vector_step.obs[:, 0] = self.internal_state["cart"]

    def place(self, games: np.ndarray) -> None:
        for b in games:
            self.internal_state["cart"][b] = uniform(self.internal_state["rng"][b], -1.0, 1.0), 0

    def _advance(self, actions: np.ndarray) -> None:
        frame, memory, cart = self.vector_step, self.internal_state, self.internal_state["cart"]
        cart[:, 1] = 0.7 * cart[:, 1] + 0.3 * np.clip(actions[:, 0, 0], -1, 1)
        cart[:, 0] = np.clip(cart[:, 0] + cart[:, 1], -2, 2)
        frame.rewards[:, 0] = -(cart[:, 0] ** 2)
        memory["time"] += 1
        frame.truncated[:] = memory["time"] == self.steps
        frame.final_obs[:, 0] = cart
        memory["time"][frame.truncated] = 0
        self.place(np.flatnonzero(frame.truncated))
        frame.obs[:, 0] = cart


class Push(NativeEnv):
    """Seats push in one direction, or in several; each is paid the sum."""

    name = "push"

    def __init__(self, games: int, spaces: tuple[Space, ...]) -> None:
        self.num_envs, self.seats = games, tuple(f"seat{i}" for i in range(len(spaces)))
        self.observation_shapes, self.action_spaces = ((1,),) * len(spaces), spaces
        self.vector_step = empty_step(games, len(spaces), (1,))
        self.internal_state = {"rng": np.zeros((games, RNG_WORDS), np.uint64)}

    def _begin(self) -> None:
        self.vector_step.obs[:] = 1

    def _advance(self, actions: np.ndarray) -> None:
        self.vector_step.rewards[:] = actions.sum(2)


class Learner(Protocol):
    def rollout_policies(self, progress: float) -> Sequence[VectorPolicy]: ...
    def greedy_policies(self) -> Sequence[VectorPolicy]: ...
    def update(self, batch: RolloutBatch, progress: float) -> dict[str, dict[str, float]]: ...


def train(
    learner: Learner, sweeper: VectorRollout, horizon: int, updates: int, others: Sequence[VectorPolicy] = ()
) -> Any:
    """Collects rollouts and updates the learner; returns the metrics of the last update."""
    figures: Any = None
    for i in range(updates):
        progress = i / updates
        figures = learner.update(sweeper.collect([*learner.rollout_policies(progress), *others], horizon, i), progress)
    return figures


def learner(
    config: Any,
    env: VectorEnv,
    seats: dict[str, list[int]],
    policies: Mapping[str, NetPolicyConfig] | NetPolicyConfig = POLICY,
) -> Any:
    """The learner of a config, with one kind of policy for all names, or one for each."""
    own = dict.fromkeys(seats, policies) if isinstance(policies, NetPolicyConfig) else policies
    return config.build_learner(env, seats, own, {name: number + 5 for number, name in enumerate(seats)})


def train_on_play(
    made: Any, env: VectorEnv, updates: int, others: Sequence[VectorPolicy] | None = None
) -> dict[str, dict[str, float]]:
    """Trains on new games; returns the metrics of the last update."""
    rollout = VectorRollout(env, np.arange(env.num_envs))
    metrics: dict[str, dict[str, float]] = train(made, rollout, made.config.rollout_length, updates, others or ())
    return metrics


def snapshot(made: Any) -> dict[str, np.ndarray]:
    """A copy of a learner's state."""
    return {key: value.copy() for key, value in made.state_arrays().items()}


def assert_same_state(one: Any, other: Any) -> None:
    """Asserts that two learners have the same state, bit for bit."""
    expected = snapshot(one)
    state = snapshot(other)
    assert expected.keys() == state.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(value, state[key], err_msg=key)


def assert_resume_is_exact(made: Any, again: Any, env: VectorEnv, horizon: int) -> None:
    """Asserts that `again`, which gets the state of `made` after two of four updates, ends with the same state."""
    rollout = VectorRollout(env, np.arange(env.num_envs))
    for i in range(4):
        batch = rollout.collect(made.rollout_policies(i / 4), horizon, i)
        if i == 2:
            again.load_arrays(snapshot(made))
        made.update(batch, i / 4)
        if i >= 2:
            again.update(batch, i / 4)
    assert_same_state(made, again)


def mean_return(env: VectorEnv, players: Sequence[VectorPolicy], steps: int, seed: int = 10_000) -> np.ndarray:
    """Mean return of each seat [N] over the games that end within `steps`."""
    batch = VectorRollout(env, np.arange(env.num_envs) + seed).collect(players, steps, seed)
    assert len(batch.episode_stats["returns"])
    mean: np.ndarray = batch.episode_stats["returns"].mean(0)
    return mean


class Counted(Countdown):
    """A countdown that counts its instances in this process that are not closed."""

    name = "counted"
    not_closed = 0

    def __init__(self, *, num_envs: int = 8) -> None:
        super().__init__(num_envs)
        Counted.not_closed += 1

    def close(self) -> None:
        Counted.not_closed -= 1


class Unsaved(Counted):
    """A countdown whose games cannot be saved."""

    def save(self) -> None:
        return None
