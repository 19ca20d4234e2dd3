"""An OpenSpiel game without a framework: one process, one game after the other, random legal moves and chance outcomes.
The observation tensor of the player to move is computed for each move."""

from __future__ import annotations

import random

import pyspiel
from peers.timing import measure, print_result, read_spec

spec = read_spec()
random.seed(0)
game = pyspiel.load_game(spec.env)


def begin() -> pyspiel.State:
    state = game.new_initial_state()
    draw(state)
    return state


def draw(state: pyspiel.State) -> None:
    """Samples chance outcomes until a player must move."""
    while state.is_chance_node():
        outcomes, chances = zip(*state.chance_outcomes(), strict=True)
        state.apply_action(random.choices(outcomes, chances)[0])


state = begin()


def advance() -> int:
    """Makes 500 moves; returns their number."""
    global state
    for _ in range(500):
        state.observation_tensor(state.current_player())
        state.apply_action(random.choice(state.legal_actions()))
        draw(state)
        if state.is_terminal():
            state = begin()
    return 500


print_result(measure(advance, spec.seconds), ("open_spiel",), "one process, random moves, no learning")
