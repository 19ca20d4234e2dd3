"""A call of OpenAI's chat completions as data, read from the JSON of a request, and its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from palestra.chat import Chat

ANYBODY = ""  # the key of a session that answers whatever key comes
SETTINGS = ("temperature", "top_p", "max_tokens", "max_completion_tokens", "seed", "stop")


class Refused(Exception):
    """The reason for which a call gets no answer; the program gets it as an HTTP error."""


@dataclass(frozen=True)
class Said:
    """An answer with how it ended and how many tokens were read and written, where its owner knows that."""

    text: str
    cut_off: bool = False
    tokens: tuple[int, int] | None = None


@dataclass(frozen=True)
class Asked:
    """A call: who is asked, what about, how the answer is to be sampled (SETTINGS as they came), and where it goes."""

    model: str
    chat: Chat
    settings: dict[str, Any] = field(default_factory=dict)
    answer: Future[str | Said] = field(default_factory=Future)


class Listens(Protocol):
    """A session of a server: the models that it may ask, and the handler of their calls."""

    models: tuple[str, ...]
    deliver: Callable[[Asked], None]


class _Open(BaseModel):
    """Fields of a message; programs send others, which do no harm."""

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


def read_call(body: Any, models: Sequence[str]) -> tuple[Asked, bool]:
    """The call that a request's JSON makes, and whether its answer is to be streamed. Raises ValueError for none."""
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object")
    name = str(body.get("model")).rsplit("/", 1)[-1]  # some programs put the provider's name before it
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
    settings = {key: body[key] for key in SETTINGS if body.get(key) is not None}
    return Asked(name, Chat(tuple(messages), tuple(tools)), settings), bool(body.get("stream"))


def _has_pictures(content: Any) -> bool:
    return isinstance(content, list) and any(not isinstance(p, dict) or p.get("type") != "text" for p in content)


def _check(messages: Any, tools: Any) -> None:
    """Raises ValueError for fields of the wrong type."""
    try:
        _Conversation(messages=messages, tools=tools)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False)[:3]
        raise ValueError("; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in wrong)) from None
