"""Level-based foraging: agents of different levels load food; some food needs several agents at once.

The game of lbforaging 2.0 (Papoudakis et al., 2021): the same seed gives the same sequence of games; observations,
action masks and rewards are that package's numbers, including its quirks.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from palestra.environments.foraging.rules import ForagingArrays, ForagingParams, begin_all, step_all
from palestra.envs.batch.canvas import GREEN, LIGHT_GREY, Canvas, seat_colour
from palestra.envs.batch.native import NativeEnv
from palestra.envs.batch.rng import RNG_WORDS
from palestra.envs.support.options import check_at_least
from palestra.envs.vector_base import Discrete, Entities, empty_step

ACTIONS = ("none", "north", "south", "west", "east", "load")


class Foraging(NativeEnv):
    """Walk to food and load it together. Actions of each seat: nothing, north, south, west, east, load.

    Food is eaten if the levels of the agents that load it in the same step sum to at least its level. Each of them then
    gets its own level times the food's level as reward; with `normalize` the rewards of a game sum to 1. A failed
    attempt costs `penalty`. With `cooperative` all food has the highest level; by default (`max_food_level` None) this
    is the sum of the levels of the three weakest agents. A seat sees `sight` cells far (None: the whole board). An
    illegal action does nothing. `success`: all food was eaten. `max_steps` is the step limit.

    An observation is row, column and level of each food in sight, of the agent itself and of each other agent in sight;
    -1, -1, 0 for those out of sight. The state is row, column (0 to 1) and level (relative to the highest possible) of
    all agents, then of all food (0, 0, 0 once eaten), then the elapsed share of `max_steps`.

    Raises ValueError for sizes, levels and limits with which no game can be played.
    """

    name: ClassVar[str] = "foraging"

    def __init__(  # noqa: PLR0913 - a parameter for each option
        self,
        num_envs: int = 64,
        *,
        size: int = 8,
        agents: int = 2,
        food: int = 3,
        sight: int | None = None,
        cooperative: bool = False,
        max_steps: int = 50,
        min_level: int = 1,
        max_level: int = 2,
        min_food_level: int = 1,
        max_food_level: int | None = None,
        normalize: bool = True,
        penalty: float = 0.0,
    ) -> None:
        weakest = min(3, agents) * min_level if max_food_level is None else max_food_level
        strongest = min(3, agents) * max_level if max_food_level is None else max_food_level
        check_at_least("num_envs", num_envs, 1, "nothing is played in fewer")
        check_at_least("size", size, 3, "food lies off the border")
        check_at_least("agents", agents, 1, "somebody must play")
        check_at_least("food", food, 1, "a game without food is over before it begins")
        check_at_least("max_steps", max_steps, 1, "a game takes a step")
        check_at_least("sight", size if sight is None else sight, 1, "who loads must see the cell beside")
        check_at_least("min_level", min_level, 1, "an agent without a level loads nothing")
        check_at_least("max_level", max_level, min_level, "it is above min_level")
        check_at_least("min_food_level", min_food_level, 1, "food of level 0 is not food")
        check_at_least("max_food_level", weakest, min_food_level, "it is above min_food_level in every game")
        if agents > size * size // 2:
            raise ValueError(f"agents: {agents} on {size} x {size} cells find no room; at most half of the cells")
        if penalty < 0:
            raise ValueError(f"penalty: {penalty} would be a reward for failing; use 0 or more")
        self.num_envs = num_envs
        self.state_size = 3 * (agents + food) + 1
        self.seats = tuple(f"agent_{n}" for n in range(agents))
        self.observation_shapes = ((3 * (food + agents),),) * agents
        others = Entities.in_a_row(3 * food + 3, agents - 1, 3)
        self.observation_entities = ((Entities.in_a_row(0, food, 3), others),) * agents
        self.action_spaces = (Discrete(len(ACTIONS)),) * agents
        self.action_names = ACTIONS
        self.seat_colours = tuple(seat_colour(n) for n in range(agents))
        self.params = ForagingParams(
            size=size,
            sight=size if sight is None else sight,
            max_steps=max_steps,
            min_agent_level=min_level,
            max_agent_level=max_level,
            min_food_level=min_food_level,
            max_food_level=max_food_level or 0,
            food_level_scale=strongest,
            cooperative=cooperative,
            normalize=normalize,
            penalty=float(penalty),
        )
        self.vector_step = empty_step(
            num_envs,
            agents,
            self.observation_shapes[0],
            num_actions=len(ACTIONS),
            state_size=self.state_size,
            reports_success=True,
        )
        self.internal_state = {
            "rng": np.zeros((num_envs, RNG_WORDS), np.uint64),
            "agents": np.zeros((num_envs, agents, 3), np.int64),
            "food": np.zeros((num_envs, food, 3), np.int64),
            "total": np.zeros(num_envs, np.int64),
            "steps": np.zeros(num_envs, np.int64),
        }
        self._board = self.build_table(ForagingArrays)

    def render(self, game: int) -> np.ndarray:
        """Draws agents as discs and food as green squares, the larger the higher their level."""
        size = self.params.size
        highest = max(self.params.max_agent_level, self.params.food_level_scale, 1)
        canvas = Canvas(0, size)
        for at in range(size + 1):
            canvas.line((at, 0), (at, size), LIGHT_GREY)
            canvas.line((0, at), (size, at), LIGHT_GREY)
        for row, column, level in self.internal_state["food"][game]:
            if level > 0:
                edge = 0.35 + 0.5 * level / highest
                canvas.rectangle(column + 0.5, size - row - 0.5, edge, edge, GREEN)
        for n, (row, column, level) in enumerate(self.internal_state["agents"][game]):
            canvas.disc(column + 0.5, size - row - 0.5, 0.18 + 0.25 * level / highest, seat_colour(n))
        return canvas.picture()

    def _begin(self) -> None:
        begin_all(self._board, self.params)

    def _advance(self, actions: np.ndarray) -> None:
        step_all(self._board, self.params, actions.astype(np.int32, copy=False))
