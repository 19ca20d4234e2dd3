"""Gymnasium environments as vector envs, and conversion of spaces in both directions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from palestra.envs.vector.base import Continuous, Discrete, MultiDiscrete, Space
from palestra.envs.vector.loop import GameSpec, Moment
from palestra.envs.vector.processes import Hosted

PICTURE = 36  # pixels per side at least; smaller grids are boards, read as numbers


class View(NamedTuple):
    """Observation encoder of one seat: the observation shape, whether it is uint8 pixels, and `read`, the function from
    a value of the Gymnasium space to the array. `read` also takes batches, with leading dimensions (not for
    dictionaries and tuples)."""

    shape: tuple[int, ...]
    pixels: bool
    read: Callable[[Any], np.ndarray]


class Choice(NamedTuple):
    """Action decoder of one seat: its action space, and `write`, the function from an action array to a value of the
    Gymnasium space."""

    space: Space
    write: Callable[[np.ndarray], Any]


def view_of(space: spaces.Space, where: str) -> View:
    """Returns the encoder of an observation space. Images (at least 36 x 36 pixels, channels first or last) stay images
    with channels last; anything else becomes one row float32: discrete values one-hot, uint8 divided by 255.

    `where` names the seat in errors. Raises ValueError for spaces without a fixed size.
    """
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        shape, pixels = space.shape, space.dtype == np.uint8 and isinstance(space, spaces.Box)
        if len(shape) == 2 and min(shape) >= PICTURE:
            return View((*shape, 1), pixels, partial(np.expand_dims, axis=-1))
        if len(shape) == 3 and min(shape[:2]) >= PICTURE:
            return View(shape, pixels, np.asarray)
        if len(shape) == 3 and min(shape[1:]) >= PICTURE:
            return View((*shape[1:], shape[0]), pixels, partial(np.moveaxis, source=-3, destination=-1))
        if len(shape) == 1 and not pixels:
            return View(shape, False, partial(np.asarray, dtype=np.float32))
        scale = 1 / 255 if pixels else 1.0
        return View((int(np.prod(shape)),), False, partial(_numbers, dimensions=len(shape), scale=scale))
    if not space.is_np_flattenable:
        raise ValueError(f"{where} sees {space}, whose size is not fixed: wrap the env so that it has one")
    return View((spaces.flatdim(space),), False, partial(_flat, space))


def _numbers(value: Any, dimensions: int, scale: float) -> np.ndarray:
    array = np.asarray(value, np.float32)
    array = array.reshape(*array.shape[: array.ndim - dimensions], -1)
    return array if scale == 1.0 else array * np.float32(scale)


def _flat(space: spaces.Space, value: Any) -> np.ndarray:
    return np.asarray(spaces.flatten(space, value), np.float32)


def choice_of(space: spaces.Space, where: str) -> Choice:
    """Returns the decoder of an action space; `where` names the seat in errors. Raises ValueError for spaces other than
    Discrete, MultiDiscrete, MultiBinary and bounded Box."""
    if isinstance(space, spaces.Discrete):
        return Choice(Discrete(int(space.n)), partial(_index, start=int(space.start)))
    if isinstance(space, spaces.MultiDiscrete):
        sizes = tuple(int(n) for n in space.nvec.reshape(-1))
        return Choice(MultiDiscrete(sizes), partial(_indices, start=space.start, shape=space.shape, dtype=space.dtype))
    if isinstance(space, spaces.MultiBinary):
        sizes = (2,) * int(np.prod(space.shape))
        return Choice(MultiDiscrete(sizes), partial(_indices, start=0, shape=space.shape, dtype=space.dtype))
    if isinstance(space, spaces.Box) and space.is_bounded():
        low, high = (tuple(float(number) for number in bound.reshape(-1)) for bound in (space.low, space.high))
        return Choice(Continuous(low, high), partial(_box, shape=space.shape, dtype=space.dtype))
    raise ValueError(f"{where} acts in {space}: it must be choices or bounded numbers; wrap the env so that it is")


def _index(action: np.ndarray, start: int) -> int:
    return int(action) + start


def _indices(action: np.ndarray, start: Any, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    size = int(np.prod(shape))
    return (action[:size].reshape(shape) + start).astype(dtype)


def _box(action: np.ndarray, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return action[: int(np.prod(shape))].reshape(shape).astype(dtype)


def box_for(view: tuple[int, ...], pixels: bool) -> spaces.Box:
    """Returns the Gymnasium space of observations of shape `view`: uint8 if `pixels`, else unbounded float32."""
    return spaces.Box(0, 255, view, np.uint8) if pixels else spaces.Box(-np.inf, np.inf, view, np.float32)


def masked(view: spaces.Space, actions: int) -> spaces.Dict:
    """Returns a Dict space of `observation` and `action_mask` (int8 [actions]), as in PettingZoo."""
    return spaces.Dict({"observation": view, "action_mask": spaces.Box(0, 1, (actions,), np.int8)})


def unmasked(space: spaces.Space) -> tuple[spaces.Space, bool]:
    """Returns the observation space without its action mask, and whether it had one."""
    if isinstance(space, spaces.Dict) and "action_mask" in space.spaces:
        return space["observation"], True
    return space, False


def heeded(given: bool, actions: Sequence[Space], several: bool, where: str) -> bool:
    """True if the env's action masks are `given` and can be used: one Discrete action per seat, and not one mask for
    `several` seats. Raises ValueError for masks that cannot be used, since forbidden actions would then be taken."""
    if given and (several or not all(isinstance(space, Discrete) for space in actions)):
        fix = "wrap the env so that its actions are Discrete, or so that it takes any action and gives no action_mask"
        raise ValueError(f"{where} gives an action_mask, which is only heeded for one Discrete action of a seat: {fix}")
    return given


def row_of(space: Any) -> int:
    """Returns the length of a one-dimensional Box; 0 for any other space and for None."""
    return space.shape[0] if isinstance(space, spaces.Box) and len(space.shape) == 1 else 0


def nothing_of(space: spaces.Space) -> np.ndarray:
    """Returns an action of zeros."""
    return np.zeros(space.shape or (), space.dtype or np.int32)


def space_for(space: Space) -> spaces.Space:
    """Returns the Gymnasium space of an action space."""
    if isinstance(space, Discrete):
        return spaces.Discrete(space.n)
    if isinstance(space, MultiDiscrete):
        return spaces.MultiDiscrete(list(space.sizes))
    return spaces.Box(np.array(space.low, np.float32), np.array(space.high, np.float32), dtype=np.float32)


def parts_of(space: spaces.Space) -> list[spaces.Space]:
    """Returns the spaces of the seats: the parts of a Tuple space, or the space itself as one."""
    return list(space.spaces) if isinstance(space, spaces.Tuple) else [space]


class GymnasiumGame:
    """One Gymnasium env. If its action space is a Tuple, each part is a seat ("agent_0", ...); else the one seat is
    "agent".

    A scalar reward goes to every seat, a list has one entry per seat; likewise for `terminated` and `truncated`. A seat
    that ends before the others does not act again, gets no further reward and keeps its last observation. A seat that
    is terminated and truncated in one step counts as terminated. `action_mask` and `is_success` of the info are used if
    the info of the first reset has them.
    """

    def __init__(self, make: Callable[[], gymnasium.Env]) -> None:
        self.env = make()
        several = isinstance(self.env.action_space, spaces.Tuple)
        self.choices = [choice_of(part, "a seat") for part in parts_of(self.env.action_space)]
        count = len(self.choices)
        seen = parts_of(self.env.observation_space) if several else [self.env.observation_space]
        self.views = [view_of(part, "a seat") for part in seen]
        if len(self.views) != count:
            raise ValueError(f"{self.env} has actions for {count} seats and observations for {len(self.views)}")
        info = self.env.reset(seed=0)[1]
        self.several = several
        self.spec = GameSpec(
            tuple(f"agent_{n}" for n in range(count)) if several else ("agent",),
            tuple(view.shape for view in self.views),
            tuple(choice.space for choice in self.choices),
            pixels=all(view.pixels for view in self.views),
            masks=heeded("action_mask" in info, [choice.space for choice in self.choices], several, str(self.env)),
            success="is_success" in info,
            deaths=several,
        )

    def reset(self, seed: int) -> Moment:
        self.ended, self.dead = np.zeros((2, len(self.choices)), bool)
        return self._moment(*self.env.reset(seed=seed), self.ended)

    def step(self, actions: np.ndarray) -> Moment:
        written = [choice.write(action) for choice, action in zip(self.choices, actions, strict=True)]
        seen, reward, terminated, truncated, info = self.env.step(tuple(written) if self.several else written[0])
        rewards, gone = np.where(self.ended, 0.0, self.rewards(reward, info)), self.ended
        self.dead = self.dead | (~gone & terminated)
        self.ended = gone | terminated | truncated
        moment = self._moment(seen, info, gone)
        moment.rewards, moment.seat_terminated = rewards, self.dead
        if self.ended.all():
            moment.terminated = bool(self.dead.all())
            moment.truncated = not moment.terminated
        return moment

    def rewards(self, reward: Any, info: dict[str, Any]) -> Sequence[float]:
        """Returns the rewards of all seats for one step."""
        return [float(part) for part in np.broadcast_to(reward, len(self.choices))]

    def close(self) -> None:
        self.env.close()

    def _moment(self, seen: Any, info: dict[str, Any], gone: np.ndarray) -> Moment:
        """Encodes the observations of all seats except those that had ended before (`gone`)."""
        parts = zip(self.views, seen if self.several else [seen], gone, strict=True)
        return Moment(
            [None if left else view.read(part) for view, part, left in parts],
            ~self.ended,
            legal=[np.asarray(info["action_mask"], bool)] if self.spec.masks else None,
            success=bool(info.get("is_success", False)),
        )


def made(id: str, options: dict[str, Any] | None = None) -> gymnasium.Env:
    """Returns `gymnasium.make(id, **options)` without the env checker. Raises ValueError if Gymnasium cannot make the
    env."""
    try:
        return gymnasium.make(id, disable_env_checker=True, **(options or {}))
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise ValueError(f'Gymnasium cannot make "{id}" with {options or "no options"}: {error}') from error


class GymnasiumEnv(Hosted):
    """The Gymnasium env `id` ("module:id" imports the module that registers it), made with `options`."""

    name: ClassVar[str] = "gymnasium"

    def __init__(
        self,
        games: int = 16,
        *,
        id: str = "CartPole-v1",
        options: dict[str, Any] | None = None,
        processes: int = 0,
    ) -> None:
        super().__init__(partial(GymnasiumGame, partial(made, id, options)), games, processes)
