"""Envs that fail, for text and for arrays. Configs name them as "helpers.toys_failing:Cracks"."""

import os
from pathlib import Path

import numpy as np
from helpers.toys import Whisper
from helpers.vector_toys import Countdown

from palestra.core.types import Step
from palestra.envs.text.board_games import TextKuhn


class Cracks(Whisper):
    """Whisper that raises KeyError in the share `share` of its games; in none once the file `mended` exists."""

    def __init__(self, *, share: float = 1.0, mended: str = "", turns: int = 1, split: str = "train") -> None:
        super().__init__(turns=turns, split=split)
        self.share, self.mended = share, mended

    def step(self, actions: dict[str, str]) -> Step:
        broken = self.share if not (self.mended and Path(self.mended).exists()) else 0.0
        if self.turn == 0 and "guide" in actions and self.rng.random() < broken:
            return self.deeper({})
        return super().step(actions)

    def deeper(self, nothing: dict[str, Step]) -> Step:
        return nothing["boom :fire: [red]x[/] \x1b]0;owned\x07"]


class Flat(Whisper):
    """Whisper with the same reward for all answers."""

    def step(self, actions: dict[str, str]) -> Step:
        said = super().step(actions)
        return Step(said.observations, {}, 0.0, info=said.info)


class CrackedCards(TextKuhn):
    """Kuhn poker in words whose every game fails."""

    def step(self, actions: dict[str, str]) -> Step:
        raise KeyError("cards")


class Unmade(Countdown):
    """Countdown that cannot be made where the environment variable UNMADE is set."""

    name = "unmade"

    def __init__(self, num_envs: int = 4) -> None:
        super().__init__(num_envs)
        if "UNMADE" in os.environ:
            raise TypeError("an internal error")


class Breaks(Countdown):
    """Countdown whose step raises, or returns a reward or an observation that is not finite, after `after` steps."""

    name = "breaks"

    def __init__(self, num_envs: int = 4, *, how: str = "raise", after: int = 3) -> None:
        super().__init__(num_envs)
        self.how, self.left = how, after

    def step(self, actions: np.ndarray):
        frame = super().step(actions)
        self.left -= 1
        if self.left > 0:
            return frame
        if self.how == "raise":
            raise KeyError("boom")
        if self.how == "value":
            raise ValueError("no such move")
        if self.how == "reward":
            frame.rewards[1, 1] = np.nan
        if self.how == "obs":
            frame.obs[0, 1] = np.inf
        if self.how == "large":
            frame.rewards[:] = 1e30
        return frame
