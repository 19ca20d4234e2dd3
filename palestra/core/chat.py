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

Json = dict[str, Any]
ANSWER_MARKER = "\x00answer\x00"  # stands for an answer in a rendered template
ESCAPED_CATEGORIES = (
    "Cc",
    "Cf",
    "Cs",
    "Zl",
    "Zp",
)  # Unicode categories that a terminal interprets instead of displaying
UNESCAPED_CHARS = "\n\t\u200c\u200d"  # exceptions: line ends, tabs, and joiners inside words and emoji
TOOL_CALL_PATTERN = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def escape_control_chars(text: str) -> str:
    """Returns `text` with control characters (ANSI escapes, bidi controls, surrogates) replaced by escapes such as
    `\\x1b`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        _escaped(c) if unicodedata.category(c) in ESCAPED_CATEGORIES and c not in UNESCAPED_CHARS else c for c in text
    )


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def template_turn_end(tokenizer: Any) -> int | None:
    """Returns the id of the special token with which the tokenizer's chat template ends an answer (Phi-3's `<|end|>`,
    GLM-4's `<|user|>`, which begins the next turn); the tokenizer's end-of-text token if it has no chat template, or
    the template ends answers without a special token."""
    end: int | None = tokenizer.eos_token_id
    after = _text_after(tokenizer, {"role": "assistant", "content": ANSWER_MARKER}, {})
    if after is None:
        return end
    ids = tokenizer.encode(after, add_special_tokens=False)
    at = turn_end_index(tokenizer, ids)
    return end if at is None else ids[at]


def _text_after(tokenizer: Any, message: Json, options: Json) -> str | None:
    """Returns the text that the tokenizer's chat template writes after the content of an answer `message`, which is
    `ANSWER_MARKER`, when another turn follows; None if there is no template, or if it raises or leaves the content
    out."""
    if not tokenizer.chat_template:
        return None
    asked = {"role": "user", "content": "?"}
    try:
        whole: str = tokenizer.apply_chat_template([asked, message, asked], tokenize=False, **options)
    except Exception:  # a template may raise any exception
        return None
    _, marker, after = whole.partition(ANSWER_MARKER)
    return after if marker else None


def turn_end_index(tokenizer: Any, ids: Sequence[int]) -> int | None:
    """Returns the index of the special token that ends an answer in `ids`, a template's tokens after the answer; None
    if they begin with other text than white space."""
    special = {token for token, about in tokenizer.added_tokens_decoder.items() if about.special}
    special.add(tokenizer.eos_token_id)
    found = next((i for i, token in enumerate(ids) if token in special), None)
    return None if found is None or tokenizer.decode(list(ids[:found])).strip() else found


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
        call = parse_tool_call(found[1])
        calls.extend([call] if call else [])
        return "" if call else found[0]

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
    return ToolCall(found["name"], arguments) if isinstance(arguments, dict) else None


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


def with_template_calls(text: str, tokenizer: Any, end: str, options: Json) -> str:
    """Returns an answer's text with its tool calls written as the tokenizer's chat template writes those of earlier
    turns (Qwen's puts line breaks around each), so that imitation teaches the tokens that later prompts contain.
    Answers of the template end with `end`; `options` are its options.

    A text stays as it is if it writes calls in its own way (not as `render_message` does), or if the template has no
    form of calls that can be parsed to the same ones."""
    message = parse_assistant_message(text)
    if "tool_calls" not in message or text != render_message(message) or not end:
        return text
    after = _text_after(tokenizer, to_template_message(message | {"content": ANSWER_MARKER}), options)
    calls = (after or "").split(end, 1)[0]
    rendered = message["content"] + calls if message["content"] else calls.lstrip("\n")
    return rendered if same_message(parse_assistant_message(rendered), message) else text


def same_message(one: Json, other: Json) -> bool:
    """Returns whether two messages have equal role, content and tool calls. Extra fields, call ids, and null instead of
    empty text are ignored, since agent programs change them."""

    def kernel(message: Json) -> tuple[Any, ...]:
        calls = [(c.name, json.dumps(c.arguments, sort_keys=True)) for c in tool_calls_of(message)]
        return (message.get("role"), _text(message.get("content")).strip(), calls)

    return kernel(one) == kernel(other)


def messages_after(chat: Chat, earlier: Chat, answer: str) -> tuple[Json, ...] | None:
    """Returns the messages of `chat` after `earlier` and the `answer` to it; None if `chat` does not continue them."""
    n = len(earlier.messages)
    if len(chat.messages) <= n + 1 or chat.tools != earlier.tools:
        return None
    if not all(map(same_message, chat.messages, earlier.messages)) or not same_message(
        chat.messages[n], parse_assistant_message(answer)
    ):
        return None
    return chat.messages[n + 1 :]


def with_system(messages: Sequence[Json], system: str) -> list[Json]:
    """Returns the messages after the system message `system`, which replaces a leading system message."""
    rest = messages[1:] if messages and messages[0].get("role") == "system" else messages
    return [{"role": "system", "content": system}, *rest]


def to_template_message(message: Json) -> Json:
    """Converts a message for chat templates of `transformers`: content as one string, tool-call arguments as
    mappings."""
    calls = [{"type": "function", "function": _function(call)} for call in message.get("tool_calls") or ()]
    kept = {key: message[key] for key in ("role", "name", "tool_call_id") if message.get(key) is not None}
    return kept | {"content": _text(message.get("content"))} | ({"tool_calls": calls} if calls else {})


def _function(call: Json) -> Json:
    """Returns `name` and `arguments` of an OpenAI tool call, with the arguments decoded from JSON."""
    function = call.get("function") or {}
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        with contextlib.suppress(json.JSONDecodeError, RecursionError):  # invalid JSON stays text
            arguments = json.loads(arguments)
    return {"name": function.get("name"), "arguments": arguments}


def _text(content: Any) -> str:
    """Returns message content as one string; of a list of parts, the text parts only."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)
