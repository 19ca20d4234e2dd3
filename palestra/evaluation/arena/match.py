"""A game against a reference player of the arena, as an env."""

from __future__ import annotations

import copy
import random
from typing import Any, ClassVar, Self

from palestra.core.types import Seat, Step
from palestra.envs.base import Env
from palestra.envs.support.options import Rendering
from palestra.evaluation.arena.players import reference_player, text_game


class ArenaMatch(Env):
    """A game of the arena, whose expert is the reference player `opponent`: give one seat to `expert`, the other to
    whoever plays. `rendering` and `vocabulary` are those of text games. Raises ValueError for an unknown game or
    player."""

    name: ClassVar[str] = "arena"

    def __init__(
        self,
        *,
        game: str = "tic_tac_toe",
        opponent: str = "solver",
        vocabulary: dict[str, str] | None = None,
        rendering: Rendering = "full",
    ) -> None:
        self.game = text_game(game, vocabulary=vocabulary, rendering=rendering, reward="outcome")
        self.opponent = reference_player(opponent, game)
        self.seats = self.game.seats
        self.roles = self.game.roles

    def reset(self, seed: int) -> Step:
        return self.game.reset(seed)

    def step(self, actions: dict[Seat, Any]) -> Step:
        return self.game.step(actions)

    def fork(self) -> Self:
        twin = copy.copy(self)
        twin.game = self.game.fork()
        return twin

    def rules_for(self, seat: Seat) -> str:
        return self.game.rules_for(seat)

    def expert(self, seat: Seat, rng: random.Random) -> str:
        """Returns the reference player's answer."""
        return self.game.says(self.opponent(self.game.rules, self.game.state, rng))
