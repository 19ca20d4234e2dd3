"""An env whose process dies in the middle of an episode, once."""

import os
import signal
from pathlib import Path

from helpers.toys import Whisper

from palestra.core.types import Step


class Mortal(Whisper):
    """Whisper in which the process that plays instance `fatal` is killed, unless the file `mark` already exists."""

    def __init__(self, *, turns: int = 1, split: str = "train", fatal: int = -1, mark: str = "") -> None:
        super().__init__(turns=turns, split=split)
        self.fatal, self.mark = fatal, mark

    def reset(self, seed: int) -> Step:
        if seed == self.fatal and not Path(self.mark).exists():
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().reset(seed)


class Odd(Whisper):
    """Whisper whose steps contain an object that cannot be pickled."""

    def step(self, actions: dict[str, str]) -> Step:
        step = super().step(actions)
        step.info["thing"] = lambda: None  # type: ignore[index]
        return step
