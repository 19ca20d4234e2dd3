"""JSON request bodies of the supported subset of OpenAI's completions API.

A field is used, changes nothing about the answer (`palestra.core.http.calls.asks_nothing`), or is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Self, TypeVar

from pydantic import ConfigDict, Field, PrivateAttr, field_validator, model_validator

from palestra.core.chat import Chat
from palestra.core.http.answer_form import AnswerForm
from palestra.core.http.calls import FORM_KEYS, asks_nothing, check_limits, parse_conversation, wants_stream_usage
from palestra.service.wire.schemas.requests import (
    MAX_CHAT_CHARS,
    MAX_ENTRIES,
    MAX_INT32,
    MAX_NEW_TOKENS,
    MAX_PROMPTS,
    MAX_SAMPLES,
    MAX_SEQUENCES,
    MAX_TEMPERATURE,
    MAX_TOPK,
    Seed,
    StopText,
    TinkerPathText,
    Token,
    Tokens,
)
from palestra.service.wire.schemas.wire_model import WireModel

P = TypeVar("P")
Prompts = Annotated[list[P], Field(max_length=MAX_PROMPTS, fail_fast=True)]


class CompletionParams(WireModel):
    """Fields common to completions and chat completions. A missing `max_tokens` means as many as fit."""

    model_config = ConfigDict(str_max_length=MAX_CHAT_CHARS)

    type: None = None
    model: TinkerPathText
    max_tokens: Annotated[int, Field(ge=1, le=MAX_NEW_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT32)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    seed: Seed | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_ENTRIES)] | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_ENTRIES)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None

    @classmethod
    def asks_nothing(cls, key: str, value: Any) -> bool:
        """Returns whether a field that is not defined here changes nothing about the answer."""
        return asks_nothing(key, value)

    @field_validator("stream_options")
    @classmethod
    def _check_fields(cls, options: dict[str, Any] | None) -> dict[str, Any] | None:
        wants_stream_usage(options)
        return options

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end the answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionRequest(CompletionParams):
    """Body of `/completions`. `logprobs` counts the alternatives to return for each token."""

    prompt: str | Prompts[str] | Tokens | Prompts[Tokens]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOPK)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


class ChatCompletionRequest(CompletionParams):
    """Body of `/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_SEQUENCES)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_NEW_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOPK)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_ENTRIES)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    _chat: Chat = PrivateAttr()

    @model_validator(mode="after")
    def _conversation(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs are beside logprobs: send logprobs: true too")
        check_limits(self.max_tokens, self.max_completion_tokens)
        if self.reasoning_effort and "reasoning_effort" in (self.chat_template_kwargs or {}):
            raise ValueError("reasoning_effort stands in chat_template_kwargs too: send one of them")
        self._chat = parse_conversation(self.messages, self.tools, self.tool_choice)
        return self

    @property
    def chat(self) -> Chat:
        """The conversation, with the tools that its answer may call."""
        return self._chat

    def parse_form(self) -> AnswerForm:
        """Returns the form that the answer must have. Raises ValueError if it is not a form; takes up to a second."""
        return AnswerForm.parse(self.model_dump(include={"tools", *FORM_KEYS}))

    @property
    def template_options(self) -> dict[str, Any]:
        """Options of the chat template."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | (self.chat_template_kwargs or {})
