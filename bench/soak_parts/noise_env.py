"""An env of random letters whose steps wait, for soak tests of env servers."""

from __future__ import annotations

import random
import time
from typing import Any

from palestra.core.types import Step
from palestra.envs.base import Env


class NoiseEnv(Env):
    """Each of `turns` turns shows every seat `letters` random letters and rewards it
    by a hash of its answer. A step waits `seconds`."""

    name = "noise"
    blocking = True

    def __init__(self, *, turns: int = 1, seconds: float = 0.0, letters: int = 24, num_seats: int = 1) -> None:
        self.turns, self.seconds, self.letters = turns, seconds, letters
        self.seats = tuple(f"agent{i}" for i in range(num_seats))
        self.roles = dict.fromkeys(self.seats, "s")

    def reset(self, seed: int) -> Step:
        self.rng, self.left = random.Random(seed), self.turns
        return Step(self._ask())

    def step(self, actions: dict[str, Any]) -> Step:
        if self.seconds:
            time.sleep(self.seconds)
        self.left -= 1
        rewards = {seat: float(sum(map(ord, text)) % 97) for seat, text in actions.items()}
        return Step(self._ask() if self.left else {}, rewards)

    def _ask(self) -> dict[str, str]:
        return {seat: "".join(self.rng.choices("abcdefgh", k=self.letters)) for seat in self.seats}
