"""Micromanagement combat with the interface, observations, state and rewards of SMAC (Samvelyan et al., 2019),
simulated here without StarCraft II, and with the random battles of SMACv2 (Ellis et al., 2023).

Health, shields, armour, damage, range, reload time and speed of marines, stalkers and zealots are those of StarCraft II
(version 4.6, speed "faster"), with SMAC's 8 game loops per step. Differences from SMAC:

- Units are points: they do not collide, and they turn, accelerate and aim instantly.
- In one step a unit either shoots, waits until it can shoot, or walks; it cannot shoot and then walk within 8 loops. A
  unit that stops does not shoot; idle units of StarCraft shoot at enemies in range.
- Shots are determined by the positions at the start of a step; all damage is applied at once, then all units walk.
- Enemies are scripted: each attacks the nearest ally until that ally is dead or out of weapon range, then again the
  nearest, at any distance. SMAC's built-in opponent moves towards the allies' starting point.
- Shields do not recover. The field is an open square without obstacles. Units start in columns 14 apart, each up to
  `START_JITTER` from its place; in SMAC the map fixes the places.
- Of random battles: marines may fight beside stalkers and zealots; units of a group start within 1 of its place, not on
  it. With a cone, units look where they last walked, over 90 degrees (SMACv2's `change_fov_with_move`); by SMACv2's
  default they look over 30 degrees and turn by actions of their own.
- Cooldown in the state is relative to the reload time; SMAC divides by a slightly longer time. The first unit-type bit
  means stalker on both sides; in SMAC it means zealot for enemies.
"""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

import numpy as np

from palestra.environments.combat.maps import (
    FIELD_SIZE,
    FULL_HEALTH,
    FULL_SHIELD,
    MAPS,
    TYPE_NAMES,
    BattleOptions,
    CombatMap,
    combat_params,
)
from palestra.environments.combat.rules import ATTACK, CombatArrays, begin_all, choose_focus_actions, step_all
from palestra.environments.combat.start import HEALTH, SHIELD, Start, X, Y
from palestra.envs.batch.canvas import GREY, LIGHT_GREY, RED, Canvas, seat_colour
from palestra.envs.batch.native import NativeEnv
from palestra.envs.batch.rng import RNG_WORDS
from palestra.envs.support.options import check_at_least
from palestra.envs.vector_base import Discrete, Entities, empty_step

UNIT_RADIUS = 0.6  # as drawn


class Combat(NativeEnv):
    """Defeat an army of scripted enemies. Every seat is an allied unit; all seats get the same reward.

    Actions: stop; move north (y up), south, east (x up) or west as far as possible in one step (marines 1.1; SMAC
    orders 2); attack an enemy, legal within distance 6. A unit walks to a target out of its weapon range. It sees up to
    distance 9. No-op is only for dead units: they do not act but get the team reward until the game ends, and are
    truncated with it. An illegal action stops the unit. `map` is one of SMAC's maps with marines (m), stalkers (s) and
    zealots (z); `max_steps` is the step limit (default: the map's). `success` is a won battle.

    The reward is the damage to enemies, plus 10 for each kill and 200 for a won battle, scaled so that a won battle
    returns 20. Observations are SMAC's: can move north, south, east, west; for each enemy: attackable, distance, x, y
    (in units of sight range), health; for each other ally the same with "visible" for "attackable"; own health. Shields
    follow the health if the side has shields; unit-type bits (stalker, zealot) follow if the side has two types. The
    state has for each ally health, cooldown, x, y from the centre, for each enemy health, x, y, then the last actions;
    shields and type bits as above.

    `type_weights`, for example `{marine: 1, stalker: 1, zealot: 1}`, draws the type of every ally anew in each episode,
    in proportion to these weights; enemies have the types of the allies, and those beyond the allies draw their own.
    `allies` and `enemies` are then the numbers of units (default: the map's), the default of `max_steps` is 200, and
    each type with a weight has a bit in observations and state. `start` is where units begin: `columns`; `reflect`,
    allies anywhere in the left half and enemies at their mirror images; `surround`, allies in the middle and enemies on
    the diagonals in one to four groups; `surround_and_reflect`, either with equal probability. With `sight: cone` an
    ally sees and can attack only what is within 45 degrees of the direction of its last walk (east at first), which
    follows its type bits in observations and state as (x, y).

    The scripted player "focus" attacks the weakest enemy within 6 that survives the attacks of the seats before it, or
    moves towards the nearest enemy.

    Raises ValueError for an unknown map, unit type, `start` or `sight`, if `num_envs`, `max_steps`, `allies` or
    `enemies` is below 1, for weights that are negative or all 0, and for `allies` or `enemies` without `type_weights`.
    """

    name: ClassVar[str] = "combat"
    scripted_policies = ("focus",)

    def __init__(
        self,
        num_envs: int = 64,
        *,
        map: CombatMap = "3m",
        max_steps: int | None = None,
        type_weights: dict[str, float] | None = None,
        allies: int | None = None,
        enemies: int | None = None,
        start: Start = "columns",
        sight: Literal["circle", "cone"] = "circle",
    ) -> None:
        check_at_least("num_envs", num_envs, 1, "nothing is played in fewer")
        if map not in MAPS:
            raise ValueError(f'map: there is no "{map}"; use one of {", ".join(get_args(CombatMap))}')
        check_at_least("max_steps", 1 if max_steps is None else max_steps, 1, "a game takes a step")
        _check_random(type_weights, allies, enemies)
        if start not in get_args(Start):
            raise ValueError(f'start: there is no "{start}"; use one of {", ".join(get_args(Start))}')
        if sight not in ("circle", "cone"):
            raise ValueError(f'sight: there is no "{sight}"; use circle or cone')
        options = BattleOptions(
            max_steps, type_weights, allies, enemies, start=get_args(Start).index(start), has_cone=sight == "cone"
        )
        rules, self.start_params = combat_params(map, options)
        self.params = rules
        seats = rules.allies
        units = len(self.start_params.type_U)
        enemies = units - seats
        actions = ATTACK + units - seats
        ally = 4 + rules.allies_have_shields + rules.num_type_bits
        enemy = 3 + rules.enemies_have_shields + rules.num_type_bits
        self.num_envs = num_envs
        self.seats = tuple(f"unit_{n}" for n in range(seats))
        facing = 2 * rules.has_cone
        self.observation_shapes = ((4 + enemies * (enemy + 2) + (seats - 1) * (ally + 1) + ally - 3 + facing,),) * seats
        # Of the other units only allies are entities: attacks name enemies by their place in the observation.
        self.observation_entities = (
            (Entities.in_a_row(4 + enemies * (enemy + 2), seats - 1, ally + 1, (2, 3)),),
        ) * seats
        self.action_spaces = (Discrete(actions),) * seats
        self.action_names = ("no-op", "stop", "north", "south", "east", "west")
        self.action_names += tuple(f"attack enemy {e}" for e in range(enemies))
        self.seat_colours = tuple(seat_colour(n) for n in range(seats))
        self.state_size = seats * (ally + facing + actions) + enemies * enemy
        self.vector_step = empty_step(
            num_envs,
            seats,
            self.observation_shapes[0],
            num_actions=actions,
            state_size=self.state_size,
            reports_success=True,
        )
        self.internal_state = {
            "rng": np.zeros((num_envs, RNG_WORDS), np.uint64),
            "units": np.zeros((num_envs, units, 5)),
            "types": np.zeros((num_envs, units), np.int64),
            "max_return": np.zeros(num_envs),
            "facing": np.zeros((num_envs, seats), np.int64),
            "target": np.zeros((num_envs, enemies), np.int64),
            "last": np.zeros((num_envs, seats), np.int64),
            "steps": np.zeros(num_envs, np.int64),
        }
        self._board = self.build_table(CombatArrays)

    def render(self, game: int) -> np.ndarray:
        """Draws allies in the colours of their seats and enemies in red, each with a bar of health and shield, and a
        line from each living ally to the enemy that it attacked last."""
        units = self.internal_state["units"][game]
        allies = len(self.seats)
        last = self.internal_state["last"][game]
        alive = units[:, HEALTH] > 0
        middle = FIELD_SIZE / 2
        edge = min(middle, max(10.0, np.ceil(np.abs(units[alive][:, [X, Y]] - middle).max(initial=0)) + 1))
        canvas = Canvas(middle - edge, middle + edge)
        for n in np.flatnonzero(alive[:allies] & (last >= ATTACK)):
            enemy = allies + last[n] - ATTACK
            canvas.line((units[n, X], units[n, Y]), (units[enemy, X], units[enemy, Y]), LIGHT_GREY)
        full = self.params.stats_KF[:, [FULL_HEALTH, FULL_SHIELD]].sum(1)[self.internal_state["types"][game]]
        for u in np.flatnonzero(alive):
            x = units[u, X]
            y = units[u, Y]
            canvas.disc(x, y, UNIT_RADIUS, seat_colour(int(u)) if u < allies else RED)
            left = (units[u, HEALTH] + units[u, SHIELD]) / full[u]
            canvas.rectangle(x, y + 1.1, 1.2, 0.25, LIGHT_GREY)
            canvas.rectangle(x - 0.6 * (1 - left), y + 1.1, 1.2 * left, 0.25, GREY)
        return canvas.picture()

    def _begin(self) -> None:
        begin_all(self._board, self.params, self.start_params)

    def _advance(self, actions: np.ndarray) -> None:
        step_all(self._board, self.params, self.start_params, actions.astype(np.int32, copy=False))

    def scripted_actions(self, name: str, seat: int) -> np.ndarray:
        if name not in self.scripted_policies:
            return super().scripted_actions(name, seat)
        chosen = np.zeros(self.num_envs, np.int32)
        choose_focus_actions(self._board, self.params, seat, chosen)
        return chosen


def _check_random(type_weights: dict[str, float] | None, allies: int | None, enemies: int | None) -> None:
    """Raises ValueError for weights and numbers of units that make no battle."""
    for name, count in (("allies", allies), ("enemies", enemies)):
        if count is not None and type_weights is None:
            raise ValueError(f"{name}: {count} units have no types; set type_weights, or leave it to the map")
        check_at_least(name, 1 if count is None else count, 1, "a battle takes two sides")
    if type_weights is None:
        return
    if unknown := sorted(set(type_weights) - set(TYPE_NAMES)):
        raise ValueError(f'type_weights: there is no unit "{unknown[0]}"; use {", ".join(TYPE_NAMES)}')
    weights = type_weights.values()
    if not (all(0 <= weight < np.inf for weight in weights) and sum(weights) > 0):
        raise ValueError(
            f"type_weights: {type_weights} are not weights; use numbers of at least 0, one of them above 0"
        )
