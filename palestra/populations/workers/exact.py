"""Exact results for games small enough to be enumerated: best responses as tables, expected payoffs, and NashConv.

Shapes: `I` information states, `A` actions, `n` seats, `K` members, `T` ends of the game. Arrays are float64.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from palestra.parallel.tasks import Result, Task
from palestra.populations.payoffs import MemberProfile, PayoffCell
from palestra.populations.population import Mix, Player, Sides
from palestra.populations.tabular.best_response import best_response, best_response_to_joint, nash_conv
from palestra.populations.tabular.cfr import CFRSolver
from palestra.populations.tabular.game_tree import (
    GameTree,
    end_probabilities,
    expected_returns,
    mixture_policy,
    realization_plan,
    uniform_policy,
)
from palestra.populations.tasks import (
    AssessResult,
    AssessTask,
    PlayResult,
    PlayTask,
    SolveResult,
    SolveTask,
    TrainResult,
    TrainTask,
)
from palestra.populations.workers.game_results import check_cells
from palestra.populations.workers.member_loader import MemberLoader, no_rules_message, tree_of_env, write_table
from palestra.vector.build.envs import make_vector_env

PolicyLookup = Callable[[str], np.ndarray]  # name of a member -> its policy [I, A]


class ExactWorker:
    """Worker with exact results, for vectorised games with rules.

    `train` computes the best response to a mixture, `play` expected returns between members, `assess` NashConv, `solve`
    the solution of a restricted game. `env` is the config of the game. Raises ValueError for a game without rules.
    """

    def __init__(self, env: Mapping[str, Any], sides: Sides) -> None:
        tree = tree_of_env(env)
        if tree is None:
            raise ValueError(f"{no_rules_message(env)}, so exact responses cannot be computed: train networks")
        self.exact = ExactSolver(tree, sides)
        self.loader = MemberLoader(make_vector_env(dict(env), 1), tree)

    def run_task(self, task: Task, members: Mapping[str, Path], out: Path | None) -> Result:
        return self.exact.run_task(task, lambda name: self.loader.policy(name, members), out)


def exact_train_result(policy: np.ndarray, value: float) -> TrainResult:
    """Returns the training result of an exact best response `policy` [I, A] with return `value`."""
    digest = hashlib.sha256(policy.tobytes()).hexdigest()
    return TrainResult(env_steps=0, mean_return=value, metrics={"return": value}, policy_digest=digest)


class ExactSolver:
    """Exact results for a population's tasks in one game.

    If one population plays several seats, results are averaged over its members' rotations through the seats. Raises
    ValueError if there is not one player for each seat.
    """

    def __init__(self, tree: GameTree, sides: Sides) -> None:
        if len(sides.seats) != tree.num_players:
            raise ValueError(
                f"{len(sides.seats)} populations cannot share {tree.num_players} seats: make one for each, or one for "
                "all"
            )
        self.tree = tree
        self.sides = sides

    def run_task(self, task: Task, policy_of: PolicyLookup, out: Path | None) -> Result:
        """Runs a task, given the members' policies (`policy_of`). Raises ValueError if the kind of task is unknown."""
        match task:
            case PlayTask():
                return self.play(task, policy_of)
            case AssessTask():
                return self.assess(task, policy_of)
            case SolveTask() if out is not None:
                policy, allowed = self.solve(task, policy_of)
                write_table(out, policy)
                return SolveResult(allowed)
            case TrainTask() if out is not None:
                policy, value = self.respond(task, policy_of)
                write_table(out, policy)
                return exact_train_result(policy, value)
        raise ValueError(f'task {task.name} is of kind "{task.kind}"; there are train, play, assess and solve')

    # ---- best responses

    def respond(self, task: TrainTask, policy_of: PolicyLookup) -> tuple[np.ndarray, float]:
        """Returns the best response [I, A] to a task's opponents, and its value, averaged over the player's seats."""
        seats = self.sides.seats_of(task.player)
        answers = [self._at(seat, task, policy_of) for seat in seats]
        policy = uniform_policy(self.tree)
        for seat, (answer, _) in zip(seats, answers, strict=True):
            policy[self.tree.player_rows(seat)] = answer[self.tree.player_rows(seat)]
        return policy, float(np.mean([value for _, value in answers]))

    def _at(self, seat: int, task: TrainTask, policy_of: PolicyLookup) -> tuple[np.ndarray, float]:
        joint = task.opponents.joint
        if not joint:
            return best_response(self.tree, self.mixture_policy(task.opponents.mixes, policy_of), seat)
        policies = [self.profile_policy(lineup.members, policy_of) for lineup in joint]
        return best_response_to_joint(self.tree, policies, [lineup.probability for lineup in joint], seat)

    def profile_policy(self, members: Mapping[Player, str], policy_of: PolicyLookup) -> np.ndarray:
        """Returns the policy [I, A] in which each player plays its member; players without one play uniformly."""
        return self.mixture_policy({player: {name: 1.0} for player, name in members.items()}, policy_of)

    def mixture_policy(self, strategies: Mapping[Player, Mix], policy_of: PolicyLookup) -> np.ndarray:
        """Returns the behaviour policy [I, A] of mixtures drawn once per game; uniform at seats without one."""
        names = list(dict.fromkeys(chain.from_iterable(strategies.values())))
        weights = np.zeros((self.tree.num_players, len(names)))
        for player, mix in strategies.items():
            weights[self.sides.seats_of(player)] = [mix.get(name, 0.0) for name in names]
        policy = mixture_policy(self.tree, [policy_of(name) for name in names], weights)
        without = weights.sum(1)[self.tree.state_player] == 0
        policy[without] = uniform_policy(self.tree)[without]
        return policy

    # ---- solutions

    def solve(self, task: SolveTask, policy_of: PolicyLookup) -> tuple[np.ndarray, int]:
        """Returns the average policy [I, A] of `cfr_iterations` of CFR+ on the restricted game, and the number of
        actions that this game allows.

        In that game an information state allows the actions that one of the player's `responses` prefers there.
        """
        allowed = np.zeros_like(self.tree.action_mask)
        for player, names in task.responses.items():
            for seat in self.sides.seats_of(player):
                states = self.tree.player_rows(seat)
                for name in names:
                    rows = policy_of(name)[states]
                    allowed[states] |= rows == rows.max(1, keepdims=True)
        solver = CFRSolver(self.tree, plus=True, action_mask=allowed)
        solver.run(task.cfr_iterations)
        return solver.average_policy(), int(allowed.sum())

    # ---- payoffs and distance

    def play(self, task: PlayTask, policy_of: PolicyLookup) -> PlayResult:
        """Returns the expected results of cells, as the means and counts that `games_per_cell` games have in
        expectation. Raises ValueError for a cell without a member for each seat."""
        check_cells(task.cells, self.tree.num_players)
        return PlayResult(tuple(self._cell(cell, task.games_per_cell, policy_of) for cell in task.cells))

    def _cell(self, members: MemberProfile, games: int, known: PolicyLookup) -> PayoffCell:
        """Returns a cell's expected result over all ends of the game, averaged over rotations of its members."""
        n = self.tree.num_players
        returns = self.tree.returns
        ahead = returns == returns.max(1, keepdims=True)
        alone = ahead.sum(1) == 1
        outcomes = np.column_stack([returns, ahead & alone[:, None], ~alone])  # [T, 2n + 1]
        turns = range(n) if self.sides.symmetric else [0]
        facts = np.zeros(2 * n + 1)
        for turn in turns:
            strategies = self._strategies(np.roll(members, turn).tolist(), known)
            means = end_probabilities(self.tree, realization_plan(self.tree, strategies)) @ outcomes
            facts += np.concatenate([np.roll(means[:n], -turn), np.roll(means[n:-1], -turn), means[-1:]]) / len(turns)
        mean = facts[:n]
        wins = facts[n:-1] * games
        draws = facts[-1] * games
        return PayoffCell(games, tuple(mean.tolist()), (0.0,) * n, tuple(wins.tolist()), float(draws), exact=True)

    def _strategies(self, names: Sequence[str], known: PolicyLookup) -> np.ndarray:
        """Returns the policy [I, A] that takes each seat's rows from that seat's member."""
        policy = np.zeros(self.tree.action_mask.shape)
        for seat, name in enumerate(names):
            policy[self.tree.player_rows(seat)] = known(name)[self.tree.player_rows(seat)]
        return policy

    def assess(self, task: AssessTask, policy_of: PolicyLookup) -> AssessResult:
        """Returns NashConv (Lanctot et al., 2017) of mixtures, exploitability (NashConv / n), and values by seat."""
        policy = self.mixture_policy(task.strategies, policy_of)
        gap = nash_conv(self.tree, policy)
        values = tuple(expected_returns(self.tree, policy).tolist())
        return AssessResult(nash_conv=gap, exploitability=gap / self.tree.num_players, values=values)
