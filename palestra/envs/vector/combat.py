"""Micromanagement combat with the interface, observations, state and rewards of SMAC (Samvelyan et al., 2019),
simulated here without StarCraft II.

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
- Cooldown in the state is relative to the reload time; SMAC divides by a slightly longer time. The first unit-type bit
  means stalker on both sides; in SMAC it means zealot for enemies.
"""

from __future__ import annotations

from typing import ClassVar, get_args

import numpy as np

from palestra.envs.vector.base import Discrete, Entities, empty_step
from palestra.envs.vector.canvas import GREY, LIGHT_GREY, RED, Canvas, seat_colour
from palestra.envs.vector.combat_maps import (
    FIELD_SIZE,
    MAPS,
    CombatMap,
    combat_params,
)
from palestra.envs.vector.combat_rules import (
    ATTACK,
    HEALTH,
    SHIELD,
    CombatArrays,
    X,
    Y,
    begin_all,
    choose_focus_actions,
    step_all,
)
from palestra.envs.vector.native import NativeEnv
from palestra.envs.vector.rng import RNG_WORDS

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

    The scripted player "focus" attacks the weakest enemy within 6 that survives the attacks of the seats before it, or
    moves towards the nearest enemy.

    Raises ValueError for an unknown map, or if `num_envs` or `max_steps` is below 1.
    """

    name: ClassVar[str] = "combat"
    scripted_policies = ("focus",)

    def __init__(self, num_envs: int = 64, *, map: CombatMap = "3m", max_steps: int | None = None) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs: {num_envs} is too small, nothing is played in fewer; use 1 or more")
        if map not in MAPS:
            raise ValueError(f'map: there is no "{map}"; use one of {", ".join(get_args(CombatMap))}')
        if max_steps is not None and max_steps < 1:
            raise ValueError(f"max_steps: {max_steps} is too small, a game takes a step; use 1 or more")
        self.params = rules = combat_params(map, max_steps)
        seats, units = rules.allies, len(rules.type_U)
        enemies, actions = units - seats, ATTACK + units - seats
        ally, enemy = (
            4 + rules.allies_have_shields + rules.num_type_bits,
            3 + rules.enemies_have_shields + rules.num_type_bits,
        )
        self.num_envs, self.seats = num_envs, tuple(f"unit_{n}" for n in range(seats))
        self.observation_shapes = ((4 + enemies * (enemy + 2) + (seats - 1) * (ally + 1) + ally - 3,),) * seats
        # Of the other units only allies are entities: attacks name enemies by their place in the observation.
        self.observation_entities = ((Entities.in_a_row(4 + enemies * (enemy + 2), seats - 1, ally + 1),),) * seats
        self.action_spaces = (Discrete(actions),) * seats
        self.action_names = ("no-op", "stop", "north", "south", "east", "west")
        self.action_names += tuple(f"attack enemy {e}" for e in range(enemies))
        self.seat_colours = tuple(seat_colour(n) for n in range(seats))
        self.state_size = seats * (ally + actions) + enemies * enemy
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
            "target": np.zeros((num_envs, enemies), np.int64),
            "last": np.zeros((num_envs, seats), np.int64),
            "steps": np.zeros(num_envs, np.int64),
        }
        shown = {name: array for name, array in vars(self.vector_step).items() if array is not None}
        self._board = CombatArrays(**self.internal_state, **shown)

    def render(self, game: int) -> np.ndarray:
        """Draws allies in the colours of their seats and enemies in red, each with a bar of health and shield, and a
        line from each living ally to the enemy that it attacked last."""
        units, allies, last = self.internal_state["units"][game], len(self.seats), self.internal_state["last"][game]
        alive = units[:, HEALTH] > 0
        middle = FIELD_SIZE / 2
        edge = min(middle, max(10.0, np.ceil(np.abs(units[alive][:, [X, Y]] - middle).max(initial=0)) + 1))
        canvas = Canvas(middle - edge, middle + edge)
        for n in np.flatnonzero(alive[:allies] & (last >= ATTACK)):
            enemy = allies + last[n] - ATTACK
            canvas.line((units[n, X], units[n, Y]), (units[enemy, X], units[enemy, Y]), LIGHT_GREY)
        full = self.params.health_U + self.params.shield_U
        for u in np.flatnonzero(alive):
            x, y = units[u, X], units[u, Y]
            canvas.disc(x, y, UNIT_RADIUS, seat_colour(int(u)) if u < allies else RED)
            left = (units[u, HEALTH] + units[u, SHIELD]) / full[u]
            canvas.rectangle(x, y + 1.1, 1.2, 0.25, LIGHT_GREY)
            canvas.rectangle(x - 0.6 * (1 - left), y + 1.1, 1.2 * left, 0.25, GREY)
        return canvas.picture()

    def _begin(self) -> None:
        begin_all(self._board, self.params)

    def _advance(self, actions: np.ndarray) -> None:
        step_all(self._board, self.params, actions.astype(np.int32, copy=False))

    def scripted_actions(self, name: str, seat: int) -> np.ndarray:
        if name not in self.scripted_policies:
            return super().scripted_actions(name, seat)
        chosen = np.zeros(self.num_envs, np.int32)
        choose_focus_actions(self._board, self.params, seat, chosen)
        return chosen
