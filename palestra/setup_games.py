"""Builds a run of neural-network policies in a vectorised env from its config."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator

from palestra.algorithms.vector.a2c import A2C
from palestra.algorithms.vector.coma import COMA
from palestra.algorithms.vector.ddpg import DDPG, TD3
from palestra.algorithms.vector.dqn import DQN
from palestra.algorithms.vector.imitation import BC, GAIL
from palestra.algorithms.vector.nfsp import NFSP
from palestra.algorithms.vector.ppo import PPO
from palestra.algorithms.vector.qmix import QMIX
from palestra.algorithms.vector.sac import SAC
from palestra.config import RunName, Strict, policy_names
from palestra.drill import Drill, GamesExam, drill, just, restore
from palestra.engine.memory import keep_freed_memory, must_fit
from palestra.envs import VectorEnv, env_class, env_options
from palestra.followers import Follower
from palestra.learners.nets import NetLearner, NetPolicyConfig, read_member
from palestra.policies.vector import Player, Scripted, Uniform
from palestra.replicas import Place, end, gather, lost, start
from palestra.rollouts.actors import Actors
from palestra.rollouts.failures import RunFailed
from palestra.rollouts.play import derive
from palestra.rollouts.sweep import Sweeper
from palestra.runs import Run, checkpoints
from palestra.sinks.base import Sinks
from palestra.train import Watcher
from palestra.types import TEAM, Seat

LARGE = 50_000_000  # transitions; above this the real size of one is measured
LINES = 500  # log lines of a run if `log_every` is 0


class LearningNet(NetPolicyConfig):
    """A neural-network policy that is trained."""

    sharing: bool = True
    """True: all seats of the policy share one network. False: each seat gets its own network, named after the seat."""


class FrozenNet(Strict):
    """A policy that another run trained."""

    type: Literal["frozen"] = "frozen"
    """Selects this policy type."""
    path: str
    """RUN:NAME for policy NAME in the newest checkpoint of folder RUN, or the folder of a policy in a checkpoint."""
    best: bool = False
    """True: take the most probable action. False: sample actions."""


class RandomMoves(Strict):
    """A random policy: uniform over legal actions."""

    type: Literal["random"] = "random"
    """Selects this policy type."""


class Script(Strict):
    """A scripted player that the env provides."""

    type: Literal["script"] = "script"
    """Selects this policy type."""
    name: str
    """Name of the script; the docs of the env list them."""


GamePolicy = Annotated[LearningNet | FrozenNet | RandomMoves | Script, Field(discriminator="type")]
GameAlgorithm = Annotated[
    PPO | A2C | DQN | QMIX | NFSP | COMA | SAC | DDPG | TD3 | BC | GAIL, Field(discriminator="type")
]


class GamesExamConfig(Strict):
    """A held-out evaluation in a vectorised env, played before training, after training and optionally in between."""

    episodes: int = Field(100, ge=1, le=1_000_000)
    """Number of episodes that count, spread equally over the env copies."""
    every: int = Field(0, ge=0)
    """Joint steps between evaluations, rounded up to log intervals. 0: only before and after training."""
    best: bool = True
    """True: trained policies act greedily. False: they sample actions as in training."""
    env: dict[str, Any] = {}
    """Env options that differ from training. They must not change seats or observation shapes."""
    seats: dict[str, str] = {}
    """Maps seats or patterns of seats to policies where the evaluation differs from training. Only policies that are
    not trained can be assigned."""


class GamesConfig(Strict):
    """A training run of neural-network policies in a vectorised env."""

    name: RunName = "run"
    """Name of the run's folder. If it exists, -2, -3, ... is appended."""
    seed: int = 0
    """Seed of everything random in the run, from network weights to actions."""
    env_steps: int = Field(1_000_000, ge=1)
    """Length of the run in joint steps, summed over all env copies; rounded up to whole rollouts."""
    env: dict[str, Any]
    """The env to train in: `type`, its options, and `games`, the number of parallel copies."""
    policies: dict[str, GamePolicy]
    """The policies by name; at least one has `type: net`, which is trained."""
    seats: dict[str, str] = {}
    """Maps seats to policies. Keys may contain the wildcards `*` and `?`; an exact name takes precedence over a
    pattern, an earlier pattern over a later one. A seat that matches no key gets the policy of its own name, or the
    only policy."""
    algorithm: GameAlgorithm = PPO()
    """Training algorithm."""
    exams: dict[str, GamesExamConfig] = {}
    """Held-out evaluations by name."""
    log_every: int = Field(0, ge=0)
    """Joint steps between log lines, rounded up to whole rollouts. 0: about 500 lines in the run."""
    checkpoint_every: int = Field(1_000_000, ge=1)
    """Joint steps between checkpoints, rounded up to log intervals. The newest two are kept."""
    keep_every: int = Field(0, ge=0)
    """Joint steps between checkpoints that are kept permanently; use a multiple of `checkpoint_every`. 0: only the last
    one of the run."""
    sinks: Sinks = []
    """Trackers that receive the run's metrics, such as TensorBoard or Weights & Biases."""
    threads: int = Field(1, ge=1, le=1024)
    """Torch threads per process. More than one usually slows training down on few cores."""
    processes: int = Field(1, ge=1, le=1024)
    """Processes that train together, synchronously: each steps its share of the env copies, and gradients are
    averaged."""
    actors: int = Field(0, ge=0, le=1024)
    """Actor processes that step the env copies asynchronously while this process trains on slightly older data; needs
    `algorithm.correct: vtrace` and `processes: 1`. 0: this process steps the env itself."""

    @property
    def plays(self) -> str:
        """Name of the env, for display."""
        return str(self.env["type"])

    @property
    def learns(self) -> str:
        """Name of the algorithm, for display."""
        return self.algorithm.type

    @model_validator(mode="after")
    def _learns(self) -> Self:
        if not any(isinstance(policy, LearningNet) for policy in self.policies.values()):
            raise ValueError("no policy learns: give one of policies: the type net")
        policy_names(self.policies, TEAM)
        return self

    @model_validator(mode="after")
    def _shares(self) -> Self:
        if self.actors and self.processes > 1:
            raise ValueError("actors: play for one learner, so processes: must be 1")
        if self.actors and getattr(self.algorithm, "correct", None) != "vtrace":
            raise ValueError(
                "actors: play by weights that are some updates old: set algorithm.correct: vtrace (ppo and a2c have it)"
            )
        return self


def make_games(env: dict[str, Any], games: int | None = None) -> VectorEnv:
    """Builds the env that a config describes. `games`, if given, replaces the number of env copies."""
    cls = env_class(env["type"])
    options = env_options(cls, {k: v for k, v in env.items() if k != "type"} | ({"games": games} if games else {}))
    made = cls(**options)
    assert isinstance(made, VectorEnv)
    return made


def seat_policies(config: GamesConfig, env: VectorEnv, changes: dict[str, str] | None = None) -> dict[Seat, str]:
    """Returns the policy of each seat. `changes` are further entries of `seats`, whose patterns are tried first.

    Raises ValueError for a seat without a policy, and for an unknown name.
    """
    patterns = (changes or {}) | config.seats
    for pattern, name in patterns.items():
        if not any(fnmatchcase(seat, pattern) for seat in env.seats):
            raise ValueError(f'seats names "{pattern}", but env "{env.name}" plays {", ".join(env.seats)}')
        if name not in config.policies:
            raise ValueError(f'seats gives "{pattern}" to "{name}", but policies: has {", ".join(config.policies)}')
    only = next(iter(config.policies)) if len(config.policies) == 1 else None
    result = {}
    for seat in env.seats:
        fitting = [name for pattern, name in patterns.items() if fnmatchcase(seat, pattern)]
        fitting = [patterns[seat]] if seat in patterns else fitting
        chosen = fitting[0] if fitting else seat if seat in config.policies else only
        if chosen is None:
            raise ValueError(
                f'seat "{seat}" has no policy: env "{env.name}" plays {", ".join(env.seats)}, and policies: names '
                f'{", ".join(config.policies)}. Add policies.{seat}, or say seats: {{"{seat}": ...}}'
            )
        result[seat] = chosen
    return result


def learning_seats(config: GamesConfig, env: VectorEnv, named: dict[Seat, str]) -> dict[str, list[int]]:
    """Returns the seat indices of each trained policy; one policy per seat if `sharing` is false."""
    found: dict[str, list[int]] = {}
    for number, seat in enumerate(env.seats):
        policy = config.policies[named[seat]]
        if isinstance(policy, LearningNet):
            found.setdefault(named[seat] if policy.sharing else seat, []).append(number)
    return found


def build_games(config: GamesConfig) -> Drill:
    """Builds everything that `config` describes, ready for `run_games`, and starts the other processes if there are
    any.

    Raises ValueError if parts of the config do not fit together.
    """
    setup = check_games(config)  # reports mistakes before other processes start
    if config.processes == 1:
        return setup
    return build_one(config, start(config.processes, partial(follow, config)))


def check_games(config: GamesConfig) -> Drill:
    """Builds the run for a single process. Raises ValueError if parts of the config do not fit together."""
    torch.set_num_threads(config.threads)
    return build_one(config, Place(0, 1, ""))


def run_games(setup: Drill, run: Run, watcher: Watcher, stop: Callable[[], bool] = lambda: False) -> bool:
    """Runs `drill` in the processes that `build_games` started, and ends them. Returns True if all steps are done.

    Raises RunFailed if one of the processes died.
    """
    try:
        return drill(setup, run, watcher, stop)
    except RuntimeError as error:  # raised by torch.distributed when a peer is gone
        if not (what := lost()):
            raise
        raise RunFailed(f"{what}; go on from the last checkpoint: palestra train --resume {run.path}") from error
    finally:
        setup.sweeper.close()
        for exam in setup.exams:
            exam.env.close()
        end()


def follow(config: GamesConfig, place: Place) -> None:
    """Entry point of processes with rank > 0: runs the same loop and writes nothing."""
    setup, run = build_one(config, place), Follower()
    restore(setup, run)
    drill(setup, run)


def own_games(config: GamesConfig, processes: int) -> tuple[VectorEnv, int]:
    """Returns the env copies of one process or actor, and the number of copies that one training step covers in all.

    Raises ValueError if the copies cannot be divided equally.
    """
    env = make_games(config.env)
    parts = config.actors or config.processes
    if env.games % parts:
        raise ValueError(f"{env.games} games cannot be shared by {parts} processes: make one divide the other")
    own = env.games // (config.actors or processes)
    whole = env.games // (config.actors or 1)
    if own == env.games:
        return env, whole
    env.close()
    return make_games(config.env, own), whole


def check_sizes(env: Mapping[str, Any], nets: Sequence[NetPolicyConfig], algorithm: Any) -> None:
    """Checks that the run fits into this machine's memory.

    Raises ValueError if the networks, the env copies, one rollout or the replay buffer would not fit. The sizes are
    lower bounds; the size of a transition is measured only if there are many of them.
    """
    games, horizon = _number(env.get("games")), algorithm.horizon + 1
    if games < 1:
        raise ValueError(f"env.games: {games} games play nothing: set it to 1 or more")
    kept = max(getattr(algorithm, name, 0) for name in ("capacity", "memories"))
    wide = [max(one.hidden) ** 2 if len(one.hidden) > 1 else one.hidden[0] for one in nets]
    must_fit(16 * sum(wide), "networks, with gradients and Adam's moments,", "make policies' hidden layers smaller")
    must_fit(8 * games, f"env.games: {games:,}", "play fewer games at once")
    moment = _moment(env) if games * horizon + kept > LARGE else 8
    must_fit(
        moment * games * horizon,
        f"a sweep of {games:,} games and {horizon - 1:,} steps",
        "lower algorithm.horizon or env.games",
    )
    must_fit(moment * kept, f"a memory of {kept:,} moments", "lower algorithm.capacity (of nfsp, memories)")


def _moment(env: Mapping[str, Any]) -> int:
    """Returns the size in bytes of one transition of one env copy, all seats together."""
    probe = make_games(dict(env), 1)
    frame = probe.reset(np.zeros(1, np.int64))
    size = sum(array.nbytes for array in vars(frame).values() if isinstance(array, np.ndarray))
    probe.close()
    return size


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 1


def build_one(config: GamesConfig, place: Place) -> Drill:
    """Builds one process's share of a run. Raises ValueError if parts of the config do not fit together."""
    keep_freed_memory()
    nets = [policy for policy in config.policies.values() if isinstance(policy, LearningNet)]
    check_sizes(config.env, nets, config.algorithm)
    env, share = own_games(config, place.processes)
    learner, others = cast(config, env, place)
    sweep = config.algorithm.horizon * share
    log_every = max(1, math.ceil((config.log_every or config.env_steps / LINES) / sweep))

    def sweeps(env_steps: int) -> int:
        return math.ceil(env_steps / sweep / log_every) * log_every

    setup = Drill(
        sweeper=_actors(config, learner) if config.actors else Sweeper(env, np.arange(env.games)),
        learner=learner,
        others=others,
        exams=[]
        if place.rank
        else [_exam(config, name, exam, learner, sweeps(exam.every)) for name, exam in config.exams.items()],
        seats=own_names(config, env),
        seed=config.seed,
        steps=math.ceil(config.env_steps / sweep),
        horizon=config.algorithm.horizon,
        log_every=log_every,
        checkpoint_every=sweeps(config.checkpoint_every),
        keep_every=sweeps(config.keep_every),
        rank=place.rank,
        processes=place.processes,
        gather=gather if place.processes > 1 else just,
    )
    setup.sweeper.restart(setup.seeds("first"))
    return setup


def cast(config: GamesConfig, env: VectorEnv, place: Place) -> tuple[NetLearner, list[Player]]:
    """Returns the learner of the trained policies, and the players of the other seats."""
    named = seat_policies(config, env)
    seats = learning_seats(config, env, named)
    policies = {name: _net(config.policies[named[env.seats[own[0]]]]) for name, own in seats.items()}
    seeds = {name: derive(config.seed, "net", name) for name in seats}
    together = place.together() if place.processes > 1 else None
    learner = config.algorithm.learner(env, seats, policies, seeds, together)
    return learner, [fixed(config, env, seat, name) for seat, name in named.items() if _fixed(config, name)]


def own_names(config: GamesConfig, env: VectorEnv) -> dict[Seat, str]:
    """Returns the policy of each seat in training. A seat whose policy is not shared has a policy of its own name."""
    named = seat_policies(config, env)
    for name, own in learning_seats(config, env, named).items():
        named |= {env.seats[seat]: name for seat in own}
    return named


@dataclass
class ActorCast:
    """Env and players of one actor process."""

    env: VectorEnv
    learner: NetLearner
    others: list[Player]

    def players(self, progress: float) -> list[Player]:
        """Players of all seats; `progress` is the elapsed share of the run, from 0 to 1."""
        return [*self.learner.players(progress), *self.others]

    def acting(self) -> list[torch.Tensor]:
        """Parameters of the acting networks, which the learner overwrites with its newest weights."""
        return self.learner.acting()


def actor_cast(config: GamesConfig) -> ActorCast:
    """Builds the env and players of an actor, in the actor's own process."""
    keep_freed_memory()
    env, _ = own_games(config, 1)
    return ActorCast(env, *cast(config, env, Place(0, 1, "")))


def _actors(config: GamesConfig, learner: NetLearner) -> Actors:
    makers = [partial(actor_cast, config)] * config.actors
    return Actors(ActorCast(learner.env, learner, []), makers, config.algorithm.horizon, config.seed)


def _exam(config: GamesConfig, name: str, exam: GamesExamConfig, learner: NetLearner, every: int) -> GamesExam:
    wanted = config.env | exam.env
    env = make_games(wanted)
    if env.games > exam.episodes:
        env = make_games(wanted, exam.episodes)
    named = seat_policies(config, env, exam.seats)
    usual = seat_policies(config, learner.env)
    if env.seats != learner.env.seats or env.views != learner.env.views:
        raise ValueError(f"exams.{name}.env changes who plays or what they see, which no trained policy fits")
    if moved := [seat for seat, policy in named.items() if not _fixed(config, policy) and usual[seat] != policy]:
        raise ValueError(f"exams.{name}.seats moves a learning policy to {moved[0]}: `palestra eval --seats` can")
    others = [fixed(config, env, seat, policy) for seat, policy in named.items() if _fixed(config, policy)]

    def players() -> Sequence[Player]:
        own = learner.greedy() if exam.best else learner.drawing()
        return [*own, *others]  # a later player overrides an earlier one at the same seat

    return GamesExam(name, env, exam.episodes, players, every)


def fixed(config: GamesConfig, env: VectorEnv, seat: Seat, name: str) -> Player:
    """Returns the player `name` for one seat, for a policy that is not trained."""
    policy, number = config.policies[name], env.seats.index(seat)
    label = f"{name}/{seat}"
    if isinstance(policy, RandomMoves):
        return Uniform(env, [number], label)
    if isinstance(policy, Script):
        return Scripted(env, [number], policy.name, label)
    assert isinstance(policy, FrozenNet)
    player = read_member(member_folder(policy.path), env, [number], best=policy.best)
    player.name = label
    return player


def member_folder(path: str) -> Path:
    """Returns the policy's folder in the newest checkpoint for RUN:NAME, else `path` itself.

    Raises ValueError if the run has no such policy, or the files are damaged.
    """
    run, _, name = path.rpartition(":")
    if not run:
        return Path(path)
    kept = checkpoints(run)
    if not kept or name not in kept[-1].names:
        have = ", ".join(kept[-1].names) if kept else "no checkpoint"
        raise ValueError(f'there is no policy "{name}" in the run {run}; it has: {have}')
    return kept[-1].checked().path / kept[-1].names[name]


def _fixed(config: GamesConfig, name: str) -> bool:
    return not isinstance(config.policies[name], LearningNet)


def _net(policy: Any) -> NetPolicyConfig:
    return NetPolicyConfig(**policy.model_dump(exclude={"sharing"}))
