"""Solving a game by regrets (CFR, CFR+) or by fictitious play."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from palestra.exact.responses import best_response, gains
from palestra.exact.tree import Tree, behaviour, plan, plan_into, reach, uniform


class Solver(Protocol):
    """Something whose average policy nears an equilibrium of a two-player zero-sum game."""

    def run(self, iterations: int) -> None: ...

    def average(self) -> np.ndarray:
        """The policy [I, A] found so far."""
        ...


class CFR:
    """Counterfactual regret minimisation (Zinkevich et al., 2007), players in turn; with `plus` CFR+ (Tammelin, 2014):
    regrets are cut off at zero, and the average weighs iteration t by t.

    `legal` [I, A] keeps every player to some of the actions; each information state must have one left.
    """

    def __init__(self, tree: Tree, *, plus: bool = False, legal: np.ndarray | None = None) -> None:
        self.tree, self.plus = tree, plus
        self.legal = tree.legal if legal is None else legal
        self.iterations = 0
        self.regrets = np.zeros(tree.legal.shape)
        self.summed = np.zeros(tree.sequences)  # realisation plans, weighted
        self.fallback = self.legal / self.legal.sum(1, keepdims=True)
        self.policy = self.fallback.copy()
        self.plans = plan(tree, self.policy)

    def run(self, iterations: int) -> None:
        for _ in range(iterations):
            self.iterations += 1
            self.summed += self.plans * (self.iterations if self.plus else 1)
            for player in range(self.tree.players):
                self._improve(player)

    def average(self) -> np.ndarray:
        """The average policy [I, A]; where it never comes, every allowed action alike."""
        return behaviour(self.tree, self.summed, self.fallback)

    def _improve(self, player: int) -> None:
        """One player's regrets, given what the others play now; its policy by regret matching."""
        tree, own = self.tree, self.tree.of(player)
        regrets = self.regrets[own]
        regrets += self._counterfactual(player)[own]
        if self.plus:
            np.maximum(regrets, 0, out=regrets)
        self.policy[own] = self._matched(own)
        plan_into(self.plans, tree, self.policy, player)

    def _counterfactual(self, player: int) -> np.ndarray:
        """What each action wins more [I, A] than the policy does, as likely as the others make it to come up."""
        tree = self.tree
        won = gains(tree, reach(tree, self.plans, player), player)
        rows = won[tree.players :].reshape(self.legal.shape)
        for level in reversed(tree.levels[player]):
            mean = np.einsum("ia,ia->i", self.policy[level], rows[level])
            np.add.at(won, tree.parent[level], mean)
            rows[level] -= mean[:, None]
        return np.where(self.legal, rows, 0)

    def _matched(self, own: slice) -> np.ndarray:
        """Every action in proportion to its regret, of those above zero; all alike where there is none."""
        positive = np.maximum(self.regrets[own], 0)
        total = positive.sum(1, keepdims=True)
        return np.where(total > 0, positive / np.where(total > 0, total, 1.0), self.fallback[own])


class FictitiousPlay:
    """Extensive-form fictitious play (Heinrich et al., 2015): every player answers the others' average policy best, and
    the answer joins the average, all with equal weight. It starts from uniform play."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.iterations = 0
        self.policy = uniform(tree)
        self.summed = plan(tree, self.policy)

    def run(self, iterations: int) -> None:
        for _ in range(iterations):
            self.iterations += 1
            average = self.average()
            for player in range(self.tree.players):
                answer, _ = best_response(self.tree, average, player)
                self.policy[self.tree.of(player)] = answer[self.tree.of(player)]
            self.summed += plan(self.tree, self.policy)

    def average(self) -> np.ndarray:
        """The average policy [I, A]; where it never comes, every legal action alike."""
        return behaviour(self.tree, self.summed, uniform(self.tree))
