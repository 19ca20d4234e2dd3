"""Evaluation of trained text policies: in any seats, swapped, or together with other policies."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from palestra.config import load, validate
from palestra.engine.sampler import Sampling
from palestra.engines import Engines
from palestra.envs import known_envs
from palestra.envs.text.splits import Split
from palestra.policies.base import Policy
from palestra.policies.endpoint import EndpointConfig, EndpointPolicy
from palestra.policies.scripted import Ask, ExpertPolicy, HumanPolicy, RandomPolicy, at_terminal
from palestra.recipe import Config, FrozenConfig
from palestra.remote.envs import make_env
from palestra.rollouts.figures import seat_returns, summary
from palestra.rollouts.play import Arena, Branching, Match, derive
from palestra.runs import Checkpoint, checkpoints
from palestra.setup import exam_env, make_arena, make_policy, seat_map
from palestra.train import evaluate
from palestra.types import Episode, Seat

BARE: dict[str, Any] = {"policies": {"default": {"type": "frozen"}}}  # config for an env without a run: the base plays
MOST_WAYS = 256
FREE: dict[str, Callable[[], Policy]] = {"expert": ExpertPolicy, "random": RandomPolicy, "human": HumanPolicy}


class Scored(NamedTuple):
    """Result of an evaluation: the policy at each seat, the metrics, and the episodes."""

    seats: dict[Seat, str]
    figures: dict[str, Any]
    episodes: list[Episode]


class Table(NamedTuple):
    """An episode runner and its seat assignment: `names` maps seats to policy names, `policy` returns a policy by
    name."""

    arena: Arena
    names: dict[Seat, str]
    policy: Callable[[str], Policy]

    @property
    def team(self) -> dict[Seat, Policy]:
        """The policy at each seat; loads those not yet loaded."""
        return {seat: self.policy(name) for seat, name in self.names.items()}


def set_table(
    path: Path,
    env: dict[str, Any],
    seats: dict[Seat, str],
    *,
    split: Split = "test",
    sampling: dict[str, Any] | None = None,
    step: int | None = None,
    here: bool = False,
) -> Table:
    """Returns an evaluation setup in the env of a run or config, on instances of `split` unless `env` names another.

    `path` is a run, a config, a member as RUN:NAME, which then plays every seat not named in `seats`, or an env's name,
    played by the shipped base. See `member` for the names allowed in `seats`. `here` samples in this process, whatever
    sampler the config names. Raises ValueError for an unknown path, seat or checkpoint.
    """
    run, _, everywhere = str(path).rpartition(":")
    known = not path.exists() and str(path) in known_envs()
    path, everywhere = (Path(run), everywhere) if run and not known else (path, "")
    config = validate(Config, BARE | {"env": {"type": str(path)} | env} if known else _tree(path))
    env = dict(env)
    changed = exam_env(config.game(env.pop("of", None)), None, split) | env
    names = seat_map(config.model_copy(update={"env": changed, "envs": {}, "seats": _seated(config, changed)}))
    if unknown := sorted(set(seats) - set(names)):
        raise ValueError(f'no seat "{unknown[0]}": env "{changed["type"]}" plays {", ".join(names)}')
    checkpoint = find_checkpoint(path, step) if path.is_dir() else None
    engines = Engines(config.device, config.max_rows, None if here else config.sampler)
    names = (dict.fromkeys(names, everywhere) if everywhere else names) | {seat: str(n) for seat, n in seats.items()}
    policy = cache(lambda name: member(name, config, checkpoint, engines, sampling or {}))
    return Table(make_arena(changed, split), names, policy)


def _seated(config: Config, env: dict[str, Any]) -> dict[Seat, str]:
    """Returns the entries of `seats` that this env has, if the config has several envs."""
    own = make_env(**env).seats
    return {seat: name for seat, name in config.seats.items() if seat in own or not config.envs}


def _tree(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise ValueError(f"{path} is no run, no config and no env: `palestra info` lists the envs")
    return load(path / "config.yaml" if path.is_dir() else path)


async def evaluate_run(
    path: Path,
    env: dict[str, Any],
    seats: dict[Seat, str],
    *,
    swap: bool,
    episodes: int,
    sampling: dict[str, Any],
    step: int | None,
    seed: int,
    here: bool = False,
) -> Scored:
    """Plays `episodes` held-out episodes and returns the result; `swap` exchanges the policies of the two seats. Raises
    ValueError as `set_table` and `swapped` do."""
    table = set_table(path, env, seats, sampling=sampling, step=step, here=here)
    names = swapped(table.names) if swap else table.names
    return await _scored(table._replace(names=names), episodes, seed)


async def cross_play(
    path: Path,
    env: dict[str, Any],
    members: Sequence[str],
    *,
    episodes: int,
    sampling: dict[str, Any],
    step: int | None,
    seed: int,
    here: bool = False,
) -> list[Scored]:
    """Evaluates every assignment of `members` (default: the run's own policies) to seats, all on the same instances.

    Raises ValueError if there are more than 256 assignments.
    """
    table = set_table(path, env, {}, sampling=sampling, step=step, here=here)
    members = list(dict.fromkeys(members or table.names.values()))
    if len(members) ** len(table.names) > MOST_WAYS:
        raise ValueError(
            f"{len(members)} members can sit at {len(table.names)} seats in {len(members) ** len(table.names)} ways, "
            f"more than {MOST_WAYS}: name fewer with --member"
        )
    ways = [dict(zip(table.names, way, strict=True)) for way in product(members, repeat=len(table.names))]
    return [await _scored(table._replace(names=names), episodes, seed) for names in ways]


def take_seat(
    path: Path,
    env: dict[str, Any],
    seats: dict[Seat, str],
    mine: Seat | None,
    *,
    sampling: dict[str, Any],
    step: int | None,
) -> tuple[Table, Seat]:
    """Returns a setup with a person at seat `mine` (None: the first), and that seat. Raises ValueError if there is no
    such seat."""
    table = set_table(path, env, seats, sampling=sampling, step=step, here=True)
    mine = mine or next(iter(table.names))
    if mine not in table.names:
        raise ValueError(f'no seat "{mine}": this env plays {", ".join(table.names)}')
    return table._replace(names=table.names | {mine: "human"}), mine


async def play_one(table: Table, mine: Seat, seed: int, ask: Ask = at_terminal) -> Episode:
    """Plays one episode of instance `seed`; `ask` gets the person's answers at seat `mine`."""
    team = table.team | {mine: HumanPolicy(ask)}
    return await table.arena.play(Match(seed, team, derive(seed, "play")), Branching())


def only_person(table: Table, mine: Seat) -> dict[Seat, str]:
    """Loads all policies and returns their names by seat. Raises ValueError if a person plays any seat but `mine`."""
    team = table.team
    if others := [seat for seat, policy in team.items() if isinstance(policy, HumanPolicy) and seat != mine]:
        raise ValueError(f"a page is one person's, who plays {mine}: seat {others[0]} by another, with --seats")
    return {seat: policy.name for seat, policy in team.items()}


async def _scored(table: Table, episodes: int, seed: int) -> Scored:
    team = table.team
    played = await evaluate(table.arena, team, episodes, seed)
    return Scored({seat: policy.name for seat, policy in team.items()}, summary(played) | seat_returns(played), played)


def swapped(names: dict[Seat, str]) -> dict[Seat, str]:
    """Returns the assignment with the policies of two seats exchanged. Raises ValueError unless there are two seats."""
    if len(names) != 2:
        raise ValueError(f"--swap is for two seats; this env has {len(names)}: name them with --seats")
    (a, first), (b, second) = names.items()
    return {a: second, b: first}


def find_checkpoint(path: Path, step: int | None) -> Checkpoint:
    """Returns the newest checkpoint of a run, or the one after `step` steps. Raises ValueError if there is none or its
    files are damaged."""
    found = checkpoints(path)
    if step is not None:
        found = [c for c in found if c.step + 1 == step]
    if not found:
        have = ", ".join(str(c.step + 1) for c in checkpoints(path)) or "none"
        raise ValueError(f"{path} has no checkpoint{f' after step {step}' if step else ''}; it has: {have}")
    return found[-1].checked()


def member(
    name: str, config: Config, checkpoint: Checkpoint | None, engines: Engines, sampling: dict[str, Any]
) -> Policy:
    """Returns a policy by name: one of the run's, "base" (the untrained base of the first policy), "RUN:NAME" of
    another run, "expert", "random", "human", or an endpoint as URL#MODEL (its key is read from OPENAI_API_KEY). Raises
    ValueError for an unknown name."""
    if name.startswith(("http://", "https://")):
        url, _, model = name.partition("#")
        key_env = "OPENAI_API_KEY" if "OPENAI_API_KEY" in os.environ else None
        return EndpointPolicy(model, EndpointConfig(url=url, model=model, key_env=key_env))
    if name in FREE and name not in config.policies:
        return FREE[name]()
    run, _, other = name.rpartition(":")
    if run:
        return member(
            other,
            validate(Config, load(Path(run) / "config.yaml")),
            find_checkpoint(Path(run), None),
            engines,
            sampling,
        )
    speakers = [p for p in config.policies.values() if hasattr(p, "base")]
    if name == "base" and speakers:
        return engines.frozen("base", _frozen(speakers[0], None, sampling))
    if name not in config.policies:
        raise ValueError(
            f'no policy "{name}"; the run has {", ".join(config.policies)}, or say base, expert, random, human, '
            "RUN:NAME, or URL#MODEL"
        )
    chosen = config.policies[name]
    if checkpoint and name in checkpoint.names:
        folder = checkpoint.path / checkpoint.names[name]
        version = json.loads((folder / "member.json").read_text())["version"]
        return engines.frozen(f"{name}@{version}", _frozen(chosen, str(folder), sampling))
    if isinstance(chosen, FrozenConfig):
        return engines.frozen(name, _frozen(chosen, chosen.path, sampling))
    if hasattr(chosen, "base"):
        return engines.frozen(name, _frozen(chosen, None, sampling))
    return make_policy(name, chosen, engines)


def _frozen(config: Any, path: str | None, sampling: dict[str, Any]) -> FrozenConfig:
    """Returns the settings of `config` for a policy that is not trained."""
    shared = {key: getattr(config, key) for key in FrozenConfig.model_fields if key not in ("type", "path")}
    changed = validate(Sampling, config.sampling.model_dump() | sampling)
    return FrozenConfig(**(shared | {"sampling": changed, "path": path}))
