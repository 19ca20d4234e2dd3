"""A policy behind any endpoint that speaks OpenAI's chat completions: a served model, a frozen opponent, a teacher."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from pydantic import Field

from palestra.chat import Chat, Json, said
from palestra.config import Strict
from palestra.policies.base import Query, chat
from palestra.types import Answer
from palestra.web.client import Endpoint


class EndpointConfig(Strict):
    """`url` ends before `/chat/completions`. The key is read from the environment variable `key_env`, and kept nowhere.
    `memory: conversation` shows the model its own earlier turns; `timeout` is seconds for an answer, `retries` (at most
    so many) included."""

    type: Literal["endpoint"] = "endpoint"
    url: str
    model: str
    key_env: str | None = None
    max_tokens: int = Field(512, ge=1)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    system: str | None = None
    memory: Literal["none", "conversation"] = "none"
    timeout: float = Field(60.0, gt=0)
    retries: int = Field(4, ge=0)


class EndpointPolicy:
    """Answers are text without tokens: to play with, to learn from by imitation, not to reinforce."""

    def __init__(self, name: str, config: EndpointConfig) -> None:
        self.name, self.config = name, config
        self.endpoint = Endpoint(config.url, config.model, config.key_env, config.timeout, config.retries)

    async def act(self, query: Query) -> list[Answer]:
        """`query.n` answers, asked for at once; each sibling with a seed of its own."""
        asked = [self._ask(query, i) for i in range(query.n)]
        return [Answer(said(message), self.name) for message in await asyncio.gather(*asked)]

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
        return await self.endpoint.complete(self._messages(query), **settings)

    def _messages(self, query: Query) -> list[Json]:
        seen = query.observation
        if not isinstance(seen, Chat):
            history = query.history if self.config.memory == "conversation" else ()
            return list(chat(Query(query.role, seen, history=history), self.config.system))
        if self.config.system is None:
            return list(seen.messages)
        rest = [message for message in seen.messages if message.get("role") != "system"]
        return [{"role": "system", "content": self.config.system}, *rest]
