"""A policy that samples from an endpoint with OpenAI's chat completions API: a served model, a frozen opponent, a
teacher."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from pydantic import Field

from palestra.core.chat import Chat, Json, render_message, with_system
from palestra.core.failures import ContextLengthExceeded
from palestra.core.http.chat_client import Endpoint, RequestRefused, complete
from palestra.core.types import Answer
from palestra.text.policies.base import Query, chat_messages, request_error


class EndpointConfig(Endpoint):
    """A policy behind an endpoint."""

    type: Literal["endpoint"] = "endpoint"
    """Kind of policy: an endpoint with OpenAI's chat completions API."""
    max_tokens: int = Field(512, ge=1)
    """Maximum number of tokens of an answer."""
    temperature: float = Field(1.0, ge=0)
    """Softmax temperature, at least 0; 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: total probability of the tokens to keep, in (0, 1]. 1 keeps all tokens."""
    system: str | None = None
    """System prompt, which replaces the env's role text. null: the env's role text."""
    history: Literal["none", "conversation"] = "none"
    """History in the prompt: "none" shows the current observation only, "conversation" also the model's own earlier
    turns."""


class EndpointPolicy:
    """A policy whose answers are text without tokens: usable for play and for imitation, not for reinforcement
    learning. Raises ValueError if the endpoint's config is invalid."""

    def __init__(self, name: str, config: EndpointConfig) -> None:
        config.check()
        self.name, self.config = name, config

    async def act(self, query: Query) -> list[Answer]:
        """Returns `query.n` answers, requested concurrently, each with its own seed. Raises ContextLengthExceeded if
        the endpoint refuses the prompt as too long for its model, and EndpointError if there is no answer for another
        reason."""
        asked = [self._ask(query, i) for i in range(query.n)]
        return [
            Answer(
                render_message(message),
                self.name,
                stop_reason="length" if message["finish_reason"] == "length" else "stop",
            )
            for message in await asyncio.gather(*asked)
        ]

    async def _ask(self, query: Query, i: int) -> Json:
        config = self.config
        settings: dict[str, Any] = {
            "max_tokens": config.max_tokens,
            "temperature": config.temperature,
            "top_p": config.top_p,
            "seed": (query.seed + i) % 2**31,
        }
        if isinstance(query.observation, Chat) and query.observation.tools:
            settings["tools"] = list(query.observation.tools)
        try:
            return await complete(config, self._messages(query), **settings)
        except RequestRefused as refused:
            if refused.status == 400 and isinstance(request_error(refused.reason), ContextLengthExceeded):
                raise ContextLengthExceeded(
                    f"{config.model} at {config.completions_url} answered: {refused.reason}. Shorten the observation "
                    "or lower max_tokens"
                ) from refused
            raise

    def _messages(self, query: Query) -> list[Json]:
        seen = query.observation
        if not isinstance(seen, Chat):
            history = query.history if self.config.history == "conversation" else ()
            return list(chat_messages(Query(query.role, seen, history=history), self.config.system))
        if self.config.system is None:
            return list(seen.messages)
        return with_system(seen.messages, self.config.system)
