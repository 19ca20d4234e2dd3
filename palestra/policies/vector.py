"""What plays in vectorised games: one call acts for many rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from palestra.envs.vector.base import Frame, VectorEnv
from palestra.envs.vector.check import random_actions


class Player(Protocol):
    """Plays the seats whose numbers are `seats`. `names` are the members behind it, with their versions."""

    @property
    def name(self) -> str: ...
    @property
    def names(self) -> Sequence[str]: ...
    @property
    def seats(self) -> Sequence[int]: ...

    def begin(self, seed: int) -> None:
        """Everything random until the next `begin` follows from `seed`."""
        ...

    def empty(self, games: int) -> Any:
        """What it remembers before a game's first moment; None for a player without memory."""
        ...

    def act(self, frame: Frame, memory: Any, fresh: np.ndarray) -> tuple[np.ndarray, np.ndarray | None, Any]:
        """Actions [B, S, ...] for its S seats, their log-probabilities [B, S] where it has any, and its new memory.
        `fresh [B]` marks games at their first moment: what it remembers of them belongs to an earlier one."""
        ...


class Uniform:
    """Uniform over legal actions."""

    def __init__(self, env: VectorEnv, seats: Sequence[int], name: str = "random") -> None:
        self.env, self.seats, self.name, self.names = env, list(seats), name, [name]

    def begin(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def empty(self, games: int) -> None:
        return None

    def act(self, frame: Frame, memory: Any, fresh: np.ndarray) -> tuple[np.ndarray, None, None]:
        return random_actions(self.env, frame, self.rng)[:, self.seats], None, None


class Scripted:
    """A scripted player that the env offers, or any function from an env and a seat to actions [B, ...]."""

    def __init__(
        self,
        env: VectorEnv,
        seats: Sequence[int],
        script: str | Callable[[VectorEnv, int], np.ndarray],
        name: str = "scripted",
    ) -> None:
        self.env, self.seats, self.name, self.names = env, list(seats), name, [name]
        if isinstance(script, str) and script not in env.scripts:
            env.script(script, 0)  # says what there is
        self.script = script

    def begin(self, seed: int) -> None:
        pass

    def empty(self, games: int) -> None:
        return None

    def act(self, frame: Frame, memory: Any, fresh: np.ndarray) -> tuple[np.ndarray, None, None]:
        script = self.script
        moves = [self.env.script(script, s) if isinstance(script, str) else script(self.env, s) for s in self.seats]
        return np.stack(moves, 1), None, None
