"""Table rows as episodes: prompts with completions, preferences and conversations, in TRL's columns (TRL documentation,
"Dataset formats and types")."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from palestra.core.chat import Chat, Json, render_message, same_message, thought_of
from palestra.core.http.calls import parse_conversation
from palestra.core.types import Answer, Episode, Node, Seat
from palestra.envs.support.row_reader import Row

Prompt = str | list[Json]
Turn = tuple[Any, Answer]  # observation and answer

FORMS = (  # the columns of a row by its form, first those that it must have; the first form that fits is taken
    (("chosen", "rejected"), ("prompt", "tools")),
    (("prompt", "completion"), ("label", "tools")),
    (("messages",), ("label", "tools")),
)
UNSERVED = {  # columns that would change what is learned
    "images": "rows of text only are learned",
    "videos": "rows of text only are learned",
    "chat_template_kwargs": "options of the chat template are the policy's (policies.NAME.chat_template_kwargs)",
}


def episode_from_row(row: Row, number: int, seat: Seat, table: str) -> Episode:
    """Returns the episode of row `number` of `table`, with all answers at `seat` and without a policy.

    A completion or a conversation is one successful trajectory with a turn for each assistant message, unless the row's
    `label` is false. A preference is two siblings: `chosen` succeeded, `rejected` did not. Success has reward 1. A text
    prompt is an observation as in any env; messages become a `Chat` with the row's `tools`. Raises ValueError with row
    and columns if the row is none of these or has no assistant message.
    """
    place = f"{table}, row {number + 1}"
    for column in UNSERVED.keys() & {name for name, value in row.items() if value}:
        raise ValueError(f"{place} has {column}, which is not used: {UNSERVED[column]}. Leave the column out")
    tools = _tools(row.get("tools"), place)
    prompt, ends = _lines(row, place)
    episode = Episode(table, number, {seat: ""})
    for messages, success in ends:
        turns = _turns(prompt, messages, tools, place)
        if not turns:
            raise ValueError(f"{place} has no assistant message to learn: add one, or leave the row out")
        _grow(episode, seat, turns, success)
    return episode


def check_labels(rows: Sequence[Row], table: str) -> None:
    """Raises ValueError if some rows of `table` have a label and others, which may have one, have none."""
    labels = [row.get("label") is not None for row in rows if "label" in _form(row)]
    if any(labels) and not all(labels):
        raise ValueError(
            f"{table}: {labels.count(False)} of {len(labels)} rows have no label, and the others do: give each true or "
            "false, or leave out those without"
        )


def unused_columns(rows: Sequence[Row]) -> list[str]:
    """Returns the columns of a table that no answer of at least one row with a value depends on."""
    return sorted(set().union(*(_given_names(row).difference(_form(row)) for row in rows)))


def num_equal_pairs(rows: Sequence[Row]) -> int:
    """Returns how many rows compare two equal answers."""
    return sum(row.get("chosen") is not None and row["chosen"] == row.get("rejected") for row in rows)


def _given_names(row: Row) -> set[str]:
    return {name for name, value in row.items() if value is not None}


def _form(row: Row) -> tuple[str, ...]:
    """Returns the columns of a row's form; none if it has no form."""
    given = _given_names(row)
    return next((needed + more for needed, more in FORMS if given.issuperset(needed)), ())


def _lines(row: Row, place: str) -> tuple[Prompt, list[tuple[list[Json], bool]]]:
    """Returns the prompt of a row, and each continuation with whether it is a success."""
    form = _form(row)
    prompt = _prompt(row.get("prompt"), place)
    success = _label(row["label"], place) if "label" in form and "label" in _given_names(row) else True
    if "chosen" in form:
        good = _messages(row["chosen"], place)
        bad = _messages(row["rejected"], place)
        if "prompt" not in _given_names(row):
            prompt = [one for one, _ in takewhile(lambda pair: _equal(*pair), zip(good, bad, strict=False))]
            good = good[len(prompt) :]
            bad = bad[len(prompt) :]
        if not prompt:
            raise ValueError(f"{place} has no prompt: give one, or conversations that begin with the same messages")
        return prompt, [(good, True), (bad, False)]
    if "completion" in form:
        return prompt, [(_messages(row["completion"], place), success)]
    if "messages" in form:
        return [], [(_messages(row["messages"], place), success)]
    raise ValueError(
        f"{place} has columns {', '.join(row)}: give prompt and completion, or prompt, chosen and rejected, or messages"
    )


def _prompt(value: Any, place: str) -> Prompt:
    prompt = _messages(value or "", place)
    if value is None or isinstance(value, str):
        return value or ""
    if prompt and prompt[-1]["role"] == "assistant":
        raise ValueError(
            f"{place} has a prompt that ends within an answer: put the beginning of the answer into the completion"
        )
    return prompt


def _tools(value: Any, place: str) -> tuple[Json, ...]:
    """Returns the tools of a row, which may be written as JSON text."""
    try:
        tools = json.loads(value) if isinstance(value, str) and value else value or []
        return parse_conversation([{"role": "user", "content": ""}], tools).tools
    except ValueError as error:
        raise ValueError(f"{place} has tools that are no list of functions: {error}") from None


def _label(value: Any, place: str) -> bool:
    if value not in (True, False):  # 1 and 0 are these too
        raise ValueError(f"{place} has the label {value!r}: give true or false")
    return bool(value)


def _messages(value: Any, place: str) -> list[Json]:
    """Returns text as one assistant message, or a list of messages unchanged. Raises ValueError for anything else, for
    messages with fields that are not used, and for what no tokenizer encodes."""
    if isinstance(value, str):
        value = [{"role": "assistant", "content": value}]
    if not isinstance(value, list) or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in value):
        raise ValueError(f'{place} holds {str(value)[:60]!r}: give text, or a list of {{"role": ..., "content": ...}}')
    try:
        parse_conversation([_without_weight(message) for message in value] or [{"role": "user", "content": ""}])
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    for message in value:
        if message.get("weight") not in (None, 0, 1):
            raise ValueError(f"{place} has a message of weight {message['weight']!r}: give 1 (learned) or 0")
    return value


def _without_weight(message: Json) -> Json:
    return {key: value for key, value in message.items() if key != "weight"}


def _equal(one: Json, other: Json) -> bool:
    """Returns whether two messages are equal for every template."""
    fields = ((m.get("name"), m.get("weight"), thought_of(m)) for m in (one, other))
    return same_message(one, other) and len(set(fields)) == 1


def _turns(prompt: Prompt, messages: list[Json], tools: tuple[Json, ...], place: str) -> list[Turn]:
    """Returns the assistant's messages to learn (those without `weight` 0), each with the observation before it."""
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if len(messages) > len(asked) and all(map(_equal, messages, asked)):
        messages = messages[len(asked) :]  # a whole conversation that repeats the prompt
    if isinstance(prompt, str) and [m["role"] for m in messages] == ["assistant"] and not tools:
        return [(prompt, _answer(messages[0], place))]
    plain = [_without_weight(message) for message in (*asked, *messages)]
    return [
        (Chat(tuple(plain[: len(asked) + i]), tools), _answer(message, place))
        for i, message in enumerate(messages)
        if message["role"] == "assistant" and message.get("weight") != 0
    ]


def _answer(message: Json, place: str) -> Answer:
    for key in ("name", "tool_call_id"):
        if message.get(key):
            raise ValueError(f"{place} has an answer with the field {key!r}, which is not learned: leave it out")
    return Answer(render_message(message), "", thought=thought_of(message))


def _grow(episode: Episode, seat: Seat, turns: Sequence[Turn], success: bool) -> None:
    """Adds a trajectory from the root."""
    for depth, (seen, answer) in enumerate(turns):
        number = len(episode.nodes)
        node = Node(number, number - 1 if depth else None, depth, {seat: seen}, {seat: answer})
        if depth == len(turns) - 1:
            node.done = True
            node.rewards = {seat: float(success)}
            node.info = {"success": success}
        episode.nodes.append(node)
