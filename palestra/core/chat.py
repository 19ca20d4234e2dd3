"""Conversations in OpenAI's message format, and tool calls as text.

Tool calls are written as `<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>`. Hermes and Qwen
models put line breaks around the JSON, which parsing accepts. Parsing and rendering are inverse to each other, so that
a conversation returned by an agent program can be matched with the one that the model sampled.
"""

from __future__ import annotations

import contextlib
import json
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from palestra.core.files import parse_json

Json = dict[str, Any]
ESCAPED_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")  # of Unicode: a terminal interprets them instead of displaying
UNESCAPED_CHARS = "\n\t\u200c\u200d"  # exceptions: line ends, tabs, and joiners inside words and emoji
TOOL_CALL_PATTERN = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def escape_control_chars(text: str) -> str:
    """Returns `text` with control characters (ANSI escapes, bidi controls, surrogates) replaced by escapes such as
    `\\x1b`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_escape_control_char, text))


def _escape_control_char(character: str) -> str:
    if unicodedata.category(character) in ESCAPED_CATEGORIES and character not in UNESCAPED_CHARS:
        return character.encode("unicode_escape").decode()
    return character


@dataclass(frozen=True)
class Chat:
    """A whole conversation as an observation: `messages` before the one to be generated, and the `tools` that may be
    called (OpenAI's function descriptions).

        Chat(({"role": "user", "content": "2 + 2?"},))

    The first `num_shared` messages, such as worked examples, are the same in every episode of the env: a hint that a
    sampler computes them once for all conversations in progress. It is not recorded.
    """

    messages: tuple[Json, ...]
    tools: tuple[Json, ...] = ()
    num_shared: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return "\n".join(f"{message['role']}: {render_message(message)}" for message in self.messages)


@dataclass(frozen=True)
class ToolCall:
    """A tool call: the name of the tool and its arguments."""

    name: str
    arguments: Json


def parse_assistant_message(text: str) -> Json:
    """Parses a model's answer `text` into an assistant message in OpenAI's format. Valid tool calls become
    `tool_calls`; all other text stays in `content`."""
    calls: list[ToolCall] = []

    def take(found: re.Match[str]) -> str:
        if (call := parse_tool_call(found[1])) is None:
            return found[0]
        calls.append(call)
        return ""

    content = TOOL_CALL_PATTERN.sub(take, text).strip()
    message: Json = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{i}", "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
            for i, c in enumerate(calls)
        ]
    return message


def parse_tool_call(text: str) -> ToolCall | None:
    """Parses a tool call from JSON; returns None if `text` is not a valid call."""
    try:
        found = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return ToolCall(found["name"], arguments)


def tool_calls_of(message: Json) -> list[ToolCall]:
    """Returns the tool calls of a message. Calls whose arguments are not a mapping are left out."""
    found = [parse_tool_call(json.dumps(_function(call))) for call in message.get("tool_calls") or ()]
    return [call for call in found if call]


def render_message(message: Json) -> str:
    """Renders a message as model text: its content, then its tool calls."""
    parts = [_text(message.get("content"))]
    parts += [render_tool_call(**_function(call)) for call in message.get("tool_calls") or ()]
    return "\n".join(part for part in parts if part)


def render_tool_call(name: Any, arguments: Any) -> str:
    """Renders a tool call as model text."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)  # as chat templates write it
    call = call.encode(errors="backslashreplace").decode()  # a lone surrogate is escaped: no tokenizer encodes it
    return f"<tool_call>{call}</tool_call>"


def same_message(one: Json, other: Json) -> bool:
    """Returns whether two messages have equal role, content and tool calls. Extra fields, call ids, and null instead of
    empty text are ignored, since agent programs change them."""

    def kernel(message: Json) -> tuple[Any, ...]:
        calls = [(c.name, json.dumps(c.arguments, sort_keys=True)) for c in tool_calls_of(message)]
        return (message.get("role"), _text(message.get("content")).strip(), calls)

    return kernel(one) == kernel(other)


def messages_after(chat: Chat, earlier: Chat, answer: str) -> tuple[Json, ...] | None:
    """Returns the messages of `chat` after `earlier` and the `answer` to it, which `chat` may have with its thought in
    the content; None if `chat` does not continue them."""
    n = len(earlier.messages)
    if len(chat.messages) <= n + 1 or chat.tools != earlier.tools:
        return None
    said = chat.messages[n]
    without_thought = said | {"content": part_thought(_text(said.get("content")))[1]}
    wanted = parse_assistant_message(answer)
    if not (same_message(said, wanted) or same_message(without_thought, wanted)):
        return None
    if not all(map(same_message, chat.messages, earlier.messages)):
        return None
    return chat.messages[n + 1 :]


def with_system(messages: Sequence[Json], system: str | None) -> list[Json]:
    """Returns the messages after the system message `system`, which replaces a leading system message (None: as they
    are)."""
    if system is None:
        return list(messages)
    if messages and messages[0].get("role") == "system":
        messages = messages[1:]
    return [{"role": "system", "content": system}, *messages]


def with_reasoning(message: Json, thought: str) -> Json:
    """Returns an assistant's message with its thought, if it has one, as `reasoning_content`."""
    if not thought:
        return message
    return message | {"reasoning_content": thought}


THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
MESSAGE_KEYS = ("role", "content", "name", "tool_call_id", "tool_calls", *THOUGHT_KEYS)


def to_template_message(message: Json) -> Json:
    """Converts a message for chat templates of `transformers`: content as one string, tool-call arguments as mappings,
    a thought as `reasoning_content`. Fields without a value are left out. Raises ValueError for what no template is
    given: other fields, two different thoughts, parts that are not text, and calls or thoughts of another role than the
    assistant."""
    given = {key for key, value in message.items() if value not in (None, [], {}, "")}
    if unknown := sorted(given - set(MESSAGE_KEYS)):
        raise ValueError(
            f"a message has the field {unknown[0]!r}, which is not used: leave it out ({', '.join(MESSAGE_KEYS)} are)"
        )
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ValueError(f"a message has a part of type {str(kind)[:64]!r}, and only texts are used: leave it out")
    if message.get("role") != "assistant" and (message.get("tool_calls") or thought_of(message)):
        raise ValueError(f"calls and thoughts are the assistant's, not of role {str(message.get('role'))[:64]!r}")
    converted = {key: message[key] for key in ("role", "name", "tool_call_id") if message.get(key) is not None}
    converted["content"] = _text(content)
    if thought := thought_of(message):
        if len({str(message[key]) for key in THOUGHT_KEYS if message.get(key)}) > 1:
            raise ValueError(f"a message has two different thoughts ({', '.join(THOUGHT_KEYS)}): leave one")
        converted["reasoning_content"] = thought
    if calls := message.get("tool_calls"):
        converted["tool_calls"] = [_template_call(call) for call in calls]
    return converted


def _template_call(call: Json) -> Json:
    converted = {"type": "function", "function": _function(call)}
    if call.get("id") is None:
        return converted
    return {"id": str(call["id"]), **converted}


def thought_of(message: Json) -> str:
    """Returns the thought of an assistant's message, under any of its usual names; empty if it has none."""
    found = (message.get(key) for key in THOUGHT_KEYS)
    return next((str(thought) for thought in found if thought), "")


def with_thought(text: str, thought: str | None) -> str:
    """Returns an answer's text after its thought, between <think> and </think>."""
    if not thought:
        return text
    return f"<think>\n{thought}\n</think>\n\n{text}"


def part_thought(text: str) -> tuple[str, str]:
    """Returns the thought of an answer between <think> and </think>, and the text after it. The first mark is missing
    where the prompt has begun the thought, the second where the answer was cut: all of it is a thought then."""
    begins = text.lstrip()
    thought, ended, rest = begins.removeprefix("<think>").partition("</think>")
    if begins.startswith("<think>") or (ended and "<think>" not in thought):
        return thought.strip(), rest.lstrip()
    return "", text


def _function(call: Json) -> Json:
    """Returns `name` and `arguments` of an OpenAI tool call, with the arguments decoded from JSON."""
    function = call.get("function") or {}
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # invalid JSON stays text
            arguments = parse_json(arguments)
    return {"name": function.get("name"), "arguments": arguments}


def _text(content: Any) -> str:
    """Returns message content as one string; of a list of parts, the text parts only."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)
