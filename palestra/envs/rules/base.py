"""Turn-based games as pure functions of immutable states, small enough to enumerate.

The same rules serve exact solvers (`palestra.exact`) and the text env (`envs/text/games.py`); the vector env of the
same game gives the same information states.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Generic, TypeVar

import numpy as np

CHANCE, OVER = -1, -2

S = TypeVar("S", bound=Hashable)


class Rules(ABC, Generic[S]):
    """A turn-based game of `players` players. `actions` are the texts of the action numbers."""

    name: str = ""
    players: int
    actions: tuple[str, ...]

    @abstractmethod
    def initial(self) -> S:
        """Returns the initial state."""
        ...

    @abstractmethod
    def turn(self, state: S) -> int:
        """Returns the player to move, `CHANCE`, or `OVER`."""

    @abstractmethod
    def legal(self, state: S) -> list[int]:
        """Returns the legal actions of the player to move."""

    def chances(self, state: S) -> list[tuple[int, float]]:
        """Returns the outcomes of a chance node as (action, probability)."""
        return []

    @abstractmethod
    def next(self, state: S, action: int) -> S:
        """Returns the state after `action`, a move or a chance outcome; `state` is not changed."""
        ...

    @abstractmethod
    def returns(self, state: S) -> tuple[float, ...]:
        """Returns the return of each player at a terminal state."""

    @abstractmethod
    def view(self, state: S, player: int) -> np.ndarray:
        """Returns a player's information state, float32 [V], equal to the seat's observation in the vector env."""

    @abstractmethod
    def words(self, state: S, player: int) -> str:
        """Returns the information state as text. Two texts are equal exactly if the two `view` arrays are equal."""
