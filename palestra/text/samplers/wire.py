"""Requests and replies of the sampler HTTP API: the supported subset of vLLM's variant of OpenAI completions.

Token ids go in (`prompt`) and come out (`token_ids`, requested by `return_token_ids`), with the log-probability of each
sampled token (`logprobs: 0`). `POST /v1/load_lora_adapter` loads an adapter from a folder; its name is then a model.
Valid for vLLM 0.10.2 and newer.

vLLM's seed is a signed 64-bit integer; palestra's seeds count modulo 2**64. vLLM draws completion i of a request with a
generator seeded with seed + i, palestra's server with the stream (seed, i, position). With both, a completion depends
neither on the other requests in the batch nor on the server that answers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from palestra.engine.sampling.request import Request
from palestra.engine.sampling.token_sampling import SamplingConfig

PALESTRA_OWNER = "palestra"  # `owned_by` of models on palestra's own servers
KEY_VARIABLE = "PALESTRA_SAMPLER_KEY"  # default environment variable of the API key
READY_PREFIX = "sampling at "  # prefix of the output line with the server's address
MAX_COMPLETIONS = 4096
MAX_CHOICES = 4096
MAX_LOGPROB = 1e-3  # of a token: 0, with room for rounding
ERROR_TYPES = {401: "AuthenticationError", 404: "NotFoundError", 429: "RateLimitError", 500: "InternalServerError"}

Name = Annotated[str, Field(min_length=1, max_length=512)]
TokenIds = list[Annotated[int, Field(ge=0, lt=2**31)]]


class RequestBody(BaseModel):
    """A JSON request body. Unknown fields are rejected, because they could not be honoured."""

    model_config = ConfigDict(extra="forbid")


class CompletionBody(RequestBody):
    """Body of /v1/completions for `n` completions.

    `prompt_logprobs: 0` also returns the log-probability of each prompt token, at temperature 1. `keep` is a palestra
    extension: keep their KV cache for a later turn. `return_sampling_mask`, another, returns the tokens that top-k and
    top-p kept at each position as `sampling_mask`, a list of lists as in vLLM's engine, and log-probabilities of the
    distribution that they leave. `choices`, a third, are token sequences of which a completion must be one; they are
    returned as a mask, too.
    """

    model: Name
    prompt: TokenIds
    n: int = Field(1, ge=1, le=MAX_COMPLETIONS)
    max_tokens: int = Field(16, ge=1)
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    seed: int = Field(0, ge=-(2**63), lt=2**63)
    stop: list[Annotated[str, Field(min_length=1, max_length=1024)]] = Field([], max_length=64)
    stop_token_ids: TokenIds = Field([], max_length=1024)
    ignore_eos: bool = False
    logprobs: Literal[0, 1] | None = None
    prompt_logprobs: Literal[0] | None = None
    return_token_ids: bool = False
    skip_special_tokens: Literal[True] = True
    min_p: Literal[0] = 0
    repetition_penalty: Literal[1] = 1
    stream: Literal[False] = False
    keep: bool = False
    return_sampling_mask: bool = False
    choices: list[Annotated[TokenIds, Field(min_length=1)]] = Field([], max_length=MAX_CHOICES)

    @property
    def sampling(self) -> SamplingConfig:
        return SamplingConfig(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(0, self.top_k),
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            stop_at_eos=not self.ignore_eos,
            keep_sampling_mask=self.return_sampling_mask,
            legal_only=bool(self.choices),
        )


class LoadAdapterBody(RequestBody):
    """Body of /v1/load_lora_adapter."""

    lora_name: Name
    lora_path: str = Field(min_length=1, max_length=4096)


class UnloadAdapterBody(RequestBody):
    """Body of /v1/unload_lora_adapter."""

    lora_name: Name


class ReplyPart(BaseModel):
    """A part of what a server answers. Its types are exact, and what vLLM adds with its versions is left."""

    model_config = ConfigDict(strict=True, extra="ignore")


class ModelCard(ReplyPart):
    """A model that a server lists: a base, or an adapter, whose `parent` is its base."""

    id: str
    parent: str | None = None
    owned_by: str = ""


class ModelList(ReplyPart):
    """The reply of /v1/models."""

    data: list[ModelCard]


class TokenLogprobs(ReplyPart):
    """The log-probability of each token of a completion."""

    token_logprobs: list[Annotated[float, Field(le=MAX_LOGPROB, allow_inf_nan=False)]]


class CompletionChoice(ReplyPart):
    """One completion. A server ends it as "abort" if it is stopped meanwhile."""

    index: int
    token_ids: Annotated[TokenIds, Field(min_length=1)]
    logprobs: TokenLogprobs
    finish_reason: Literal["stop", "length", "abort"]
    sampling_mask: list[TokenIds] | None = None
    routed_experts: Any = None


class CompletionReply(ReplyPart):
    """The reply of /v1/completions."""

    choices: list[CompletionChoice]


def build_completion_body(request: Request, model: str, *, keep: bool) -> dict[str, Any]:
    """Returns the JSON body that requests `request` from a server's `model`.

    It sets every sampling parameter that a server would otherwise take from the base's generation_config.json.
    """
    sampling = request.sampling
    fields: dict[str, Any] = {
        "model": model,
        "prompt": request.prompt_ids.tolist(),
        "n": num_completions(request),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0,
        "repetition_penalty": 1,
        "seed": to_int64(request.seed),
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": not sampling.stop_at_eos,
        "logprobs": 0,
        "return_token_ids": True,
    }
    if request.choices:
        fields["choices"] = request.choices
    elif sampling.records_mask:
        fields["return_sampling_mask"] = True
    return fields | ({"keep": True} if keep else {})


def num_completions(request: Request) -> int:
    """Returns the number of completions to request: 1 at temperature 0 (all are equal, and vLLM returns only one), else
    `n`."""
    return request.n if request.sampling.temperature else 1


def to_int64(seed: int) -> int:
    """Converts `seed` modulo 2**64 to a signed 64-bit integer; `seed % 2**64` is the inverse."""
    seed %= 2**64
    return seed - 2**64 if seed >= 2**63 else seed


def error_body(status: int, message: str) -> dict[str, Any]:
    """Returns the JSON body of an error response, in OpenAI's format."""
    return {
        "error": {"message": message, "type": ERROR_TYPES.get(status, "BadRequestError"), "param": None, "code": status}
    }
