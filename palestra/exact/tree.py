"""A turn-based game, fully enumerated, as flat arrays (sequence form).

Expected returns do not need the inner nodes of the game tree. The probability of an end is the product of the
contributions of chance and of each player, and a player's contribution depends only on its own moves: on the *sequence*
of its own decisions that leads there (von Stengel, 1996). A `Tree` is therefore the ends of the game, each with one
sequence per player, and the information states of each player, each with the sequence that leads to it.

I information states, A actions, n players, T ends, V numbers in an information state tensor, S = n + I * A sequences:
the empty sequence of player p is number p; the sequence that ends with action a in information state i is n + i * A +
a. A policy is float64 [I, A].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from palestra.envs.rules.base import Rules
from palestra.exact.walk import Walk, states_of, walk

MOST_NODES = 1_000_000


@dataclass(frozen=True, eq=False)
class Tree:
    """The enumerated game, made by `tree_of`. Information states are sorted by player, then by the number of the
    player's own earlier decisions.

    Players have perfect recall here, even if an observation does not determine the past (a board does not show the
    order of moves): one observation then belongs to several information states, one per own past, and `forgetful` is
    True.
    """

    name: str
    players: int
    actions: tuple[str, ...]
    owner: np.ndarray  # [I] player to move
    legal: np.ndarray  # [I, A] bool
    views: np.ndarray  # [I, V] float32
    words: list[str]  # [I]
    parent: np.ndarray  # [I] the player's sequence that leads here
    levels: list[list[slice]]  # [n][depth] information states after `depth` own decisions
    ends: np.ndarray  # [T, n] each player's last sequence
    chance: np.ndarray  # [T] probability of the chance outcomes on the way
    returns: np.ndarray  # [T, n]
    nodes: int  # number of tree nodes, with chance nodes and ends
    forgetful: bool
    _found: dict[tuple[int, bytes], int] = field(default_factory=dict, repr=False)

    @property
    def sequences(self) -> int:
        """The number of sequences S."""
        return self.players + self.legal.size

    def of(self, player: int) -> slice:
        """Returns the rows of a player's information states."""
        return slice(*np.searchsorted(self.owner, [player, player + 1]).tolist())

    def find(self, player: int, views: np.ndarray) -> np.ndarray:
        """Returns the rows int64 [B] of a player's information states `views` float32 [B, V]. Raises ValueError for an
        unknown information state, and if `forgetful`."""
        if self.forgetful:
            raise ValueError(
                f"a view of {self.name} does not tell which information state it is: the past does; look rows up by "
                "`views` instead, which all information states of one view share"
            )
        if not self._found:
            rows = zip(self.owner.tolist(), self.views, strict=True)
            self._found.update({(owner, view.tobytes()): i for i, (owner, view) in enumerate(rows)})
        views = np.asarray(views, np.float32)
        try:
            return np.array([self._found[player, view.tobytes()] for view in views], np.int64)
        except KeyError:
            raise ValueError(f"player {player} never has a decision with such a view in {self.name}") from None


def tree_of(rules: Rules[Any], *, most_nodes: int = MOST_NODES) -> Tree:
    """Enumerates a game. Raises ValueError if it has more than `most_nodes` nodes, or if information states with the
    same observation differ in their legal actions."""
    known = states_of(rules, most_nodes)
    return _arranged(rules, walk(known, rules.players, len(rules.actions), most_nodes))


def _arranged(rules: Rules[Any], found: Walk) -> Tree:
    """Renumbers the information states by player and depth, so that each level is a slice."""
    order = np.lexsort((found.depth, found.owner))
    owner, depth = found.owner[order], found.depth[order]
    anew = np.empty_like(order)
    anew[order] = np.arange(len(order))
    n, width = rules.players, len(rules.actions)
    seen = found.seen[order]
    return Tree(
        name=rules.name,
        players=n,
        actions=rules.actions,
        owner=owner,
        legal=found.legal[order],
        views=found.views[seen],
        words=[found.words[view] for view in seen.tolist()],
        parent=_renumbered(found.parent[order], anew, n, width),
        levels=[_levels(owner, depth, player) for player in range(n)],
        ends=_renumbered(found.ends, anew, n, width),
        chance=found.chance,
        returns=found.returns,
        nodes=found.nodes,
        forgetful=len(np.unique(seen)) < len(seen),
    )


def _renumbered(sequences: np.ndarray, anew: np.ndarray, n: int, width: int) -> np.ndarray:
    state, action = np.divmod(sequences - n, width)
    return np.where(sequences < n, sequences, n + anew[np.maximum(state, 0)] * width + action)


def _levels(owner: np.ndarray, depth: np.ndarray, player: int) -> list[slice]:
    first, last = np.searchsorted(owner, [player, player + 1])
    own = depth[first:last]
    bounds = first + np.searchsorted(own, np.arange(own.max(initial=-1) + 2))
    return [slice(start, stop) for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]


def uniform(tree: Tree) -> np.ndarray:
    """Returns the uniform policy over legal actions, float64 [I, A]."""
    return tree.legal / tree.legal.sum(1, keepdims=True)


def plan(tree: Tree, policy: np.ndarray) -> np.ndarray:
    """Returns the realisation plan float64 [S]: the product of the player's own action probabilities along each
    sequence (von Stengel, 1996)."""
    made = np.empty(tree.sequences)
    for player in range(tree.players):
        plan_into(made, tree, policy, player)
    return made


def plan_into(made: np.ndarray, tree: Tree, policy: np.ndarray, player: int) -> None:
    """Writes one player's part of the realisation plan into `made` [S]."""
    rows = made[tree.players :].reshape(tree.legal.shape)
    made[player] = 1.0
    for level in tree.levels[player]:
        np.multiply(policy[level], made[tree.parent[level], None], out=rows[level])


def reach(tree: Tree, plan: np.ndarray, but: int | None = None) -> np.ndarray:
    """Returns the probability of each end, float64 [T]; without the contribution of player `but` if given."""
    likely = tree.chance
    for player in range(tree.players):
        if player != but:
            likely = likely * plan[tree.ends[:, player]]
    return likely


def values(tree: Tree, policy: np.ndarray) -> np.ndarray:
    """Returns the expected returns float64 [n] if all players play `policy` [I, A]."""
    return reach(tree, plan(tree, policy)) @ tree.returns


def behaviour(tree: Tree, plan: np.ndarray, unreached: np.ndarray) -> np.ndarray:
    """Returns the policy float64 [I, A] with the realisation plan `plan` [S]; rows that the plan never reaches are
    those of `unreached` [I, A]."""
    after = plan[tree.players :].reshape(tree.legal.shape)
    before = plan[tree.parent][:, None]
    return np.where(before > 0, after / np.where(before > 0, before, 1.0), unreached)


def mixture(tree: Tree, policies: Sequence[np.ndarray], weights: Sequence[float] | np.ndarray) -> np.ndarray:
    """Returns the policy float64 [I, A] equivalent to each player drawing one of `policies` with `weights` once per
    game (Kuhn, 1953).

    `weights` is [K] for all players, or [n, K]. Rows that no policy with positive weight reaches are the weighted mean
    of the policies.
    """
    shares = np.broadcast_to(np.asarray(weights, float), (tree.players, len(policies)))
    mixed, rows = np.zeros(tree.sequences), np.zeros(tree.legal.shape)
    for each, share in zip(policies, shares.T, strict=True):
        if share.any():
            per_row = share[tree.owner][:, None]
            owners = np.concatenate([share, np.repeat(share[tree.owner], tree.legal.shape[1])])
            mixed += owners * plan(tree, each)
            rows += per_row * each
    return behaviour(tree, mixed, rows)
