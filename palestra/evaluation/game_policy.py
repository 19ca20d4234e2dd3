"""Policies of games small enough to enumerate, as tables by information state. They have an exact NashConv, are saved
as JSON, and convert to a policy of OpenSpiel.

Shapes: `I` information states, `A` actions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from palestra.core.config import load, validate
from palestra.core.files import atomic_write, read_json
from palestra.core.types import Seat
from palestra.envs import VectorEnv
from palestra.envs.rules_by_env import may_have_rules
from palestra.evaluation.final_strategies import final_mixtures
from palestra.evaluation.report.population_data import read_record
from palestra.evaluation.target import Target, assign_seats, find_target, load_target
from palestra.populations.build.build import sides_of_run
from palestra.populations.build.validation import validate_population
from palestra.populations.population import Mix, Player
from palestra.populations.tabular.best_response import nash_conv
from palestra.populations.tabular.game_tree import MAX_NODES, GameTree, uniform_policy
from palestra.populations.tabular.traversal import GameTooLarge
from palestra.populations.workers.exact import ExactSolver
from palestra.populations.workers.member_loader import MemberLoader, no_rules_message, tree_of_env
from palestra.vector.build.build import member_folder, policy_by_seat
from palestra.vector.build.envs import make_vector_env
from palestra.vector.config import (
    FrozenNetConfig,
    RandomActionsConfig,
    ScriptConfig,
    TrainedNetConfig,
    VectorConfig,
    VectorPolicyConfig,
)

MAX_NODES_OF_EVAL = 600_000  # largest game tree whose NashConv every evaluation computes (takes about 15 s)
OTHER_NAMES = "random, script:NAME or RUN:NAME"  # of policies beside those of a run
InfoStatePolicy = dict[str, dict[int, float]]  # information state -> legal action -> probability


@dataclass(frozen=True)
class GamePolicy:
    """A policy of every player of a game, by information state.

    `players[n]` maps each information state of player n, as text (in OpenSpiel's games of imperfect information the
    information state string), to the probabilities of the legal actions, by action number. `env` is the config of the
    game, `nash_conv` the policy's NashConv in it. `mixtures` has the members of the population that the policy was
    computed from, with their probabilities, by player; {} for other runs.
    """

    env: dict[str, Any]
    action_names: tuple[str, ...]
    players: tuple[InfoStatePolicy, ...]
    nash_conv: float
    mixtures: dict[Player, Mix] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Writes the policy to a JSON file."""
        tree = {"env": self.env, "nash_conv": self.nash_conv, "mixtures": self.mixtures}
        tree |= {"action_names": self.action_names, "players": self.players}
        atomic_write(path, json.dumps(tree, indent=1).encode())

    @classmethod
    def load(cls, path: str | Path) -> GamePolicy:
        """Reads what `save` wrote."""
        return TypeAdapter(cls).validate_python(read_json(Path(path), dict))

    def to_openspiel(self) -> Any:
        """Returns the policy as OpenSpiel's. Raises ValueError unless the game is one of OpenSpiel's."""
        if self.env["type"] != "openspiel":
            raise ValueError(
                f'env "{self.env["type"]}" is not a game of OpenSpiel, so its information states have other names: '
                "train with env: {type: openspiel, game: NAME}"
            )
        from palestra.envs.adapters.openspiel import OpenSpielRules, TablePolicy

        options = {name: self.env[name] for name in ("game", "view") if name in self.env}
        return TablePolicy(OpenSpielRules(**options), self.players)


def export_game_policy(
    what: str | Path, *, member: str | None = None, checkpoint: int | None = None, greedy: bool = False
) -> GamePolicy:
    """Returns the policies of a run's seats as tables; for a population, the behaviour policy of its final strategies
    (`final_mixtures`).
    With `member` the policy of this name plays every seat.

    Raises ValueError if the game cannot be enumerated or a policy is not a function of the information state (recurrent
    networks, scripts).
    """
    run = Path(what)
    if run.exists() and "population" in load_target(run):
        if checkpoint is not None:
            raise ValueError(f"{run} trains a population: name a member with --member, and leave out --checkpoint")
        return _export_population(run, member, greedy)
    name = str(what)
    if member:
        name += f":{member}"
    target = find_target(name, step=checkpoint)
    if not target.is_vector:
        raise ValueError(f"{what} trains language agents: `palestra publish` exports their weights")
    config = validate(VectorConfig, target.tree)
    game = enumerate_game(config.env)
    env = make_vector_env(config.env, 1)
    try:
        names = assign_seats(policy_by_seat(config, env), target, {}, env.name)
        policy = policy_table(target, env, game, names, greedy)
    finally:
        env.close()
    return as_game_policy(config.env, game, policy)


def _export_population(run: Path, member: str | None, greedy: bool) -> GamePolicy:
    config = validate_population(load(run / "config.yaml"))
    sides = sides_of_run(config)
    record = read_record(run, sides.owners)
    game = enumerate_game(config.env)
    if member:
        if member not in [one.name for one in record.members]:
            raise ValueError(f'{run} has no member "{member}": `palestra league standings {run}` lists them')
        mixtures = {player: {member: 1.0} for player in record.payoffs.members}
    else:
        mixtures = final_mixtures(record, config.population)
    files = record.folders(chain.from_iterable(mixtures.values()))
    loader = MemberLoader(
        make_vector_env(config.env, 1), game, greedy=greedy or getattr(config.oracle, "greedy", False)
    )
    try:
        policy_of = partial(loader.policy, members=files)
        policy = ExactSolver(game, sides).mixture_policy(mixtures, policy_of)
    finally:
        loader.env.close()
    return replace(as_game_policy(config.env, game, policy), mixtures=mixtures)


def enumerate_game(env: Mapping[str, Any], max_nodes: int = MAX_NODES) -> GameTree:
    """Returns the game tree of an env's config. Raises ValueError without rules, or beyond `max_nodes`."""
    game = tree_of_env(_game_options(env), max_nodes)
    if game is None:
        raise ValueError(f"{no_rules_message(env)}, so its information states cannot be listed")
    return game


def _game_options(env: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of an env that concern the game itself."""
    return {key: value for key, value in env.items() if key not in ("num_envs", "num_processes")}


def policy_table(target: Target, env: VectorEnv, game: GameTree, names: Mapping[Seat, str], greedy: bool) -> np.ndarray:
    """Returns the action probabilities [I, A] of the policies `names` at their seats; see `evaluate` for the names.

    Raises ValueError for a policy that is not a function of the information state.
    """
    policy = np.zeros(game.action_mask.shape)
    for player, seat in enumerate(env.seats):
        name = names[seat]
        rows = game.player_rows(player)
        match find_fixed_policy(target, name, greedy=greedy):
            case FrozenNetConfig() as frozen:
                loader = MemberLoader(env, game, greedy=greedy or frozen.greedy)
                policy[rows] = loader.policy(name, {name: member_folder(frozen.path)})[rows]
            case RandomActionsConfig():
                policy[rows] = uniform_policy(game)[rows]
            case _:
                raise ValueError(f'policy "{name}" has no weights, so its action probabilities cannot be listed')
    return policy


def find_fixed_policy(target: Target, name: str, *, greedy: bool) -> VectorPolicyConfig:
    """Returns a policy by name as one that is not trained: a policy of the target, "random", "script:NAME", or
    "RUN:NAME" of another run; with `greedy`, trained ones take their most probable action. Raises ValueError for an
    unknown name."""
    if name == "random":
        return RandomActionsConfig()
    if name.startswith("script:"):
        return ScriptConfig(script=name.removeprefix("script:"))
    target, member = target.find_policy(name)
    if folder := target.weights(member):
        return FrozenNetConfig(path=str(folder.resolve()), greedy=greedy)
    policy = validate(VectorConfig, target.tree).policies.get(member)
    if policy is None or isinstance(policy, TrainedNetConfig):
        target.refuse_policy(member, OTHER_NAMES)
    return policy


def as_game_policy(env: Mapping[str, Any], game: GameTree, policy: np.ndarray) -> GamePolicy:
    """Returns a policy [I, A] as a `GamePolicy`, by the texts of the information states. Raises ValueError if it
    differs between two states with the same text, which differ in the player's own past actions or in something that
    only their tensors show."""
    players: list[InfoStatePolicy] = [{} for _ in range(game.num_players)]
    first: dict[tuple[int, str], int] = {}  # the first information state of each text
    rows = zip(game.state_player.tolist(), game.info_state_texts, game.action_mask, policy, strict=True)
    for number, (player, text, legal, probabilities) in enumerate(rows):
        row = {int(action): float(probabilities[action]) for action in np.flatnonzero(legal)}
        known = players[player].setdefault(text, row)
        one = first.setdefault((player, text), number)
        if known is not row and not np.allclose(list(known.values()), list(row.values()), atol=1e-12):
            if not np.array_equal(game.info_state_tensors[one], game.info_state_tensors[number]):
                raise ValueError(
                    f"in {game.name} two states of player {player} have one text, though their tensors and the "
                    f"policy's probabilities differ, so a table by text cannot hold the policy: {text!r}"
                )
            raise ValueError(
                f"in {game.name} the policy depends on the player's own past actions, which its observations do not "
                "show, so a mixture of several members has no table: export a single member with --member"
            )
    return GamePolicy(_game_options(env), game.action_names, tuple(players), nash_conv(game, policy))


def nash_conv_metrics(env_config: Mapping[str, Any], policy_of: Callable[[GameTree], np.ndarray]) -> dict[str, Any]:
    """Returns `nash_conv`, the NashConv of the policy [I, A] that `policy_of` returns for the game's tree. If the game
    cannot be enumerated within `MAX_NODES_OF_EVAL`, or the policy is not a function of the information state, returns
    the reason as `no_nash_conv`; for an env that never has rules, such as a cooperative task, returns {}."""
    if not may_have_rules(str(env_config["type"])):
        return {}
    try:
        game = enumerate_game(env_config, MAX_NODES_OF_EVAL)
        return {"nash_conv": nash_conv(game, policy_of(game))}
    except GameTooLarge as error:
        return {"no_nash_conv": error.reason}
    except (ValueError, RuntimeError) as error:  # OpenSpiel raises RuntimeError for what a game does not implement
        return {"no_nash_conv": str(error)}
