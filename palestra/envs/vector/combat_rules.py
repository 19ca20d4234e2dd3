"""Rules of combat, compiled: what a step does to the units, and what the seats and the critic observe."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from palestra.envs.vector.combat_maps import (
    FIELD_SIZE,
    KILL_REWARD,
    LOOPS_PER_STEP,
    MIN_HIT_DAMAGE,
    WIN_REWARD,
    CombatParams,
)
from palestra.envs.vector.rng import uniform
from palestra.jit import jit

NOOP, STOP, NORTH, SOUTH, EAST, WEST, ATTACK = range(7)
HEALTH, SHIELD, X, Y, COOLDOWN = range(5)
SIGHT_RANGE, ATTACK_RANGE = 9.0, 6.0
START_JITTER = 0.25
WON_GAME_RETURN = 20.0  # return of a won game


class CombatArrays(NamedTuple):
    """The arrays that the kernels change: first the env's own state, then the arrays of the frame."""

    rng: np.ndarray
    units: np.ndarray  # [B, U, 5] health, shield, x, y, loops until the next shot; a unit without health is dead
    target: np.ndarray  # [B, E] unit that each enemy attacks, -1: none yet
    last: np.ndarray  # [B, N] last actions, -1 before the first
    steps: np.ndarray  # [B]
    obs: np.ndarray
    action_mask: np.ndarray
    agent_mask: np.ndarray
    state: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    success: np.ndarray
    final_obs: np.ndarray
    final_state: np.ndarray


@jit
def _squared(units: np.ndarray, b: int, u: int, v: int) -> float:
    """Returns the squared distance of units u and v."""
    x, y = units[b, u, X] - units[b, v, X], units[b, u, Y] - units[b, v, Y]
    return x * x + y * y


@jit
def _distance(units: np.ndarray, b: int, u: int, v: int) -> float:
    return math.sqrt(_squared(units, b, u, v))


@jit
def _begin_game(g: CombatArrays, rules: CombatParams, b: int) -> None:
    for u in range(g.units.shape[1]):
        g.units[b, u, HEALTH], g.units[b, u, SHIELD], g.units[b, u, COOLDOWN] = rules.health_U[u], rules.shield_U[u], 0
        g.units[b, u, X] = rules.start_U2[u, 0] + uniform(g.rng[b], -START_JITTER, START_JITTER)
        g.units[b, u, Y] = rules.start_U2[u, 1] + uniform(g.rng[b], -START_JITTER, START_JITTER)
    g.target[b], g.last[b] = -1, -1
    g.steps[b] = 0


@jit
def _write_action_mask(action_mask: np.ndarray, units: np.ndarray, b: int, n: int) -> None:
    """Action mask of unit n: dead units can only do nothing; living units can stop, move in directions where half a
    move stays on the field, and attack living enemies within `ATTACK_RANGE`."""
    alive, x, y = units[b, n, HEALTH] > 0, units[b, n, X], units[b, n, Y]
    action_mask[b, n, NOOP], action_mask[b, n, STOP] = not alive, alive
    action_mask[b, n, NORTH], action_mask[b, n, SOUTH] = alive and y + 1 < FIELD_SIZE, alive and y >= 1
    action_mask[b, n, EAST], action_mask[b, n, WEST] = alive and x + 1 < FIELD_SIZE, alive and x >= 1
    allies = action_mask.shape[1]
    for v in range(allies, units.shape[1]):
        near = _squared(units, b, n, v) <= ATTACK_RANGE * ATTACK_RANGE
        action_mask[b, n, ATTACK + v - allies] = alive and near and units[b, v, HEALTH] > 0


@jit
def _write_body(row: np.ndarray, at: int, shield: float, kind: int, shields: bool, bits: int) -> None:
    """Writes the shield (if this side has shields on this map) and the unit-type bits from index `at` on."""
    if shields:
        row[at] = shield
        at += 1
    for bit in range(bits):
        row[at + bit] = 1.0 if kind == bit else 0.0


@jit
def _write_observations(g: CombatArrays, rules: CombatParams, b: int) -> None:
    """Writes the observations: possible moves of the unit, each enemy in sight, each other ally in sight, the unit
    itself; zeros for dead units."""
    units, action_mask, allies = g.units, g.action_mask, rules.allies
    enemies = units.shape[1] - allies
    for n in range(allies):
        row, at = g.obs[b, n], 4
        row[:] = 0
        if units[b, n, HEALTH] <= 0:
            continue
        for move in range(4):
            row[move] = action_mask[b, n, NORTH + move]
        for i in range(enemies + allies):
            v = allies + i if i < enemies else i - enemies
            if v == n:
                continue
            shields = rules.enemies_have_shields if v >= allies else rules.allies_have_shields
            far = _distance(units, b, n, v)
            if far < SIGHT_RANGE and units[b, v, HEALTH] > 0:
                row[at] = action_mask[b, n, ATTACK + i] if i < enemies else 1
                row[at + 1] = far / SIGHT_RANGE
                row[at + 2] = (units[b, v, X] - units[b, n, X]) / SIGHT_RANGE
                row[at + 3] = (units[b, v, Y] - units[b, n, Y]) / SIGHT_RANGE
                row[at + 4] = units[b, v, HEALTH] / rules.health_U[v]
                _write_body(
                    row, at + 5, units[b, v, SHIELD] / rules.shield_U[v], rules.type_U[v], shields, rules.num_type_bits
                )
            at += 5 + shields + rules.num_type_bits
        row[at] = units[b, n, HEALTH] / rules.health_U[n]
        shield = units[b, n, SHIELD] / rules.shield_U[n]
        _write_body(row, at + 1, shield, rules.type_U[n], rules.allies_have_shields, rules.num_type_bits)


@jit
def _write_state(g: CombatArrays, rules: CombatParams, b: int) -> None:
    """Writes the global state: all allies, all enemies (zeros if dead), then the last action of each ally, one-hot."""
    row, at = g.state[b], 0
    row[:] = 0
    for u in range(g.units.shape[1]):
        ally = u < rules.allies
        shields = rules.allies_have_shields if ally else rules.enemies_have_shields
        if g.units[b, u, HEALTH] > 0:
            row[at] = g.units[b, u, HEALTH] / rules.health_U[u]
            if ally:
                row[at + 1] = g.units[b, u, COOLDOWN] / rules.reload_U[u]
            row[at + 1 + ally] = (g.units[b, u, X] - FIELD_SIZE / 2) / FIELD_SIZE
            row[at + 2 + ally] = (g.units[b, u, Y] - FIELD_SIZE / 2) / FIELD_SIZE
            shield = g.units[b, u, SHIELD] / rules.shield_U[u]
            _write_body(row, at + 3 + ally, shield, rules.type_U[u], shields, rules.num_type_bits)
        at += 3 + ally + shields + rules.num_type_bits
    actions = g.action_mask.shape[2]
    for n in range(rules.allies):
        if g.last[b, n] >= 0:
            row[at + n * actions + g.last[b, n]] = 1


@jit
def _write(g: CombatArrays, rules: CombatParams, b: int) -> None:
    for n in range(rules.allies):
        g.agent_mask[b, n] = g.units[b, n, HEALTH] > 0
        _write_action_mask(g.action_mask, g.units, b, n)
    _write_observations(g, rules, b)
    _write_state(g, rules, b)


@jit
def _engage(units: np.ndarray, b: int, u: int, v: int, reach: float, speed: float, walk_U2: np.ndarray) -> int:
    """Unit u attacks v: it walks until v is in range. Returns the target of its shot, -1 if it does not shoot in this
    step."""
    far = _distance(units, b, u, v)
    if far <= reach:
        return v if units[b, u, COOLDOWN] < LOOPS_PER_STEP else -1
    step = min(speed, far - reach + 1e-9) / far  # the margin keeps rounding from leaving it out of range
    walk_U2[u, 0] = (units[b, v, X] - units[b, u, X]) * step
    walk_U2[u, 1] = (units[b, v, Y] - units[b, u, Y]) * step
    return -1


@jit
def _nearest(units: np.ndarray, b: int, u: int, start: int, stop: int) -> int:
    """Returns the living unit in start..stop-1 that is nearest to u; -1 if none is alive."""
    nearest, least = -1, np.inf
    for v in range(start, stop):
        far = _squared(units, b, u, v)
        if far < least and units[b, v, HEALTH] > 0:
            nearest, least = v, far
    return nearest


@jit
def _order(
    g: CombatArrays, rules: CombatParams, b: int, actions: np.ndarray, walk_U2: np.ndarray, shot_U: np.ndarray
) -> None:
    """Sets the walk and the target (-1: none) of every unit for this step."""
    units, allies = g.units, rules.allies
    for u in range(units.shape[1]):
        walk_U2[u, 0], walk_U2[u, 1], shot_U[u] = 0.0, 0.0, -1
        alive, speed, v = units[b, u, HEALTH] > 0, rules.speed_U[u], -1
        if u >= allies:
            if alive:
                v = g.target[b, u - allies]
                if v < 0 or units[b, v, HEALTH] <= 0 or _distance(units, b, u, v) > rules.reach_UU[u, v]:
                    v = _nearest(units, b, u, 0, allies)
                    g.target[b, u - allies] = v
        else:
            action = actions[b, u]
            if not (0 <= action < g.action_mask.shape[2] and g.action_mask[b, u, action]):
                action = STOP if alive else NOOP
            g.last[b, u] = action
            walk_U2[u, 0] = speed * ((action == EAST) - (action == WEST))
            walk_U2[u, 1] = speed * ((action == NORTH) - (action == SOUTH))
            if action >= ATTACK:
                v = allies + action - ATTACK
        if v >= 0:
            shot_U[u] = _engage(units, b, u, v, rules.reach_UU[u, v], speed, walk_U2)


@jit
def _hit(units: np.ndarray, b: int, v: int, damage: float, armour: float) -> float:
    """Applies one hit to v: first to its shield, the rest less its armour to its health. Returns the damage done."""
    absorbed, wound = min(units[b, v, SHIELD], damage), 0.0
    if absorbed < damage:
        wound = min(units[b, v, HEALTH], max(damage - absorbed - armour, MIN_HIT_DAMAGE))
    units[b, v, SHIELD] -= absorbed
    units[b, v, HEALTH] -= wound
    return absorbed + wound


@jit
def _shoot(g: CombatArrays, rules: CombatParams, b: int, shot_U: np.ndarray) -> float:
    """Applies all shots of a step, also of units that die in it. Returns the damage to enemies plus `KILL_REWARD` for
    each kill."""
    units, earned = g.units.shape[1], 0.0
    for u in range(units):
        wait = g.units[b, u, COOLDOWN] - LOOPS_PER_STEP
        if shot_U[u] >= 0:
            v = shot_U[u]
            lived, damage = g.units[b, v, HEALTH] > 0, 0.0
            for _ in range(rules.hits_U[u]):
                damage += _hit(g.units, b, v, rules.damage_UU[u, v], rules.armour_U[v])
            if u < rules.allies:
                earned += damage + (KILL_REWARD if lived and g.units[b, v, HEALTH] <= 0 else 0.0)
            wait += rules.reload_U[u]
        g.units[b, u, COOLDOWN] = max(wait, 0.0)
    return earned


@jit
def _walk(units: np.ndarray, b: int, walk_U2: np.ndarray) -> None:
    for u in range(units.shape[1]):
        units[b, u, X] = min(max(units[b, u, X] + walk_U2[u, 0], 0.0), FIELD_SIZE - 1e-6)
        units[b, u, Y] = min(max(units[b, u, Y] + walk_U2[u, 1], 0.0), FIELD_SIZE - 1e-6)


@jit
def _alive(units: np.ndarray, b: int, start: int, stop: int) -> bool:
    for u in range(start, stop):  # noqa: SIM110 - numba has no `any` of a generator
        if units[b, u, HEALTH] > 0:
            return True
    return False


@jit
def _store_final(g: CombatArrays, b: int) -> None:
    """Copies the last observations and the state of an ended game to `final_obs` and `final_state`. Loops compile ten
    times as fast as slice assignments."""
    for n in range(g.obs.shape[1]):
        for at in range(g.obs.shape[2]):
            g.final_obs[b, n, at] = g.obs[b, n, at]
    for at in range(g.state.shape[1]):
        g.final_state[b, at] = g.state[b, at]


@jit
def begin_all(g: CombatArrays, rules: CombatParams) -> None:
    for b in range(len(g.steps)):
        _begin_game(g, rules, b)
        _write(g, rules, b)


@jit
def step_all(g: CombatArrays, rules: CombatParams, actions: np.ndarray) -> None:
    units = g.units.shape[1]
    walk_U2, shot_U = np.zeros((units, 2)), np.zeros(units, np.int64)
    for b in range(len(g.steps)):
        g.steps[b] += 1
        _order(g, rules, b, actions, walk_U2, shot_U)
        earned = _shoot(g, rules, b, shot_U)
        _walk(g.units, b, walk_U2)
        allies, enemies = _alive(g.units, b, 0, rules.allies), _alive(g.units, b, rules.allies, units)
        g.success[b] = allies and not enemies
        g.terminated[b] = not (allies and enemies)
        g.truncated[b] = not g.terminated[b] and g.steps[b] >= rules.max_steps
        if g.success[b]:
            earned += WIN_REWARD
        for n in range(rules.allies):
            g.rewards[b, n] = earned * WON_GAME_RETURN / rules.max_raw_return
        _write(g, rules, b)
        if g.terminated[b] or g.truncated[b]:
            _store_final(g, b)
            _begin_game(g, rules, b)
            _write(g, rules, b)


@jit
def _weakest(g: CombatArrays, rules: CombatParams, b: int, n: int, left_U: np.ndarray) -> int:
    """Returns the attackable enemy with the least remaining health; enemies that will die anyway come last. -1 if there
    is none."""
    weakest, least = -1, np.inf
    for v in range(rules.allies, g.units.shape[1]):
        if g.action_mask[b, n, ATTACK + v - rules.allies]:
            rank = left_U[v] + (1e3 if left_U[v] <= 0 else 0.0)
            if rank < least:
                weakest, least = v, rank
    return weakest


@jit
def choose_focus_actions(g: CombatArrays, rules: CombatParams, seat: int, chosen: np.ndarray) -> None:
    """Writes the actions of the scripted player "focus" at `seat` to `chosen` int32 [B]: attack the weakest enemy that
    survives the attacks of the seats before, else move towards the nearest."""
    units, left_U = g.units, np.zeros(g.units.shape[1])
    for b in range(len(chosen)):
        for v in range(rules.allies, len(left_U)):
            left_U[v] = units[b, v, HEALTH] + units[b, v, SHIELD]
        v = -1
        for n in range(seat + 1):
            v = _weakest(g, rules, b, n, left_U) if g.agent_mask[b, n] else -1
            if v >= 0 and units[b, n, COOLDOWN] < LOOPS_PER_STEP and _distance(units, b, n, v) <= rules.reach_UU[n, v]:
                left_U[v] -= rules.hits_U[n] * (rules.damage_UU[n, v] - rules.armour_U[v])
        if not g.agent_mask[b, seat]:
            chosen[b] = NOOP
        elif v >= 0:
            chosen[b] = ATTACK + v - rules.allies
        else:
            v = _nearest(units, b, seat, rules.allies, units.shape[1])
            east, north = units[b, v, X] - units[b, seat, X], units[b, v, Y] - units[b, seat, Y]
            along, across = EAST if east > 0 else WEST, NORTH if north > 0 else SOUTH
            chosen[b] = along if abs(east) >= abs(north) else across
