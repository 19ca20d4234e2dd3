"""Rules of combat, compiled: what a step does to the units, and what the seats and the critic observe."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from palestra.core.accel.jit import jit, jit_inline
from palestra.environments.combat.maps import (
    ARMOUR,
    FIELD_SIZE,
    FULL_HEALTH,
    FULL_SHIELD,
    HITS,
    KILL_REWARD,
    LOOPS_PER_STEP,
    MIN_HIT_DAMAGE,
    RELOAD,
    SPEED,
    TYPE_BIT,
    WIN_REWARD,
    CombatParams,
    StartParams,
)
from palestra.environments.combat.start import COOLDOWN, HEALTH, SHIELD, X, Y, begin_battle
from palestra.envs.batch.native import store_final

NOOP, STOP, NORTH, SOUTH, EAST, WEST, ATTACK = range(7)
SIGHT_RANGE = 9.0
ATTACK_RANGE = 6.0
WON_GAME_RETURN = 20.0  # return of a won game


class CombatArrays(NamedTuple):
    """The arrays that the kernels change: first the env's own state, then the arrays of the frame."""

    rng: np.ndarray
    units: np.ndarray  # [B, U, 5] health, shield, x, y, loops until the next shot; a unit without health is dead
    types: np.ndarray  # [B, U] unit types
    max_return: np.ndarray  # [B] total reward of a won game, before scaling
    facing: np.ndarray  # [B, N] the move whose direction each ally looks in
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
def _squared_distance(units: np.ndarray, b: int, u: int, v: int) -> float:
    """Returns the squared distance of units u and v."""
    x = units[b, u, X] - units[b, v, X]
    y = units[b, u, Y] - units[b, v, Y]
    return x * x + y * y


@jit
def _distance(units: np.ndarray, b: int, u: int, v: int) -> float:
    return math.sqrt(_squared_distance(units, b, u, v))


@jit  # these three are called only with a cone, and slow every step down if they are inlined
def _in_cone(units: np.ndarray, b: int, n: int, v: int, facing: int) -> bool:
    """True if unit v is within 45 degrees of the direction of the move `facing` from ally n."""
    x = units[b, v, X] - units[b, n, X]
    y = units[b, v, Y] - units[b, n, Y]
    if facing == EAST:
        return x >= abs(y)
    if facing == WEST:
        return -x >= abs(y)
    if facing == NORTH:
        return y >= abs(x)
    return -y >= abs(x)


@jit
def _mask_outside_cone(action_mask: np.ndarray, units: np.ndarray, b: int, n: int, facing: int) -> None:
    allies = action_mask.shape[1]
    for v in range(allies, units.shape[1]):
        if not _in_cone(units, b, n, v, facing):
            action_mask[b, n, ATTACK + v - allies] = False


@jit_inline
def _write_action_mask(action_mask: np.ndarray, units: np.ndarray, b: int, n: int, facing: int, has_cone: bool) -> None:
    """Writes the action mask of unit n: dead units can only do nothing; living units can stop, move in directions where
    half a move stays on the field, and attack living enemies within `ATTACK_RANGE` (and in the cone)."""
    alive = units[b, n, HEALTH] > 0
    x = units[b, n, X]
    y = units[b, n, Y]
    action_mask[b, n, NOOP], action_mask[b, n, STOP] = not alive, alive
    action_mask[b, n, NORTH], action_mask[b, n, SOUTH] = alive and y + 1 < FIELD_SIZE, alive and y >= 1
    action_mask[b, n, EAST], action_mask[b, n, WEST] = alive and x + 1 < FIELD_SIZE, alive and x >= 1
    allies = action_mask.shape[1]
    for v in range(allies, units.shape[1]):
        near = _squared_distance(units, b, n, v) <= ATTACK_RANGE * ATTACK_RANGE
        action_mask[b, n, ATTACK + v - allies] = alive and near and units[b, v, HEALTH] > 0
    if has_cone:
        _mask_outside_cone(action_mask, units, b, n, facing)


@jit_inline
def _write_body(
    row: np.ndarray, at: int, shield: float, stats_KF: np.ndarray, kind: int, shields: bool, bits: int
) -> None:
    """Writes the share of its shield that is left (if its side has any) and its type bits, from `at` on."""
    if shields:
        full = stats_KF[kind, FULL_SHIELD]
        row[at] = shield / full if full else 0.0
        at += 1
    for bit in range(bits):
        row[at + bit] = 1.0 if stats_KF[kind, TYPE_BIT] == bit else 0.0


@jit
def _write_facing(row: np.ndarray, at: int, facing: int) -> None:
    row[at] = (facing == EAST) - (facing == WEST)
    row[at + 1] = (facing == NORTH) - (facing == SOUTH)


@jit_inline
def _write_observations(g: CombatArrays, rules: CombatParams, b: int) -> None:
    """Writes the observations: moves, enemies and other allies in sight, the unit; zeros for dead units."""
    units = g.units
    action_mask = g.action_mask
    types = g.types
    allies = rules.allies
    bits = rules.num_type_bits
    stats_KF = rules.stats_KF
    cone = rules.has_cone
    enemies = units.shape[1] - allies
    for n in range(allies):
        row = g.obs[b, n]
        at = 4
        row[:] = 0
        if units[b, n, HEALTH] <= 0:
            continue
        for move in range(4):
            row[move] = action_mask[b, n, NORTH + move]
        facing = g.facing[b, n]
        for i in range(enemies + allies):
            v = allies + i if i < enemies else i - enemies
            if v == n:
                continue
            shields = rules.enemies_have_shields if v >= allies else rules.allies_have_shields
            x = units[b, v, X] - units[b, n, X]
            y = units[b, v, Y] - units[b, n, Y]
            squared = x * x + y * y
            near = squared < SIGHT_RANGE * SIGHT_RANGE
            if near and units[b, v, HEALTH] > 0 and (not cone or _in_cone(units, b, n, v, facing)):
                row[at] = action_mask[b, n, ATTACK + i] if i < enemies else 1
                row[at + 1] = math.sqrt(squared) / SIGHT_RANGE
                row[at + 2] = x / SIGHT_RANGE
                row[at + 3] = y / SIGHT_RANGE
                row[at + 4] = units[b, v, HEALTH] / stats_KF[types[b, v], FULL_HEALTH]
                _write_body(row, at + 5, units[b, v, SHIELD], stats_KF, types[b, v], shields, bits)
            at += 5 + shields + bits
        shields = rules.allies_have_shields
        row[at] = units[b, n, HEALTH] / stats_KF[types[b, n], FULL_HEALTH]
        _write_body(row, at + 1, units[b, n, SHIELD], stats_KF, types[b, n], shields, bits)
        if cone:
            _write_facing(row, at + 1 + shields + bits, facing)


@jit_inline
def _write_state(g: CombatArrays, rules: CombatParams, b: int) -> None:
    """Writes the global state: all allies, all enemies (zeros if dead), then the last action of each ally, one-hot."""
    row = g.state[b]
    at = 0
    units = g.units
    bits = rules.num_type_bits
    row[:] = 0
    for u in range(units.shape[1]):
        ally = u < rules.allies
        shields = rules.allies_have_shields if ally else rules.enemies_have_shields
        end = at + 3 + ally + shields + bits
        if units[b, u, HEALTH] > 0:
            kind = g.types[b, u]
            row[at] = units[b, u, HEALTH] / rules.stats_KF[kind, FULL_HEALTH]
            if ally:
                row[at + 1] = units[b, u, COOLDOWN] / rules.stats_KF[kind, RELOAD]
            row[at + 1 + ally] = (units[b, u, X] - FIELD_SIZE / 2) / FIELD_SIZE
            row[at + 2 + ally] = (units[b, u, Y] - FIELD_SIZE / 2) / FIELD_SIZE
            _write_body(row, at + 3 + ally, units[b, u, SHIELD], rules.stats_KF, kind, shields, bits)
            if ally and rules.has_cone:
                _write_facing(row, end, g.facing[b, u])
        at = end + (2 if ally and rules.has_cone else 0)
    actions = g.action_mask.shape[2]
    for n in range(rules.allies):
        if g.last[b, n] >= 0:
            row[at + n * actions + g.last[b, n]] = 1


@jit_inline
def _write(g: CombatArrays, rules: CombatParams, b: int) -> None:
    for n in range(rules.allies):
        g.agent_mask[b, n] = g.units[b, n, HEALTH] > 0
        _write_action_mask(g.action_mask, g.units, b, n, g.facing[b, n], rules.has_cone)
    _write_observations(g, rules, b)
    _write_state(g, rules, b)


@jit
def _engage(units: np.ndarray, b: int, u: int, v: int, reach: float, speed: float, walk_U2: np.ndarray) -> int:
    """Lets unit u attack v, or walk until v is in range. Returns the target of its shot, -1: none."""
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
    nearest = -1
    least = np.inf
    for v in range(start, stop):
        far = _squared_distance(units, b, u, v)
        if far < least and units[b, v, HEALTH] > 0:
            nearest = v
            least = far
    return nearest


@jit_inline
def _order(
    g: CombatArrays, rules: CombatParams, b: int, actions: np.ndarray, walk_U2: np.ndarray, shot_U: np.ndarray
) -> None:
    """Sets the walk and the target (-1: none) of every unit for this step."""
    units = g.units
    types = g.types
    allies = rules.allies
    reach_KK = rules.reach_KK
    for u in range(units.shape[1]):
        walk_U2[u, 0], walk_U2[u, 1], shot_U[u] = 0.0, 0.0, -1
        alive = units[b, u, HEALTH] > 0
        kind = types[b, u]
        speed = rules.stats_KF[types[b, u], SPEED]
        v = -1
        if u >= allies:
            if alive:
                v = g.target[b, u - allies]
                if v < 0 or units[b, v, HEALTH] <= 0 or _distance(units, b, u, v) > reach_KK[kind, types[b, v]]:
                    v = _nearest(units, b, u, 0, allies)
                    g.target[b, u - allies] = v
        else:
            action = actions[b, u]
            if not (0 <= action < g.action_mask.shape[2] and g.action_mask[b, u, action]):
                action = STOP if alive else NOOP
            g.last[b, u] = action
            if NORTH <= action <= WEST:
                g.facing[b, u] = action
            walk_U2[u, 0] = speed * ((action == EAST) - (action == WEST))
            walk_U2[u, 1] = speed * ((action == NORTH) - (action == SOUTH))
            if action >= ATTACK:
                v = allies + action - ATTACK
        if v >= 0:
            shot_U[u] = _engage(units, b, u, v, reach_KK[kind, types[b, v]], speed, walk_U2)


@jit
def _hit(units: np.ndarray, b: int, v: int, damage: float, armour: float) -> float:
    """Applies one hit to v: first to its shield, the rest less its armour to its health. Returns the damage done."""
    absorbed = min(units[b, v, SHIELD], damage)
    wound = 0.0
    if absorbed < damage:
        wound = min(units[b, v, HEALTH], max(damage - absorbed - armour, MIN_HIT_DAMAGE))
    units[b, v, SHIELD] -= absorbed
    units[b, v, HEALTH] -= wound
    return absorbed + wound


@jit_inline
def _shoot(g: CombatArrays, rules: CombatParams, b: int, shot_U: np.ndarray) -> float:
    """Applies all shots of a step, also of units that die in it. Returns what the allies' shots earn."""
    units = g.units.shape[1]
    types = g.types
    earned = 0.0
    for u in range(units):
        kind = types[b, u]
        wait = g.units[b, u, COOLDOWN] - LOOPS_PER_STEP
        if shot_U[u] >= 0:
            v = shot_U[u]
            lived = g.units[b, v, HEALTH] > 0
            damage = 0.0
            for _ in range(int(rules.stats_KF[kind, HITS])):
                damage += _hit(g.units, b, v, rules.damage_KK[kind, types[b, v]], rules.stats_KF[types[b, v], ARMOUR])
            if u < rules.allies:
                earned += damage + (KILL_REWARD if lived and g.units[b, v, HEALTH] <= 0 else 0.0)
            wait += rules.stats_KF[kind, RELOAD]
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
def _restart(g: CombatArrays, rules: CombatParams, start: StartParams, b: int) -> None:
    begin_battle(g, start, rules.stats_KF, rules.allies, b)
    g.target[b], g.last[b], g.facing[b] = -1, -1, EAST
    g.steps[b] = 0
    _write(g, rules, b)


@jit
def begin_all(g: CombatArrays, rules: CombatParams, start: StartParams) -> None:
    """Starts a new battle in every game."""
    for b in range(len(g.steps)):
        _restart(g, rules, start, b)


@jit
def step_all(g: CombatArrays, rules: CombatParams, start: StartParams, actions: np.ndarray) -> None:
    """Plays a step of every game; one that ends starts anew in it."""
    units = g.units.shape[1]
    walk_U2 = np.zeros((units, 2))
    shot_U = np.zeros(units, np.int64)
    for b in range(len(g.steps)):
        g.steps[b] += 1
        _order(g, rules, b, actions, walk_U2, shot_U)
        earned = _shoot(g, rules, b, shot_U)
        _walk(g.units, b, walk_U2)
        allies = _alive(g.units, b, 0, rules.allies)
        enemies = _alive(g.units, b, rules.allies, units)
        g.success[b] = allies and not enemies
        g.terminated[b] = not (allies and enemies)
        g.truncated[b] = not g.terminated[b] and g.steps[b] >= rules.max_steps
        if g.success[b]:
            earned += WIN_REWARD
        for n in range(rules.allies):
            g.rewards[b, n] = earned * WON_GAME_RETURN / g.max_return[b]
        _write(g, rules, b)
        if g.terminated[b] or g.truncated[b]:
            store_final(g, b)
            _restart(g, rules, start, b)


@jit
def _weakest(g: CombatArrays, rules: CombatParams, b: int, n: int, left_U: np.ndarray) -> int:
    """Returns the attackable enemy with the least health left, those that die anyway last; -1: none."""
    weakest = -1
    least = np.inf
    for v in range(rules.allies, g.units.shape[1]):
        if g.action_mask[b, n, ATTACK + v - rules.allies]:
            rank = left_U[v] + (1e3 if left_U[v] <= 0 else 0.0)
            if rank < least:
                weakest = v
                least = rank
    return weakest


@jit
def choose_focus_actions(g: CombatArrays, rules: CombatParams, seat: int, chosen: np.ndarray) -> None:
    """Writes the actions of the scripted player "focus" at `seat` to `chosen` int32 [B]: attack the weakest enemy that
    survives the attacks of the seats before, else move towards the nearest."""
    units = g.units
    left_U = np.zeros(g.units.shape[1])
    for b in range(len(chosen)):
        for v in range(rules.allies, len(left_U)):
            left_U[v] = units[b, v, HEALTH] + units[b, v, SHIELD]
        v = -1
        for n in range(seat + 1):
            v = _weakest(g, rules, b, n, left_U) if g.agent_mask[b, n] else -1
            if v < 0 or units[b, n, COOLDOWN] >= LOOPS_PER_STEP:
                continue
            kind = g.types[b, n]
            other = g.types[b, v]
            if _distance(units, b, n, v) <= rules.reach_KK[kind, other]:
                left_U[v] -= rules.stats_KF[kind, HITS] * (rules.damage_KK[kind, other] - rules.stats_KF[other, ARMOUR])
        if not g.agent_mask[b, seat]:
            chosen[b] = NOOP
        elif v >= 0:
            chosen[b] = ATTACK + v - rules.allies
        else:
            v = _nearest(units, b, seat, rules.allies, units.shape[1])
            east = units[b, v, X] - units[b, seat, X]
            north = units[b, v, Y] - units[b, seat, Y]
            if abs(east) >= abs(north):
                chosen[b] = EAST if east > 0 else WEST
            else:
                chosen[b] = NORTH if north > 0 else SOUTH
