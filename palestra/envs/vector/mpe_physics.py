"""The particle world of MPE (Lowe et al., 2017): discs that are pushed, collide and slow down.

Everything is reckoned in float64 and in the order of the `mpe2` package, so that what is shown, in float32, is its own
to the last bit. Kernels with a `World` play all games in one call, and those for one game index whole arrays: to hand
over a world, or to cut a slice, for each game would cost more than the physics. Shapes: `B` games, `N` seats, `E`
entities (the agents, then the landmarks), `D` numbers of an action, `W` words.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from palestra.compiled import inline, kernel
from palestra.envs.vector.base import Arrays, Frame
from palestra.envs.vector.rng import WORDS, below, uniform

_STEP = 0.1  # seconds
_KEPT = 1 - 0.25  # of the velocity, from one step to the next
_FORCE = 100.0
_MARGIN = 0.001  # how softly discs touch
_REACH = 200 * _MARGIN  # beyond this gap the force is less than 1e-87: lost in any velocity that float32 can show
_LOG2 = math.log(2)


class World(NamedTuple):
    """B worlds as kernels see them. `radius` is that of the entities that collide, which come first; `accel` is what a
    full push weighs (0 for who cannot move), `top` the highest speed. Landmarks begin within `reach` of the middle on
    either axis; where `goals` is set, each game draws one of them as its `goal`."""

    rng: np.ndarray  # uint64 [B, WORDS]
    pos: np.ndarray  # float64 [B, E, 2]
    vel: np.ndarray  # float64 [B, N, 2]
    goal: np.ndarray  # int64 [B]
    word: np.ndarray  # float32 [B, W]: what seat 0 has said in this step
    age: np.ndarray  # int64 [B]: steps of the game so far
    force: np.ndarray  # float64 [N, 2], of the game at hand
    radius: np.ndarray
    accel: np.ndarray  # [N]
    top: np.ndarray  # [N]
    reach: float
    goals: bool


class View(NamedTuple):
    """The arrays of a frame as kernels see them; `widths [N]` are the lengths of the seats' views."""

    obs: np.ndarray
    final_obs: np.ndarray
    state: np.ndarray
    final_state: np.ndarray
    rewards: np.ndarray
    truncated: np.ndarray
    widths: np.ndarray


def world_memory(games: int, agents: int, landmarks: int, words: int) -> Arrays:
    """What B worlds must remember, all zero."""
    return {
        "rng": np.zeros((games, WORDS), np.uint64),
        "pos": np.zeros((games, agents + landmarks, 2)),
        "vel": np.zeros((games, agents, 2)),
        "goal": np.zeros(games, np.int64),
        "word": np.zeros((games, words), np.float32),
        "age": np.zeros(games, np.int64),
    }


def world_of(memory: Arrays, **fixed: Any) -> World:
    """The worlds of a memory, and what is `fixed` about them: `radius`, `accel`, `top`, `reach`, `goals`."""
    arrays: dict[str, Any] = {**memory, "force": np.zeros(memory["vel"].shape[1:])}
    return World(**arrays, **fixed)


def view_of(frame: Frame, widths: tuple[int, ...]) -> View:
    """The arrays of a frame that has a global state, not copies of them."""
    state, final = frame.state, frame.final_state
    assert state is not None and final is not None
    return View(frame.obs, frame.final_obs, state, final, frame.rewards, frame.truncated, np.array(widths, np.int64))


@kernel
def scatter(world: World, new_B: np.ndarray) -> None:
    """Begins the games marked: everything at rest and silent, where chance puts it."""
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
    """One step of the physics: pushes, collisions, motion."""
    force = world.force
    for b in range(len(world.pos)):
        for i in range(len(force)):
            x, y = _pushed(actions_BND, b, i, continuous)
            force[i, 0], force[i, 1] = x * world.accel[i], y * world.accel[i]
        _collide(world.pos, force, world.radius, b)
        _drift(world.pos, world.vel, force, world.top, b)


@kernel
def _pushed(actions_BND: np.ndarray, b: int, i: int, continuous: bool) -> tuple:
    """The direction in which an action pushes: of nothing, left, right, down, up."""
    if continuous:
        # The differences are rounded to float32, as mpe2's are.
        right = clipped(actions_BND[b, i, 2]) - clipped(actions_BND[b, i, 1])
        return right, clipped(actions_BND[b, i, 4]) - clipped(actions_BND[b, i, 3])
    choice = actions_BND[b, i, 0]
    return np.float32((choice == 2) - (choice == 1)), np.float32((choice == 4) - (choice == 3))


@kernel
def clipped(x: float) -> np.float32:
    """x between 0 and 1; 0 where it is not a number."""
    if x >= 1:
        return np.float32(1)
    return np.float32(x) if x > 0 else np.float32(0)


@inline
def _collide(pos: np.ndarray, force: np.ndarray, radius: np.ndarray, b: int) -> None:
    """Adds the forces between discs that touch; landmarks stay where they are."""
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
    """How far two discs are in each other, softly: `numpy.logaddexp(0, -gap / margin) * margin`."""
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
    """Moves the agents by their velocities, then changes those by the forces."""
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
    """From entity e to entity i of game b: right, up, and the square of the straight line."""
    x, y = pos[b, i, 0] - pos[b, e, 0], pos[b, i, 1] - pos[b, e, 1]
    return x, y, x * x + y * y


@inline
def nearest(pos: np.ndarray, b: int, first: int, last: int, e: int) -> float:
    """How far entity e of game b is from the nearest of the agents from `first` up to `last`."""
    least = math.inf
    for i in range(first, last):
        least = min(least, apart(pos, b, i, e)[2])
    return math.sqrt(least)


@inline
def touch(pos: np.ndarray, radius: np.ndarray, b: int, i: int, e: int) -> bool:
    """Whether two discs of game b overlap."""
    return math.sqrt(apart(pos, b, i, e)[2]) < radius[i] + radius[e]


@inline
def put_pair(obs: np.ndarray, b: int, i: int, at: int, pairs_BE2: np.ndarray, e: int) -> int:
    """Writes into seat i's view the place or velocity of entity e; returns where the view goes on."""
    obs[b, i, at], obs[b, i, at + 1] = pairs_BE2[b, e, 0], pairs_BE2[b, e, 1]
    return at + 2


@inline
def put_relative(obs: np.ndarray, b: int, i: int, at: int, pos: np.ndarray, first: int, last: int) -> int:
    """Writes into seat i's view where the entities from `first` up to `last`, but for itself, stand as it sees them;
    returns where the view goes on."""
    for e in range(first, last):
        if e != i:
            obs[b, i, at] = pos[b, e, 0] - pos[b, i, 0]
            obs[b, i, at + 1] = pos[b, e, 1] - pos[b, i, 1]
            at += 2
    return at


@inline
def join(obs: np.ndarray, state: np.ndarray, widths: np.ndarray, b: int) -> None:
    """Writes the global state of game b: the views of all seats, one after the other."""
    at = 0
    for i in range(len(widths)):
        for k in range(widths[i]):
            state[b, at + k] = obs[b, i, k]
        at += widths[i]


@kernel
def count(world: World, view: View, cycles: int) -> None:
    """Counts a step; where it was the game's last, keeps the last views."""
    for b in range(len(world.age)):
        world.age[b] += 1
        view.truncated[b] = world.age[b] >= cycles
        if view.truncated[b]:
            for i in range(len(view.widths)):
                for k in range(view.widths[i]):
                    view.final_obs[b, i, k] = view.obs[b, i, k]
            for k in range(view.state.shape[1]):
                view.final_state[b, k] = view.state[b, k]
