"""From a config of a vectorised game to everything a run consists of."""

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

LARGE = 50_000_000  # moments of games from which on their size is measured
LINES = 500  # of a run's log, unless `log_every` says otherwise


class LearningNet(NetPolicyConfig):
    """A network that learns. `sharing: false` gives each of its seats a network of its own, named after the seat."""

    sharing: bool = True


class FrozenNet(Strict):
    """A policy that another run trained: `path` is RUN:NAME, or a checkpoint's folder of that policy."""

    type: Literal["frozen"] = "frozen"
    path: str
    best: bool = False


class RandomMoves(Strict):
    """Uniform over legal actions."""

    type: Literal["random"] = "random"


class Script(Strict):
    """A scripted player that the env offers, by `name`."""

    type: Literal["script"] = "script"
    name: str


GamePolicy = Annotated[LearningNet | FrozenNet | RandomMoves | Script, Field(discriminator="type")]
GameAlgorithm = Annotated[
    PPO | A2C | DQN | QMIX | NFSP | COMA | SAC | DDPG | TD3 | BC | GAIL, Field(discriminator="type")
]


class GamesExamConfig(Strict):
    """Held-out games, the learning policies at their best, or with `best: false` drawing moves as in training: `env`
    changes options of the env, `seats` who plays; `every` so many joint steps, 0 only before and after."""

    episodes: int = Field(100, ge=1, le=1_000_000)
    every: int = Field(0, ge=0)
    best: bool = True
    env: dict[str, Any] = {}
    seats: dict[str, str] = {}


class GamesConfig(Strict):
    """A training run in a vectorised game. It ends after `env_steps` joint steps, of all games together.

    `seats` maps seats to policies; `*` and `?` stand for any letters; a seat's own name counts before a pattern, an
    earlier pattern before a later one. A seat not named goes to the policy of its own name, or to the only one.
    `log_every`, `checkpoint_every` and the exams' `every` count joint steps, rounded up to whole sweeps; 0 leaves
    `log_every` to palestra. `processes` train together, each with its share of the games and none of them ahead; or as
    many `actors` play on while this process learns, and nobody waits. `threads` are those of torch in each: more than
    one, on few cores, costs more than it gives."""

    name: RunName = "run"
    seed: int = 0
    env_steps: int = Field(1_000_000, ge=1)
    env: dict[str, Any]
    policies: dict[str, GamePolicy]
    seats: dict[str, str] = {}
    algorithm: GameAlgorithm = PPO()
    exams: dict[str, GamesExamConfig] = {}
    log_every: int = Field(0, ge=0)
    checkpoint_every: int = Field(1_000_000, ge=1)
    keep_every: int = Field(0, ge=0)
    sinks: Sinks = []
    threads: int = Field(1, ge=1, le=1024)
    processes: int = Field(1, ge=1, le=1024)
    actors: int = Field(0, ge=0, le=1024)

    @property
    def plays(self) -> str:
        """What is played, for who watches."""
        return str(self.env["type"])

    @property
    def learns(self) -> str:
        """How, for who watches."""
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
    """The env that a config describes, with another number of games if `games` says so."""
    cls = env_class(env["type"])
    options = env_options(cls, {k: v for k, v in env.items() if k != "type"} | ({"games": games} if games else {}))
    made = cls(**options)
    assert isinstance(made, VectorEnv)
    return made


def seat_policies(config: GamesConfig, env: VectorEnv, changes: dict[str, str] | None = None) -> dict[Seat, str]:
    """The policy of each seat. Raises ValueError for a seat without one, and for a name unknown."""
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
    """The seat numbers of each policy that learns; one policy for each seat where a policy does not share."""
    found: dict[str, list[int]] = {}
    for number, seat in enumerate(env.seats):
        policy = config.policies[named[seat]]
        if isinstance(policy, LearningNet):
            found.setdefault(named[seat] if policy.sharing else seat, []).append(number)
    return found


def build_games(config: GamesConfig) -> Drill:
    """Everything that `config` describes, ready for `run_games`. Raises ValueError where its parts do not fit."""
    setup = check_games(config)  # a mistake is heard before other processes start
    if config.processes == 1:
        return setup
    return build_one(config, start(config.processes, partial(follow, config)))


def check_games(config: GamesConfig) -> Drill:
    """The run as one process would do it."""
    torch.set_num_threads(config.threads)
    return build_one(config, Place(0, 1, ""))


def run_games(setup: Drill, run: Run, watcher: Watcher, stop: Callable[[], bool] = lambda: False) -> bool:
    """`drill`, in as many processes as `build_games` started; they end with it. Raises RunFailed where one died."""
    try:
        return drill(setup, run, watcher, stop)
    except RuntimeError as error:  # what a broken connection raises
        if not (what := lost()):
            raise
        raise RunFailed(f"{what}; go on from the last checkpoint: palestra train --resume {run.path}") from error
    finally:
        setup.sweeper.close()
        for exam in setup.exams:
            exam.env.close()
        end()


def follow(config: GamesConfig, place: Place) -> None:
    """What the processes beside the first do: the same, and write nothing."""
    setup, run = build_one(config, place), Follower()
    restore(setup, run)
    drill(setup, run)


def own_games(config: GamesConfig, processes: int) -> tuple[VectorEnv, int]:
    """One process's or actor's share of the games, and how many the sweep of a step has in all."""
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
    """Raises ValueError where the networks, the games in play, a sweep or what is remembered of them would not fit into
    this machine's memory. These are lower bounds: what a game takes is measured where there are many."""
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
    """Bytes of what all seats of one game see, may do and are paid at one moment."""
    probe = make_games(dict(env), 1)
    frame = probe.reset(np.zeros(1, np.int64))
    size = sum(array.nbytes for array in vars(frame).values() if isinstance(array, np.ndarray))
    probe.close()
    return size


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 1


def build_one(config: GamesConfig, place: Place) -> Drill:
    """One process's share of a run."""
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
    """Who plays in an env: the policies that learn, and the others."""
    named = seat_policies(config, env)
    seats = learning_seats(config, env, named)
    policies = {name: _net(config.policies[named[env.seats[own[0]]]]) for name, own in seats.items()}
    seeds = {name: derive(config.seed, "net", name) for name in seats}
    together = place.together() if place.processes > 1 else None
    learner = config.algorithm.learner(env, seats, policies, seeds, together)
    return learner, [fixed(config, env, seat, name) for seat, name in named.items() if _fixed(config, name)]


def own_names(config: GamesConfig, env: VectorEnv) -> dict[Seat, str]:
    """The policy of each seat in training; that of its own, where policies are not shared."""
    named = seat_policies(config, env)
    for name, own in learning_seats(config, env, named).items():
        named |= {env.seats[seat]: name for seat in own}
    return named


@dataclass
class ActorCast:
    """What an actor plays with."""

    env: VectorEnv
    learner: NetLearner
    others: list[Player]

    def players(self, progress: float) -> list[Player]:
        return [*self.learner.players(progress), *self.others]

    def acting(self) -> list[torch.Tensor]:
        return self.learner.acting()


def actor_cast(config: GamesConfig) -> ActorCast:
    """An actor's, in its own process."""
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
        return [*own, *others]  # who comes later has the last word at a seat

    return GamesExam(name, env, exam.episodes, players, every)


def fixed(config: GamesConfig, env: VectorEnv, seat: Seat, name: str) -> Player:
    """A player that does not learn, at one seat."""
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
    """The folder of RUN:NAME in the run's newest checkpoint, or `path` itself."""
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
