"""Compiled start of a battle of `combat`: the unit types and places of an episode, drawn as in SMACv2 (Ellis et al.,
2023, section 4) if so configured. `g` are the `CombatArrays` of the env."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np

from palestra.core.accel.jit import jit
from palestra.environments.combat.maps import FIELD_SIZE, FULL_HEALTH, FULL_SHIELD, KILL_REWARD, WIN_REWARD, StartParams
from palestra.envs.batch.rng import random_below, uniform

HEALTH, SHIELD, X, Y, COOLDOWN = range(5)
START_JITTER = 0.25
GROUP_SPREAD = 1.0  # units of one group of `surround` stand within this of its place: in StarCraft none overlap
Start = Literal["columns", "reflect", "surround", "surround_and_reflect"]
COLUMNS, REFLECT, SURROUND, EITHER = range(len(get_args(Start)))
MIDDLE = FIELD_SIZE / 2
LANE = 2.0  # distance that `reflect` and `surround` keep between the sides


@jit
def _draw_types(g: Any, share_K: np.ndarray, allies: int, b: int) -> None:
    """Draws a type for every ally; enemies have the same in order, those beyond the allies their own."""
    for u in range(g.types.shape[1]):
        if allies <= u < 2 * allies:
            g.types[b, u] = g.types[b, u - allies]
            continue
        dice = uniform(g.rng[b], 0.0, 1.0)
        kind = 0
        while dice >= share_K[kind]:
            kind += 1
        g.types[b, u] = kind


@jit
def _reflect(g: Any, allies: int, b: int) -> None:
    """Places allies in the left half, enemies at their mirror images; those beyond the allies anywhere."""
    for u in range(g.units.shape[1]):
        if allies <= u < 2 * allies:
            g.units[b, u, X] = FIELD_SIZE - g.units[b, u - allies, X]
            g.units[b, u, Y] = g.units[b, u - allies, Y]
            continue
        x = uniform(g.rng[b], 0.0, MIDDLE - LANE / 2)
        g.units[b, u, X] = x if u < allies else FIELD_SIZE - x
        g.units[b, u, Y] = uniform(g.rng[b], 0.0, FIELD_SIZE)


@jit
def _surround(g: Any, allies: int, b: int) -> None:
    """Places allies in the middle, enemies in one to four groups, each on another half diagonal."""
    rng = g.rng[b]
    groups = 1 + random_below(rng, 4)
    corners = np.arange(4)
    along = np.zeros(4)
    for i in range(groups):
        j = i + random_below(rng, 4 - i)
        corners[i], corners[j] = corners[j], corners[i]
        along[i] = uniform(rng, 0.0, MIDDLE - LANE)
    for u in range(g.units.shape[1]):
        x = MIDDLE
        y = MIDDLE
        if u >= allies:
            i = random_below(rng, groups)
            x = along[i] if corners[i] < 2 else FIELD_SIZE - along[i]
            y = along[i] if corners[i] % 2 == 0 else FIELD_SIZE - along[i]
        g.units[b, u, X] = x + uniform(rng, -GROUP_SPREAD, GROUP_SPREAD)
        g.units[b, u, Y] = y + uniform(rng, -GROUP_SPREAD, GROUP_SPREAD)


@jit
def _columns(g: Any, place_U2: np.ndarray, b: int) -> None:
    for u in range(g.units.shape[1]):
        g.units[b, u, X] = place_U2[u, 0] + uniform(g.rng[b], -START_JITTER, START_JITTER)
        g.units[b, u, Y] = place_U2[u, 1] + uniform(g.rng[b], -START_JITTER, START_JITTER)


@jit
def begin_battle(g: Any, start: StartParams, stats_KF: np.ndarray, allies: int, b: int) -> None:
    """Writes the types, places and full health of all units of game b, and the total reward of winning it."""
    if len(start.type_share_K):
        _draw_types(g, start.type_share_K, allies, b)
    else:
        for u in range(g.types.shape[1]):
            g.types[b, u] = start.type_U[u]
    kind = start.start
    if kind == EITHER:
        kind = REFLECT if uniform(g.rng[b], 0.0, 1.0) < 0.5 else SURROUND
    if kind == COLUMNS:
        _columns(g, start.place_U2, b)
    elif kind == REFLECT:
        _reflect(g, allies, b)
    else:
        _surround(g, allies, b)
    total = 0.0
    for u in range(g.units.shape[1]):
        health = stats_KF[g.types[b, u], FULL_HEALTH]
        shield = stats_KF[g.types[b, u], FULL_SHIELD]
        g.units[b, u, HEALTH], g.units[b, u, SHIELD], g.units[b, u, COOLDOWN] = health, shield, 0
        g.units[b, u, X] = min(max(g.units[b, u, X], 0.0), FIELD_SIZE - 1e-6)
        g.units[b, u, Y] = min(max(g.units[b, u, Y], 0.0), FIELD_SIZE - 1e-6)
        if u >= allies:
            total += health + shield + KILL_REWARD
    g.max_return[b] = total + WIN_REWARD
