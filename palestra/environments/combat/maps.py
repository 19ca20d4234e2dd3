"""Maps and unit types of `combat`, with the numbers of StarCraft II."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np

CombatMap = Literal[
    "3m", "8m", "25m", "8m_vs_9m", "10m_vs_11m", "27m_vs_30m", "2s3z", "3s5z", "3s_vs_3z", "3s_vs_4z", "3s_vs_5z"
]
MAPS: dict[str, tuple[str, str, int]] = {  # allies, enemies, steps
    "3m": ("3m", "3m", 60),
    "8m": ("8m", "8m", 120),
    "25m": ("25m", "25m", 150),
    "8m_vs_9m": ("8m", "9m", 120),
    "10m_vs_11m": ("10m", "11m", 150),
    "27m_vs_30m": ("27m", "30m", 180),
    "2s3z": ("2s3z", "2s3z", 120),
    "3s5z": ("3s5z", "3s5z", 150),
    "3s_vs_3z": ("3s", "3z", 150),
    "3s_vs_4z": ("3s", "4z", 200),
    "3s_vs_5z": ("3s", "5z", 250),
}
FIELD_SIZE = 32.0
FRONT_COLUMN_X = (9.0, 23.0)  # x of the front columns
MIN_HIT_DAMAGE = 0.5  # minimum damage of a hit on health, for any armour
LOOPS_PER_STEP = 8.0  # game loops per step
LOOPS_PER_SECOND = 22.4
# rewards, in units of damage
KILL_REWARD = 10.0
WIN_REWARD = 200.0


@dataclass(frozen=True)
class UnitType:
    """A unit type in StarCraft's numbers: `hits_per_shot` hits per shot of `damage` (plus `bonus_damage` against
    armoured units), `reload_s` in seconds, `speed` per second, `range` between the edges of two units, each with its
    `radius`."""

    health: float
    shield: float
    armour: float
    is_armoured: bool
    damage: float
    bonus_damage: float
    hits_per_shot: int
    reload_s: float
    range: float
    radius: float
    speed: float


UNIT_TYPES = {
    "m": UnitType(45, 0, 0, False, 6, 0, 1, 0.61, 5.0, 0.375, 3.15),
    "s": UnitType(80, 80, 1, True, 13, 5, 1, 1.34, 6.0, 0.625, 4.13),
    "z": UnitType(100, 50, 1, False, 8, 0, 2, 0.86, 0.1, 0.5, 3.15),
}
TYPE_ORDER = "szm"  # types by number; in observations a map's types have bits in this order
TYPE_NAMES = {"marine": "m", "stalker": "s", "zealot": "z"}
RANDOM_STEPS = 200  # step limit of battles of random types, as in SMACv2


FULL_HEALTH, FULL_SHIELD, RELOAD, SPEED, ARMOUR, HITS, TYPE_BIT = range(7)  # columns of `stats_KF`


class CombatParams(NamedTuple):
    """A map as numbers, for the kernels of a step. K is the unit types in the order of `TYPE_ORDER`.

    `stats_KF` has their numbers: health and shield when full, loops between shots, distance per step, armour, hits per
    shot, and the index of the type's bit in observations (-1: none). `damage_KK` is the damage of each hit of a shot,
    `reach_KK` the weapon range from centre to centre. The arrays are few, because kernels with many arguments are not
    inlined, which would slow down every step.
    """

    allies: int
    max_steps: int
    num_type_bits: int
    allies_have_shields: bool
    enemies_have_shields: bool
    has_cone: bool  # units see and attack a quarter of the circle around them
    stats_KF: np.ndarray
    damage_KK: np.ndarray
    reach_KK: np.ndarray


class StartParams(NamedTuple):
    """Parameters of the start of a map's battles. U is all units, allies first."""

    start: int  # number of the kind of start, see combat_start
    place_U2: np.ndarray  # places of `columns`
    type_U: np.ndarray
    type_share_K: np.ndarray  # cumulative shares of the types; of length 0: each unit has its `type_U`


def _army(text: str) -> list[str]:
    """Returns the unit types of an army such as "2s3z", one letter per unit."""
    groups = re.findall(r"([0-9]+)([a-z])", text)
    return list(chain.from_iterable(letter * int(count) for count, letter in groups))


def _columns(size: int, front: float, back: float) -> list[tuple[float, float]]:
    """Returns the starting places (x, y) of an army: columns of up to nine units, one apart."""
    places = []
    for i in range(size):
        column, row = divmod(i, 9)
        height = min(9, size - 9 * column)
        places.append((front + back * column, FIELD_SIZE / 2 + row - (height - 1) / 2))
    return places


@dataclass(frozen=True)
class BattleOptions:
    """Changes to a map's battle; `Combat` describes them."""

    max_steps: int | None = None
    type_weights: dict[str, float] | None = None
    allies: int | None = None
    enemies: int | None = None
    start: int = 0
    has_cone: bool = False


def combat_params(name: str, options: BattleOptions) -> tuple[CombatParams, StartParams]:
    """Returns the parameters of map `name` with these options, of a step and of the start."""
    allies = _army(MAPS[name][0])
    enemies = _army(MAPS[name][1])
    max_steps = MAPS[name][2]
    types = sorted({*allies}, key=TYPE_ORDER.index)
    bits = "sz" if len(types) > 1 else ""
    share = np.zeros(0)
    if options.type_weights:
        weights = {TYPE_NAMES[kind]: weight for kind, weight in options.type_weights.items()}
        types = [letter for letter in TYPE_ORDER if weights.get(letter)]
        bits = "".join(types) if len(types) > 1 else ""
        share = type_shares(weights)
        allies = types[:1] * (options.allies or len(allies))
        enemies = types[:1] * (options.enemies or len(enemies))
        max_steps = RANDOM_STEPS
    drawn = types if options.type_weights else []
    kinds = [UNIT_TYPES[letter] for letter in TYPE_ORDER]
    reach_KK = [[one.range + one.radius + other.radius for other in kinds] for one in kinds]
    damage_KK = [[one.damage + one.bonus_damage * other.is_armoured for other in kinds] for one in kinds]
    stats_KF = [
        [
            kind.health,
            kind.shield,
            kind.reload_s * LOOPS_PER_SECOND,
            kind.speed * LOOPS_PER_STEP / LOOPS_PER_SECOND,
            kind.armour,
            kind.hits_per_shot,
            bits.find(letter),
        ]
        for letter, kind in zip(TYPE_ORDER, kinds, strict=True)
    ]
    step = CombatParams(
        allies=len(allies),
        max_steps=max_steps if options.max_steps is None else options.max_steps,
        num_type_bits=len(bits),
        allies_have_shields=any(UNIT_TYPES[letter].shield > 0 for letter in drawn or allies),
        enemies_have_shields=any(UNIT_TYPES[letter].shield > 0 for letter in drawn or enemies),
        has_cone=options.has_cone,
        stats_KF=np.array(stats_KF, float),
        damage_KK=np.array(damage_KK, float),
        reach_KK=np.array(reach_KK, float),
    )
    places = _columns(len(allies), FRONT_COLUMN_X[0], -1.0) + _columns(len(enemies), FRONT_COLUMN_X[1], 1.0)
    types_U = np.array([TYPE_ORDER.index(letter) for letter in allies + enemies])
    return step, StartParams(options.start, np.array(places), types_U, share)


def type_shares(weights: dict[str, float]) -> np.ndarray:
    """Returns cumulative shares of the types [K] from their weights by letter; the last type with a weight has 1."""
    weight_K = np.array([weights.get(letter, 0.0) for letter in TYPE_ORDER])
    share_K = np.cumsum(weight_K) / weight_K.sum()
    share_K[np.flatnonzero(weight_K)[-1] :] = 1.0
    return share_K
