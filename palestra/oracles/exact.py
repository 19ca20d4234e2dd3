"""Exact results for games small enough to be enumerated: best responses as tables, expected payoffs, and NashConv.

Shapes: `I` information states, `A` actions, `n` seats, `K` members, `T` ends of the game. Arrays are float64.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from palestra.exact.regret import CFR
from palestra.exact.responses import best_response, best_response_to_joint, nash_conv
from palestra.exact.tree import Tree, mixture, plan, reach, tree_of, uniform, values
from palestra.oracles.members import Reader, rules_of, write_table
from palestra.populations.population import Mix, Player
from palestra.populations.tasks import Result, Task
from palestra.setup_games import make_games

Known = Callable[[str], np.ndarray]  # name of a member -> its policy [I, A]


class ExactWorker:
    """Worker with exact results, for vectorised games with rules.

    `train` computes the best response to a mixture, `play` expected returns between members, `assess` NashConv, `solve`
    the solution of a restricted game. `env` is the config of the game; `players` are its seats, or the one population
    that plays every seat. Raises ValueError for a game without rules.
    """

    def __init__(self, env: Mapping[str, Any], players: Sequence[Player]) -> None:
        rules = rules_of(env)
        if rules is None:
            raise ValueError(f'env "{env.get("type")}" has no rules here, so no answer to it is exact: train networks')
        tree = tree_of(rules)
        self.exact, self.reader = Exact(tree, players), Reader(make_games(dict(env), 1), tree)

    def do(self, task: Task, members: Mapping[str, Path], out: Path | None) -> Result:
        return self.exact.do(task, lambda name: self.reader.policy(name, members), out)


def answer(policy: np.ndarray, value: float) -> Result:
    """Returns the part of a `train` result with an exact response's value and a digest of its policy."""
    return {"return": value, "exact": True, "digest": hashlib.sha256(policy.tobytes()).hexdigest()}


class Exact:
    """Exact results for a population's tasks in one game.

    If one population plays several seats, results are averaged over its members' rotations through the seats.
    """

    def __init__(self, tree: Tree, players: Sequence[Player]) -> None:
        self.tree = tree
        self.seats = seats_of(players, tree.players)

    def do(self, task: Task, known: Known, out: Path | None) -> Result:
        """Runs a task, given the members' policies (`known`). Raises ValueError if the kind of task is unknown."""
        if task.kind == "play":
            return self.play(task.order, known)
        if task.kind == "assess":
            return self.assess(task.order, known)
        if task.kind == "solve" and out is not None:
            policy, allowed = self.solve(task.order, known)
            write_table(out, policy)
            return {"allowed": allowed}
        if task.kind != "train" or out is None:
            raise ValueError(f'task {task.name} is of kind "{task.kind}"; there are train, play, assess and solve')
        policy, value = self.respond(task.order, known)
        write_table(out, policy)
        return {"env_steps": 0, "against": {}, "metrics": {"return": value}, **answer(policy, value)}

    # ---- best responses

    def respond(self, order: Mapping[str, Any], known: Known) -> tuple[np.ndarray, float]:
        """Returns the best response [I, A] for a `train` order, and its value, averaged over the player's seats."""
        answers = [self._at(seat, order, known) for seat in self.seats[order["player"]]]
        policy = uniform(self.tree)
        for seat, (answer, _) in zip(self.seats[order["player"]], answers, strict=True):
            policy[self.tree.of(seat)] = answer[self.tree.of(seat)]
        return policy, float(np.mean([value for _, value in answers]))

    def _at(self, seat: int, order: Mapping[str, Any], known: Known) -> tuple[np.ndarray, float]:
        if "joint" not in order:
            return best_response(self.tree, self.mixed(order["opponents"], known), seat)
        lineups = [self.lineup(members, known) for members, _ in order["joint"]]
        return best_response_to_joint(self.tree, lineups, [p for _, p in order["joint"]], seat)

    def lineup(self, members: Mapping[Player, str], known: Known) -> np.ndarray:
        """Returns the policy [I, A] of one member for each player; players without one play uniformly."""
        return self.mixed({player: {name: 1.0} for player, name in members.items()}, known)

    def mixed(self, strategies: Mapping[Player, Mix], known: Known) -> np.ndarray:
        """Returns the behaviour policy [I, A] of mixtures that are drawn once per game; uniform at seats without a
        mixture."""
        names = list(dict.fromkeys(name for mix in strategies.values() for name in mix))
        weights = np.zeros((self.tree.players, len(names)))
        for player, mix in strategies.items():
            weights[self.seats[player]] = [mix.get(name, 0.0) for name in names]
        policy = mixture(self.tree, [known(name) for name in names], weights)
        without = weights.sum(1)[self.tree.owner] == 0
        policy[without] = uniform(self.tree)[without]
        return policy

    # ---- solutions

    def solve(self, order: Mapping[str, Any], known: Known) -> tuple[np.ndarray, int]:
        """Returns the average policy [I, A] of `rounds` iterations of CFR+ on the restricted game, and its number of
        actions.

        In that game an information state allows the actions that one of its player's `responses` prefers there.
        """
        allowed = np.zeros_like(self.tree.legal)
        for player, names in order["responses"].items():
            for seat in self.seats[player]:
                own = self.tree.of(seat)
                for name in names:
                    rows = known(name)[own]
                    allowed[own] |= rows == rows.max(1, keepdims=True)
        solver = CFR(self.tree, plus=True, legal=allowed)
        solver.run(int(order["rounds"]))
        return solver.average(), int(allowed.sum())

    # ---- payoffs and distance

    def play(self, order: Mapping[str, Any], known: Known) -> Result:
        """Returns expected results of cells, as counts and means of `games` games without chance."""
        games = int(order["games"])
        return {"cells": [self._cell(cell, games, known) for cell in order["cells"]]}

    def _cell(self, cell: Sequence[str], games: int, known: Known) -> Result:
        """Returns a cell's expected result over all ends of the game, averaged over rotations of its members."""
        n, returns = self.tree.players, self.tree.returns
        ahead = returns == returns.max(1, keepdims=True)
        alone = ahead.sum(1) == 1
        told = np.column_stack([returns, ahead & alone[:, None], ~alone])  # [T, 2n + 1]
        turns = range(n) if len(self.seats) == 1 else [0]
        facts = np.zeros(2 * n + 1)
        for turn in turns:
            seated = self._seated(np.roll(cell, turn).tolist(), known)
            found = reach(self.tree, plan(self.tree, seated)) @ told
            facts += np.concatenate([np.roll(found[:n], -turn), np.roll(found[n:-1], -turn), found[-1:]]) / len(turns)
        mean, wins, draws = facts[:n], facts[n:-1] * games, facts[-1] * games
        counts = {"games": games, "wins": wins.tolist(), "draws": float(draws), "exact": True}
        return {"members": list(cell), "mean": mean.tolist(), "m2": [0.0] * n, **counts}

    def _seated(self, names: Sequence[str], known: Known) -> np.ndarray:
        """Returns the policy [I, A] that takes each seat's rows from that seat's member."""
        policy = np.zeros(self.tree.legal.shape)
        for seat, name in enumerate(names):
            policy[self.tree.of(seat)] = known(name)[self.tree.of(seat)]
        return policy

    def assess(self, order: Mapping[str, Any], known: Known) -> Result:
        """Returns NashConv (Lanctot et al., 2017) of the behaviour that mixtures induce, exploitability (NashConv / n)
        and values by seat."""
        policy = self.mixed(order["strategies"], known)
        gap = nash_conv(self.tree, policy)
        won = values(self.tree, policy).tolist()
        return {"nash_conv": gap, "exploitability": gap / self.tree.players, "values": won}


def seats_of(players: Sequence[Player], seats: int) -> dict[Player, list[int]]:
    """Returns the seats of each player of the meta-game: one each, or all for a single player.

    Raises ValueError for any other number of players.
    """
    if len(players) == seats:
        return {player: [seat] for seat, player in enumerate(players)}
    if len(players) != 1:
        raise ValueError(f"{len(players)} populations cannot share {seats} seats: make one for each, or one for all")
    return {players[0]: list(range(seats))}
