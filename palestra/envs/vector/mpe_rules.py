"""Rewards and observations of the four MPE games, compiled; in the order of the `mpe2` package.

For each game, `reward_*` writes the rewards of the step, `observe_*` the observations of the marked games, `advance_*`
plays a whole step. Shapes: `B` games, `N` seats, `D` numbers of an action.
"""

from __future__ import annotations

import math

import numpy as np

from palestra.core.accel.jit import jit
from palestra.envs.vector.mpe_physics import (
    MPEStepArrays,
    World,
    apply_physics,
    begin_games,
    clip_unit,
    count_step,
    difference,
    nearest_distance,
    overlaps,
    write_relative_positions,
    write_state,
    write_vector,
)


@jit
def advance_spread(
    world: World,
    arrays: MPEStepArrays,
    all_B: np.ndarray,
    actions_BND: np.ndarray,
    continuous: bool,
    max_cycles: int,
    local_ratio: float,
) -> None:
    """Plays a step of all games; those that reach `max_cycles` start anew in it."""
    apply_physics(world, actions_BND, continuous)
    reward_spread(world, arrays, local_ratio)
    observe_spread(world, arrays, all_B)
    count_step(world, arrays, max_cycles)
    begin_games(world, arrays.truncated)
    observe_spread(world, arrays, arrays.truncated)


@jit
def reward_spread(world: World, arrays: MPEStepArrays, local_ratio: float) -> None:
    """Writes the rewards; `local_ratio` is the weight of the agent's own reward, -1 for each other
    agent that it touches."""
    agents = world.vel.shape[1]
    for b in range(len(world.pos)):
        team = 0.0
        for e in range(agents, world.pos.shape[1]):
            team -= nearest_distance(world.pos, b, 0, agents, e)
        for i in range(agents):
            arrays.rewards[b, i] = 0
            for j in range(i):
                if overlaps(world.pos, world.radius, b, i, j):
                    arrays.rewards[b, i] -= 1
                    arrays.rewards[b, j] -= 1
        for i in range(agents):
            arrays.rewards[b, i] = team * (1 - local_ratio) + arrays.rewards[b, i] * local_ratio


@jit
def observe_spread(world: World, arrays: MPEStepArrays, which_B: np.ndarray) -> None:
    """Writes own velocity and position, landmarks, other agents; the other agents' messages, which
    follow, are always zero."""
    agents = world.vel.shape[1]
    for b in range(len(which_B)):
        if which_B[b]:
            for i in range(agents):
                at = write_vector(arrays.obs, b, i, 0, world.vel, i)
                at = write_vector(arrays.obs, b, i, at, world.pos, i)
                at = write_relative_positions(arrays.obs, b, i, at, world.pos, agents, world.pos.shape[1])
                write_relative_positions(arrays.obs, b, i, at, world.pos, 0, agents)
            write_state(arrays.obs, arrays.state, arrays.observation_sizes, b)


@jit
def advance_adversary(
    world: World, arrays: MPEStepArrays, all_B: np.ndarray, actions_BND: np.ndarray, continuous: bool, max_cycles: int
) -> None:
    """Plays a step of all games; those that reach `max_cycles` start anew in it."""
    apply_physics(world, actions_BND, continuous)
    reward_adversary(world, arrays)
    observe_adversary(world, arrays, all_B)
    count_step(world, arrays, max_cycles)
    begin_games(world, arrays.truncated)
    observe_adversary(world, arrays, arrays.truncated)


@jit
def reward_adversary(world: World, arrays: MPEStepArrays) -> None:
    """Writes the rewards: minus its distance to the goal for the adversary (agent 0); for each
    other agent the adversary's distance minus the distance of the nearest other agent."""
    agents = world.vel.shape[1]
    for b in range(len(world.pos)):
        goal = agents + world.goal[b]
        theirs = nearest_distance(world.pos, b, 0, 1, goal)
        ours = theirs - nearest_distance(world.pos, b, 1, agents, goal)
        arrays.rewards[b, 0] = -theirs
        for i in range(1, agents):
            arrays.rewards[b, i] = ours


@jit
def observe_adversary(world: World, arrays: MPEStepArrays, which_B: np.ndarray) -> None:
    """Writes the goal (not for the adversary), landmarks, other agents."""
    agents = world.vel.shape[1]
    for b in range(len(which_B)):
        if which_B[b]:
            goal = agents + world.goal[b]
            for i in range(agents):
                at = 0 if i == 0 else write_relative_positions(arrays.obs, b, i, 0, world.pos, goal, goal + 1)
                at = write_relative_positions(arrays.obs, b, i, at, world.pos, agents, world.pos.shape[1])
                write_relative_positions(arrays.obs, b, i, at, world.pos, 0, agents)
            write_state(arrays.obs, arrays.state, arrays.observation_sizes, b)


@jit
def advance_tag(
    world: World,
    arrays: MPEStepArrays,
    all_B: np.ndarray,
    actions_BND: np.ndarray,
    continuous: bool,
    max_cycles: int,
    hunters: int,
) -> None:
    """Plays a step of all games; those that reach `max_cycles` start anew in it."""
    apply_physics(world, actions_BND, continuous)
    reward_tag(world, arrays, hunters)
    observe_tag(world, arrays, all_B, hunters)
    count_step(world, arrays, max_cycles)
    begin_games(world, arrays.truncated)
    observe_tag(world, arrays, arrays.truncated, hunters)


@jit
def reward_tag(world: World, arrays: MPEStepArrays, hunters: int) -> None:
    """Writes the rewards: 10 to every hunter for each touch of a prey, -10 to that prey, which also
    pays for leaving the field."""
    for b in range(len(world.pos)):
        catches = 0
        for prey in range(hunters, world.vel.shape[1]):
            caught = 0
            for hunter in range(hunters):
                caught += overlaps(world.pos, world.radius, b, prey, hunter)
            arrays.rewards[b, prey] = -10.0 * caught - _outside(world.pos[b, prey, 0]) - _outside(world.pos[b, prey, 1])
            catches += caught
        for hunter in range(hunters):
            arrays.rewards[b, hunter] = 10.0 * catches


@jit
def _outside(x: float) -> float:
    """Returns the penalty of a good agent for its position on one axis."""
    x = abs(x)
    if x < 0.9:
        return 0.0
    if x < 1.0:
        return (x - 0.9) * 10
    return min(math.exp(2 * x - 2), 10.0)


@jit
def observe_tag(world: World, arrays: MPEStepArrays, which_B: np.ndarray, hunters: int) -> None:
    """Writes own velocity and position, obstacles, other agents, velocities of the other good agents."""
    agents = world.vel.shape[1]
    for b in range(len(which_B)):
        if which_B[b]:
            for i in range(agents):
                at = write_vector(arrays.obs, b, i, 0, world.vel, i)
                at = write_vector(arrays.obs, b, i, at, world.pos, i)
                at = write_relative_positions(arrays.obs, b, i, at, world.pos, agents, world.pos.shape[1])
                at = write_relative_positions(arrays.obs, b, i, at, world.pos, 0, agents)
                for prey in range(hunters, agents):
                    if prey != i:
                        at = write_vector(arrays.obs, b, i, at, world.vel, prey)
            write_state(arrays.obs, arrays.state, arrays.observation_sizes, b)


@jit
def advance_speaker_listener(
    world: World, arrays: MPEStepArrays, all_B: np.ndarray, actions_BND: np.ndarray, continuous: bool, max_cycles: int
) -> None:
    """Plays a step of all games; those that reach `max_cycles` start anew in it."""
    apply_physics(world, actions_BND, continuous)
    write_message(world, actions_BND, continuous)
    reward_speaker_listener(world, arrays)
    observe_speaker_listener(world, arrays, all_B)
    count_step(world, arrays, max_cycles)
    begin_games(world, arrays.truncated)
    observe_speaker_listener(world, arrays, arrays.truncated)


@jit
def write_message(world: World, actions_BND: np.ndarray, continuous: bool) -> None:
    """Writes the message of seat 0: its action if continuous, else the chosen word one-hot."""
    words = world.word.shape[1]
    for b in range(len(world.word)):
        choice = int(actions_BND[b, 0, 0])
        word = choice if 0 <= choice < words else 0
        for k in range(words):
            world.word[b, k] = clip_unit(actions_BND[b, 0, k]) if continuous else k == word


@jit
def reward_speaker_listener(world: World, arrays: MPEStepArrays) -> None:
    """Writes the rewards: minus the squared distance of the listener to its landmark, for both agents."""
    for b in range(len(world.pos)):
        arrays.rewards[b, 0] = arrays.rewards[b, 1] = -difference(world.pos, b, 1, 2 + world.goal[b])[2]


@jit
def observe_speaker_listener(world: World, arrays: MPEStepArrays, which_B: np.ndarray) -> None:
    """Writes the colour of the goal for the speaker; own velocity, landmarks and the message for the listener."""
    words = world.word.shape[1]
    for b in range(len(which_B)):
        if which_B[b]:
            at = write_vector(arrays.obs, b, 1, 0, world.vel, 1)
            at = write_relative_positions(arrays.obs, b, 1, at, world.pos, 2, world.pos.shape[1])
            for k in range(words):
                arrays.obs[b, 0, k] = 0.65 if k == world.goal[b] else 0.15
                arrays.obs[b, 1, at + k] = world.word[b, k]
            write_state(arrays.obs, arrays.state, arrays.observation_sizes, b)
