"""JSON request bodies of the supported subset of OpenAI's completions API."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field

from palestra.service.wire.schemas.requests import (
    MAX_CHAT_CHARS,
    MAX_ENTRIES,
    MAX_NEW_TOKENS,
    MAX_PROMPTS,
    MAX_SAMPLES,
    MAX_SEQUENCES,
    MAX_TEMPERATURE,
    MAX_TOPK,
    Id,
    Seed,
    StopText,
    TinkerPathText,
    Tokens,
)
from palestra.service.wire.schemas.wire_model import WireModel

P = TypeVar("P")
Prompts = Annotated[list[P], Field(max_length=MAX_PROMPTS, fail_fast=True)]


class CompletionParams(WireModel):
    """Fields common to completions and chat completions. A missing `max_tokens` means as many as fit."""

    model_config = ConfigDict(str_max_length=MAX_CHAT_CHARS)

    model: TinkerPathText
    max_tokens: Annotated[int, Field(ge=1, le=MAX_NEW_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    seed: Seed | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_ENTRIES)] | None = None
    stream: bool | None = None


class CompletionRequest(CompletionParams):
    """Body of `/completions`. `logprobs` counts the alternatives to return for each token."""

    prompt: str | Prompts[str] | Tokens | Prompts[Tokens]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOPK)] | None = None
    echo: bool | None = None


class ChatMessage(WireModel):
    """One message of a chat."""

    model_config = ConfigDict(str_max_length=MAX_CHAT_CHARS)

    role: Id
    content: str | list[dict[str, Any]] | None = None
    name: Id | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: Id | None = None


class ChatCompletionRequest(CompletionParams):
    """Body of `/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_SEQUENCES, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_NEW_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOPK)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_ENTRIES)] | None = None
    tool_choice: str | dict[str, Any] | None = None
