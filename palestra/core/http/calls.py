"""Calls of OpenAI's chat completions, parsed from the JSON of a request, and their answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from palestra.core.chat import Chat, Json, parse_assistant_message, thought_of, to_template_message, with_reasoning
from palestra.core.http.answer_form import AnswerForm
from palestra.core.plain_values import plain_value

ANY_KEY = ""  # key of a session that accepts any key
SAMPLING_KEYS = (
    *("temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens"),
    *("seed", "stop", "stop_token_ids"),
)
FORM_KEYS = {"response_format", "tool_choice", "parallel_tool_calls"}
CALL_KEYS = {"model", "messages", "tools", "n", "stream", "stream_options"}
CALL_KEYS |= {*FORM_KEYS, *SAMPLING_KEYS}

# What clients send that changes nothing about an answer: bookkeeping of a provider, with any value,
BOOKKEEPING = {"user", "metadata", "store", "service_tier", "safety_identifier"}
BOOKKEEPING |= {"prompt_cache_key", "prompt_cache_retention"}
# and fields with the value that asks for what is done anyway.
DEFAULTS: Json = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "min_tokens": 0,
    "best_of": 1,
    "logprobs": False,
    "top_logprobs": 0,
    "echo": False,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "skip_special_tokens": True,
    "ignore_eos": False,
}
EMPTY: tuple[Any, ...] = (None, [], {}, "")


class CallRefused(Exception):
    """A call was refused for the given reason; the client gets an HTTP error."""


@dataclass(frozen=True)
class ChatReply:
    """A completion: whether it was cut off at its length limit, the number of (prompt, completion) tokens, None if
    unknown, and the model's thought."""

    text: str
    hit_length_limit: bool = False
    token_counts: tuple[int, int] | None = None
    thought: str = ""


@dataclass(frozen=True)
class ChatCall:
    """One call: the model, the chat, the sampling settings (a subset of `SAMPLING_KEYS`, as received), whether its
    answer is streamed, with token counts at the end, the form that it asks for, and the future of
    its answer."""

    model: str
    chat: Chat
    sampling: dict[str, Any] = field(default_factory=dict)
    stream: bool = False
    stream_usage: bool = False
    form: AnswerForm = field(default_factory=AnswerForm)
    answer: Future[str | ChatReply] = field(default_factory=Future)


class SessionProtocol(Protocol):
    """A session of the chat server: the names of its models, and the handler of their calls."""

    models: tuple[str, ...]
    deliver: Callable[[ChatCall], None]


class _Open(BaseModel):
    """Base class of request parts; unknown fields are checked apart."""

    model_config = ConfigDict(extra="allow", strict=True)


class _Function(_Open):
    name: str
    arguments: str | dict[str, Any] | None = None


class _Call(_Open):
    function: _Function


class _Part(_Open):
    text: str


class _Message(_Open):
    role: str = Field(min_length=1, max_length=64)
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[_Call] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None


class _Conversation(_Open):
    messages: list[_Message] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None


def parse_call(body: Any, models: Sequence[str]) -> ChatCall:
    """Parses a request's JSON. Raises ValueError if it is invalid, names an unknown model, or asks for something that
    is not done here."""
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object")
    name = str(body.get("model")).rsplit("/", 1)[-1]  # some clients prefix the provider's name
    if name not in models:
        raise ValueError(f"there is no model {name[:200]!r} here, but {', '.join(models)}: each is a seat")
    if body.get("n") not in (None, 1):
        raise ValueError("n must be 1: siblings are drawn by the algorithm, not by the program")
    for key, value in body.items():
        if key not in CALL_KEYS and not asks_nothing(key, value):
            other = ""
            if key in DEFAULTS:
                other = f", or send {json.dumps(DEFAULTS[key])}"
            raise ValueError(f"{key[:64]!r} is not used here: leave it out{other}")
    if body.get("stream") not in (None, True, False):
        raise ValueError(f"stream is {str(body['stream'])[:64]!r}: send true or false")
    check_limits(body.get("max_tokens"), body.get("max_completion_tokens"))
    chat = parse_conversation(body.get("messages"), body.get("tools"), body.get("tool_choice"))
    form = AnswerForm.parse(body)
    settings = {key: body[key] for key in SAMPLING_KEYS if body.get(key) is not None}
    usage = wants_stream_usage(body.get("stream_options"))
    return ChatCall(name, chat, settings, bool(body.get("stream")), usage, form)


def asks_nothing(key: str, value: Any) -> bool:
    """Returns whether a field of a request changes nothing about the answer, though it is not used."""
    return value in EMPTY or key in BOOKKEEPING or (key in DEFAULTS and bool(value == DEFAULTS[key]))


def check_limits(earlier: Any, later: Any) -> None:
    """Raises ValueError for two limits of an answer's tokens, by the two names that the field has had."""
    if None not in (earlier, later) and earlier != later:
        raise ValueError("max_tokens and max_completion_tokens differ: send one of them")


def check_part(part: Json, used: Collection[str], where: str) -> None:
    """Raises ValueError for the first field of a part of a request that has a value and is not used."""
    for key, value in part.items():
        if key not in used and value not in EMPTY:
            raise ValueError(f"{where}: {key[:64]!r} is not used here: leave it out")


def wants_stream_usage(options: Any) -> bool:
    """Returns whether a stream ends with token counts, by a request's `stream_options`. Raises ValueError if they are
    invalid."""
    if options is not None and not isinstance(options, dict):
        raise ValueError('stream_options must be an object, such as {"include_usage": true}')
    check_part(options or {}, ("include_usage", "include_obfuscation"), "stream_options")
    return bool((options or {}).get("include_usage"))


def parse_conversation(messages: Any, tools: Any = None, choice: Any = None) -> Chat:
    """Returns the conversation of a request, without tools if its `tool_choice` is "none". Raises ValueError if it is
    invalid or has a part that is not used."""
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise ValueError("messages must be a list of messages, each with a role")
    if any(_has_pictures(message.get("content")) for message in messages):
        raise ValueError("messages of text only are answered here: send parts of type text")
    try:
        plain_value([messages, tools])
    except ValueError as error:
        raise ValueError(f"the conversation has {error}, which no tokenizer encodes") from None
    _check_types(messages, tools)
    for i, message in enumerate(messages):
        _check_message(message, f"messages.{i}")
    for i, tool in enumerate(tools or ()):
        if tool.get("type", "function") != "function":
            raise ValueError(f"tools.{i}: type {str(tool['type'])[:64]!r} is not offered here: send functions")
        if not (tool.get("function") or tool).get("name"):
            raise ValueError(
                f"tools.{i}: the tool has no name: send {{'type': 'function', 'function': {{'name': ...}}}}"
            )
    return Chat(tuple(messages), () if choice == "none" else tuple(tools or ()))


def _has_pictures(content: Any) -> bool:
    return isinstance(content, list) and any(not isinstance(p, dict) or p.get("type") != "text" for p in content)


def _check_message(message: Json, where: str) -> None:
    """Raises ValueError for a part of a message that no template is given."""
    try:
        to_template_message(message)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    content = message.get("content")
    if content is None and not message.get("tool_calls") and not thought_of(message):
        raise ValueError(f"{where}: the message has no content: give a text, which may be empty")
    for part in content if isinstance(content, list) else ():
        check_part(part, ("type", "text", "cache_control"), f"{where}.content")
    for call in message.get("tool_calls") or ():
        check_part(call, ("id", "type", "function", "index"), f"{where}.tool_calls")
        if call.get("type", "function") not in ("function", None):
            raise ValueError(f"{where}.tool_calls: type {str(call['type'])[:64]!r} is not used here: send functions")
        check_part(call["function"], ("name", "arguments"), f"{where}.tool_calls.function")


def _check_types(messages: Any, tools: Any) -> None:
    """Raises ValueError for fields of the wrong type."""
    try:
        _Conversation(messages=messages, tools=tools)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False)[:3]
        raise ValueError("; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in wrong)) from None


def assistant_message(text: str, thought: str, chat: Chat) -> Json:
    """Returns an answer to a conversation in OpenAI's format. Without tools, nothing in its text is
    a call. Calls are numbered on from those of the conversation: clients drop a call whose id they
    have seen."""
    message: Json = {"role": "assistant", "content": text.strip()}
    if chat.tools:
        message = parse_assistant_message(text)
    earlier = sum(len(turn.get("tool_calls") or ()) for turn in chat.messages)
    for i, call in enumerate(message.get("tool_calls", ()), earlier):
        call["id"] = f"call_{i}"
    return with_reasoning(message, thought)


def error_body(status: int, message: str) -> Json:
    """Returns the body of an error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": status}}
