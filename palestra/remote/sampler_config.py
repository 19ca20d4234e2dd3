"""Where samplers are that are not in the training process: the schema of `sampler:`."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from palestra.config import Strict


class Apart(Strict):
    """What all samplers elsewhere have in common. Adapters reach them through `folder`, which they must see under the
    same path (null: a temporary folder of this machine). Before anything is trained their log-probabilities must agree
    with the trainer's to `tolerance`, a mean over tokens (null: 1e-3 in float32, 0.05 else). An answer may take
    `timeout` seconds; samplers that are away are asked again for `patience` seconds."""

    folder: str | None = None
    tolerance: float | None = Field(None, gt=0)
    timeout: float = Field(1800.0, gt=0)
    patience: float = Field(120.0, gt=0)


class ServersConfig(Apart):
    """Servers that run already, all of one base: vLLM's, or `palestra serve-sampler`. `model` is their name of the base
    (null: the first they list), `key_env` the environment variable with their key."""

    type: Literal["vllm"] = "vllm"
    urls: list[str] = Field(min_length=1)
    model: str | None = None
    key_env: str | None = None

    @field_validator("urls")
    @classmethod
    def _are_addresses(cls, urls: list[str]) -> list[str]:
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
                raise ValueError(f'"{url}" is no address of a server: write it as http://localhost:8001, without /v1')
        if len(set(urls)) < len(urls):
            raise ValueError("an address stands twice: each server is named once")
        return urls

    @field_validator("key_env")
    @classmethod
    def _is_a_name(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]{0,63}", name):
            raise ValueError("key_env is the name of an environment variable, in capitals, not the key itself")
        return name


class ProcessesConfig(Apart):
    """`count` processes on this machine, for as long as the run takes. `gpus` gives each one of the machine's CUDA
    devices; without it all sample where the run's `device` says, on a CPU with `threads` each."""

    type: Literal["processes"] = "processes"
    count: int = Field(1, ge=1, le=1024)
    gpus: list[int] = []
    threads: int = Field(1, ge=1, le=1024)

    @model_validator(mode="after")
    def _placed(self) -> Self:
        if self.gpus and len(self.gpus) != self.count:
            raise ValueError(
                f"count: {self.count} processes and gpus: {self.gpus} do not go together: name one device for each "
                "(a device may stand twice)"
            )
        return self


SamplerConfig = Annotated[ServersConfig | ProcessesConfig, Field(discriminator="type")]
