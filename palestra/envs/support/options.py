"""Options shared by envs: the reward mode and rendering of text envs, and checks of numbers.

The types of all options are checked against the signature of an env's `__init__`
(`palestra.envs.validate_env_options`).
"""

from __future__ import annotations

from typing import Literal

RewardMode = Literal["dense", "outcome"]
Rendering = Literal["full", "compact"]
BoardRendering = Literal["compact", "ascii"]
Shaping = Literal["manhattan", "path"]


def check_at_least(name: str, value: float, least: float, why: str) -> None:
    """Raises ValueError if option `name` is below `least`; `why` tells what would be wrong with it."""
    if value < least:
        raise ValueError(f"{name}: {value} is too small, {why}; use {least} or more")


def check_range(name: str, value: int | float, low: int | float, high: int | float) -> None:
    """Raises ValueError if option `name` is outside [low, high]."""
    if not low <= value <= high:
        raise ValueError(f"{name}={value} is out of range: give {low} to {high}")
