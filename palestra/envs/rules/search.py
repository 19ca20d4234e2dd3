"""The best moves of two-player games without chance, as far ahead as one looks: what an expert plays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from palestra.envs.rules.base import OVER, Rules

Judge = Callable[[Any, int], float]  # how good a state looks to a player, in (-1, 1)
SOON = 1e-4  # what a result is worth less for each move that it is away: a win now beats a win later


def best_actions(rules: Rules[Any], state: Any, depth: int, judge: Judge) -> list[int]:
    """The actions of the player who moves that are worth most, looking `depth` moves ahead (negamax with alpha-beta
    cuts). Where play has not ended by then, `judge` says how the state looks; with a depth as long as the game can last
    play is perfect. For zero-sum games of two players without chance."""
    worth: dict[int, float] = {}
    for action in rules.legal(state):
        best = max(worth.values(), default=-math.inf)
        # The least float below the best so far: an action as good as that is then told from a worse one.
        floor = math.nextafter(best, -math.inf) if worth else -math.inf
        worth[action] = _worth(rules, rules.next(state, action), rules.turn(state), depth - 1, judge, floor, math.inf)
    best = max(worth.values())
    return [action for action, value in worth.items() if value == best]


def _worth(rules: Rules[Any], state: Any, player: int, depth: int, judge: Judge, floor: float, ceiling: float) -> float:
    """What `state` is worth to `player`; only exact between `floor` and `ceiling`."""
    turn = rules.turn(state)
    if turn == OVER:
        return float(rules.returns(state)[player] * (1 + SOON * depth))
    if depth <= 0:
        return judge(state, player)
    if turn != player:
        return -_worth(rules, state, turn, depth, judge, -ceiling, -floor)
    best = -math.inf
    for action in rules.legal(state):
        after = rules.next(state, action)
        best = max(best, _worth(rules, after, player, depth - 1, judge, max(floor, best), ceiling))
        if best >= ceiling:
            break
    return best
