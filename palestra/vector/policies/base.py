"""Protocol of players in vector envs, which act for many games per call, and simple players."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from palestra.envs.vector_base import VectorEnv, VectorStep
from palestra.envs.vector_check import random_actions


class VectorPolicy(Protocol):
    """Plays the seat numbers `seats` of a vector env. `names` are the policies that play, with their versions."""

    @property
    def name(self) -> str: ...
    @property
    def names(self) -> Sequence[str]: ...
    @property
    def seats(self) -> Sequence[int]: ...

    def reset_rng(self, seed: int) -> None:
        """Seeds all random numbers until the next call."""

    def initial_state(self, num_envs: int) -> Any:
        """Returns the recurrent state before the first step of `num_envs` games; None for a player without one."""

    def act(
        self, vector_step: VectorStep, recurrent_state: Any, is_first: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None, Any]:
        """Returns actions [B, S, ...] (int32 or float32) for its S seats, their log-probabilities [B, S] float32 (None
        if unknown), and the new recurrent state. `is_first` [B] bool marks games at their first step: their recurrent
        state belongs to an earlier game and must be reset."""


class UniformVectorPolicy:
    """Plays uniformly random legal actions."""

    def __init__(self, env: VectorEnv, seats: Sequence[int], name: str = "random") -> None:
        self.env = env
        self.seats = list(seats)
        self.name = name
        self.names = [name]

    def reset_rng(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def initial_state(self, num_envs: int) -> None:
        return None

    def act(self, vector_step: VectorStep, recurrent_state: Any, is_first: np.ndarray) -> tuple[np.ndarray, None, None]:
        return random_actions(self.env, vector_step, self.rng)[:, self.seats], None, None


class ScriptedVectorPolicy:
    """Plays a script of the env (by name), or any function from an env and a seat number to actions
    [B, ...]. Raises ValueError if the env has no script of that name."""

    def __init__(
        self,
        env: VectorEnv,
        seats: Sequence[int],
        script: str | Callable[[VectorEnv, int], np.ndarray],
        name: str = "scripted",
    ) -> None:
        self.env = env
        self.seats = list(seats)
        self.name = name
        self.names = [name]
        if isinstance(script, str) and script not in env.scripted_policies:
            env.scripted_actions(script, 0)  # raises an error that lists the available scripts
        self.script = script

    def reset_rng(self, seed: int) -> None:
        pass

    def initial_state(self, num_envs: int) -> None:
        return None

    def act(self, vector_step: VectorStep, recurrent_state: Any, is_first: np.ndarray) -> tuple[np.ndarray, None, None]:
        script = self.script
        actions = [
            self.env.scripted_actions(script, s) if isinstance(script, str) else script(self.env, s) for s in self.seats
        ]
        return np.stack(actions, 1), None, None
