"""Config schema of remote samplers: the section `sampler:`."""

from __future__ import annotations

from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from palestra.core.config import StrictModel
from palestra.core.http.chat_client import KeyVariable


class RemoteSamplerConfig(StrictModel):
    """Settings common to all remote samplers."""

    folder: str | None = None
    """Folder through which adapters reach the samplers, which must see it under the same path. Null: a temporary folder
    of this machine. Set it for samplers on other machines."""
    logprob_tolerance: float | None = Field(None, gt=0)
    """Largest mean absolute difference, in nats per token, between log-probabilities of sampler and trainer in the
    check before training. Null: 1e-3 in float32, 0.05 otherwise."""
    request_timeout: float = Field(1800.0, gt=0)
    """Seconds until a sampling request without an answer fails."""
    retry_timeout: float = Field(120.0, gt=0)
    """Seconds for which requests to unreachable samplers are retried before the run ends."""


class SamplerServersConfig(RemoteSamplerConfig):
    """Samplers that already run, all with the same base: vLLM servers or `palestra serve-sampler`."""

    type: Literal["vllm"] = "vllm"
    """Kind of sampler: servers that already run."""
    urls: list[str] = Field(min_length=1)
    """Addresses of the servers, such as http://localhost:8001, without /v1. Each may be listed once."""
    model: str | None = None
    """The servers' name of the base model. Null: the first model they list."""
    key_env: KeyVariable = None
    """Name of the environment variable that holds the servers' API key. Null: no key."""

    @field_validator("urls")
    @classmethod
    def _are_addresses(cls, urls: list[str]) -> list[str]:
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
                raise ValueError(
                    f'"{url}" is not an address of a server: write it as http://localhost:8001, without /v1'
                )
        if len(set(urls)) < len(urls):
            raise ValueError("an address is listed twice: list each server once")
        return urls


class SamplerProcessesConfig(RemoteSamplerConfig):
    """Sampler processes that the run starts on this machine and stops when it ends."""

    type: Literal["processes"] = "processes"
    """Kind of sampler: processes started by the run."""
    count: int = Field(1, ge=1, le=1024)
    """Number of processes per base."""
    gpus: list[int] = []
    """CUDA device index of each process; a device may be listed twice. Empty: all use the run's `device`."""
    torch_threads: int = Field(1, ge=1, le=1024)
    """CPU threads of each process."""

    @model_validator(mode="after")
    def _check_gpus(self) -> Self:
        if self.gpus and len(self.gpus) != self.count:
            raise ValueError(
                f"count: {self.count} processes and gpus: {self.gpus} do not go together: name one device for each "
                "(a device may be listed twice)"
            )
        return self


SamplerConfig = Annotated[SamplerServersConfig | SamplerProcessesConfig, Field(discriminator="type")]
