"""Builds a run of neural-network policies in a vectorised env from its config."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from pydantic import BeforeValidator, Field, model_validator

from palestra.algorithms.presets import VECTOR_PRESETS, expand_preset
from palestra.algorithms.vector.a2c import A2C
from palestra.algorithms.vector.coma import COMA
from palestra.algorithms.vector.ddpg import DDPG, TD3
from palestra.algorithms.vector.dqn import DQN
from palestra.algorithms.vector.imitation import BC, GAIL
from palestra.algorithms.vector.nfsp import NFSP
from palestra.algorithms.vector.ppo import PPO
from palestra.algorithms.vector.qmix import QMIX
from palestra.algorithms.vector.sac import SAC
from palestra.builders.seats import resolve_seats
from palestra.config import RunName, StrictModel, check_keep_every, check_policy_names
from palestra.engine.malloc import check_fits_memory, keep_freed_memory
from palestra.envs import VectorEnv, load_env_class, validate_env_options
from palestra.learners.nets import NetLearner, NetPolicyConfig, read_policy
from palestra.policies.vector import ScriptedVectorPolicy, UniformVectorPolicy, VectorPolicy
from palestra.rollouts.actors import ActorPool
from palestra.rollouts.vector_rollout import VectorRollout
from palestra.runs import list_checkpoints
from palestra.runs.null_run import NullRun
from palestra.seeding import derive_seed
from palestra.sinks.base import SinkConfigs
from palestra.training.gradient_sync import ProcessRank, all_gather, start_processes
from palestra.training.loop import restore_checkpoint, run_training
from palestra.training.vector import VectorEval, VectorTrainer, gather_single
from palestra.types import TEAM, Seat

MEASURE_ABOVE = 50_000_000  # transitions; above this the real size of one is measured
DEFAULT_LOG_LINES = 500  # log lines of a run if `log_every` is 0


class TrainedNetConfig(NetPolicyConfig):
    """A neural-network policy that is trained."""

    share_network: bool = True
    """True: all seats of the policy share one network. False: each seat gets its own network, named after the seat."""


class FrozenNetConfig(StrictModel):
    """A policy that another run trained."""

    type: Literal["frozen"] = "frozen"
    """Selects this policy type."""
    path: str
    """RUN:NAME for policy NAME in the newest checkpoint of folder RUN, or the folder of a policy in a checkpoint."""
    greedy: bool = False
    """True: take the most probable action. False: sample actions."""


class RandomActionsConfig(StrictModel):
    """A random policy: uniform over legal actions."""

    type: Literal["random"] = "random"
    """Selects this policy type."""


class ScriptConfig(StrictModel):
    """A scripted player that the env provides."""

    type: Literal["script"] = "script"
    """Selects this policy type."""
    script: str
    """Name of the script; the docs of the env list them."""


VectorPolicyConfig = Annotated[
    TrainedNetConfig | FrozenNetConfig | RandomActionsConfig | ScriptConfig, Field(discriminator="type")
]
VectorAlgorithmConfig = Annotated[
    PPO | A2C | DQN | QMIX | NFSP | COMA | SAC | DDPG | TD3 | BC | GAIL,
    Field(discriminator="type"),
    BeforeValidator(partial(expand_preset, presets=VECTOR_PRESETS)),
]


class VectorEvalConfig(StrictModel):
    """A held-out evaluation in a vectorised env, played before training, after training and optionally in between."""

    episodes: int = Field(100, ge=1, le=1_000_000)
    """Number of episodes that count, spread equally over the env copies."""
    every: int = Field(0, ge=0)
    """Joint steps between evaluations, rounded up to log intervals. 0: only before and after training."""
    greedy: bool = True
    """True: trained policies act greedily. False: they sample actions as in training."""
    env: dict[str, Any] = {}
    """Env options that differ from training. They must not change seats or observation shapes."""
    seats: dict[str, str] = {}
    """Maps seats or patterns of seats to policies where the evaluation differs from training. Only policies that are
    not trained can be assigned."""


class VectorConfig(StrictModel):
    """A training run of neural-network policies in a vectorised env."""

    name: RunName = "run"
    """Name of the run's folder. If it exists, -2, -3, ... is appended."""
    seed: int = 0
    """Seed of everything random in the run, from network weights to actions."""
    env_steps: int = Field(1_000_000, ge=1)
    """Length of the run in joint steps, summed over all env copies; rounded up to whole rollouts."""
    env: dict[str, Any]
    """The env to train in: `type`, its options, and `num_envs`, the number of parallel copies."""
    policies: dict[str, VectorPolicyConfig]
    """The policies by name; at least one has `type: net`, which is trained."""
    seats: dict[str, str] = {}
    """Maps seats to policies. Keys may contain the wildcards `*` and `?`; an exact name takes precedence over a
    pattern, an earlier pattern over a later one. A seat that matches no key gets the policy of its own name,
    else `default`, else the only policy."""
    algorithm: VectorAlgorithmConfig = PPO()
    """Training algorithm."""
    evals: dict[str, VectorEvalConfig] = {}
    """Held-out evaluations by name."""
    log_every: int = Field(0, ge=0)
    """Joint steps between log lines, rounded up to whole rollouts. 0: about 500 lines in the run."""
    checkpoint_every: int = Field(1_000_000, ge=1)
    """Joint steps between checkpoints, rounded up to log intervals. The newest two are kept."""
    keep_every: int = Field(0, ge=0)
    """Joint steps between checkpoints that are kept permanently, a multiple of `checkpoint_every`. 0: only the last one
    of the run."""
    sinks: SinkConfigs = []
    """Trackers that receive the run's metrics, such as TensorBoard or Weights & Biases."""
    torch_threads: int = Field(1, ge=1, le=1024)
    """Torch threads per process. More than one usually slows training down on few cores."""
    num_processes: int = Field(1, ge=1, le=1024)
    """Processes that train together, synchronously: each steps its share of the env copies, and gradients are
    averaged."""
    num_actors: int = Field(0, ge=0, le=1024)
    """Actor processes that step the env copies asynchronously while this process trains on slightly older data; needs
    `algorithm.off_policy_correction: vtrace` and `num_processes: 1`. 0: this process steps the env itself."""

    @property
    def env_label(self) -> str:
        """Name of the env, for display."""
        return str(self.env["type"])

    @property
    def algorithm_label(self) -> str:
        """Name of the algorithm, for display."""
        return self.algorithm.type

    @model_validator(mode="after")
    def _learns(self) -> Self:
        if not any(isinstance(policy, TrainedNetConfig) for policy in self.policies.values()):
            raise ValueError("no policy learns: give one of policies: the type net")
        check_policy_names(self.policies, TEAM)
        check_keep_every(self.keep_every, self.checkpoint_every)
        return self

    @model_validator(mode="after")
    def _shares(self) -> Self:
        if self.num_actors and self.num_processes > 1:
            raise ValueError("num_actors: play for one learner, so num_processes: must be 1")
        if self.num_actors and getattr(self.algorithm, "off_policy_correction", None) != "vtrace":
            raise ValueError(
                "num_actors: play by weights that are some updates old: set algorithm.off_policy_correction: vtrace "
                "(ppo and a2c have it)"
            )
        return self


def make_vector_env(env: dict[str, Any], num_envs: int | None = None) -> VectorEnv:
    """Builds the env that a config describes. `num_envs`, if given, replaces the number of env copies."""
    cls = load_env_class(env["type"])
    options = validate_env_options(
        cls, {k: v for k, v in env.items() if k != "type"} | ({"num_envs": num_envs} if num_envs else {})
    )
    made = cls(**options)
    assert isinstance(made, VectorEnv)
    return made


def seat_policies(config: VectorConfig, env: VectorEnv, changes: dict[str, str] | None = None) -> dict[Seat, str]:
    """Returns the policy of each seat; `changes` take precedence over the run's `seats`. Raises ValueError for a seat
    without a policy, and for an unknown name."""
    plays = f'env "{env.name}" plays {", ".join(env.seats)}'
    return resolve_seats(env.seats, list(config.policies), plays, changes or {}, config.seats)


def trained_seats(config: VectorConfig, env: VectorEnv, named: dict[Seat, str]) -> dict[str, list[int]]:
    """Returns the seat indices of each trained policy; one policy per seat if `share_network` is false."""
    found: dict[str, list[int]] = {}
    for number, seat in enumerate(env.seats):
        policy = config.policies[named[seat]]
        if isinstance(policy, TrainedNetConfig):
            found.setdefault(named[seat] if policy.share_network else seat, []).append(number)
    return found


def build_vector_run(config: VectorConfig) -> VectorTrainer:
    """Builds everything that `config` describes, ready for `run_training`, and starts the other processes if there are
    any.

    Raises ValueError if parts of the config do not fit together.
    """
    trainer = check_vector_run(config)  # reports mistakes before other processes start
    if config.num_processes == 1:
        return trainer
    trainer.close()
    return build_process(config, start_processes(config.num_processes, partial(run_follower_rank, config)))


def check_vector_run(config: VectorConfig) -> VectorTrainer:
    """Builds the run for a single process. Raises ValueError if parts of the config do not fit together."""
    torch.set_num_threads(config.torch_threads)
    return build_process(config, ProcessRank(0, 1, ""))


def run_follower_rank(config: VectorConfig, rank: ProcessRank) -> None:
    """Entry point of processes with rank > 0: runs the same loop and writes nothing."""
    trainer, run = build_process(config, rank), NullRun()
    restore_checkpoint(trainer, run)
    run_training(trainer, run)


def make_own_envs(config: VectorConfig, num_processes: int) -> tuple[VectorEnv, int]:
    """Returns the env copies of one process or actor, and the number of copies that one training step covers in all.

    Raises ValueError if the copies cannot be divided equally.
    """
    env = make_vector_env(config.env)
    parts = config.num_actors or config.num_processes
    if env.num_envs % parts:
        raise ValueError(f"{env.num_envs} games cannot be shared by {parts} processes: make one divide the other")
    own = env.num_envs // (config.num_actors or num_processes)
    whole = env.num_envs // (config.num_actors or 1)
    if own == env.num_envs:
        return env, whole
    env.close()
    return make_vector_env(config.env, own), whole


def check_memory(env: Mapping[str, Any], nets: Sequence[NetPolicyConfig], algorithm: Any) -> None:
    """Checks that the run fits into this machine's memory.

    Raises ValueError if the networks, the env copies, one rollout or the replay buffer would not fit. The sizes are
    lower bounds; the size of a transition is measured only if there are many of them.
    """
    games, horizon = _number(env.get("num_envs")), algorithm.rollout_length + 1
    if games < 1:
        raise ValueError(f"env.num_envs: {games} games play nothing: set it to 1 or more")
    kept = max(getattr(algorithm, name, 0) for name in ("buffer_size", "reservoir_size"))
    wide = [max(one.hidden) ** 2 if len(one.hidden) > 1 else one.hidden[0] for one in nets]
    check_fits_memory(
        16 * sum(wide), "networks, with gradients and Adam's moments,", "make policies' hidden layers smaller"
    )
    check_fits_memory(8 * games, f"env.num_envs: {games:,}", "play fewer games at once")
    moment = _moment(env) if games * horizon + kept > MEASURE_ABOVE else 8
    check_fits_memory(
        moment * games * horizon,
        f"a sweep of {games:,} games and {horizon - 1:,} steps",
        "lower algorithm.rollout_length or env.num_envs",
    )
    check_fits_memory(
        moment * kept, f"a memory of {kept:,} moments", "lower algorithm.buffer_size (of nfsp, reservoir_size)"
    )


def _moment(env: Mapping[str, Any]) -> int:
    """Returns the size in bytes of one transition of one env copy, all seats together."""
    probe = make_vector_env(dict(env), 1)
    frame = probe.reset(np.zeros(1, np.int64))
    size = sum(array.nbytes for array in vars(frame).values() if isinstance(array, np.ndarray))
    probe.close()
    return size


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 1


def build_process(config: VectorConfig, rank: ProcessRank) -> VectorTrainer:
    """Builds one process's share of a run. Raises ValueError if parts of the config do not fit together."""
    keep_freed_memory()
    nets = [policy for policy in config.policies.values() if isinstance(policy, TrainedNetConfig)]
    check_memory(config.env, nets, config.algorithm)
    env, share = make_own_envs(config, rank.world_size)
    learner, others = build_players(config, env, rank)
    sweep = config.algorithm.rollout_length * share
    log_every = max(1, math.ceil((config.log_every or config.env_steps / DEFAULT_LOG_LINES) / sweep))

    def sweeps(env_steps: int) -> int:
        return math.ceil(env_steps / sweep / log_every) * log_every

    trainer = VectorTrainer(
        rollout=_actors(config, learner) if config.num_actors else VectorRollout(env, np.arange(env.num_envs)),
        learner=learner,
        fixed_players=others,
        evals=[]
        if rank.rank
        else [_exam(config, name, exam, learner, sweeps(exam.every)) for name, exam in config.evals.items()],
        seats=policy_by_seat(config, env),
        seed=config.seed,
        steps=math.ceil(config.env_steps / sweep),
        rollout_length=config.algorithm.rollout_length,
        log_every=log_every,
        checkpoint_every=sweeps(config.checkpoint_every),
        keep_every=config.keep_every // config.checkpoint_every * sweeps(config.checkpoint_every),
        rank=rank.rank,
        num_processes=rank.world_size,
        all_gather=all_gather if rank.world_size > 1 else gather_single,
    )
    trainer.rollout.restart(trainer.env_seeds("first"))
    return trainer


def build_players(config: VectorConfig, env: VectorEnv, rank: ProcessRank) -> tuple[NetLearner, list[VectorPolicy]]:
    """Returns the learner of the trained policies, and the players of the other seats."""
    named = seat_policies(config, env)
    seats = trained_seats(config, env, named)
    policies = {name: _net(config.policies[named[env.seats[own[0]]]]) for name, own in seats.items()}
    seeds = {name: derive_seed(config.seed, "net", name) for name in seats}
    together = rank.gradient_sync() if rank.world_size > 1 else None
    learner = config.algorithm.build_learner(env, seats, policies, seeds, together)
    return learner, [make_fixed_player(config, env, seat, name) for seat, name in named.items() if _fixed(config, name)]


def policy_by_seat(config: VectorConfig, env: VectorEnv) -> dict[Seat, str]:
    """Returns the policy of each seat in training. A seat whose policy is not shared has a policy of its own name."""
    named = seat_policies(config, env)
    for name, own in trained_seats(config, env, named).items():
        named |= {env.seats[seat]: name for seat in own}
    return named


@dataclass
class ActorSetup:
    """Env and players of one actor process."""

    env: VectorEnv
    learner: NetLearner
    fixed_players: list[VectorPolicy]

    def players(self, progress: float) -> list[VectorPolicy]:
        """Players of all seats; `progress` is the elapsed share of the run, from 0 to 1."""
        return [*self.learner.rollout_policies(progress), *self.fixed_players]

    def acting_tensors(self) -> list[torch.Tensor]:
        """Parameters of the acting networks, which the learner overwrites with its newest weights."""
        return self.learner.acting_tensors()


def make_actor_setup(config: VectorConfig) -> ActorSetup:
    """Builds the env and players of an actor, in the actor's own process."""
    keep_freed_memory()
    env, _ = make_own_envs(config, 1)
    return ActorSetup(env, *build_players(config, env, ProcessRank(0, 1, "")))


def _actors(config: VectorConfig, learner: NetLearner) -> ActorPool:
    makers = [partial(make_actor_setup, config)] * config.num_actors
    return ActorPool(ActorSetup(learner.env, learner, []), makers, config.algorithm.rollout_length, config.seed)


def _exam(config: VectorConfig, name: str, exam: VectorEvalConfig, learner: NetLearner, every: int) -> VectorEval:
    wanted = config.env | exam.env
    env = make_vector_env(wanted)
    if env.num_envs > exam.episodes:
        env.close()
        env = make_vector_env(wanted, exam.episodes)
    named = seat_policies(config, env, exam.seats)
    usual = seat_policies(config, learner.env)
    if env.seats != learner.env.seats or env.observation_shapes != learner.env.observation_shapes:
        raise ValueError(f"evals.{name}.env changes who plays or what they see, which no trained policy fits")
    if moved := [seat for seat, policy in named.items() if not _fixed(config, policy) and usual[seat] != policy]:
        raise ValueError(f"evals.{name}.seats moves a learning policy to {moved[0]}: `palestra eval --seats` can")
    others = [make_fixed_player(config, env, seat, policy) for seat, policy in named.items() if _fixed(config, policy)]

    def players() -> Sequence[VectorPolicy]:
        own = learner.greedy_policies() if exam.greedy else learner.sampling_policies()
        return [*own, *others]  # a later player overrides an earlier one at the same seat

    return VectorEval(name=name, episodes=exam.episodes, every=every, env=env, players=players)


def make_fixed_player(config: VectorConfig, env: VectorEnv, seat: Seat, name: str) -> VectorPolicy:
    """Returns the player `script` for one seat, for a policy that is not trained."""
    policy, number = config.policies[name], env.seats.index(seat)
    label = f"{name}/{seat}"
    if isinstance(policy, RandomActionsConfig):
        return UniformVectorPolicy(env, [number], label)
    if isinstance(policy, ScriptConfig):
        return ScriptedVectorPolicy(env, [number], policy.script, label)
    assert isinstance(policy, FrozenNetConfig)
    player = read_policy(member_folder(policy.path), env, [number], best=policy.greedy)
    player.name = label
    return player


def member_folder(path: str) -> Path:
    """Returns the policy's folder in the newest checkpoint for RUN:NAME, else `path` itself.

    Raises ValueError if the run has no such policy, or the files are damaged.
    """
    run, _, name = path.rpartition(":")
    if not run:
        return Path(path)
    kept = list_checkpoints(run)
    if not kept or name not in kept[-1].names:
        have = ", ".join(kept[-1].names) if kept else "no checkpoint"
        raise ValueError(f'there is no policy "{name}" in the run {run}; it has: {have}')
    return kept[-1].verify().path / kept[-1].names[name]


def _fixed(config: VectorConfig, name: str) -> bool:
    return not isinstance(config.policies[name], TrainedNetConfig)


def _net(policy: Any) -> NetPolicyConfig:
    return NetPolicyConfig(**policy.model_dump(exclude={"share_network"}))
