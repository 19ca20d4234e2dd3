"""Policies on palestra's game trees, and the same policies in OpenSpiel."""

from functools import cache
from typing import Any

import numpy as np
import pyspiel

from palestra.envs.adapters.openspiel import OpenSpielRules
from palestra.envs.rules_by_env import rules_for_env
from palestra.populations.tabular.game_tree import GameTree, build_game_tree


@cache
def tree(env_type: str, **options: Any) -> GameTree:
    rules = rules_for_env(env_type, **options)
    assert rules is not None
    return build_game_tree(rules)


@cache
def spiel_tree(game: str) -> GameTree:
    """The tree of an OpenSpiel game; information states are named by OpenSpiel's strings."""
    return build_game_tree(OpenSpielRules(game))


def random_policy(tree: GameTree, seed: int, sharpness: float = 1.0) -> np.ndarray:
    """Legal actions with random probabilities, some of them 0."""
    rng = np.random.default_rng(seed)
    odds = tree.action_mask * rng.exponential(size=tree.action_mask.shape) ** sharpness
    odds *= (rng.random(odds.shape) < 0.8) | (odds == odds.max(1, keepdims=True))
    return np.asarray(odds / odds.sum(1, keepdims=True))


def with_player(tree: GameTree, player: int, policy: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """`rest` with that player's actions replaced by those of `policy`."""
    joined = rest.copy()
    joined[tree.player_rows(player)] = policy[tree.player_rows(player)]
    return joined


def table(tree: GameTree, policy: np.ndarray) -> Any:
    """A policy on a `spiel_tree` as an OpenSpiel policy."""
    rows = zip(tree.info_state_texts, tree.action_mask, policy, strict=True)
    return pyspiel.TabularPolicy(
        {words: [(int(a), float(row[a])) for a in np.flatnonzero(legal)] for words, legal, row in rows}
    )
