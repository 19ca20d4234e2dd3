"""Samplers on a server: sampling of completions and scoring of given sequences."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from palestra.engine.lora.adapters import Snapshot
from palestra.engine.sampling.request import Completion, Request
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.service.wire import tensors
from palestra.service.wire import wire_pb2 as pb
from palestra.text.policies.base import request_error
from palestra.text.policies.lm import SamplerProtocol
from palestra.text.tinker.connection import HttpReply, RequestRefused, ServiceConnection


class RemoteSnapshot(Snapshot):
    """A snapshot whose weights are on the server, under the sampler id `sampler`."""

    def __init__(self, sampler_id: str, name: str) -> None:
        super().__init__({}, name)
        self.sampler_id = sampler_id


class RemoteSampler(SamplerProtocol):
    """Client of a server's samplers. `base_sampler_id` is the sampler id of the base without an adapter, used for
    requests without one."""

    def __init__(self, connection: ServiceConnection, base_sampler_id: str) -> None:
        self.connection = connection
        self.base_sampler_id = base_sampler_id
        self._seqs: dict[str, int] = {}

    async def sample(self, request: Request) -> list[Completion]:
        """Returns the request's completions in sibling order: token ids int32 [T], log-probabilities float32 [T].
        Raises ValueError if its stop conditions cannot be sent, and ContextLengthExceeded if the server refuses its
        length."""
        adapter = request.adapter
        sampler = adapter.sampler_id if isinstance(adapter, RemoteSnapshot) else self.base_sampler_id
        settings = request.sampling
        params: dict[str, Any] = {
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k or -1,
            "seed": request.seed % 2**64,
            "stop": wire_stop(settings),
        }
        body = self._body(sampler, request.prompt_ids, num_samples=request.n, sampling_params=params)
        try:
            reply = await self.connection.loop_thread.run_async(self.connection.call("asample", **body))
        except RequestRefused as error:
            raise request_error(str(error)) from error
        response = pb.SampleResponse.FromString(reply.content)
        return [
            Completion(
                np.frombuffer(sequence.tokens, np.int32),
                np.frombuffer(sequence.logprobs, np.float32),
                "stop" if sequence.stop_reason == pb.STOP_REASON_STOP else "length",
            )
            for sequence in response.sequences
        ]

    def likelihoods(self, prompts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the log-probabilities, float32 [P], of each prompt's tokens at temperature 1 under the weights of
        `base_sampler_id`; NaN for the first.

        Like official clients it samples one token, which is discarded; the base must have a position left for it.
        """

        async def score() -> list[HttpReply]:
            fields: dict[str, Any] = {"num_samples": 1, "sampling_params": {"max_tokens": 1}, "prompt_logprobs": True}
            bodies = [self._body(self.base_sampler_id, ids, **fields) for ids in prompts]
            return list(await asyncio.gather(*(self.connection.call("asample", **body) for body in bodies)))

        found = [pb.SampleResponse.FromString(reply.content) for reply in self.connection.run(score())]
        return [tensors.decode_values(response.prompt_logprobs, pb.DTYPE_FLOAT32) for response in found]

    def _body(self, sampler: str, ids: np.ndarray, **fields: Any) -> dict[str, Any]:
        self._seqs[sampler] = self._seqs.get(sampler, -1) + 1
        prompt = {"chunks": [{"type": "encoded_text", "tokens": ids.tolist()}]}
        return {"sampling_session_id": sampler, "seq_id": self._seqs[sampler], "prompt": prompt, **fields}

    def clear_cache(self) -> None:
        """No-op: the server releases samplers with their session."""


def wire_stop(sampling: SamplingConfig, name: str = "sampling") -> list[str] | list[int] | None:
    """Returns the protocol's field `stop`: a list of strings or of token ids, which end an answer beside the base's end
    tokens; None for these alone; [] for none of them. Raises ValueError, in which the settings are called `name`, for
    combinations that the field cannot carry."""
    if sampling.stop and sampling.stop_token_ids:
        raise ValueError(
            f"{name} sets stop and stop_token_ids, and the protocol of servers has one field for strings or token ids: "
            "leave one of them out, or train without engine:"
        )
    stops: list[str] | list[int] = list(sampling.stop) if sampling.stop else list(sampling.stop_token_ids)
    if stops and not sampling.stop_at_eos:
        raise ValueError(
            f"{name} sets stop_at_eos: false beside {'stop' if sampling.stop else 'stop_token_ids'}, and in the "
            "protocol of servers the end token ends an answer wherever other stops do: set stop_at_eos: true, leave "
            "the other stops out, or train without engine:"
        )
    return stops or (None if sampling.stop_at_eos else [])


def create_sampler(connection: ServiceConnection, **source: str) -> str:
    """Creates a sampler of `model_path` or `base_model` and returns its id."""
    number = connection.next_number("sampler")
    body = {"session_id": connection.id, "sampling_session_seq_id": number, **source}
    return str(connection.run(connection.post("create_sampling_session", **body))["sampling_session_id"])
