import random

from palestra.core.types import Step
from palestra.envs import Env
from palestra.envs.support.splits import MAX_DRAWS, Split, first_of_split, split_of_text

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


class MyEnv(Env):
    """A lookout sees the goal, a walker sees only the lookout's message."""

    name = "my_env"
    seats = ("lookout", "walker")
    roles = {"lookout": "path planner", "walker": "path executor"}  # system messages

    def __init__(self, size: int = 4, split: Split = "train") -> None:
        self.size, self.split = size, split

    def reset(self, seed: int) -> Step:
        rng, cells = random.Random(seed), range(self.size**2)
        draws = ((rng.choice(cells), rng.choice(cells)) for _ in range(MAX_DRAWS))
        nothing = f"no board of size {self.size} is in split {self.split}: give a larger size"
        instance = first_of_split(draws, self.split, lambda drawn: split_of_text(str(drawn)), nothing)
        self.at, self.goal = (divmod(cell, self.size) for cell in instance)
        self.message = None
        return Step({"lookout": f"size {self.size} you {cell_name(self.at)} goal {cell_name(self.goal)}"})

    def step(self, actions: dict[str, str]) -> Step:
        if self.message is None:
            self.message = actions["lookout"][:20]
            named = float(self.message.strip() == cell_name(self.goal))
            seen = f"size {self.size} you {cell_name(self.at)} plan {self.message}"
            return Step({"walker": seen}, rewards={"lookout": named})
        row, column = self.at
        for word in actions["walker"].split():
            down, right = MOVES.get(word, (0, 0))
            row, column = row + down, column + right
        distance = abs(row - self.goal[0]) + abs(column - self.goal[1])
        return Step({}, team_reward=-distance / self.size, info={"success": distance == 0})

    def expert(self, seat: str, rng: random.Random) -> str:
        """Returns a right answer: what `--seats SEAT=expert` plays, and shows that the task can be done."""
        if seat == "lookout":
            return cell_name(self.goal)
        down, right = self.goal[0] - self.at[0], self.goal[1] - self.at[1]
        words = ["down" if down > 0 else "up"] * abs(down) + ["right" if right > 0 else "left"] * abs(right)
        return " ".join(words) or "stay"


def cell_name(cell: tuple[int, int]) -> str:
    return f"r{cell[0]} c{cell[1]}"
