"""Rules of Sokoban on a grid, and a solver: A* over pushes, with all player positions of one region as one state."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from itertools import count, permutations

from palestra.envs.text.grid.grid import OPPOSITE, Grid, distances, manhattan

SokobanState = tuple[int, tuple[int, ...]]  # the player's cell, and the boxes' cells by box number


def move(board: Grid, state: SokobanState, direction: int) -> SokobanState | None:
    """Returns the state after one player move, which may push a box; None if a wall or a second box blocks it."""
    player, boxes = state
    target = board.neighbors[player][direction]
    if target < 0:
        return None
    if target not in boxes:
        return target, boxes
    beyond = board.neighbors[target][direction]
    if beyond < 0 or beyond in boxes:
        return None
    return target, tuple([beyond if box == target else box for box in boxes])


def push(board: Grid, state: SokobanState, box: int, direction: int) -> SokobanState | None:
    """Returns the state after walking behind box number `box` and pushing it once; None if either is impossible."""
    player, boxes = state
    stand = board.neighbors[boxes[box]][OPPOSITE[direction]]
    if stand < 0 or stand in boxes or stand not in distances(board, player, boxes):
        return None
    return move(board, (stand, boxes), direction)


def steps_to_push(board: Grid, state: SokobanState, box: int, direction: int) -> int:
    """Returns the minimum number of moves to the push position. Raises ValueError if it cannot be reached."""
    player, boxes = state
    stand = board.neighbors[boxes[box]][OPPOSITE[direction]]
    far = distances(board, player, boxes)
    if stand not in far:
        raise ValueError(f"box {box} cannot be pushed {direction} from {state}")
    return far[stand]


def box_goal_distance(size: int, boxes: Iterable[int], goals: Iterable[int]) -> int:
    """Returns the minimum total Manhattan distance over all assignments of boxes to goals."""
    there = tuple(goals)
    here = tuple(boxes)
    if len(here) == 1:
        return manhattan(size, here[0], there[0])
    return min(sum(manhattan(size, b, g) for b, g in zip(here, order, strict=True)) for order in permutations(there))


def solve(
    board: Grid, state: SokobanState, goals: frozenset[int], *, heuristic_weight: int = 1, max_states: int = 50_000
) -> list[tuple[int, int]] | None:
    """Returns pushes (box number, direction) that solve the puzzle; None if a search of `max_states` states finds none.

    With `heuristic_weight=1` (A*) the solution has the fewest pushes. A larger `heuristic_weight` (weighted A*)
    multiplies the distance heuristic: the search is much faster, but the solution may be longer.
    """
    fresh = count()
    start = _key(board, state)
    alive = live_cells(board, goals)
    costs = {start: 0}
    queue: list[tuple[int, int, int, SokobanState]] = [(0, 0, next(fresh), state)]
    came: dict[tuple[int, tuple[int, ...]], tuple[SokobanState, tuple[int, int]]] = {}
    while queue and alive.issuperset(state[1]) and len(costs) < max_states:
        _, minus_cost, _, here = heapq.heappop(queue)
        key = _key(board, here)
        cost = -minus_cost
        if cost > costs[key]:
            continue
        if goals.issuperset(here[1]):
            return _pushes(board, came, here, start)
        for after, pushed in _pushes_from(board, here, alive):
            after_key = _key(board, after)
            if cost + 1 < costs.get(after_key, max_states):
                costs[after_key] = cost + 1
                came[after_key] = (here, pushed)
                bound = cost + 1 + heuristic_weight * box_goal_distance(board.size, after[1], goals)
                heapq.heappush(queue, (bound, -cost - 1, next(fresh), after))
    return None


def moves_to_solve(board: Grid, goals: Iterable[int]) -> dict[tuple[int, int], int]:
    """Returns the minimum number of moves to push a single box onto a goal, by the cells of player and box.

    States from which it cannot be done are missing. Breadth-first, backwards from the solved states.
    """
    there = set(goals)
    cells = [cell for cell in range(board.size**2) if cell not in board.walls]
    far = {(player, goal): 0 for goal in there for player in cells if player != goal}
    queue = deque(far)
    while queue:
        player, box = state = queue.popleft()
        for direction in range(4):
            came = board.neighbors[player][OPPOSITE[direction]]
            if came < 0:
                continue
            before = [(came, box)] if came != box else []
            if board.neighbors[player][direction] == box:
                before.append((came, player))  # this move pushed the box to where it is
            for earlier in before:
                if earlier not in far and earlier[1] not in there:
                    far[earlier] = far[state] + 1
                    queue.append(earlier)
    return far


def live_cells(board: Grid, goals: Iterable[int]) -> set[int]:
    """Returns the cells from which a single box can be pushed to some goal, found by pulling boxes from the goals."""
    live = set(goals)
    todo = list(goals)
    while todo:
        cell = todo.pop()
        for direction in range(4):
            before = board.neighbors[cell][direction]
            if before >= 0 and before not in live and board.neighbors[before][direction] >= 0:
                live.add(before)
                todo.append(before)
    return live


def _key(board: Grid, state: SokobanState) -> tuple[int, tuple[int, ...]]:
    """Returns the search key, equal for states that differ only in box numbers or the player's cell within a region."""
    return min(distances(board, state[0], state[1])), tuple(sorted(state[1]))


def _pushes_from(board: Grid, state: SokobanState, alive: set[int]) -> list[tuple[SokobanState, tuple[int, int]]]:
    player, boxes = state
    region = distances(board, player, boxes)
    found = []
    for number, box in enumerate(boxes):
        for direction in range(4):
            if board.neighbors[box][OPPOSITE[direction]] in region:
                after = move(board, (board.neighbors[box][OPPOSITE[direction]], boxes), direction)
                if after and after[1][number] in alive:
                    found.append((after, (number, direction)))
    return found


def _pushes(
    board: Grid,
    came: dict[tuple[int, tuple[int, ...]], tuple[SokobanState, tuple[int, int]]],
    state: SokobanState,
    start: tuple[int, tuple[int, ...]],
) -> list[tuple[int, int]]:
    pushes = []
    while (key := _key(board, state)) != start:
        state, pushed = came[key]
        pushes.append(pushed)
    return pushes[::-1]
