"""Conversations in OpenAI's shape, as an env shows them to a seat, and tool calls in a model's own words.

A model says a call as Hermes and Qwen do: `<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>`.
Reading and writing are inverse to each other, so that a conversation that comes back from an agent program is known
again as the one that the model was part of.
"""

from __future__ import annotations

import contextlib
import json
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # Unicode categories of characters that a terminal obeys and does not show
SHOWN = "\n\t\u200c\u200d"  # of these, line ends, tabs, and joiners inside words and emoji
CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def visible(text: str) -> str:
    """`text` with control characters (ANSI escapes, bidi controls, surrogates) as escapes such as `\\x1b`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(c) if unicodedata.category(c) in UNSEEN and c not in SHOWN else c for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


@dataclass(frozen=True)
class Chat:
    """A whole conversation as an observation: `messages` up to the one that is asked for, and the `tools` that may be
    called (OpenAI's function descriptions).

        Chat(({"role": "user", "content": "2 + 2?"},))
    """

    messages: tuple[Json, ...]
    tools: tuple[Json, ...] = ()

    def __str__(self) -> str:
        return "\n".join(f"{message['role']}: {said(message)}" for message in self.messages)


@dataclass(frozen=True)
class Call:
    """A tool by name, and what it is called with."""

    name: str
    arguments: Json


def assistant(text: str) -> Json:
    """The message [OpenAI's] that a model's answer `text` stands for: calls that can be read become `tool_calls`, all
    else stays in its content."""
    calls: list[Call] = []

    def take(found: re.Match[str]) -> str:
        call = read_call(found[1])
        calls.extend([call] if call else [])
        return "" if call else found[0]

    content = CALL.sub(take, text).strip()
    message: Json = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{i}", "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
            for i, c in enumerate(calls)
        ]
    return message


def read_call(text: str) -> Call | None:
    """The call that `text` spells in JSON, or None where it spells none."""
    try:
        found = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", {})
    return Call(found["name"], arguments) if isinstance(arguments, dict) else None


def calls_of(message: Json) -> list[Call]:
    """The calls that a message makes; arguments that are no mapping are left out."""
    found = [read_call(json.dumps(_function(call))) for call in message.get("tool_calls") or ()]
    return [call for call in found if call]


def said(message: Json) -> str:
    """A message in a model's own words: its text, then its calls."""
    parts = [_text(message.get("content"))]
    parts += [spelled(**_function(call)) for call in message.get("tool_calls") or ()]
    return "\n".join(part for part in parts if part)


def spelled(name: Any, arguments: Any) -> str:
    """A call in a model's own words."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def same(one: Json, other: Json) -> bool:
    """Whether two messages say the same. Programs pass messages on with fields of their own, other ids, and empty
    text as null: none of that counts."""

    def kernel(message: Json) -> tuple[Any, ...]:
        calls = [(c.name, json.dumps(c.arguments, sort_keys=True)) for c in calls_of(message)]
        return (message.get("role"), _text(message.get("content")).strip(), calls)

    return kernel(one) == kernel(other)


def goes_on(chat: Chat, earlier: Chat, answer: str) -> tuple[Json, ...] | None:
    """The messages that `chat` has after `earlier` and the `answer` to it; None where it is no such continuation."""
    n = len(earlier.messages)
    if len(chat.messages) <= n + 1 or chat.tools != earlier.tools:
        return None
    if not all(map(same, chat.messages, earlier.messages)) or not same(chat.messages[n], assistant(answer)):
        return None
    return chat.messages[n + 1 :]


def with_system(messages: Sequence[Json], system: str) -> list[Json]:
    """The messages after the system message `system`, which takes the place of the one that they begin with, if any."""
    rest = messages[1:] if messages and messages[0].get("role") == "system" else messages
    return [{"role": "system", "content": system}, *rest]


def templated(message: Json) -> Json:
    """The message as chat templates of `transformers` read it: content in one text, arguments as mappings."""
    calls = [{"type": "function", "function": _function(call)} for call in message.get("tool_calls") or ()]
    kept = {key: message[key] for key in ("role", "name", "tool_call_id") if message.get(key) is not None}
    return kept | {"content": _text(message.get("content"))} | ({"tool_calls": calls} if calls else {})


def _function(call: Json) -> Json:
    """The `name` and the `arguments` of a call of OpenAI's, these no longer in a text of their own."""
    function = call.get("function") or {}
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        with contextlib.suppress(json.JSONDecodeError, RecursionError):  # what cannot be read is shown as it is
            arguments = json.loads(arguments)
    return {"name": function.get("name"), "arguments": arguments}


def _text(content: Any) -> str:
    """Content in one text; of parts, those of text."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)
