"""Sokoban env: push every box onto a goal, a few moves per turn. Boxes cannot be pulled out of corners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import numpy as np

from palestra.envs.support.options import BoardRendering, RewardMode, Shaping, check_range
from palestra.envs.support.splits import Split, draw_layout
from palestra.envs.text.grid import sokoban_solver as rules
from palestra.envs.text.grid.grid import (
    DIRECTIONS,
    OPPOSITE,
    Grid,
    cell_names,
    describe_cell,
    draw_grid,
    format_cells,
    make_grid,
    parse_pushes,
    walk,
)
from palestra.envs.text.grid.grid_game import GridGame, GridTeam
from palestra.envs.text.grid.sokoban_solver import SokobanState

MAX_BOXES = 4
RULES_TEXT = (
    "You play Sokoban: the player (@) must push every box onto a goal (o) on a square board of cells. Rows count down "
    "from 0 at the top, columns count right from 0 at the left. Free cells are '.', walls and the border are '#', "
    "boxes are their numbers (1, 2, ...), '+' is the player on a goal. A move goes one cell up, down, left or right. "
    "Moving into a box pushes it one cell on, if the cell behind it is free; boxes cannot be pulled, nor two pushed at "
    "once, so a box in a corner is lost. A move that is not possible is skipped and costs a little."
)


@dataclass(frozen=True, eq=False)
class SokobanLayout:
    """One instance; `static_text` is the constant part of the compact observation."""

    grid: Grid
    goals: frozenset[int]
    start: SokobanState
    static_text: str

    @cached_property
    def moves_to_solve(self) -> dict[tuple[int, int], int]:
        """The fewest moves from each solvable state of a single box."""
        return rules.moves_to_solve(self.grid, self.goals)

    @property
    def cell_groups(self) -> tuple[Any, ...]:
        """The cells of the walls, the goals, the boxes and the player."""
        return (self.grid.walls, self.goals, self.start[1], (self.start[0],))

    def is_solvable(self) -> bool:
        """True if a greedy search over at most 2,000 states solves it; the few harder layouts are not drawn."""
        if self.goals.issuperset(self.start[1]):
            return False
        return rules.solve(self.grid, self.start, self.goals, heuristic_weight=5, max_states=2000) is not None


def make_sokoban_layout(
    size: int, walls: tuple[int, ...], goals: tuple[int, ...], boxes: tuple[int, ...], player: int
) -> SokobanLayout:
    """Builds an instance from cells; boxes are numbered in the given order."""
    rest = f"goal {format_cells(size, sorted(goals))}"
    if walls:
        rest += f" walls {format_cells(size, sorted(walls))}"
    return SokobanLayout(make_grid(size, walls), frozenset(goals), (player, boxes), rest)


@lru_cache(maxsize=16_384)  # tree search resets the same seed many times
def _instance(seed: int, size: int, boxes: int, walls: int, split: Split) -> SokobanLayout:
    def propose(rng: np.random.Generator) -> SokobanLayout | None:
        cells = rng.permutation(size * size).tolist()
        cut = (walls, walls + boxes, walls + 2 * boxes)
        parts = (tuple(cells[: cut[0]]), tuple(cells[cut[0] : cut[1]]), tuple(cells[cut[1] : cut[2]]))
        return make_sokoban_layout(size, *parts, player=cells[cut[2]])

    return draw_layout(seed, propose, size, split, f"sokoban at size {size}, {boxes} boxes, {walls} walls")


class Sokoban(GridGame):
    """Push all boxes onto goals. A plan has up to `max_pushes` pushes, an answer of a moving seat up to `max_moves`
    moves.

    `size` is the number of rows and columns inside the border; `walls` counts the walls inside it, by default one per
    12 cells. Dense rewards measure progress by the Manhattan distance of boxes and goals, which leads into lost
    states; or, with one box, with `shaping: path` by the fewest moves to the solution (a lost state counts twice those
    of the start), which reveals it. A state is (player, boxes). Raises ValueError if an option is out of range.
    """

    name: ClassVar[str] = "sokoban"
    compact_name = "sokoban"
    rules_text = RULES_TEXT

    def __init__(  # noqa: PLR0913 - a parameter for each option
        self,
        *,
        size: int = 6,
        boxes: int = 1,
        walls: int | None = None,
        split: Split = "train",
        team: GridTeam = "planner_executor",
        max_turns: int = 4,
        max_pushes: int = 3,
        max_moves: int = 6,
        reward: RewardMode = "dense",
        shaping: Shaping = "manhattan",
        rendering: BoardRendering = "compact",
    ) -> None:
        check_range("size", size, 3, 12)
        check_range("boxes", boxes, 1, MAX_BOXES)
        self.walls = size * size // 12 if walls is None else walls
        check_range("walls", self.walls, 0, size * size - 2 * boxes - 1)
        check_range("max_pushes", max_pushes, 1, 16)
        if shaping == "path" and boxes > 1:
            raise ValueError(f"shaping: path counts the moves of one box, but boxes is {boxes}: use shaping: manhattan")
        self.size = size
        self.boxes = boxes
        self.shaping = shaping
        self.split = split
        self.plan_parts = max_pushes
        push = "a direction, for example: #### left left up"
        if boxes > 1:
            push = "the number of a box and a direction, for example: #### 1 left 2 up"
        self.plan_format = f"A plan is 1 to {max_pushes} pushes, each {push}"
        super().__init__(team, max_turns, max_moves, reward, rendering)

    def make_layout(self, seed: int) -> SokobanLayout:
        return _instance(seed, self.size, self.boxes, self.walls, self.split)

    def parse_plan(self, answer: Any) -> tuple[tuple[int, int], ...] | None:
        return parse_pushes(answer, self.boxes, self.plan_parts)

    def write_plan(self, plan: tuple[tuple[int, int], ...]) -> str:
        if self.boxes == 1:
            return " ".join([DIRECTIONS[d] for _, d in plan])
        return " ".join([f"{box + 1} {DIRECTIONS[d]}" for box, d in plan])

    def plan_progress(self, plan: tuple[tuple[int, int], ...], states: Sequence[SokobanState]) -> float:
        board = self.instance.grid
        wanted = self.milestones(states[0], plan)
        if not wanted:
            return 0.0
        done = 0
        begun = states[0]
        last = states[0]
        for state in states[1:]:
            if state[1] != last[1]:  # a box moved: any unplanned push ends the plan
                if done == len(wanted) or state[1] != wanted[done][1]:
                    return done / len(wanted)
                done = done + 1
                begun = state
            last = state
        if done == len(wanted):
            return 1.0
        far, near = (rules.steps_to_push(board, state, *plan[done]) for state in (begun, last))
        return (done + max(0, far - near) / (far + 1)) / len(wanted)

    def milestones(self, state: SokobanState, plan: tuple[tuple[int, int], ...]) -> list[SokobanState]:
        """Returns the state after each push of the plan, up to the first that is impossible or follows the solution."""
        states: list[SokobanState] = []
        for box, direction in plan:
            after = rules.push(self.instance.grid, state, box, direction)
            if after is None or self.is_solved(state):
                break
            states.append(state := after)
        return states

    def solution(self, state: SokobanState) -> tuple[tuple[int, int], ...]:
        if self.boxes > 1:
            return tuple(rules.solve(self.instance.grid, state, self.instance.goals) or ())
        far = self.instance.moves_to_solve
        pushes: list[tuple[int, int]] = []
        while far.get((state[0], state[1][0])):
            reached = [(d, self.move(state, d)) for d in range(4)]
            direction, after = min(
                ((d, after) for d, after in reached if after is not None),
                key=lambda move: far.get((move[1][0], move[1][1][0]), len(far)),
            )
            if after[1] != state[1]:
                pushes.append((0, direction))
            state = after
        return tuple(pushes)

    def moves_of(self, state: SokobanState, plan: tuple[tuple[int, int], ...]) -> list[int]:
        moves: list[int] = []
        for box, direction in plan:
            if (after := rules.push(self.instance.grid, state, box, direction)) is None:
                break
            stand = self.instance.grid.neighbors[state[1][box]][OPPOSITE[direction]]
            moves += [*(walk(self.instance.grid, state[0], stand, state[1]) or ()), direction]
            state = after
        return moves

    def move(self, state: SokobanState, direction: int) -> SokobanState | None:
        return rules.move(self.instance.grid, state, direction)

    def potential(self, state: SokobanState) -> int:
        player, boxes = state
        if self.shaping == "manhattan":
            return rules.box_goal_distance(self.size, boxes, self.instance.goals)
        far = self.instance.moves_to_solve
        start_player, start_boxes = self.instance.start
        lost = 2 * far[start_player, start_boxes[0]]
        return min(far.get((player, boxes[0]), lost), lost)

    def is_solved(self, state: SokobanState) -> bool:
        return bool(self.instance.goals.issuperset(state[1]))

    def compact_observation(self) -> str:
        player, boxes = self.state
        names = cell_names(self.size)
        return f"size {self.size} you {names[player]} box {format_cells(self.size, boxes)} {self.instance.static_text}"

    def ascii_observation(self) -> str:
        (player, boxes), goals = self.state, self.instance.goals
        glyphs = dict.fromkeys(self.instance.grid.walls, "#") | dict.fromkeys(goals, "o")
        glyphs |= {box: str(number) for number, box in enumerate(boxes, 1)}
        glyphs[player] = "+" if player in goals else "@"
        places = "; ".join(f"box {n} is at {describe_cell(self.size, box)}" for n, box in enumerate(boxes, 1))
        targets = "; ".join(f"a goal is at {describe_cell(self.size, goal)}" for goal in sorted(goals))
        return f"{draw_grid(self.size, glyphs)}\nYou are at {describe_cell(self.size, player)}; {places}; {targets}."
