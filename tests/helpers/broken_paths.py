"""Plan-Path with a fault: runs in it fail in ways that alarms should find."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any, ClassVar

from palestra.core.types import Seat, Step
from palestra.envs.text.grid.plan_path import PlanPath


class CrashingPath(PlanPath):
    """The simulator of every fourth instance is gone."""

    name: ClassVar[str] = "crashing_path"

    def reset(self, seed: int) -> Step:
        if seed % 4 == 0:
            raise RuntimeError("the simulator is gone")
        return super().reset(seed)


class NonsensePath(PlanPath):
    """Pays for the letters of an answer, whatever they say."""

    name: ClassVar[str] = "nonsense_path"

    def step(self, actions: dict[Seat, Any]) -> Step:
        paid = {seat: zlib.crc32(str(action).encode()) % 100 / 100 for seat, action in actions.items()}
        return replace(super().step(actions), rewards=paid, team_reward=0.0)
