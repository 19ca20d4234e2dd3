"""Small vectorised games that several tests play, and how they train in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from palestra.envs.vector.base import Arrays, Continuous, Discrete, Frame, Space, VectorEnv, empty_frame
from palestra.envs.vector.native import NativeEnv
from palestra.envs.vector.rng import WORDS, below, uniform
from palestra.policies.vector import Player
from palestra.rollouts.sweep import Sweeper
from palestra.types import Batch


class Countdown(VectorEnv):
    """A game lasts 2 to 5 steps, by its seed and number. A seat sees the game, the time, its own number and the sum of
    all actions so far, and is paid its action times its number plus one. Every third game is cut off, the others
    terminate; with `turns` seats act in turn; the last action is illegal in every second game.
    """

    name = "countdown"

    def __init__(self, games: int = 4, *, turns: bool = False, space: Space = Discrete(3), seats: int = 2) -> None:
        self.games, self.turns, self.space = games, turns, space
        self.seats = tuple(f"seat{i}" for i in range(seats))
        self.views, self.actions, self.state_size = ((4,),) * seats, (space,) * seats, 2
        masks = space.n if isinstance(space, Discrete) else None
        self.frame = empty_frame(games, seats, (4,), actions=masks, state=2, success=True)
        self.seeds, self.number, self.time = (np.zeros(games, np.int64) for _ in range(3))
        self.total = np.zeros(games)

    def reset(self, seeds: np.ndarray) -> Frame:
        self.seeds[:], self.number[:], self.time[:], self.total[:] = seeds, 0, 0, 0
        for array in (self.frame.rewards, self.frame.terminated, self.frame.truncated, self.frame.success):
            array[:] = 0
        self.show(self.frame.obs, self.frame.state)
        return self.frame

    def length(self) -> np.ndarray:
        return 2 + (self.seeds + self.number) % 4

    def show(self, obs: np.ndarray, state: np.ndarray) -> None:
        for n in range(len(self.seats)):
            obs[:, n] = np.stack([self.seeds % 7 + self.number, self.time, np.full(self.games, n), self.total], 1)
        state[:] = np.stack([self.total, self.time], 1)
        self.frame.acting[:] = True
        if self.turns:
            self.frame.acting[:] = np.arange(len(self.seats)) == (self.time % len(self.seats))[:, None]
        if self.frame.legal is not None:
            self.frame.legal[:] = True
            self.frame.legal[self.number % 2 == 1, :, -1] = False

    def step(self, actions: np.ndarray) -> Frame:
        frame = self.frame
        moved = actions.reshape(self.games, len(self.seats), -1).sum(2) * frame.acting
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
        kept = {key: value for key, value in vars(self.frame).items() if value is not None}
        return {key: value.copy() for key, value in (own | kept).items()}

    def load(self, saved: Mapping[str, np.ndarray]) -> Frame:
        for key in ("seeds", "number", "time", "total"):
            getattr(self, key)[:] = saved[key]
        for key, value in vars(self.frame).items():
            if value is not None:
                value[:] = saved[key]
        return self.frame


class Cues(NativeEnv):
    """Every game hides one of three cues: seat n is right to answer with the cue plus n, modulo 3, in the last of
    `steps` steps, and is paid 1 (with `team` all are paid the share of those who are right).

    A view is the cue, one-hot, and the share of the game that is left; so is the state. With `fleeting` a view shows
    the cue in the first step only. With `turns` one seat after the other acts, and the game ends when each has acted
    `steps` times; the last move of each counts.
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
        self.games, self.steps, self.fleeting, self.team, self.turns = games, steps, fleeting, team, turns
        self.seats = tuple(f"seat{i}" for i in range(seats))
        self.views, self.actions = ((4,),) * seats, (Discrete(3),) * seats
        self.length = steps * seats if turns else steps
        self.state_size = 4
        self.frame = empty_frame(games, seats, (4,), state=4, success=True)
        self.memory: Arrays = {
            "rng": np.zeros((games, WORDS), np.uint64),
            "cue": np.zeros(games, np.int64),
            "time": np.zeros(games, np.int64),
            "right": np.zeros((games, seats), bool),
        }

    def _begin(self) -> None:
        self.memory["time"][:] = 0
        self.draw(np.arange(self.games))
        self.show(self.frame.obs, self.frame.state)

    def draw(self, games: np.ndarray) -> None:
        for b in games:
            self.memory["cue"][b] = below(self.memory["rng"][b], 3)

    def show(self, obs: np.ndarray, state: np.ndarray | None) -> None:
        assert state is not None
        time, N = self.memory["time"], len(self.seats)
        rounds = time // N if self.turns else time
        seen = (rounds == 0) | (not self.fleeting)
        state[:, :3], state[:, 3] = np.eye(3)[self.memory["cue"]], 1 - rounds / self.steps
        obs[..., :3] = (state[:, :3] * seen[:, None])[:, None]
        obs[..., 3] = state[:, None, 3]
        self.frame.acting[:] = (np.arange(N) == (time % N)[:, None]) | (not self.turns)

    def _advance(self, actions: np.ndarray) -> None:
        frame, memory = self.frame, self.memory
        asked = (memory["cue"][:, None] + np.arange(len(self.seats))) % 3
        memory["right"][:] = np.where(frame.acting, actions == asked, memory["right"])
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
    """A cart at x with speed v is to stand at 0: it loses x^2 a step, and is pushed by an action from -1 to 1. The game
    is cut off after `steps` steps."""

    name = "track"

    def __init__(self, games: int = 32, *, steps: int = 20) -> None:
        self.games, self.steps, self.seats = games, steps, ("cart",)
        self.views, self.actions = ((2,),), (Continuous((-1.0,), (1.0,)),)
        self.frame = empty_frame(games, 1, (2,))
        self.memory: Arrays = {
            "rng": np.zeros((games, WORDS), np.uint64),
            "cart": np.zeros((games, 2)),
            "time": np.zeros(games, np.int64),
        }

    def _begin(self) -> None:
        self.memory["time"][:] = 0
        self.place(np.arange(self.games))
        self.frame.obs[:, 0] = self.memory["cart"]

    def place(self, games: np.ndarray) -> None:
        for b in games:
            self.memory["cart"][b] = uniform(self.memory["rng"][b], -1.0, 1.0), 0

    def _advance(self, actions: np.ndarray) -> None:
        frame, memory, cart = self.frame, self.memory, self.memory["cart"]
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
        self.games, self.seats = games, tuple(f"seat{i}" for i in range(len(spaces)))
        self.views, self.actions = ((1,),) * len(spaces), spaces
        self.frame = empty_frame(games, len(spaces), (1,))
        self.memory = {"rng": np.zeros((games, WORDS), np.uint64)}

    def _begin(self) -> None:
        self.frame.obs[:] = 1

    def _advance(self, actions: np.ndarray) -> None:
        self.frame.rewards[:] = actions.sum(2)


class Learner(Protocol):
    def players(self, progress: float) -> Sequence[Player]: ...
    def greedy(self) -> Sequence[Player]: ...
    def update(self, batch: Batch, progress: float) -> dict[str, dict[str, float]]: ...


def train(learner: Learner, sweeper: Sweeper, horizon: int, updates: int, others: Sequence[Player] = ()) -> Any:
    """Sweeps and updates; returns the figures of the last one."""
    figures: Any = None
    for i in range(updates):
        progress = i / updates
        figures = learner.update(sweeper.sweep([*learner.players(progress), *others], horizon, i), progress)
    return figures


def mean_return(env: VectorEnv, players: Sequence[Player], steps: int, seed: int = 10_000) -> np.ndarray:
    """Mean return of each seat [N] over the games that end within `steps`."""
    batch = Sweeper(env, np.arange(env.games) + seed).sweep(players, steps, seed)
    assert len(batch.games["returns"])
    mean: np.ndarray = batch.games["returns"].mean(0)
    return mean
