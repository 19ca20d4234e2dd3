"""Turn-based games as pure functions of immutable states: small enough to be walked through whole.

One set of rules serves exact solvers (`palestra.exact`) and the text env over it (`envs/text/games.py`); the vectorised
env of the same game shows the same views.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Generic, TypeVar

import numpy as np

CHANCE, OVER = -1, -2

S = TypeVar("S", bound=Hashable)


class Rules(ABC, Generic[S]):
    """A game of `players` who move in turn. `actions` are the words for the action numbers."""

    name: str = ""
    players: int
    actions: tuple[str, ...]

    @abstractmethod
    def initial(self) -> S: ...

    @abstractmethod
    def turn(self, state: S) -> int:
        """The player who moves, `CHANCE`, or `OVER`."""

    @abstractmethod
    def legal(self, state: S) -> list[int]:
        """The actions of the player who moves."""

    def chances(self, state: S) -> list[tuple[int, float]]:
        """What chance may do, with probabilities."""
        return []

    @abstractmethod
    def next(self, state: S, action: int) -> S: ...

    @abstractmethod
    def returns(self, state: S) -> tuple[float, ...]:
        """What each player has won when the game is over."""

    @abstractmethod
    def view(self, state: S, player: int) -> np.ndarray:
        """What a player knows, float32 [V]: the information state that the vectorised env shows that seat."""

    @abstractmethod
    def words(self, state: S, player: int) -> str:
        """The same for a language agent: equal exactly where `view` is equal."""
