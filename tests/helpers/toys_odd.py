"""An env whose steps hold odd things in every second instance."""

import datetime
import decimal

import numpy as np

from palestra.core.types import Step
from palestra.envs.base import Env


class Opaque:
    """A value without a stored form."""


ODD_STEPS = {
    "plain": {},
    "unknown seat": {"rewards": {"Agent": 1.0}},
    "terms of an unknown seat": {"info": {"reward_terms": {"Agent": {"form": 1.0}}}},
    "no reward": {"rewards": {"agent": None}},
    "reward as text": {"rewards": {"agent": "1.0"}},
    "reward as an array": {"rewards": {"agent": np.ones(1)}},
    "infinite team reward": {"team_reward": float("inf")},
    "success as text": {"info": {"success": "false"}},
    "success above 1": {"info": {"success": 3}},
    "opaque info": {"info": {"thing": Opaque()}},
    "keys of bytes": {"info": {"cells": {b"x": 1}}},
    "surrogate": {"info": {"text": "a\ud83d"}},
    "decimal reward": {"rewards": {"agent": decimal.Decimal("0.5")}},
    "equal keys": {"info": {1: "a", "1": "b"}},
    "tuple keys": {"info": {"cells": {(0, 1): "x"}}},
    "mixed set": {"info": {"seen": {1, "a"}}},
    "date": {"info": {"when": datetime.date(2026, 1, 2)}},
    "numpy": {"info": {"success": np.bool_(True), "grid": np.zeros(2), "n": np.int64(3)}},
    "partial success": {"info": {"success": 0.25}},
}


class Odd(Env):
    """One seat and one answer; the last step of odd instances holds `part` of `ODD_STEPS`."""

    name = "odd"
    seats = ("agent",)

    def __init__(self, part: str = "plain") -> None:
        self.part = part

    def reset(self, seed):
        self.seed = seed
        return Step({"agent": "go"})

    def step(self, actions):
        plain = {"rewards": {"agent": float(len(actions["agent"]) % 3)}, "info": {"success": True}}
        return Step(**{"observations": {}} | plain | (ODD_STEPS[self.part] if self.seed % 2 else {}))


class OddSight(Odd):
    """The observation of odd instances cannot be stored."""

    name = "odd sight"

    def reset(self, seed):
        self.seed = seed
        return Step({"agent": {b"key": 1} if seed % 2 else "go"})
