"""The calls of a sampler over HTTP, as far as they are spoken here: vLLM's dialect of OpenAI's completions.

Token ids go in (`prompt`) and come out (`token_ids`, asked for by `return_token_ids`), with the log-probability of each
sampled token (`logprobs: 0`). Adapters are loaded from folders by `POST /v1/load_lora_adapter` and are models from then
on. What is known here of vLLM holds for 0.10.2 and newer.

A seed is a signed number of 64 bits there; ours count modulo 2**64. vLLM draws sibling i of a request with a generator
of seed + i, our own server with the stream (seed, i, position): on both, what a request is answered hangs neither on
who shares the batch nor on which of several servers answers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from palestra.engine.draw import Sampling
from palestra.engine.requests import Request

OURS = "palestra"  # the owner of a model on servers of our make
KEY = "PALESTRA_SAMPLER_KEY"  # the environment variable that holds the key where no other is named
READY = "sampling at "  # what stands before the address in the line by which a server of ours says that it listens
MOST_SIBLINGS = 4096
KINDS = {401: "AuthenticationError", 404: "NotFoundError", 429: "RateLimitError", 500: "InternalServerError"}

Name = Annotated[str, Field(min_length=1, max_length=512)]
TokenIds = list[Annotated[int, Field(ge=0, lt=2**31)]]


class Call(BaseModel):
    """A body: what it does not know is refused, since it could not be honoured."""

    model_config = ConfigDict(extra="forbid")


class Completion(Call):
    """A request for `n` answers. `keep` is of our make: it remembers the answers' keys and values for a later turn."""

    model: Name
    prompt: TokenIds
    n: int = Field(1, ge=1, le=MOST_SIBLINGS)
    max_tokens: int = Field(16, ge=1)
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    seed: int = Field(0, ge=-(2**63), lt=2**63)
    stop: list[Annotated[str, Field(min_length=1, max_length=1024)]] = Field([], max_length=64)
    stop_token_ids: TokenIds = Field([], max_length=1024)
    ignore_eos: bool = False
    logprobs: Literal[0, 1] | None = None
    return_token_ids: bool = False
    skip_special_tokens: Literal[True] = True
    min_p: Literal[0] = 0
    repetition_penalty: Literal[1] = 1
    stream: Literal[False] = False
    keep: bool = False

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(0, self.top_k),
            stop=tuple(self.stop),
            stop_ids=tuple(self.stop_token_ids),
            end=not self.ignore_eos,
        )


class Load(Call):
    lora_name: Name
    lora_path: str = Field(min_length=1, max_length=4096)


class Unload(Call):
    lora_name: Name


def body(request: Request, model: str, *, keep: bool) -> dict[str, Any]:
    """The JSON that asks a server's `model` for what `request` says. Settings that a server would otherwise take from
    the base's generation_config.json are all said."""
    sampling = request.sampling
    fields: dict[str, Any] = {
        "model": model,
        "prompt": request.prompt_ids.tolist(),
        "n": drawn(request),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0,
        "repetition_penalty": 1,
        "seed": signed(request.seed),
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": not sampling.end,
        "logprobs": 0,
        "return_token_ids": True,
    }
    return fields | ({"keep": True} if keep else {})


def drawn(request: Request) -> int:
    """How many answers a server is asked for: greedy siblings are all the same, and vLLM gives only one."""
    return request.n if request.sampling.temperature else 1


def signed(seed: int) -> int:
    """`seed` modulo 2**64 as a signed number of 64 bits; `seed % 2**64` is the way back."""
    seed %= 2**64
    return seed - 2**64 if seed >= 2**63 else seed


def error(status: int, message: str) -> dict[str, Any]:
    """The body of an answer that says no."""
    return {"error": {"message": message, "type": KINDS.get(status, "BadRequestError"), "param": None, "code": status}}
