"""Envs whose agents differ in their actions and observations, as users write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

from palestra.envs.vector_base import (
    Arrays,
    Continuous,
    Discrete,
    MultiDiscrete,
    VectorEnv,
    VectorStep,
    empty_step,
    images_size,
)

SIDE = 36  # pixels of a picture
Seen = Literal["rows", "sizes", "picture", "dict", "pictures"]
MOVES = np.array([[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]], np.float32)


class Hunt(ParallelEnv[str, Any, Any]):
    """Two hunters and a prey on a square from -1 to 1. Each is paid for being near its own goal: hunters near the prey,
    the prey near a burrow. Hunters choose one of five moves; the prey gives a velocity.

    `seen` says what they observe: `rows` of one length; rows of other `sizes`; the prey a `picture` and hunters rows;
    all a `dict` of a picture and a row; or `pictures` of two sizes, of bytes and of floats. With `sizes` hunter_1 has
    three moves only. With `masks` the hunters' observations have an action mask, which forbids moves off the square.
    With `team` all are paid the mean."""

    metadata = {"name": "hunt"}
    possible_agents = ["hunter_0", "hunter_1", "prey"]

    def __init__(
        self, seen: Seen = "rows", velocity: str = "box", sizes: bool = False, masks: bool = False, team: bool = False
    ) -> None:
        self.seen = seen
        self.velocity = velocity
        self.sizes = sizes
        self.masks = masks
        self.team = team
        self.render_mode = "rgb_array"
        moves = {"hunter_0": spaces.Discrete(5), "hunter_1": spaces.Discrete(3 if sizes else 5)}
        velocities = {"box": spaces.Box(-1, 1, (2,), np.float32), "multi": spaces.MultiDiscrete([3, 3])}
        self.action_spaces = moves | {"prey": velocities.get(velocity, spaces.Discrete(5))}

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        space = self._plain_space(agent)
        choices = self.action_spaces[agent]
        if self.masks and isinstance(choices, spaces.Discrete):
            return spaces.Dict({"observation": space, "action_mask": spaces.MultiBinary(int(choices.n))})
        return space

    def _plain_space(self, agent: str) -> spaces.Space[Any]:
        row = spaces.Box(-2, 2, (len(self._row(agent, np.zeros((4, 2), np.float32))),), np.float32)
        picture = spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8)
        if self.seen == "dict":
            return spaces.Dict({"where": row, "camera": picture})
        if self.seen == "picture" and agent == "prey":
            return picture
        if self.seen == "pictures":
            return picture if agent == "prey" else spaces.Box(0, 1, (2, SIDE + 4, SIDE), np.float32)
        return row

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self.action_spaces[agent]

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.places = np.random.default_rng(seed).uniform(-1, 1, (4, 2)).astype(np.float32)  # the last is the burrow
        self.agents = list(self.possible_agents)
        self.steps = 0
        return self._observations(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        assert all(self.action_spaces[agent].contains(action) for agent, action in actions.items()), actions
        for number, agent in enumerate(self.possible_agents):
            self.places[number] = np.clip(self.places[number] + 0.2 * self._velocity(agent, actions[agent]), -1, 1)
        self.steps += 1
        goals = np.stack([self.places[2], self.places[2], self.places[3]])
        rewards = 1 - np.linalg.norm(self.places[:3] - goals, axis=1)
        if self.team:
            rewards[:] = rewards.mean()
        agents = self.agents
        over = self.steps == 12
        if over:
            self.agents = []
        return (
            self._observations(),
            {agent: float(reward) for agent, reward in zip(agents, rewards, strict=True)},
            dict.fromkeys(agents, False),
            dict.fromkeys(agents, over),
            {agent: {} for agent in agents},
        )

    def _velocity(self, agent: str, action: Any) -> np.ndarray:
        if isinstance(self.action_spaces[agent], spaces.Discrete):
            return MOVES[action]
        return np.asarray(action, np.float32) - (1 if self.velocity == "multi" else 0)

    def _observations(self) -> dict[str, Any]:
        return {agent: self._observation(agent) for agent in self.possible_agents}

    def _observation(self, agent: str) -> Any:
        plain = self._plain(agent)
        choices = self.action_spaces[agent]
        if self.masks and isinstance(choices, spaces.Discrete):
            place = self.places[self.possible_agents.index(agent)]
            legal = (np.abs(place + 0.2 * MOVES) <= 1).all(1)
            return {"observation": plain, "action_mask": legal[: choices.n].astype(np.int8)}
        return plain

    def _plain(self, agent: str) -> Any:
        row = self._row(agent, self.places)
        if self.seen == "dict":
            return {"where": row, "camera": self.render()}
        if self.seen == "picture" and agent == "prey":
            return self.render()
        if self.seen == "pictures":
            picture = self.render()
            if agent == "prey":
                return picture
            return np.pad(picture[..., :2].transpose(2, 0, 1) / np.float32(255), ((0, 0), (2, 2), (0, 0)))
        return row

    def _row(self, agent: str, places: np.ndarray) -> np.ndarray:
        own = self.possible_agents.index(agent)
        goal = 3 if agent == "prey" else 2
        seen = places[goal] - places[own]
        if self.seen == "sizes" and agent != "prey":
            return np.concatenate([seen, places[own], [1.0]]).astype(np.float32)
        return seen.copy()

    def render(self) -> np.ndarray:
        """Returns a picture: the places of the hunters, the prey and the burrow as squares of a colour each."""
        picture = np.zeros((SIDE, SIDE, 3), np.uint8)
        for place, colour in zip(self.places, ((255, 0, 0), (200, 50, 0), (0, 255, 0), (0, 0, 255)), strict=True):
            y, x = ((place + 1) / 2 * (SIDE - 6)).astype(int)
            picture[y : y + 6, x : x + 6] = colour
        return picture


def hunt(**options: Any) -> Hunt:
    """Returns a game of `Hunt`."""
    return Hunt(**options)


class Band(VectorEnv):
    """Three players hear a note, 0 to 2, and answer it: a drum with one of three sounds, a piano with two keys, a slide
    with a number. Each loses its distance to the note. The slide sees the note as the brightness of an image, beside
    the time. A game has four steps."""

    name: ClassVar[str] = "band"
    seats = ("drum", "piano", "slide")
    image = (SIDE, SIDE, 1)
    action_spaces = (Discrete(3), MultiDiscrete((2, 3)), Continuous((0.0,), (2.0,)))
    observation_shapes = ((2,), (2,), (images_size([image]) + 1,))
    observation_images = ((), (), (image,))

    def __init__(self, num_envs: int = 4) -> None:
        self.num_envs = num_envs
        self.vector_step = empty_step(num_envs, 3, self.observation_shapes[2], num_actions=3)
        self.notes = np.zeros((num_envs, 4), np.int64)
        self.number = np.zeros(num_envs, np.int64)  # of the episode
        self.seeds = np.zeros(num_envs, np.int64)
        self.time = np.zeros(num_envs, np.int64)

    def reset(self, seeds: np.ndarray) -> VectorStep:
        self.seeds[:] = seeds
        self.number[:] = 0
        self.time[:] = 0
        self.vector_step.rewards[:] = 0
        self.vector_step.truncated[:] = False
        for game in range(self.num_envs):
            self._compose(game)
        self._show(self.vector_step.obs)
        return self.vector_step

    def _compose(self, game: int) -> None:
        rng = np.random.default_rng([int(self.seeds[game]), int(self.number[game])])
        self.notes[game] = rng.integers(0, 3, 4)

    def _show(self, obs: np.ndarray) -> None:
        note = self.notes[np.arange(self.num_envs), np.minimum(self.time, 3)]
        obs[:] = 0
        obs[:, :2, 0] = note[:, None]
        obs[:, :2, 1] = self.time[:, None]
        size = images_size([self.image])
        obs[:, 2, :size] = note[:, None] / 2
        obs[:, 2, size] = self.time
        self.vector_step.action_mask[:] = True
        self.vector_step.action_mask[:, 0] = np.arange(3) != (note[:, None] + 1) % 3

    def step(self, actions: np.ndarray) -> VectorStep:
        assert actions.shape == (self.num_envs, 3, 2) and actions.dtype == np.float32
        step = self.vector_step
        note = self.notes[np.arange(self.num_envs), self.time]
        played = np.stack([actions[:, 0, 0], actions[:, 1].sum(1), actions[:, 2, 0].clip(0, 2)], 1)
        step.rewards[:] = -np.abs(played - note[:, None])
        self.time += 1
        step.truncated[:] = self.time == 4
        self._show(step.final_obs)
        for game in np.flatnonzero(step.truncated):
            self.number[game] += 1
            self.time[game] = 0
            self._compose(game)
        self._show(step.obs)
        return step

    def save(self) -> Arrays:
        own = {"notes": self.notes, "number": self.number, "seeds": self.seeds, "time": self.time}
        return {name: array.copy() for name, array in (own | self.vector_step.arrays()).items()}

    def load(self, saved: Mapping[str, np.ndarray]) -> VectorStep:
        for name in ("notes", "number", "seeds", "time"):
            getattr(self, name)[:] = saved[name]
        for name, array in self.vector_step.arrays().items():
            array[:] = saved[name]
        return self.vector_step
