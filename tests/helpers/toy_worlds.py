"""A toy world whose next observation follows from this one and the answer, so that it can be predicted."""

from helpers.toys import bit

from palestra.core.types import Step
from palestra.envs.base import Env

LETTERS = "abcdefgh"


class Dials(Env):
    """Two dials of eight letters each: an answer of odd first character turns the left one on, any other the right one.

    One in eight of the 64 first positions, with every letter at both dials, is in split "test" only. A game has `turns`
    answers, so with two only first positions are followed by an observation.
    """

    name = "dials"
    seats = ("hand",)
    roles = {"hand": "d"}

    def __init__(self, *, turns: int = 2, split: str = "train") -> None:
        self.turns, self.split = turns, split

    def reset(self, seed: int) -> Step:
        held_out = self.split == "test"
        starts = [(i, j) for i in range(8) for j in range(8) if ((i + j) % 8 == 3) == held_out]
        self.place, self.turn = starts[seed % len(starts)], 0
        return Step({"hand": self.shown()})

    def shown(self) -> str:
        return "".join(LETTERS[i] for i in self.place)

    def step(self, actions: dict[str, str]) -> Step:
        left = bit(actions["hand"]) == "1"
        self.place = ((self.place[0] + left) % 8, (self.place[1] + (not left)) % 8)
        self.turn += 1
        over = self.turn == self.turns
        return Step({} if over else {"hand": self.shown()}, info={"success": True})
