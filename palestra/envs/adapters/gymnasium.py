"""Gymnasium environments as vector envs, and conversion of spaces in both directions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeGuard

import gymnasium
import numpy as np
from gymnasium import spaces

from palestra.core.config.user_modules import import_object
from palestra.envs.adapters.observations import (
    ObsEncoder,
    encode_float32,
    encode_grid,
    encode_image,
    encode_parts,
    encode_scaled,
    fit_in_one_array,
    image_shape,
    images_by_seat,
    row_encoder,
)
from palestra.envs.adapters.wrappers import Wrappers, reset_arguments, wrap
from palestra.envs.batch.subproc_vector import PackageVectorEnv
from palestra.envs.batch.sync_vector import SingleStep, VectorEnvSpec, require_flag, to_action_mask, to_array, to_reward
from palestra.envs.step_values import number
from palestra.envs.vector_base import Continuous, Discrete, MultiDiscrete, RenderFrame, Space

MAX_PIXEL_RANGE = 65_535  # of 16 bits; wider bounds are the range of a dtype, not of pixels
HIGHLIGHT = re.compile(r"\x1b\[[\d;]+m(.*?)\x1b\[0m")  # colours of a terminal, around what a text emphasises
RENDER_MODES = ("rgb_array", "ansi")  # those whose result can be recorded
RESULT_NAMES = {2: "observation, info", 5: "observation, reward, terminated, truncated, info"}  # by their number
EMPTY = "{label} sees {space}, which has no part: wrap the env so that it shows a number at least"
MAX_INTEGER_CHOICES = 4096  # values of all integers of an action together: a network has an output for each


class ActionDecoder(NamedTuple):
    """Action decoder of one seat: its action space, and `decode`, the function from an action array
    to a value of the Gymnasium space."""

    space: Space
    decode: Callable[[np.ndarray], Any]


def obs_encoder(space: spaces.Space[Any], label: str) -> ObsEncoder:
    """Returns the encoder of an observation space. Images (at least 36 x 36 pixels, channels first or last) stay images
    with channels last, stacks become one image with the channels of all, and all but bytes (uint8 up to 255) are scaled
    from the bounds of their Box, if it has some, to 0 to 1. Anything else becomes one row float32: discrete values
    one-hot, bytes divided by 255; of dictionaries and tuples the images come first, then the rows of the other parts.

    `label` names the seat in errors. Raises ValueError for texts and varying sizes.
    """
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        shape = space.shape
        if 0 in shape:
            raise ValueError(EMPTY.format(label=label, space=space))
        pixels = _is_bytes(space)
        if (stored := image_shape(shape)) is not None:
            encode = _unit_scaled(partial(encode_image, order=stored[1], shape=stored[0]), space)
            return ObsEncoder(stored[0], pixels, encode)
        if len(shape) == 1 and not pixels:
            return ObsEncoder(shape, False, encode_float32)
        scale = 1 / 255 if pixels else 1.0
        return ObsEncoder((int(np.prod(shape)),), False, partial(encode_grid, shape=shape, scale=scale))
    if isinstance(space, spaces.Text):
        raise ValueError(
            f"{label} sees {space}, a text: small networks read numbers; wrap the env so that it encodes it"
        )
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return _joined_encoder(space, label)
    if not space.is_np_flattenable or isinstance(space, spaces.OneOf):
        raise ValueError(f"{label} sees {space}, whose size is not fixed: wrap the env so that it has one")
    return ObsEncoder((spaces.flatdim(space),), False, partial(_flat, space))


def _is_bytes(space: spaces.Box | spaces.MultiBinary) -> bool:
    """True for a Box of uint8 up to 255. Flags and counts may be uint8 too; divided by 255 they would hardly differ."""
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and int(space.high.max(initial=0)) == 255


def _unit_scaled(encode: Callable[[Any], np.ndarray], space: spaces.Box | spaces.MultiBinary) -> Callable[..., Any]:
    """Returns `encode` with pixels scaled from the bounds of `space` to 0 to 1, as convolutions
    want floats; `encode` itself if they are bytes, are in 0 to 1 already, or have no bounds."""
    if not isinstance(space, spaces.Box) or _is_bytes(space):
        return encode
    low = float(space.low.min())
    high = float(space.high.max())
    if (low, high) == (0.0, 1.0) or not 0 < high - low <= MAX_PIXEL_RANGE:
        return encode
    return partial(encode_scaled, encode=encode, low=np.float32(low), scale=np.float32(1 / (high - low)))


def _joined_encoder(space: spaces.Dict | spaces.Tuple[Any], label: str) -> ObsEncoder:
    """Returns the encoder of a dictionary or tuple: its images, then the other numbers of its
    parts, one after the other."""
    keys = list(space.spaces) if isinstance(space, spaces.Dict) else list(range(len(space.spaces)))
    if not keys:
        raise ValueError(EMPTY.format(label=label, space=space))
    parts = []
    for key in keys:
        named = f"{label}, part {key!r},"
        parts.append((key, row_encoder(obs_encoder(space.spaces[key], named), named)))  # type: ignore[index]
    size = sum(part.shape[0] for _, part in parts)
    images = tuple(chain.from_iterable(part.images for _, part in parts))
    return ObsEncoder((size,), False, partial(encode_parts, parts), images)


def _flat(space: spaces.Space[Any], value: Any) -> np.ndarray:
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):  # else another place of the row would be 1
        places = to_array(value) - space.start
        sizes = space.n if isinstance(space, spaces.Discrete) else space.nvec
        is_whole = places.dtype.kind in "biu" and np.size(value) == np.size(sizes)
        if not is_whole or not ((places >= 0) & (places < sizes)).all():
            raise ValueError(f"the observation {value!r:.60} is not in {space}: correct the one or the other")
    return np.asarray(spaces.flatten(space, value), np.float32)


def action_decoder(space: spaces.Space[Any], label: str) -> ActionDecoder:
    """Returns the decoder of an action space; `label` names the seat in errors. A Box of integers becomes
    MultiDiscrete. Raises ValueError for spaces other than Discrete, MultiDiscrete, MultiBinary and bounded Box, and for
    a Box of integers with more than `MAX_INTEGER_CHOICES` values."""
    if isinstance(space, spaces.Discrete):
        return ActionDecoder(Discrete(int(space.n)), partial(_index, start=int(space.start)))
    if isinstance(space, spaces.MultiDiscrete):
        sizes = tuple(int(n) for n in space.nvec.reshape(-1))
        return ActionDecoder(
            MultiDiscrete(sizes), partial(_indices, start=space.start, shape=space.shape, dtype=space.dtype)
        )
    if isinstance(space, spaces.MultiBinary):
        sizes = (2,) * int(np.prod(space.shape))
        return ActionDecoder(MultiDiscrete(sizes), partial(_indices, start=0, shape=space.shape, dtype=space.dtype))
    if is_integer_box(space):
        return _integer_decoder(space, label)
    if isinstance(space, spaces.Box) and space.is_bounded():
        low, high = (tuple(float(number) for number in bound.reshape(-1)) for bound in (space.low, space.high))
        # bounds in float64 may be narrower than in float32, in which actions were clipped to them
        bounds = (space.low, space.high) if space.dtype == np.float64 else None
        return ActionDecoder(Continuous(low, high), partial(_box, shape=space.shape, dtype=space.dtype, bounds=bounds))
    raise ValueError(f"{label} acts in {space}: it must be choices or bounded numbers; wrap the env so that it is")


def is_integer_box(space: spaces.Space[Any]) -> TypeGuard[spaces.Box]:
    """True for a Box of integers."""
    return isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.integer)


def _integer_decoder(space: spaces.Box, label: str) -> ActionDecoder:
    """Returns the decoder of a Box of integers. Real numbers between the bounds would be truncated
    to integers, so that the highest integer would hardly ever be played."""
    bounds = zip(space.low.reshape(-1).tolist(), space.high.reshape(-1).tolist(), strict=True)
    sizes = tuple(int(high) - int(low) + 1 for low, high in bounds)
    if sum(sizes) > MAX_INTEGER_CHOICES:
        raise ValueError(
            f"{label} acts in {space}, integers of {sum(sizes):,} values in all, more than {MAX_INTEGER_CHOICES:,}: "
            "wrap the env so that it takes fewer, or a Box of floats that it rounds itself"
        )
    decode = partial(_indices, start=space.low, shape=space.shape, dtype=space.dtype)
    return ActionDecoder(MultiDiscrete(sizes), decode)


def _index(action: np.ndarray, start: int) -> int:
    if action.ndim:  # in an array of actions of several kinds
        action = action[0]
    return int(action) + start


def _indices(action: np.ndarray, start: Any, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    size = int(np.prod(shape))
    return (action[:size].reshape(shape) + start).astype(dtype)


def _box(
    action: np.ndarray, shape: tuple[int, ...], dtype: Any, bounds: tuple[np.ndarray, np.ndarray] | None
) -> np.ndarray:
    value = action[: int(np.prod(shape))].reshape(shape).astype(dtype)
    if bounds is None:
        return value
    return np.clip(value, *bounds)


def observation_box(shape: tuple[int, ...], is_uint8: bool) -> spaces.Box:
    """Returns the Gymnasium space of observations of this shape: uint8 if `is_uint8`, else unbounded float32."""
    if is_uint8:
        return spaces.Box(0, 255, shape, np.uint8)
    return spaces.Box(-np.inf, np.inf, shape, np.float32)


def flat_box_size(space: Any) -> int:
    """Returns the length of a one-dimensional Box; 0 for any other space and for None."""
    return space.shape[0] if isinstance(space, spaces.Box) and len(space.shape) == 1 else 0


def with_action_mask(observation: spaces.Space[Any], num_actions: int) -> spaces.Dict:
    """Returns a Dict space of `observation` and `action_mask` (int8 [actions]), as in PettingZoo."""
    return spaces.Dict({"observation": observation, "action_mask": spaces.Box(0, 1, (num_actions,), np.int8)})


def split_action_mask(space: spaces.Space[Any]) -> tuple[spaces.Space[Any], bool]:
    """Returns the observation space without its action mask, and whether it had one. Of a dictionary with an
    `action_mask` these are all other parts, or the part `observation` if it is the only one."""
    if not isinstance(space, spaces.Dict) or "action_mask" not in space.spaces:
        return space, False
    rest = {key: part for key, part in space.spaces.items() if key != "action_mask"}
    return rest["observation"] if list(rest) == ["observation"] else spaces.Dict(rest), True


def without_action_mask(value: dict[str, Any]) -> Any:
    """Returns what the encoder of the space of `split_action_mask` reads, from a dictionary with an `action_mask`."""
    return value["observation"] if set(value) == {"observation", "action_mask"} else value


def can_use_action_masks(masked_spaces: Sequence[Space | None], label: str) -> bool:
    """Returns whether the env gives action masks; `masked_spaces` are the action spaces of those
    who get one each (None: several seats together). Raises ValueError if one of them is not
    Discrete: its mask could not be used, and forbidden actions would be taken."""
    if not all(isinstance(space, Discrete) for space in masked_spaces):
        fix = "wrap the env so that its actions are Discrete, or so that it takes any action and gives no action_mask"
        raise ValueError(f"{label} gives an action_mask, which is only used for one Discrete action of a seat: {fix}")
    return bool(masked_spaces)


def refuse_late_mask(label: str) -> NoReturn:
    """Raises ValueError for an action mask in an info of an env whose first reset gave none."""
    raise ValueError(
        f"{label} gives an action_mask in the info of a step and gave none in that of its first reset, so it would not "
        "be used: give one in every info, or in none"
    )


def read_result(result: Any, length: int, method: str) -> Any:
    """Returns the result of an env's `reset` or `step`. Raises ValueError unless it has as many
    values as Gymnasium's and PettingZoo's current ones, and an info."""
    shown = f"a {type(result).__name__}"
    if isinstance(result, tuple | list):
        if len(result) == length and isinstance(result[-1], dict):
            return result
        shown = f"{len(result)} values"
    raise ValueError(f"{method} returned {shown}: return ({RESULT_NAMES[length]}), with a dictionary as info")


def check_by_agent(env: Any, **parts: Any) -> None:
    """Raises ValueError for a part of the result of PettingZoo's parallel env that is no dictionary."""
    for name, part in parts.items():
        if not isinstance(part, Mapping):
            kind = type(part).__name__
            raise ValueError(f"{env} returned {name} as a {kind}: a ParallelEnv gives a dictionary by agent")


def render_package_env(env: Any) -> RenderFrame | None:
    """Returns what an env of Gymnasium or PettingZoo draws with the render mode rgb_array (a
    picture) or ansi (a text); None with any other. Raises ValueError if it draws something else."""
    if getattr(env, "render_mode", None) not in RENDER_MODES:
        return None
    drawn = env.render()
    if isinstance(drawn, str):
        return HIGHLIGHT.sub(r"[\1]", drawn)
    if isinstance(drawn, np.ndarray):
        return drawn
    raise ValueError(f"{env}.render returned a {type(drawn).__name__}: return a picture (rgb_array) or a text (ansi)")


def gymnasium_space(space: Space) -> spaces.Space[Any]:
    """Returns the Gymnasium space of an action space."""
    if isinstance(space, Discrete):
        return spaces.Discrete(space.n)
    if isinstance(space, MultiDiscrete):
        return spaces.MultiDiscrete(list(space.sizes))
    return spaces.Box(np.array(space.low, np.float32), np.array(space.high, np.float32), dtype=np.float32)


def seat_spaces(space: spaces.Space[Any]) -> list[spaces.Space[Any]]:
    """Returns the spaces of the seats: the parts of a Tuple space, or the space itself as one."""
    return list(space.spaces) if isinstance(space, spaces.Tuple) else [space]


class GymnasiumGame:
    """One Gymnasium env. If its action space is a Tuple, each part is a seat ("agent_0", ...); else the one seat is
    "agent".

    A scalar reward goes to every seat, a list has one entry per seat; likewise for `terminated`, `truncated` and the
    `is_success` of an info. A seat that ends before the others does not act again, gets no further reward and keeps its
    last observation. A seat that is terminated and truncated in one step counts as terminated. If an observation is a
    dictionary with an `action_mask`, its other parts are observed (see `split_action_mask`); else `action_mask` of the
    info is used if the info of the first reset has it, and then every info must. `is_success` is used if that info has
    it, or that of a first step (which is not tried if actions are masked).
    """

    def __init__(self, make: Callable[[], gymnasium.Env], reset_options: dict[str, Any] | None = None) -> None:
        self.env = make()
        self.reset_arguments = reset_arguments(reset_options)
        self.is_multi_agent = several = isinstance(self.env.action_space, spaces.Tuple)
        self.action_decoders = [action_decoder(part, "a seat") for part in seat_spaces(self.env.action_space)]
        count = len(self.action_decoders)
        seats: tuple[str, ...] = ("agent",)
        seen = [self.env.observation_space]
        if several:
            seats = tuple(f"agent_{n}" for n in range(count))
            seen = seat_spaces(self.env.observation_space)
        split = [split_action_mask(part) for part in seen]
        self.has_dict_obs = [is_masked for _, is_masked in split]
        if len(split) != count:
            raise ValueError(
                f"{self.env} acts in a Tuple, of which each part is a seat, and shows {len(split)} observation(s) "
                f"for {count} seats: wrap the env so that one agent acts in one space, such as "
                "MultiDiscrete, or that each of several sees its part of a Tuple"
            )
        self.obs_encoders = fit_in_one_array([obs_encoder(part, "a seat") for part, _ in split], seats)
        _, info = read_result(self.env.reset(seed=0, **self.reset_arguments), 2, f"{self.env}.reset")
        kinds = tuple(choice.space for choice in self.action_decoders)
        masked_spaces: list[Space | None] = []
        if any(self.has_dict_obs):
            masked_spaces += [kind for kind, is_masked in zip(kinds, self.has_dict_obs, strict=True) if is_masked]
        elif "action_mask" in info:
            masked_spaces.append(None if several else kinds[0])
        success: Any = info.get("is_success")
        if success is None and not masked_spaces:
            # plays one step of random actions
            self.env.action_space.seed(0)
            result = self.env.step(self.env.action_space.sample())
            success = read_result(result, 5, f"{self.env}.step")[-1].get("is_success")
        self.spec = VectorEnvSpec(
            seats,
            tuple(encoder.shape for encoder in self.obs_encoders),
            kinds,
            uint8_observations=all(encoder.is_uint8 for encoder in self.obs_encoders),
            has_action_mask=can_use_action_masks(masked_spaces, str(self.env)),
            reports_success="by_seat" if several and np.size(success) > 1 else success is not None,
            has_seat_terminated=several,
            observation_images=images_by_seat(self.obs_encoders),
        )

    def reset(self, seed: int) -> SingleStep:
        self.seats_done, self.seats_terminated = np.zeros((2, len(self.action_decoders)), bool)
        seen, info = read_result(self.env.reset(seed=seed, **self.reset_arguments), 2, "reset")
        return self._build_step(seen, info, self.seats_done)

    def step(self, actions: np.ndarray) -> SingleStep:
        written = [choice.decode(action) for choice, action in zip(self.action_decoders, actions, strict=True)]
        result = self.env.step(tuple(written) if self.is_multi_agent else written[0])
        seen, reward, ended, cut, info = read_result(result, 5, "step")
        terminated = self.flags(ended, "terminated")
        truncated = self.flags(cut, "truncated")
        rewards = np.where(self.seats_done, 0.0, self.rewards(reward, info))
        gone = self.seats_done
        self.seats_terminated = self.seats_terminated | (~gone & terminated)
        self.seats_done = gone | terminated | truncated
        step = self._build_step(seen, info, gone)
        step.rewards = rewards
        step.seat_terminated = self.seats_terminated
        if self.seats_done.all():
            step.terminated = bool(self.seats_terminated.all())
            step.truncated = not step.terminated
        return step

    def rewards(self, reward: Any, info: dict[str, Any]) -> Sequence[float]:
        seats = self.spec.seats
        if number(reward) is not None or np.size(reward) == 1:
            return [to_reward(reward, seats[0])] * len(seats)
        if not isinstance(reward, list | tuple | np.ndarray) or len(reward) != len(seats):
            raise ValueError(f"a step pays {reward!r:.60}: pay one number, or one for each of {len(seats)} seats")
        return [to_reward(part, seat) for part, seat in zip(reward, seats, strict=True)]

    def flags(self, value: Any, name: str) -> np.ndarray:
        """Returns a flag, or one for each seat, as bool [1] or [seats]."""
        if np.size(value) == 1:
            return np.array([require_flag(value, name)])
        if np.shape(value) != (len(self.spec.seats),):
            raise ValueError(f"{name} is {value!r:.60}: give one flag, or one for each of {len(self.spec.seats)} seats")
        return np.array([require_flag(flag, name) for flag in value])

    def render(self) -> RenderFrame | None:
        return render_package_env(self.env)

    def close(self) -> None:
        self.env.close()

    def _build_step(self, seen: Any, info: dict[str, Any], gone: np.ndarray) -> SingleStep:
        """Encodes the observations of all seats except those that had ended before (`gone`)."""
        if not self.spec.has_action_mask and "action_mask" in info:
            refuse_late_mask(str(self.env))
        if not self.spec.reports_success and "is_success" in info:
            raise ValueError(
                f"{self.env} gives is_success in the info of a step and gave none in that of its first reset, so it "
                "would not be counted: give False there, or give none"
            )
        parts = seen if self.is_multi_agent else [seen]
        plain = [without_action_mask(part) if own else part for part, own in zip(parts, self.has_dict_obs, strict=True)]
        rows = zip(self.obs_encoders, plain, gone, strict=True)
        return SingleStep(
            [None if left else encoder.encode(part) for encoder, part, left in rows],
            ~self.seats_done,
            action_mask=self._action_masks(parts, info),
            success=self._success(info.get("is_success", False)),
        )

    def _success(self, value: Any) -> bool | np.ndarray:
        if self.spec.reports_success != "by_seat":
            return require_flag(value, "is_success")
        return np.broadcast_to(self.flags(value, "is_success"), len(self.spec.seats))

    def _action_masks(self, parts: Sequence[Any], info: dict[str, Any]) -> list[np.ndarray | None] | None:
        """Returns the action mask of each seat, None if it is not known and the game is over; None if the env has none.
        Raises ValueError if the info has none although the info of the first reset had one."""
        if not self.spec.has_action_mask:
            return None
        if any(self.has_dict_obs):
            kinds = zip(parts, self.has_dict_obs, self.spec.action_spaces, self.spec.seats, strict=True)
            masks: list[np.ndarray | None] = []
            for part, is_masked, space, seat in kinds:
                if not isinstance(space, Discrete):
                    masks.append(None)
                else:
                    masks.append(
                        to_action_mask(part["action_mask"], space, seat) if is_masked else np.ones(space.n, bool)
                    )
            return masks
        if "action_mask" in info:
            (space,) = self.spec.action_spaces
            assert isinstance(space, Discrete)
            return [to_action_mask(info["action_mask"], space, self.spec.seats[0])]
        if self.seats_done.all():
            return [None]
        raise ValueError(
            f"{self.env} gave an action_mask in the info of its first reset and gives none now: give one in "
            "every info, or in none"
        )


def make_gymnasium_env(id: str, options: dict[str, Any] | None = None, wrappers: Wrappers = None) -> gymnasium.Env:
    """Returns `gymnasium.make(id, **options)` without the env checker, or for "module:Class" an instance of the class,
    within `wrappers`. Raises ValueError if the env cannot be made or wrapped."""
    make: Callable[..., Any] = partial(gymnasium.make, id, disable_env_checker=True)
    try:
        with suppress(AttributeError):  # at "module:Env-v0", which Gymnasium imports
            if ":" in id:
                make = import_object(id)
        env = make(**(options or {}))
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise ValueError(f'Gymnasium cannot make "{id}" with {options or "no options"}: {error}') from error
    return wrap(env, wrappers, "gymnasium.wrappers")


def games_of(make: Callable[[], gymnasium.Env], num_envs: int, label: str) -> PackageVectorEnv:
    """Returns `num_envs` copies of the Gymnasium env that `make` makes, as a vector env."""
    return PackageVectorEnv(partial(GymnasiumGame, make), num_envs, 0, label)


class GymnasiumEnv(PackageVectorEnv):
    """The Gymnasium env `id` ("module:id" of the module that registers it, or "module:Class"), made
    with `options`, in `wrappers`: Gymnasium's by name or "module:Class", from the inside outwards,
    with their options. Every reset gets `reset_options`."""

    name: ClassVar[str] = "gymnasium"

    def __init__(
        self,
        num_envs: int = 16,
        *,
        id: str = "CartPole-v1",
        options: dict[str, Any] | None = None,
        reset_options: dict[str, Any] | None = None,
        wrappers: list[dict[str, Any]] | None = None,
        num_processes: int = 0,
    ) -> None:
        make = partial(make_gymnasium_env, id, options, wrappers)
        super().__init__(partial(GymnasiumGame, make, reset_options), num_envs, num_processes, id)
