"""Maps and unit types of `combat`, with the numbers of StarCraft II."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

CombatMap = Literal[
    "3m",
    "8m",
    "25m",
    "8m_vs_9m",
    "10m_vs_11m",
    "27m_vs_30m",
    "2s3z",
    "3s5z",
    "3s_vs_3z",
    "3s_vs_4z",
    "3s_vs_5z",
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
KILL_REWARD, WIN_REWARD = 10.0, 200.0  # rewards, in units of damage


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
TYPE_BIT_ORDER = "sz"  # the order of the bits of unit type


class CombatParams(NamedTuple):
    """A map as numbers, for the kernels. U is all units, allies first. `damage_UU` is the damage of each hit of a shot,
    `reach_UU` the weapon range from centre to centre."""

    allies: int
    max_steps: int
    max_raw_return: float  # total reward of a won game, before scaling
    num_type_bits: int
    allies_have_shields: bool
    enemies_have_shields: bool
    start_U2: np.ndarray
    type_U: np.ndarray
    health_U: np.ndarray
    shield_U: np.ndarray
    reload_U: np.ndarray
    speed_U: np.ndarray
    armour_U: np.ndarray
    hits_U: np.ndarray
    damage_UU: np.ndarray
    reach_UU: np.ndarray


def _army(text: str) -> list[str]:
    """Returns the unit types of an army such as "2s3z", one letter per unit."""
    kinds: list[str] = []
    count = ""
    for letter in text:
        if letter.isdigit():
            count += letter
        else:
            kinds, count = kinds + [letter] * int(count), ""
    return kinds


def _columns(size: int, front: float, back: float) -> list[tuple[float, float]]:
    """Returns the starting places (x, y) of an army: columns of up to nine units, one apart, the first column in
    front."""
    places = []
    for i in range(size):
        column, row = divmod(i, 9)
        height = min(9, size - 9 * column)
        places.append((front + back * column, FIELD_SIZE / 2 + row - (height - 1) / 2))
    return places


def combat_params(name: str, max_steps: int | None) -> CombatParams:
    """Returns the parameters of map `name`, with a limit of `max_steps` steps (None: the map's own limit)."""
    allies, enemies = _army(MAPS[name][0]), _army(MAPS[name][1])
    letters = allies + enemies
    kinds = [UNIT_TYPES[letter] for letter in letters]
    mixed = len(set(allies)) > 1
    reach_UU = [[one.range + one.radius + other.radius for other in kinds] for one in kinds]
    damage_UU = [[one.damage + one.bonus_damage * other.is_armoured for other in kinds] for one in kinds]
    foes = kinds[len(allies) :]
    return CombatParams(
        allies=len(allies),
        max_steps=MAPS[name][2] if max_steps is None else max_steps,
        max_raw_return=sum(foe.health + foe.shield + KILL_REWARD for foe in foes) + WIN_REWARD,
        num_type_bits=len(TYPE_BIT_ORDER) if mixed else 0,
        allies_have_shields=kinds[0].shield > 0,
        enemies_have_shields=foes[0].shield > 0,
        start_U2=np.array(
            _columns(len(allies), FRONT_COLUMN_X[0], -1.0) + _columns(len(enemies), FRONT_COLUMN_X[1], 1.0)
        ),
        type_U=np.array([TYPE_BIT_ORDER.find(letter) for letter in letters]),
        health_U=np.array([kind.health for kind in kinds], float),
        shield_U=np.array([kind.shield for kind in kinds], float),
        reload_U=np.array([kind.reload_s * LOOPS_PER_SECOND for kind in kinds]),
        speed_U=np.array([kind.speed * LOOPS_PER_STEP / LOOPS_PER_SECOND for kind in kinds]),
        armour_U=np.array([kind.armour for kind in kinds], float),
        hits_U=np.array([kind.hits_per_shot for kind in kinds]),
        damage_UU=np.array(damage_UU, float),
        reach_UU=np.array(reach_UU, float),
    )
