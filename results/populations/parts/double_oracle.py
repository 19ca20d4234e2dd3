"""Double oracle methods with exact best responses: PSRO over whole policies (also joint and anytime PSRO), XDO over
single actions.

They compute what the plans of `palestra.populations.plans` approximate, from the whole game tree. Each is an infinite
iterator of stages; take as many as needed (`itertools.islice`). Stage 0 is the start, before any response.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from palestra.populations.tabular.best_response import best_response, best_response_to_reach, nash_conv
from palestra.populations.tabular.cfr import CFRSolver
from palestra.populations.tabular.game_tree import (
    GameTree,
    mixture_policy,
    policy_from_plan,
    realization_plan,
    uniform_policy,
    write_realization_plan,
)

# Maps the payoffs of each player to the weights of each player's members.
MetaSolverFn = Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]
# Maps the payoffs of each player to a distribution over member profiles, in the payoffs' shape.
JointMetaSolverFn = Callable[[Sequence[np.ndarray]], np.ndarray]


class DoubleOracleIterate(NamedTuple):
    """State of a double oracle run: the current policy [I, A], its NashConv, the number of members of each player and
    their weights (XDO: no weights, and the number of actions allowed to each player)."""

    policy: np.ndarray
    nash_conv: float
    num_members: tuple[int, ...]
    member_weights: tuple[np.ndarray, ...] = ()


class MemberPolicies:
    """The policies of every player so far (float64 [I, A] each), and their payoffs against each other."""

    def __init__(self, tree: GameTree, start: np.ndarray) -> None:
        self.tree = tree
        self.policies: list[list[np.ndarray]] = [[] for _ in range(tree.num_players)]
        self.end_probs: list[list[np.ndarray]] = [[] for _ in range(tree.num_players)]
        for player in range(tree.num_players):
            self.add_policy(player, start)

    def add_policy(self, player: int, policy: np.ndarray) -> None:
        """Adds a policy [I, A] to a player's members."""
        self.policies[player].append(policy)
        self.end_probs[player].append(player_end_probs(self.tree, [policy], player)[0])

    def payoffs(self) -> list[np.ndarray]:
        """Returns the payoffs of every player, float64 [m_0, ..., m_n-1] each."""
        return payoffs_from_end_probs(self.tree, [np.array(rows) for rows in self.end_probs])

    def build_iterate(self, mixes: Sequence[np.ndarray]) -> DoubleOracleIterate:
        """Returns the stage in which the players mix their members with `mixes`."""
        policy = self.mixed_policy(mixes)
        sizes = tuple(len(policies) for policies in self.policies)
        return DoubleOracleIterate(policy, nash_conv(self.tree, policy), sizes, tuple(mixes))

    def mixed_policy(self, mixes: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the policy [I, A] in which each player mixes its members with `mixes`."""
        policy = np.empty(self.tree.action_mask.shape)
        for player, (members, mix) in enumerate(zip(self.policies, mixes, strict=True)):
            own = self.tree.player_rows(player)
            policy[own] = mixture_policy(self.tree, members, mix)[own]
        return policy


def psro(tree: GameTree, meta_solver: MetaSolverFn, start: np.ndarray | None = None) -> Iterator[DoubleOracleIterate]:
    """Policy-space response oracles (Lanctot et al., 2017) from `start` [I, A] (default: uniform): `meta_solver`
    computes each player's member weights from the exact payoffs; every player's best response to the others' mixtures
    joins its members."""
    members = MemberPolicies(tree, uniform_policy(tree) if start is None else start)
    while True:
        stage = members.build_iterate([np.asarray(mix, float) for mix in meta_solver(members.payoffs())])
        yield stage
        for player in range(tree.num_players):
            members.add_policy(player, best_response(tree, stage.policy, player)[0])


class JointIterate(NamedTuple):
    """State of a joint PSRO run: the probability of each profile of members, the expected return of each player, and
    the CCE gap, the sum of what each player gains by a best response that ignores its own recommendation: 0 at a coarse
    correlated equilibrium."""

    joint: np.ndarray  # [m_0, ..., m_n-1]
    expected_returns: np.ndarray  # [n]
    cce_gap: float


def joint_psro(
    tree: GameTree, meta_solver: JointMetaSolverFn, start: np.ndarray | None = None
) -> Iterator[JointIterate]:
    """Joint PSRO (Marris et al., 2021) with best responses to the joint play of the others (the "CCE" variant), for any
    number of players and any returns."""
    members = MemberPolicies(tree, uniform_policy(tree) if start is None else start)
    while True:
        payoffs = members.payoffs()
        joint = np.asarray(meta_solver(payoffs), float)
        values = np.array([(joint * payoff).sum() for payoff in payoffs])
        answers = [_best_response_to_joint(members, joint, player) for player in range(tree.num_players)]
        yield JointIterate(joint, values, float(sum(value for _, value in answers) - values.sum()))
        for player, (answer, _) in enumerate(answers):
            members.add_policy(player, answer)


def _best_response_to_joint(members: MemberPolicies, joint: np.ndarray, player: int) -> tuple[np.ndarray, float]:
    others = joint.sum(player)
    rows = [np.array(rows) for other, rows in enumerate(members.end_probs) if other != player]
    reached = np.zeros(len(members.tree.end_sequences))
    for choice in np.argwhere(others):
        reached += others[tuple(choice)] * np.prod([row[at] for row, at in zip(rows, choice, strict=True)], axis=0)
    return best_response_to_reach(
        members.tree, members.policies[player][0], members.tree.chance_probs * reached, player
    )


def anytime_psro(
    tree: GameTree, iterations: int = 500, start: np.ndarray | None = None
) -> Iterator[DoubleOracleIterate]:
    """Anytime PSRO (McAleer et al., 2022) for two-player zero-sum games: each player weighs its members so that the
    other's best response to the mixture wins least. NashConv thus never rises, up to the error that `iterations` of
    regret matching leave. The best response to the last weights joins the other player's members.

    Raises ValueError if the game is not two-player zero-sum.
    """
    if tree.num_players != 2 or not np.allclose(tree.returns.sum(1), 0):
        raise ValueError(f"anytime PSRO is for two-player zero-sum games, which {tree.name} is not: use psro")
    members = MemberPolicies(tree, uniform_policy(tree) if start is None else start)
    while True:
        (first, answer_1), (second, answer_0) = (_least_exploitable(members, player, iterations) for player in (0, 1))
        yield members.build_iterate([first, second])
        members.add_policy(0, answer_0)
        members.add_policy(1, answer_1)


def _least_exploitable(members: MemberPolicies, player: int, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the weights of a player's members, by regret matching+ with linear averaging against the other player's
    best response, and the last of these responses."""
    tree, reached = members.tree, np.array(members.end_probs[player])
    answer = members.policies[1 - player][0]
    weights = even = np.full(len(reached), 1 / len(reached))
    regrets, summed = np.zeros(len(reached)), np.zeros(len(reached))
    for number in range(1, rounds + 1):
        summed += number * weights
        answer, _ = best_response_to_reach(tree, answer, tree.chance_probs * (weights @ reached), 1 - player)
        won = reached @ (tree.chance_probs * tree.returns[:, player] * player_end_probs(tree, [answer], 1 - player)[0])
        regrets = np.maximum(regrets + won - weights @ won, 0)
        weights = regrets / regrets.sum() if regrets.any() else even
    return summed / summed.sum(), answer


def xdo(
    tree: GameTree, start: np.ndarray | None = None, *, tolerance: float = 0.5, iterations: int = 20_000
) -> Iterator[DoubleOracleIterate]:
    """Extensive-form double oracle (McAleer et al., 2021) for two-player zero-sum games, from best responses to `start`
    [I, A] (default: uniform). In each information state the players are restricted to actions that one of their best
    responses took. CFR+ solves the restricted game until its NashConv is below `tolerance`, or for `iterations`; best
    responses in the full game add new actions.

    The tolerance is halved when the NashConv of the full game falls below twice the tolerance, or when no action was
    new. Raises ValueError if the game is not two-player zero-sum.
    """
    if tree.num_players != 2 or not np.allclose(tree.returns.sum(1), 0):
        raise ValueError(f"XDO is for two-player zero-sum games, which {tree.name} is not: use psro")
    policy = uniform_policy(tree) if start is None else start
    allowed = np.zeros_like(tree.action_mask)
    gap = nash_conv(tree, policy)
    while True:
        yield DoubleOracleIterate(policy, gap, tuple(int(allowed[tree.player_rows(player)].sum()) for player in (0, 1)))
        taken = _best_response_actions(tree, policy)
        if (taken <= allowed).all() or gap < 2 * tolerance:
            tolerance /= 2
        allowed = allowed | taken
        policy = _solve_restricted(tree, allowed, tolerance, iterations)
        gap = nash_conv(tree, policy)


def _best_response_actions(tree: GameTree, policy: np.ndarray) -> np.ndarray:
    """Returns the actions bool [I, A] that the players' best responses to `policy` take."""
    answers = [best_response(tree, policy, player)[0][tree.player_rows(player)] for player in range(tree.num_players)]
    return np.concatenate(answers) > 0


def _solve_restricted(tree: GameTree, allowed: np.ndarray, tolerance: float, most: int) -> np.ndarray:
    solver = CFRSolver(tree, plus=True, action_mask=allowed)
    while True:
        solver.run(max(10, solver.iterations // 4))
        policy = solver.average_policy()
        if solver.iterations >= most or nash_conv(tree, policy, action_mask=allowed) <= tolerance:
            return policy


class TabularSolver(Protocol):
    """A solver whose average policy converges to an equilibrium of a two-player zero-sum game."""

    def run(self, iterations: int) -> None: ...

    def average_policy(self) -> np.ndarray:
        """Returns the current average policy, float64 [I, A]."""
        ...


class XFPSolver:
    """Extensive-form fictitious play (Heinrich et al., 2015): every player plays a best response to the others' average
    policy, and the response joins the average with equal weight. Starts from the uniform policy."""

    def __init__(self, tree: GameTree) -> None:
        self.tree = tree
        self.iterations = 0
        self.policy = uniform_policy(tree)
        self.plan_sum = realization_plan(tree, self.policy)

    def run(self, iterations: int) -> None:
        """Runs this many more iterations."""
        for _ in range(iterations):
            self.iterations += 1
            average = self.average_policy()
            for player in range(self.tree.num_players):
                answer, _ = best_response(self.tree, average, player)
                self.policy[self.tree.player_rows(player)] = answer[self.tree.player_rows(player)]
            self.plan_sum += realization_plan(self.tree, self.policy)

    def average_policy(self) -> np.ndarray:
        """Returns the average policy, float64 [I, A]; uniform over the legal actions in information states that it
        never reaches."""
        return policy_from_plan(self.tree, self.plan_sum, uniform_policy(self.tree))


def player_end_probs(tree: GameTree, policies: Sequence[np.ndarray], player: int) -> np.ndarray:
    """Returns the player's own contribution to the probability of each end, float64 [K, T], for each of its policies
    [I, A]."""
    reached, made = np.empty((len(policies), len(tree.end_sequences))), np.empty(tree.num_sequences)
    for row, policy in zip(reached, policies, strict=True):
        write_realization_plan(made, tree, policy, player)
        np.take(made, tree.end_sequences[:, player], out=row)
    return reached


def exact_payoffs(tree: GameTree, policies: Mapping[int, Sequence[np.ndarray]]) -> list[np.ndarray]:
    """Returns the exact payoffs of every player, float64 [m_0, ..., m_n-1] each, if player p plays each of its
    `policies[p]`; of a policy [I, A] only its player's rows count."""
    return payoffs_from_end_probs(
        tree, [player_end_probs(tree, policies[player], player) for player in range(tree.num_players)]
    )


def payoffs_from_end_probs(tree: GameTree, end_probs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns what `exact_payoffs` returns, from each player's result of `player_end_probs`."""
    first, *rest = end_probs
    return [
        _contracted(first * (tree.chance_probs * tree.returns[:, player]), rest) for player in range(tree.num_players)
    ]


def _contracted(weighted: np.ndarray, rest: Sequence[np.ndarray]) -> np.ndarray:
    """Sums over ends the product of one row of each argument, for all combinations of rows; the last is a matrix
    product."""
    shape = tuple(len(rows) for rows in (weighted, *rest))
    for rows in rest[:-1]:
        weighted = (weighted[:, None] * rows[None]).reshape(-1, weighted.shape[-1])
    return (weighted @ rest[-1].T).reshape(shape)
