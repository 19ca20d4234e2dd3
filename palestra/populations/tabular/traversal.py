"""Enumeration of a game: first its distinct states, with one call of the rules each, then all paths to them.

There are far fewer states than paths (tic-tac-toe: 5,478 boards, 549,946 histories), and only the calls of the rules
run in Python; the paths are expanded with array operations, all nodes of one depth at once.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np

from palestra.envs.rules.base import CHANCE, TERMINAL, Rules


class GameStates(NamedTuple):
    """The distinct states of a game; the edges of state s are `first_edge[s]` to `first_edge[s + 1] - 1`."""

    name: str
    current_player: np.ndarray  # [N]
    info_state: np.ndarray  # [N] row in `info_state_tensors` of the player to move, -1 if no player moves
    returns: np.ndarray  # [N, n] 0 unless the state is terminal
    first_edge: np.ndarray  # [N + 1]
    child: np.ndarray  # [E]
    action: np.ndarray  # [E]
    probability: np.ndarray  # [E] chance's probability, 1 for a player's action
    info_state_tensors: np.ndarray  # [W, V] of the distinct observations, separate for each player
    info_state_texts: list[str]  # [W]
    action_mask: np.ndarray  # [W, A]
    has_ambiguous_tensors: bool  # two observations of a player have the same tensor


class NodeLevel(NamedTuple):
    """The nodes of one depth."""

    state: np.ndarray  # [M]
    last_sequences: np.ndarray  # [M, n] each player's last sequence
    chance_probs: np.ndarray  # [M]


def enumerate_states(rules: Rules[Any], max_states: int) -> GameStates:
    """Enumerates all reachable states. Raises ValueError if there are more than `max_states`."""
    states = [rules.initial_state()]
    numbers = {states[0]: 0}
    turns = []
    returns = []
    first = [0]
    child: list[int] = []
    action: list[int] = []
    likely: list[float] = []
    views = _TensorNumbering(rules)
    for state in states:
        turn = rules.current_player(state)
        turns.append(turn)
        returns.append(rules.returns(state) if turn == TERMINAL else (0.0,) * rules.num_players)
        for move, chance in _moves(rules, state, turn, views):
            after = rules.next_state(state, move)
            number = numbers.setdefault(after, len(states))
            if number == len(states):
                states.append(after)
            child.append(number)
            action.append(move)
            likely.append(chance)
        first.append(len(child))
        if len(states) > max_states:
            raise GameTooLarge(rules.name, max_states)
    return GameStates(
        rules.name,
        np.array(turns),
        np.array(views.seen),
        np.array(returns),
        np.array(first),
        np.array(child, np.int64),
        np.array(action, np.int64),
        np.array(likely),
        *views.tables(),
    )


class GameTooLarge(ValueError):
    """A game with more than `max_nodes` nodes; `reason` is the message without its advice, which is for populations."""

    def __init__(self, name: str, max_nodes: int) -> None:
        self.reason = f"{name} has more than {max_nodes:,} nodes, too many for exact values"
        super().__init__(
            f"{self.reason}: choose a smaller variant, or learned responses without NashConv (oracle: {{type: net}} "
            "and population.nash_conv_every: 0)"
        )


class _TensorNumbering:
    """Numbers the distinct observations of players to move, in order of discovery."""

    def __init__(self, rules: Rules[Any]) -> None:
        self.rules = rules
        self.numbers: dict[tuple[int, Hashable], int] = {}
        self.tensors: set[tuple[int, bytes]] = set()
        self.views: list[np.ndarray] = []
        self.words: list[str] = []
        self.legal: list[list[int]] = []
        self.seen: list[int] = []  # by state

    def see(self, state: Any, player: int) -> list[int]:
        """Records the observation of the player to move; returns its legal actions. Raises ValueError if another state
        with this observation has other legal actions."""
        legal = self.rules.legal_actions(state)
        number = self.numbers.setdefault((player, self.rules.info_state_key(state, player)), len(self.views))
        if number == len(self.views):
            view = self.rules.info_state(state, player)
            self.tensors.add((player, view.tobytes()))
            self.views.append(view)
            self.words.append(self.rules.info_state_text(state, player))
            self.legal.append(legal)
        elif self.legal[number] != legal:
            raise ValueError(
                f'{self.rules.name}: player {player} cannot tell what is legal: "{self.words[number]}" is observed '
                f"with actions {self.legal[number]} and with {legal}; add what decides this to the observation"
            )
        self.seen.append(number)
        return legal

    def tables(self) -> tuple[np.ndarray, list[str], np.ndarray, bool]:
        legal = np.zeros((len(self.views), len(self.rules.action_names)), bool)
        for row, actions in zip(legal, self.legal, strict=True):
            row[actions] = True
        return np.array(self.views, np.float32), self.words, legal, len(self.tensors) < len(self.views)


def _moves(rules: Rules[Any], state: Any, turn: int, views: _TensorNumbering) -> list[tuple[int, float]]:
    if turn >= 0:
        return [(move, 1.0) for move in views.see(state, turn)]
    views.seen.append(-1)
    return rules.chance_outcomes(state) if turn == CHANCE else []


def traverse(
    states: GameStates, num_players: int, num_actions: int, max_nodes: int
) -> tuple[InfoStateNumbering, NodeLevel, int]:
    """Expands all paths through the game; returns the information states, the ends, and the number of
    nodes.

    Paths to one state that no player can distinguish are merged into one node. Raises ValueError if
    there are more than `max_nodes` nodes.
    """
    info_states = InfoStateNumbering(num_players, num_actions)
    level = NodeLevel(np.zeros(1, np.int64), np.arange(num_players)[None], np.ones(1))
    ends: list[NodeLevel] = []
    nodes = 0
    while len(level.state):
        nodes += len(level.state)
        if nodes > max_nodes:
            raise GameTooLarge(states.name, max_nodes)
        over = states.current_player[level.state] == TERMINAL
        ends.append(NodeLevel(*(column[over] for column in level)))
        level = _next(states, NodeLevel(*(column[~over] for column in level)), info_states)
    return info_states, NodeLevel(*map(np.concatenate, zip(*ends, strict=True))), nodes


class InfoStateNumbering:
    """Numbers information states (observation and own past), in order of discovery."""

    def __init__(self, n: int, width: int) -> None:
        self.n = n
        self.width = width
        self.numbers: dict[tuple[int, int], int] = {}
        self.owner: list[int] = []
        self.depth: list[int] = []  # number of the player's earlier decisions
        self.parent: list[int] = []  # the player's last sequence
        self.seen: list[int] = []  # row in `GameStates.info_state_tensors`

    def number(self, owner: int, parent: int, seen: int) -> int:
        number = self.numbers.setdefault((parent, seen), len(self.owner))
        if number == len(self.owner):
            self.owner.append(owner)
            self.parent.append(parent)
            self.seen.append(seen)
            self.depth.append(0 if parent < self.n else self.depth[(parent - self.n) // self.width] + 1)
        return number


def _next(states: GameStates, level: NodeLevel, info_states: InfoStateNumbering) -> NodeLevel:
    """Returns the child nodes of one depth."""
    count = states.first_edge[level.state + 1] - states.first_edge[level.state]
    of = np.repeat(np.arange(len(count)), count)
    edge = np.arange(len(of)) + np.repeat(states.first_edge[level.state] - (np.cumsum(count) - count), count)
    turn = states.current_player[level.state]
    last = level.last_sequences[of]
    moved = turn[of] >= 0
    sequences = info_states.n + _information_states(states, level, info_states) * info_states.width
    last[moved, turn[of][moved]] = sequences[of][moved] + states.action[edge][moved]
    after = NodeLevel(states.child[edge], last, level.chance_probs[of] * states.probability[edge])
    return after if moved.all() else _merge_nodes(after)


def _information_states(states: GameStates, level: NodeLevel, info_states: InfoStateNumbering) -> np.ndarray:
    """Returns the information state of each node, int64 [M]; 0 at chance nodes."""
    turn = states.current_player[level.state]
    seen = states.info_state[level.state]
    numbers = np.zeros(len(turn), np.int64)
    at = np.flatnonzero(turn >= 0)
    parent = level.last_sequences[at, turn[at]]
    keys = parent * len(states.info_state_tensors) + seen[at]
    _, example, inverse = np.unique(keys, return_index=True, return_inverse=True)
    rows = zip(turn[at][example].tolist(), parent[example].tolist(), seen[at][example].tolist(), strict=True)
    numbers[at] = np.array([info_states.number(*row) for row in rows], np.int64)[inverse]
    return numbers


def _merge_nodes(level: NodeLevel) -> NodeLevel:
    """Merges nodes with the same state and the same own past of every player."""
    keys = np.column_stack([level.state, level.last_sequences])
    unique, inverse = np.unique(keys, axis=0, return_inverse=True)
    return NodeLevel(unique[:, 0], unique[:, 1:], np.bincount(inverse.ravel(), level.chance_probs, len(unique)))
