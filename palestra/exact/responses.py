"""Best responses, exploitability, and payoffs between many policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from palestra.exact.tree import Tree, plan, plan_into, reach, values


def gains(tree: Tree, reached: np.ndarray, player: int) -> np.ndarray:
    """Returns the value of each sequence of a player, float64 [S], from the ends directly after it, weighted by the
    probability `reached` [T] that the others and chance give each end."""
    return np.bincount(tree.ends[:, player], reached * tree.returns[:, player], tree.sequences)


def best_response(
    tree: Tree, policy: np.ndarray, player: int, *, legal: np.ndarray | None = None
) -> tuple[np.ndarray, float]:
    """Returns `policy` [I, A] with the player's rows replaced by a deterministic best response to the others' rows (the
    first of equally good actions), and its expected return. `legal` bool [I, A] restricts the response to these
    actions."""
    return answer_to(tree, policy, reach(tree, plan(tree, policy), player), player, legal)


def best_response_to_joint(
    tree: Tree, policies: Sequence[np.ndarray], probabilities: Sequence[float] | np.ndarray, player: int
) -> tuple[np.ndarray, float]:
    """As `best_response`, but one of `policies` is drawn with `probabilities` once per game for all other players
    together: their play may be correlated, as in a (coarse) correlated equilibrium."""
    reached = np.zeros(len(tree.ends))
    for policy, probability in zip(policies, probabilities, strict=True):
        if probability:
            reached += probability * reach(tree, plan(tree, policy), player)
    return answer_to(tree, policies[0], reached, player)


def answer_to(
    tree: Tree, policy: np.ndarray, reached: np.ndarray, player: int, legal: np.ndarray | None = None
) -> tuple[np.ndarray, float]:
    """As `best_response`, from the probability `reached` [T] that the others and chance give each end."""
    best, value = respond(tree, gains(tree, reached, player), player, tree.legal if legal is None else legal)
    answer, own = policy.copy(), tree.of(player)
    answer[own] = 0
    answer[np.arange(own.start, own.stop), best[own]] = 1
    return answer, value


def respond(tree: Tree, won: np.ndarray, player: int, legal: np.ndarray) -> tuple[np.ndarray, float]:
    """Returns the player's best actions int64 [I] (0 in rows of others) and their expected return, from the values
    `won` [S] of its sequences (see `gains`). Changes `won` in place: it then holds the value of each sequence under
    best play."""
    rows = won[tree.players :].reshape(legal.shape)
    best = np.zeros(len(legal), np.int64)
    for level in reversed(tree.levels[player]):
        choices = np.where(legal[level], rows[level], -np.inf)
        choice = choices.argmax(1)
        best[level] = choice
        np.add.at(won, tree.parent[level], choices[np.arange(len(choice)), choice])
    return best, float(won[player])


def best_values(tree: Tree, policy: np.ndarray, *, legal: np.ndarray | None = None) -> np.ndarray:
    """Returns the expected return of each player, float64 [n], of a best response to the others' rows of `policy` [I,
    A]."""
    plans, allowed = plan(tree, policy), tree.legal if legal is None else legal
    return np.array(
        [
            respond(tree, gains(tree, reach(tree, plans, player), player), player, allowed)[1]
            for player in range(tree.players)
        ]
    )


def nash_conv(tree: Tree, policy: np.ndarray, *, legal: np.ndarray | None = None) -> float:
    """Returns NashConv (Lanctot et al., 2017): the sum over players of what a best response to the others gains, in
    units of return; 0 at an equilibrium. Exploitability is NashConv divided by the number of players."""
    return float((best_values(tree, policy, legal=legal) - values(tree, policy)).sum())


def ends_reached(tree: Tree, policies: Sequence[np.ndarray], player: int) -> np.ndarray:
    """Returns the player's own contribution to the probability of each end, float64 [K, T], for each of its policies
    [I, A]."""
    reached, made = np.empty((len(policies), len(tree.ends))), np.empty(tree.sequences)
    for row, policy in zip(reached, policies, strict=True):
        plan_into(made, tree, policy, player)
        np.take(made, tree.ends[:, player], out=row)
    return reached


def payoff_table(tree: Tree, policies: Mapping[int, Sequence[np.ndarray]]) -> list[np.ndarray]:
    """Returns the exact payoffs of every player, float64 [m_0, ..., m_n-1] each, if player p plays each of its
    `policies[p]`; of a policy [I, A] only its player's rows count."""
    return payoffs_of(tree, [ends_reached(tree, policies[player], player) for player in range(tree.players)])


def payoffs_of(tree: Tree, reached: Sequence[np.ndarray]) -> list[np.ndarray]:
    """As `payoff_table`, from each player's result of `ends_reached`."""
    first, *rest = reached
    return [_contracted(first * (tree.chance * tree.returns[:, player]), rest) for player in range(tree.players)]


def _contracted(weighted: np.ndarray, rest: Sequence[np.ndarray]) -> np.ndarray:
    """Sums over ends the product of one row of each argument, for all combinations of rows; the last is a matrix
    product."""
    shape = tuple(len(rows) for rows in (weighted, *rest))
    for rows in rest[:-1]:
        weighted = (weighted[:, None] * rows[None]).reshape(-1, weighted.shape[-1])
    return (weighted @ rest[-1].T).reshape(shape)
