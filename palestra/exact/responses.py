"""What beats given policies, by how much, and what many policies win from each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from palestra.exact.tree import Tree, plan, plan_into, reach, values


def gains(tree: Tree, reached: np.ndarray, player: int) -> np.ndarray:
    """What each sequence of a player's wins [S] in the ends that follow it at once, as likely as `reached` [T] says the
    others and chance make them."""
    return np.bincount(tree.ends[:, player], reached * tree.returns[:, player], tree.sequences)


def best_response(
    tree: Tree, policy: np.ndarray, player: int, *, legal: np.ndarray | None = None
) -> tuple[np.ndarray, float]:
    """`policy` [I, A] with the player's rows replaced by a best answer to the others' (one action each, the first of
    equals), and what it wins. With `legal` [I, A], an answer that keeps to the actions allowed there."""
    return answer_to(tree, policy, reach(tree, plan(tree, policy), player), player, legal)


def best_response_to_joint(
    tree: Tree, policies: Sequence[np.ndarray], probabilities: Sequence[float] | np.ndarray, player: int
) -> tuple[np.ndarray, float]:
    """As `best_response`, where the others play by one of `policies` together, drawn with `probabilities` once per
    game: what they do may thus be correlated, as in a (coarse) correlated equilibrium."""
    reached = np.zeros(len(tree.ends))
    for policy, probability in zip(policies, probabilities, strict=True):
        if probability:
            reached += probability * reach(tree, plan(tree, policy), player)
    return answer_to(tree, policies[0], reached, player)


def answer_to(
    tree: Tree, policy: np.ndarray, reached: np.ndarray, player: int, legal: np.ndarray | None = None
) -> tuple[np.ndarray, float]:
    """As `best_response`, from how likely the others and chance make each end [T]."""
    best, value = respond(tree, gains(tree, reached, player), player, tree.legal if legal is None else legal)
    answer, own = policy.copy(), tree.of(player)
    answer[own] = 0
    answer[np.arange(own.start, own.stop), best[own]] = 1
    return answer, value


def respond(tree: Tree, won: np.ndarray, player: int, legal: np.ndarray) -> tuple[np.ndarray, float]:
    """The player's best actions [I], 0 in rows of others, given what its sequences win at once [S], and what they win
    in all. `won` is changed: it ends as what each sequence wins where all that follows is best."""
    rows = won[tree.players :].reshape(legal.shape)
    best = np.zeros(len(legal), np.int64)
    for level in reversed(tree.levels[player]):
        choices = np.where(legal[level], rows[level], -np.inf)
        choice = choices.argmax(1)
        best[level] = choice
        np.add.at(won, tree.parent[level], choices[np.arange(len(choice)), choice])
    return best, float(won[player])


def best_values(tree: Tree, policy: np.ndarray, *, legal: np.ndarray | None = None) -> np.ndarray:
    """What each player wins [n] by a best answer to the others' rows of `policy` [I, A]."""
    plans, allowed = plan(tree, policy), tree.legal if legal is None else legal
    return np.array(
        [
            respond(tree, gains(tree, reach(tree, plans, player), player), player, allowed)[1]
            for player in range(tree.players)
        ]
    )


def nash_conv(tree: Tree, policy: np.ndarray, *, legal: np.ndarray | None = None) -> float:
    """How much all players could win together by each answering the others best (Lanctot et al., 2017), in units of
    return; 0 at an equilibrium. Exploitability is this over the number of players."""
    return float((best_values(tree, policy, legal=legal) - values(tree, policy)).sum())


def ends_reached(tree: Tree, policies: Sequence[np.ndarray], player: int) -> np.ndarray:
    """How likely each of a player's policies [I, A] makes the ends [K, T], as far as it decides."""
    reached, made = np.empty((len(policies), len(tree.ends))), np.empty(tree.sequences)
    for row, policy in zip(reached, policies, strict=True):
        plan_into(made, tree, policy, player)
        np.take(made, tree.ends[:, player], out=row)
    return reached


def payoff_table(tree: Tree, policies: Mapping[int, Sequence[np.ndarray]]) -> list[np.ndarray]:
    """Exact payoffs of every player [m_0, ..., m_n-1] where player p plays each of its `policies[p]`; of a policy
    [I, A] only its player's rows count."""
    return payoffs_of(tree, [ends_reached(tree, policies[player], player) for player in range(tree.players)])


def payoffs_of(tree: Tree, reached: Sequence[np.ndarray]) -> list[np.ndarray]:
    """As `payoff_table`, from what `ends_reached` says of each player's policies."""
    first, *rest = reached
    return [_contracted(first * (tree.chance * tree.returns[:, player]), rest) for player in range(tree.players)]


def _contracted(weighted: np.ndarray, rest: Sequence[np.ndarray]) -> np.ndarray:
    """Sums over ends of the product of one row of each, for all choices of rows. The last is a matrix product."""
    shape = tuple(len(rows) for rows in (weighted, *rest))
    for rows in rest[:-1]:
        weighted = (weighted[:, None] * rows[None]).reshape(-1, weighted.shape[-1])
    return (weighted @ rest[-1].T).reshape(shape)
