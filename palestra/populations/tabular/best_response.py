"""Best responses and exploitability."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from palestra.populations.tabular.game_tree import GameTree, end_probabilities, expected_returns, realization_plan


def sequence_values(tree: GameTree, end_probs: np.ndarray, player: int) -> np.ndarray:
    """Returns the value of each sequence of a player, float64 [S], from the ends directly after it, weighted by the
    probability `end_probs` [T] that the others and chance give each end."""
    return np.bincount(tree.end_sequences[:, player], end_probs * tree.returns[:, player], tree.num_sequences)


def best_response(
    tree: GameTree, policy: np.ndarray, player: int, *, action_mask: np.ndarray | None = None
) -> tuple[np.ndarray, float]:
    """Returns `policy` [I, A] with the player's rows replaced by a deterministic best response to the others' rows (the
    first of equally good actions), and its expected return. `action_mask` bool [I, A] restricts the response to these
    actions."""
    return best_response_to_reach(
        tree, policy, end_probabilities(tree, realization_plan(tree, policy), player), player, action_mask
    )


def best_response_to_joint(
    tree: GameTree, policies: Sequence[np.ndarray], probabilities: Sequence[float] | np.ndarray, player: int
) -> tuple[np.ndarray, float]:
    """Returns what `best_response` returns, but one of `policies` is drawn with `probabilities` once per game for all
    other players together: their play may be correlated, as in a (coarse) correlated equilibrium."""
    reached = np.zeros(len(tree.end_sequences))
    for policy, probability in zip(policies, probabilities, strict=True):
        if probability:
            reached += probability * end_probabilities(tree, realization_plan(tree, policy), player)
    return best_response_to_reach(tree, policies[0], reached, player)


def best_response_to_reach(
    tree: GameTree, policy: np.ndarray, end_probs: np.ndarray, player: int, action_mask: np.ndarray | None = None
) -> tuple[np.ndarray, float]:
    """Returns what `best_response` does, from the others' and chance's probability [T] of each end."""
    best, value = best_actions(
        tree, sequence_values(tree, end_probs, player), player, tree.action_mask if action_mask is None else action_mask
    )
    answer = policy.copy()
    rows = tree.player_rows(player)
    answer[rows] = 0
    answer[np.arange(rows.start, rows.stop), best[rows]] = 1
    return answer, value


def best_actions(
    tree: GameTree, sequence_value: np.ndarray, player: int, action_mask: np.ndarray
) -> tuple[np.ndarray, float]:
    """Returns the player's best actions int64 [I] (0 in rows of others) and their expected return, from the values
    `sequence_value` [S] of its sequences (see `sequence_values`). Changes `sequence_value` in place: it then holds the
    value of each sequence under best play."""
    rows = sequence_value[tree.num_players :].reshape(action_mask.shape)
    best = np.zeros(len(action_mask), np.int64)
    for level in reversed(tree.levels[player]):
        choices = np.where(action_mask[level], rows[level], -np.inf)
        choice = choices.argmax(1)
        best[level] = choice
        np.add.at(sequence_value, tree.parent_sequence[level], choices[np.arange(len(choice)), choice])
    return best, float(sequence_value[player])


def best_response_values(tree: GameTree, policy: np.ndarray, *, action_mask: np.ndarray | None = None) -> np.ndarray:
    """Returns each player's return float64 [n] of a best response to the others' rows of `policy` [I, A]."""
    plans = realization_plan(tree, policy)
    allowed = tree.action_mask if action_mask is None else action_mask
    return np.array(
        [
            best_actions(tree, sequence_values(tree, end_probabilities(tree, plans, player), player), player, allowed)[
                1
            ]
            for player in range(tree.num_players)
        ]
    )


def nash_conv(tree: GameTree, policy: np.ndarray, *, action_mask: np.ndarray | None = None) -> float:
    """Returns NashConv (Lanctot et al., 2017): the sum over players of what a best response to the others gains, in
    units of return; 0 at an equilibrium. Exploitability is NashConv divided by the number of players."""
    return float((best_response_values(tree, policy, action_mask=action_mask) - expected_returns(tree, policy)).sum())
