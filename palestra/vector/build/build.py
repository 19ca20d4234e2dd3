"""Builds a run of neural-network policies in a vectorised env from its config."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from palestra.core.accel.devices import network_device
from palestra.core.accel.malloc import keep_freed_memory
from palestra.core.files import read_json
from palestra.core.seeding import derive_seed
from palestra.core.types import Seat
from palestra.envs import VectorEnv
from palestra.parallel.process_group import SINGLE_PROCESS, ProcessGroup
from palestra.parallel.shared_memory import start_processes
from palestra.runs import list_checkpoints
from palestra.runs.loop import restore_checkpoint, run_training
from palestra.runs.null_run import NullRun
from palestra.runs.seats import idle_notes, resolve_seats, resolve_teams
from palestra.vector.algorithms.presets import algorithm_name
from palestra.vector.build.envs import check_memory, make_own_envs, make_vector_env, seed_notes
from palestra.vector.config import (
    FrozenNetConfig,
    RandomActionsConfig,
    ScriptConfig,
    TrainedNetConfig,
    VectorConfig,
    VectorEvalConfig,
    VectorPolicyConfig,
)
from palestra.vector.learners.nets import AlgorithmConfig, NetLearner
from palestra.vector.learners.policy_stack import NetPolicyConfig, plays_team, read_policy
from palestra.vector.learners.teams import JointLearner, TeamLearners, TeamSeats
from palestra.vector.nets.layers import NetConfig
from palestra.vector.nets.on_device import CPU, pinned_zeros
from palestra.vector.policies.base import ScriptedVectorPolicy, UniformVectorPolicy, VectorPolicy
from palestra.vector.rollouts.actors import ActorPool
from palestra.vector.rollouts.rollout import TimeLimit, VectorRollout
from palestra.vector.trainer import VectorEval, VectorTrainer

DEFAULT_LOG_LINES = 500  # log lines of a run if `log_every` is 0
MAX_CHECKPOINT_STEPS = 1_000_000  # env steps between two checkpoints, where the config leaves it open


def seat_policies(config: VectorConfig, env: VectorEnv, changes: dict[str, str] | None = None) -> dict[Seat, str]:
    """Returns the policy of each seat; `changes` take precedence over the run's `seats`. Raises
    ValueError for a seat without a policy, and for an unknown name."""
    return resolve_seats(env.seats, list(config.policies), _plays(env), changes or {}, config.seats)


def _plays(env: VectorEnv) -> str:
    return f'env "{env.name}" plays {", ".join(env.seats)}'


def trained_seats(config: VectorConfig, env: VectorEnv, named: dict[Seat, str]) -> dict[str, list[int]]:
    """Returns the seat indices of each trained policy; of each seat if `share_network` is false."""
    found: dict[str, list[int]] = {}
    for number, seat in enumerate(env.seats):
        policy = config.policies[named[seat]]
        if isinstance(policy, TrainedNetConfig):
            found.setdefault(named[seat] if policy.share_network else seat, []).append(number)
    return found


def build_vector_run(config: VectorConfig) -> VectorTrainer:
    """Builds everything that `config` describes, ready for `run_training`, and starts the other
    processes if there are any.

    Raises ValueError if parts of the config do not fit together.
    """
    trainer = check_vector_run(config)  # reports mistakes before other processes start
    if config.num_processes == 1:
        return trainer
    trainer.close()
    return build_process(config, start_processes(config.num_processes, partial(run_follower_rank, config)))


def check_vector_run(config: VectorConfig) -> VectorTrainer:
    """Builds the run for one process. Raises ValueError if parts of the config do not fit."""
    torch.set_num_threads(config.torch_threads)
    return build_process(config, SINGLE_PROCESS)


def run_follower_rank(config: VectorConfig, ranks: ProcessGroup) -> None:
    """Entry point of processes with rank > 0: runs the same loop and writes nothing."""
    trainer = build_process(config, ranks)
    run = NullRun()
    restore_checkpoint(trainer, run)
    run_training(trainer, run)


def build_process(config: VectorConfig, ranks: ProcessGroup) -> VectorTrainer:
    """Builds a process's share of a run. Raises ValueError if parts of the config do not fit."""
    keep_freed_memory()
    nets = {name: policy for name, policy in config.policies.items() if isinstance(policy, TrainedNetConfig)}
    for algorithm in config.algorithms:
        own = [net for name, net in nets.items() if config.algorithm_of(name) == algorithm]
        check_memory(config.env, own, algorithm)
    env, share = make_own_envs(config, ranks.world_size)
    device = network_device(config.device)
    learner, others = build_players(config, env, ranks, device)
    if config.start_from:
        start_networks(learner, config.start_from, config, env)
    sweep = config.algorithm.rollout_length * share
    log_every = max(1, math.ceil((config.log_every or config.env_steps / DEFAULT_LOG_LINES) / sweep))

    def sweeps(env_steps: float) -> int:
        return math.ceil(env_steps / sweep / log_every) * log_every

    rollout: VectorRollout | ActorPool
    if config.num_actors:
        rollout = _actors(config, learner)
    else:
        zeros = pinned_zeros if device.type == "cuda" else np.zeros  # a GPU copies from pinned memory faster
        rollout = VectorRollout(env, np.arange(env.num_envs), zeros, time_limit=config.algorithm.time_limit)
    evals = config.evals.items() if ranks.is_rank_zero else ()
    trainer = VectorTrainer(
        rollout=rollout,
        learner=learner,
        fixed_players=others,
        evals=[_build_eval(config, name, one, learner, sweeps(one.every)) for name, one in evals],
        seats=policy_by_seat(config, env),
        teams=team_by_seat(config, env),
        seed=config.seed,
        steps=math.ceil(config.env_steps / sweep),
        rollout_length=config.algorithm.rollout_length,
        log_every=log_every,
        checkpoint_every=sweeps(config.checkpoint_every or min(config.env_steps / 10, MAX_CHECKPOINT_STEPS)),
        keep_every=sweeps(config.keep_every),
        ranks=ranks,
        notes=_notes(config, env) if ranks.is_rank_zero else [],
    )
    trainer.rollout.restart(trainer.env_seeds("first"))
    return trainer


def _notes(config: VectorConfig, env: VectorEnv) -> list[str]:
    """Returns what the user should know before the run begins, a line each."""
    playing = set(seat_policies(config, env).values())
    for evaluation in config.evals.values():
        playing.update(evaluation.seats.values())
    return [*seed_notes(env), *idle_notes(config.policies, playing)]


def start_networks(learner: NetLearner | JointLearner, run: str, config: VectorConfig, env: VectorEnv) -> None:
    """Gives the learner of `config` the newest networks of `run`. Raises ValueError for none, or other ones."""
    checkpoints = list_checkpoints(run)
    if not checkpoints:
        raise ValueError(f"start_from: {run} has no checkpoint: name the folder of a run that trained networks")
    checkpoint = checkpoints[-1].verify()
    if list(checkpoint.names) != list(learner.names):
        raise ValueError(
            f"start_from: {run} trained {', '.join(checkpoint.names)}, and this run trains {', '.join(learner.names)}, "
            "in the order of their seats, by which networks are taken: give both runs the same names in this order"
        )
    named = seat_policies(config, env)
    for name, folder in checkpoint.names.items():
        own = config.policies[named.get(name, name)].model_dump()
        before = read_json(checkpoint.path / folder / "member.json", dict)["config"]
        if other := [key for key in NetConfig.model_fields if before.get(key, own[key]) != own[key]]:
            raise ValueError(
                f"start_from: {run} trained {name} with {other[0]}: {before[other[0]]}, and this run has "
                f"{own[other[0]]}: networks must be the same"
            )
    try:
        learner.start_from(checkpoint.path / "training-0")
    except (FileNotFoundError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"start_from: {run} trained other networks, and policies, their shapes and the algorithm must be the same: "
            f"{reason}"
        ) from error


def build_players(
    config: VectorConfig, env: VectorEnv, ranks: ProcessGroup, device: torch.device = CPU
) -> tuple[NetLearner | JointLearner, list[VectorPolicy]]:
    """Returns the learner of the trained policies and the other seats' players, on `device`."""
    named = seat_policies(config, env)
    trained = trained_seats(config, env, named)
    learners: dict[str, NetLearner | JointLearner] = {}
    for algorithm in config.algorithms:
        seats = {
            name: numbers
            for name, numbers in trained.items()
            if config.algorithm_of(named[env.seats[numbers[0]]]) == algorithm
        }
        if seats:  # a policy may play no seat
            learners[next(iter(seats))] = _build_learner(config, algorithm, env, seats, ranks, device)
    others = make_fixed_players(config, env, named, device)
    if not learners:
        raise ValueError("no trained policy plays a seat: name one in seats: that has type: net")
    if len(learners) == 1:
        return next(iter(learners.values())), others
    return JointLearner(list(learners), list(learners.values())), others


def _build_learner(
    config: VectorConfig,
    algorithm: AlgorithmConfig,
    env: VectorEnv,
    seats: Mapping[str, list[int]],
    ranks: ProcessGroup,
    device: torch.device,
) -> NetLearner | JointLearner:
    """Returns the learner of the policies of `algorithm`, from the `seats` of each network."""
    named = seat_policies(config, env)
    policies = {name: _net(config.policies[named[env.seats[own[0]]]]) for name, own in seats.items()}
    seeds = {name: derive_seed(config.seed, "net", name) for name in seats}

    def build(names: Iterable[str]) -> Any:
        own = {name: seats[name] for name in names}
        return algorithm.build_learner(env, own, {name: policies[name] for name in own}, seeds, ranks, device)

    if algorithm.combines == "nothing":
        return build(seats)
    teams: list[TeamSeats] = []
    learners: list[NetLearner] = []
    for team, names in group_trained_teams(config, algorithm, env, seats).items():
        learners.append(build(names))
        played: dict[str, list[int]] = {}
        for seat in sorted(chain.from_iterable(seats[name] for name in names)):
            played.setdefault(named[env.seats[seat]], []).append(seat)
        teams.append(TeamSeats(team, played))
    return TeamLearners(algorithm_name(algorithm), teams, learners)


def team_by_seat(config: VectorConfig, env: VectorEnv) -> dict[Seat, str]:
    """Returns the team of each seat. Raises ValueError for a team of unknown seats."""
    return resolve_teams(seat_policies(config, env), config.teams, _plays(env))


def group_trained_teams(
    config: VectorConfig, algorithm: AlgorithmConfig, env: VectorEnv, seats: Mapping[str, Sequence[int]]
) -> dict[str, list[str]]:
    """Returns the names of the networks of each team that `algorithm` trains, from the `seats` of
    each network.

    Raises ValueError if a network plays seats of two teams, if another algorithm trains a part of a
    team, or if there are several networks or seats and no team has more than one of what the
    algorithm combines.
    """
    team_of = team_by_seat(config, env)
    kind = algorithm_name(algorithm)
    found = dict[str, list[str]]()
    for name, own in seats.items():
        teams = list(dict.fromkeys(team_of[env.seats[seat]] for seat in own))
        if len(teams) > 1:
            raise ValueError(
                f"policy {name} plays seats of the teams {' and '.join(teams)}, and {kind} trains each team by itself: "
                "give each team a policy of its own"
            )
        found.setdefault(teams[0], []).append(name)
    ours = set(chain.from_iterable(seats.values()))
    for seat in chain.from_iterable(trained_seats(config, env, seat_policies(config, env)).values()):
        if seat not in ours and team_of[env.seats[seat]] in found:
            raise ValueError(
                f"{kind} trains team {team_of[env.seats[seat]]} as a whole, and another algorithm trains its seat "
                f"{env.seats[seat]}: give the policies of a team the same algorithm, or part them in teams:"
            )
    size = {"seats": lambda name: len(seats[name]), "networks": lambda name: 1}[algorithm.combines]
    if len(found) > 1 and all(sum(map(size, names)) == 1 for names in found.values()):
        raise ValueError(
            f"{kind} combines the {algorithm.combines} of a team, and every team has only one here "
            f"({', '.join(found)}): put seats that play together into one team (teams: {{SEAT: TEAM, ...}}), or use "
            "an algorithm that trains each policy on its own rewards, such as mappo or dqn"
        )
    return found


def policy_by_seat(config: VectorConfig, env: VectorEnv) -> dict[Seat, str]:
    """Returns the policy of each seat in training; the seat's name if it is not shared."""
    named = seat_policies(config, env)
    for name, own in trained_seats(config, env, named).items():
        named |= {env.seats[seat]: name for seat in own}
    return named


@dataclass
class ActorSetup:
    """Env and players of one actor process."""

    env: VectorEnv
    learner: NetLearner | JointLearner
    fixed_players: list[VectorPolicy]
    time_limit: TimeLimit

    def players(self, progress: float) -> list[VectorPolicy]:
        """Players of all seats; `progress` is the elapsed share of the run, from 0 to 1."""
        return [*self.learner.rollout_policies(progress), *self.fixed_players]

    def acting_tensors(self) -> list[torch.Tensor]:
        """Weights of the acting networks, which the learner overwrites with its newest."""
        return self.learner.acting_tensors()


def make_actor_setup(config: VectorConfig) -> ActorSetup:
    """Builds the env and players of an actor, in the actor's own process."""
    keep_freed_memory()
    env, _ = make_own_envs(config, 1)
    return ActorSetup(env, *build_players(config, env, SINGLE_PROCESS), config.algorithm.time_limit)


def _actors(config: VectorConfig, learner: NetLearner | JointLearner) -> ActorPool:
    makers = [partial(make_actor_setup, config)] * config.num_actors
    algorithm = config.algorithm
    setup = ActorSetup(learner.env, learner, [], algorithm.time_limit)
    return ActorPool(setup, makers, algorithm.rollout_length, config.seed)


def _build_eval(
    config: VectorConfig, name: str, evaluation: VectorEvalConfig, learner: NetLearner | JointLearner, every: int
) -> VectorEval:
    wanted = config.env | evaluation.env
    env = make_vector_env(wanted)
    if env.num_envs > evaluation.episodes:
        env.close()
        env = make_vector_env(wanted, evaluation.episodes)
    named = seat_policies(config, env, evaluation.seats)
    training_seats = seat_policies(config, learner.env)
    same_seats = env.seats == learner.env.seats and env.observation_shapes == learner.env.observation_shapes
    if not same_seats or env.observation_images != learner.env.observation_images:
        raise ValueError(
            f"evals.{name}.env changes the seats or their observations, which the trained policies would not fit: "
            "leave these options out"
        )
    if moved := [
        seat for seat, policy in named.items() if not _is_fixed(config, policy) and training_seats[seat] != policy
    ]:
        raise ValueError(
            f"evals.{name}.seats moves a trained policy to {moved[0]}, which only `palestra eval --seats` can do: "
            "leave it out"
        )
    others = make_fixed_players(config, env, named, learner.device)

    def players() -> Sequence[VectorPolicy]:
        own = learner.greedy_policies() if evaluation.greedy else learner.sampling_policies()
        return [*own, *others]  # a later player overrides an earlier one at the same seat

    return VectorEval(
        name=name,
        episodes=evaluation.episodes,
        every=every,
        env=env,
        players=players,
        seats=named,
        replays=evaluation.replays,
    )


def make_fixed_players(
    config: VectorConfig, env: VectorEnv, named: dict[Seat, str], device: torch.device = CPU
) -> list[VectorPolicy]:
    """Returns the players of the seats whose policies are not trained."""
    fixed = {seat: name for seat, name in named.items() if _is_fixed(config, name)}
    return make_players(config.policies, env, fixed, device)


def make_players(
    policies: Mapping[str, VectorPolicyConfig], env: VectorEnv, named: Mapping[Seat, str], device: torch.device = CPU
) -> list[VectorPolicy]:
    """Returns players of the seats in `named`, whose policies are not trained."""
    players = group_teams(policies, named)
    return [make_fixed_player(policies[name], env, seats, name, device) for name, seats in players]


def group_teams(
    policies: Mapping[str, VectorPolicyConfig], named: Mapping[Seat, str]
) -> list[tuple[str, tuple[Seat, ...]]]:
    """Returns the policy and the seats of each player: one player for each seat, or one for all
    seats of a saved policy whose network plays a team."""
    found: dict[object, tuple[str, tuple[Seat, ...]]] = {}
    teams = set()
    for name in set(named.values()):
        policy = policies[name]
        if isinstance(policy, FrozenNetConfig) and plays_team(member_folder(policy.path)):
            teams.add(name)
    for seat, name in named.items():
        key = name if name in teams else (name, seat)
        found[key] = (name, (*found.get(key, (name, ()))[1], seat))
    return list(found.values())


def make_fixed_player(
    policy: VectorPolicyConfig, env: VectorEnv, seats: Sequence[Seat], name: str, device: torch.device = CPU
) -> VectorPolicy:
    """Returns the player of some seats by an untrained `policy`; a network acts on `device`."""
    numbers = [env.seats.index(seat) for seat in seats]
    label = f"{name}/{'+'.join(seats)}"
    if isinstance(policy, RandomActionsConfig):
        return UniformVectorPolicy(env, numbers, label)
    if isinstance(policy, ScriptConfig):
        return ScriptedVectorPolicy(env, numbers, policy.script, label)
    assert isinstance(policy, FrozenNetConfig)
    player = read_policy(member_folder(policy.path), env, numbers, best=policy.greedy, device=device)
    player.name = label
    return player


def member_folder(path: str) -> Path:
    """Returns the policy's folder in the newest checkpoint for RUN:NAME, else `path` itself.

    Raises ValueError if there is no such policy, or its files are damaged.
    """
    run, _, name = path.rpartition(":")
    if not run:
        if not (Path(path) / "member.json").exists():
            raise ValueError(f"there is no saved policy in {path}: name one as RUN:NAME, or its folder in a checkpoint")
        return Path(path)
    kept = list_checkpoints(run)
    if not kept or name not in kept[-1].names:
        have = ", ".join(kept[-1].names) if kept else "no checkpoint"
        raise ValueError(f'there is no policy "{name}" in the run {run}; it has: {have}')
    return kept[-1].verify().path / kept[-1].names[name]


def _is_fixed(config: VectorConfig, name: str) -> bool:
    return not isinstance(config.policies[name], TrainedNetConfig)


def _net(policy: Any) -> NetPolicyConfig:
    return NetPolicyConfig(**policy.model_dump(exclude={"share_network", "algorithm"}))
