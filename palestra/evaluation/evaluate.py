"""Evaluation of trained text policies: in any seats, swapped, or together with other policies."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from palestra.builders.engines import Engines
from palestra.builders.text import make_episode_runner, make_policy, seat_policies, with_split
from palestra.builders.text_config import TextConfig
from palestra.builders.text_policies import FrozenConfig
from palestra.config import load, validate
from palestra.engine.sampler import SamplingConfig
from palestra.envs import known_envs
from palestra.envs.text.splits import Split
from palestra.policies.base import Policy
from palestra.policies.endpoint import EndpointConfig, EndpointPolicy
from palestra.policies.scripted import AskPerson, ExpertPolicy, HumanPolicy, RandomPolicy, ask_at_terminal
from palestra.remote.envs.remote_env import make_env
from palestra.rollouts.metrics import episode_metrics, seat_returns
from palestra.rollouts.tree_rollout import Branching, EpisodeRunner, EpisodeSpec
from palestra.runs import Checkpoint, list_checkpoints
from palestra.seeding import derive_seed
from palestra.training.loop import evaluate
from palestra.types import Episode, Seat

BASE_ONLY_CONFIG: dict[str, Any] = {
    "policies": {"default": {"type": "frozen"}}
}  # config for an env without a run: the base plays
MAX_ASSIGNMENTS = 256
BUILTIN_POLICIES: dict[str, Callable[[], Policy]] = {
    "expert": ExpertPolicy,
    "random": RandomPolicy,
    "human": HumanPolicy,
}


class EvalResult(NamedTuple):
    """Result of an evaluation: the policy at each seat, the metrics, and the episodes."""

    policy_names: dict[Seat, str]
    metrics: dict[str, Any]
    episodes: list[Episode]


class EvalSetup(NamedTuple):
    """An episode runner and its seat assignment: `policy_names` maps seats to policy names, `load_policy` returns a
    policy by name."""

    runner: EpisodeRunner
    policy_names: dict[Seat, str]
    load_policy: Callable[[str], Policy]

    @property
    def policies(self) -> dict[Seat, Policy]:
        """The policy at each seat; loads those not yet loaded."""
        return {seat: self.load_policy(name) for seat, name in self.policy_names.items()}


def make_eval_setup(
    path: Path,
    env: dict[str, Any],
    seats: dict[Seat, str],
    *,
    split: Split = "test",
    sampling: dict[str, Any] | None = None,
    step: int | None = None,
    in_process: bool = False,
) -> EvalSetup:
    """Returns an evaluation setup in the env of a run or config, on instances of `split` unless `env` names another.

    `path` is a run, a config, a member as RUN:NAME, which then plays every seat not named in `seats`, or an env's name,
    played by the shipped base. See `find_policy` for the names allowed in `seats`. `in_process` samples in this
    process, whatever sampler the config names. Raises ValueError for an unknown path, seat or checkpoint.
    """
    run, _, everywhere = str(path).rpartition(":")
    known = not path.exists() and str(path) in known_envs()
    path, everywhere = (Path(run), everywhere) if run and not known else (path, "")
    config = validate(TextConfig, BASE_ONLY_CONFIG | {"env": {"type": str(path)} | env} if known else _tree(path))
    env = dict(env)
    changed = with_split(config.env_config(env.pop("base_env", None)), None, split) | env
    names = seat_policies(config.model_copy(update={"env": changed, "envs": {}, "seats": _seated(config, changed)}))
    if unknown := sorted(set(seats) - set(names)):
        raise ValueError(f'no seat "{unknown[0]}": env "{changed["type"]}" plays {", ".join(names)}')
    checkpoint = find_checkpoint(path, step) if path.is_dir() else None
    engines = Engines(config.device, config.max_num_seqs, None if in_process else config.sampler)
    names = (dict.fromkeys(names, everywhere) if everywhere else names) | {seat: str(n) for seat, n in seats.items()}
    policy = cache(lambda name: find_policy(name, config, checkpoint, engines, sampling or {}))
    return EvalSetup(make_episode_runner(changed, split), names, policy)


def _seated(config: TextConfig, env: dict[str, Any]) -> dict[Seat, str]:
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
    in_process: bool = False,
) -> EvalResult:
    """Plays `episodes` held-out episodes and returns the result; `swap` exchanges the policies of the two seats. Raises
    ValueError as `make_eval_setup` and `swap_seats` do."""
    table = make_eval_setup(path, env, seats, sampling=sampling, step=step, in_process=in_process)
    names = swap_seats(table.policy_names) if swap else table.policy_names
    return await _scored(table._replace(policy_names=names), episodes, seed)


async def cross_play(
    path: Path,
    env: dict[str, Any],
    members: Sequence[str],
    *,
    episodes: int,
    sampling: dict[str, Any],
    step: int | None,
    seed: int,
    in_process: bool = False,
) -> list[EvalResult]:
    """Evaluates every assignment of `members` (default: the run's own policies) to seats, all on the same instances.

    Raises ValueError if there are more than 256 assignments.
    """
    table = make_eval_setup(path, env, {}, sampling=sampling, step=step, in_process=in_process)
    members = list(dict.fromkeys(members or table.policy_names.values()))
    if len(members) ** len(table.policy_names) > MAX_ASSIGNMENTS:
        raise ValueError(
            f"{len(members)} members can sit at {len(table.policy_names)} seats in "
            f"{len(members) ** len(table.policy_names)} ways, more than {MAX_ASSIGNMENTS}: name fewer with --member"
        )
    ways = [dict(zip(table.policy_names, way, strict=True)) for way in product(members, repeat=len(table.policy_names))]
    return [await _scored(table._replace(policy_names=names), episodes, seed) for names in ways]


def human_eval_setup(
    path: Path,
    env: dict[str, Any],
    seats: dict[Seat, str],
    human_seat: Seat | None,
    *,
    sampling: dict[str, Any],
    step: int | None,
) -> tuple[EvalSetup, Seat]:
    """Returns a setup with a person at seat `human_seat` (None: the first), and that seat. Raises ValueError if there
    is no such seat."""
    table = make_eval_setup(path, env, seats, sampling=sampling, step=step, in_process=True)
    human_seat = human_seat or next(iter(table.policy_names))
    if human_seat not in table.policy_names:
        raise ValueError(f'no seat "{human_seat}": this env plays {", ".join(table.policy_names)}')
    return table._replace(policy_names=table.policy_names | {human_seat: "human"}), human_seat


async def play_episode(setup: EvalSetup, human_seat: Seat, seed: int, ask: AskPerson = ask_at_terminal) -> Episode:
    """Plays one episode of instance `seed`; `ask` gets the person's answers at seat `human_seat`."""
    team = setup.policies | {human_seat: HumanPolicy(ask)}
    return await setup.runner.play(EpisodeSpec(seed, team, derive_seed(seed, "play")), Branching())


def check_single_human(setup: EvalSetup, human_seat: Seat) -> dict[Seat, str]:
    """Loads all policies and returns their names by seat. Raises ValueError if a person plays any seat but
    `human_seat`."""
    team = setup.policies
    if others := [seat for seat, policy in team.items() if isinstance(policy, HumanPolicy) and seat != human_seat]:
        raise ValueError(f"a page is one person's, who plays {human_seat}: seat {others[0]} by another, with --seats")
    return {seat: policy.name for seat, policy in team.items()}


async def _scored(table: EvalSetup, episodes: int, seed: int) -> EvalResult:
    team = table.policies
    played = await evaluate(table.runner, team, episodes, seed)
    return EvalResult(
        {seat: policy.name for seat, policy in team.items()}, episode_metrics(played) | seat_returns(played), played
    )


def swap_seats(names: dict[Seat, str]) -> dict[Seat, str]:
    """Returns the assignment with the policies of two seats exchanged. Raises ValueError unless there are two seats."""
    if len(names) != 2:
        raise ValueError(f"--swap is for two seats; this env has {len(names)}: name them with --seats")
    (a, first), (b, second) = names.items()
    return {a: second, b: first}


def find_checkpoint(path: Path, step: int | None) -> Checkpoint:
    """Returns the newest checkpoint of a run, or the one after `step` steps. Raises ValueError if there is none or its
    files are damaged."""
    found = list_checkpoints(path)
    if step is not None:
        found = [c for c in found if c.step + 1 == step]
    if not found:
        have = ", ".join(str(c.step + 1) for c in list_checkpoints(path)) or "none"
        raise ValueError(f"{path} has no checkpoint{f' after {step} steps' if step else ''}; it has: {have}")
    return found[-1].verify()


def find_policy(
    name: str, config: TextConfig, checkpoint: Checkpoint | None, engines: Engines, sampling: dict[str, Any]
) -> Policy:
    """Returns a policy by name: one of the run's, "base" (the untrained base of the first policy), "RUN:NAME" of
    another run, "expert", "random", "human", or an endpoint as URL#MODEL (its key is read from OPENAI_API_KEY). Raises
    ValueError for an unknown name."""
    if name.startswith(("http://", "https://")):
        url, _, model = name.partition("#")
        key_env = "OPENAI_API_KEY" if "OPENAI_API_KEY" in os.environ else None
        return EndpointPolicy(model, EndpointConfig(url=url, model=model, key_env=key_env))
    if name in BUILTIN_POLICIES and name not in config.policies:
        return BUILTIN_POLICIES[name]()
    run, _, other = name.rpartition(":")
    if run:
        return find_policy(
            other,
            validate(TextConfig, load(Path(run) / "config.yaml")),
            find_checkpoint(Path(run), None),
            engines,
            sampling,
        )
    speakers = [p for p in config.policies.values() if hasattr(p, "base")]
    if name == "base" and speakers:
        return engines.build_frozen_policy("base", _frozen(speakers[0], None, sampling))
    if name not in config.policies:
        raise ValueError(
            f'no policy "{name}"; the run has {", ".join(config.policies)}, or say base, expert, random, human, '
            "RUN:NAME, or URL#MODEL"
        )
    chosen = config.policies[name]
    if checkpoint and name in checkpoint.names:
        folder = checkpoint.path / checkpoint.names[name]
        version = json.loads((folder / "member.json").read_text())["version"]
        return engines.build_frozen_policy(f"{name}@{version}", _frozen(chosen, str(folder), sampling))
    if isinstance(chosen, FrozenConfig):
        return engines.build_frozen_policy(name, _frozen(chosen, chosen.path, sampling))
    if hasattr(chosen, "base"):
        return engines.build_frozen_policy(name, _frozen(chosen, None, sampling))
    return make_policy(name, chosen, engines)


def _frozen(config: Any, path: str | None, sampling: dict[str, Any]) -> FrozenConfig:
    """Returns the settings of `config` for a policy that is not trained."""
    shared = {key: getattr(config, key) for key in FrozenConfig.model_fields if key not in ("type", "path")}
    changed = validate(SamplingConfig, config.sampling.model_dump() | sampling)
    return FrozenConfig(**(shared | {"sampling": changed, "path": path}))
