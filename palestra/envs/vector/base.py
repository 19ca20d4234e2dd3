"""B games of one env, stepped in lock-step on arrays.

Shapes: `B` games, `N` seats, `A` actions of the seat that has most, `S` numbers of global state. Seats whose views
differ in length share one array: the shorter ones are padded with zeros at the end, `views` says how long each is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import numpy as np

from palestra.types import Seat

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Discrete:
    """One of `n` actions, 0 to n-1."""

    n: int


@dataclass(frozen=True)
class MultiDiscrete:
    """Several choices at once, the i-th of `sizes[i]`."""

    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Continuous:
    """Numbers between `low` and `high`, both of the length of the action."""

    low: tuple[float, ...]
    high: tuple[float, ...]


Space = Discrete | MultiDiscrete | Continuous


@dataclass
class Frame:
    """What B games say after `reset` or `step`. The arrays are the env's own and change with its next step: copy what
    is to stay.

    `obs [B, N, *view]` is what each seat sees now; where a game has just ended it is the first view of the next game
    (Gymnasium's same-step auto-reset), and `final_obs`, `final_state` hold the last view of the one that ended; they
    mean nothing elsewhere. `acting [B, N]` marks the seats that act next: all in simultaneous play, one in turn-based
    play, none of a dead unit; the action of a seat that does not act is ignored. `legal [B, N, A]` is None where all
    actions always are (and for continuous ones); an acting seat has at least one. `rewards [B, N]` are those of the
    step just made, `terminated` and `truncated` [B] say that it ended the game, `success` [B] whether that end counts
    as one (None where the env knows no success). After a reset rewards and ends are zero.

    `seat_terminated [B, N]` marks seats that terminated on their own, at this step or earlier in the same game: such a
    seat does not act again, earns nothing after the step in which it is marked, and its future is worth 0 even where
    the game is later truncated for the others. It is None where all seats end together. A game that is `terminated`
    has terminated for every seat; one that is `truncated` was cut off for the seats that are not marked. A seat that
    was cut off before the others keeps its last view until the game ends.
    """

    obs: np.ndarray  # float32 or uint8
    final_obs: np.ndarray
    acting: np.ndarray  # bool
    rewards: np.ndarray  # float32
    terminated: np.ndarray  # bool
    truncated: np.ndarray  # bool
    legal: np.ndarray | None = None  # bool
    state: np.ndarray | None = None  # float32 [B, S]
    final_state: np.ndarray | None = None
    success: np.ndarray | None = None  # bool
    seat_terminated: np.ndarray | None = None  # bool

    @property
    def over(self) -> np.ndarray:
        """Games that the step ended [B]."""
        return np.logical_or(self.terminated, self.truncated)

    def map(self, change: Callable[[np.ndarray], np.ndarray]) -> Self:
        """A frame of changed arrays."""
        values = {part.name: getattr(self, part.name) for part in fields(self)}
        changed: dict[str, Any] = {name: None if value is None else change(value) for name, value in values.items()}
        return type(self)(**changed)

    def copy(self) -> Self:
        return self.map(np.copy)


def empty_frame(
    games: int,
    seats: int,
    view: tuple[int, ...],
    *,
    actions: int | None = None,
    state: int = 0,
    success: bool = False,
    deaths: bool = False,
    dtype: Any = np.float32,
) -> Frame:
    """A frame of zeros in which every seat acts. `actions` asks for a mask of as many, all legal, `deaths` for
    `seat_terminated`."""
    B, N = games, seats
    return Frame(
        obs=np.zeros((B, N, *view), dtype),
        final_obs=np.zeros((B, N, *view), dtype),
        acting=np.ones((B, N), bool),
        rewards=np.zeros((B, N), np.float32),
        terminated=np.zeros(B, bool),
        truncated=np.zeros(B, bool),
        legal=None if actions is None else np.ones((B, N, actions), bool),
        state=np.zeros((B, state), np.float32) if state else None,
        final_state=np.zeros((B, state), np.float32) if state else None,
        success=np.zeros(B, bool) if success else None,
        seat_terminated=np.zeros((B, N), bool) if deaths else None,
    )


class VectorEnv(ABC):
    """B games (`games`) for the same `seats`; a deterministic function of the games' seeds and the actions.

    A game is a stream: when it ends, the next begins at once, from the same seed's stream of random numbers. Games do
    not influence each other: game b of B goes as it would alone. `views` and `actions` give, for each seat, the shape
    of what it sees and what it may do; all seats have one kind of action. `scripts` names the scripted players that the
    env offers (see `script`); who plays is the run's business.
    """

    name: ClassVar[str] = ""
    seats: tuple[Seat, ...]
    games: int
    views: tuple[tuple[int, ...], ...]
    actions: tuple[Space, ...]
    state_size: int = 0
    scripts: tuple[str, ...] = ()

    @abstractmethod
    def reset(self, seeds: np.ndarray) -> Frame:
        """Begins a stream of games in each place; `seeds [B]` are whole numbers from 0 on."""

    @abstractmethod
    def step(self, actions: np.ndarray) -> Frame:
        """Plays one joint step in every game. `actions` is int32 [B, N] for discrete play, int32 [B, N, M] for
        multi-discrete, float32 [B, N, D] for continuous (clipped to the bounds)."""

    def save(self) -> Arrays | None:
        """Everything that `load` needs to go on exactly; None where the env cannot tell (its games are then begun
        anew at every checkpoint)."""
        return None

    def load(self, saved: Mapping[str, np.ndarray]) -> Frame:
        """Goes on where `save` was; returns the frame of that moment."""
        raise ValueError(f"{self.name or type(self).__name__} cannot save its games, so none can be loaded")

    def script(self, name: str, seat: int) -> np.ndarray:
        """Actions [B] of the scripted player `name` at a seat, for the games as they stand."""
        known = ", ".join(self.scripts) or "none"
        raise ValueError(f'env "{self.name}" has no scripted player "{name}"; it has: {known}')

    def close(self) -> None:  # noqa: B027 - most envs hold nothing
        """Releases what the env holds."""
