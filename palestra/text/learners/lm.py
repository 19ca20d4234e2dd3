"""Learners of language models: an adapter on a shared base, or a separate full model, here or on a
server."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from palestra.core.losses import LossFunction
from palestra.core.types import Metrics, Sample
from palestra.engine.bases.model import Engine
from palestra.engine.lora.adapters import Adapter, Snapshot
from palestra.engine.training.adapter_weights import AdapterWeights, OptimConfig
from palestra.engine.training.micro_batch import by_group, by_prompt
from palestra.engine.training.peft_format import load_into
from palestra.engine.training.train_pass import TrainPass, run_together
from palestra.parallel.process_group import SINGLE_PROCESS, ProcessGroup
from palestra.text.learners.lm_config import FullPolicyConfig, LoraPolicyConfig
from palestra.text.policies.lm import LanguagePolicy, SamplerProtocol

# a value head on the policy's features, or an adapter of its own with one
CriticKind = Literal["none", "shared", "separate"]
# samples -> log-probabilities [T] of each one's tokens under a teacher
Scorer = Callable[[Sequence[Sample]], Awaitable[list[np.ndarray]]]


class Weights(Protocol):
    """Protocol of weights in training, in this process or on a server: the engine operations that a
    learner needs.

    The defaults are those of weights elsewhere, which are not sampled in this process.
    """

    def forward_backward(self, samples: Sequence[Sample], loss: LossFunction, **options: Any) -> Metrics: ...
    def optim_step(self, adam: OptimConfig) -> Metrics: ...
    def logprobs(self, samples: Sequence[Sample], *, reference: bool = False) -> list[np.ndarray]: ...
    def values(self, samples: Sequence[Sample]) -> list[np.ndarray]: ...
    def start_stage(self) -> None: ...
    def snapshot(self, name: str) -> Snapshot | None: ...
    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...

    def read_parts(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """Returns the samples in the parts that `logprobs` and `values` read at a time."""
        return [list(samples)]

    def export(self, folder: Path) -> None:
        """Writes the current adapter in PEFT's format, or the model, without optimizer state, for
        samplers in other processes."""
        raise ValueError("the server that trains these weights samples them too: they are not exported")

    def load_exported(self, folder: Path) -> None:
        """Loads weights that another process exported, for sampling."""
        raise ValueError("these weights are sampled where they are trained")


def build_weights(
    config: LoraPolicyConfig | FullPolicyConfig,
    engine: Engine,
    *,
    seed: int,
    critic: bool = False,
    group: ProcessGroup = SINGLE_PROCESS,
) -> AdapterWeights:
    """Returns weights to train in this process: an adapter on an engine's base, new or from
    `config.path`, or its whole model."""
    if isinstance(config, FullPolicyConfig):
        full = AdapterWeights(engine, None, critic=critic, **weights_options(config, group))
        if config.reference != "none":
            full.add_full_reference(on_disk=config.reference == "disk")
        return full
    adapter = new_adapter(config, engine, seed if config.seed is None else config.seed)
    return load_start(AdapterWeights(engine, adapter, critic=critic, **weights_options(config, group)), config)


def weights_options(config: LoraPolicyConfig | FullPolicyConfig, group: ProcessGroup) -> dict[str, Any]:
    """Returns the options of `AdapterWeights` that `config` sets."""
    return {
        "pack_tokens": config.micro_batch_tokens,
        "precision": config.precision,
        "checkpointing": config.gradient_checkpointing,
        "group": group,
        "optimizer": config.optimizer,
    }


W = TypeVar("W", bound=AdapterWeights)


def load_start(weights: W, config: LoraPolicyConfig) -> W:
    """Returns the weights with the adapter at `config.path`, if there is one, which is also their
    reference."""
    if config.path and weights.adapter:
        load_into(weights.adapter, Path(config.path), weights.engine)
        weights.set_reference()
    return weights


def new_adapter(config: LoraPolicyConfig, engine: Engine, seed: int) -> Adapter:
    """Returns a new adapter."""
    return Adapter(engine.linear_layers, config.lora, seed=seed, model=engine.model)


class LanguageLearner:
    """Trains `weights` and creates policies that sample from snapshots of them."""

    def __init__(
        self,
        name: str,
        config: LoraPolicyConfig | FullPolicyConfig,
        weights: Weights,
        sampler: SamplerProtocol,
        tokenizer: Any,
    ) -> None:
        self.name = name
        self.config = config
        self.weights = weights
        self.sampler = sampler
        self.version = 0
        self.reference_version = 0  # version of the weights that are the reference
        self.teacher: Scorer | None = None
        self.tokenizer = tokenizer
        self.encoder = config.encoder(tokenizer)
        self._policy: LanguagePolicy | None = None

    @property
    def is_at_reference(self) -> bool:
        return self.version == self.reference_version

    @property
    def takes_turns(self) -> bool:
        """True if this process trains and samples, so that one waits while the other computes."""
        return isinstance(self.weights, AdapterWeights) and self.sampler.engine is not None

    def batches(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """Splits `samples` into batches of about `config.batch_size` for one optimizer step each,
        repeated for `config.epochs`. Batches without any gradient are left out."""
        batches = [batch for batch in self._split(samples) if any(sample.has_gradient for sample in batch)]
        return [list(batch) for batch in batches * self.config.epochs]

    def _split(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """Distributes conversations over batches or, where these are too few or too large, prompts,
        since a prompt is computed in each batch that has an answer to it. They are shuffled, always
        in the same way: in order, a batch could get one turn of every conversation. Where prompts
        are too few too, each batch has answers to all."""
        size = self.config.batch_size or len(samples)
        if len(samples) <= size:
            return [list(samples)]
        count = math.ceil(len(samples) / size)
        for nested in (True, False):
            units = by_prompt(samples, nested=nested)
            if len(units) >= count and max(map(len, units)) <= size:
                order = np.random.default_rng(len(units)).permutation(len(units))
                parts = [sorted(order[i::count]) for i in range(count)]
                return [list(chain.from_iterable(units[k] for k in part)) for part in parts]
        groups = by_group(samples)
        return [list(chain.from_iterable(groups[i::count])) for i in range(min(count, len(groups)))]

    async def forward_backward(self, samples: Sequence[Sample], loss: LossFunction, **options: Any) -> Metrics:
        """Adds the gradient of `loss`; returns its metrics. Other coroutines run between
        micro-batches."""
        passes = self.passes(samples, loss, **options)
        if passes is None:  # a thread waits for the server, so that the rollout continues
            return await asyncio.to_thread(self.weights.forward_backward, samples, loss, **options)
        for each in passes:
            await self.make_passes([each])
        return self.metrics_of(passes)

    def passes(self, samples: Sequence[Sample], loss: LossFunction, **options: Any) -> list[TrainPass] | None:
        return self.weights.passes(samples, loss, **options) if isinstance(self.weights, AdapterWeights) else None

    async def make_passes(self, passes: Sequence[TrainPass]) -> None:
        """Makes passes as one; other coroutines run after them, or meanwhile with remote samplers.
        Weights change only in `optim_step`."""
        if not self.takes_turns:
            await asyncio.to_thread(run_together, passes)
            return
        start = time.perf_counter()
        run_together(passes)
        if passes[0].weights.group.world_size == 1:
            await self._yield_to_others(time.perf_counter() - start)

    def metrics_of(self, passes: Sequence[TrainPass]) -> Metrics:
        assert isinstance(self.weights, AdapterWeights)
        return self.weights.metrics_of(passes)

    async def _yield_to_others(self, seconds: float) -> None:
        """Lets other coroutines run once, or for up to `seconds` while the sampler has requests."""
        until = time.perf_counter() + seconds
        await asyncio.sleep(0)
        while self.sampler.has_requests and time.perf_counter() < until:
            await asyncio.sleep(0)

    async def logprobs(self, samples: Sequence[Sample], *, reference: bool = False) -> list[np.ndarray]:
        return await self._read(samples, lambda part: self.weights.logprobs(part, reference=reference))

    async def teacher_logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        if self.teacher is None:
            raise ValueError(
                f"policy {self.name} has no teacher to score its answers: set policies.{self.name}.teacher"
            )
        return await self.teacher(samples)

    async def values(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        return await self._read(samples, self.weights.values)

    async def _read(
        self, samples: Sequence[Sample], read: Callable[[Sequence[Sample]], list[np.ndarray]]
    ) -> list[np.ndarray]:
        """Applies `read` to the samples, one micro-batch at a time, as in `forward_backward`."""
        if not self.takes_turns:
            return await asyncio.to_thread(read, samples)
        found: list[np.ndarray] = []
        for part in self.weights.read_parts(samples):
            start = time.perf_counter()
            found += read(part)
            await self._yield_to_others(time.perf_counter() - start)
        return found

    def set_config(self, config: LoraPolicyConfig | FullPolicyConfig) -> None:
        """Replaces the config, for training and sampling."""
        self.encoder = config.encoder(self.tokenizer)
        self.config = config
        self._policy = None

    def start_stage(self) -> None:
        self.weights.start_stage()
        self.reference_version = self.version

    async def optim_step(self, progress: float = 0.0) -> Metrics:
        config = self.config.at(progress)
        if isinstance(self.weights, AdapterWeights):
            metrics = self.weights.optim_step(config)
        else:
            metrics = await asyncio.to_thread(self.weights.optim_step, config)
        self.version = self.version + 1
        self._policy = None
        self.sampler.clear_cache()
        return metrics | {"lr": config.lr or 0.0}

    def policy(self) -> LanguagePolicy:
        if self._policy is None:
            name = f"{self.name}@{self.version}"
            config = self.config
            adapter = self.weights.snapshot(name)
            parts = (self.sampler, self.encoder, config.sampling, adapter)
            self._policy = LanguagePolicy(name, *parts, **config.prompt_options)
        return self._policy

    def export(self, folder: Path) -> None:
        """Exports the current weights for `load_exported` in another process."""
        self.weights.export(folder)

    def load_exported(self, folder: Path, version: int) -> None:
        """Loads weights that were published as `version`, for sampling."""
        self.weights.load_exported(folder)
        self.version = version
        self._policy = None
        self.sampler.clear_cache()

    def save(self, folder: Path) -> None:
        self.weights.save(folder)
        about = {"name": self.name, "version": self.version, "type": self.config.type, "base": self.config.base}
        about |= {"reference_version": self.reference_version}
        (folder / "member.json").write_text(json.dumps(about))

    def load(self, folder: Path) -> None:
        self.weights.load(folder)
        about = json.loads((folder / "member.json").read_text())
        self.version = about["version"]
        self.reference_version = about.get("reference_version", 0)
        self._policy = None
        self.sampler.clear_cache()
