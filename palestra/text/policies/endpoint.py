"""A policy that samples from an endpoint with OpenAI's chat completions API: a served model, a frozen opponent, a
teacher."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field

from palestra.core.chat import Chat, Json, render_message, thought_of, with_system
from palestra.core.failures import ContextLengthExceeded
from palestra.core.http.chat_client import (
    Endpoint,
    EndpointError,
    RequestRefused,
    complete,
    endpoint_error,
    request_answer,
)
from palestra.core.types import Answer, Sample
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
        self.name = name
        self.config = config

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
                thought=thought_of(message),
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
                    f"{config.model} at {config.completions_url} answered {refused.reason!r}: shorten the observation "
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


# ---- log-probabilities of answers: the teacher of on-policy distillation
#
# The API is vLLM's: `POST /v1/completions` with token ids as the prompt and `prompt_logprobs: 0` returns the
# log-probability of every prompt token, at temperature 1. `palestra serve-sampler` has it too. The token ids are the
# student's, so the endpoint's model must have the same vocabulary. Shapes: `P` prompt tokens, `T` answer tokens.

MAX_CONCURRENT = 32  # requests of one learner at a time


async def answer_logprobs_at(endpoint: Endpoint, samples: Sequence[Sample]) -> list[np.ndarray]:
    """Returns log-probabilities [T] float32 of each sample's answer tokens under the endpoint's model, at temperature
    1. Raises ValueError if the endpoint gives none."""
    gate = asyncio.Semaphore(MAX_CONCURRENT)

    async def one(sample: Sample) -> np.ndarray:
        async with gate:
            ids = np.concatenate([sample.prompt_ids, sample.token_ids])
            return (await prompt_logprobs(endpoint, ids.tolist()))[len(sample.prompt_ids) - 1 :]

    try:
        return list(await asyncio.gather(*map(one, samples)))
    except EndpointError as error:
        raise ValueError(f"a teacher gives no scores: {error}. Continue the run with --resume") from error


async def prompt_logprobs(endpoint: Endpoint, token_ids: Sequence[int]) -> np.ndarray:
    """Returns log-probabilities [P - 1] float32 of `token_ids[1:]`. Raises EndpointError if the endpoint gives no
    answer, or one without them."""
    fields = {"prompt": list(token_ids), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}

    def parse(response: Any) -> np.ndarray:
        logprobs = _read(response, token_ids)
        if logprobs is None:
            raise endpoint_error(
                endpoint,
                "answered without the log-probabilities of the prompt's tokens, which a teacher needs (vLLM's "
                "prompt_logprobs, for token ids of the same vocabulary)",
                [],
            )
        return logprobs

    url = endpoint.text_completions_url
    return np.asarray(await request_answer(endpoint, url, fields, parse), np.float32)


def _read(response: Any, token_ids: Sequence[int]) -> np.ndarray | None:
    """Returns the log-probabilities in a response; None unless there is a finite one for each token but the first."""
    try:
        tokens = response.json()["choices"][0]["prompt_logprobs"]
        pairs = zip(tokens[1:], token_ids[1:], strict=True)
        values = [float(each[str(token)]["logprob"]) for each, token in pairs]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return np.array(values, np.float32) if all(map(math.isfinite, values)) else None
