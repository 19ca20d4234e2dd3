"""Base class of the built-in vector envs: preallocated arrays that compiled kernels change in place."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from palestra.core.accel.jit import jit
from palestra.envs.batch.rng import seed_streams
from palestra.envs.vector_base import Arrays, VectorEnv, VectorStep

T = TypeVar("T", bound=tuple[Any, ...])


class NativeEnv(VectorEnv):
    """A built-in vector env whose kernels write into preallocated arrays.

    A subclass fills `vector_step` and `internal_state` (all other state of the games, arrays `[B, ...]`) in `__init__`,
    and implements `_begin` and `_advance`, which change them in place. `internal_state["rng"]` holds the random number
    streams, uint64 [B, RNG_WORDS] (see `rng.seed_streams`).
    """

    vector_step: VectorStep
    internal_state: Arrays

    def reset(self, seeds: np.ndarray) -> VectorStep:
        self.internal_state["rng"][:] = seed_streams(seeds)
        self._begin()
        self.vector_step.clear_results()
        return self.vector_step

    def step(self, actions: np.ndarray) -> VectorStep:
        self._advance(np.ascontiguousarray(actions))
        return self.vector_step

    def build_table(self, kind: type[T], **constants: Any) -> T:
        """Returns the arrays (not copies) that the kernels change, those of `internal_state` and of
        the frame, and `constants`, as a NamedTuple `kind` with fields of these names."""
        arrays = vars(self.vector_step) | self.internal_state | constants
        return kind(**{name: arrays[name] for name in kind._fields})  # type: ignore[attr-defined]

    @abstractmethod
    def _begin(self) -> None:
        """Starts an episode in every game from its random number stream and writes the first frame."""

    @abstractmethod
    def _advance(self, actions: np.ndarray) -> None:
        """Plays one joint step in every game and writes the frame; games that end start their next episode."""

    def save(self) -> Arrays:
        return {name: array.copy() for name, array in self._arrays().items()}

    def load(self, saved: Mapping[str, np.ndarray]) -> VectorStep:
        for name, array in self._arrays().items():
            array[:] = saved[name]
        return self.vector_step

    def _arrays(self) -> Arrays:
        frame = {f"frame.{name}": array for name, array in self.vector_step.arrays().items()}
        return frame | {f"memory.{name}": array for name, array in self.internal_state.items()}


@jit
def store_final(g: Any, b: int) -> None:
    """Copies the last observations and the state of an ended game to `final_obs` and `final_state`.
    Loops compile ten times as fast as slice assignments."""
    for n in range(g.obs.shape[1]):
        for at in range(g.obs.shape[2]):
            g.final_obs[b, n, at] = g.obs[b, n, at]
    for at in range(g.state.shape[1]):
        g.final_state[b, at] = g.state[b, at]


@jit
def store_ended(g: Any, ended_B: np.ndarray) -> None:
    """Does `store_final` for the marked games."""
    for b in range(len(ended_B)):
        if ended_B[b]:
            store_final(g, b)
