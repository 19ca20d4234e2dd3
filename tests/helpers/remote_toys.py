"""Envs that env servers play in tests, such as "helpers.remote_toys:Waits"."""

import asyncio
import itertools
import math
import os
import random
import time
from collections import deque

from helpers.toys import Whisper

from palestra.core.types import Step
from palestra.envs.base import Env


class Count(Env):
    """Counts to `to`, and its observations repeat the actions; `truth` is in the info of every step."""

    name = "count"
    seats = ("a", "b")
    roles = {"a": "count", "b": "count too"}

    def __init__(self, *, to: int = 3, split: str = "train") -> None:
        self.to, self.split = to, split

    def reset(self, seed: int) -> Step:
        self.rng, self.said = random.Random(f"{self.split} {seed}"), 0
        return self.step_after({})

    def step_after(self, heard: dict[str, str]) -> Step:
        if self.said == self.to:
            return Step({}, {"a": 1.0}, info={"success": True, "heard": heard})
        seat = "ab"[self.said % 2]
        return Step({seat: f"{self.said} {self.rng.random()}"}, info={"heard": heard})

    def step(self, actions: dict[str, str]) -> Step:
        self.said += 1
        return self.step_after(actions)

    def expert(self, seat: str, rng: random.Random) -> str:
        return f"{seat} says {self.said} {rng.random()}"


class Rows(Env):
    """Asks for one of `rows` numbers, drawn at random; identifies it by `form`. Row `broken` fails at reset."""

    name = "rows"
    seats = ("a",)
    blocking = True

    def __init__(self, *, rows: int = 3, form: str = "number", broken: int = -1, split: str = "train") -> None:
        self.rows, self.form, self.broken = rows, form, broken

    def instance_of(self, seed: int) -> object:
        if self.form == "drawn":
            return self.drawn
        row = random.Random(seed).randrange(self.rows)
        return {"number": row, "tuple": ("row", row), "list": [row], "object": object(), "nan": math.nan}[self.form]

    def reset(self, seed: int) -> Step:
        self.row = random.Random(seed).randrange(self.rows)
        if self.row == self.broken:
            raise ValueError(f"row {self.row} is broken")
        self.drawn = self.row
        return Step({"a": f"size 4 you r0 c{self.row} goal r2 c1"})

    def step(self, actions: dict[str, str]) -> Step:
        return Step({}, team_reward=float(len(actions["a"])), info={"success": self.row == 1})


class Waits(Count):
    """Blocks for the number of seconds given by the action."""

    blocking = True

    def step(self, actions: dict[str, str]) -> Step:
        (text,) = actions.values()
        if text.replace(".", "", 1).isdigit():
            time.sleep(float(text))
        return super().step(actions)


class Secret(Whisper):
    """Whisper whose steps take `seconds` each."""

    blocking = True

    def __init__(self, *, turns: int = 1, seconds: float = 0.0, split: str = "train") -> None:
        super().__init__(turns=turns, split=split)
        self.seconds = seconds

    def step(self, actions: dict[str, str]) -> Step:
        time.sleep(self.seconds)
        return super().step(actions)


class Unhurried(Whisper):
    """Whisper whose steps take up to 20 ms, at random, on the event loop."""

    def __init__(self, *, turns: int = 1, split: str = "train") -> None:
        super().__init__(turns=turns, split=split)

    async def step(self, actions: dict[str, str]) -> Step:
        await asyncio.sleep(random.SystemRandom().uniform(0, 0.02))
        return super().step(actions)


class Fickle(Count):
    """Its observations differ between processes."""

    def reset(self, seed: int) -> Step:
        return super().reset(seed + os.getpid())


class Deadly(Count):
    """Ends its process at the action "die"."""

    def step(self, actions: dict[str, str]) -> Step:
        if "die" in actions.values():
            os._exit(3)
        return super().step(actions)


class Hangs(Count):
    """At the action "hang" it blocks its whole process forever."""

    def step(self, actions: dict[str, str]) -> Step:
        if "hang" in actions.values():
            deque(itertools.repeat(0), maxlen=0)
        return super().step(actions)


class Sick(Count):
    """Fails at the action "fail", returns a value that cannot be serialised at "odd", and cannot be forked after
    "whole"."""

    def step(self, actions: dict[str, str]) -> Step:
        (text,) = actions.values()
        if text == "fail":
            raise KeyError("no such word")
        if text == "odd":
            return Step({"a": object()})
        self.held = (x for x in ()) if text == "whole" else None  # a generator cannot be copied
        return super().step(actions)
