"""Rows made by chance: every text in a row is learned, shown before what is learned, in a column that is named as not
used, or the row is refused in one line that names it."""

import asyncio
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.chat_templates import real_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

import palestra as pl
from palestra.core.types import Step
from palestra.engine.conversation.encoder import ChatEncoder
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.testing import tiny_lm
from palestra.text.policies.lm import LanguagePolicy
from palestra.text.rollouts.dataset import DataConfig, read_data
from palestra.text.rollouts.dataset_source import DatasetSource
from palestra.text.rollouts.tree_rollout import Branching

Draw = Callable[[st.SearchStrategy], Any]


@pytest.fixture(scope="module")
def policy() -> LanguagePolicy:
    policy = LanguagePolicy("p", Sampler(engine := tiny_lm()), ChatEncoder(engine.tokenizer), SamplingConfig())
    policy.encoder = ChatEncoder(real_tokenizer("qwen3"))
    return policy


class Words:
    """Draws values whose texts and numbers are all different."""

    def __init__(self, draw: Draw) -> None:
        self.draw, self.count = draw, 0

    def pick(self, *choices: Any) -> Any:
        return self.draw(st.sampled_from(choices))

    def word(self) -> str:
        self.count += 1
        return f"q{self.count:03}z"

    def odd(self) -> Any:
        self.count += 1
        parts = ([self.word()], {self.word(): self.word()})
        kinds = (self.word(), None, 70_000 + self.count, 0.5, True, *parts, [], {}, "")
        return self.pick(*kinds)

    def mostly(self, make: Callable[[], Any]) -> Any:
        return make() if self.draw(st.integers(0, 19)) else self.odd()

    def call(self) -> Any:
        function = {"name": self.word(), "arguments": self.pick({"a": self.word()}, json.dumps({"b": self.word()}))}
        call = {"function": function} | self.pick({}, {"type": "function"}, {"type": "custom"}, {"id": "c0"})
        return call | self.pick({}, {}, {self.word(): self.word()})

    def message(self) -> Any:
        role = self.pick("user", "assistant", "assistant", "assistant", "system", "tool", "Assistant")
        part = {"type": self.pick("text", "text", "image_url"), "text": self.word()}
        content = self.mostly(lambda: self.pick(self.word(), self.word(), [part], [part, part | {"text": self.word()}]))
        more: dict[str, Callable[[], Any]] = {
            "reasoning_content": self.word,
            "reasoning": self.word,
            "tool_calls": lambda: [self.mostly(self.call)],
            "weight": lambda: self.pick(0, 1),
            "mood": self.word,
        }
        names = self.draw(st.sets(st.sampled_from([*more, "", " ", "  "]), max_size=1))
        return {"role": role, "content": content} | {name: self.mostly(more[name]) for name in names if name in more}

    def messages(self) -> Any:
        return [self.mostly(self.message) for _ in range(self.draw(st.integers(0, 4)))]

    def text_or_messages(self) -> Any:
        return self.messages() if self.draw(st.booleans()) else self.word()

    def tools(self) -> Any:
        tools = [{"type": "function", "function": {"name": self.word(), "description": self.word()}}]
        return self.pick(tools, tools, json.dumps(tools), self.word())

    def row(self) -> dict[str, Any]:
        forms = (["prompt", "completion"], ["messages"], ["prompt", "chosen", "rejected"], ["chosen", "rejected"], [])
        columns: dict[str, Callable[[], Any]] = {
            **dict.fromkeys(("prompt", "completion", "chosen", "rejected"), self.text_or_messages),
            "messages": self.messages,
            "label": lambda: self.pick(True, False),
            "tools": self.tools,
            "images": lambda: [self.word()],
            "topic": self.word,
        }
        more = self.draw(st.sets(st.sampled_from([*columns, "", " ", "  "]), max_size=1)) - {"", " ", "  "}
        return {name: self.mostly(columns[name]) for name in dict.fromkeys([*self.pick(*forms), *more])}


@st.composite
def rows(draw: Draw) -> dict[str, Any]:
    return Words(draw).row()


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Yields the words and numbers of a value, keys included, each with its path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(key, path) if key.startswith("q") else ()
            yield from leaves(item, (*path, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from leaves(item, (*path, i))
    elif (isinstance(value, str) and value.startswith("q")) or (isinstance(value, int) and value > 70_000):
        yield path, str(value)
    elif isinstance(value, str) and value.startswith("["):
        yield from leaves(json.loads(value), path)


def is_learned(message: Any) -> bool:
    return message["role"] == "assistant" and message.get("weight") != 0


def is_after_the_last_answer(row: dict[str, Any], path: tuple[Any, ...]) -> bool:
    """A message that nothing follows is neither learned nor seen by what is learned."""
    column = row[path[0]]
    if path[0] == "prompt" or not isinstance(column, list):
        return False
    return path[1] > max(i for i, message in enumerate(column) if is_learned(message))


def is_a_thought_that_is_only_seen(row: dict[str, Any], path: tuple[Any, ...]) -> bool:
    """A template may leave out the thoughts of earlier answers, which are not learned."""
    column = row[path[0]]
    if path[-1] not in ("reasoning_content", "reasoning") or not isinstance(column, list):
        return False
    return path[0] == "prompt" or not is_learned(column[path[1]])


@given(row=rows())
@settings(max_examples=150, deadline=None)
def test_every_text_of_a_row_is_learned_shown_or_refused(policy: LanguagePolicy, row: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"
        path.write_text(json.dumps(row) + "\n")
        try:
            (record,) = files = read_data([DataConfig(path=str(path))], "a")
            (episode,) = asyncio.run(DatasetSource(files, lambda: {"a": policy}, 0).play([0], Branching(), {}))
        except ValueError as error:
            assert "a.jsonl, row 1" in str(error) and len(str(error).splitlines()) == 1
            return
    answers = [node.answers["a"] for node in episode.nodes]
    tokens = [[*answer.prompt_ids, *answer.token_ids] for answer in answers]
    shown = "\n".join(policy.encoder.tokenizer.decode(ids) for ids in tokens)
    for place, word in leaves(row):
        if word not in shown and place[0] not in record.unused:
            is_left_out = is_after_the_last_answer(row, place) or is_a_thought_that_is_only_seen(row, place)
            assert is_left_out, (place, shown)


@st.composite
def prompt_rows(draw: Draw) -> list[Any]:
    words = Words(draw)

    def message() -> Any:
        role = words.pick("user", "user", "assistant", "system", "tool")
        part = {"type": "text", "text": words.word()}
        return {"role": role, "content": words.mostly(lambda: words.pick(words.word(), words.word(), [part]))}

    def prompt() -> Any:
        return words.mostly(lambda: words.pick(words.word(), [words.mostly(message) for _ in range(2)], "\ud800"))

    return [words.mostly(lambda: {"prompt": prompt(), words.word(): words.odd()}) for _ in range(3)]


@given(rows=prompt_rows())
def test_every_text_of_a_prompt_is_shown_and_every_field_reaches_the_reward(rows: list[Any]) -> None:
    paid = []

    def reward(row: Any, answer: str) -> float:
        paid.append(row)
        return 1.0

    try:
        prompts = pl.Prompts(rows, reward)
    except ValueError as error:
        assert str(error).startswith("row ") and len(str(error).splitlines()) == 1
        return
    shown = ""
    for split in ("train", "dev", "test"):
        if prompts.rows[split]:
            env = prompts(split)
            for seed in range(3):
                shown += str(env.reset(seed).observations["agent"])
                step = asyncio.run(env.step({"agent": "x"}))
                assert isinstance(step, Step) and step.team_reward == 1.0
    assert all(row in paid for row in rows)
    assert all(word in shown for place, word in leaves(rows) if "prompt" in place)
