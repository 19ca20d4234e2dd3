"""Rules of Overcooked, compiled: what the cooks do, what cooks, and what the seats observe."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from palestra.core.accel.jit import jit
from palestra.environments.overcooked.layouts import COUNTER, FLOOR, ONIONS, PLATES, POT, SERVING, Kitchen
from palestra.envs.batch.rng import random_below

UP, DOWN, RIGHT, LEFT, STAY, INTERACT = range(6)
NUM_DIRECTIONS = 4
NUM_ACTIONS = 6
NOTHING, ONION, PLATE, SOUP = range(4)  # what is held or lies on a counter
NUM_ITEMS = 4
CELL, FACING, HELD = range(3)  # of a cook
ONIONS_IN_SOUP = 3
COOKING_STEPS = 20
DELIVERY_REWARD = 20.0  # of both seats, for a soup
# shaped: an onion in a pot, a plate of use, a soup taken
ONION_REWARD = 3.0
PLATE_REWARD = 3.0
SOUP_REWARD = 5.0
URGENT_STEPS = 40  # fewer steps than these are left: all cells have the last channel on

# Channels of a cell in an observation. Those of tomatoes (13, 17, 19, 24) stay 0: this game has none.
OWN = 0
OTHER = 1
OWN_FACING = 2
OTHER_FACING = 6
POT_CHANNEL = 10
COUNTER_CHANNEL = 11
ONIONS_CHANNEL = 12
PLATES_CHANNEL = 14
SERVING_CHANNEL = 15
IN_POT = 16
IN_SOUP = 18
TIME_LEFT = 20
READY = 21
PLATE_CHANNEL = 22
ONION_CHANNEL = 23
URGENT = 25
NUM_CHANNELS = 26
TILE_CHANNEL = (-1, COUNTER_CHANNEL, ONIONS_CHANNEL, PLATES_CHANNEL, POT_CHANNEL, SERVING_CHANNEL)  # floor: none


class OvercookedParams(NamedTuple):
    """The options as numbers, for the kernels. `shaped_steps` is 0 if the weight of shaped rewards stays."""

    max_steps: int
    random_start: bool
    shaped_reward: float
    shaped_steps: int


class OvercookedArrays(NamedTuple):
    """The arrays that the kernels change: first the env's own state, then the arrays of the frame."""

    rng: np.ndarray
    cooks: np.ndarray  # [B, 2, 3] cell, direction faced, item held
    counters: np.ndarray  # [B, C] item that lies on a counter
    onions: np.ndarray  # [B, P] in each pot; three cook
    cooking: np.ndarray  # [B, P] steps until a pot of three is ready
    shaped: np.ndarray  # [B, 2] shaped rewards of the last step, unweighted
    steps: np.ndarray  # [B] of this episode
    played: np.ndarray  # [B] of all episodes since the reset
    obs: np.ndarray  # [B, 2, C, NUM_CHANNELS]
    final_obs: np.ndarray
    rewards: np.ndarray
    truncated: np.ndarray


@jit
def _plate_is_of_use(g: OvercookedArrays, b: int) -> bool:
    """True if fewer plates are in hands than pots are not empty, and none lies on a counter."""
    for cell in range(g.counters.shape[1]):
        if g.counters[b, cell] == PLATE:
            return False
    pots = 0
    for pot in range(g.onions.shape[1]):
        pots += g.onions[b, pot] > 0
    return (g.cooks[b, 0, HELD] == PLATE) + (g.cooks[b, 1, HELD] == PLATE) < pots


@jit
def _use_pot(g: OvercookedArrays, b: int, n: int, pot: int) -> None:
    """Puts the held onion into a pot that is not full, or takes a ready soup with the held plate."""
    item = g.cooks[b, n, HELD]
    if item == ONION and g.onions[b, pot] < ONIONS_IN_SOUP:
        g.cooks[b, n, HELD] = NOTHING
        g.onions[b, pot] += 1
        g.shaped[b, n] += ONION_REWARD
        if g.onions[b, pot] == ONIONS_IN_SOUP:
            g.cooking[b, pot] = COOKING_STEPS
    elif item == PLATE and g.onions[b, pot] == ONIONS_IN_SOUP and g.cooking[b, pot] == 0:
        g.cooks[b, n, HELD] = SOUP
        g.onions[b, pot] = 0
        g.shaped[b, n] += SOUP_REWARD


@jit
def _interact(g: OvercookedArrays, kitchen: Kitchen, b: int, n: int) -> bool:
    """Uses what cook n faces; returns whether a soup was delivered."""
    item = g.cooks[b, n, HELD]
    cell = g.cooks[b, n, CELL] + kitchen.ahead_D[g.cooks[b, n, FACING]]
    tile = kitchen.tile_C[cell]
    if tile == POT:
        _use_pot(g, b, n, kitchen.pot_C[cell])
    elif tile == COUNTER:
        if item == NOTHING or g.counters[b, cell] == NOTHING:
            g.cooks[b, n, HELD], g.counters[b, cell] = g.counters[b, cell], item
    elif tile == ONIONS and item == NOTHING:
        g.cooks[b, n, HELD] = ONION
    elif tile == PLATES and item == NOTHING:
        if _plate_is_of_use(g, b):
            g.shaped[b, n] += PLATE_REWARD
        g.cooks[b, n, HELD] = PLATE
    elif tile == SERVING and item == SOUP:
        g.cooks[b, n, HELD] = NOTHING
        return True
    return False


@jit
def _move(cooks: np.ndarray, kitchen: Kitchen, b: int, chosen_N: np.ndarray, to_N: np.ndarray) -> None:
    """Turns and moves both cooks; neither moves if they want one cell (who stays: its own) or swap."""
    for n in range(2):
        to_N[n] = cooks[b, n, CELL]
        if chosen_N[n] < NUM_DIRECTIONS:
            cooks[b, n, FACING] = chosen_N[n]
            ahead = cooks[b, n, CELL] + kitchen.ahead_D[chosen_N[n]]
            if kitchen.tile_C[ahead] == FLOOR:
                to_N[n] = ahead
    swapped = to_N[0] == cooks[b, 1, CELL] and to_N[1] == cooks[b, 0, CELL]
    if to_N[0] != to_N[1] and not swapped:
        cooks[b, 0, CELL], cooks[b, 1, CELL] = to_N[0], to_N[1]


@jit
def _write_item(obs: np.ndarray, b: int, cell: int, item: int) -> None:
    for n in range(2):
        if item == ONION:
            obs[b, n, cell, ONION_CHANNEL] = 1
        elif item == PLATE:
            obs[b, n, cell, PLATE_CHANNEL] = 1
        elif item == SOUP:
            obs[b, n, cell, IN_SOUP], obs[b, n, cell, READY] = ONIONS_IN_SOUP, 1


@jit
def _write_floor(obs: np.ndarray, cooks: np.ndarray, b: int, cell: int) -> None:
    for n in range(2):
        if cooks[b, n, CELL] == cell:
            facing = cooks[b, n, FACING]
            obs[b, n, cell, OWN], obs[b, n, cell, OWN_FACING + facing] = 1, 1
            obs[b, 1 - n, cell, OTHER], obs[b, 1 - n, cell, OTHER_FACING + facing] = 1, 1
            _write_item(obs, b, cell, cooks[b, n, HELD])


@jit
def _write_pot(obs: np.ndarray, b: int, cell: int, onions: int, left: int) -> None:
    """Writes a pot: its onions until it cooks, then the soup's onions and the time left. As in JaxMARL, a pot cooks
    from the step in which its third onion comes."""
    cooks = onions == ONIONS_IN_SOUP and left < COOKING_STEPS
    for n in range(2):
        obs[b, n, cell, IN_POT] = 0 if cooks else onions
        obs[b, n, cell, IN_SOUP] = onions if cooks else 0
        obs[b, n, cell, TIME_LEFT] = left if cooks else 0
        obs[b, n, cell, READY] = cooks and left == 0


@jit
def _write_cell(g: OvercookedArrays, kitchen: Kitchen, rules: OvercookedParams, b: int, cell: int) -> None:
    """Writes all channels of a cell, as both seats see them."""
    urgent = rules.max_steps - g.steps[b] < URGENT_STEPS
    tile = kitchen.tile_C[cell]
    for n in range(2):
        for channel in range(NUM_CHANNELS):
            g.obs[b, n, cell, channel] = 0
        g.obs[b, n, cell, URGENT] = urgent
        if TILE_CHANNEL[tile] >= 0:
            g.obs[b, n, cell, TILE_CHANNEL[tile]] = tile != COUNTER or g.counters[b, cell] == NOTHING
    if tile == FLOOR:
        _write_floor(g.obs, g.cooks, b, cell)
    elif tile == POT:
        pot = kitchen.pot_C[cell]
        _write_pot(g.obs, b, cell, g.onions[b, pot], g.cooking[b, pot])
    elif tile == COUNTER:
        _write_item(g.obs, b, cell, g.counters[b, cell])


@jit
def _write_all(g: OvercookedArrays, kitchen: Kitchen, rules: OvercookedParams, b: int) -> None:
    for cell in range(len(kitchen.tile_C)):
        _write_cell(g, kitchen, rules, b, cell)


@jit
def _cook(g: OvercookedArrays, kitchen: Kitchen, rules: OvercookedParams, b: int) -> None:
    """Lets the full pots cook for a step, and writes them."""
    for pot in range(len(kitchen.pots_P)):
        if g.cooking[b, pot] > 0:
            g.cooking[b, pot] -= 1
            _write_cell(g, kitchen, rules, b, kitchen.pots_P[pot])


@jit
def _write_changes(
    g: OvercookedArrays, kitchen: Kitchen, rules: OvercookedParams, b: int, chosen_N: np.ndarray, from_N: np.ndarray
) -> None:
    """Writes the cells that actions may have changed: where the cooks were and are, and what they used."""
    for n in range(2):
        cell = g.cooks[b, n, CELL]
        if chosen_N[n] != STAY:
            _write_cell(g, kitchen, rules, b, cell)
        if cell != from_N[n]:
            _write_cell(g, kitchen, rules, b, from_N[n])
        if chosen_N[n] == INTERACT:
            _write_cell(g, kitchen, rules, b, cell + kitchen.ahead_D[g.cooks[b, n, FACING]])


@jit
def _begin_game(g: OvercookedArrays, kitchen: Kitchen, rules: OvercookedParams, b: int) -> None:
    """Begins an episode: cooks face random directions; a random start also draws their cells and what they hold, and
    what is in the pots, evenly from nothing to a ready soup."""
    stream = g.rng[b]
    spots = len(kitchen.floor_F)
    g.steps[b] = 0
    for cell in range(g.counters.shape[1]):
        g.counters[b, cell] = NOTHING
    for n in range(2):
        g.cooks[b, n, CELL], g.cooks[b, n, HELD] = kitchen.start_N[n], NOTHING
        g.cooks[b, n, FACING] = random_below(stream, NUM_DIRECTIONS)
        if rules.random_start:
            g.cooks[b, n, HELD] = random_below(stream, NUM_ITEMS)
    if rules.random_start:
        first = random_below(stream, spots)
        second = random_below(stream, spots - 1)
        g.cooks[b, 0, CELL] = kitchen.floor_F[first]
        g.cooks[b, 1, CELL] = kitchen.floor_F[second + (second >= first)]
    for pot in range(g.onions.shape[1]):
        fill = random_below(stream, ONIONS_IN_SOUP + COOKING_STEPS + 1) if rules.random_start else 0
        g.onions[b, pot] = min(fill, ONIONS_IN_SOUP)
        g.cooking[b, pot] = ONIONS_IN_SOUP + COOKING_STEPS - fill if fill >= ONIONS_IN_SOUP else 0


@jit
def _pay(g: OvercookedArrays, rules: OvercookedParams, b: int, delivered: int) -> None:
    weight = rules.shaped_reward
    if rules.shaped_steps > 0:
        weight *= max(0.0, 1.0 - g.played[b] / rules.shaped_steps)
    for n in range(2):
        g.rewards[b, n] = DELIVERY_REWARD * delivered + weight * g.shaped[b, n]


@jit
def _store_final(g: OvercookedArrays, b: int) -> None:
    for n in range(2):
        for cell in range(g.obs.shape[2]):
            for channel in range(NUM_CHANNELS):
                g.final_obs[b, n, cell, channel] = g.obs[b, n, cell, channel]


@jit
def begin_all(g: OvercookedArrays, kitchen: Kitchen, rules: OvercookedParams) -> None:
    """Starts a new game in every place."""
    for b in range(len(g.steps)):
        g.played[b] = 0
        g.shaped[b] = 0
        _begin_game(g, kitchen, rules, b)
        _write_all(g, kitchen, rules, b)


@jit
def step_all(g: OvercookedArrays, kitchen: Kitchen, rules: OvercookedParams, actions: np.ndarray) -> None:
    """Plays a step of every game; one that ends starts anew in it."""
    chosen_N = np.zeros(2, np.int64)
    from_N = np.zeros(2, np.int64)
    to_N = np.zeros(2, np.int64)
    for b in range(len(g.steps)):
        delivered = 0
        for n in range(2):
            chosen_N[n] = actions[b, n] if 0 <= actions[b, n] < NUM_ACTIONS else STAY
            from_N[n] = g.cooks[b, n, CELL]
            g.shaped[b, n] = 0
        for n in range(2):  # the first seat before the second, both before either moves
            if chosen_N[n] == INTERACT:
                delivered += _interact(g, kitchen, b, n)
        _move(g.cooks, kitchen, b, chosen_N, to_N)
        _pay(g, rules, b, delivered)
        g.steps[b] += 1
        g.played[b] += 1
        g.truncated[b] = g.steps[b] >= rules.max_steps
        _cook(g, kitchen, rules, b)
        _write_changes(g, kitchen, rules, b, chosen_N, from_N)
        if rules.max_steps - g.steps[b] == URGENT_STEPS - 1:
            _write_all(g, kitchen, rules, b)
        if g.truncated[b]:
            _store_final(g, b)
            _begin_game(g, kitchen, rules, b)
            _write_all(g, kitchen, rules, b)
