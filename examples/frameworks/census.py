"""The task of the programs beside this file: how many people live in two places, more or less, of a country that each
instance makes anew. `main` is all that ties a program to its training: it reads the instance, and prints the rewards.
"""

import json
import os
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import SequenceMatcher

LETTERS, VOWELS = "bdfgklmnprst", "aiou"
SPLITS = {0: "dev", 1: "test"}  # by the remainder of a question's checksum by ten; the others are of "train"


@dataclass
class Census:
    """A question such as `naka - kafo people`, the tools that find its answer, and what they were used for."""

    one: str
    sign: str
    other: str
    seed: int
    searched: set[str] = field(default_factory=set)
    results: list[int] = field(default_factory=list)

    @property
    def question(self) -> str:
        return f"{self.one} {self.sign} {self.other} people"

    @property
    def places(self) -> tuple[str, str]:
        return self.one, self.other

    @property
    def truth(self) -> int:
        one, other = self.people(self.one), self.people(self.other)
        return one + other if self.sign == "+" else one - other

    def people(self, place: str) -> int:
        return random.Random(f"{self.seed} {place}").randint(100, 999)

    def search(self, query: str) -> str:
        """Looks up how many people live in a place."""
        self.searched.add(query)
        return f"{query} {self.people(query)}"

    def calculator(self, expression: str) -> str:
        """Adds or subtracts two numbers, as in 581 - 323."""
        try:
            one, sign, other = expression.split()
            result = int(one) + int(other) if sign == "+" else int(one) - int(other)
        except ValueError:
            return "error"
        self.results.append(result)
        return str(result)

    def to_check(self) -> str:
        """What the checker is asked: the sum of the numbers, and the caller's last result."""
        result = self.results[-1] if self.results else "error"
        return f"{self.people(self.one)} {self.sign} {self.people(self.other)} tool {result} you {result}"

    def likeness(self) -> float:
        """1 if both places were searched for, less if only similar names were."""
        pairs = [[SequenceMatcher(None, place, query).ratio() for query in self.searched] for place in self.places]
        return sum(max(ratios, default=0.0) for ratios in pairs) / 2

    def closeness(self, answer: int | None) -> float:
        """1 for the right number, less for others, 0 for none."""
        return 0.0 if answer is None else 1 / (1 + abs(answer - self.truth) / 100)


def draw_census(seed: int, split: str) -> Census:
    """Draws the instance of a seed and a split; no question is in two splits."""
    rng = random.Random(seed)
    while True:
        one, other = ("".join(rng.choice(letters) for letters in (LETTERS, VOWELS, LETTERS, VOWELS)) for _ in range(2))
        drawn = Census(one, rng.choice("+-"), other, seed)
        if one != other and SPLITS.get(zlib.crc32(drawn.question.encode()) % 10, "train") == split:
            return drawn


def number_in(text: str) -> int | None:
    """The number that a text is; None if it is none."""
    try:
        return int(text.strip())
    except ValueError:
        return None


def main(solve: Callable[[Census], int | None]) -> None:
    """Plays the instance that the environment names, and prints what it is worth."""
    census = draw_census(int(os.environ.get("PALESTRA_SEED", "0")), os.environ.get("PALESTRA_SPLIT", "train"))
    answer = solve(census)
    result = census.results[-1] if census.results else None
    rewards = {"caller": (census.likeness() + census.closeness(result)) / 2, "checker": census.closeness(answer)}
    is_right = answer == census.truth
    print(json.dumps({"rewards": rewards, "team": float(is_right), "success": is_right}))
