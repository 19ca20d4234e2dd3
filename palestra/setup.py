"""Builds a language-agent run from its config (recipe.py). The only module that turns names into objects."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from palestra.engines import Engines, engines_of
from palestra.learners.lm import FullPolicyConfig, LanguageLearner, LoraPolicyConfig
from palestra.policies.base import Policy
from palestra.policies.endpoint import EndpointConfig, EndpointPolicy
from palestra.policies.lm import LanguagePolicy, TaughtPolicy
from palestra.policies.scripted import ExpertPolicy, HumanPolicy, RandomPolicy, ScriptedPolicy
from palestra.recipe import Config, ExpertConfig, HumanConfig, RandomConfig, ScriptedConfig
from palestra.remote.envs import env_maker, make_env, takes
from palestra.remote.place import figures
from palestra.rollouts.play import Arena, derive
from palestra.rollouts.recorded import Recorded
from palestra.rollouts.records import Record, read_data
from palestra.rollouts.shared import SharedArena, SharedSource, Table
from palestra.rollouts.sources import Games, Source
from palestra.train import Exam, Setup, Stage
from palestra.types import Seat

if TYPE_CHECKING:
    from palestra.service.client import RemoteEngines


def build(config: Config, engines: Engines | RemoteEngines | None = None) -> Setup:
    """Builds everything that `config` describes, ready for `train`.

    Models come from `engines`, or are loaded if it is None. Raises ValueError if parts of the config do not fit
    together.
    """
    parts = list(config.parts())
    records = [read_data(part.data, _only_seat(part)) if part.data else [] for part in parts]
    seats = [seat_map(part, files) for part, files in zip(parts, records, strict=True)]
    seated = {seat: name for names in seats for seat, name in names.items()}
    sittings = {name: _sitting(config, name) for name in config.exams}
    halls = {name: make_arena(exam_game(config, name), name) for name in config.exams}
    arenas = [{name: make_arena(env, name) for name, env in part.games.items()} for part in parts]
    engines = engines or engines_of(config)
    used = set().union(*(_used(part, names) for part, names in zip(parts, seats, strict=True)))
    used |= {name for sitting in sittings.values() for name in sitting.values()}
    for part in parts:
        seen = {name: policy for name, policy in part.policies.items() if name in used}
        engines.check(part.algorithm.loss, part.algorithm.loss_options, seen)
    learners = {
        name: engines.learner(name, policy, derive(config.seed, "adapter", name), critic=_critic(parts))
        for name, policy in parts[0].policies.items()
        if name in used and isinstance(policy, LoraPolicyConfig | FullPolicyConfig)
    }
    fixed = {n: make_policy(n, p, engines) for n, p in config.policies.items() if n in used and n not in learners}
    cast = Cast(learners, fixed, engines)
    learning = {name: learner for name, learner in learners.items() if name in seated.values()}
    labels = [stage.name for stage in config.stages] or [""]
    table = _table(engines)
    sources = [_source(*row, cast) for row in zip(parts, seats, arenas, records, strict=True)]
    if table:
        sources = [SharedSource(source, table) for source in sources]
        halls = {name: SharedArena(arena, table) for name, arena in halls.items()}
    stages = [_stage(*row, cast) for row in zip(parts, labels, sources, strict=True)]
    return Setup(
        stages=stages,
        learners=learning,
        exams=[_exam(config, halls[name], sittings[name], cast) for name in config.exams],
        seed=config.seed,
        checkpoint_every=config.checkpoint_every,
        keep_every=config.keep_every,
        record_every=config.record_every,
        staleness=config.staleness,
        max_failed=config.max_failed,
        figures=figures,
    )


def _table(engines: Engines | RemoteEngines) -> Table | None:
    """Returns the group of ranks that share episodes; None if there is one rank and no weights have to be prepared."""
    shares = isinstance(engines, Engines) and (engines.ranks.size > 1 or any(e.mixed for e in engines.loaded))
    return Table(engines.ranks, engines.playing) if isinstance(engines, Engines) and shares else None


@dataclass(frozen=True)
class Cast:
    """Resolves seats to policies at their current weights: `learners` are trained, `fixed` are not."""

    learners: Mapping[str, LanguageLearner]
    fixed: Mapping[str, Policy]
    engines: Engines | RemoteEngines

    def playing(self, seats: Mapping[Seat, str], teachers: Mapping[str, str]) -> dict[Seat, Policy]:
        """Returns the policy of each seat at its current weights; a policy with a teacher is played by the teacher."""
        self.engines.forget()
        return {seat: self._now(name, teachers) for seat, name in seats.items()}

    def examined(self, seats: Mapping[Seat, str], sampling: dict[str, Any]) -> dict[Seat, Policy]:
        """Returns the policy of each seat at its current weights, with the sampling of evaluations and without
        teachers."""
        self.engines.forget()
        return {seat: _examined(self._now(name, {}), sampling) for seat, name in seats.items()}

    def writing(self, seats: Mapping[Seat, str]) -> dict[Seat, Policy]:
        """Returns the policy of each seat for encoding recorded answers into tokens, without exporting its weights."""
        return {seat: self._scribe(name) for seat, name in seats.items()}

    def _scribe(self, name: str) -> Policy:
        """Policy `name` with its current version and encoder, but without an adapter."""
        if name not in self.learners:
            return self.fixed[name]
        learner = self.learners[name]
        sampling, system, memory = learner.config.sampling, learner.config.system, learner.config.memory
        versioned = f"{name}@{learner.version}"
        return LanguagePolicy(versioned, learner.sampler, learner.encoder, sampling, system=system, memory=memory)

    def _now(self, name: str, teachers: Mapping[str, str]) -> Policy:
        """Policy `name` at its current weights."""
        if name not in self.learners:
            return self.fixed[name]
        policy = self.learners[name].policy()
        return TaughtPolicy(policy, self._now(teachers[name], {})) if name in teachers else policy


def _source(
    part: Config, seats: dict[Seat, str], arenas: dict[str, Arena], records: list[Record], cast: Cast
) -> Source:
    """Returns a dataset source if the stage has data files, else a source that plays."""
    if records:
        roles = {kind: make_env(**env).roles for kind, env in part.games.items()}
        recorded = Recorded(records, lambda: cast.writing(seats), part.seed, roles)
        if learning := {name for name in seats.values() if name in cast.learners}:
            recorded.check(part.algorithm, learning)
        return recorded
    teachers = _teachers(part)
    return Games(
        arenas,
        lambda: cast.playing(seats, teachers),
        part.seed,
        part.mix.weights,
        part.mix.curriculum,
        part.mix.floor,
        part.mix.rate,
        {kind: make_env(**env).seats for kind, env in part.games.items()},
    )


def _stage(part: Config, name: str, source: Source, cast: Cast) -> Stage:
    def settle() -> None:
        for learner in cast.learners.values():
            settings = part.policies[learner.name]
            assert isinstance(settings, LoraPolicyConfig | FullPolicyConfig)
            learner.adopt(settings)

    return Stage(source, part.algorithm, part.steps, part.episodes, name, settle)


def exam_game(config: Config, name: str) -> dict[str, Any]:
    """Returns the env config of evaluation `name`: the training env with the evaluation's changes."""
    exam = config.exams[name]
    return exam_env(config.game(exam.of), exam.env, "dev")


def _sitting(config: Config, name: str) -> dict[Seat, str]:
    """Returns the policy of each seat in an evaluation: as in training, except for seats that the evaluation
    assigns."""
    env, changes = exam_game(config, name), config.exams[name].seats
    own = make_env(**env).seats
    plays = f'exam {name} is of env "{env["type"]}", which plays {", ".join(own)}'
    if unknown := sorted(set(changes) - set(own)):
        raise ValueError(f'exams.{name}.seats names "{unknown[0]}", but {plays}')
    return {seat: changes[seat] if seat in changes else _sits(config, seat, plays) for seat in own}


def _exam(config: Config, arena: Arena, seats: Mapping[Seat, str], cast: Cast) -> Exam:
    exam = config.exams[arena.name]
    return Exam(arena.name, arena, lambda: cast.examined(seats, config.exam_sampling), exam.episodes, exam.every)


def _used(part: Config, seats: Mapping[Seat, str]) -> set[str]:
    """Names of the policies that play in a stage, teachers included."""
    teachers = _teachers(part)
    return {*seats.values(), *(teachers[name] for name in seats.values() if name in teachers)}


def _teachers(part: Config) -> dict[str, str]:
    return {name: teacher for name, p in part.policies.items() if (teacher := getattr(p, "teacher", None))}


def _critic(parts: Sequence[Config]) -> bool:
    return any(part.algorithm.critic for part in parts)


def _only_seat(config: Config) -> Seat | None:
    """Returns the seat of dataset rows if there is only one: that of the envs or, without envs, of the only policy."""
    played = {seat for env in config.games.values() for seat in make_env(**env).seats}
    seats = played or set(config.seats or config.policies)
    return min(seats) if len(seats) == 1 else None


def seat_map(config: Config, records: Sequence[Record] = ()) -> dict[Seat, str]:
    """Returns the policy of each seat of the envs or, without envs, of each seat in the data files.

    Raises ValueError for a seat without a policy, and for an unknown name.
    """
    kinds = " and ".join(f'"{env["type"]}"' for env in config.games.values())
    seats = list(dict.fromkeys(seat for env in config.games.values() for seat in make_env(**env).seats))
    plays = f"env {kinds} plays {', '.join(seats)}"
    if not config.games:
        seats = list(dict.fromkeys(seat for record in records for seat in record.seats))
        plays = f"the data has answers of {', '.join(seats)}"
    for record in records:
        if missing := [seat for seat in record.seats if seat not in seats]:
            raise ValueError(f'{record.path} has answers of seat "{missing[0]}", which nobody can be: {plays}')
    if unknown := sorted(set(config.seats) - set(seats)):
        raise ValueError(f'seats names "{unknown[0]}", but {plays}')
    result = {seat: _sits(config, seat, plays) for seat in seats}
    unused = set(config.policies) - set(result.values())
    for seat in (seat for seat, name in result.items() if name == "default" and seat not in config.seats):
        for close in difflib.get_close_matches(seat, unused, n=1, cutoff=0.75):
            raise ValueError(
                f'policies.{close} plays nowhere, and policies.default plays seat "{seat}": did you mean '
                f"policies.{seat}? Else say so: seats: {{{seat}: default}}"
            )
    return result


def _sits(config: Config, seat: Seat, plays: str) -> str:
    """Returns the policy of a seat: the one in `seats`, else the one of the seat's name, else `default`."""
    name = config.seats.get(seat, seat if seat in config.policies else "default")
    if name not in config.policies:
        raise ValueError(
            f'seat "{seat}" has no policy: {plays}, but policies: names only '
            f"{', '.join(config.policies)}. Add policies.{seat}, or set policies.default."
        )
    return name


def exam_env(env: dict[str, Any], changes: dict[str, Any] | None, split: str) -> dict[str, Any]:
    """Returns `env` with `changes`. If `changes` is None, sets the env's split to `split`, if it has one."""
    if changes is None:
        changes = {"split": split} if takes(env, "split") else {}
    return env | changes


def make_arena(env: dict[str, Any], name: str) -> Arena:
    """Returns an arena for `env` (type, options, and servers if it is remote).

    The options are checked here, before any model is loaded. Raises ValueError if one is wrong.
    """
    return Arena(env_maker(env), name)


def make_policy(name: str, config: Any, engines: Engines | RemoteEngines) -> Policy:
    """Returns the policy `name` that is not trained, as `config` describes it."""
    if isinstance(config, RandomConfig):
        return RandomPolicy(config.words, config.length)
    if isinstance(config, ScriptedConfig):
        return ScriptedPolicy(config.answers, name)
    if isinstance(config, HumanConfig):
        return HumanPolicy()
    if isinstance(config, ExpertConfig):
        return ExpertPolicy(name)
    if isinstance(config, EndpointConfig):
        return EndpointPolicy(name, config)
    return engines.frozen(name, config)


def _examined(policy: Policy, changes: dict[str, Any]) -> Policy:
    return policy.sampling_with(changes) if changes and isinstance(policy, LanguagePolicy) else policy
