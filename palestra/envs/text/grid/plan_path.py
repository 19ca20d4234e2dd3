"""Plan-Path env: walk from a start to a goal around walls, a few moves per turn.

Follows the game of the same name in Stronger-MAS (arXiv 2510.11062), with two differences: the prompt always shows the
walker's current position, and the default rewards do not use the shortest path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import numpy as np

from palestra.envs.support.options import BoardRendering, RewardMode, Shaping, check_range
from palestra.envs.support.splits import Split, draw_layout
from palestra.envs.text.grid.grid import (
    Grid,
    cell_names,
    describe_cell,
    distances,
    draw_grid,
    format_cells,
    make_grid,
    manhattan,
    parse_cells,
    walk,
)
from palestra.envs.text.grid.grid_game import GridGame, GridTeam

RULES_TEXT = (
    "You play Plan-Path: a walker (@) must reach the goal (G) on a square board of cells. Rows count down from 0 at "
    "the top, columns count right from 0 at the left. Free cells are '.', walls and the border are '#'. A move goes "
    "one cell up, down, left or right; a move into a wall or the border is skipped and costs a little."
)


@dataclass(eq=False)
class PathLayout:
    """One instance; `start` and `goal` are cells, `static_text` is the constant part of the compact observation."""

    grid: Grid
    start: int
    goal: int
    static_text: str

    @property
    def cell_groups(self) -> tuple[Any, ...]:
        """The cells of the walls, the start and the goal."""
        return (self.grid.walls, (self.start,), (self.goal,))

    @cached_property
    def goal_distances(self) -> dict[int, int]:
        """Shortest-path length to the goal, in moves, of each cell that can reach it."""
        return distances(self.grid, self.goal)

    def is_solvable(self) -> bool:
        return self.goal in distances(self.grid, self.start)


def make_path_layout(size: int, walls: tuple[int, ...], start: int, goal: int) -> PathLayout:
    """Builds an instance from cells."""
    rest = f"goal {cell_names(size)[goal]}" + (f" walls {format_cells(size, sorted(walls))}" if walls else "")
    return PathLayout(make_grid(size, walls), start, goal, rest)


@lru_cache(maxsize=16_384)  # tree search resets the same seed many times
def _instance(seed: int, size: int, density: float, split: Split) -> PathLayout:
    def propose(rng: np.random.Generator) -> PathLayout | None:
        blocked = rng.random(size * size) < density
        free = np.flatnonzero(~blocked)
        if len(free) < 2:
            return None
        start, goal = rng.choice(free, 2, replace=False)
        return make_path_layout(size, tuple(np.flatnonzero(blocked).tolist()), int(start), int(goal))

    return draw_layout(seed, propose, size, split, f"plan_path at size {size}, density {density}")


class PlanPath(GridGame):
    """Reach the goal. A plan has up to `max_waypoints` cells, an answer of a moving seat up to `max_moves` moves.

    `wall_density` is the probability that a cell is a wall. Dense rewards measure progress by Manhattan distance, which
    can lead into dead ends, or with `shaping: path` by shortest-path length, which reveals the solution. A state is the
    walker's cell. Raises ValueError if an option is out of range.
    """

    name: ClassVar[str] = "plan_path"
    compact_name = "path"
    rules_text = RULES_TEXT

    def __init__(  # noqa: PLR0913 - a parameter for each option
        self,
        *,
        size: int = 10,
        wall_density: float = 0.22,
        split: Split = "train",
        team: GridTeam = "planner_executor",
        max_turns: int = 4,
        max_waypoints: int = 3,
        max_moves: int = 6,
        reward: RewardMode = "dense",
        shaping: Shaping = "manhattan",
        rendering: BoardRendering = "compact",
    ) -> None:
        check_range("size", size, 3, 16)
        check_range("wall_density", wall_density, 0.0, 0.9)
        check_range("max_waypoints", max_waypoints, 1, 16)
        self.size = size
        self.density = wall_density
        self.split = split
        self.plan_parts = max_waypoints
        self.shaping = shaping
        self.plan_format = (
            f"A plan is 1 to {max_waypoints} cells to walk to one after the other, each in a straight free line from "
            "the one before, for example: #### r2 c3 r4 c3"
        )
        super().__init__(team, max_turns, max_moves, reward, rendering)

    def make_layout(self, seed: int) -> PathLayout:
        return _instance(seed, self.size, self.density, self.split)

    def parse_plan(self, answer: Any) -> tuple[int, ...] | None:
        return parse_cells(answer, self.size, self.plan_parts)

    def write_plan(self, plan: tuple[int, ...]) -> str:
        return format_cells(self.size, plan)

    def milestones(self, state: int, plan: tuple[int, ...]) -> list[int]:
        """Returns the ends of the plan's straight lines, up to the first that stops at a wall or the goal."""
        stops: list[int] = []
        for waypoint in plan:
            stop = walk_straight(self.instance.grid, state, waypoint, self.instance.goal)
            if stop != state:
                stops.append(stop)
            if stop != waypoint:
                break
            state = stop
        return stops

    def plan_progress(self, plan: tuple[int, ...], states: Sequence[int]) -> float:
        stops = self.milestones(states[0], plan)
        if not stops:
            return 0.0
        done = 0
        begun = states[0]
        for state in states[1:]:
            if done < len(stops) and state == stops[done]:
                done = done + 1
                begun = state
        if done == len(stops):
            return 1.0
        far, near = (manhattan(self.size, state, stops[done]) for state in (begun, states[-1]))
        return (done + max(0, far - near) / (far + 1)) / len(stops)

    def solution(self, state: int) -> tuple[int, ...]:
        board = self.instance.grid
        directions = walk(board, state, self.instance.goal) or []
        corners: list[int] = []
        for direction, following in zip(directions, [*directions[1:], None], strict=True):
            state = board.neighbors[state][direction]
            if direction != following:
                corners.append(state)
        return tuple(corners)

    def moves_of(self, state: int, plan: tuple[int, ...]) -> list[int]:
        moves: list[int] = []
        for stop in self.milestones(state, plan):
            moves += walk(self.instance.grid, state, stop) or ()
            state = stop
        return moves

    def move(self, state: int, direction: int) -> int | None:
        cell = self.instance.grid.neighbors[state][direction]
        return cell if cell >= 0 else None

    def potential(self, state: int) -> int:
        if self.shaping == "path":
            return self.instance.goal_distances[state]
        return manhattan(self.size, state, self.instance.goal)

    def is_solved(self, state: int) -> bool:
        return bool(state == self.instance.goal)

    def compact_observation(self) -> str:
        return f"size {self.size} you {cell_names(self.size)[self.state]} {self.instance.static_text}"

    def ascii_observation(self) -> str:
        goal = self.instance.goal
        glyphs = dict.fromkeys(self.instance.grid.walls, "#") | {goal: "G", self.state: "@"}
        you = f"You are at {describe_cell(self.size, self.state)}; the goal is at {describe_cell(self.size, goal)}."
        return f"{draw_grid(self.size, glyphs)}\n{you}"


def walk_straight(board: Grid, start: int, to: int, goal: int) -> int:
    """Returns where a straight walk from `start` to `to` ends: at `to`, before a wall, at the goal,
    or at `start` if the two are not in line."""
    (row, column), (to_row, to_column) = divmod(start, board.size), divmod(to, board.size)
    if row != to_row and column != to_column:
        return start
    direction = int(to_row > row)
    if column != to_column:
        direction = 2 + int(to_column > column)
    at = start
    while at not in (to, goal) and board.neighbors[at][direction] >= 0:
        at = board.neighbors[at][direction]
    return at
