"""Base class of vector envs: B games of one env, stepped in lock-step on arrays.

Shapes: `B` games, `N` seats, `A` actions of the seat with the most actions, `W` numbers of the longest action, `S`
numbers of global state. Seats whose observations differ in length share one array: shorter observations are padded with
zeros at the end, `observation_shapes` has each seat's true shape. An observation that has images beside other numbers,
and images that differ in shape or dtype, are rows of numbers, too: see `VectorEnv.observation_images`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np

from palestra.core.types import Seat
from palestra.envs.support.options import check_at_least

Arrays = dict[str, np.ndarray]
ReportsSuccess = bool | Literal["by_seat"]
RenderFrame = np.ndarray | str  # uint8 [H, W, 3] or [H, W], or a text
ImageShape = tuple[int, int, int]  # height, width, channels


@dataclass(frozen=True)
class Discrete:
    """Action space of one integer, 0 to n-1."""

    n: int
    dtype: ClassVar[type[np.generic]] = np.int32
    width: ClassVar[int] = 0  # length of an action; 0: it is one number


@dataclass(frozen=True)
class MultiDiscrete:
    """Action space of several integers; the i-th is from 0 to `sizes[i] - 1`."""

    sizes: tuple[int, ...]
    dtype: ClassVar[type[np.generic]] = np.int32

    @property
    def width(self) -> int:
        """Length of an action."""
        return len(self.sizes)


@dataclass(frozen=True)
class Continuous:
    """Action space of numbers between `low` and `high`, both as long as the action."""

    low: tuple[float, ...]
    high: tuple[float, ...]
    dtype: ClassVar[type[np.generic]] = np.float32

    @property
    def width(self) -> int:
        """Length of an action."""
        return len(self.low)


Space = Discrete | MultiDiscrete | Continuous


def images_size(images: Sequence[ImageShape]) -> int:
    """Returns the number of values of images of these shapes."""
    return sum(height * width * channels for height, width, channels in images)


def check_observations(env: Any) -> None:
    """Checks the observation shapes and images of an env, or of a spec that has these attributes.

    Raises ValueError if observations do not fit in one array, or do not begin with their images.
    """
    shapes = env.observation_shapes
    if len({len(shape) if len(shape) == 1 else shape for shape in shapes}) > 1:
        raise ValueError(
            f"observations of shapes {shapes} do not fit in one array: only those of one dimension may differ in length"
        )
    if not env.observation_images:
        return
    if len(env.observation_images) != len(shapes):
        raise ValueError(
            f"observation_images are of {len(env.observation_images)} seats, and observation_shapes of {len(shapes)}: "
            "give each seat a tuple of images, () for none"
        )
    for seat, images, shape in zip(env.seats, env.observation_images, shapes, strict=True):
        are_shapes = isinstance(images, tuple) and all(
            isinstance(image, tuple) and len(image) == 3 and min(image) > 0 for image in images
        )
        if not are_shapes or (images and (len(shape) > 1 or images_size(images) > shape[0])):
            raise ValueError(
                f"observation_images of seat {seat} are {images}, and its observations {shape}: give tuples of height, "
                "width and channels of the images with which its row begins"
            )


def zero_actions(
    action_spaces: Sequence[Space], games: tuple[int, ...], zeros: Callable[..., np.ndarray] = np.zeros
) -> np.ndarray:
    """Returns actions of zeros [*games, N, ...] in the shape and dtype that `VectorEnv.step` takes, made by `zeros`."""
    shape = (*games, len(action_spaces))
    if not all(isinstance(space, Discrete) for space in action_spaces):
        shape += (max(space.width for space in action_spaces),)
    is_continuous = any(isinstance(space, Continuous) for space in action_spaces)
    return zeros(shape, np.float32 if is_continuous else np.int32)


@dataclass
class VectorStep:
    """The result of `reset` or `step` for B games. The env owns the arrays and overwrites them in its next step: copy
    what must be kept.

    `obs [B, N, *observation_shape]` (float32 or uint8) is the current observation of each seat. If the step ended a
    game, it is the first observation of the next game (Gymnasium's same-step autoreset), and `final_obs` and
    `final_state` hold the last observation and state of the ended game; for all other games their content is undefined.
    `agent_mask [B, N]` bool is the agent mask, the seats that act next: all seats in simultaneous play, one in
    turn-based play, no dead unit. Actions of other seats are ignored. `action_mask [B, N, A]` bool is the action mask;
    it is None if all actions are always legal, and all true for a seat whose actions are not discrete. A seat that acts
    has at least one legal action. `rewards [B, N]` float32 are the rewards of this step; `terminated` and `truncated`
    [B] bool mark games that the step ended. After a reset, rewards are zero and no game is marked as ended.

    `success` [B] bool marks ended games that count as a success for all seats. Where opponents play, it is [B, N],
    bool or float32: the success of each seat, NaN for one that reports none. None: the env does not define success.

    `seat_terminated [B, N]` bool marks seats that terminated on their own, in this step or earlier in the same game.
    Such a seat does not act again, gets no reward after the step in which it is marked, and has a future value of 0
    even if the game is later truncated for the other seats. It is None if all seats always end together. A `terminated`
    game terminates every seat; a `truncated` game truncates the seats that are not marked. A seat that was truncated
    before the others keeps its last observation until the game ends. The observation of a seat that has terminated may
    be anything, NaN included: rollouts show zeros instead where it is not finite.
    """

    obs: np.ndarray  # float32 or uint8
    final_obs: np.ndarray
    agent_mask: np.ndarray  # bool
    rewards: np.ndarray  # float32
    terminated: np.ndarray  # bool
    truncated: np.ndarray  # bool
    action_mask: np.ndarray | None = None  # bool
    state: np.ndarray | None = None  # float32 [B, S]
    final_state: np.ndarray | None = None
    success: np.ndarray | None = None  # bool [B], or [B, N]
    seat_terminated: np.ndarray | None = None  # bool

    @property
    def done(self) -> np.ndarray:
        """Games that this step ended, bool [B]."""
        return np.logical_or(self.terminated, self.truncated)

    def arrays(self) -> Arrays:
        """Returns the arrays, not copied, by their names."""
        return {name: array for name, array in vars(self).items() if array is not None}

    def map_arrays(self, change: Callable[[np.ndarray], np.ndarray]) -> Self:
        """Returns a step with `change` applied to every array; None stays None."""
        return type(self)(**{name: change(array) for name, array in self.arrays().items()})

    def copy(self) -> Self:
        """Returns a step with copies of all arrays."""
        return self.map_arrays(np.copy)

    def clear_results(self) -> None:
        """Sets rewards, ends and successes to 0, as after a reset."""
        for name in ("rewards", "terminated", "truncated", "success", "seat_terminated"):
            if (array := getattr(self, name)) is not None:
                array[:] = 0


class GamesDiffer(ValueError):
    """Raised by `VectorEnv.load` if games that it plays again are not those that were saved."""


def find_difference(step: VectorStep, expected: VectorStep) -> str | None:
    """Returns the name of the first array in which two steps differ, None if they are equal. Final observations and
    states count for the games that `expected` ended. NaN equals NaN: seats that have terminated may see it."""
    for part in fields(VectorStep):
        got = getattr(step, part.name)
        want = getattr(expected, part.name)
        if got is None or want is None:
            if got is not want:
                return part.name
            continue
        if part.name in ("final_obs", "final_state"):
            got = got[expected.done]
            want = want[expected.done]
        if not np.array_equal(got, want, equal_nan=want.dtype.kind == "f"):
            return part.name
    return None


def empty_step(
    num_envs: int,
    num_seats: int,
    observation_shape: tuple[int, ...],
    *,
    num_actions: int | None = None,
    state_size: int = 0,
    reports_success: ReportsSuccess = False,
    has_seat_terminated: bool = False,
    dtype: Any = np.float32,
) -> VectorStep:
    """Returns a step of zeros in which all seats act. Observations are of shape `observation_shape` and of `dtype`.
    `num_actions` adds an action mask of that length with every action legal, `state_size` a global state of that
    length, `reports_success` the array of successes, those of games or "by_seat", `has_seat_terminated`
    `seat_terminated`. Raises ValueError for `num_envs` below 1."""
    check_at_least("num_envs", num_envs, 1, "nothing is played in fewer")
    B = num_envs
    N = num_seats
    step = VectorStep(
        obs=np.zeros((B, N, *observation_shape), dtype),
        final_obs=np.zeros((B, N, *observation_shape), dtype),
        agent_mask=np.ones((B, N), bool),
        rewards=np.zeros((B, N), np.float32),
        terminated=np.zeros(B, bool),
        truncated=np.zeros(B, bool),
    )
    if num_actions is not None:
        step.action_mask = np.ones((B, N, num_actions), bool)
    if state_size:
        step.state = np.zeros((B, state_size), np.float32)
        step.final_state = np.zeros((B, state_size), np.float32)
    if reports_success == "by_seat":
        step.success = np.zeros((B, N), np.float32)
    elif reports_success:
        step.success = np.zeros(B, bool)
    if has_seat_terminated:
        step.seat_terminated = np.zeros((B, N), bool)
    return step


class Entities(NamedTuple):
    """Entities of one kind in an observation, such as other agents or landmarks: each is `width` numbers, at the
    `columns` of the observation that are listed for it. An entity whose numbers are all 0 counts as absent. `position`
    lists the indices, from 0, of its numbers that are its position relative to the seat (empty: none are)."""

    width: int
    columns: tuple[tuple[int, ...], ...]
    position: tuple[int, ...] = ()

    @classmethod
    def in_a_row(cls, start: int, count: int, width: int, position: tuple[int, ...] = ()) -> Self:
        """Returns `count` entities that follow each other from column `start` on."""
        columns = tuple(tuple(range(start + i * width, start + (i + 1) * width)) for i in range(count))
        return cls(width, columns, position)


class VectorEnv(ABC):
    """B parallel games (`num_envs`) with the same `seats`; a deterministic function of the seeds and the actions.

    Each game is a stream of episodes: when one ends, the next begins in the same step, from the same stream of random
    numbers. Games are independent: game b of B plays exactly as it would alone. `observation_shapes` holds the
    observation shape of each seat, `action_spaces` its action space. `observation_images` are the shapes of the images
    with which each seat's observation, a row of float32, begins (empty: none do): their pixels, from 0 to 1, by height,
    width and channel, one image after the other, then all other numbers. Networks read them by convolutions.
    `state_size` is the length of the global state (0: none). `scripted_policies` names the scripted players that the
    env offers (see `scripted_actions`). `action_names` names discrete actions, for people who look at a game (empty:
    their numbers are shown), and `seat_colours` are the RGB colours in which `render` draws the seats (empty: none).
    `observation_entities` are the kinds of entities in each seat's observation (empty: unknown), which
    `encoder: attention` and `graph` attend to; all other numbers describe the seat itself.
    """

    name: ClassVar[str] = ""
    seats: tuple[Seat, ...]
    num_envs: int
    observation_shapes: tuple[tuple[int, ...], ...]
    action_spaces: tuple[Space, ...]
    observation_images: tuple[tuple[ImageShape, ...], ...] = ()
    state_size: int = 0
    scripted_policies: tuple[str, ...] = ()
    action_names: tuple[str, ...] = ()
    seat_colours: tuple[tuple[int, int, int], ...] = ()
    observation_entities: tuple[tuple[Entities, ...], ...] = ()

    def adopt_spaces(self, other: Any) -> None:
        """Takes over seats, observation shapes and images, action spaces and size of the state from
        another env, or from a spec that has these attributes."""
        self.seats = other.seats
        self.observation_shapes = other.observation_shapes
        self.observation_images = other.observation_images
        self.action_spaces = other.action_spaces
        self.state_size = other.state_size

    def images_of(self, seat: int) -> tuple[ImageShape, ...]:
        """Returns the shapes of the images with which the rows of a seat begin."""
        return self.observation_images[seat] if self.observation_images else ()

    def sees_image(self, seat: int) -> bool:
        """Returns whether the observation of a seat is an image, or begins with one."""
        return len(self.observation_shapes[seat]) > 1 or bool(self.images_of(seat))

    @property
    def label(self) -> str:
        """The env's name in messages; that of the package's env if it is one."""
        return self.name or type(self).__name__

    @abstractmethod
    def reset(self, seeds: np.ndarray) -> VectorStep:
        """Starts a new stream of episodes in each game. `seeds [B]` are non-negative integers."""

    @abstractmethod
    def step(self, actions: np.ndarray) -> VectorStep:
        """Plays one joint step in every game. `actions` is int32 [B, N] for discrete actions, int32 [B, N, M] for
        multi-discrete, float32 [B, N, D] for continuous ones (clipped to the bounds). Seats with several kinds of
        action spaces share one array [B, N, W], float32 if one of them is continuous, otherwise int32: an action is the
        first numbers of its seat, a discrete one the first."""

    def save(self) -> Arrays | None:
        """Returns everything that `load` needs to continue exactly, as arrays by name; None if the
        env cannot be saved (its games then start anew when a run resumes from a checkpoint)."""
        return None

    def load(self, saved: Mapping[str, np.ndarray]) -> VectorStep:
        """Restores what `save` returned; returns the `VectorStep` of that step.

        Raises ValueError if the env cannot be saved, and GamesDiffer if its games cannot be restored.
        """
        raise ValueError(f"{self.name or type(self).__name__} cannot save its games, so none can be loaded")

    def scripted_actions(self, name: str, seat: int) -> np.ndarray:
        """Returns the actions int32 [B] of the scripted player `name` at seat number `seat` for the current step.

        Raises ValueError if the env has no such scripted player.
        """
        known = ", ".join(self.scripted_policies) or "none"
        raise ValueError(f'env "{self.name}" has no scripted player "{name}"; it has: {known}')

    def render(self, game: int) -> RenderFrame | None:
        """Returns the current position of game number `game` for a person: a picture, uint8 [height, width, 3] (RGB)
        or [height, width] (grey), or a text; None if the env draws nothing."""
        return None

    def close(self) -> None:  # noqa: B027 - most envs hold nothing
        """Releases the resources that the env holds."""
