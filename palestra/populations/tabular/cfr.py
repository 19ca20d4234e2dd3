"""Counterfactual regret minimisation in small games."""

from __future__ import annotations

import numpy as np

from palestra.populations.tabular.best_response import sequence_values
from palestra.populations.tabular.game_tree import (
    GameTree,
    end_probabilities,
    policy_from_plan,
    realization_plan,
    write_realization_plan,
)


class CFRSolver:
    """Counterfactual regret minimisation (Zinkevich et al., 2007) with alternating updates; with `is_plus` CFR+
    (Tammelin, 2014): regrets are clipped at zero and the average weighs iteration t by t.

    `action_mask` bool [I, A] restricts the players to some of the legal actions; each information state must keep at
    least one.
    """

    def __init__(self, tree: GameTree, *, plus: bool = False, action_mask: np.ndarray | None = None) -> None:
        self.tree = tree
        self.is_plus = plus
        self.action_mask = tree.action_mask if action_mask is None else action_mask
        self.iterations = 0
        self.regrets = np.zeros(tree.action_mask.shape)
        self.plan_sum = np.zeros(tree.num_sequences)  # weighted sum of the realisation plans
        self.default_policy = self.action_mask / self.action_mask.sum(1, keepdims=True)
        self.policy = self.default_policy.copy()
        self.current_plans = realization_plan(tree, self.policy)

    def run(self, iterations: int) -> None:
        """Runs this many more iterations."""
        for _ in range(iterations):
            self.iterations += 1
            self.plan_sum += self.current_plans * (self.iterations if self.is_plus else 1)
            for player in range(self.tree.num_players):
                self._update_player(player)

    def average_policy(self) -> np.ndarray:
        """Returns the average policy, float64 [I, A]; uniform where no play reaches."""
        return policy_from_plan(self.tree, self.plan_sum, self.default_policy)

    def _update_player(self, player: int) -> None:
        """Updates one player's regrets against the current policies, then its own policy."""
        tree = self.tree
        rows = self.tree.player_rows(player)
        regrets = self.regrets[rows]
        regrets += self._advantages(player)[rows]
        if self.is_plus:
            np.maximum(regrets, 0, out=regrets)
        self.policy[rows] = self._regret_matching(rows)
        write_realization_plan(self.current_plans, tree, self.policy, player)

    def _advantages(self, player: int) -> np.ndarray:
        """Returns the counterfactual advantage [I, A] of each action over the current policy."""
        tree = self.tree
        won = sequence_values(tree, end_probabilities(tree, self.current_plans, player), player)
        rows = won[tree.num_players :].reshape(self.action_mask.shape)
        for level in reversed(tree.levels[player]):
            mean = np.einsum("ia,ia->i", self.policy[level], rows[level])
            np.add.at(won, tree.parent_sequence[level], mean)
            rows[level] -= mean[:, None]
        return np.where(self.action_mask, rows, 0)

    def _regret_matching(self, rows: slice) -> np.ndarray:
        """Returns actions in proportion to their positive regrets; uniform if none is positive."""
        positive = np.maximum(self.regrets[rows], 0)
        total = positive.sum(1, keepdims=True)
        return np.where(total > 0, positive / np.where(total > 0, total, 1.0), self.default_policy[rows])
