"""The games of the arena, and its reference players.

A reference player sees the state of the game, not its text, and needs no file: it follows a simple rule, searches, or
plays a strategy that is solved for when it is first asked. From equal seeds it plays equal moves on any machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from palestra.core.seeding import derive_seed
from palestra.envs import make_env
from palestra.envs.rules.base import Rules
from palestra.envs.rules.connect_four import line_heuristic
from palestra.envs.text.board_games import TextGame, best_actions
from palestra.populations.tabular.best_response import best_response
from palestra.populations.tabular.cfr import CFRSolver
from palestra.populations.tabular.game_tree import GameTree, build_game_tree, uniform_policy

Player = Callable[[Rules[Any], Any, random.Random], int]  # returns the action of the player to move in a state

CFR_ITERATIONS = 200  # the average of CFR+ is then within 0.01 of an equilibrium in all games here
ODDS = 100.0  # largest odds between two moves of an uneven player


@dataclass(frozen=True)
class ArenaGame:
    """A game of the arena for two."""

    env: Mapping[str, Any]
    """The text env: its type and the options that make the game."""
    lowest: float = -1.0
    """The lowest return, which a forfeited game pays."""
    search_depths: tuple[int, int] | None = None
    """Depths at which hunter and solver search; None: they play tables."""
    is_zero_sum: bool = True
    """True if one wins what the other loses: such games count for ratings."""


GAMES = {
    "kuhn": ArenaGame({"type": "text_kuhn"}, lowest=-2.0),
    "leduc": ArenaGame({"type": "text_leduc"}, lowest=-13.0),
    "liars_dice_4": ArenaGame({"type": "text_liars_dice", "faces": 4}),
    "liars_dice_6": ArenaGame({"type": "text_liars_dice", "faces": 6}),
    "tic_tac_toe": ArenaGame({"type": "text_tic_tac_toe"}, search_depths=(2, 9)),
    "connect_four": ArenaGame({"type": "text_connect_four"}, search_depths=(2, 4)),
    "ultimatum": ArenaGame({"type": "text_bargaining", "turns": 2}, lowest=0.0, is_zero_sum=False),
    "bargaining": ArenaGame({"type": "text_bargaining"}, lowest=0.0, is_zero_sum=False),
}


def text_game(game: str, **options: Any) -> TextGame:
    """Returns the env of a game of the arena with these options. Raises ValueError for an unknown name."""
    if game not in GAMES:
        raise ValueError(f'there is no game "{game}" in the arena: it has {", ".join(GAMES)}')
    env: TextGame = make_env(**GAMES[game].env, **options)
    return env


# ---- reference players


def reference_player(name: str, game: str) -> Player:
    """Returns a reference player for a game. Raises ValueError for an unknown name."""
    if name not in REFERENCES:
        raise ValueError(f'there is no reference player "{name}": the arena has {", ".join(REFERENCES)}')
    return REFERENCES[name](game)


def play_listed(share: float, rules: Rules[Any], state: Any, rng: random.Random) -> int:
    """Plays the legal action at `share` of their list: 0 is the first, 1 the last."""
    legal = rules.legal_actions(state)
    return legal[round(share * (len(legal) - 1))]


def play_random(rules: Rules[Any], state: Any, rng: random.Random) -> int:
    """Plays any legal action, all equally likely."""
    return rng.choice(rules.legal_actions(state))


def play_uneven(number: int, rules: Rules[Any], state: Any, rng: random.Random) -> int:
    """Plays legal actions with unequal probabilities, which follow from `number` and what the player knows."""
    turn = rules.current_player(state)
    taste = random.Random(derive_seed(number, "uneven", turn, rules.info_state_text(state, turn)))
    legal = rules.legal_actions(state)
    return rng.choices(legal, [ODDS ** taste.uniform(0, 1) for _ in legal])[0]


def play_with_slips(rate: float, player: Player, rules: Rules[Any], state: Any, rng: random.Random) -> int:
    """Plays like `player`, but a random action with probability `rate`."""
    if rng.random() < rate:
        return play_random(rules, state, rng)
    return player(rules, state, rng)


def play_by_search(game: str, depth: int, rules: Rules[Any], state: Any, rng: random.Random) -> int:
    """Plays one of the actions that a search of `depth` moves finds best."""
    return rng.choice(search(game, depth, state))


def play_by_table(game: str, policy_IA: np.ndarray, rules: Rules[Any], state: Any, rng: random.Random) -> int:
    """Plays the action probabilities [I, A] over the information states of the game's tree."""
    turn = rules.current_player(state)
    chances = policy_IA[rows_of(game)[turn, rules.info_state_text(state, turn)]]
    return int(rng.choices(range(len(chances)), chances.tolist())[0])


def hunter(game: str) -> Player:
    """Returns a player that looks ahead by two moves, or plays the best response to random play."""
    if depths := GAMES[game].search_depths:
        return partial(play_by_search, game, depths[0])
    return partial(play_by_table, game, best_response_table(game))


def solver(game: str) -> Player:
    """Returns a player that searches deep (tic-tac-toe: to the end), or plays an equilibrium."""
    if depths := GAMES[game].search_depths:
        return partial(play_by_search, game, depths[1])
    return partial(play_by_table, game, solution_table(game))


@cache
def search(game: str, depth: int, state: Any) -> list[int]:
    """Returns the best actions in a state."""
    heuristic = line_heuristic if game == "connect_four" else lambda *_: 0.0
    return best_actions(text_game(game).rules, state, depth, heuristic)


@cache
def tree_of(game: str) -> GameTree:
    """Returns the tree of a game that plays by tables."""
    return build_game_tree(text_game(game).rules)


@cache
def rows_of(game: str) -> dict[tuple[int, str], int]:
    """Returns the numbers of the information states in the game's tree, by player and text."""
    tree = tree_of(game)
    keys = zip(tree.state_player.tolist(), tree.info_state_texts, strict=True)
    return {key: row for row, key in enumerate(keys)}


@cache
def best_response_table(game: str) -> np.ndarray:
    """Returns each player's best response [I, A] to random play."""
    tree = tree_of(game)
    policy = uniform_policy(tree)
    for player in range(tree.num_players):
        rows = tree.player_rows(player)
        policy[rows] = best_response(tree, uniform_policy(tree), player)[0][rows]
    return policy


@cache
def solution_table(game: str) -> np.ndarray:
    """Returns the average policy [I, A] of CFR+, which is near an equilibrium of a zero-sum game."""
    solver = CFRSolver(tree_of(game), plus=True)
    solver.run(CFR_ITERATIONS)
    return solver.average_policy()


REFERENCES: dict[str, Callable[[str], Player]] = {
    "random": lambda game: play_random,
    "first": lambda game: partial(play_listed, 0.0),
    "middle": lambda game: partial(play_listed, 0.5),
    "last": lambda game: partial(play_listed, 1.0),
    "uneven-1": lambda game: partial(play_uneven, 1),
    "uneven-2": lambda game: partial(play_uneven, 2),
    "uneven-3": lambda game: partial(play_uneven, 3),
    "hunter": hunter,
    "slips-60": lambda game: partial(play_with_slips, 0.6, solver(game)),
    "slips-30": lambda game: partial(play_with_slips, 0.3, solver(game)),
    "slips-10": lambda game: partial(play_with_slips, 0.1, solver(game)),
    "solver": solver,
}
