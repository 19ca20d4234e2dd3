"""A turn-based game walked through whole, as flat arrays.

Nobody needs the nodes of a game tree to say what policies are worth. An end of the game comes about with the product of
what chance and each player contributed, and a player's part depends on its own moves alone: on the *sequence* of its
own decisions that leads there (von Stengel, 1996). So a tree here is its ends, each with a sequence for every player,
and the information states of each player, each with the sequence that leads to it.

I information states, A actions, n players, T ends, V numbers in a view, S = n + I * A sequences: the empty sequence of
player p is number p, the one that ends with action a in information state i is n + i * A + a. A policy is [I, A].
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
    """What `tree_of` made of a game. Information states stand in order of player, then of how many decisions of its own
    the player has behind it.

    A player remembers everything here, even where a view does not tell (a board says nothing of the order of moves):
    there are then as many information states of one view as there are pasts of one's own, and `forgetful` is true.
    """

    name: str
    players: int
    actions: tuple[str, ...]
    owner: np.ndarray  # [I] whose move it is
    legal: np.ndarray  # [I, A] bool
    views: np.ndarray  # [I, V] float32
    words: list[str]  # [I]
    parent: np.ndarray  # [I] the owner's sequence that leads here
    levels: list[list[slice]]  # [n][depth] information states with `depth` decisions of the owner's behind them
    ends: np.ndarray  # [T, n] each player's last sequence
    chance: np.ndarray  # [T] probability of what chance did on the way
    returns: np.ndarray  # [T, n]
    nodes: int  # ways the game may go, chance and ends included
    forgetful: bool
    _found: dict[tuple[int, bytes], int] = field(default_factory=dict, repr=False)

    @property
    def sequences(self) -> int:
        return self.players + self.legal.size

    def of(self, player: int) -> slice:
        """The information states of a player."""
        return slice(*np.searchsorted(self.owner, [player, player + 1]).tolist())

    def find(self, player: int, views: np.ndarray) -> np.ndarray:
        """Which information states a player's views [B, V] are, [B]. Raises ValueError for a view that is none, and
        where views alone do not tell."""
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
    """The whole of a game. Raises ValueError where it has more than `most_nodes` nodes, and where information states of
    one view differ in what is legal."""
    known = states_of(rules, most_nodes)
    return _arranged(rules, walk(known, rules.players, len(rules.actions), most_nodes))


def _arranged(rules: Rules[Any], found: Walk) -> Tree:
    """Numbers information states anew, by player and depth, so that a level is a slice."""
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
    """The policy [I, A] that plays every legal action alike."""
    return tree.legal / tree.legal.sum(1, keepdims=True)


def plan(tree: Tree, policy: np.ndarray) -> np.ndarray:
    """Realisation plan [S]: how likely each player's own moves make each of its sequences (von Stengel, 1996)."""
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
    """How likely the game comes to each end [T]; with `but`, as far as that player does not decide."""
    likely = tree.chance
    for player in range(tree.players):
        if player != but:
            likely = likely * plan[tree.ends[:, player]]
    return likely


def values(tree: Tree, policy: np.ndarray) -> np.ndarray:
    """Expected returns [n] where every player plays `policy` [I, A]."""
    return reach(tree, plan(tree, policy)) @ tree.returns


def behaviour(tree: Tree, plan: np.ndarray, unreached: np.ndarray) -> np.ndarray:
    """The policy [I, A] whose realisation plan is `plan`: what is likely after an information state over what is likely
    before it. Where the plan never comes, the rows of `unreached`."""
    after = plan[tree.players :].reshape(tree.legal.shape)
    before = plan[tree.parent][:, None]
    return np.where(before > 0, after / np.where(before > 0, before, 1.0), unreached)


def mixture(tree: Tree, policies: Sequence[np.ndarray], weights: Sequence[float] | np.ndarray) -> np.ndarray:
    """The policy [I, A] that plays as if each player had drawn one of `policies` with `weights` once per game (Kuhn,
    1953).

    `weights` is [K], or [n, K] for each player its own. Where no policy of weight ever comes, it plays the policies'
    mean.
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
