"""Policies on our trees, and the same in OpenSpiel's hands."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pyspiel

from palestra.envs.rules import rules_of
from palestra.envs.vector.openspiel import SpielRules
from palestra.exact.tree import Tree, tree_of


@cache
def tree(env_type: str, **options: Any) -> Tree:
    rules = rules_of(env_type, **options)
    assert rules is not None
    return tree_of(rules)


@cache
def spiel_tree(game: str) -> Tree:
    """A game of OpenSpiel's; words are its own names for information states."""
    return tree_of(SpielRules(game))


def random_policy(tree: Tree, seed: int, sharpness: float = 1.0) -> np.ndarray:
    """Legal actions with random probabilities, some of them 0."""
    rng = np.random.default_rng(seed)
    odds = tree.legal * rng.exponential(size=tree.legal.shape) ** sharpness
    odds *= (rng.random(odds.shape) < 0.8) | (odds == odds.max(1, keepdims=True))
    return np.asarray(odds / odds.sum(1, keepdims=True))


def seated(tree: Tree, player: int, policy: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """`rest`, where that player plays by `policy`."""
    joined = rest.copy()
    joined[tree.of(player)] = policy[tree.of(player)]
    return joined


def table(tree: Tree, policy: np.ndarray) -> Any:
    """A policy on a `spiel_tree` as OpenSpiel's."""
    rows = zip(tree.words, tree.legal, policy, strict=True)
    return pyspiel.TabularPolicy(
        {words: [(int(a), float(row[a])) for a in np.flatnonzero(legal)] for words, legal, row in rows}
    )
