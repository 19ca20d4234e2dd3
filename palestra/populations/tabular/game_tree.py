"""A turn-based game, fully enumerated, as flat arrays (sequence form).

Expected returns do not need the inner nodes of the game tree. The probability of an end is the product of the
contributions of chance and of each player, and a player's contribution depends only on its own moves: on the *sequence*
of its own decisions that leads there (von Stengel, 1996). A `GameTree` is therefore the ends of the game, each with one
sequence per player, and the information states of each player, each with the sequence that leads to it.

I information states, A actions, n players, T ends, V numbers in an information state tensor, S = n + I * A sequences:
the empty sequence of player p is number p; the sequence that ends with action a in information state i is n + i * A +
a. A policy is float64 [I, A].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from palestra.envs.rules.base import Rules
from palestra.populations.tabular.traversal import enumerate_states, traverse

MAX_NODES = 1_000_000


@dataclass(frozen=True, eq=False)
class GameTree:
    """The enumerated game, made by `build_game_tree`. Information states are sorted by player, then by the number of
    the player's own earlier decisions.

    Players have perfect recall here, even if an observation does not determine the past (a board does not show the
    order of moves): one tensor then belongs to several information states, for example one per own past, and
    `has_ambiguous_tensors` is True.
    """

    name: str
    num_players: int
    action_names: tuple[str, ...]
    state_player: np.ndarray  # [I] player to move
    action_mask: np.ndarray  # [I, A] bool
    info_state_tensors: np.ndarray  # [I, V] float32
    info_state_texts: list[str]  # [I]
    parent_sequence: np.ndarray  # [I] the player's sequence that leads here
    levels: list[list[slice]]  # [n][depth] information states after `depth` own decisions
    end_sequences: np.ndarray  # [T, n] each player's last sequence
    chance_probs: np.ndarray  # [T] probability of the chance outcomes on the way
    returns: np.ndarray  # [T, n]
    num_nodes: int  # number of tree nodes, with chance nodes and ends
    has_ambiguous_tensors: bool

    @property
    def num_sequences(self) -> int:
        """The number of sequences S."""
        return self.num_players + self.action_mask.size

    def player_rows(self, player: int) -> slice:
        """Returns the rows of a player's information states."""
        return slice(*np.searchsorted(self.state_player, [player, player + 1]).tolist())


def build_game_tree(rules: Rules[Any], *, max_nodes: int = MAX_NODES) -> GameTree:
    """Enumerates a game. Raises ValueError if it has more than `max_nodes` nodes, or if information states with the
    same observation differ in their legal actions."""
    n = rules.num_players
    width = len(rules.action_names)
    known = enumerate_states(rules, max_nodes)
    info_states, ends, num_nodes = traverse(known, n, width, max_nodes)
    # information states are renumbered by player and depth, so that each level is a slice
    order = np.lexsort((info_states.depth, info_states.owner))
    owner = np.array(info_states.owner, np.int64)[order]
    depth = np.array(info_states.depth, np.int64)[order]
    seen = np.array(info_states.seen, np.int64)[order]
    parent = np.array(info_states.parent, np.int64)[order]
    anew = np.empty_like(order)
    anew[order] = np.arange(len(order))
    return GameTree(
        name=rules.name,
        num_players=n,
        action_names=rules.action_names,
        state_player=owner,
        action_mask=known.action_mask[seen],
        info_state_tensors=known.info_state_tensors[seen],
        info_state_texts=[known.info_state_texts[view] for view in seen.tolist()],
        parent_sequence=_renumber_sequences(parent, anew, n, width),
        levels=[_levels(owner, depth, player) for player in range(n)],
        end_sequences=_renumber_sequences(ends.last_sequences, anew, n, width),
        chance_probs=ends.chance_probs,
        returns=known.returns[ends.state],
        num_nodes=num_nodes,
        has_ambiguous_tensors=known.has_ambiguous_tensors or len(np.unique(seen)) < len(seen),
    )


def _renumber_sequences(sequences: np.ndarray, anew: np.ndarray, n: int, width: int) -> np.ndarray:
    state, action = np.divmod(sequences - n, width)
    return np.where(sequences < n, sequences, n + anew[np.maximum(state, 0)] * width + action)


def _levels(owner: np.ndarray, depth: np.ndarray, player: int) -> list[slice]:
    first, last = np.searchsorted(owner, [player, player + 1])
    depths = depth[first:last]
    bounds = first + np.searchsorted(depths, np.arange(depths.max(initial=-1) + 2))
    return [slice(start, stop) for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]


def uniform_policy(tree: GameTree) -> np.ndarray:
    """Returns the uniform policy over legal actions, float64 [I, A]."""
    return tree.action_mask / tree.action_mask.sum(1, keepdims=True)


def realization_plan(tree: GameTree, policy: np.ndarray) -> np.ndarray:
    """Returns the realisation plan [S]: a player's own action probabilities multiplied (von Stengel, 1996)."""
    plan = np.empty(tree.num_sequences)
    for player in range(tree.num_players):
        write_realization_plan(plan, tree, policy, player)
    return plan


def write_realization_plan(plan_out: np.ndarray, tree: GameTree, policy: np.ndarray, player: int) -> None:
    """Writes one player's part of the realisation plan into `plan_out` [S]."""
    rows = plan_out[tree.num_players :].reshape(tree.action_mask.shape)
    plan_out[player] = 1.0
    for level in tree.levels[player]:
        np.multiply(policy[level], plan_out[tree.parent_sequence[level], None], out=rows[level])


def end_probabilities(tree: GameTree, plan: np.ndarray, exclude_player: int | None = None) -> np.ndarray:
    """Returns the probability of each end, float64 [T]; without that of `exclude_player` if given."""
    likely = tree.chance_probs
    for player in range(tree.num_players):
        if player != exclude_player:
            likely = likely * plan[tree.end_sequences[:, player]]
    return likely


def expected_returns(tree: GameTree, policy: np.ndarray) -> np.ndarray:
    """Returns the expected returns float64 [n] if all players play `policy` [I, A]."""
    return end_probabilities(tree, realization_plan(tree, policy)) @ tree.returns


def policy_from_plan(tree: GameTree, plan: np.ndarray, default_policy: np.ndarray) -> np.ndarray:
    """Returns the policy float64 [I, A] with the realisation plan `plan` [S]; rows that the plan never reaches are
    taken from `default_policy` [I, A]."""
    after = plan[tree.num_players :].reshape(tree.action_mask.shape)
    before = plan[tree.parent_sequence][:, None]
    return np.where(before > 0, after / np.where(before > 0, before, 1.0), default_policy)


def mixture_policy(tree: GameTree, policies: Sequence[np.ndarray], weights: Sequence[float] | np.ndarray) -> np.ndarray:
    """Returns the policy float64 [I, A] equivalent to each player drawing one of `policies` with `weights` once per
    game (Kuhn, 1953).

    `weights` is [K] for all players, or [n, K]. Rows that no policy with positive weight reaches are the weighted mean
    of the policies.
    """
    shares = np.broadcast_to(np.asarray(weights, float), (tree.num_players, len(policies)))
    mixed = np.zeros(tree.num_sequences)
    rows = np.zeros(tree.action_mask.shape)
    for each, share in zip(policies, shares.T, strict=True):
        if share.any():
            per_row = share[tree.state_player][:, None]
            owners = np.concatenate([share, np.repeat(share[tree.state_player], tree.action_mask.shape[1])])
            mixed += owners * realization_plan(tree, each)
            rows += per_row * each
    return policy_from_plan(tree, mixed, rows)
