"""Iterative solvers of small games: CFR, CFR+ and extensive-form fictitious play."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from palestra.exact.responses import best_response, gains
from palestra.exact.tree import Tree, behaviour, plan, plan_into, reach, uniform


class Solver(Protocol):
    """A solver whose average policy converges to an equilibrium of a two-player zero-sum game."""

    def run(self, iterations: int) -> None: ...

    def average(self) -> np.ndarray:
        """Returns the current average policy, float64 [I, A]."""
        ...


class CFR:
    """Counterfactual regret minimisation (Zinkevich et al., 2007) with alternating updates; with `plus` CFR+ (Tammelin,
    2014): regrets are clipped at zero and the average weighs iteration t by t.

    `legal` bool [I, A] restricts the players to some of the legal actions; each information state must keep at least
    one.
    """

    def __init__(self, tree: Tree, *, plus: bool = False, legal: np.ndarray | None = None) -> None:
        self.tree, self.plus = tree, plus
        self.legal = tree.legal if legal is None else legal
        self.iterations = 0
        self.regrets = np.zeros(tree.legal.shape)
        self.summed = np.zeros(tree.sequences)  # weighted sum of the realisation plans
        self.fallback = self.legal / self.legal.sum(1, keepdims=True)
        self.policy = self.fallback.copy()
        self.plans = plan(tree, self.policy)

    def run(self, iterations: int) -> None:
        """Runs this many more iterations."""
        for _ in range(iterations):
            self.iterations += 1
            self.summed += self.plans * (self.iterations if self.plus else 1)
            for player in range(self.tree.players):
                self._improve(player)

    def average(self) -> np.ndarray:
        """Returns the average policy, float64 [I, A]; uniform over the allowed actions in information states that it
        never reaches."""
        return behaviour(self.tree, self.summed, self.fallback)

    def _improve(self, player: int) -> None:
        """Updates one player's regrets against the current policies of the others, and its policy by regret
        matching."""
        tree, own = self.tree, self.tree.of(player)
        regrets = self.regrets[own]
        regrets += self._counterfactual(player)[own]
        if self.plus:
            np.maximum(regrets, 0, out=regrets)
        self.policy[own] = self._matched(own)
        plan_into(self.plans, tree, self.policy, player)

    def _counterfactual(self, player: int) -> np.ndarray:
        """Returns the counterfactual advantage [I, A] of each action over the current policy."""
        tree = self.tree
        won = gains(tree, reach(tree, self.plans, player), player)
        rows = won[tree.players :].reshape(self.legal.shape)
        for level in reversed(tree.levels[player]):
            mean = np.einsum("ia,ia->i", self.policy[level], rows[level])
            np.add.at(won, tree.parent[level], mean)
            rows[level] -= mean[:, None]
        return np.where(self.legal, rows, 0)

    def _matched(self, own: slice) -> np.ndarray:
        """Regret matching: actions in proportion to their positive regrets; uniform if none is positive."""
        positive = np.maximum(self.regrets[own], 0)
        total = positive.sum(1, keepdims=True)
        return np.where(total > 0, positive / np.where(total > 0, total, 1.0), self.fallback[own])


class FictitiousPlay:
    """Extensive-form fictitious play (Heinrich et al., 2015): every player plays a best response to the others' average
    policy, and the response joins the average with equal weight. Starts from the uniform policy."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.iterations = 0
        self.policy = uniform(tree)
        self.summed = plan(tree, self.policy)

    def run(self, iterations: int) -> None:
        """Runs this many more iterations."""
        for _ in range(iterations):
            self.iterations += 1
            average = self.average()
            for player in range(self.tree.players):
                answer, _ = best_response(self.tree, average, player)
                self.policy[self.tree.of(player)] = answer[self.tree.of(player)]
            self.summed += plan(self.tree, self.policy)

    def average(self) -> np.ndarray:
        """Returns the average policy, float64 [I, A]; uniform over the legal actions in information states that it
        never reaches."""
        return behaviour(self.tree, self.summed, uniform(self.tree))
