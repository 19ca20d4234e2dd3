"""Builds a population run from its config: plan, workers and backend.

This module imports no transformers, so that networks train without it: `language_population` adds language agents and
is imported only for configs with language agents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import Field, field_serializer, model_validator

from palestra.core.config import RunName, StrictModel
from palestra.core.files import atomic_write, to_json_line
from palestra.core.types import TEAM, Metrics, Seat
from palestra.envs import load_env_class, new_env, validate_env_options
from palestra.envs.remote.remote_env import make_env
from palestra.envs.text.board_games import TextGame
from palestra.envs.vector_base import VectorEnv
from palestra.parallel.config import PopulationBackendConfig, open_backend
from palestra.parallel.tasks import TaskResult, WorkerFactory
from palestra.populations.plans.league import League, LeagueConfig
from palestra.populations.plans.pbt import PBT, PBTConfig
from palestra.populations.plans.psro import PSRO
from palestra.populations.plans.psro_config import PSROConfig
from palestra.populations.plans.self_play import SelfPlay, SelfPlayConfig
from palestra.populations.plans.xdo import XDO, XDOConfig
from palestra.populations.population import Member, Player, Population, Sides
from palestra.populations.scheduler import PlanCallback, run_plan
from palestra.populations.workers.exact import ExactWorker
from palestra.populations.workers.member_loader import UNIFORM_MEMBER, no_rules_message, rules_of_env, tree_of_env
from palestra.populations.workers.net_oracle import NetOracle, NetWorker, apply_settings
from palestra.runs import Run
from palestra.runs.config import RunConfig
from palestra.runs.seats import check_matches, find_assigned
from palestra.vector.build.envs import check_memory, seed_notes

SHARED_PLAYER = "agent"  # name of the population that plays every side

AnyPlan = PSRO | XDO | SelfPlay | League | PBT
PlanConfig = Annotated[PSROConfig | XDOConfig | SelfPlayConfig | LeagueConfig | PBTConfig, Field(discriminator="type")]


class ExactOracle(StrictModel):
    """Exact best responses, for games with rules that are small enough to be enumerated."""

    type: Literal["exact"] = "exact"
    env: dict[str, Any]
    """The env, as at the top of the config."""


class PopulationConfig(RunConfig):
    """A run that trains a population of networks, or of exact best responses."""

    name: RunName = "population"
    symmetric: bool = False
    """One population plays every seat, or every side that `seats` names; else each has its own. Leagues and
    population-based training are symmetric unless `seats` names sides."""
    seats: dict[Seat, Player] = {}
    """Maps seats to players, with the wildcards `*` and `?`: `{"adversary_*": hunters, "agent_*": prey}`. The seats of
    a player are a side, which a member plays as a whole. A seat that no key matches is a player of its own name."""
    population: PlanConfig
    """The plan: which members are trained, against which opponents."""
    oracle: Annotated[NetOracle | ExactOracle, Field(discriminator="type")]
    """Training of members: networks or exact best responses."""
    backend: PopulationBackendConfig = PopulationBackendConfig()
    """Processes that run tasks."""

    @model_validator(mode="before")
    @classmethod
    def _one_env(cls, tree: Any) -> Any:
        """Copies the run's env to the oracle, whose config must not contain one."""
        oracle = tree.get("oracle") if isinstance(tree, Mapping) else None
        if not isinstance(oracle, Mapping):
            return tree
        if "env" in oracle:
            raise ValueError("oracle.env: the env of a population is set at the top of the config; leave it out here")
        return {**tree, "oracle": {**oracle, "env": tree.get("env")}}

    @field_serializer("oracle")
    def _without_env(self, oracle: StrictModel) -> dict[str, Any]:
        return oracle.model_dump(mode="json", exclude={"env"})

    @property
    def trains_language_agents(self) -> bool:
        """True if the members are language agents."""
        return False

    def worker_factory(self, sides: Sides) -> WorkerFactory:
        """Returns the factory of the workers that run the plan's tasks."""
        if isinstance(self.oracle, ExactOracle):
            return partial(ExactWorker, self.env, sides)
        return partial(NetWorker, self.oracle, sides, self.seed)


@dataclass
class PopulationSetup:
    """Parts of a population run, for `run_population`. `notes` are lines about the env."""

    plan: AnyPlan
    make_worker: WorkerFactory
    backend: PopulationBackendConfig
    notes: Sequence[str] = ()


class PopulationRecorder(PlanCallback):
    """Writes population.json and payoffs.csv to the run's folder when members were added; calls `callback` after each
    task."""

    def __init__(self, plan: AnyPlan, run: Run, callback: PlanCallback) -> None:
        self.plan = plan
        self.run = run
        self.callback = callback
        self._lines: list[str] = []  # lines of population.json, one for each member; members do not change

    def on_task_done(self, number: int, done: TaskResult, lines: Mapping[str, Metrics]) -> None:
        if TEAM in lines and len(self.plan.population) > len(self._lines):
            self.write()
        self.callback.on_task_done(number, done, lines)

    def write(self) -> None:
        """Writes both files; payoffs.csv only for plans with a payoff table."""
        new = islice(self.plan.population, len(self._lines), None)
        self._lines += [to_json_line(member).decode().rstrip() for member in new]
        atomic_write(self.run.path / "population.json", "[\n{}\n]\n".format(",\n".join(self._lines)).encode())
        if isinstance(self.plan, PSRO | SelfPlay) and all(self.plan.payoffs.shape):
            atomic_write(self.run.path / "payoffs.csv", self.plan.payoffs.to_csv().encode())


def build_population(config: PopulationConfig) -> PopulationSetup:
    """Returns the parts that `config` describes. Raises ValueError if they do not fit together."""
    seats, rules, notes = _game(config.env)
    sides = _sides(config, seats)
    _check_sides(config, sides)
    _check(config, rules)
    if isinstance(config.oracle, NetOracle):
        check_memory(config.env, [config.oracle.policy], config.oracle.algorithm)
    population = Population(sides.players)
    population.add(Member(UNIFORM_MEMBER, ""))
    return PopulationSetup(
        plan=_plan(config, population, sides.owners),
        make_worker=config.worker_factory(sides),
        backend=config.backend,
        notes=notes,
    )


def sides_of_run(config: PopulationConfig) -> Sides:
    """Returns the sides of the config's game and their players."""
    return _sides(config, _game(config.env)[0])


def _sides(config: PopulationConfig, seats: tuple[Seat, ...]) -> Sides:
    """Returns the sides and their players. Raises ValueError for a key of `seats` that matches none, for a single side,
    and if one population plays sides of different sizes."""
    for key in config.seats:
        check_matches(key, seats, "seats", f'env "{config.env.get("type")}" plays {", ".join(seats)}')
    sides = Sides.of([find_assigned(seat, config.seats) or seat for seat in seats])
    if config.seats and len(sides.seats) == 1:
        raise ValueError(
            f"seats gives all seats to {sides.owners[0]}, which has no opponent then: name several sides, which one "
            "population may play all (symmetric: true)"
        )
    if config.symmetric or (isinstance(config.population, LeagueConfig | PBTConfig) and not config.seats):
        return sides.with_owner(SHARED_PLAYER)
    return sides


def _check_sides(config: PopulationConfig, sides: Sides) -> None:
    """Raises ValueError for exact results in a game with sides of several seats, and for a network that would know its
    seat at one side alone."""
    if sides.are_seats:
        return
    if sides.symmetric and isinstance(config.oracle, NetOracle) and config.oracle.policy.seat_one_hot:
        raise ValueError(
            "seat_one_hot tells all seats of the game apart, and with symmetric: true a member plays those of either "
            "side: leave seat_one_hot out"
        )
    exact = isinstance(config.oracle, ExactOracle) or config.oracle.payoffs == "exact"
    if exact or isinstance(config.population, XDOConfig):
        raise ValueError(
            "exact results are of players with one seat, and seats gives one several: use an oracle that trains "
            "(net or language) with payoffs: simulated, in psro or self_play"
        )
    if not isinstance(config.population, PBTConfig) and config.population.nash_conv_every > 0:
        raise ValueError(
            "NashConv is of players with one seat, and seats gives one several: set population.nash_conv_every: 0"
        )


def run_population(
    setup: PopulationSetup, run: Run, callback: PlanCallback, stop: Callable[[], bool] = lambda: False
) -> bool:
    """Runs the rest of the plan. Returns False if `stop` ended it early. Raises ValueError if a task fails."""
    recorder = PopulationRecorder(setup.plan, run, callback)
    as_completed = setup.backend.as_completed
    with closing(open_backend(setup.backend, setup.make_worker)) as backend:
        done = run_plan(setup.plan, backend, run, callback=recorder, stop=stop, as_completed=as_completed)
    recorder.write()
    return done


def _game(env: dict[str, Any]) -> tuple[tuple[Seat, ...], bool, list[str]]:
    """Returns an env's seats, whether it has rules, and a note if it is not a function of its seeds."""
    if env.get("at"):
        return make_env(**env).seats, False, []
    cls = load_env_class(env.get("type", ""))
    options = validate_env_options(cls, {name: value for name, value in env.items() if name != "type"})
    if issubclass(cls, VectorEnv):
        made = new_env(cls, options | {"num_envs": 1})
        seats = made.seats
        rules = rules_of_env(env) is not None
        notes = seed_notes(made)
        made.close()
        return seats, rules, notes
    game = new_env(cls, options)
    return game.seats, isinstance(game, TextGame) and game.is_tabular, []


def _check(config: PopulationConfig, rules: bool) -> None:
    env = config.env.get("type")
    oracle = config.oracle
    vectorised = not config.env.get("at") and issubclass(load_env_class(str(env)), VectorEnv)
    if vectorised == config.trains_language_agents:
        fitting = "net or exact" if vectorised else "language"
        raise ValueError(f'oracle {oracle.type} cannot play env "{env}": set oracle.type to {fitting}')
    if isinstance(config.population, XDOConfig) and (not rules or config.trains_language_agents):
        raise ValueError(
            f"xdo solves restricted games by the rules of a vectorised game, and {env} with oracle {oracle.type} has "
            "no such rules: use psro"
        )
    if isinstance(config.population, PBTConfig) and isinstance(oracle, NetOracle):
        _check_search(config.population, oracle)
    measured = not isinstance(config.population, PBTConfig) and config.population.nash_conv_every > 0
    exact = isinstance(oracle, ExactOracle)
    if not rules and exact:
        raise ValueError(
            f"{no_rules_message(config.env)}, so best responses cannot be computed: use an oracle that trains them "
            "(oracle: {type: net})"
        )
    if not rules and measured:
        raise ValueError(
            f"{no_rules_message(config.env)}, so NashConv cannot be measured: set population.nash_conv_every: 0"
        )
    if vectorised and (exact or measured or isinstance(config.population, XDOConfig)):
        tree_of_env(config.env)  # raises ValueError if the game is too large


def _check_search(population: PBTConfig, oracle: NetOracle) -> None:
    """Raises ValueError for a searched setting that the oracle has not, or whose range holds values that it refuses."""
    for name, space in population.search.items():
        for value in (space.low, space.high):
            try:
                apply_settings(oracle, {name: value})
            except ValueError as error:
                raise ValueError(f"population.search.{name}: {error}") from None


def _plan(config: PopulationConfig, population: Population, seats: tuple[Player, ...]) -> AnyPlan:
    plan = config.population
    if isinstance(plan, PSROConfig):
        return PSRO(plan, population, seats)
    if isinstance(plan, XDOConfig):
        return XDO(plan, population, seats)
    if isinstance(plan, SelfPlayConfig):
        return SelfPlay(plan, population, seats)
    if isinstance(plan, LeagueConfig):
        return League(plan, population, seats, config.seed)
    return PBT(plan, population, config.seed)
