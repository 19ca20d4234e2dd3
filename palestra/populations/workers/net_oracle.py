"""Worker for populations of small networks: trains them in vectorised games against a mixture of frozen members.

Shapes: `N` seats, `F` finished games, `P` sides of the meta-game: seats that one member plays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field

from palestra.core.accel.malloc import keep_freed_memory
from palestra.core.config import StrictModel, validate
from palestra.core.failures import RunFailed
from palestra.core.files import read_arrays, write_arrays
from palestra.core.seeding import derive_seed
from palestra.core.tracing import span
from palestra.core.types import Metrics, RolloutBatch
from palestra.envs.batch.seat_shuffle import SeatShuffledEnv
from palestra.parallel.tasks import Result, Task
from palestra.populations.payoffs import PayoffCell
from palestra.populations.population import Player, Sides
from palestra.populations.tabular.game_tree import GameTree
from palestra.populations.tasks import Opponents, PlayResult, PlayTask, TrainResult, TrainTask
from palestra.populations.workers.exact import ExactSolver
from palestra.populations.workers.game_results import (
    check_cells,
    mean_return,
    opponent_results,
    payoff_cell,
    returns_by_side,
)
from palestra.populations.workers.member_loader import MemberLoader, tree_of_env
from palestra.vector.algorithms.ppo import PPO
from palestra.vector.algorithms.q_learning import ValueHead
from palestra.vector.build.envs import make_vector_env
from palestra.vector.config import VectorAlgorithmConfig
from palestra.vector.learners.nets import NetLearner
from palestra.vector.learners.policy_stack import NetPolicyConfig
from palestra.vector.policies import base as vector
from palestra.vector.policies.frozen import FrozenMember, NetMember
from palestra.vector.policies.mixture import (
    IndependentSampler,
    JointSampler,
    LineupSchedule,
    Mixture,
    OpponentSampler,
    SelfPlaySampler,
    SideSampler,
)
from palestra.vector.rollouts.metrics import mean_metrics
from palestra.vector.rollouts.rollout import VectorRollout, nonfinite_loss_advice


class MemberRegistry:
    """Frozen members by key (`player/name`), numbered in the order in which they are added; `load` loads one."""

    def __init__(self, load: Callable[[Player, str], FrozenMember]) -> None:
        self.load = load
        self.members: dict[str, FrozenMember] = {}
        self.names: list[str] = []

    def index(self, player: Player, name: str) -> int:
        """Returns a member's number; loads the member first if needed."""
        key = self.key(player, name)
        return list(self.members).index(key)

    def key(self, player: Player, name: str) -> str:
        """Returns a member's key, `player/name`; loads the member first if needed."""
        key = f"{player}/{name}"
        if key not in self.members:
            self.add(key, name, self.load(player, name))
        return key

    def add(self, key: str, name: str, member: FrozenMember) -> int:
        """Adds a loaded member and returns its number."""
        self.members[key] = member
        self.names.append(name)
        return len(self.names) - 1


def opponent_sampler(opponents: Opponents, registry: MemberRegistry, players: Sequence[Player]) -> OpponentSampler:
    """Returns the sampler of opponents for sides of these `players`."""
    if opponents.joint:
        lineups = [[registry.index(player, one.members[player]) for player in players] for one in opponents.joint]
        return JointSampler(lineups, [lineup.probability for lineup in opponents.joint])
    mixes: list[dict[int, float]] = []
    for player in players:
        mix = opponents.mixes[player]
        mixes.append({registry.index(player, name): p for name, p in mix.items() if p > 0})
    return IndependentSampler(mixes)


class OpponentStats:
    """Counts results of the learner at the seats `side` against the members of the sides `others`."""

    def __init__(self, side: Sequence[int], others: Sequence[Sequence[int]], names: Sequence[str]) -> None:
        self.side = side
        self.others = others
        self.first_seats = np.cumsum([0, *map(len, others[:-1])])  # of each side, among the opponents' seats
        self.names = names
        self.returns: list[np.ndarray] = []
        self.members: list[np.ndarray] = []
        self.metrics: list[Metrics] = []

    def add(self, batch: RolloutBatch, members: np.ndarray, metrics: Metrics) -> None:
        """Adds a rollout's finished games, the members at the opponents' seats, and the update's metrics."""
        self.returns.append(returns_by_side(batch.episode_stats["returns"], [self.side, *self.others]))
        self.members.append(members[:, self.first_seats])
        if metrics:
            self.metrics.append(metrics)

    def result(self, env_steps: int) -> TrainResult:
        """Returns the result of training that took `env_steps`, with the mean of the updates' metrics."""
        returns = np.concatenate(self.returns)
        members = np.concatenate(self.members)
        ours = returns[:, 0]
        theirs = returns[:, 1:]
        return TrainResult(
            env_steps=env_steps,
            mean_return=mean_return(ours),
            opponents=opponent_results(ours, theirs, members, self.names),
            metrics=dict(mean_metrics(self.metrics)),
        )


STEPS_PER_SWEEP = 16  # joint steps of each rollout


def play_cells(
    rollout: VectorRollout,
    members: Mapping[str, FrozenMember],
    cells: Sequence[Sequence[str]],
    games: int,
    seed: int,
    *,
    sides: Sides,
) -> list[PayoffCell]:
    """Plays `games` games of each cell and returns its statistics.

    A cell holds keys of `members`, one for each of the `sides`. If one population plays all sides they rotate, so that
    each member plays every side as equally often as `games` allows. All games that start for a cell are played to their
    end and counted. Raises RunFailed if a game does not end.
    """
    N = len(rollout.env.seats)
    P = len(sides.seats)
    numbers = {name: number for number, name in enumerate(members)}
    rotations = P if sides.symmetric else 1
    turned = list(product(cells, range(rotations)))
    lineups = np.array([list(map(numbers.__getitem__, (*names[r:], *names[:r]))) for names, r in turned])
    times = np.array([games // rotations + (r < games % rotations) for _, r in turned])
    schedule = LineupSchedule(lineups[:, sides.side_of_seat()], times)
    mixture = Mixture(rollout.env, range(N), members, schedule, "cells")
    rollout.restart(derive_seed(seed, "games") % 2**62 + np.arange(rollout.env.num_envs))
    tags, by_seat = _play_games(rollout, mixture, int(times.sum()), seed)
    returns = returns_by_side(by_seat, sides.seats)
    by_place = returns[np.arange(len(tags))[:, None], (np.arange(P) - (tags % rotations)[:, None]) % P]
    owners = tags // rotations
    return [payoff_cell(by_place[owners == number]) for number in range(len(cells))]


def _play_games(rollout: VectorRollout, mixture: Mixture, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Plays `count` games; returns the line-up's index int64 [count] and the returns [count, N] of each game."""
    tags: list[np.ndarray] = []
    returns: list[np.ndarray] = []
    chunk = 0
    left = count
    while left:
        batch = rollout.collect([mixture], STEPS_PER_SWEEP, derive_seed(seed, chunk))
        rollout.check_episodes_end()
        tag, _ = mixture.played_members(batch)
        tags.append(tag[tag >= 0])
        returns.append(batch.episode_stats["returns"][tag >= 0])
        left -= len(tags[-1])
        chunk += 1
    return np.concatenate(tags), np.concatenate(returns)


TRAINING_FILE = "training.safetensors"  # in a member's folder: training state from which a learner continues
SELF_PLAY_NAME = "self"  # the learner as its own opponent
RESULT_START = 0.8  # share of training after which games count in the result


class NetOracle(StrictModel):
    """Best responses trained by reinforcement learning, as small networks in a vectorised game."""

    type: Literal["net"] = "net"
    env: dict[str, Any]
    """The env, as at the top of the config."""
    algorithm: VectorAlgorithmConfig = PPO()
    """The algorithm that trains responses."""
    policy: NetPolicyConfig = NetPolicyConfig()
    """The network."""
    env_steps: int = Field(500_000, ge=1)
    """Env steps of a response, if the plan gives none."""
    greedy: bool = False
    """Frozen members play their most likely actions instead of sampling."""
    payoffs: Literal["simulated", "exact"] = "simulated"
    """`simulated`: payoffs are measured in games. `exact`: computed from policies; needs a game with rules."""
    tabulate: bool = True
    """In games with rules, evaluate each network once into a table over information states and play from the table,
    which is faster. `false`: play with the network."""


class NetWorker:
    """Worker that trains and plays networks.

    `train` trains a response to a mixture, `play` plays payoff cells; in games with rules, `assess` measures NashConv
    and `solve` solves a restricted game. All randomness follows from `seed` and the task's name.
    """

    def __init__(self, config: NetOracle, sides: Sides, seed: int = 0) -> None:
        keep_freed_memory()
        torch.set_num_threads(1)
        self.config = config
        self.seed = seed
        env = make_vector_env(config.env)
        self.sides = sides
        tree = self._tree() if sides.are_seats else None
        self.exact = ExactSolver(tree, sides) if tree else None
        self.loader = MemberLoader(env, tree, greedy=config.greedy, tables=config.tabulate)
        start = np.arange(env.num_envs)
        limit = config.algorithm.time_limit
        self.payoff_rollout = VectorRollout(env, start, time_limit=limit)
        self.training_rollout = self.payoff_rollout
        if sides.symmetric:
            shuffled = SeatShuffledEnv(make_vector_env(config.env), sides.seats)
            self.training_rollout = VectorRollout(shuffled, start, time_limit=limit)

    def _tree(self) -> GameTree | None:
        try:
            return tree_of_env(self.config.env)
        except ValueError:  # too large to enumerate
            if self.config.payoffs == "exact":
                raise
            return None

    def run_task(self, task: Task, members: Mapping[str, Path], out: Path | None) -> Result:
        """Runs a task. Raises ValueError if it does not fit the game, or if training diverged."""
        if isinstance(task, TrainTask) and out is not None:
            return self._train(task, members, out)
        if isinstance(task, PlayTask) and self.config.payoffs == "simulated":
            return self._play(task, members)
        if self.exact is None:
            raise ValueError(
                f'task {task.name} ({task.kind}) needs the rules of env "{self.config.env.get("type")}", which it does '
                "not have, or a game small enough to enumerate: use simulated payoffs, and no assessment"
            )
        return self.exact.run_task(task, lambda name: self.loader.policy(name, members), out)

    # ---- learning

    def _train(self, task: TrainTask, members: Mapping[str, Path], out: Path) -> TrainResult:
        name = task.output_member
        config = apply_settings(self.config, task.settings)
        learner = self._learner(config, name, self.sides.seats[self.sides.owners.index(task.player)])
        if task.start:
            learner.load_networks(read_arrays(members[task.start] / TRAINING_FILE))
        mixture, stats = self._mixture(task, members, learner)
        horizon = config.algorithm.rollout_length
        games = self.training_rollout.env.num_envs
        env_steps = self.config.env_steps if task.env_steps is None else task.env_steps
        sweeps = math.ceil(env_steps / (horizon * games))
        self.training_rollout.restart(
            derive_seed(self.seed, "games", task.name) % 2**62 + np.arange(self.payoff_rollout.env.num_envs)
        )
        for step in range(sweeps):
            players: list[vector.VectorPolicy] = [*learner.rollout_policies(step / sweeps), mixture]
            with span("rollout"):
                batch = self.training_rollout.collect(players, horizon, derive_seed(self.seed, task.name, step))
            try:
                with span("train", policy=name):
                    metrics = learner.update(batch, step / sweeps)[name]
            except FloatingPointError as error:
                raise RunFailed(
                    f"task {task.name}, after {step * horizon * games:,} of {sweeps * horizon * games:,} env steps: "
                    f"{error}. {nonfinite_loss_advice(self.training_rollout.env, batch)}"
                ) from error
            if step >= int(RESULT_START * sweeps):
                stats.add(batch, mixture.played_members(batch)[1], metrics)
        learner.member_writers()[name](out)
        write_arrays(out / TRAINING_FILE, learner.network_arrays())  # without running games and replay buffer
        return stats.result(sweeps * horizon * games)

    def _learner(self, config: NetOracle, name: str, side: Sequence[int]) -> NetLearner:
        seeds = {name: derive_seed(self.seed, "net", name)}
        env = self.training_rollout.env
        learner = config.algorithm.build_learner(env, {name: list(side)}, {name: config.policy}, seeds)
        if len(side) > 1 and learner.stacks[0].net.plays_team:
            raise ValueError(
                f"{config.algorithm.type} plays its seats together, and members play one by one: take another algorithm"
            )
        return learner

    def _mixture(
        self, task: TrainTask, members: Mapping[str, Path], learner: NetLearner
    ) -> tuple[Mixture, OpponentStats]:
        """Returns the mixture that plays the other sides, and the statistics of its games."""
        own = self.sides.owners.index(task.player)  # its first side, if it has several
        others = [number for number in range(len(self.sides.seats)) if number != own]
        table = self._table(members)
        sampler = opponent_sampler(task.opponents, table, [self.sides.owners[number] for number in others])
        if task.self_play:
            current = table.add(SELF_PLAY_NAME, SELF_PLAY_NAME, self._itself(learner))
            sampler = SelfPlaySampler(sampler, task.self_play, current)
        seats = [self.sides.seats[number] for number in others]
        columns = [column for column, side in enumerate(seats) for _ in side]
        mixture = Mixture(self.training_rollout.env, list(chain(*seats)), table.members, SideSampler(sampler, columns))
        return mixture, OpponentStats(self.sides.seats[own], seats, table.names)

    def _table(self, members: Mapping[str, Path]) -> MemberRegistry:
        return MemberRegistry(lambda player, name: self.loader.member(name, members, self.sides.seats_of(player)))

    def _itself(self, learner: NetLearner) -> NetMember:
        """Returns the learner's network with its current weights as an opponent, greedy if it has action values.

        Raises ValueError unless one population plays every side.
        """
        if not self.sides.symmetric:
            raise ValueError(
                f"self_play: a learner of one side cannot play another of env {self.config.env.get('type')}; only a "
                "population that plays every side can (symmetric: true)"
            )
        stack = learner.stacks[0]
        return NetMember(
            stack.seat_mapping, stack.net, stack.head, stack.norm, isinstance(stack.head, ValueHead), live=True
        )

    # ---- games

    def _play(self, task: PlayTask, members: Mapping[str, Path]) -> PlayResult:
        table = self._table(members)
        seed = derive_seed(self.seed, task.name)
        check_cells(task.cells, len(self.sides.seats))
        keys = [list(map(table.key, self.sides.owners, cell)) for cell in task.cells]
        cells = play_cells(self.payoff_rollout, table.members, keys, task.games_per_cell, seed, sides=self.sides)
        return PlayResult(tuple(cells))


def apply_settings(config: NetOracle, settings: Mapping[str, Any]) -> NetOracle:
    """Returns the oracle with other settings of its algorithm, or policy. Raises ValueError for a name of none."""
    algorithm = config.algorithm.model_dump()
    policy = config.policy.model_dump()
    for name, value in settings.items():
        owner = next((tree for tree in (algorithm, policy) if name in tree and name != "type"), None)
        if owner is None:
            known = ", ".join(sorted({*algorithm, *policy} - {"type"}))
            raise ValueError(f'"{name}" is not a setting of {config.algorithm.type} or its network; there are: {known}')
        owner[name] = value
    return validate(NetOracle, config.model_dump() | {"algorithm": algorithm, "policy": policy})
