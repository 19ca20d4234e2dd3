"""Turn-based games as pure functions of immutable states, small enough to enumerate.

The same rules serve exact solvers (`palestra.populations.tabular`) and the text env (`envs/text/board_games.py`); the
vector env of the same game gives the same information states.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Generic, TypeVar

import numpy as np

CHANCE = -1
TERMINAL = -2

S = TypeVar("S", bound=Hashable)


class Rules(ABC, Generic[S]):
    """A turn-based game of `num_players` players. `action_names` are the texts of the action numbers."""

    name: str = ""
    num_players: int
    action_names: tuple[str, ...]

    @abstractmethod
    def initial_state(self) -> S:
        """Returns the initial state."""

    @abstractmethod
    def current_player(self, state: S) -> int:
        """Returns the player to move, `CHANCE`, or `TERMINAL`."""

    @abstractmethod
    def legal_actions(self, state: S) -> list[int]:
        """Returns the legal actions of the player to move."""

    def chance_outcomes(self, state: S) -> list[tuple[int, float]]:
        """Returns the outcomes of a chance node as (action, probability)."""
        return []

    @abstractmethod
    def next_state(self, state: S, action: int) -> S:
        """Returns the state after `action`, a move or a chance outcome; `state` is not changed."""

    @abstractmethod
    def returns(self, state: S) -> tuple[float, ...]:
        """Returns the return of each player at a terminal state."""

    @abstractmethod
    def info_state(self, state: S, player: int) -> np.ndarray:
        """Returns a player's information state, float32 [V], equal to the seat's observation in the vector env."""

    @abstractmethod
    def info_state_text(self, state: S, player: int) -> str:
        """Returns the information state as text. If two texts differ, the two `info_state_key` differ."""

    def info_state_key(self, state: S, player: int) -> Hashable:
        """Returns a hashable key of the information state: by default its array. Games whose array
        leaves out something that the player knows override this."""
        return self.info_state(state, player).tobytes()
