"""A list of prompts and a reward function as an env of one seat and one turn."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from palestra.core.types import Seat, Step
from palestra.envs.base import Env

SEAT: Seat = "agent"
HELD_OUT_SHARE = 0.1  # share of the different prompts in each of dev and test
PromptSplit = Literal["train", "dev", "test"]
RewardFunction = Callable[[Mapping[str, Any], str], float | bool]


class PromptEnv(Env):
    """One question and one answer: instance `seed` is row `seed` modulo the number of `rows`."""

    name = "prompts"
    replaces_state = True
    seats = (SEAT,)

    def __init__(self, rows: Sequence[Mapping[str, Any]], reward: RewardFunction) -> None:
        self.rows, self.reward = rows, reward
        self.row = rows[0]

    def reset(self, seed: int) -> Step:
        self.row = self.rows[seed % len(self.rows)]
        return Step({SEAT: self.row["prompt"]})

    def step(self, actions: dict[Seat, Any]) -> Step:
        reward = self.reward(self.row, str(actions[SEAT]))
        return Step({}, team_reward=float(reward), info={"success": reward} if isinstance(reward, bool) else {})


class Prompts:
    """An env of one seat ("agent") and one turn, from rows {"prompt": ..., ...} and `reward(row, answer)`.

        pl.train(env=pl.Prompts(rows, reward=lambda row, answer: answer.strip() == row["answer"]), ...)

    `reward` returns a number; True and False are 1 and 0, and are also logged as success. A tenth of the different
    prompts (at least one) is held out as "dev", another tenth as "test". The hash of a prompt decides its split: the
    order of the rows does not matter, and rows of one prompt stay together. Calling the object returns the env of a
    split. Raises ValueError for a row without a prompt as text.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], reward: RewardFunction) -> None:
        self.reward = reward
        if not rows:
            raise ValueError("rows: there are no prompts; give a list of {'prompt': ..., ...}")
        for number, row in enumerate(rows):
            if not isinstance(row.get("prompt"), str):
                raise ValueError(
                    f"row {number} has no prompt as text: write {{'prompt': 'What is 2 + 2?', ...}}; for a prompt in "
                    "messages, give the content of the user message"
                )
        order = sorted({row["prompt"] for row in rows}, key=_digest)
        self.name = f"prompts-{_digest(''.join(map(_digest, order)))[:8]}"
        held_out = max(1, round(HELD_OUT_SHARE * len(order))) if len(order) > 2 else 0
        parts = {"test": order[:held_out], "dev": order[held_out : 2 * held_out], "train": order[2 * held_out :]}
        split_of = {prompt: split for split, part in parts.items() for prompt in part}
        self.rows: dict[str, list[Mapping[str, Any]]] = {split: [] for split in parts}
        for row in rows:
            self.rows[split_of[row["prompt"]]].append(row)

    def __call__(self, split: PromptSplit = "train") -> PromptEnv:
        """Returns the env of a split. Raises ValueError if the split is empty."""
        if not self.rows[split]:
            raise ValueError(f"there are too few different prompts for a {split} split: give at least 3")
        return PromptEnv(self.rows[split], self.reward)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
