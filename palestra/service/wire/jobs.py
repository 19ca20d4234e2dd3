"""Job bodies that the front end queues for the engine worker: validated, with every name resolved.

Training data are arrays, which the worker reads as they were validated. Folders are names in the weight store.
The job of `optim_step` is the client's own `AdamParams`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from pydantic import BaseModel
from safetensors import SafetensorError
from safetensors.numpy import load, save

from palestra.core.types import Datum
from palestra.engine.sampling.token_sampling import SamplingConfig


class SampleJob(BaseModel):
    """Request for `num_samples` completions of `tokens` under the weights in `folder` (null: the bare base).

    The other fields select log-probabilities: `prompt_logprobs` those of the prompt, `topk_prompt` the most likely
    tokens at each prompt position, `target_prompt` [P-1][K] given ids (-1: skip), all restricted to the last `last_n`
    positions; `topk_sample` the most likely tokens beside each sampled one. `drawn_prompt` is how many tokens to draw
    at each prompt position, at the temperature of `sampling`.
    """

    base: str
    folder: str | None
    tokens: list[int]
    num_samples: int
    sampling: SamplingConfig
    seed: int
    prompt_logprobs: bool = False
    topk_prompt: int = 0
    topk_sample: int = 0
    target_prompt: list[list[int]] | None = None
    drawn_prompt: int = 0
    last_n: int | None = None

    @property
    def asks_prompt(self) -> bool:
        """True if any prompt log-probabilities are requested."""
        return bool(self.prompt_logprobs or self.topk_prompt or self.target_prompt or self.drawn_prompt)

    @property
    def size(self) -> int:
        """Largest number of tokens in the answer; each token counts once more for every additional log-probability."""
        targets = len(self.target_prompt[0]) if self.target_prompt else 0
        scored = 1 + self.topk_prompt + targets + self.drawn_prompt
        prompt = len(self.tokens) * scored if self.asks_prompt else 0
        return prompt + self.num_samples * self.sampling.max_tokens * (1 + self.topk_sample)


@dataclass(frozen=True)
class TrainJob:
    """Pass over validated sequences, which all have the same inputs: the name of the loss, and its options."""

    loss: str
    options: Mapping[str, float | str]
    data: list[Datum]

    def to_bytes(self) -> bytes:
        """Returns the job in safetensors' format: one array for each input of all sequences, one after the other."""
        arrays = {f"inputs.{name}": [datum.inputs[name] for datum in self.data] for name in self.data[0].inputs}
        arrays["tokens"] = [datum.tokens.astype(np.int32) for datum in self.data]
        arrays["targets"] = [datum.targets.astype(np.int32) for datum in self.data]
        flat = {name: np.concatenate([part.ravel() for part in parts]) for name, parts in arrays.items()}
        flat["shapes"] = np.array([(*datum.targets.shape, 0)[:2] for datum in self.data], np.int64)
        flat["loss"] = np.frombuffer(json.dumps([self.loss, dict(self.options)]).encode(), np.uint8)
        return save(flat)

    @classmethod
    def from_bytes(cls, body: bytes) -> Self:
        """Returns the job that `to_bytes` wrote. Raises ValueError for any other bytes."""
        try:
            arrays = load(body)
            loss, options = json.loads(arrays.pop("loss").tobytes())
            shapes_B2 = arrays.pop("shapes")
        except (SafetensorError, KeyError):
            raise ValueError("the request was queued by another version of palestra: send it again") from None
        lengths = shapes_B2[:, 0]
        ends = np.cumsum(lengths * np.maximum(shapes_B2[:, 1], 1))[:-1]
        tokens = np.split(arrays.pop("tokens").astype(np.int64), np.cumsum(lengths)[:-1])
        targets = np.split(arrays.pop("targets").astype(np.int64), ends)
        inputs = {name.removeprefix("inputs."): np.split(flat.copy(), ends) for name, flat in arrays.items()}
        data = []
        for i, (length, width) in enumerate(shapes_B2.tolist()):
            shape = (length, width) if width else (length,)
            given = {name: parts[i].reshape(shape) for name, parts in inputs.items()}
            data.append(Datum(tokens[i], targets[i].reshape(shape), given))
        return cls(loss, options, data)


class DistillExampleJob(BaseModel):
    """One reverse-KL example: the answer's ids and weights, the student's prompt and the reference's prompt."""

    student: list[int]
    reference: list[int]
    answer: list[int]
    weights: list[float]


class ReverseKLJob(BaseModel):
    """Reverse-KL pass towards a reference: the weights in `folder` (null: the bare base)."""

    folder: str | None
    lessons: list[DistillExampleJob]
    temperature: float


class SaveJob(BaseModel):
    """Saves a model's weights at the tinker:// path `path`, or for the sampler with id `sampler`, which has no path.

    A path of kind "training" includes the optimizer. If the path exists, `overwrite` false raises an error; null and
    true replace it.
    """

    path: str | None = None
    sampler: str | None = None
    ttl_seconds: float | None = None
    overwrite: bool | None = None
    info: dict[str, Any] = {}


class LoadJob(BaseModel):
    """Loads the weights in `folder` into a model, with the optimizer state if `optimizer` is true. `path` is the
    client's name of them."""

    folder: str
    path: str
    optimizer: bool


class InterpolateJob(BaseModel):
    """Saves at `path` the weighted sum of adapters with the same base and shape."""

    folders: list[str]
    coefficients: list[float]
    path: str
    source_paths: list[str]
