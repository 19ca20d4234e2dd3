"""A list of prompts and a reward function as an env of one seat and one turn."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from palestra.core.chat import Chat
from palestra.core.plain_values import check_text
from palestra.core.seeding import derive_seed
from palestra.core.types import Seat, Step
from palestra.core.user_functions import check_function
from palestra.envs.base import NO_REWARD_KEY, Env
from palestra.envs.step_values import number

SEAT: Seat = "agent"
HELD_OUT_SHARE = 0.1  # share of the different prompts in each of dev and test
NUMBER_BITS = 32  # of an instance: below them an episode's number, above them the run's seed
PromptSplit = Literal["train", "dev", "test"]
Row = Mapping[str, Any]
Reward = float | bool | None
RewardFunction = Callable[[Row, str], Reward | Awaitable[Reward]]


class PromptEnv(Env):
    """One question and one answer. Instances are the rows in order, cyclically, or, if `is_shuffled`, in an order of
    their own in each epoch, by the run's seed. `numbers` are the numbers of the rows in messages."""

    name = "prompts"
    replaces_state = True
    seats = (SEAT,)

    def __init__(
        self, rows: Sequence[Row], reward: RewardFunction, numbers: Sequence[int], *, is_shuffled: bool = False
    ) -> None:
        self.rows = rows
        self.reward = reward
        self.numbers = numbers
        self.is_shuffled = is_shuffled
        self.index = 0

    def instance_of(self, seed: int) -> int:
        """Returns the index of the row."""
        if not self.is_shuffled:
            return seed % len(self.rows)
        epoch, place = divmod(seed % 2**NUMBER_BITS, len(self.rows))
        return _epoch_order(len(self.rows), seed >> NUMBER_BITS, epoch)[place]

    def reset(self, seed: int) -> Step:
        self.index = self.instance_of(seed)
        prompt = self.rows[self.index]["prompt"]
        return Step({SEAT: prompt if isinstance(prompt, str) else Chat(tuple(map(dict, prompt)))})

    def step(self, actions: dict[Seat, Any]) -> Step | Awaitable[Step]:
        try:
            reward = self.reward(self.rows[self.index], str(actions[SEAT]))
        except Exception as error:
            raise self._failure(error) from error
        return self._await_reward(reward) if inspect.isawaitable(reward) else self._paid(reward)

    async def _await_reward(self, reward: Awaitable[Reward]) -> Step:
        try:
            awaited = await reward
        except Exception as error:
            raise self._failure(error) from error
        return self._paid(awaited)

    def _paid(self, reward: Any) -> Step:
        if reward is None:
            return Step({}, info={NO_REWARD_KEY: True})
        value = number(reward)
        if value is None or not math.isfinite(value):
            text = repr(reward)
            raise ValueError(
                f"the reward function {_name(self.reward)} returned {text[:80]} ({type(reward).__name__}) for row "
                f"{self.numbers[self.index]}: return a finite number, True or False, or None for no reward"
            )
        is_success = isinstance(reward, bool | np.bool_)
        return Step({}, team_reward=value, info={"success": bool(reward)} if is_success else {})

    def _failure(self, error: Exception) -> ValueError:
        return ValueError(
            f"the reward function {_name(self.reward)} failed for row {self.numbers[self.index]} with "
            f"{type(error).__name__}: {error}"
        )


class Prompts:
    """An env of one seat ("agent") and one turn, from rows {"prompt": ..., ...} and `reward(row, answer)`.

        pl.train(env=pl.Prompts(rows, reward=lambda row, answer: answer.strip() == row["answer"]), ...)

    A prompt is a text, or a list of messages [{"role": "system", "content": ...}, ..., {"role": "user", ...}], such as
    a system message and worked examples. `reward`, which may be a coroutine function, returns a number; True and False
    are 1 and 0, and are also logged as success; None means that this answer has no reward: it is left out of its group.

    A tenth of the different prompts (at least one) is held out as "dev", another tenth as "test". The hash of a prompt
    decides its split: the order of the rows does not matter, and rows of one prompt stay together. Training shuffles
    its rows in each epoch; evaluations take theirs in order. Calling the object returns the env of a split. Raises
    ValueError for a row without a prompt.
    """

    def __init__(self, rows: Sequence[Row], reward: RewardFunction) -> None:
        check_function(reward, "reward, a function of one answer and no batch as in TRL,", "row", "answer")
        self.reward = reward
        if not rows:
            raise ValueError("rows: there are no prompts; give a list of {'prompt': ..., ...}")
        texts = [_prompt_text(i, row) for i, row in enumerate(rows)]
        order = sorted(set(texts), key=_digest)
        self.name = f"prompts-{_digest(''.join(map(_digest, order)))[:8]}"
        held_out = max(1, round(HELD_OUT_SHARE * len(order))) if len(order) > 2 else 0
        parts = {"test": order[:held_out], "dev": order[held_out : 2 * held_out], "train": order[2 * held_out :]}
        split_of = {prompt: split for split, part in parts.items() for prompt in part}
        self.rows: dict[str, list[Row]] = {split: [] for split in parts}
        self.numbers: dict[str, list[int]] = {split: [] for split in parts}
        for i, (text, row) in enumerate(zip(texts, rows, strict=True)):
            self.rows[split_of[text]].append(row)
            self.numbers[split_of[text]].append(i)

    def __call__(self, split: PromptSplit = "train") -> PromptEnv:
        """Returns the env of a split. Raises ValueError if the split is empty."""
        if not self.rows[split]:
            raise ValueError(f"there are too few different prompts for a {split} split: give at least 3")
        return PromptEnv(self.rows[split], self.reward, self.numbers[split], is_shuffled=split == "train")


def _prompt_text(i: int, row: Any) -> str:
    """Returns a prompt as one text, by which it is split. Raises ValueError if it is neither a text nor messages."""
    prompt = row.get("prompt") if isinstance(row, Mapping) else None
    if isinstance(prompt, str):
        try:
            return check_text(prompt)
        except ValueError as error:
            raise ValueError(f"row {i} has a prompt that is {error}: no tokenizer encodes it") from None
    if not isinstance(prompt, list | tuple) or not prompt:
        raise ValueError(
            f"row {i} has no prompt: write {{'prompt': 'What is 2 + 2?', ...}}, or a list of messages such as "
            "{'role': 'user', 'content': 'What is 2 + 2?'}"
        )
    for message in prompt:
        known = isinstance(message, Mapping) and set(message) == {"role", "content"}
        if not known or not all(isinstance(value, str) for value in message.values()):
            raise ValueError(
                f"row {i} has the message {message!r} in its prompt: a message has role and content, both text"
            )
        if message["role"] not in ("system", "user", "assistant"):
            raise ValueError(
                f"row {i} has a message of role {message['role']!r} in its prompt: write system, user or assistant"
            )
    if prompt[-1]["role"] != "user":
        raise ValueError(f"row {i} has a prompt that ends with {prompt[-1]['role']}: its last message must be user")
    return json.dumps([dict(message) for message in prompt], sort_keys=True)


@lru_cache(maxsize=16)
def _epoch_order(size: int, run_seed: int, epoch: int) -> list[int]:
    """Returns the order of `size` rows in an epoch."""
    return np.random.default_rng(derive_seed(run_seed, "rows", epoch)).permutation(size).tolist()


def _name(function: Callable) -> str:
    return f'"{getattr(function, "__name__", type(function).__name__)}"'


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
