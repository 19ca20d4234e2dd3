"""Base class of the built-in vector envs: preallocated arrays that compiled kernels change in place."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import fields

import numpy as np

from palestra.envs.vector.base import Arrays, Frame, VectorEnv
from palestra.envs.vector.rng import seeded


class NativeEnv(VectorEnv):
    """A built-in vector env whose kernels write into preallocated arrays.

    A subclass fills `frame` and `memory` (all other state of the games, arrays `[B, ...]`) in `__init__`, and
    implements `_begin` and `_advance`, which change them in place. `memory["rng"]` holds the random number streams,
    uint64 [B, WORDS] (see `rng.seeded`).
    """

    frame: Frame
    memory: Arrays

    def reset(self, seeds: np.ndarray) -> Frame:
        self.memory["rng"][:] = seeded(seeds)
        self._begin()
        self.frame.rewards[:] = 0
        self.frame.terminated[:] = False
        self.frame.truncated[:] = False
        if self.frame.seat_terminated is not None:
            self.frame.seat_terminated[:] = False
        return self.frame

    def step(self, actions: np.ndarray) -> Frame:
        self._advance(np.ascontiguousarray(actions))
        return self.frame

    @abstractmethod
    def _begin(self) -> None:
        """Starts an episode in every game from its random number stream and writes the first frame."""

    @abstractmethod
    def _advance(self, actions: np.ndarray) -> None:
        """Plays one joint step in every game and writes the frame; games that end start their next episode."""

    def save(self) -> Arrays:
        return {name: array.copy() for name, array in self._arrays().items()}

    def load(self, saved: Mapping[str, np.ndarray]) -> Frame:
        for name, array in self._arrays().items():
            array[:] = saved[name]
        return self.frame

    def _arrays(self) -> Arrays:
        frame = {f"frame.{part.name}": getattr(self.frame, part.name) for part in fields(self.frame)}
        memory = {f"memory.{name}": array for name, array in self.memory.items()}
        return {name: array for name, array in (frame | memory).items() if array is not None}
