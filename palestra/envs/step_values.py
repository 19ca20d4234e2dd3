"""Checks what an env's step holds: rewards that are numbers of known seats, a success that is one, and observations and
info that can be stored. A rollout checks every step, `check_env` does so before."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np

from palestra.core.chat import Chat
from palestra.core.http.calls import parse_conversation
from palestra.core.plain_values import plain_value, short_repr
from palestra.core.types import Seat, Step
from palestra.envs.reward_terms import REWARD_TERMS_KEY, TEAM_TERMS_KEY

SUCCESS_KEY = "success"  # key in the info of an episode's last step


def checked_step(step: Step, env: str, seats: Iterable[Seat]) -> Step:
    """Returns a step of the env called `env`, which has these `seats`, with rewards as floats and
    info as it is stored (core/plain_values.py). Raises ValueError, with the env's name, for rewards
    of unknown seats, rewards that are not finite numbers, a success that is not a truth value or a
    number from 0 to 1, or such values by seat, and what cannot be stored."""
    known = list(seats)
    for part in ("observations", "rewards", "info"):
        if not isinstance(getattr(step, part), Mapping):
            shown = short_repr(getattr(step, part))
            raise ValueError(f'env "{env}" gives {shown} as {part} of a step: give a dictionary, which may be empty')
    terms = step.info.get(REWARD_TERMS_KEY) or {}
    if unknown := [seat for seat in [*step.rewards, *terms] if seat not in known]:
        raise ValueError(
            f'env "{env}" gives a reward to seat {unknown[0]!r}, and its seats are {", ".join(known)}: correct the name'
        )
    rewards = {seat: _reward(reward, env, f'seat "{seat}"') for seat, reward in step.rewards.items()}
    info: dict[str, Any] = {}
    for key, value in step.info.items():
        stored = _check_storable(env, f"info[{key!r}]", {key: value})
        if stored.keys() & info.keys():
            raise ValueError(f'env "{env}" puts two keys that are {str(key)!r} as text into info: rename one')
        info |= stored
    if terms:
        info[REWARD_TERMS_KEY] = {
            seat: {name: _reward(value, env, f'seat "{seat}" ({name})') for name, value in own.items()}
            for seat, own in terms.items()
        }
    if team := info.get(TEAM_TERMS_KEY):
        info[TEAM_TERMS_KEY] = {name: _reward(value, env, f"the team ({name})") for name, value in team.items()}
    _check_success(info.get(SUCCESS_KEY), env, known)
    check_observations(step.observations, env)
    step = replace(
        step,
        observations=_own_observations(step.observations),
        rewards=rewards,
        team_reward=_reward(step.team_reward, env, "the team"),
        info=info,
    )
    _check_flags(step, env, known)
    return step


def _own_observations(observations: Mapping[Seat, Any]) -> dict[Seat, Any]:
    """Returns copies of observations, which an env may change in its next step."""
    own = {}
    for seat, seen in observations.items():
        own[seat] = seen if isinstance(seen, str | Chat) else copy.deepcopy(seen)
    return own


def _check_success(success: Any, env: str, seats: Collection[Seat]) -> None:
    """Raises ValueError, with the env's name, for a success that is none, and for that of unknown seats."""
    values = [success]
    if isinstance(success, Mapping):
        values = list(success.values())
        if unknown := [seat for seat in success if seat not in seats]:
            raise ValueError(
                f'env "{env}" reports the success of seat {short_repr(unknown[0])}, and its seats are '
                f"{', '.join(seats)}: correct the name"
            )
    for value in values:
        if value is not None and not is_share(value):
            raise ValueError(
                f'env "{env}" reports the success {short_repr(value)} ({type(value).__name__}) in its info: give True, '
                "False or a number from 0 to 1, or such values by seat"
            )


def _check_flags(step: Step, env: str, seats: Collection[Seat]) -> None:
    """Raises ValueError, with the env's name, for flags that are none, flags and legal actions of
    unknown seats, and a cut-off of an episode that goes on."""
    invalid = step.info.get("invalid")
    reason = step.info.get("why_invalid")
    named = [*(step.legal_actions or ())]
    flags = [step.truncated, step.info.get("no_reward") or False]
    if isinstance(invalid, Mapping):
        named += invalid
        flags += invalid.values()
    elif isinstance(invalid, list | tuple | set):
        named += invalid
    else:
        flags.append(invalid or False)
    if isinstance(reason, Mapping):
        named += reason
    if wrong := [flag for flag in flags if to_flag(flag) is None]:
        raise ValueError(
            f'env "{env}" gives {short_repr(wrong[0])} where True or False is meant (truncated, info["invalid"] for '
            'the step or by seat, info["no_reward"])'
        )
    if unknown := [seat for seat in named if seat not in seats]:
        raise ValueError(
            f'env "{env}" names seat {short_repr(unknown[0])} as invalid or with legal actions, and its seats are '
            f"{', '.join(seats)}: correct the name"
        )
    listed: Mapping[Seat, Any] = step.legal_actions or {}  # of a user's env: of any type
    for seat, actions in listed.items():
        if actions is None or isinstance(actions, str) or (seat in step.observations and not len(actions)):
            raise ValueError(
                f'env "{env}" gives seat "{seat}" the legal actions {short_repr(actions)}: list one or more, or leave '
                "out a seat that may say anything"
            )
    if step.truncated and step.observations:
        raise ValueError(
            f'env "{env}" cuts an episode off (truncated) and shows {", ".join(step.observations)} an observation: '
            "return no observations when an episode has ended"
        )


def check_observations(observations: Mapping[Seat, Any], env: str) -> None:
    """Raises ValueError, with the env's name, for an observation that is none, a list of messages
    (which would become the text of a Python list), or one that cannot be stored."""
    for seat, seen in observations.items():
        is_list = isinstance(seen, list | tuple) and any(isinstance(part, dict) for part in seen)
        if seen is None or is_list:
            raise ValueError(
                f'env "{env}" shows seat "{seat}" {short_repr(seen)}, which no prompt can show as it is meant: return '
                "a text, or for messages Chat(tuple(messages)) of palestra.core.chat"
            )
        _check_storable(env, f'the observation of seat "{seat}"', vars(seen) if isinstance(seen, Chat) else seen)
        if isinstance(seen, Chat) and seen.messages:
            try:
                parse_conversation(list(seen.messages), list(seen.tools))
            except ValueError as error:
                raise ValueError(f'env "{env}" shows seat "{seat}" a conversation in which {error}') from None


def is_share(value: Any) -> bool:
    """Returns whether `value` is a truth value or a number from 0 to 1."""
    return isinstance(value, bool | int | float) and 0 <= value <= 1


def to_flag(value: Any) -> bool | None:
    """Returns a truth value, or a number that is 0 or 1, as a truth value; None for anything else."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.ravel()[0]
    return {0.0: False, 1.0: True}.get(number(value))  # type: ignore[arg-type]


def number(value: Any) -> float | None:
    """Returns a number of Python, NumPy or a tensor without dimensions as a float; None for anything else."""
    is_text = isinstance(value, np.ndarray | np.generic) and value.dtype.kind not in "biuf"
    if is_text or not (isinstance(value, Real | Decimal) or getattr(value, "shape", None) == ()):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _reward(value: Any, env: str, payee: str) -> float:
    reward = number(value)
    if reward is None or not math.isfinite(reward):
        raise ValueError(
            f'env "{env}" gives {payee} a reward of {short_repr(value)} ({type(value).__name__}): rewards must be '
            "finite numbers"
        )
    return reward


def _check_storable(env: str, where: str, value: Any) -> Any:
    try:
        return plain_value(value)
    except ValueError as error:
        raise ValueError(
            f'env "{env}" puts {error} into {where}, which cannot be stored: use text, numbers, arrays, lists and '
            "mappings with text keys"
        ) from error
