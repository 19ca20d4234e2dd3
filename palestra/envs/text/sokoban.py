"""Sokoban env: push every box onto a goal, a few moves per turn. Boxes cannot be pulled out of corners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from palestra.envs.text import sokoban_solver as rules
from palestra.envs.text.grids import (
    DIRECTIONS,
    Grid,
    cell_names,
    drawn,
    grid,
    in_words,
    parse_pushes,
    within,
    written,
)
from palestra.envs.text.options import BoardRendering, Reward
from palestra.envs.text.sokoban_solver import State
from palestra.envs.text.splits import Split, draw
from palestra.envs.text.teams import GridGame, Team

MOST_BOXES = 4
RULES = (
    "You play Sokoban: the player (@) must push every box onto a goal (o) on a square board of cells. Rows count down "
    "from 0 at the top, columns count right from 0 at the left. Free cells are '.', walls and the border are '#', "
    "boxes are their numbers (1, 2, ...), '+' is the player on a goal. A move goes one cell up, down, left or right. "
    "Moving into a box pushes it one cell on, if the cell behind it is free; boxes cannot be pulled, nor two pushed at "
    "once, so a box in a corner is lost. A move that is not possible is skipped and costs a little."
)


@dataclass(frozen=True, eq=False)
class SokobanLayout:
    """One instance; `rest` is the constant part of the compact observation."""

    grid: Grid
    goals: frozenset[int]
    start: State
    rest: str

    @property
    def size(self) -> int:
        return self.grid.size

    @property
    def groups(self) -> tuple[Any, ...]:
        """The cells of the walls, the goals, the boxes and the player."""
        return (self.grid.walls, self.goals, self.start[1], (self.start[0],))

    def solvable(self) -> bool:
        """True if a greedy search over at most 2,000 states solves it; the few harder layouts are not drawn."""
        begun = self.goals.issuperset(self.start[1])
        return not begun and rules.solve(self.grid, self.start, self.goals, greed=5, most=2000) is not None


def sokoban_layout(
    size: int, walls: tuple[int, ...], goals: tuple[int, ...], boxes: tuple[int, ...], player: int
) -> SokobanLayout:
    """Builds an instance from cells; boxes are numbered in the given order."""
    rest = f"goal {written(size, sorted(goals))}" + (f" walls {written(size, sorted(walls))}" if walls else "")
    return SokobanLayout(grid(size, walls), frozenset(goals), (player, boxes), rest)


@lru_cache(maxsize=16_384)  # tree search resets the same seed many times
def _instance(seed: int, size: int, boxes: int, walls: int, split: Split) -> SokobanLayout:
    def propose(rng: np.random.Generator) -> SokobanLayout | None:
        cells = rng.permutation(size * size).tolist()
        cut = (walls, walls + boxes, walls + 2 * boxes)
        parts = (tuple(cells[: cut[0]]), tuple(cells[cut[0] : cut[1]]), tuple(cells[cut[1] : cut[2]]))
        return sokoban_layout(size, *parts, player=cells[cut[2]])

    return draw(seed, propose, split, f"sokoban at size {size}, {boxes} boxes, {walls} walls")


class Sokoban(GridGame):
    """Push all boxes onto goals. A plan has up to `pushes` pushes, an answer of a moving seat up to `moves` moves.

    `size` is the number of rows and columns inside the border; `walls` counts the walls inside it, by default one per
    12 cells. A state is (player, boxes). Raises ValueError if an option is out of range.
    """

    name: ClassVar[str] = "sokoban"
    word = "sokoban"
    rules = RULES

    def __init__(
        self,
        *,
        size: int = 6,
        boxes: int = 1,
        walls: int | None = None,
        split: Split = "train",
        team: Team = "planner_executor",
        turns: int = 4,
        pushes: int = 3,
        moves: int = 6,
        reward: Reward = "dense",
        rendering: BoardRendering = "compact",
    ) -> None:
        within("size", size, 3, 12)
        within("boxes", boxes, 1, MOST_BOXES)
        self.walls = size * size // 12 if walls is None else walls
        within("walls", self.walls, 0, size * size - 2 * boxes - 1)
        within("pushes", pushes, 1, 16)
        self.size, self.boxes, self.split, self.pushes = size, boxes, split, pushes
        self.plan_format = f"A plan is 1 to {pushes} pushes, " + (
            "each a direction, for example: #### left left up"
            if boxes == 1
            else "each the number of a box and a direction, for example: #### 1 left 2 up"
        )
        super().__init__(team, turns, moves, reward, rendering)

    def layout(self, seed: int) -> SokobanLayout:
        return _instance(seed, self.size, self.boxes, self.walls, self.split)

    def parse_plan(self, answer: Any) -> tuple[tuple[int, int], ...] | None:
        return parse_pushes(answer, self.boxes, self.pushes)

    def write_plan(self, plan: tuple[tuple[int, int], ...]) -> str:
        numbered = self.boxes > 1
        return " ".join([f"{box + 1} {DIRECTIONS[d]}" if numbered else DIRECTIONS[d] for box, d in plan])

    def simulate(self, plan: tuple[tuple[int, int], ...]) -> State:
        return [self.state, *self._milestones(self.state, plan)][-1]

    def followed(self, plan: tuple[tuple[int, int], ...], states: Sequence[State]) -> float:
        board, wanted = self.instance.grid, self._milestones(states[0], plan)
        done, begun, last = 0, states[0], states[0]
        for state in states[1:]:
            if state[1] != last[1]:  # a box moved: any unplanned push ends the plan
                if done == len(wanted) or state[1] != wanted[done][1]:
                    return done / len(wanted) if wanted else 0.0
                done, begun = done + 1, state
            last = state
        if done == len(wanted):
            return 1.0 if wanted else 0.0
        far, near = (rules.steps_to_push(board, state, *plan[done]) for state in (begun, last))
        return (done + max(0, far - near) / (far + 1)) / len(wanted)

    def _milestones(self, state: State, plan: tuple[tuple[int, int], ...]) -> list[State]:
        """Returns the state after each push of the plan, up to the first that is impossible or follows the solution."""
        states: list[State] = []
        for box, direction in plan:
            after = rules.push(self.instance.grid, state, box, direction)
            if after is None or self.solved(state):
                break
            states.append(state := after)
        return states

    def move(self, state: State, direction: int) -> State | None:
        return rules.move(self.instance.grid, state, direction)

    def potential(self, state: State) -> int:
        return rules.distance(self.size, state[1], self.instance.goals)

    def solved(self, state: State) -> bool:
        return bool(self.instance.goals.issuperset(state[1]))

    def compact(self) -> str:
        player, boxes = self.state
        names = cell_names(self.size)
        return f"size {self.size} you {names[player]} box {written(self.size, boxes)} {self.instance.rest}"

    def ascii(self) -> str:
        (player, boxes), goals = self.state, self.instance.goals
        glyphs = dict.fromkeys(self.instance.grid.walls, "#") | dict.fromkeys(goals, "o")
        glyphs |= {box: str(number) for number, box in enumerate(boxes, 1)}
        glyphs[player] = "+" if player in goals else "@"
        places = "; ".join(f"box {n} is at {in_words(self.size, box)}" for n, box in enumerate(boxes, 1))
        targets = "; ".join(f"a goal is at {in_words(self.size, goal)}" for goal in sorted(goals))
        return f"{drawn(self.size, glyphs)}\nYou are at {in_words(self.size, player)}; {places}; {targets}."
