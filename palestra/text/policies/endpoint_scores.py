"""Log-probabilities of answers under a model behind an endpoint: the teacher of on-policy distillation.

The API is vLLM's: `POST /v1/completions` with token ids as the prompt and `prompt_logprobs: 0` returns the
log-probability of every prompt token, at temperature 1. `palestra serve-sampler` has it too. The token ids are the
student's, so the endpoint's model must have the same vocabulary.

Shapes: `P` prompt tokens, `T` answer tokens.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from palestra.core.http.chat_client import Endpoint, EndpointError, endpoint_error, open_client
from palestra.core.types import Sample

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
    faults: list[str] = []

    def parse(response: Any) -> np.ndarray:
        found = _read(response, token_ids)
        if found is None:
            raise endpoint_error(
                endpoint,
                "answered without the log-probabilities of the prompt's tokens, which a teacher needs (vLLM's "
                "prompt_logprobs, for token ids of the same vocabulary)",
                [],
            )
        return found

    try:
        async with asyncio.timeout(endpoint.limit), open_client(endpoint, faults) as client:
            return np.asarray(await client.request(endpoint.text_completions_url, fields, parse), np.float32)
    except TimeoutError:
        raise endpoint_error(endpoint, f"gave no answer within limit: {endpoint.limit:g} seconds", faults) from None


def _read(response: Any, token_ids: Sequence[int]) -> np.ndarray | None:
    """Returns the log-probabilities in a response; None unless there is a finite one for each token but the first."""
    try:
        tokens = response.json()["choices"][0]["prompt_logprobs"]
        pairs = zip(tokens[1:], token_ids[1:], strict=True)
        values = [float(each[str(token)]["logprob"]) for each, token in pairs]
    except (ValueError, LookupError, TypeError):
        return None
    return np.array(values, np.float32) if all(map(math.isfinite, values)) else None
