"""Small envs and policies that several tests play with. Configs name them as "helpers.toys:Whisper"."""

import random
from collections.abc import Callable

import numpy as np

from palestra.core.types import Answer, Step
from palestra.envs.base import Env
from palestra.text.policies.base import Query


def bit(text: str) -> str:
    """The bit of an answer: "1" for an odd first character, "0" for an even one, "?" for none."""
    return str(ord(text[0]) % 2) if text else "?"


class Whisper(Env):
    """A guide observes a secret bit and answers with it; a walker observes that answer and must answer with the other
    bit.

    The bit of an answer is its first character's parity, so that every answer has one. A game has `turns` secrets, and
    is won if both answers to the last one are right: with probability 1/4 by chance.
    """

    name = "whisper"
    seats = ("guide", "walker")
    roles = {"guide": "g", "walker": "w"}

    def __init__(self, *, turns: int = 1, split: str = "train") -> None:
        self.turns, self.split = turns, split

    def reset(self, seed: int) -> Step:
        self.rng = random.Random(f"{self.split} {seed}")
        self.turn = 0
        return self.ask(0.0, {})

    def ask(self, team: float, info: dict[str, object]) -> Step:
        self.secret = self.rng.choice("01")
        return Step({"guide": self.noise() + self.secret}, {}, team, info=info)

    def noise(self) -> str:
        """Random letters, which make held-out instances differ from those of training."""
        return "".join(self.rng.choices("abcdefgh", k=6))

    def step(self, actions: dict[str, str]) -> Step:
        ((seat, text),) = actions.items()
        said = bit(text)
        if seat == "guide":
            self.heard = said
            return Step(
                {"walker": self.noise() + said}, {"guide": float(said == self.secret)}, info={"invalid": said == "?"}
            )
        right = self.heard == self.secret and said in "01" and said != self.heard
        info: dict[str, object] = {"success": right, "invalid": said == "?"}
        self.turn += 1
        return Step({}, {}, float(right), info=info) if self.turn == self.turns else self.ask(float(right), info)

    def expert(self, seat: str, rng: random.Random) -> str:
        return self.secret if seat == "guide" else "10"[int(self.heard)]


class Odd(Env):
    """One answer to a line of noise; it is right if its `bit` is 1."""

    name = "odd"
    seats = ("agent",)

    def __init__(self, *, split: str = "train") -> None:
        self.split = split

    def reset(self, seed: int) -> Step:
        return Step({"agent": "".join(random.Random(f"{self.split} {seed}").choices("abcdefgh", k=6))})

    def step(self, actions: dict[str, str]) -> Step:
        right = bit(actions["agent"]) == "1"
        return Step({}, {"agent": float(right)}, info={"success": right})


class Chant(Env):
    """A caller, a herald and a walker act in turn; their observations are the same in every instance."""

    name = "chant"
    seats = ("caller", "herald", "walker")

    def __init__(self, *, turns: int = 2) -> None:
        self.turns = turns

    def reset(self, seed: int) -> Step:
        self.spoken = 0
        return Step({"caller": "speak"})

    def step(self, actions: dict[str, str]) -> Step:
        self.spoken += 1
        ((seat, text),) = actions.items()
        over = self.spoken == 3 * self.turns
        rewards = {seat: float(bit(text) == "1")}
        return Step({} if over else {self.seats[self.spoken % 3]: "speak"}, rewards, info={"success": over})


class Peek(Env):
    """Both seats answer the same noise at the same time; one of them also observes a hint, the same in every instance.
    The team earns 1 if their answers begin with the same character."""

    name = "peek"
    seats = ("solver", "peeker")

    def __init__(self, *, split: str = "train") -> None:
        self.split = split

    def reset(self, seed: int) -> Step:
        noise = "".join(random.Random(f"{self.split} {seed}").choices("abcdefgh", k=6))
        return Step({"solver": noise, "peeker": f"{noise} hint hint hint"})

    def step(self, actions: dict[str, str]) -> Step:
        alike = actions["solver"][:1] == actions["peeker"][:1] != ""
        return Step({}, {}, float(alike), info={"success": alike})


class Spoken:
    """A policy that answers with `script`, each answer with tokens of its own; `spoken` has all its answers."""

    def __init__(self, name: str, script: Callable[[Query, int], str]) -> None:
        self.name, self.script = name, script
        self.queries: list[Query] = []
        self.spoken: list[Answer] = []

    async def act(self, query: Query) -> list[Answer]:
        self.queries.append(query)
        answers = [self.answer(query, i) for i in range(query.n)]
        self.spoken += answers
        return answers

    def answer(self, query: Query, i: int) -> Answer:
        text = self.script(query, i)
        ids = np.frombuffer(f"{self.name}:{text}".encode(), np.uint8).astype(np.int32)
        prompt = np.frombuffer(str(query.observation).encode(), np.uint8).astype(np.int32)
        return Answer(text, self.name, prompt, ids, np.full(len(ids), -0.5, np.float32))
