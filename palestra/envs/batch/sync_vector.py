"""Vector env of single games that are stepped one after the other, in this process.

A package's env is adapted to `SingleEnv`: `VectorEnvSpec` describes it, `SingleStep` is the result of its `reset` and
`step`. `SyncVectorEnv` holds B of them and writes their results into the arrays of a `VectorStep`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np

from palestra.core.types import Seat
from palestra.envs.step_values import number, to_flag
from palestra.envs.support.options import check_at_least
from palestra.envs.vector_base import (
    Arrays,
    Continuous,
    Discrete,
    GamesDiffer,
    ImageShape,
    MultiDiscrete,
    RenderFrame,
    ReportsSuccess,
    Space,
    VectorEnv,
    VectorStep,
    check_observations,
    empty_step,
    zero_actions,
)


@dataclass(frozen=True)
class VectorEnvSpec:
    """Properties shared by all games of an env. `observation_shapes`, `observation_images` and `action_spaces` are
    those of `VectorEnv`. `uint8_observations`: observations are uint8, else float32; `has_action_mask`: there are
    action masks; `reports_success`: games report success, or seats may report their own ("by_seat");
    `has_seat_terminated`: seats can terminate before their game ends.

    Raises ValueError if observation shapes do not fit in one array, and for choices that float32 would round, beside
    seats that give numbers.
    """

    seats: tuple[Seat, ...]
    observation_shapes: tuple[tuple[int, ...], ...]
    action_spaces: tuple[Space, ...]
    state_size: int = 0
    uint8_observations: bool = False
    has_action_mask: bool = False
    reports_success: ReportsSuccess = False
    has_seat_terminated: bool = False
    observation_images: tuple[tuple[ImageShape, ...], ...] = ()

    def __post_init__(self) -> None:
        choices = max((space.n for space in self.action_spaces if isinstance(space, Discrete)), default=0)
        if choices > MAX_EXACT_INTEGER and any(isinstance(space, Continuous) for space in self.action_spaces):
            raise ValueError(
                f"a seat has {choices:,} choices and another gives numbers: they share an array of float32, which "
                f"rounds integers above {MAX_EXACT_INTEGER}: wrap the env so that the choice is a MultiDiscrete"
            )
        check_observations(self)

    def empty_step(self, num_envs: int) -> VectorStep:
        """Returns a step result of zeros for this many games."""
        shape = tuple(max(sizes) for sizes in zip(*self.observation_shapes, strict=True))
        num_actions = None
        if self.has_action_mask:
            num_actions = max(space.n for space in self.action_spaces if isinstance(space, Discrete))
        return empty_step(
            num_envs,
            len(self.seats),
            shape,
            num_actions=num_actions,
            state_size=self.state_size,
            reports_success=self.reports_success,
            has_seat_terminated=self.has_seat_terminated,
            dtype=np.uint8 if self.uint8_observations else np.float32,
        )


@dataclass
class SingleStep:
    """The result of `reset` or `step` of one game, by seat: `observations` (None: unchanged), `agent_mask`,
    `rewards`, `action_mask` (None: unchanged), `seat_terminated` the seats that have terminated in this game so far
    (None: all if `terminated`, else none). `success` is that of the game, or those of the seats (NaN: not reported)."""

    observations: Sequence[np.ndarray | None]
    agent_mask: Sequence[bool] | np.ndarray | bool = True
    rewards: Sequence[float] | np.ndarray | float = 0.0
    action_mask: Sequence[np.ndarray | None] | None = None
    state: np.ndarray | None = None
    terminated: bool = False
    truncated: bool = False
    success: bool | np.ndarray = False
    seat_terminated: Sequence[bool] | np.ndarray | None = None


class SingleEnv(Protocol):
    """One game of a package. `actions [N, ...]` are already legal and within bounds. One that can be shown has a method
    `render`, which returns the current position as `VectorEnv.render` does."""

    spec: VectorEnvSpec

    def reset(self, seed: int) -> SingleStep:
        """Starts the episode of `seed`, an integer below 2**31."""

    def step(self, actions: np.ndarray) -> SingleStep:
        """Plays one joint step; actions of seats that do not act are undefined."""

    def close(self) -> None:
        """Releases the resources that the game holds."""


MakeSingleEnv = Callable[[], SingleEnv]
MAX_EXACT_INTEGER = 2**24  # of float32
MAX_REPLAY_STEPS = 100_000  # longer episodes are not saved: replaying them would take too long


class SyncVectorEnv(VectorEnv):
    """B games stepped one after the other in this process.

    The first episode of a game has the game's own seed, so that it equals the package's episode of that seed; later
    seeds derive from it (`episode_seed`). The internal state of a package cannot be saved, so `save` returns each
    game's seed and actions, and `load` plays them again: exact if the game is a deterministic function of its seed, and
    GamesDiffer if it shows itself not to be. `save` returns None if an episode is longer than `MAX_REPLAY_STEPS`
    steps.

    Raises ValueError if `num_envs` is below 1.
    """

    def __init__(self, make: MakeSingleEnv, num_envs: int) -> None:
        check_at_least("num_envs", num_envs, 1, "nothing is played in fewer")
        self.single_envs = [make() for _ in range(num_envs)]
        self.num_envs = num_envs
        self.spec = self.single_envs[0].spec
        self.adopt_spaces(self.spec)
        self.vector_step = self.spec.empty_step(num_envs)
        self._seeds = np.zeros(num_envs, np.int64)
        self._played = np.zeros(num_envs, np.int64)
        self._made = np.zeros(num_envs, np.int64)  # steps of the running episodes; `_moves` are their actions
        self._moves = np.stack([zero_actions(self.action_spaces, (num_envs,))] * 64, 1)
        self._is_unmasked = np.array([[not isinstance(space, Discrete)] for space in self.action_spaces])  # [N, 1]

    def reset(self, seeds: np.ndarray) -> VectorStep:
        self._seeds[:], self._played[:] = seeds, 0
        self.vector_step.clear_results()
        for b in range(self.num_envs):
            self._begin(b)
        return self.vector_step

    def step(self, actions: np.ndarray) -> VectorStep:
        actions = clip_actions(self.action_spaces, actions, self.vector_step.action_mask)
        vector_step = self.vector_step
        self._record_actions(actions)
        for b, game in enumerate(self.single_envs):
            step = game.step(actions[b])
            self._write_step(b, step)
            vector_step.rewards[b] = step.rewards
            vector_step.terminated[b], vector_step.truncated[b] = step.terminated, step.truncated
            if vector_step.success is not None:
                vector_step.success[b] = step.success
            if vector_step.seat_terminated is not None:
                dead = step.seat_terminated
                vector_step.seat_terminated[b] = step.terminated if dead is None else dead
            if step.terminated or step.truncated:
                self._end(b)
        return vector_step

    def save(self) -> Arrays | None:
        if (self._made > MAX_REPLAY_STEPS).any():
            return None
        own = {"seeds": self._seeds.copy(), "played": self._played.copy(), "made": self._made.copy()}
        actions = np.concatenate([self._moves[b, :made] for b, made in enumerate(self._made)])
        frame = self.vector_step.copy().arrays()
        return own | {"moves": actions} | {f"frame.{name}": array for name, array in frame.items()}

    def load(self, saved: Mapping[str, np.ndarray]) -> VectorStep:
        for name, array in self.vector_step.arrays().items():
            array[:] = saved[f"frame.{name}"]
        self._seeds[:], self._played[:] = saved["seeds"], saved["played"]
        past = np.split(saved["moves"], np.cumsum(saved["made"])[:-1])
        try:
            for b, actions in enumerate(past):
                self._begin(b)
                self._replay(b, actions)
        except GamesDiffer:
            raise
        except Exception as error:  # an action of another game may fail in any way
            raise GamesDiffer(f"{type(error).__name__}: {error}") from error
        for name in ("obs", "agent_mask", "action_mask", "state"):
            array = getattr(self.vector_step, name)
            if array is not None and not np.array_equal(
                array, saved[f"frame.{name}"], equal_nan=array.dtype.kind == "f"
            ):
                raise GamesDiffer(f"{name} after the saved actions differ from those saved")
        longest = max(len(actions) for actions in past)
        self._moves = np.zeros((self.num_envs, longest + 64, *self._moves.shape[2:]), self._moves.dtype)
        for b, actions in enumerate(past):
            self._moves[b, : len(actions)], self._made[b] = actions, len(actions)
        return self.vector_step

    def _replay(self, b: int, actions: np.ndarray) -> None:
        """Plays the actions [T, ...] of the running episode of game b."""
        for count, move in enumerate(actions, 1):
            step = self.single_envs[b].step(move)
            if step.terminated or step.truncated:
                raise GamesDiffer(f"a game ended after {count} of {len(actions)} saved actions")
            self._write_step(b, step)

    def render(self, game: int) -> RenderFrame | None:
        render = getattr(self.single_envs[game], "render", None)
        return render() if render else None

    def close(self) -> None:
        for game in self.single_envs:
            try:
                game.close()
            except Exception as error:  # of an env of the user's: what was played and learned stays
                kind = type(error).__name__
                warnings.warn(f"an env could not be closed: {kind}: {error}", stacklevel=2)

    def _record_actions(self, actions: np.ndarray) -> None:
        """Records the actions of this step, in arrays that double in length when they are full."""
        kept = np.flatnonzero(self._made < MAX_REPLAY_STEPS)
        if len(kept) and self._made[kept].max() == self._moves.shape[1]:
            self._moves = np.concatenate([self._moves, np.zeros_like(self._moves)], 1)
        self._moves[kept, self._made[kept]] = actions[kept]
        self._made += 1

    def _end(self, b: int) -> None:
        """Copies the last observations of game b to `final_obs` and starts its next episode."""
        vector_step = self.vector_step
        vector_step.final_obs[b] = vector_step.obs[b]
        if vector_step.state is not None and vector_step.final_state is not None:
            vector_step.final_state[b] = vector_step.state[b]
        self._played[b] += 1
        self._begin(b)

    def _begin(self, b: int) -> None:
        self.vector_step.obs[b] = 0
        if self.vector_step.action_mask is not None:
            self.vector_step.action_mask[b] = self._is_unmasked
        self._made[b] = 0
        self._write_step(b, self.single_envs[b].reset(episode_seed(int(self._seeds[b]), int(self._played[b]))))

    def _write_step(self, b: int, step: SingleStep) -> None:
        """Writes observations, masks and state of game b into the arrays of the result."""
        vector_step = self.vector_step
        for seat, observation in enumerate(step.observations):
            if observation is not None:
                if self.spec.uint8_observations and observation.dtype != np.uint8:
                    observation = to_bytes(observation, self.seats[seat])
                if observation.shape != self.observation_shapes[seat]:
                    raise ValueError(
                        f'seat "{self.seats[seat]}" sees an array {list(observation.shape)}, and its observation space '
                        f"says {list(self.observation_shapes[seat])}: correct the one or the other"
                    )
                vector_step.obs[b, seat][: len(observation)] = observation
        vector_step.agent_mask[b] = step.agent_mask
        if vector_step.state is not None:
            vector_step.state[b] = step.state
        if vector_step.action_mask is not None and step.action_mask is not None:
            for row, mask in zip(vector_step.action_mask[b], step.action_mask, strict=True):
                if mask is not None:
                    row[: len(mask)] = mask


def clip_actions(
    action_spaces: Sequence[Space], actions: np.ndarray, action_mask: np.ndarray | None = None
) -> np.ndarray:
    """Returns the actions [B, N, ...] moved into their spaces, same dtype: integers to the nearest
    valid one, illegal actions to the first legal one (0 if none is), numbers to the bounds (nan
    becomes 0, then clipped). `action_mask` is the action mask [B, N, A]."""
    if actions.ndim == 2:
        inside = np.clip(actions, 0, np.array([space.n for space in action_spaces if isinstance(space, Discrete)]) - 1)
        if action_mask is None:
            return inside
        fine = np.take_along_axis(action_mask, inside[..., None], 2)[..., 0]
        return np.where(fine, inside, action_mask.argmax(2))
    low = np.zeros(actions.shape[1:])
    high = np.zeros(actions.shape[1:])
    for n, space in enumerate(action_spaces):
        if isinstance(space, Continuous):
            low[n, : space.width], high[n, : space.width] = space.low, space.high
        else:
            sizes = space.sizes if isinstance(space, MultiDiscrete) else (space.n,)
            high[n, : len(sizes)] = np.array(sizes) - 1
    clipped = np.clip(np.nan_to_num(actions), low, high).astype(actions.dtype)
    if action_mask is not None:
        for n, space in enumerate(action_spaces):
            if isinstance(space, Discrete):
                own = clipped[:, n : n + 1, 0].astype(np.int64)
                clipped[:, n : n + 1, 0] = clip_actions((space,), own, action_mask[:, n : n + 1])
    return clipped


def to_bytes(pixels: np.ndarray, seat: Seat) -> np.ndarray:
    """Returns the pixels that a seat sees as uint8. Raises ValueError if they are no bytes."""
    converted = pixels.astype(np.uint8)
    if not np.array_equal(converted, pixels):
        raise ValueError(
            f'seat "{seat}" sees pixels from {pixels.min():g} to {pixels.max():g} of {pixels.dtype}, and its '
            "observation space says bytes: correct the one or the other"
        )
    return converted


def to_reward(value: Any, seat: Seat) -> float:
    """Returns a reward as a number; an array of one number is one too. Raises ValueError for anything else."""
    if isinstance(value, float):
        return float(value)
    shape = getattr(value, "shape", ())
    if shape and prod(shape) == 1:
        value = np.asarray(value).ravel()[0]
    if (reward := number(value)) is None:
        raise ValueError(
            f'seat "{seat}" is paid {value!r:.60}, which is not a number: pay 0.0 where there is no reward'
        )
    return reward


def require_flag(value: Any, name: str) -> bool:
    """Returns the truth value of a flag called `name`. Raises ValueError for a text, None, or a
    number that is neither 0 nor 1."""
    if (flag := to_flag(value)) is None:
        raise ValueError(f"{name} is {value!r:.60}: give True or False")
    return flag


def to_array(value: Any, what: str = "an observation") -> np.ndarray:
    """Returns a value for networks as an array. Raises ValueError for one that loses a part in
    float32: the mask of a masked array, imaginary parts, and digits of large integers."""
    array = np.asarray(value)
    kind = array.dtype.kind
    if isinstance(value, np.ma.MaskedArray):
        raise ValueError(f"{what} is a masked array, and networks see no mask: fill it, and show its mask as numbers")
    if kind == "c":
        raise ValueError(f"{what} has complex numbers: show real and imaginary parts as numbers of their own")
    if kind in "mM":
        raise ValueError(f"{what} has dates or durations: show them as numbers, in a unit of your own")
    if kind in "iu" and array.itemsize > 2 and array.size:
        largest = max(int(array.max()), -int(array.min()))
        if largest > MAX_EXACT_INTEGER:
            raise ValueError(
                f"{what} has an integer of size {largest}, and float32 rounds those above {MAX_EXACT_INTEGER}: scale "
                "it, or show its digits as numbers of their own"
            )
    return array


def to_action_mask(mask: Any, space: Discrete, seat: Seat) -> np.ndarray:
    """Returns an action mask as bool [actions]. Raises ValueError for another length, and for
    values other than 0 and 1, such as those that are added to logits."""
    given = to_array(mask, f'the action_mask of seat "{seat}"')
    legal = given.astype(bool)
    # bytes are compared in a fifth of the time of arrays
    is_odd = given.tobytes() != legal.tobytes() if given.itemsize == 1 else not (given == legal).all()
    if is_odd or given.shape != (space.n,):
        raise ValueError(
            f'seat "{seat}" has the action_mask {given.tolist()!r:.60}: give {space.n} values, 1 for each legal action'
            " and 0 for each other"
        )
    return legal


def episode_seed(stream: int, number: int) -> int:
    """Returns the seed, below 2**31, of episode `number` of a stream: for the first one `stream`
    itself if it is below 2**31."""
    if number == 0 and stream < 2**31:
        return stream
    return combine_seeds(stream, number)


def combine_seeds(*parts: int) -> int:
    """Returns an integer below 2**31, a deterministic function of the integers `parts`."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0] >> 1)
