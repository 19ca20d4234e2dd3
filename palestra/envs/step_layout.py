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
        self._first: dict[str, Layout | None] = {}  # the layouts of the first step; None: it had no such array
        self._last: dict[str, Any] = {}  # the arrays of the last step, which were right

    def check(self, step: Any) -> None:
        """Raises ValueError if a result of `reset` or `step` is no `VectorStep`, has an array of another layout than
        the env's spec says or than the first step had, or has none where the first step had one, or the other way
        round."""
        if not isinstance(step, VectorStep):
            raise ValueError(f"returns {type(step).__name__}: return a VectorStep from reset and step")
        for name in NAMES:
            array = getattr(step, name)
            if name not in self._last or array is not self._last[name]:
                self._check_array(name, array, step)
                self._last[name] = array
        if step.success is not None and step.success.dtype == np.float32:
            _check_shares(step.success)

    def _check_array(self, name: str, array: Any, step: VectorStep) -> None:
        layout = (array.shape, array.dtype) if isinstance(array, np.ndarray) else None
        allowed: Sequence[Layout | None] = [None]
        if name in self._first:
            allowed = [self._first[name]]
        elif array is not None or self._needs(name):
            allowed = self._layouts(name, step)
        if layout not in allowed or (array is not None and layout is None):
            raise ValueError(
                f"has {name} as {_describe_array(array)} and not {_describe_layout(allowed[0])}: correct the array"
            )
        self._first[name] = layout

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


def _describe_array(array: Any) -> str:
    if array is None:
        return "none"
    found = np.asarray(array)
    return f"{found.dtype} {list(found.shape)}"


def _describe_layout(layout: Layout | None) -> str:
    return f"{layout[1]} {list(layout[0])}" if layout else "none, as in the first step"


def _check_shares(success: np.ndarray) -> None:
    if ((success < 0) | (success > 1)).any():
        raise ValueError("reports a success that is not from 0 to 1: give each seat a share, or NaN for none")
