"""Overcooked: two cooks share a kitchen, and soups must be cooked and served together.

The game of JaxMARL 0.2 (Rutherford et al., 2024), after Overcooked-AI (Carroll et al., 2019): equal states and actions
give JaxMARL's states, rewards, shaped rewards and observations. Like JaxMARL, and unlike Overcooked-AI, soups are of
three onions and cook by themselves, cooks first face random directions, and some kitchens start them on other cells.
"""

from __future__ import annotations

from typing import ClassVar, get_args

import numpy as np

from palestra.environments.overcooked.layouts import (
    COUNTER,
    FLOOR,
    KITCHENS,
    ONIONS,
    PLATES,
    POT,
    SERVING,
    KitchenName,
    build_kitchen,
)
from palestra.environments.overcooked.rules import (
    CELL,
    FACING,
    HELD,
    NUM_ACTIONS,
    NUM_CHANNELS,
    ONION,
    ONIONS_IN_SOUP,
    PLATE,
    SOUP,
    OvercookedArrays,
    OvercookedParams,
    begin_all,
    step_all,
)
from palestra.envs.batch.canvas import GREEN, GREY, LIGHT_GREY, RED, Canvas, Colour, seat_colour
from palestra.envs.batch.native import NativeEnv
from palestra.envs.batch.rng import RNG_WORDS
from palestra.envs.support.options import check_at_least
from palestra.envs.vector_base import Discrete, empty_step

ACTIONS = ("up", "down", "right", "left", "stay", "interact")
WHITE: Colour = (255, 255, 255)
AMBER: Colour = (226, 178, 34)
ITEM_COLOURS = {ONION: AMBER, PLATE: WHITE, SOUP: RED}
AHEAD_XY = ((0, 1), (0, -1), (1, 0), (-1, 0))  # of each direction, y up


class Overcooked(NativeEnv):
    """Put three onions into a pot, wait for 20 steps, take the soup with a plate and serve it: 20 for both seats.

    Actions: up, down, right, left, stay, interact. A cook turns where it wants to go, and goes there if the cell is
    floor; cooks do not share or swap cells. Interact uses what the cook faces: it takes an onion or a plate from its
    pile, puts what it holds on an empty counter or takes what lies there, puts an onion into a pot, takes a ready soup
    with a plate, serves a soup. An action out of range stays.

    `layout` names the kitchen, `max_steps` is the step limit. Cooks start with empty hands beside empty pots; with
    `random_start` cells, hands and pots are drawn at random. `shaped_reward` is the weight of JaxMARL's shaped rewards,
    each for the seat that earns it: 3 for an onion put into a pot, 3 for a plate of its pile while fewer plates are in
    hands than pots are not empty and none lies on a counter, 5 for a soup taken from its pot. With `shaped_steps` that
    weight falls linearly to 0 over so many steps of each game, counted over its episodes from the reset.

    An observation is, for each cell, row by row, 26 channels, as one row of numbers: the cook itself, the other, the
    directions of the one and the other (4 each: up, down, right, left), pot, empty counter, onions, 0, plates, serving;
    onions in a pot that does not cook, 0, onions in a soup (cooking, ready or carried), 0, steps left to cook, ready
    soup, plate, onion, 0, and 1 in all cells while fewer than 40 steps are left. Items in hands are on their cook's
    cell.

    Raises ValueError for an unknown layout, a limit below 1 or a negative weight.
    """

    name: ClassVar[str] = "overcooked"
    seats = ("agent_0", "agent_1")
    action_names = ACTIONS
    seat_colours = (seat_colour(0), seat_colour(1))

    def __init__(
        self,
        num_envs: int = 64,
        *,
        layout: KitchenName = "cramped_room",
        max_steps: int = 400,
        random_start: bool = False,
        shaped_reward: float = 0.0,
        shaped_steps: int | None = None,
    ) -> None:
        check_at_least("num_envs", num_envs, 1, "nothing is played in fewer")
        if layout not in KITCHENS:
            raise ValueError(f'layout: there is no "{layout}"; use one of {", ".join(get_args(KitchenName))}')
        check_at_least("max_steps", max_steps, 1, "a game takes a step")
        if not 0 <= shaped_reward < np.inf:
            raise ValueError(f"shaped_reward: a weight of {shaped_reward} would punish progress; use 0 or more")
        if shaped_steps is not None and shaped_steps < 1:
            raise ValueError(
                f"shaped_steps: {shaped_steps} is too small; use 1 or more, or null for a weight that stays"
            )
        self.num_envs = num_envs
        self.kitchen = build_kitchen(layout)
        self.params = OvercookedParams(max_steps, random_start, float(shaped_reward), shaped_steps or 0)
        cells = len(self.kitchen.tile_C)
        pots = len(self.kitchen.pots_P)
        self.observation_shapes = ((cells * NUM_CHANNELS,),) * 2
        self.action_spaces = (Discrete(NUM_ACTIONS),) * 2
        self.vector_step = frame = empty_step(num_envs, 2, self.observation_shapes[0])
        self.internal_state = {
            "rng": np.zeros((num_envs, RNG_WORDS), np.uint64),
            "cooks": np.zeros((num_envs, 2, 3), np.int64),
            "counters": np.zeros((num_envs, cells), np.int8),
            "onions": np.zeros((num_envs, pots), np.int64),
            "cooking": np.zeros((num_envs, pots), np.int64),
            "shaped": np.zeros((num_envs, 2), np.float32),
            "steps": np.zeros(num_envs, np.int64),
            "played": np.zeros(num_envs, np.int64),
        }
        by_cell = (num_envs, 2, cells, NUM_CHANNELS)
        self._board = OvercookedArrays(
            **self.internal_state,
            obs=frame.obs.reshape(by_cell),
            final_obs=frame.final_obs.reshape(by_cell),
            rewards=frame.rewards,
            truncated=frame.truncated,
        )

    def render(self, game: int) -> np.ndarray:
        """Draws counters grey, the serving counter green, pots dark with their onions (amber) or soup (red, smaller
        while it cooks), plates white; cooks in the colours of their seats, with what they hold, face the dot."""
        height = self.kitchen.height
        width = self.kitchen.width
        edge = max(height, width)
        canvas = Canvas(0, edge)

        def centre(cell: int) -> tuple[float, float]:
            row, column = divmod(cell, width)
            return column + 0.5 + (edge - width) / 2, edge - row - 0.5 - (edge - height) / 2

        for cell, tile in enumerate(self.kitchen.tile_C.tolist()):
            if tile != FLOOR:
                self._draw_tile(canvas, game, cell, tile, *centre(cell))
        for n, (cell, facing, item) in enumerate(self.internal_state["cooks"][game][:, [CELL, FACING, HELD]].tolist()):
            (x, y), (right, up) = centre(cell), AHEAD_XY[facing]
            canvas.disc(x, y, 0.38, self.seat_colours[n])
            canvas.disc(x + 0.3 * right, y + 0.3 * up, 0.1, GREY)
            if item in ITEM_COLOURS:
                canvas.disc(x, y, 0.23, GREY)
                canvas.disc(x, y, 0.2, ITEM_COLOURS[item])
        return canvas.picture()

    def _draw_tile(self, canvas: Canvas, game: int, cell: int, tile: int, x: float, y: float) -> None:
        colour = {SERVING: GREEN, POT: GREY}.get(tile, LIGHT_GREY)
        canvas.rectangle(x, y, 0.96, 0.96, colour)
        lying = int(self.internal_state["counters"][game, cell])
        if tile == COUNTER and lying in ITEM_COLOURS:
            canvas.disc(x, y, 0.2, ITEM_COLOURS[lying])
        elif tile in (ONIONS, PLATES):
            for shift in (-0.28, 0.0, 0.28):
                canvas.disc(x + shift, y, 0.14, AMBER if tile == ONIONS else WHITE)
        elif tile == POT:
            pot = self.kitchen.pot_C[cell]
            onions = self.internal_state["onions"][game, pot]
            left = self.internal_state["cooking"][game, pot]
            if onions == ONIONS_IN_SOUP:
                canvas.disc(x, y, 0.2 if left else 0.36, RED)
            else:
                for onion in range(onions):
                    canvas.disc(x - 0.28 + 0.28 * onion, y, 0.14, AMBER)

    def _begin(self) -> None:
        begin_all(self._board, self.kitchen, self.params)

    def _advance(self, actions: np.ndarray) -> None:
        step_all(self._board, self.kitchen, self.params, actions.astype(np.int32, copy=False))
