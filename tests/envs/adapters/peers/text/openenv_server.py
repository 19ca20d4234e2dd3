"""A server made with OpenEnv, with a small game: find a number from the hints "more" and "less".

    python openenv_server.py PORT SESSIONS

The words "crash" and "sleep" in place of a guess make the env raise, and take three seconds.
"""

from __future__ import annotations

import random
import sys
import time

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class Guess(Action):
    message: str = Field(max_length=20)


class Hint(Observation):
    text: str
    guesses: int


class Numbers(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self.guesses, self.number = 0, 0

    def reset(self, seed: int | None = None, most: int = 9, wild: bool = False) -> Hint:
        self.guesses = 0
        self.number = random.randint(1, 1000) if wild else random.Random(seed).randint(1, most)
        return Hint(text=f"guess 1 to {most}" if not wild else f"guess near {self.number}", guesses=0)

    def step(self, action: Guess) -> Hint:
        if action.message == "crash":
            raise KeyError("the server's own fault")
        if action.message == "sleep":
            time.sleep(3)
        self.guesses += 1
        guess = int(action.message) if action.message.isdecimal() else 0
        hint = "right" if guess == self.number else "more" if guess < self.number else "less"
        return Hint(text=hint, guesses=self.guesses, done=hint == "right", reward=1.0 if hint == "right" else 0.01)

    @property
    def state(self) -> State:
        return State(step_count=self.guesses)


if __name__ == "__main__":
    app = create_fastapi_app(Numbers, Guess, Hint, max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
