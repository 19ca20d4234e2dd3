"""Runs a plan in memory with exact workers; open tasks may be done in any order."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from palestra.parallel.task_json import through_json
from palestra.populations.payoffs import PayoffCell
from palestra.populations.population import Member, Population, Sides
from palestra.populations.tabular.best_response import best_response_to_joint, nash_conv
from palestra.populations.tabular.game_tree import GameTree, build_game_tree, expected_returns, uniform_policy
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
from palestra.populations.workers.exact import ExactSolver, exact_train_result
from palestra.populations.workers.member_loader import rules_of_env


def population(*players):
    made = Population(players)
    made.add(Member("uniform", ""))
    return made


def league_mixture(logic, learner):
    """Returns the mixture of opponents of a learner's next slice, by name."""
    weights = logic.opponent_weights(learner)
    names = logic.met_by(learner).names
    return {names[i]: float(weights.frozen[i]) for i in weights.frozen.nonzero()[0]} | weights.current


def drive(plan, do, rng=None, stop=lambda: False):
    """Does a plan's tasks, the oldest first or, with `rng`, in any order; returns the (task, result, notes) in the
    order in which they were done.

    Members of a task must have been made by earlier tasks, and names must be unique."""
    open_, log, made, seen = list(plan.initial_tasks()), [], set(), set()
    while open_ and not stop():
        assert not {task.name for task in open_} & seen
        task = open_.pop(rng.randrange(len(open_)) if rng else 0)
        seen.add(task.name)
        assert {*task.members} <= made, (task, made)
        result = through_json(do(task), task)
        made |= {task.output_member} - {""}
        open_ += plan.on_result(task, result)
        log.append((task, result, plan.task_metrics(task, result)))
    assert stop() or not open_
    return log


def replay_log(plan, log):
    """Replays a log into a new plan, which must propose each task before its result and return the same lines."""
    known = {task.name: task for task in plan.initial_tasks()}
    for task, result, notes in log:
        assert known.pop(task.name) == task
        known |= {new.name: new for new in plan.on_result(task, result)}
        assert plan.task_metrics(task, result) == notes
    return known


@cache
def tree(name, **options) -> GameTree:
    return build_game_tree(rules_of_env({"type": name, **options}))


class ExactGame:
    """The exact oracle of a game, with its members in memory."""

    def __init__(self, tree, players):
        sides = Sides.of(players if len(players) > 1 else [f"seat {n}" for n in range(tree.num_players)])
        self.exact = ExactSolver(tree, sides if len(players) > 1 else sides.with_owner(players[0]))
        self.tree = tree
        self.policies = {"uniform": uniform_policy(tree)}

    def __call__(self, task):
        if isinstance(task, SolveTask):
            policy, allowed = self.exact.solve(task, self.policies.__getitem__)
            self.policies[task.output_member] = policy
            return SolveResult(allowed)
        if not isinstance(task, TrainTask):
            return self.exact.run_task(task, self.policies.__getitem__, None)
        policy, value = self.exact.respond(task, self.policies.__getitem__)
        self.policies[task.output_member] = policy
        return replace(exact_train_result(policy, value), env_steps=10)

    def nash_conv(self, mixes):
        return nash_conv(self.tree, self.exact.mixture_policy(mixes, self.policies.__getitem__))

    def coarse_gap(self, meta):
        """The sum of what all seats could gain by leaving a joint distribution for a policy chosen beforehand."""
        cells = [(index, p) for index, p in np.ndenumerate(meta.joint) if p > 0]
        lineups = [self._lineup(meta, index) for index, _ in cells]
        chances = [p for _, p in cells]
        earned = np.array(chances) @ [expected_returns(self.tree, lineup) for lineup in lineups]
        best = [best_response_to_joint(self.tree, lineups, chances, seat)[1] for seat in range(self.tree.num_players)]
        return float(np.sum(best - earned))

    def _lineup(self, meta, index):
        names = [own[place] for own, place in zip(meta.names, index, strict=True)]
        return self.exact.profile_policy(dict(zip(meta.seats, names, strict=True)), self.policies.__getitem__)


class Matrix:
    """A normal-form game: members are mixtures over actions, payoffs are known."""

    def __init__(self, payoffs: Sequence[np.ndarray], players: Sequence[str], noise: float = 0.0):
        self.payoffs, self.players, self.noise = payoffs, list(players), noise
        self.actions = {player: payoffs[0].shape[seat] for seat, player in enumerate(self.players)}
        self.chosen = {}

    def mixture(self, player, name):
        """The member's distribution over the player's actions."""
        n = self.actions[player]
        return np.eye(n)[self.chosen[name]] if name in self.chosen else np.full(n, 1 / n)

    def __call__(self, task):
        return {TrainTask: self.train, PlayTask: self.play, AssessTask: self.assess}[type(task)](task)

    def train(self, task):
        seat = self.players.index(task.player)
        joint = sum(
            lineup.probability * self.outer({q: self.mixture(q, m) for q, m in lineup.members.items()})
            for lineup in task.opponents.joint
        )
        if not task.opponents.joint:
            joint = self.outer({q: self.mixed(q, mix) for q, mix in task.opponents.mixes.items()})
        worth = np.moveaxis(self.payoffs[seat], seat, 0).reshape(self.actions[task.player], -1) @ joint
        self.chosen[task.output_member] = int(worth.argmax())
        return TrainResult(env_steps=task.env_steps, mean_return=float(worth.max()))

    def outer(self, choices):
        """The others' actions together, as a flat index."""
        joint = np.ones(())
        for player in self.players:
            if player in choices:
                joint = np.multiply.outer(joint, choices[player])
        return joint.ravel()

    def mixed(self, player, mix):
        return sum(p * self.mixture(player, name) for name, p in mix.items())

    def worth(self, choices):
        joint = self.outer(dict(zip(self.players, choices, strict=True)))
        return [float(table.ravel() @ joint) for table in self.payoffs]

    def play(self, task):
        cells = []
        for members in task.cells:
            mean = self.worth([self.mixture(q, m) for q, m in zip(self.players, members, strict=True)])
            games, n = task.games_per_cell, len(mean)
            cells.append(PayoffCell(games, tuple(mean), (games * self.noise,) * n, (0,) * n, exact=not self.noise))
        return PlayResult(tuple(cells))

    def assess(self, task):
        gap = self.nash_conv(task.strategies)
        return AssessResult(nash_conv=gap, exploitability=gap / len(self.players), values=())

    def nash_conv(self, mixes):
        choices = [self.mixed(player, mixes[player]) for player in self.players]
        gap = -sum(self.worth(choices))
        for seat, player in enumerate(self.players):
            own = np.eye(self.actions[player])
            gap += max(self.worth([*choices[:seat], row, *choices[seat + 1 :]])[seat] for row in own)
        return gap
