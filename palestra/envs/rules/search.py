"""Depth-limited negamax search in two-player games without chance, used by scripted experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from palestra.envs.rules.base import TERMINAL, Rules

StateEvaluator = Callable[[Any, int], float]  # estimated value of a state for a player, in (-1, 1)
EARLY_RESULT_BONUS = 1e-4  # relative bonus per unused move of depth: an earlier win beats a later one


def best_actions(rules: Rules[Any], state: Any, depth: int, evaluate_state: StateEvaluator) -> list[int]:
    """Returns the actions of highest value for the player to move, by negamax with alpha-beta pruning, `depth` moves
    deep.

    `evaluate_state(state, player)` estimates states where play has not ended by then; if `depth` covers the longest
    game, play is perfect. For two-player zero-sum games without chance.
    """
    worth: dict[int, float] = {}
    for action in rules.legal_actions(state):
        best = max(worth.values(), default=-math.inf)
        # The next float below the best value: an action that equals the best then differs from a worse one.
        floor = math.nextafter(best, -math.inf) if worth else -math.inf
        worth[action] = _negamax(
            rules,
            rules.next_state(state, action),
            rules.current_player(state),
            depth - 1,
            evaluate_state,
            floor,
            math.inf,
        )
    best = max(worth.values())
    return [action for action, value in worth.items() if value == best]


def _negamax(
    rules: Rules[Any], state: Any, player: int, depth: int, evaluate_state: StateEvaluator, floor: float, ceiling: float
) -> float:
    """Returns the value of `state` for `player`; exact only between `floor` and `ceiling`."""
    turn = rules.current_player(state)
    if turn == TERMINAL:
        return float(rules.returns(state)[player] * (1 + EARLY_RESULT_BONUS * depth))
    if depth <= 0:
        return evaluate_state(state, player)
    if turn != player:
        return -_negamax(rules, state, turn, depth, evaluate_state, -ceiling, -floor)
    best = -math.inf
    for action in rules.legal_actions(state):
        after = rules.next_state(state, action)
        best = max(best, _negamax(rules, after, player, depth - 1, evaluate_state, max(floor, best), ceiling))
        if best >= ceiling:
            break
    return best
