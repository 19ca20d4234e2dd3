"""Rows of data, prompts and reward functions as an env: seats that act in a given order, each on its own prompt."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from palestra.core.chat import Chat
from palestra.core.mappings import key_by_value
from palestra.core.seeding import derive_seed
from palestra.core.types import Seat, Step
from palestra.envs.base import NO_REWARD_KEY, Env
from palestra.envs.reward_terms import TEAM_TERMS_KEY, terms_info, total_rewards
from palestra.envs.support.few_shot import acting_seat
from palestra.envs.support.row_reader import read_rows
from palestra.envs.text.reward_functions import COMPLETIONS, Played, Row, read_functions
from palestra.envs.text.templates import (
    TRANSCRIPT,
    Template,
    check_value,
    content_key,
    fill_template,
    read_turns,
    shown_columns,
)

SEAT: Seat = "agent"
HELD_OUT_SHARE = 0.1  # share of the different rows in each of dev and test
NUMBER_BITS = 32  # of an instance: below them an episode's number, above them the run's seed
RowSplit = Literal["train", "dev", "test"]
Payment = Mapping[Seat | None, float | bool]  # of one reward function, by seat; None is the team


class Answers(dict[Seat, str]):
    """The last answer of each seat, by seat. `turns` are all answers with their seats, in order."""

    def __init__(self, turns: Sequence[tuple[Seat, str]]) -> None:
        super().__init__(turns)
        self.turns = list(turns)

    @property
    def transcript(self) -> str:
        """All answers so far, a paragraph each, after the name of the seat."""
        return "\n".join(f"{seat}: {answer}" for seat, answer in self.turns)


class ChainEnv(Env):
    """The rows of one split of a `Chain`. Instances are the rows in order, cyclically, or, in
    training, in an order of their own in each epoch, by the run's seed."""

    name = "chain"
    replaces_state = True

    def __init__(self, chain: Chain, split: RowSplit) -> None:
        self.chain = chain
        self.rows = chain.rows[split]
        self.numbers = chain.numbers[split]
        self.is_shuffled = split == "train"
        self.seats = chain.seats
        self.is_paid_at_end = len(chain.turns) > 1
        self.index = 0
        self.answers = Answers(())

    def instance_of(self, seed: int) -> int:
        """Returns the index of the row."""
        if not self.is_shuffled:
            return seed % len(self.rows)
        epoch, place = divmod(seed % 2**NUMBER_BITS, len(self.rows))
        return _epoch_order(len(self.rows), seed >> NUMBER_BITS, epoch)[place]

    def reset(self, seed: int) -> Step:
        self.index = self.instance_of(seed)
        self.answers = Answers(())
        return self._ask()

    async def step(self, actions: dict[Seat, Any]) -> Step:
        done = len(self.answers.turns)
        seat = acting_seat(self.chain.turns[done][0] if done < len(self.chain.turns) else None, actions)
        self.answers = Answers([*self.answers.turns, (seat, str(actions[seat]))])
        if done + 1 < len(self.chain.turns):
            return self._ask()
        return await self._judge()

    def _ask(self) -> Step:
        seat, _ = self.chain.turns[len(self.answers.turns)]
        return Step({seat: self.chain.prompt(self.rows[self.index], self.answers)})

    async def _judge(self) -> Step:
        """Returns the last step, with what the reward functions pay."""
        row = self.rows[self.index]
        prompt = self.chain.prompt(row, Answers(self.answers.turns[:-1]))
        answers = self.answers[SEAT] if self.chain.shows_answer else self.answers
        played = Played(row, self.numbers[self.index], answers, _trl_batch(row, self.answers, prompt))
        functions = self.chain.rewards
        values = await asyncio.gather(*(function.value(played) for function in functions))
        payments = {
            function.name: function.by_payee(value, played, self.seats)
            for function, value in zip(functions, values, strict=True)
            if value is not None
        }
        if not payments:
            return Step({}, info={NO_REWARD_KEY: True})
        own = {seat: terms for seat in self.seats if (terms := _terms_of(seat, payments))}
        team = _terms_of(None, payments)
        info = await self._success(payments.values(), played)
        if self.chain.has_terms:
            info |= terms_info(own)
            if team:
                info[TEAM_TERMS_KEY] = team
        return Step({}, total_rewards(own), sum(team.values()), info=info)

    async def _success(self, payments: Iterable[Payment], played: Played) -> dict[str, Any]:
        """Returns the success as info: that of the function for it, else whether all truth values
        among the rewards are true, of rewards by seat for each seat; none without any."""
        if self.chain.success:
            return {"success": await self.chain.success.value(played)}
        flags: dict[Seat | None, bool] = {}
        for paid in payments:
            for seat, value in paid.items():
                if isinstance(value, bool):
                    flags[seat] = flags.get(seat, True) and value
        whole = flags.pop(None, None)
        if flags:
            return {"success": {seat: flag and whole is not False for seat, flag in flags.items()}}
        return {} if whole is None else {"success": whole}


class Chain:
    """An env of several seats and turns, from rows of data, prompts and a reward function.

        pl.Chain(
            rows,  # [{"topic": "tea", "words": 12}, ...], a Dataset, a file, or "OWNER/NAME" of the hub
            prompts={"writer": "Write about {topic}.", "editor": "In {words} words: {writer}"},
            reward=lambda row, answers: len(answers["editor"].split()) == row["words"],
        )

    A file is .jsonl, .json or .parquet; a name of the hub may have the names of a config and a split:
    "openai/gsm8k:main:train[:1000]".

    `seats` is the order of turns (default: that of `prompts`); a seat may have several. A prompt is a template, whose
    names are columns of the row, seats that answered before (their last answer) and `transcript` (all answers so far);
    {{ and }} are braces. It may be messages with a template each, the name of a column that holds messages, or, for
    a seat with several turns, a list of such, one a turn.

    `reward` is called after the last turn, with the row and the answers by seat (`answers.turns` are all in order). It
    returns a number for the team, or numbers by seat; True and False are 1 and 0, and also logged as success; None
    means no reward. It may be async, in TRL's form (`completions` are the last seat's), and several: a list, or a
    mapping of names. The sum is paid; each is logged as `reward/NAME`, and weighed in training by the run's
    `reward_weights`. `success(row, answers)` replaces the success of rewards.

    A tenth of the different rows (at least one) is held out as "dev", another tenth as "test", by the hash of the
    columns that prompts show: the order of the rows does not matter, and rows of equal prompts stay together. Training
    shuffles its rows in each epoch; evaluations take theirs in order. Calling the object returns the env of a split.
    Raises ValueError for a name that no row has, a function that takes other arguments, and rows that lack a column.
    """

    kind = "chain"
    shows_answer = False  # True: reward functions get the one answer as a text

    def __init__(
        self,
        rows: Iterable[Row] | str | Path,
        *,
        prompts: Mapping[Seat, Any],
        reward: Any,
        seats: Sequence[Seat] | None = None,
        success: Any = None,
    ) -> None:
        table = _read(rows)
        if seats is None:
            seats = list(prompts)
        self.turns = read_turns(list(seats), prompts)
        self.seats = tuple(dict.fromkeys(seat for seat, _ in self.turns))
        columns = list(table[0])
        shown = shown_columns(self.turns, columns)
        argument = "answer" if self.shows_answer else "answers"
        known = [*columns, *self.seats]
        self.rewards = read_functions(reward, argument, known)
        self.has_terms = isinstance(reward, Mapping | list | tuple)
        self.success = read_functions(success, argument, known, "success")[0] if success else None
        keys = [_row_key(i, row, shown) for i, row in enumerate(table)]
        order = sorted(set(keys), key=_digest)
        self.name = f"{self.kind}-{_digest(''.join(map(_digest, order)))[:8]}"
        held_out = max(1, round(HELD_OUT_SHARE * len(order))) if len(order) > 2 else 0
        parts = {"test": order[:held_out], "dev": order[held_out : 2 * held_out], "train": order[2 * held_out :]}
        split_of = key_by_value(parts)
        self.rows: dict[str, list[Row]] = {split: [] for split in parts}
        self.numbers: dict[str, list[int]] = {split: [] for split in parts}
        for i, (key, row) in enumerate(zip(keys, table, strict=True)):
            self.rows[split_of[key]].append(row)
            self.numbers[split_of[key]].append(i)

    def __call__(self, split: RowSplit = "train") -> ChainEnv:
        """Returns the env of a split. Raises ValueError if the split is empty."""
        self.check_split(split)
        return ChainEnv(self, split)

    def check_split(self, split: RowSplit) -> None:
        """Raises ValueError if the split is empty."""
        if not self.rows[split]:
            raise ValueError(f"there are too few different prompts for a {split} split: give at least 3")

    def prompt(self, row: Row, answers: Answers) -> str | Chat:
        """Returns the prompt of the turn after `answers`."""
        _, template = self.turns[len(answers.turns)]
        return fill_template(template, {TRANSCRIPT: answers.transcript, **row, **answers})


class Prompts(Chain):
    """An env of one seat ("agent") and one turn, from rows {"prompt": ..., ...} and `reward(row, answer)`.

        pl.train(env=pl.Prompts(rows, reward=lambda row, answer: answer.strip() == row["answer"]), ...)

    `prompt` is a template over the columns. The default is the column `prompt`: a text, or messages [{"role": "system",
    "content": ...}, ..., {"role": "user", ...}], such as a system message and worked examples. All else is as in
    `Chain`, whose seats this has one of.
    """

    kind = "prompts"
    shows_answer = True

    def __init__(
        self, rows: Iterable[Row] | str | Path, reward: Any, *, prompt: Template = "{prompt}", success: Any = None
    ) -> None:
        super().__init__(rows, prompts={SEAT: prompt}, reward=reward, success=success)


class ChainOfFile(ChainEnv):
    """Seats that act in turn on prompts of your own, from a file of rows (.jsonl, .json, .parquet, a folder, or a
    dataset of the hub, OWNER/NAME:CONFIG:SPLIT).

    `prompts` has a template for each seat, whose names are columns of the rows, seats that answered before, and
    `transcript`. `seats` is the order of turns, by default that of `prompts`. `reward` names a function
    `reward(row, answers)` as "module:function", a list of such, or a mapping of names to them; `success` likewise. All
    is as in `palestra.Chain`.
    """

    def __init__(
        self,
        *,
        rows: Path,
        prompts: dict[str, Any],
        reward: str | list[str] | dict[str, str],
        seats: list[str] | None = None,
        success: str | None = None,
        split: RowSplit = "train",
    ) -> None:
        changed = rows.stat().st_mtime_ns if rows.exists() else 0
        chain = _chain_of_file(str(rows), changed, json.dumps([prompts, reward, seats, success]))
        chain.check_split(split)
        super().__init__(chain, split)


@lru_cache(maxsize=8)
def _chain_of_file(rows: str, changed: int, options: str) -> Chain:
    prompts, reward, seats, success = json.loads(options)
    return Chain(rows, prompts=prompts, reward=reward, seats=seats, success=success)


def _read(rows: Iterable[Row] | str | Path) -> list[Row]:
    """Returns the rows. Raises ValueError if there are none, or one is no mapping."""
    if isinstance(rows, str | Path):
        return read_rows(Path(rows))
    if not (table := list(rows)):
        raise ValueError("rows: there are none; give a list of {'prompt': ..., ...}")
    for i, row in enumerate(table):
        if not isinstance(row, Mapping):
            raise ValueError(
                f"row {i} is {row!r:.60}, and no mapping of columns: give a list of {{'prompt': ..., ...}}, one split "
                'of a DatasetDict, or frame.to_dict("records")'
            )
    return table


def _row_key(i: int, row: Row, shown: Mapping[str, bool]) -> str:
    """Returns a text that is the same for rows of equal prompts. Raises ValueError if a prompt cannot show the row."""
    for name, may_be_messages in shown.items():
        if row.get(name) is None:
            raise ValueError(f"row {i} has no {name}, which the prompts show: fill it in, or leave the row out")
        try:
            check_value(row[name], may_be_messages=may_be_messages)
        except ValueError as error:
            raise ValueError(f"row {i}, {name}: {error}") from None
    return content_key([row[name] for name in shown])


def _terms_of(payee: Seat | None, payments: Mapping[str, Payment]) -> dict[str, float]:
    """Returns what each reward function pays a seat, or the team, by the function's name."""
    return {name: float(paid[payee]) for name, paid in payments.items() if payee in paid}


def _trl_batch(row: Row, answers: Answers, prompt: str | Chat) -> dict[str, list[Any]]:
    """Returns a row, the answers by seat, and the last prompt and answer, as TRL's reward functions get them."""
    completion: Any = answers.turns[-1][1]
    shown: Any = prompt
    if isinstance(prompt, Chat):
        completion = [{"role": "assistant", "content": completion}]
        shown = list(prompt.messages)
    return {name: [value] for name, value in {**answers, **row, "prompts": shown, COMPLETIONS: completion}.items()}


@lru_cache(maxsize=16)
def _epoch_order(size: int, run_seed: int, epoch: int) -> list[int]:
    """Returns the order of `size` rows in an epoch."""
    return np.random.default_rng(derive_seed(run_seed, "rows", epoch)).permutation(size).tolist()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
