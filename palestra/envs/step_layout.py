"""The layout of a vector env's arrays, which rollouts copy as they are: what has another shape would be repeated over
games and seats, and another dtype rounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from palestra.envs.vector_base import (
    Continuous,
    Discrete,
    MultiDiscrete,
    Space,
    VectorEnv,
    VectorStep,
    check_observations,
)

REQUIRED = ("obs", "final_obs", "rewards", "agent_mask", "terminated", "truncated")
NAMES = (*REQUIRED, "action_mask", "state", "final_state", "success", "seat_terminated")
Layout = tuple[tuple[int, ...], Any]  # shape and dtype


def check_spec(env: VectorEnv) -> None:
    """Raises ValueError if an env's seats, observation shapes and action spaces are not as `VectorEnv` describes."""
    if len(set(env.seats)) < len(env.seats):
        raise ValueError(f"seats are {', '.join(env.seats)}: give each a name of its own")
    for name in ("observation_shapes", "action_spaces"):
        value = getattr(env, name, None)
        if not isinstance(value, Sequence) or len(value) != len(env.seats):
            raise ValueError(
                f"{name} is {value!r:.80}, and there are {len(env.seats)} seats: give a tuple with one entry for each"
            )
    for shape in env.observation_shapes:
        if not isinstance(shape, tuple):
            raise ValueError(f"observation_shapes has {shape!r:.80}: give each seat a tuple, such as (8,)")
    for space in env.action_spaces:
        if not isinstance(space, Discrete | MultiDiscrete | Continuous):
            raise ValueError(
                f"action_spaces has {space!r:.80}: give each seat palestra's Discrete, MultiDiscrete or Continuous"
            )
    check_observations(env)


def num_choices(space: Space) -> int:
    """Returns the number of actions of a seat that chooses one, else 0."""
    return getattr(space, "n", 0)


class StepLayout:
    """The shapes and dtypes of an env's arrays. Arrays that the env overwrites in place are looked at once."""

    def __init__(self, env: VectorEnv) -> None:
        self.env = env
        self._checked: dict[str, Any] = {}  # the last array of each name; None: the env has none

    def check(self, step: Any) -> None:
        """Raises ValueError if a result of `reset` or `step` is no `VectorStep`, or an array of another layout, or if
        one that was there is missing, or the other way round."""
        if not isinstance(step, VectorStep):
            raise ValueError(f"returns {type(step).__name__}: return a VectorStep from reset and step")
        for name in NAMES:
            array = getattr(step, name)
            if name not in self._checked or array is not self._checked[name]:
                self._check_array(name, array, step)
                self._checked[name] = array
        if step.success is not None and step.success.dtype == np.float32:
            _check_shares(step.success)

    def _check_array(self, name: str, array: Any, step: VectorStep) -> None:
        before = self._checked.get(name, array)
        if name not in REQUIRED and (before is None) != (array is None):
            raise ValueError(f"has {name} in some steps and none in others: give the array from reset on")
        if array is None and not self._needs(name):
            return
        allowed = self._layouts(name, step)
        if isinstance(array, np.ndarray) and (array.shape, array.dtype) in allowed:
            return
        shape, dtype = allowed[0]
        have = "none"
        if array is not None:
            found = np.asarray(array)
            have = f"{found.dtype} {list(found.shape)}"
        raise ValueError(f"has {name} as {have} and not {np.dtype(dtype)} {list(shape)}: correct the array")

    def _needs(self, name: str) -> bool:
        return name in REQUIRED or ("state" in name and self.env.state_size > 0)

    def _layouts(self, name: str, step: VectorStep) -> list[Layout]:
        """Returns the layouts that an array may have."""
        env = self.env
        games = (env.num_envs,)
        seats = (*games, len(env.seats))
        if name == "obs":
            shape = (*seats, *map(max, zip(*env.observation_shapes, strict=True)))
            layouts: list[Layout] = [(shape, np.dtype(np.float32))]
            if not env.observation_images:
                layouts.append((shape, np.dtype(np.uint8)))
            return layouts
        if name == "final_obs":
            return [(step.obs.shape, step.obs.dtype)]
        if name == "rewards":
            return [(seats, np.dtype(np.float32))]
        if name in ("agent_mask", "seat_terminated"):
            return [(seats, np.dtype(bool))]
        if name in ("terminated", "truncated"):
            return [(games, np.dtype(bool))]
        if name == "success":
            return [(games, np.dtype(bool)), (seats, np.dtype(bool)), (seats, np.dtype(np.float32))]
        if name == "action_mask":
            return [((*seats, max(map(num_choices, env.action_spaces))), np.dtype(bool))]
        return [((*games, env.state_size), np.dtype(np.float32))]


def _check_shares(success: np.ndarray) -> None:
    if ((success < 0) | (success > 1)).any():
        raise ValueError("reports a success that is not from 0 to 1: give each seat a share, or NaN for none")
