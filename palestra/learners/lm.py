"""A language learner: one adapter on a resident base, or a full model of its own, here or on a server."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from pydantic import Field

from palestra.engine.checkpoints import load_trainer, load_weights, save_trainer, save_weights
from palestra.engine.lora import Adapter, LoraConfig, Snapshot
from palestra.engine.models import Engine
from palestra.engine.ranks import ALONE, Ranks
from palestra.engine.sampler import Sampler, Sampling
from palestra.engine.trainer import MIXED, AdamConfig, Precision, Trainer, packs, together
from palestra.policies.lm import ChatEncoder, LanguagePolicy, Memory, Samples
from palestra.types import Metrics, Sample


class SpeechConfig(AdamConfig):
    """What every language policy has: its base, how it samples, what it remembers.

    `system` replaces the env's role text; `memory: conversation` shows the model its own earlier turns; `template`
    holds options of the chat template, such as `enable_thinking: false`.
    """

    base: str = "tiny"
    sampling: Sampling = Sampling()
    system: str | None = None
    memory: Memory = "none"
    template: dict[str, Any] = {}
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"


class LearnerConfig(SpeechConfig):
    """How a policy learns. `batch` is the number of samples per optimizer step (null: all of a training step at once),
    `epochs` how often they are gone through; the learning rate rises over `warmup` (a share of the run), then follows
    `schedule`.

    `precision` is what the products of training passes are computed in (auto: bf16 for a full model on CUDA, whose
    weights are then kept in float32, else the type of the weights). With `checkpointing` a backward pass computes each
    decoder layer again in place of keeping what happened in it."""

    batch: int | None = Field(None, ge=1)
    epochs: int = Field(1, ge=1)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: float = Field(0.0, ge=0, lt=1)
    pack_tokens: int = Field(16384, ge=1)
    precision: Precision = "auto"
    checkpointing: bool = False
    seed: int | None = None


class LoraPolicyConfig(LearnerConfig):
    """A trained LoRA adapter on a base that other policies may share."""

    type: Literal["lora"] = "lora"
    rank: int = Field(8, ge=1, le=4096)
    alpha: float = Field(16.0, gt=0)
    targets: str | list[str] = "all-linear"

    @property
    def lora(self) -> LoraConfig:
        return LoraConfig(rank=self.rank, alpha=self.alpha, targets=self.targets)


class FullPolicyConfig(LearnerConfig):
    """A full model, all weights trained, with a copy of the base of its own."""

    type: Literal["full"] = "full"
    lr: float = Field(2e-4, gt=0, le=1_000_000)


def mixed_type(config: FullPolicyConfig, device: str) -> torch.dtype | None:
    """What passes of a full model are computed in, where that is not the type of its weights."""
    auto = "bf16" if device.startswith("cuda") and config.dtype == "auto" else "float32"
    return MIXED.get(auto if config.precision == "auto" else config.precision)


class Weights(Protocol):
    """Weights in training, wherever they are: what a learner needs of an engine."""

    def forward_backward(self, samples: Sequence[Sample], loss: Callable, **options: Any) -> Metrics: ...
    def optim_step(self, adam: AdamConfig, *, lr: float) -> Metrics: ...
    def logprobs(self, samples: Sequence[Sample], *, reference: bool = False) -> list[np.ndarray]: ...
    def values(self, samples: Sequence[Sample]) -> list[np.ndarray]: ...
    def begin(self) -> None: ...
    def snapshot(self, name: str) -> Snapshot | None: ...
    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...


@runtime_checkable
class Publishing(Protocol):
    """Weights that others, elsewhere, may sample from as they are now."""

    def publish(self, folder: Path) -> None:
        """Writes the adapter in PEFT's format, or the model; no optimizer."""
        ...


class Resident:
    """`Weights` in this process: a new adapter on an engine's base, or its whole model.

    A full model has no snapshots: its policy reads the weights in training, which move only between rollouts.
    """

    def __init__(
        self,
        config: LoraPolicyConfig | FullPolicyConfig,
        engine: Engine,
        *,
        seed: int,
        critic: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        adapter = None
        if isinstance(config, LoraPolicyConfig):
            adapter = Adapter(engine.linears, config.lora, seed=seed if config.seed is None else config.seed)
        self.trainer = Trainer(
            engine,
            adapter,
            pack_tokens=config.pack_tokens,
            precision=config.precision,
            checkpointing=config.checkpointing,
            critic=critic,
            ranks=ranks,
        )

    def forward_backward(self, samples: Sequence[Sample], loss: Callable, **options: Any) -> Metrics:
        return self.trainer.forward_backward(samples, loss, **options)

    def passes(self, samples: Sequence[Sample], loss: Callable, **options: Any) -> Iterator[Metrics]:
        """`forward_backward` a micro-batch at a time: the figures so far after each."""
        return self.trainer.passes(samples, loss, **options)

    def optim_step(self, adam: AdamConfig, *, lr: float) -> Metrics:
        return self.trainer.optim_step(adam, lr=lr)

    def logprobs(self, samples: Sequence[Sample], *, reference: bool = False) -> list[np.ndarray]:
        return self.trainer.logprobs(samples, reference=reference)

    def values(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        return self.trainer.values(samples)

    def begin(self) -> None:
        self.trainer.begin()
        if self.trainer.adapter:
            self.trainer.anchor()

    def snapshot(self, name: str) -> Snapshot | None:
        adapter = self.trainer.adapter
        return adapter.snapshot(name, self.trainer.engine.dtype) if adapter else None

    def save(self, folder: Path) -> None:
        save_trainer(folder, self.trainer)

    def load(self, folder: Path) -> None:
        load_trainer(folder, self.trainer)

    def publish(self, folder: Path) -> None:
        """Writes what others sample from: the adapter, or the model."""
        save_weights(folder, self.trainer)

    def take(self, folder: Path) -> None:
        """Weights that another one published, to sample from."""
        load_weights(folder, self.trainer)


class LanguageLearner:
    """Trains `weights` and hands out policies that sample from snapshots of them."""

    def __init__(
        self,
        name: str,
        config: LoraPolicyConfig | FullPolicyConfig,
        weights: Weights,
        sampler: Samples,
        tokenizer: Any,
    ) -> None:
        self.name, self.config, self.weights, self.sampler = name, config, weights, sampler
        self.version = 0
        self.encoder = ChatEncoder(tokenizer, config.template)
        self._policy: LanguagePolicy | None = None

    def batches(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """Batches of about `config.batch` samples for one optimizer step each, `config.epochs` times over. Samples are
        dealt round, so that each batch has a part of every prompt's; those of one group go together."""
        if not samples:
            return []
        hands = together(samples)
        count = min(len(hands), math.ceil(len(samples) / (self.config.batch or len(samples))))
        dealt = [[sample for hand in hands[i::count] for sample in hand] for i in range(count)]
        return [list(batch) for _ in range(self.config.epochs) for batch in dealt]

    async def forward_backward(self, samples: Sequence[Sample], loss: Callable, **options: Any) -> Metrics:
        """Adds the gradient of `loss`; returns its figures. Others have their turn between micro-batches."""
        # A server works by itself, and where samplers are elsewhere weights are trained on a thread beside: either way
        # play goes on, and weights move only in `optim_step`.
        if not isinstance(self.weights, Resident) or not isinstance(self.sampler, Sampler):
            return await asyncio.to_thread(self.weights.forward_backward, samples, loss, **options)
        total: Metrics = {}
        start = time.perf_counter()
        for so_far in self.weights.passes(samples, loss, **options):
            total = so_far
            await self._turn(time.perf_counter() - start)
            start = time.perf_counter()
        return total

    async def _turn(self, seconds: float) -> None:
        """Lets others move; the sampler, as long as it has requests, for that many seconds."""
        until = time.perf_counter() + seconds
        await asyncio.sleep(0)
        while isinstance(self.sampler, Sampler) and self.sampler.busy and time.perf_counter() < until:
            await asyncio.sleep(0)

    async def logprobs(self, samples: Sequence[Sample], *, reference: bool = False) -> list[np.ndarray]:
        return await self._read(samples, lambda part: self.weights.logprobs(part, reference=reference))

    async def values(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        return await self._read(samples, self.weights.values)

    async def _read(
        self, samples: Sequence[Sample], read: Callable[[Sequence[Sample]], list[np.ndarray]]
    ) -> list[np.ndarray]:
        """What `read` says of each sample, a micro-batch at a time, as in `forward_backward`."""
        if not isinstance(self.weights, Resident) or not isinstance(self.sampler, Sampler):
            return await asyncio.to_thread(read, samples)
        found: list[np.ndarray] = []
        trainer = self.weights.trainer
        if trainer.ranks.size > 1:
            return read(samples)  # the trainer shares them out
        for pack in packs(samples, trainer.pack_tokens):
            start = time.perf_counter()
            found += read(pack.samples)
            await self._turn(time.perf_counter() - start)
        return found

    def adopt(self, config: LoraPolicyConfig | FullPolicyConfig) -> None:
        """Other settings from now on, for how it learns and how it speaks."""
        self.config, self._policy = config, None

    def begin(self) -> None:
        self.weights.begin()

    async def optim_step(self, progress: float = 0.0) -> Metrics:
        lr = self.config.lr * schedule(progress, self.config.schedule, self.config.warmup)
        if isinstance(self.weights, Resident):
            metrics = self.weights.optim_step(self.config, lr=lr)
        else:
            metrics = await asyncio.to_thread(self.weights.optim_step, self.config, lr=lr)
        self.version, self._policy = self.version + 1, None
        self.sampler.forget()
        return metrics | {"lr": lr}

    def policy(self) -> LanguagePolicy:
        if self._policy is None:
            name, config = f"{self.name}@{self.version}", self.config
            adapter = self.weights.snapshot(name)
            self._policy = LanguagePolicy(
                name, self.sampler, self.encoder, config.sampling, adapter, system=config.system, memory=config.memory
            )
        return self._policy

    def publish(self, folder: Path) -> None:
        """Writes the weights as they are now, for others to `take`."""
        assert isinstance(self.weights, Publishing)  # a server's are not sampled from elsewhere
        self.weights.publish(folder)

    def take(self, folder: Path, version: int) -> None:
        """Weights that were published under that version, to play with."""
        assert isinstance(self.weights, Resident)
        self.weights.take(folder)
        self.version, self._policy = version, None
        self.sampler.forget()

    def save(self, folder: Path) -> None:
        self.weights.save(folder)
        about = {"name": self.name, "version": self.version, "type": self.config.type, "base": self.config.base}
        (folder / "member.json").write_text(json.dumps(about))

    def load(self, folder: Path) -> None:
        self.weights.load(folder)
        self.version = json.loads((folder / "member.json").read_text())["version"]
        self._policy = None
        self.sampler.forget()


def schedule(progress: float, kind: str, warmup: float) -> float:
    """The learning rate's factor at `progress` in [0, 1]: rising over `warmup`, then constant, or falling to 0."""
    if progress < warmup:
        return (progress + 1e-9) / warmup
    rest = (progress - warmup) / (1 - warmup)
    return {"constant": 1.0, "linear": 1 - rest, "cosine": 0.5 * (1 + math.cos(math.pi * rest))}[kind]
