"""Rules of level-based foraging, compiled: placement, moves and loading, and what the seats observe."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from palestra.core.accel.jit import jit
from palestra.envs.batch.native import store_final
from palestra.envs.batch.rng import next_uint32, random_below

ROW = 0
COLUMN = 1
LEVEL = 2
MAX_PLACEMENT_TRIES = 1000  # random tries to find a free cell, as in the package


class ForagingParams(NamedTuple):
    """The options as numbers, for the kernels. `max_food_level` is 0 if the highest food level is what the three
    weakest agents can load together."""

    size: int
    sight: int
    max_steps: int
    min_agent_level: int
    max_agent_level: int
    min_food_level: int
    max_food_level: int
    food_level_scale: int
    cooperative: bool
    normalize: bool
    penalty: float


class ForagingArrays(NamedTuple):
    """The arrays that the kernels change: first the env's own state, then the arrays of the frame. Level 0 means eaten
    or never placed."""

    rng: np.ndarray
    agents: np.ndarray  # [B, N, 3] row, column, level
    food: np.ndarray  # [B, F, 3] row, column, level; sorted by row and column
    total: np.ndarray  # [B] sum of the levels of all food at the start
    steps: np.ndarray  # [B]
    obs: np.ndarray
    action_mask: np.ndarray
    state: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    success: np.ndarray
    final_obs: np.ndarray
    final_state: np.ndarray


@jit
def _skip_permutation(row: np.ndarray, n: int) -> None:
    """Advances the random stream as `Generator.permutation(n)` does: the package shuffles a list of equal bounds.

    For each position from the last to the second, 32 bits are masked to the bit length of the position, until the
    result is a position up to it.
    """
    for last in range(n - 1, 0, -1):
        mask = 1
        while mask < last:
            mask = 2 * mask + 1
        while int(next_uint32(row)) & mask > last:
            pass


@jit
def _is_occupied(agents: np.ndarray, b: int, row: int, column: int) -> bool:
    for n in range(agents.shape[1]):  # noqa: SIM110 - numba has no `any` of a generator
        if agents[b, n, ROW] == row and agents[b, n, COLUMN] == column:
            return True
    return False


@jit
def _near_food(food: np.ndarray, b: int, row: int, column: int) -> bool:
    """True if food lies in one of the eight neighbouring cells, or two cells away in the same row or column."""
    for f in range(food.shape[1]):
        if food[b, f, LEVEL] > 0:
            rows = abs(food[b, f, ROW] - row)
            columns = abs(food[b, f, COLUMN] - column)
            if (rows <= 1 and columns <= 1) or (min(rows, columns) == 0 and max(rows, columns) <= 2):
                return True
    return False


@jit
def _place_agents(g: ForagingArrays, rules: ForagingParams, b: int) -> None:
    """Places one agent after the other. As in the package, agents that are not placed yet still block the cells of the
    last game."""
    stream = g.rng[b]
    agents = g.agents.shape[1]
    _skip_permutation(stream, agents)
    for n in range(agents):
        for _ in range(MAX_PLACEMENT_TRIES):
            row = random_below(stream, rules.size)
            column = random_below(stream, rules.size)
            if not _is_occupied(g.agents, b, row, column):
                g.agents[b, n, ROW], g.agents[b, n, COLUMN] = row, column
                g.agents[b, n, LEVEL] = rules.min_agent_level + random_below(
                    stream, rules.max_agent_level - rules.min_agent_level + 1
                )
                break


@jit
def _three_weakest(g: ForagingArrays, b: int) -> int:
    """Returns the sum of the three lowest agent levels."""
    agents = g.agents.shape[1]
    total = 0
    for n in range(agents):
        level = g.agents[b, n, LEVEL]
        weaker = 0
        for m in range(agents):
            other = g.agents[b, m, LEVEL]
            weaker += other < level or (other == level and m < n)
        if weaker < 3:
            total += level
    return total


@jit
def _insert_food(g: ForagingArrays, b: int, count: int, row: int, column: int, level: int) -> None:
    """Inserts food into the first `count` entries, sorted by row and column: the order in the observations."""
    at = count
    while at > 0 and (g.food[b, at - 1, ROW], g.food[b, at - 1, COLUMN]) > (row, column):
        for part in range(3):
            g.food[b, at, part] = g.food[b, at - 1, part]
        at -= 1
    g.food[b, at, ROW], g.food[b, at, COLUMN], g.food[b, at, LEVEL] = row, column, level


@jit
def _place_food(g: ForagingArrays, rules: ForagingParams, b: int) -> None:
    """Places food off the border and apart; less food than asked for if random search finds no cell."""
    stream = g.rng[b]
    most = g.food.shape[1]
    high = rules.max_food_level if rules.max_food_level > 0 else _three_weakest(g, b)
    low = high if rules.cooperative else rules.min_food_level
    g.food[b] = 0
    _skip_permutation(stream, most)
    count = 0
    total = 0
    for _ in range(MAX_PLACEMENT_TRIES):
        if count == most:
            break
        row = 1 + random_below(stream, rules.size - 2)
        column = 1 + random_below(stream, rules.size - 2)
        if not _near_food(g.food, b, row, column) and not _is_occupied(g.agents, b, row, column):
            level = low + random_below(stream, high - low + 1)
            _insert_food(g, b, count, row, column, level)
            count += 1
            total += level
    g.total[b] = total


@jit
def _begin_game(g: ForagingArrays, rules: ForagingParams, b: int) -> None:
    _place_agents(g, rules, b)
    _place_food(g, rules, b)
    g.steps[b] = 0


@jit
def _put(row: np.ndarray, at: int, y: float, x: float, level: float) -> int:
    row[at], row[at + 1], row[at + 2] = y, x, level
    return at + 3


@jit
def _write_observation(row: np.ndarray, agents: np.ndarray, food: np.ndarray, b: int, n: int, sight: int) -> None:
    """Writes the observation of seat n: food, the agent itself, other agents, each as row, column and level, relative
    to the top left corner of its field of view; -1, -1, 0 for what it cannot see.

    Near the north and west border it is the board's corner, and the hidden part of the field of view is added on the
    opposite side for agents but not for food (as in the package).
    """
    y = agents[b, n, ROW]
    x = agents[b, n, COLUMN]
    at = 0
    top = max(y - sight, 0)
    left = max(x - sight, 0)
    for f in range(food.shape[1]):
        row_f = food[b, f, ROW]
        column_f = food[b, f, COLUMN]
        level = food[b, f, LEVEL]
        if level > 0 and abs(row_f - y) <= sight and abs(column_f - x) <= sight:
            at = _put(row, at, row_f - top, column_f - left, level)
    while at < 3 * food.shape[1]:
        at = _put(row, at, -1, -1, 0)
    at = _put(row, at, y - top, x - left, agents[b, n, LEVEL])
    for m in range(agents.shape[1]):
        row_m = agents[b, m, ROW] - top
        column_m = agents[b, m, COLUMN] - left
        if m != n and 0 <= row_m <= 2 * sight and 0 <= column_m <= 2 * sight:
            at = _put(row, at, row_m, column_m, agents[b, m, LEVEL])
    while at < len(row):
        at = _put(row, at, -1, -1, 0)


@jit
def _write_action_mask(
    action_mask: np.ndarray, agents: np.ndarray, food: np.ndarray, b: int, n: int, size: int
) -> None:
    """Writes the action mask of seat n: on the board, not onto food; loading only beside food."""
    y = agents[b, n, ROW]
    x = agents[b, n, COLUMN]
    load = False
    north = y > 0
    south = y < size - 1
    west = x > 0
    east = x < size - 1
    for f in range(food.shape[1]):
        down = food[b, f, ROW] - y
        right = food[b, f, COLUMN] - x
        if food[b, f, LEVEL] > 0 and abs(down) + abs(right) == 1:
            load = True
            north = north and down != -1
            south = south and down != 1
            west = west and right != -1
            east = east and right != 1
    action_mask[b, n, 1], action_mask[b, n, 2], action_mask[b, n, 3], action_mask[b, n, 4] = north, south, west, east
    action_mask[b, n, 5] = load


@jit
def _write_state(row: np.ndarray, agents: np.ndarray, food: np.ndarray, b: int, rules: ForagingParams) -> None:
    at = 0
    far = rules.size - 1
    for n in range(agents.shape[1]):
        level = agents[b, n, LEVEL] / rules.max_agent_level
        at = _put(row, at, agents[b, n, ROW] / far, agents[b, n, COLUMN] / far, level)
    for f in range(food.shape[1]):
        at = _put(row, at, food[b, f, ROW] / far, food[b, f, COLUMN] / far, food[b, f, LEVEL] / rules.food_level_scale)


@jit
def _write(g: ForagingArrays, rules: ForagingParams, b: int) -> None:
    agents = g.agents
    food = g.food
    for n in range(agents.shape[1]):
        _write_observation(g.obs[b, n], agents, food, b, n, rules.sight)
        _write_action_mask(g.action_mask, agents, food, b, n, rules.size)
    _write_state(g.state[b], agents, food, b, rules)
    g.state[b, -1] = g.steps[b] / rules.max_steps


@jit
def _move(agents: np.ndarray, b: int, chosen_N: np.ndarray, to_N2: np.ndarray) -> None:
    """Moves all agents at once; of several that want a cell (who stays wants its own) none moves."""
    N = agents.shape[1]
    for n in range(N):
        action = chosen_N[n]
        to_N2[n, 0] = agents[b, n, ROW] + (action == 2) - (action == 1)
        to_N2[n, 1] = agents[b, n, COLUMN] + (action == 4) - (action == 3)
    for n in range(N):
        alone = True
        for m in range(N):
            if m != n and to_N2[m, 0] == to_N2[n, 0] and to_N2[m, 1] == to_N2[n, 1]:
                alone = False
        if alone:
            agents[b, n, ROW], agents[b, n, COLUMN] = to_N2[n, 0], to_N2[n, 1]


@jit
def _beside(agents: np.ndarray, food: np.ndarray, b: int, n: int, f: int) -> bool:
    return abs(agents[b, n, ROW] - food[b, f, ROW]) + abs(agents[b, n, COLUMN] - food[b, f, COLUMN]) == 1


@jit
def _load(g: ForagingArrays, rules: ForagingParams, b: int, chosen_N: np.ndarray) -> int:
    """Writes the rewards of loading and returns how much food is left. No agent is beside two foods."""
    agents = g.agents.shape[1]
    left = 0
    for f in range(g.food.shape[1]):
        level = g.food[b, f, LEVEL]
        strength = 0
        if level == 0:
            continue
        for n in range(agents):
            if chosen_N[n] == 5 and _beside(g.agents, g.food, b, n, f):
                strength += g.agents[b, n, LEVEL]
        share = float(strength * g.total[b]) if rules.normalize else 1.0
        for n in range(agents):
            if chosen_N[n] == 5 and _beside(g.agents, g.food, b, n, f):
                g.rewards[b, n] = -rules.penalty if strength < level else g.agents[b, n, LEVEL] * level / share
        if strength >= level:
            g.food[b, f, ROW], g.food[b, f, COLUMN], g.food[b, f, LEVEL] = 0, 0, 0
        else:
            left += 1
    return left


@jit
def begin_all(g: ForagingArrays, rules: ForagingParams) -> None:
    """Starts a new game in every place."""
    for b in range(len(g.steps)):
        g.agents[b] = -1
        _begin_game(g, rules, b)
        _write(g, rules, b)


@jit
def step_all(g: ForagingArrays, rules: ForagingParams, actions: np.ndarray) -> None:
    """Plays a step of every game; one that ends starts anew in it."""
    games, agents = actions.shape
    chosen_N = np.zeros(agents, np.int64)
    to_N2 = np.zeros((agents, 2), np.int64)
    for b in range(games):
        for n in range(agents):
            action = actions[b, n]
            chosen_N[n] = action if 0 < action < 6 and g.action_mask[b, n, action] else 0
            g.rewards[b, n] = 0.0
        g.steps[b] += 1
        _move(g.agents, b, chosen_N, to_N2)
        g.terminated[b] = _load(g, rules, b, chosen_N) == 0
        g.success[b] = g.terminated[b]
        g.truncated[b] = not g.terminated[b] and g.steps[b] >= rules.max_steps
        _write(g, rules, b)
        if g.terminated[b] or g.truncated[b]:
            store_final(g, b)
            _begin_game(g, rules, b)
            _write(g, rules, b)
