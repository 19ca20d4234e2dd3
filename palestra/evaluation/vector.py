"""Plays evaluations of networks in vectorised envs, and records episodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from palestra.core.accel.devices import network_device
from palestra.core.config import validate
from palestra.core.seeding import derive_seed
from palestra.core.types import Seat
from palestra.envs import VectorEnv
from palestra.evaluation.game_policy import find_fixed_policy, nash_conv_metrics, policy_table
from palestra.evaluation.target import EvalResult, OnProgress, Target, assign_seats
from palestra.vector.build.build import make_players, policy_by_seat, team_by_seat
from palestra.vector.build.envs import make_vector_env, seed_notes
from palestra.vector.config import VectorConfig, VectorPolicyConfig
from palestra.vector.nets.on_device import CPU
from palestra.vector.policies.base import VectorPolicy
from palestra.vector.rollouts.episodes import record_vector_episodes
from palestra.vector.trainer import play_eval

MAX_NUM_ENVS = 256  # parallel copies of the env


@dataclass(frozen=True)
class VectorEvalSetup:
    """An env and its seat assignment: `policy_names` maps seats to policy names. With `greedy`, policies take their
    most probable action. Networks act on `device`. Metrics include `nash_conv` for games that can be enumerated, and
    `no_nash_conv`, the reason, for others, and `not_repeatable` for an env that is not a function of its seeds."""

    target: Target
    env_config: Mapping[str, Any]
    env: VectorEnv
    policy_names: dict[Seat, str]
    greedy: bool
    device: torch.device = CPU

    @cached_property
    def notes(self) -> list[str]:
        return seed_notes(self.env)

    def policies(self, names: Mapping[Seat, str]) -> dict[str, VectorPolicyConfig]:
        """Returns the policies by name."""
        return {
            name: find_fixed_policy(self.target, name, greedy=self.greedy) for name in dict.fromkeys(names.values())
        }

    def players(self, names: Mapping[Seat, str]) -> list[VectorPolicy]:
        named = {seat: names[seat] for seat in self.env.seats if seat in names}
        return make_players(self.policies(named), self.env, named, self.device)

    def play(
        self, assignments: Sequence[Mapping[Seat, str]], episodes: int, seed: int, on_progress: OnProgress
    ) -> list[EvalResult]:
        """Plays the same `episodes` episodes with each assignment; returns one result of each."""
        results = []
        for names in assignments:
            results.append(self._play(names, episodes, seed))
            on_progress(len(results) * episodes, len(assignments) * episodes)
        return results

    def _play(self, names: Mapping[Seat, str], episodes: int, seed: int) -> EvalResult:
        players = self.players(names)
        teams = team_by_seat(validate(VectorConfig, self.target.tree), self.env)
        if len(set(teams.values())) == 1:  # seats that others play here are not of the run's team
            teams = {seat: names[seat] for seat in self.env.seats}
        metrics = play_eval(self.env, players, episodes, derive_seed(seed, "eval"), teams=list(teams.values()))
        if self.notes:
            metrics["not_repeatable"] = self.notes[0]
        metrics |= nash_conv_metrics(
            self.env_config,
            lambda game: policy_table(self.target, self.env, game, names, self.greedy),
        )
        return EvalResult(player_names(self.env, players), metrics, [])


@contextmanager
def open_vector_eval(
    target: Target, env: Mapping[str, Any], seats: Mapping[str, str], *, num_envs: int, greedy: bool
) -> Iterator[VectorEvalSetup]:
    """Context with an evaluation setup of `num_envs` parallel copies of the target's env, with the options that the
    run's own evaluations share unless `env` changes them. Networks act on the run's device if this machine has it,
    otherwise on the CPU. See `evaluate` for the arguments and errors."""
    config = validate(VectorConfig, target.tree)
    torch.set_num_threads(config.torch_threads)  # for small networks, synchronising more threads takes longer
    env_config = config.env | common_eval_options(config) | dict(env)
    envs = make_vector_env(env_config, num_envs)
    try:
        names = assign_seats(policy_by_seat(config, envs), target, seats, envs.name)
        yield VectorEvalSetup(target, env_config, envs, names, greedy, network_device(config.device, else_cpu=True))
    finally:
        envs.close()


def common_eval_options(config: VectorConfig) -> dict[str, Any]:
    """Returns the env options that all evaluations of the config set to the same value."""
    common, *others = [dict(evaluation.env) for evaluation in config.evals.values()] or [{}]
    for other in others:
        common = {key: value for key, value in common.items() if key in other and other[key] == value}
    return common


def collect_vector_episodes(
    target: Target,
    out: Path,
    env: Mapping[str, Any],
    seats: Mapping[str, str],
    *,
    num_envs: int,
    steps: int,
    greedy: bool,
    seed: int,
) -> dict[Seat, str]:
    """Records `steps` joint steps of `num_envs` parallel games as Parquet, for imitation and offline learning; returns
    the policy at each seat. Env options are those of training with the changes `env`, seeds differ from those of
    evaluations. See `evaluate` for other arguments and errors."""
    options = {**target.tree["env"], **env}
    with open_vector_eval(target, options, seats, num_envs=num_envs, greedy=greedy) as setup:
        players = setup.players(setup.policy_names)
        first_seed = derive_seed(seed, "collect") >> 1 | 1 << 33
        record_vector_episodes(setup.env, players, steps, out, seed=first_seed)
        return player_names(setup.env, players)


def player_names(env: VectorEnv, players: list[VectorPolicy]) -> dict[Seat, str]:
    """Returns the versioned policy name at each seat."""
    names: dict[Seat, str] = {}
    for player in players:
        names |= {env.seats[number]: player.names[0] for number in player.seats}
    return {seat: names[seat] for seat in env.seats}
