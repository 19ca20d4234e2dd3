"""Vector env of single games that are stepped one after the other, in this process.

A package's env is adapted to `OneGame`: `GameSpec` describes it, `Moment` is the result of its `reset` and `step`.
`Loop` holds B of them and writes their results into the arrays of a `Frame`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from palestra.envs.vector.base import (
    Arrays,
    Continuous,
    Discrete,
    Frame,
    MultiDiscrete,
    Space,
    VectorEnv,
    empty_frame,
)
from palestra.types import Seat


@dataclass(frozen=True)
class GameSpec:
    """What all games of an env have in common. `views` and `actions` are those of `VectorEnv`. `pixels`: observations
    are uint8, else float32; `masks`: there are action masks; `success`: games report success; `deaths`: seats can
    terminate before their game ends.

    Raises ValueError if the seats have different kinds of action spaces, or observation shapes that do not fit in one
    array.
    """

    seats: tuple[Seat, ...]
    views: tuple[tuple[int, ...], ...]
    actions: tuple[Space, ...]
    state_size: int = 0
    pixels: bool = False
    masks: bool = False
    success: bool = False
    deaths: bool = False

    def __post_init__(self) -> None:
        if len({type(space) for space in self.actions}) > 1:
            raise ValueError(f"the seats {', '.join(self.seats)} have different kinds of actions: wrap the env to one")
        if len({len(view) if len(view) == 1 else view for view in self.views}) > 1:
            raise ValueError(f"the views {self.views} do not fit in one array: only views of one dimension may differ")

    def frame(self, games: int) -> Frame:
        """Returns a frame of zeros for this many games."""
        view = tuple(max(sizes) for sizes in zip(*self.views, strict=True))
        return empty_frame(
            games,
            len(self.seats),
            view,
            actions=max(space.n for space in self.actions if isinstance(space, Discrete)) if self.masks else None,
            state=self.state_size,
            success=self.success,
            deaths=self.deaths,
            dtype=np.uint8 if self.pixels else np.float32,
        )

    def blank_actions(self, games: int) -> np.ndarray:
        """Returns actions of zeros for this many games, in the shape and dtype that `VectorEnv.step` takes."""
        first = self.actions[0]
        if isinstance(first, Discrete):
            return np.zeros((games, len(self.seats)), np.int32)
        width = max(
            len(space.sizes if isinstance(space, MultiDiscrete) else space.low) for space in _wide(self.actions)
        )
        return np.zeros((games, len(self.seats), width), np.float32 if isinstance(first, Continuous) else np.int32)


@dataclass
class Moment:
    """The result of `reset` or `step` of one game, by seat: `views` are the observations (None: unchanged), `acting`
    the agent mask (None: all seats act), `rewards` (None: zero), `legal` the action masks (None: unchanged),
    `seat_terminated` the seats that have terminated in this game so far (None: all if `terminated`, else none)."""

    views: Sequence[np.ndarray | None]
    acting: Sequence[bool] | np.ndarray | None = None
    rewards: Sequence[float] | np.ndarray | None = None
    legal: Sequence[np.ndarray | None] | None = None
    state: np.ndarray | None = None
    terminated: bool = False
    truncated: bool = False
    success: bool = False
    seat_terminated: Sequence[bool] | np.ndarray | None = None


class OneGame(Protocol):
    """One game of a package. `actions [N, ...]` are already legal and within bounds."""

    spec: GameSpec

    def reset(self, seed: int) -> Moment:
        """Starts the episode of `seed`, an integer below 2**31."""

    def step(self, actions: np.ndarray) -> Moment:
        """Plays one joint step; actions of seats that do not act are undefined."""

    def close(self) -> None:
        """Releases the resources that the game holds."""


MakeGame = Callable[[], OneGame]
REPLAYED = 100_000  # steps; replaying longer episodes would take longer than starting anew is worth


class Loop(VectorEnv):
    """B games stepped one after the other in this process.

    The first episode of a game has the game's own seed, so that it equals the package's episode of that seed; later
    seeds derive from it (`game_seed`). The internal state of a package cannot be saved, so `save` returns each game's
    seed and actions, and `load` plays them again: exact if the game is a deterministic function of its seed. `save`
    returns None if an episode is longer than `REPLAYED` steps.

    Raises ValueError if `games` is below 1.
    """

    def __init__(self, make: MakeGame, games: int) -> None:
        at_least_one("games", games)
        self.hosted = [make() for _ in range(games)]
        self.games, self.spec = games, self.hosted[0].spec
        self.seats, self.views, self.actions = self.spec.seats, self.spec.views, self.spec.actions
        self.state_size, self.frame = self.spec.state_size, self.spec.frame(games)
        self._seeds, self._played = np.zeros(games, np.int64), np.zeros(games, np.int64)
        self._made = np.zeros(games, np.int64)  # steps of the running episodes; `_moves` are their actions
        self._moves = np.stack([self.spec.blank_actions(games)] * 64, 1)

    def reset(self, seeds: np.ndarray) -> Frame:
        self._seeds[:], self._played[:] = seeds, 0
        for name in ("rewards", "terminated", "truncated", "success", "seat_terminated"):
            if (array := getattr(self.frame, name)) is not None:
                array[:] = 0
        for b in range(self.games):
            self._begin(b)
        return self.frame

    def step(self, actions: np.ndarray) -> Frame:
        actions, frame = within(self.actions, actions, self.frame.legal), self.frame
        self._note(actions)
        for b, game in enumerate(self.hosted):
            moment = game.step(actions[b])
            self._show(b, moment)
            frame.rewards[b] = 0.0 if moment.rewards is None else moment.rewards
            frame.terminated[b], frame.truncated[b] = moment.terminated, moment.truncated
            if frame.success is not None:
                frame.success[b] = moment.success
            if frame.seat_terminated is not None:
                dead = moment.seat_terminated
                frame.seat_terminated[b] = moment.terminated if dead is None else dead
            if moment.terminated or moment.truncated:
                self._end(b)
        return frame

    def save(self) -> Arrays | None:
        if (self._made > REPLAYED).any():
            return None
        own = {"seeds": self._seeds.copy(), "played": self._played.copy(), "made": self._made.copy()}
        moves = np.concatenate([self._moves[b, :made] for b, made in enumerate(self._made)])
        return own | {"moves": moves} | {f"frame.{name}": array.copy() for name, array in self._arrays().items()}

    def load(self, saved: Mapping[str, np.ndarray]) -> Frame:
        for name, array in self._arrays().items():
            array[:] = saved[f"frame.{name}"]
        self._seeds[:], self._played[:] = saved["seeds"], saved["played"]
        past = np.split(saved["moves"], np.cumsum(saved["made"])[:-1])
        for b, moves in enumerate(past):
            self._begin(b)
            for move in moves:
                self._show(b, self.hosted[b].step(move))
        longest = max(len(moves) for moves in past)
        self._moves = np.zeros((self.games, longest + 64, *self._moves.shape[2:]), self._moves.dtype)
        for b, moves in enumerate(past):
            self._moves[b, : len(moves)], self._made[b] = moves, len(moves)
        return self.frame

    def close(self) -> None:
        for game in self.hosted:
            game.close()

    def _arrays(self) -> Arrays:
        return {name: array for name, array in vars(self.frame).items() if array is not None}

    def _note(self, actions: np.ndarray) -> None:
        """Records the actions of this step, in arrays that double in length when they are full."""
        kept = np.flatnonzero(self._made < REPLAYED)
        if len(kept) and self._made[kept].max() == self._moves.shape[1]:
            self._moves = np.concatenate([self._moves, np.zeros_like(self._moves)], 1)
        self._moves[kept, self._made[kept]] = actions[kept]
        self._made += 1

    def _end(self, b: int) -> None:
        """Copies the last observations of game b to `final_obs` and starts its next episode."""
        frame = self.frame
        frame.final_obs[b] = frame.obs[b]
        if frame.state is not None and frame.final_state is not None:
            frame.final_state[b] = frame.state[b]
        self._played[b] += 1
        self._begin(b)

    def _begin(self, b: int) -> None:
        self.frame.obs[b] = 0
        if self.frame.legal is not None:
            self.frame.legal[b] = False
        self._made[b] = 0
        self._show(b, self.hosted[b].reset(game_seed(int(self._seeds[b]), int(self._played[b]))))

    def _show(self, b: int, moment: Moment) -> None:
        """Writes observations, masks and state of game b into the frame."""
        frame = self.frame
        for row, view in zip(frame.obs[b], moment.views, strict=True):
            if view is not None:
                row[: len(view)] = view
        frame.acting[b] = True if moment.acting is None else moment.acting
        if frame.state is not None:
            frame.state[b] = moment.state
        if frame.legal is not None and moment.legal is not None:
            for row, mask in zip(frame.legal[b], moment.legal, strict=True):
                if mask is not None:
                    row[: len(mask)] = mask


def within(spaces: Sequence[Space], actions: np.ndarray, legal: np.ndarray | None = None) -> np.ndarray:
    """Returns the actions [B, N, ...] moved into their spaces, same dtype: integers to the nearest valid one, illegal
    actions to the first legal one (0 if none is), numbers to the bounds (nan becomes 0, then clipped). `legal` is the
    action mask [B, N, A]."""
    if isinstance(spaces[0], Discrete):
        inside = np.clip(actions, 0, np.array([space.n for space in spaces if isinstance(space, Discrete)]) - 1)
        if legal is None:
            return inside
        fine = np.take_along_axis(legal, inside[..., None], 2)[..., 0]
        return np.where(fine, inside, legal.argmax(2))
    low, high = np.zeros(actions.shape[1:]), np.zeros(actions.shape[1:])
    for n, space in enumerate(_wide(spaces)):
        if isinstance(space, Continuous):
            low[n, : len(space.low)], high[n, : len(space.high)] = space.low, space.high
        else:
            high[n, : len(space.sizes)] = np.array(space.sizes) - 1
    numbers = np.nan_to_num(actions) if actions.dtype.kind == "f" else actions
    return np.clip(numbers, low, high).astype(actions.dtype)


def _wide(spaces: Sequence[Space]) -> list[MultiDiscrete | Continuous]:
    return [space for space in spaces if not isinstance(space, Discrete)]


def game_seed(stream: int, number: int) -> int:
    """Returns the seed, below 2**31, of episode `number` of a stream: for the first one `stream` itself if it is below
    2**31."""
    return stream if number == 0 and stream < 2**31 else derived_seed(stream, number)


def derived_seed(*parts: int) -> int:
    """Returns an integer below 2**31, a deterministic function of the integers `parts`."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0] >> 1)


def at_least_one(option: str, value: int) -> None:
    """Raises ValueError if `value` is below 1; `option` names it."""
    if value < 1:
        raise ValueError(f"{option} is {value}: at least one is needed")
