"""The particle physics of MPE (Lowe et al., 2017): discs that are pushed, collide and slow down.

All arithmetic is float64 in the order of the `mpe2` package, so that observations (float32) are bit-identical to its
own. Kernels that take a `World` process all games in one call, and kernels for one game index whole arrays: passing a
world, or slicing, for each game would cost more than the physics. Shapes: `B` games, `N` seats, `E` entities (the
agents, then the landmarks), `D` numbers of an action, `W` words.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from palestra.compiled import inline, kernel
from palestra.envs.vector.base import Arrays, Frame
from palestra.envs.vector.rng import WORDS, below, uniform

_STEP = 0.1  # seconds
_KEPT = 1 - 0.25  # share of the velocity that is kept per step
_FORCE = 100.0
_MARGIN = 0.001  # softness of contacts
_REACH = 200 * _MARGIN  # beyond this gap the force is less than 1e-87: lost in any velocity that float32 can show
_LOG2 = math.log(2)


class World(NamedTuple):
    """B worlds for the kernels. `radius` is that of the entities that collide, which come first; `accel` is the force
    of a full push (0: cannot move), `top` the maximum speed. Landmarks start within `reach` of the centre on both axes;
    if `goals`, each game draws one of them as its `goal`."""

    rng: np.ndarray  # uint64 [B, WORDS]
    pos: np.ndarray  # float64 [B, E, 2]
    vel: np.ndarray  # float64 [B, N, 2]
    goal: np.ndarray  # int64 [B]
    word: np.ndarray  # float32 [B, W]: message of seat 0 in this step
    age: np.ndarray  # int64 [B]: steps of the game so far
    force: np.ndarray  # float64 [N, 2], of the current game
    radius: np.ndarray
    accel: np.ndarray  # [N]
    top: np.ndarray  # [N]
    reach: float
    goals: bool


class View(NamedTuple):
    """The arrays of a frame for the kernels; `widths` int64 [N] are the observation lengths of the seats."""

    obs: np.ndarray
    final_obs: np.ndarray
    state: np.ndarray
    final_state: np.ndarray
    rewards: np.ndarray
    truncated: np.ndarray
    widths: np.ndarray


def world_memory(games: int, agents: int, landmarks: int, words: int) -> Arrays:
    """Returns the state arrays of B worlds, all zero."""
    return {
        "rng": np.zeros((games, WORDS), np.uint64),
        "pos": np.zeros((games, agents + landmarks, 2)),
        "vel": np.zeros((games, agents, 2)),
        "goal": np.zeros(games, np.int64),
        "word": np.zeros((games, words), np.float32),
        "age": np.zeros(games, np.int64),
    }


def world_of(memory: Arrays, **fixed: Any) -> World:
    """Builds a `World` on the arrays of `memory` (not copies) and its constants `fixed`: `radius`, `accel`, `top`,
    `reach`, `goals`."""
    arrays: dict[str, Any] = {**memory, "force": np.zeros(memory["vel"].shape[1:])}
    return World(**arrays, **fixed)


def view_of(frame: Frame, widths: tuple[int, ...]) -> View:
    """Returns the arrays (not copies) of a frame that has a global state."""
    state, final = frame.state, frame.final_state
    assert state is not None and final is not None
    return View(frame.obs, frame.final_obs, state, final, frame.rewards, frame.truncated, np.array(widths, np.int64))


@kernel
def scatter(world: World, new_B: np.ndarray) -> None:
    """Starts the games marked in `new_B`: all entities at random places, at rest, without messages."""
    agents, entities = world.vel.shape[1], world.pos.shape[1]
    for b in range(len(new_B)):
        if new_B[b]:
            rng = world.rng[b]
            if world.goals:
                world.goal[b] = below(rng, entities - agents)
            for e in range(entities):
                reach = 1.0 if e < agents else world.reach
                world.pos[b, e, 0] = uniform(rng, -reach, reach)
                world.pos[b, e, 1] = uniform(rng, -reach, reach)
            world.vel[b] = 0
            world.word[b] = 0
            world.age[b] = 0


@kernel
def move(world: World, actions_BND: np.ndarray, continuous: bool) -> None:
    """Applies one step of physics: pushes, collisions, motion."""
    force = world.force
    for b in range(len(world.pos)):
        for i in range(len(force)):
            x, y = _pushed(actions_BND, b, i, continuous)
            force[i, 0], force[i, 1] = x * world.accel[i], y * world.accel[i]
        _collide(world.pos, force, world.radius, b)
        _drift(world.pos, world.vel, force, world.top, b)


@kernel
def _pushed(actions_BND: np.ndarray, b: int, i: int, continuous: bool) -> tuple:
    """Returns the push (x, y) of an action: nothing, left, right, down, up."""
    if continuous:
        # The differences are rounded to float32, as mpe2's are.
        right = clipped(actions_BND[b, i, 2]) - clipped(actions_BND[b, i, 1])
        return right, clipped(actions_BND[b, i, 4]) - clipped(actions_BND[b, i, 3])
    choice = actions_BND[b, i, 0]
    return np.float32((choice == 2) - (choice == 1)), np.float32((choice == 4) - (choice == 3))


@kernel
def clipped(x: float) -> np.float32:
    """Returns x clipped to 0..1, float32; 0 for nan."""
    if x >= 1:
        return np.float32(1)
    return np.float32(x) if x > 0 else np.float32(0)


@inline
def _collide(pos: np.ndarray, force: np.ndarray, radius: np.ndarray, b: int) -> None:
    """Adds the forces between touching discs; landmarks do not move."""
    agents, solid = len(force), len(radius)
    for i in range(min(agents, solid)):
        for e in range(i + 1, solid):
            x, y, square = apart(pos, b, i, e)
            contact = radius[i] + radius[e]
            if square > (contact + _REACH) * (contact + _REACH):
                continue
            distance = math.sqrt(square)
            depth = _depth(distance - contact)
            x, y = _FORCE * x / distance * depth, _FORCE * y / distance * depth
            force[i, 0] += x
            force[i, 1] += y
            if e < agents:
                force[e, 0] -= x
                force[e, 1] -= y


@kernel
def _depth(gap: float) -> float:
    """Returns the soft penetration depth of two discs: `numpy.logaddexp(0, -gap / margin) * margin`."""
    y = -gap / _MARGIN
    if y > 0:
        return (y + math.log1p(math.exp(-y))) * _MARGIN
    if y == 0:
        return _LOG2 * _MARGIN
    if y < -40:  # log1p(x) is x below 2**-54
        return math.exp(y) * _MARGIN
    return math.log1p(math.exp(y)) * _MARGIN


@inline
def _drift(pos: np.ndarray, vel: np.ndarray, force: np.ndarray, top: np.ndarray, b: int) -> None:
    """Moves the agents by their velocities, then updates the velocities by the forces."""
    for i in range(len(force)):
        pos[b, i, 0] += vel[b, i, 0] * _STEP
        pos[b, i, 1] += vel[b, i, 1] * _STEP
        x = vel[b, i, 0] * _KEPT + force[i, 0] * _STEP
        y = vel[b, i, 1] * _KEPT + force[i, 1] * _STEP
        speed = math.sqrt(x * x + y * y)
        if speed > top[i]:
            x, y = x / speed * top[i], y / speed * top[i]
        vel[b, i, 0], vel[b, i, 1] = x, y


@inline
def apart(pos: np.ndarray, b: int, i: int, e: int) -> tuple:
    """Returns the vector from entity e to entity i of game b (x, y) and its squared length."""
    x, y = pos[b, i, 0] - pos[b, e, 0], pos[b, i, 1] - pos[b, e, 1]
    return x, y, x * x + y * y


@inline
def nearest(pos: np.ndarray, b: int, first: int, last: int, e: int) -> float:
    """Returns the distance of entity e of game b from the nearest of the agents `first` to `last - 1`."""
    least = math.inf
    for i in range(first, last):
        least = min(least, apart(pos, b, i, e)[2])
    return math.sqrt(least)


@inline
def touch(pos: np.ndarray, radius: np.ndarray, b: int, i: int, e: int) -> bool:
    """True if discs i and e of game b overlap."""
    return math.sqrt(apart(pos, b, i, e)[2]) < radius[i] + radius[e]


@inline
def put_pair(obs: np.ndarray, b: int, i: int, at: int, pairs_BE2: np.ndarray, e: int) -> int:
    """Writes the position or velocity of entity e to index `at` of seat i's observation; returns the next index."""
    obs[b, i, at], obs[b, i, at + 1] = pairs_BE2[b, e, 0], pairs_BE2[b, e, 1]
    return at + 2


@inline
def put_relative(obs: np.ndarray, b: int, i: int, at: int, pos: np.ndarray, first: int, last: int) -> int:
    """Writes the positions, relative to seat i, of the entities `first` to `last - 1` except i to its observation;
    returns the next index."""
    for e in range(first, last):
        if e != i:
            obs[b, i, at] = pos[b, e, 0] - pos[b, i, 0]
            obs[b, i, at + 1] = pos[b, e, 1] - pos[b, i, 1]
            at += 2
    return at


@inline
def join(obs: np.ndarray, state: np.ndarray, widths: np.ndarray, b: int) -> None:
    """Writes the global state of game b: the concatenated observations of all seats."""
    at = 0
    for i in range(len(widths)):
        for k in range(widths[i]):
            state[b, at + k] = obs[b, i, k]
        at += widths[i]


@kernel
def count(world: World, view: View, cycles: int) -> None:
    """Counts a step; for games that it truncates, copies the last observations and state to `final_obs` and
    `final_state`."""
    for b in range(len(world.age)):
        world.age[b] += 1
        view.truncated[b] = world.age[b] >= cycles
        if view.truncated[b]:
            for i in range(len(view.widths)):
                for k in range(view.widths[i]):
                    view.final_obs[b, i, k] = view.obs[b, i, k]
            for k in range(view.state.shape[1]):
                view.final_state[b, k] = view.state[b, k]
