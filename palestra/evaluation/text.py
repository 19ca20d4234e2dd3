"""Plays evaluations of language agents, and single episodes with a person."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from fnmatch import filter as matching_names
from fnmatch import fnmatchcase
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from palestra.core.config import validate
from palestra.core.files import read_json
from palestra.core.seeding import derive_seed
from palestra.core.types import Answer, Episode, Seat
from palestra.engine.bases.names import looks_like_base
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.envs.remote.remote_env import make_env
from palestra.envs.support.splits import Split
from palestra.envs.text.board_games import TextGame
from palestra.evaluation.game_policy import nash_conv_metrics
from palestra.evaluation.target import EvalResult, OnProgress, Target, assign_seats, find_target
from palestra.populations.tabular.game_tree import GameTree
from palestra.populations.workers.action_reader import LMActionReader
from palestra.runs.seats import resolve_seats
from palestra.text.build.build import make_episode_runner, seat_policies, with_split
from palestra.text.build.engines import Engines
from palestra.text.build.policy_resolver import make_policy
from palestra.text.config import TextConfig
from palestra.text.policies.base import Policy, Query
from palestra.text.policies.endpoint import EndpointConfig, EndpointPolicy
from palestra.text.policies.scripted import AskPerson, ExpertPolicy, HumanPolicy, RandomPolicy, ask_at_terminal
from palestra.text.policy_configs import FrozenConfig
from palestra.text.rollouts.metrics import episode_metrics, instance_outcomes, seat_returns
from palestra.text.rollouts.sample_metrics import sample_metrics
from palestra.text.rollouts.tree_rollout import Branching, EpisodeRunner, EpisodeSpec
from palestra.text.training.trainer import play_instances

BUILTIN_POLICIES: dict[str, Callable[[], Policy]] = {
    "expert": ExpertPolicy,
    "random": RandomPolicy,
    "human": HumanPolicy,
}
ActFor = Callable[[Seat, Policy, Query], Awaitable[list[Answer]]]  # lets a policy answer
OTHER_NAMES = "base, expert, random, human, RUN:NAME, URL#MODEL, or a base: tiny, smollm2, OWNER/NAME, ./model.gguf"


class TextEvalSetup(NamedTuple):
    """An episode runner and its seat assignment: `policy_names` maps seats to policy names; `load_policy` returns a
    policy by name (the policy "base" by the seat that it plays, too) and loads each only once. `env_config` is the
    config of the env. Each instance is played `samples` times."""

    runner: EpisodeRunner
    policy_names: dict[Seat, str]
    load_policy: Callable[..., Policy]
    env_config: dict[str, Any]
    samples: int = 1

    @property
    def policies(self) -> dict[Seat, Policy]:
        """The policy at each seat; loads those not yet loaded."""
        return self.policies_of(self.policy_names)

    def policies_of(self, names: Mapping[Seat, str]) -> dict[Seat, Policy]:
        """Returns the policy at each seat by the names in `names`."""
        return {seat: self.load_policy(name, *_seat_of_base(name, seat)) for seat, name in names.items()}

    def play(
        self, assignments: Sequence[Mapping[Seat, str]], episodes: int, seed: int, on_progress: OnProgress
    ) -> list[EvalResult]:
        """Plays instances 0 to `episodes` - 1 with each assignment; returns one result of each."""
        return asyncio.run(self.play_assignments(assignments, episodes, seed, on_progress))

    async def play_assignments(
        self, assignments: Sequence[Mapping[Seat, str]], episodes: int, seed: int, on_progress: OnProgress
    ) -> list[EvalResult]:
        """As `play`, in the caller's event loop: remote samplers must be used from a single one."""
        played = count(1)

        def on_episode(_: Episode) -> None:
            on_progress(next(played), len(assignments) * episodes * self.samples)

        return [await self._play(names, episodes, seed, on_episode) for names in assignments]

    async def _play(
        self, names: Mapping[Seat, str], episodes: int, seed: int, on_episode: Callable[[Episode], None]
    ) -> EvalResult:
        policies = self.policies_of(names)
        numbers = range(episodes * self.samples)
        played = await play_instances(self.runner, policies, numbers, seed, on_episode, samples=self.samples)
        metrics = {
            **episode_metrics(played),
            **seat_returns(played),
            **sample_metrics(played, self.samples),
            **instance_outcomes(played[:: self.samples]),
            **nash_conv_metrics(self.env_config, partial(table_of_seats, self.env_config, policies)),
        }
        return EvalResult({seat: policy.name for seat, policy in policies.items()}, metrics, played)


def open_text_eval(
    target: Target,
    env: Mapping[str, Any],
    seats: Mapping[str, str],
    *,
    split: Split = "test",
    sampling: Mapping[str, Any] | None = None,
    in_process: bool = False,
    samples: int = 1,
) -> TextEvalSetup:
    """Returns an evaluation setup in the target's env, on instances of `split` unless `env` names another. See
    `evaluate` for the arguments and errors."""
    config = validate(TextConfig, target.tree)
    changes = dict(env)
    changed = with_split(config.env_config(changes.pop("base_env", None)), split) | changes
    env_seats = make_env(**changed).seats
    trained = {key: name for key, name in config.seats.items() if matching_names(env_seats, key) or not config.envs}
    named = seat_policies(config.model_copy(update={"env": changed, "envs": {}, "seats": trained}))
    names = assign_seats(named, target, seats, changed["type"])
    sampler = None if in_process else config.sampler
    engines = Engines(config.device, config.max_num_seqs, sampler, kv_cache_gib=config.kv_cache_gib)
    load = partial(load_policy, target=target, engines=engines, sampling=sampling or {})
    runner = make_episode_runner(changed, split, config.max_joint_steps)
    return TextEvalSetup(runner, names, cache(load), changed, samples)


def table_of_seats(env_config: Mapping[str, Any], policies: Mapping[Seat, Policy], game: GameTree) -> np.ndarray:
    """Returns the action probabilities [I, A] of a text game's policies. Raises ValueError without them."""
    env = make_env(**env_config)
    assert isinstance(env, TextGame)
    reader = LMActionReader(env, game)
    # Not by name: policies of two runs, and "base" at two seats, may share one.
    tables = {id(policy): reader.read(policy) for policy in policies.values()}
    table = np.zeros(game.action_mask.shape)
    for player, seat in enumerate(env.seats):
        rows = game.player_rows(player)
        table[rows] = tables[id(policies[seat])][rows]
    return table


def _seat_of_base(name: str, seat: Seat) -> tuple[Seat, ...]:
    """Returns the seat if the policy depends on it: "base" and "RUN:base" do. Others are loaded once for all seats."""
    return (seat,) if name.rpartition(":")[2] == "base" else ()


def load_policy(name: str, seat: Seat = "", *, target: Target, engines: Engines, sampling: Mapping[str, Any]) -> Policy:
    """Returns a policy by name: one of the target's, "base" (the untrained base of the policy at `seat`, with its
    sampling and prompt; of the first language model if there is none), "RUN:NAME" of another run, "expert", "random",
    "human", an endpoint as URL#MODEL (its key is read from OPENAI_API_KEY), or any base by its name or path, with
    default settings. Raises ValueError for an unknown name."""
    if name.startswith(("http://", "https://")):
        url, _, model = name.partition("#")
        key_env = "OPENAI_API_KEY" if "OPENAI_API_KEY" in os.environ else None
        asked = {key: sampling[key] for key in ("temperature", "top_p", "max_tokens") if key in sampling}
        return EndpointPolicy(model, EndpointConfig(url=url, model=model, key_env=key_env, **asked))
    target, name = target.find_policy(name)
    config = _config_of(target)
    if name in BUILTIN_POLICIES and name not in config.policies:
        return BUILTIN_POLICIES[name]()
    if name == "base" and (base := _language_model(config, seat)):
        return engines.build_frozen_policy("base", _frozen_config(base, None, sampling))
    if name not in config.policies and looks_like_base(name):
        return engines.build_frozen_policy(name, _frozen_config(FrozenConfig(base=name), None, sampling))
    if name not in config.policies:
        target.refuse_policy(name, OTHER_NAMES)
    chosen = config.policies[name]
    if folder := target.weights(name):
        version = read_json(folder / "member.json", dict)["version"]
        return engines.build_frozen_policy(f"{name}@{version}", _frozen_config(chosen, folder, sampling))
    if hasattr(chosen, "base"):  # a policy that was not trained here: frozen, or at its start
        return engines.build_frozen_policy(name, _frozen_config(chosen, getattr(chosen, "path", None), sampling))
    return make_policy(name, chosen, engines)


def _config_of(target: Target) -> TextConfig:
    """Returns the target's config, with the policies of the stage that its checkpoint ends in."""
    config = validate(TextConfig, target.tree)
    if not config.stages or not target.checkpoint:
        return config
    return config.model_copy(update={"policies": config.policies_at(target.checkpoint.step)})


def _language_model(config: TextConfig, seat: Seat) -> Any:
    """Returns the config of the policy at `seat` if it is a language model, else of the first one; None without any."""
    seats = {key: name for key, name in config.seats.items() if fnmatchcase(seat, key)}
    with contextlib.suppress(ValueError):  # no policy at that seat
        at_seat = config.policies[resolve_seats([seat], list(config.policies), "", seats)[seat]]
        if hasattr(at_seat, "base"):
            return at_seat
    return next((policy for policy in config.policies.values() if hasattr(policy, "base")), None)


def _frozen_config(config: Any, path: str | Path | None, sampling: Mapping[str, Any]) -> FrozenConfig:
    """Returns the settings of `config` for a policy that is not trained."""
    plain = config.sampling.model_dump() | {"keep_sampling_mask": False}  # masks are for training
    return FrozenConfig.of(config, path, validate(SamplingConfig, {**plain, **sampling}))


# ---- a person at a seat


def human_eval_setup(
    what: str | Path,
    env: Mapping[str, Any],
    seats: Mapping[str, str],
    human_seat: Seat | None,
    *,
    sampling: Mapping[str, Any],
    checkpoint: int | None,
) -> tuple[TextEvalSetup, Seat]:
    """Returns a setup with a person at seat `human_seat` (None: the first that `seats` gives to nobody), and that seat.
    Raises ValueError if there is no such seat, or `seats` gives it to another policy."""
    setup = open_text_eval(find_target(what, env, checkpoint), env, seats, sampling=sampling, in_process=True)
    taken = {seat for seat, policy in seats.items() if policy != "human"}
    human_seat = human_seat or next((seat for seat in setup.policy_names if seat not in taken), None)
    if human_seat is None:
        raise ValueError("--seats gives every seat to a policy: leave one for you, or look on with --watch")
    if human_seat not in setup.policy_names:
        raise ValueError(f'no seat "{human_seat}": this env plays {", ".join(setup.policy_names)}')
    if human_seat in taken:
        raise ValueError(f"--seats gives your seat, {human_seat}, to {seats[human_seat]}: leave it out")
    return setup._replace(policy_names=setup.policy_names | {human_seat: "human"}), human_seat


async def play_episode(setup: TextEvalSetup, human_seat: Seat, seed: int, ask: AskPerson = ask_at_terminal) -> Episode:
    """Plays one episode of instance `seed`; `ask` gets the person's answers at seat `human_seat`."""
    policies = setup.policies | {human_seat: HumanPolicy(ask)}
    return await setup.runner.play(EpisodeSpec(seed, policies, derive_seed(seed, "play")), Branching())


async def watch_episode(setup: TextEvalSetup, seed: int, act: ActFor) -> Episode:
    """Plays one episode of instance `seed` in which `act` lets each policy answer."""
    policies = {seat: _Watched(seat, policy, act) for seat, policy in setup.policies.items()}
    return await setup.runner.play(EpisodeSpec(seed, policies, derive_seed(seed, "play")), Branching())


class _Watched:
    """A policy at a seat that `act` lets answer."""

    def __init__(self, seat: Seat, policy: Policy, act: ActFor) -> None:
        self.name = policy.name
        self._act = partial(act, seat, policy)

    async def act(self, query: Query) -> list[Answer]:
        return await self._act(query)


def check_humans(setup: TextEvalSetup, human_seat: Seat) -> dict[Seat, str]:
    """Loads all policies and returns their names by seat. Raises ValueError if a person plays any seat but
    `human_seat`, which is "" for a game that a person watches."""
    policies = setup.policies
    people = [seat for seat, policy in policies.items() if isinstance(policy, HumanPolicy) and seat != human_seat]
    if people and not human_seat:
        raise ValueError(f"--watch shows policies: give seat {people[0]} one, or leave out --watch to play it")
    if people:
        raise ValueError(
            f"one person can play at the page, at seat {human_seat}: give seat {people[0]} another policy with --seats"
        )
    return {seat: policy.name for seat, policy in policies.items()}
