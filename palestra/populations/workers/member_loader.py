"""Loads a population's members: networks, tables, and the uniform policy, which has no files.

Shapes: `I` information states, `A` actions, `U` distinct observations, `V` numbers in an observation.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch.nn.functional import one_hot

from palestra.core.files import read_arrays, write_arrays
from palestra.envs import rules_by_env as rules
from palestra.envs.rules.base import Rules
from palestra.envs.vector_base import VectorEnv
from palestra.populations.tabular.game_tree import MAX_NODES, GameTree, build_game_tree, uniform_policy
from palestra.vector.learners.policy_stack import read_frozen_member
from palestra.vector.policies.frozen import FrozenMember, InfoStateIndex, NetMember, TableMember, UniformMember

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
UNIFORM_MEMBER = "uniform"  # the member without files
TABLE_FILE = "table.safetensors"
MAX_MEMBERS = 256  # members in memory, the last used; a league keeps adding members and rarely plays old ones


def rules_of_env(env: Mapping[str, Any]) -> Rules[Any] | None:
    """Returns the rules of the game that an env's config names, or None if it has none."""
    return rules.rules_for_env(**_rules_options(env))


def no_rules_message(env: Mapping[str, Any]) -> str:
    """Returns the first part of an error message about an env without rules, with the reason if it is known."""
    why = rules.why_no_rules(**_rules_options(env))
    return f'env "{env.get("type")}" has no rules here{f" ({why})" if why else ""}'


@lru_cache(maxsize=1)
def _tree_of_json(env: str, max_nodes: int) -> GameTree | None:
    rules_found = rules_of_env(json.loads(env))
    return None if rules_found is None else build_game_tree(rules_found, max_nodes=max_nodes)


def tree_of_env(env: Mapping[str, Any], max_nodes: int = MAX_NODES) -> GameTree | None:
    """Returns the game tree of an env's config, or None if the env has no rules; the last tree is cached. Raises
    ValueError if the game has more than `max_nodes` nodes."""
    return _tree_of_json(json.dumps(env, sort_keys=True, default=str), max_nodes)


def _rules_options(env: Mapping[str, Any]) -> dict[str, Any]:
    return {"env_type": str(env["type"])} | {name: value for name, value in env.items() if name != "type"}


def write_table(folder: Path, policy: np.ndarray) -> None:
    """Writes a member whose policy is a table, float64 [I, A] over the game's information states."""
    write_arrays(folder / TABLE_FILE, {"policy": np.asarray(policy, np.float64)})


class MemberLoader:
    """Loads members of one game and caches those used last; a name stands for one policy.

    Given a `tree`, a network is evaluated once for all information states and plays from that table, because a lookup
    takes less time than a forward pass (`tables=False` turns this off), unless states with equal observations differ in
    their legal actions. With `greedy`, networks play their most likely actions.
    """

    def __init__(
        self, env: VectorEnv, tree: GameTree | None = None, *, greedy: bool = False, tables: bool = True
    ) -> None:
        self.env = env
        self.tree = tree
        self.greedy = greedy
        self.tables = tables and tree is not None
        self._members: OrderedDict[tuple[str, tuple[int, ...]], FrozenMember] = OrderedDict()
        self._policies: OrderedDict[str, np.ndarray] = OrderedDict()
        self._seen_by: dict[tuple[int, ...], tuple[InfoStateIndex, np.ndarray, np.ndarray, np.ndarray]] = {}

    def member(self, name: str, members: Mapping[str, Path], seats: Sequence[int]) -> FrozenMember:
        """Returns a member as it plays at any of `seats`, which have equal observations and actions."""
        key = (name, tuple(seats))
        return _get_or_make(self._members, key, lambda: self._read(name, members, key[1]))

    def _read(self, name: str, members: Mapping[str, Path], seats: tuple[int, ...]) -> FrozenMember:
        folder = members.get(name)
        if name == UNIFORM_MEMBER and folder is None:
            table = self._table(self.policy(name, members), seats) if self.tables else None
            return table or UniformMember()
        if (_folder(name, members) / TABLE_FILE).exists():
            if table := self._table(self.policy(name, members), seats):
                return table
            raise ValueError(
                f"member {name} plays differently at equal observations in {self._tree.name} (which do not show the "
                "past), so it cannot play from observations"
            )
        net = read_frozen_member(_folder(name, members), self.env, seats[:1], best=self.greedy)[0]
        if not self.tables or net.net.recurrent_units:
            return net
        policy = _get_or_make(self._policies, name, lambda: action_probabilities(net, self._tree))
        return self._table(policy, seats) or net

    def _table(self, policy: np.ndarray, seats: tuple[int, ...]) -> TableMember | None:
        """Returns a policy [I, A] as a table over observations; None if it differs where these are equal."""
        observations, states, first, same = self._observation_index(seats)
        rows = policy[states]
        return TableMember(observations, rows[first]) if np.allclose(rows[first][same], rows) else None

    def _observation_index(self, seats: tuple[int, ...]) -> tuple[InfoStateIndex, np.ndarray, np.ndarray, np.ndarray]:
        """Returns the index of the distinct observations of `seats`, the seats' information states, the position of one
        state for each observation [U], and the observation's number for each state."""
        if seats not in self._seen_by:
            tree = self._tree
            states = np.concatenate([np.arange(len(tree.state_player))[tree.player_rows(seat)] for seat in seats])
            _, first, same = np.unique(tree.info_state_tensors[states], axis=0, return_index=True, return_inverse=True)
            self._seen_by[seats] = InfoStateIndex(tree.info_state_tensors[states[first]]), states, first, same
        return self._seen_by[seats]

    # ---- by information state

    @property
    def _tree(self) -> GameTree:
        if self.tree is None:
            raise ValueError(
                f'env "{self.env.name}" has no rules here, or too many states to enumerate, so exact values and tables '
                "are not available"
            )
        return self.tree

    def policy(self, name: str, members: Mapping[str, Path]) -> np.ndarray:
        """Returns a member's action probabilities [I, A] at every information state.

        Raises ValueError for a game without rules, and for a recurrent network.
        """
        return _get_or_make(self._policies, name, lambda: self._read_policy(name, members))

    def _read_policy(self, name: str, members: Mapping[str, Path]) -> np.ndarray:
        if name == UNIFORM_MEMBER and name not in members:
            return uniform_policy(self._tree)
        folder = _folder(name, members)
        if (folder / TABLE_FILE).exists():
            return read_arrays(folder / TABLE_FILE)["policy"]
        tree = self._tree
        member, _ = read_frozen_member(folder, self.env, [0], best=self.greedy)
        if member.net.recurrent_units:
            raise ValueError(f"member {name} is recurrent, so its play is not a table over information states")
        return action_probabilities(member, tree)


@torch.no_grad()
def action_probabilities(member: NetMember, tree: GameTree) -> np.ndarray:
    """Returns the action probabilities, float64 [I, A], of a feed-forward network at every information state."""
    observations = torch.from_numpy(tree.info_state_tensors)
    legal = torch.from_numpy(tree.action_mask)
    if member.seat_mapping.seat_id:
        observations = torch.cat(
            [observations, torch.eye(tree.num_players)[torch.from_numpy(tree.state_player).long()]], -1
        )
    x = observations[None] if member.norm is None else member.norm.normalise(observations[None])
    out = member.net(x)[0]
    if member.greedy:
        table = one_hot(member.head.mode(out, legal), tree.action_mask.shape[1]).double()
    else:
        each = torch.arange(tree.action_mask.shape[1])[:, None].expand(-1, len(out))
        table = (
            torch.stack([member.head.evaluate_actions(out, action, legal)[0].exp() for action in each], 1).double()
            * legal
        )
    return (table / table.sum(1, keepdim=True)).numpy()


def _get_or_make(cache: OrderedDict[K, V], key: K, make: Callable[[], V]) -> V:
    """Returns `kept[key]`, which `make` creates if it is missing; drops the entries used longest ago."""
    if key not in cache:
        cache[key] = make()
        while len(cache) > MAX_MEMBERS:
            cache.popitem(last=False)
    cache.move_to_end(key)
    return cache[key]


def _folder(name: str, members: Mapping[str, Path]) -> Path:
    if name not in members:
        raise ValueError(f'the task does not bring the files of member "{name}": add it to Task.members')
    return members[name]
