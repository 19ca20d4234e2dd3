"""Calls of OpenAI's chat completions, parsed from the JSON of a request, and their answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from palestra.core.chat import Chat

ANY_KEY = ""  # key of a session that accepts any key
SAMPLING_KEYS = ("temperature", "top_p", "max_tokens", "max_completion_tokens", "seed", "stop")


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
    """One call: the model, the chat, the sampling settings (a subset of `SAMPLING_KEYS`, as received), and the future
    of its answer."""

    model: str
    chat: Chat
    sampling: dict[str, Any] = field(default_factory=dict)
    answer: Future[str | ChatReply] = field(default_factory=Future)


class SessionProtocol(Protocol):
    """A session of the chat server: the names of its models, and the handler of their calls."""

    models: tuple[str, ...]
    deliver: Callable[[ChatCall], None]


class _Open(BaseModel):
    """Base class of request parts; unknown fields are allowed."""

    model_config = ConfigDict(extra="allow", strict=True)


class _Function(_Open):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class _Call(_Open):
    function: _Function | None = None


class _Part(_Open):
    text: str


class _Message(_Open):
    role: str = Field(min_length=1, max_length=64)
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[_Call] | None = None


class _Conversation(_Open):
    messages: list[_Message] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None


def parse_call(body: Any, models: Sequence[str]) -> tuple[ChatCall, bool]:
    """Parses a request's JSON. Returns the call, and whether its answer should be streamed. Raises ValueError if it is
    invalid or names an unknown model."""
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object")
    name = str(body.get("model")).rsplit("/", 1)[-1]  # some clients prefix the provider's name
    if name not in models:
        raise ValueError(f"there is no model {name[:200]!r} here, but {', '.join(models)}: each is a seat")
    if body.get("n") not in (None, 1):
        raise ValueError("n must be 1: siblings are drawn by the algorithm, not by the program")
    messages, tools = body.get("messages"), body.get("tools") or []
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise ValueError("messages must be a list of messages, each with a role")
    if any(_has_pictures(message.get("content")) for message in messages):
        raise ValueError("messages of text only are answered here: send parts of type text")
    _check(messages, tools)
    settings = {key: body[key] for key in SAMPLING_KEYS if body.get(key) is not None}
    return ChatCall(name, Chat(tuple(messages), tuple(tools)), settings), bool(body.get("stream"))


def _has_pictures(content: Any) -> bool:
    return isinstance(content, list) and any(not isinstance(p, dict) or p.get("type") != "text" for p in content)


def _check(messages: Any, tools: Any) -> None:
    """Raises ValueError for fields of the wrong type."""
    try:
        _Conversation(messages=messages, tools=tools)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False)[:3]
        raise ValueError("; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in wrong)) from None
