"""Exact results for games small enough to be enumerated: best responses as tables, expected payoffs, and NashConv.

Shapes: `I` information states, `A` actions, `n` seats, `K` members, `T` ends of the game. Arrays are float64.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from palestra.builders.vector_envs import make_vector_env
from palestra.populations.population import Mix, Player
from palestra.populations.tasks import ResultDict, Task
from palestra.tabular.best_response import best_response, best_response_to_joint, nash_conv
from palestra.tabular.cfr import CFRSolver
from palestra.tabular.game_tree import (
    GameTree,
    build_game_tree,
    end_probabilities,
    expected_returns,
    mixture_policy,
    realization_plan,
    uniform_policy,
)
from palestra.workers.member_loader import MemberLoader, rules_of_env, write_table

PolicyLookup = Callable[[str], np.ndarray]  # name of a member -> its policy [I, A]


class ExactWorker:
    """Worker with exact results, for vectorised games with rules.

    `train` computes the best response to a mixture, `play` expected returns between members, `assess` NashConv, `solve`
    the solution of a restricted game. `env` is the config of the game; `players` are its seats, or the one
    population that plays every seat. Raises ValueError for a game without rules.
    """

    def __init__(self, env: Mapping[str, Any], players: Sequence[Player]) -> None:
        rules = rules_of_env(env)
        if rules is None:
            raise ValueError(f'env "{env.get("type")}" has no rules here, so no answer to it is exact: train networks')
        tree = build_game_tree(rules)
        self.exact, self.loader = ExactSolver(tree, players), MemberLoader(make_vector_env(dict(env), 1), tree)

    def run_task(self, task: Task, members: Mapping[str, Path], out: Path | None) -> ResultDict:
        return self.exact.run_task(task, lambda name: self.loader.policy(name, members), out)


def exact_response_result(policy: np.ndarray, value: float) -> ResultDict:
    """Returns the part of a `train` result with an exact response's value and a digest of its policy."""
    return {"return": value, "exact": True, "digest": hashlib.sha256(policy.tobytes()).hexdigest()}


class ExactSolver:
    """Exact results for a population's tasks in one game.

    If one population plays several seats, results are averaged over its members' rotations through the seats.
    """

    def __init__(self, tree: GameTree, players: Sequence[Player]) -> None:
        self.tree = tree
        self.seats = seats_by_player(players, tree.num_players)

    def run_task(self, task: Task, policy_of: PolicyLookup, out: Path | None) -> ResultDict:
        """Runs a task, given the members' policies (`policy_of`). Raises ValueError if the kind of task is unknown."""
        if task.kind == "play":
            return self.play(task.payload, policy_of)
        if task.kind == "assess":
            return self.assess(task.payload, policy_of)
        if task.kind == "solve" and out is not None:
            policy, allowed = self.solve(task.payload, policy_of)
            write_table(out, policy)
            return {"allowed": allowed}
        if task.kind != "train" or out is None:
            raise ValueError(f'task {task.name} is of kind "{task.kind}"; there are train, play, assess and solve')
        policy, value = self.respond(task.payload, policy_of)
        write_table(out, policy)
        return {"env_steps": 0, "against": {}, "metrics": {"return": value}, **exact_response_result(policy, value)}

    # ---- best responses

    def respond(self, payload: Mapping[str, Any], policy_of: PolicyLookup) -> tuple[np.ndarray, float]:
        """Returns the best response [I, A] for a `train` order, and its value, averaged over the player's seats."""
        answers = [self._at(seat, payload, policy_of) for seat in self.seats[payload["player"]]]
        policy = uniform_policy(self.tree)
        for seat, (answer, _) in zip(self.seats[payload["player"]], answers, strict=True):
            policy[self.tree.player_rows(seat)] = answer[self.tree.player_rows(seat)]
        return policy, float(np.mean([value for _, value in answers]))

    def _at(self, seat: int, order: Mapping[str, Any], known: PolicyLookup) -> tuple[np.ndarray, float]:
        if "joint" not in order:
            return best_response(self.tree, self.mixture_policy(order["opponents"], known), seat)
        lineups = [self.profile_policy(members, known) for members, _ in order["joint"]]
        return best_response_to_joint(self.tree, lineups, [p for _, p in order["joint"]], seat)

    def profile_policy(self, members: Mapping[Player, str], policy_of: PolicyLookup) -> np.ndarray:
        """Returns the policy [I, A] of one member for each player; players without one play uniformly."""
        return self.mixture_policy({player: {name: 1.0} for player, name in members.items()}, policy_of)

    def mixture_policy(self, strategies: Mapping[Player, Mix], policy_of: PolicyLookup) -> np.ndarray:
        """Returns the behaviour policy [I, A] of mixtures that are drawn once per game; uniform at seats without a
        mixture."""
        names = list(dict.fromkeys(name for mix in strategies.values() for name in mix))
        weights = np.zeros((self.tree.num_players, len(names)))
        for player, mix in strategies.items():
            weights[self.seats[player]] = [mix.get(name, 0.0) for name in names]
        policy = mixture_policy(self.tree, [policy_of(name) for name in names], weights)
        without = weights.sum(1)[self.tree.state_player] == 0
        policy[without] = uniform_policy(self.tree)[without]
        return policy

    # ---- solutions

    def solve(self, payload: Mapping[str, Any], policy_of: PolicyLookup) -> tuple[np.ndarray, int]:
        """Returns the average policy [I, A] of `rounds` iterations of CFR+ on the restricted game, and its number of
        actions.

        In that game an information state allows the actions that one of its player's `responses` prefers there.
        """
        allowed = np.zeros_like(self.tree.action_mask)
        for player, names in payload["responses"].items():
            for seat in self.seats[player]:
                own = self.tree.player_rows(seat)
                for name in names:
                    rows = policy_of(name)[own]
                    allowed[own] |= rows == rows.max(1, keepdims=True)
        solver = CFRSolver(self.tree, plus=True, action_mask=allowed)
        solver.run(int(payload["rounds"]))
        return solver.average_policy(), int(allowed.sum())

    # ---- payoffs and distance

    def play(self, payload: Mapping[str, Any], policy_of: PolicyLookup) -> ResultDict:
        """Returns expected results of cells, as counts and means of `games` games without chance."""
        games = int(payload["games"])
        return {"cells": [self._cell(cell, games, policy_of) for cell in payload["cells"]]}

    def _cell(self, cell: Sequence[str], games: int, known: PolicyLookup) -> ResultDict:
        """Returns a cell's expected result over all ends of the game, averaged over rotations of its members."""
        n, returns = self.tree.num_players, self.tree.returns
        ahead = returns == returns.max(1, keepdims=True)
        alone = ahead.sum(1) == 1
        told = np.column_stack([returns, ahead & alone[:, None], ~alone])  # [T, 2n + 1]
        turns = range(n) if len(self.seats) == 1 else [0]
        facts = np.zeros(2 * n + 1)
        for turn in turns:
            seated = self._seated(np.roll(cell, turn).tolist(), known)
            found = end_probabilities(self.tree, realization_plan(self.tree, seated)) @ told
            facts += np.concatenate([np.roll(found[:n], -turn), np.roll(found[n:-1], -turn), found[-1:]]) / len(turns)
        mean, wins, draws = facts[:n], facts[n:-1] * games, facts[-1] * games
        counts = {"games": games, "wins": wins.tolist(), "draws": float(draws), "exact": True}
        return {"members": list(cell), "mean": mean.tolist(), "m2": [0.0] * n, **counts}

    def _seated(self, names: Sequence[str], known: PolicyLookup) -> np.ndarray:
        """Returns the policy [I, A] that takes each seat's rows from that seat's member."""
        policy = np.zeros(self.tree.action_mask.shape)
        for seat, name in enumerate(names):
            policy[self.tree.player_rows(seat)] = known(name)[self.tree.player_rows(seat)]
        return policy

    def assess(self, payload: Mapping[str, Any], policy_of: PolicyLookup) -> ResultDict:
        """Returns NashConv (Lanctot et al., 2017) of the behaviour that mixtures induce, exploitability (NashConv / n)
        and values by seat."""
        policy = self.mixture_policy(payload["strategies"], policy_of)
        gap = nash_conv(self.tree, policy)
        won = expected_returns(self.tree, policy).tolist()
        return {"nash_conv": gap, "exploitability": gap / self.tree.num_players, "values": won}


def seats_by_player(players: Sequence[Player], seats: int) -> dict[Player, list[int]]:
    """Returns the seats of each player of the meta-game: one each, or all for a single player.

    Raises ValueError for any other number of players.
    """
    if len(players) == seats:
        return {player: [seat] for seat, player in enumerate(players)}
    if len(players) != 1:
        raise ValueError(f"{len(players)} populations cannot share {seats} seats: make one for each, or one for all")
    return {players[0]: list(range(seats))}
