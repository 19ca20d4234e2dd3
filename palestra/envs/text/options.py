"""Option types shared by text envs: the reward mode and the text rendering."""

from __future__ import annotations

from typing import Literal

RewardMode = Literal["dense", "outcome"]
Rendering = Literal["full", "compact"]
BoardRendering = Literal["compact", "ascii"]
