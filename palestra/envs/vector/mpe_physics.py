"""The particle physics of MPE (Lowe et al., 2017): discs that are pushed, collide and slow down.

All arithmetic is float64 in the order of the `mpe2` package, so that observations (float32) are bit-identical to its
own. Kernels that take a `World` process all games in one call, and kernels for one game index whole arrays: passing a
world, or slicing, for each game would cost more than the physics. Shapes: `B` games, `N` seats, `E` entities (the
agents, then the landmarks), `D` numbers of an action, `W` words.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from palestra.core.accel.jit import jit, jit_inline
from palestra.envs.batch.native import store_final
from palestra.envs.batch.rng import random_below, uniform

_STEP = 0.1  # seconds
_KEPT = 1 - 0.25  # share of the velocity that is kept per step
_FORCE = 100.0
_MARGIN = 0.001  # softness of contacts
_REACH = 200 * _MARGIN  # beyond this gap the force is less than 1e-87: lost in any velocity that float32 can show
_LOG2 = math.log(2)


class World(NamedTuple):
    """B worlds for the kernels. `radius` is that of the entities that collide, which come first; `accel` is the force
    of a full push (0: cannot move), `max_speed` the maximum speed. Landmarks start within `landmark_range` of the
    centre on both axes; if `has_goal`, each game draws one of them as its `goal`."""

    rng: np.ndarray  # uint64 [B, RNG_WORDS]
    pos: np.ndarray  # float64 [B, E, 2]
    vel: np.ndarray  # float64 [B, N, 2]
    goal: np.ndarray  # int64 [B]
    word: np.ndarray  # float32 [B, W]: message of seat 0 in this step
    age: np.ndarray  # int64 [B]: steps of the game so far
    force: np.ndarray  # float64 [N, 2], of the current game
    radius: np.ndarray
    accel: np.ndarray  # [N]
    max_speed: np.ndarray  # [N]
    landmark_range: float
    has_goal: bool


class MPEStepArrays(NamedTuple):
    """The arrays of a frame for the kernels; `observation_sizes` int64 [N] are the observation lengths of the seats."""

    obs: np.ndarray
    final_obs: np.ndarray
    state: np.ndarray
    final_state: np.ndarray
    rewards: np.ndarray
    truncated: np.ndarray
    observation_sizes: np.ndarray


@jit
def begin_games(world: World, new_B: np.ndarray) -> None:
    """Starts the games marked in `new_B`: all entities at random places, at rest, without messages."""
    agents = world.vel.shape[1]
    entities = world.pos.shape[1]
    for b in range(len(new_B)):
        if new_B[b]:
            rng = world.rng[b]
            if world.has_goal:
                world.goal[b] = random_below(rng, entities - agents)
            for e in range(entities):
                reach = 1.0 if e < agents else world.landmark_range
                world.pos[b, e, 0] = uniform(rng, -reach, reach)
                world.pos[b, e, 1] = uniform(rng, -reach, reach)
            world.vel[b] = 0
            world.word[b] = 0
            world.age[b] = 0


@jit
def apply_physics(world: World, actions_BND: np.ndarray, continuous: bool) -> None:
    """Applies one step of physics: pushes, collisions, motion."""
    force = world.force
    for b in range(len(world.pos)):
        for i in range(len(force)):
            x, y = _push(actions_BND, b, i, continuous)
            force[i, 0], force[i, 1] = x * world.accel[i], y * world.accel[i]
        _collide(world.pos, force, world.radius, b)
        _drift(world.pos, world.vel, force, world.max_speed, b)


@jit
def _push(actions_BND: np.ndarray, b: int, i: int, continuous: bool) -> tuple[np.float32, np.float32]:
    """Returns the push (x, y) of an action: nothing, left, right, down, up."""
    if continuous:
        # The differences are rounded to float32, as mpe2's are.
        right = clip_unit(actions_BND[b, i, 2]) - clip_unit(actions_BND[b, i, 1])
        return right, clip_unit(actions_BND[b, i, 4]) - clip_unit(actions_BND[b, i, 3])
    choice = actions_BND[b, i, 0]
    return np.float32((choice == 2) - (choice == 1)), np.float32((choice == 4) - (choice == 3))


@jit
def clip_unit(x: float) -> np.float32:
    """Returns x clipped to 0..1, float32; 0 for nan."""
    if x >= 1:
        return np.float32(1)
    return np.float32(x) if x > 0 else np.float32(0)


@jit_inline
def _collide(pos: np.ndarray, force: np.ndarray, radius: np.ndarray, b: int) -> None:
    """Adds the forces between touching discs; landmarks do not move."""
    agents = len(force)
    solid = len(radius)
    for i in range(min(agents, solid)):
        for e in range(i + 1, solid):
            x, y, square = difference(pos, b, i, e)
            contact = radius[i] + radius[e]
            if square > (contact + _REACH) * (contact + _REACH):
                continue
            distance = math.sqrt(square)
            depth = _depth(distance - contact)
            x = _FORCE * x / distance * depth
            y = _FORCE * y / distance * depth
            force[i, 0] += x
            force[i, 1] += y
            if e < agents:
                force[e, 0] -= x
                force[e, 1] -= y


@jit
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


@jit_inline
def _drift(pos: np.ndarray, vel: np.ndarray, force: np.ndarray, top: np.ndarray, b: int) -> None:
    """Moves the agents by their velocities, then updates the velocities by the forces."""
    for i in range(len(force)):
        pos[b, i, 0] += vel[b, i, 0] * _STEP
        pos[b, i, 1] += vel[b, i, 1] * _STEP
        x = vel[b, i, 0] * _KEPT + force[i, 0] * _STEP
        y = vel[b, i, 1] * _KEPT + force[i, 1] * _STEP
        speed = math.sqrt(x * x + y * y)
        if speed > top[i]:
            x = x / speed * top[i]
            y = y / speed * top[i]
        vel[b, i, 0], vel[b, i, 1] = x, y


@jit_inline
def difference(pos: np.ndarray, b: int, i: int, e: int) -> tuple[float, float, float]:
    """Returns the vector from entity e to entity i of game b (x, y) and its squared length."""
    x = pos[b, i, 0] - pos[b, e, 0]
    y = pos[b, i, 1] - pos[b, e, 1]
    return x, y, x * x + y * y


@jit_inline
def nearest_distance(pos: np.ndarray, b: int, first: int, last: int, e: int) -> float:
    """Returns the distance of entity e of game b from the nearest of the agents `first` to `last - 1`."""
    least = math.inf
    for i in range(first, last):
        least = min(least, difference(pos, b, i, e)[2])
    return math.sqrt(least)


@jit_inline
def overlaps(pos: np.ndarray, radius: np.ndarray, b: int, i: int, e: int) -> bool:
    """True if discs i and e of game b overlap."""
    return math.sqrt(difference(pos, b, i, e)[2]) < radius[i] + radius[e]


@jit_inline
def write_vector(obs: np.ndarray, b: int, i: int, at: int, pairs_BE2: np.ndarray, e: int) -> int:
    """Writes the position or velocity of entity e to index `at` of seat i's observation; returns the next index."""
    obs[b, i, at], obs[b, i, at + 1] = pairs_BE2[b, e, 0], pairs_BE2[b, e, 1]
    return at + 2


@jit_inline
def write_relative_positions(obs: np.ndarray, b: int, i: int, at: int, pos: np.ndarray, first: int, last: int) -> int:
    """Writes the positions, relative to seat i, of the entities `first` to `last - 1` except i to
    its observation; returns the next index."""
    for e in range(first, last):
        if e != i:
            obs[b, i, at] = pos[b, e, 0] - pos[b, i, 0]
            obs[b, i, at + 1] = pos[b, e, 1] - pos[b, i, 1]
            at += 2
    return at


@jit_inline
def write_state(obs: np.ndarray, state: np.ndarray, widths: np.ndarray, b: int) -> None:
    """Writes the global state of game b: the concatenated observations of all seats."""
    at = 0
    for i in range(len(widths)):
        for k in range(widths[i]):
            state[b, at + k] = obs[b, i, k]
        at += widths[i]


@jit
def count_step(world: World, arrays: MPEStepArrays, max_cycles: int) -> None:
    """Counts a step; for games that it truncates, copies the last observations and state to
    `final_obs` and `final_state`."""
    for b in range(len(world.age)):
        world.age[b] += 1
        arrays.truncated[b] = world.age[b] >= max_cycles
        if arrays.truncated[b]:
            store_final(arrays, b)
