"""Learners of language models: an adapter on a shared base, or a separate full model, here or on a server."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol, Self, runtime_checkable

import numpy as np
import torch
from pydantic import Field, model_validator
from transformers import AutoConfig, AutoModelForCausalLM

from palestra.engine.bases import resolve_base
from palestra.engine.checkpoints import load_trainer, load_weights, save_trainer, save_weights
from palestra.engine.distributed import SINGLE_PROCESS, ProcessGroup
from palestra.engine.lora import Adapter, Snapshot
from palestra.engine.lora_config import LoraConfig, LoraVariantsConfig
from palestra.engine.micro_batch import by_group, micro_batches
from palestra.engine.models import Engine
from palestra.engine.optimizers import OptimizerName
from palestra.engine.quantized import Quantization
from palestra.engine.sampler import Sampler, SamplingConfig
from palestra.engine.trainer import AUTOCAST_DTYPES, AdamConfig, Precision, ReferenceKind, Trainer
from palestra.policies.context import ContextConfig
from palestra.policies.lm import ChatEncoder, HistoryMode, LanguagePolicy, SamplerProtocol
from palestra.types import Metrics, Sample

LORA_LEARNING_RATES = ((20e6, 1e-3), (1e9, 2e-4), (math.inf, 1e-4))  # (parameters of the base below, learning rate)


class LMPolicyConfig(AdamConfig):
    """Options common to all language model policies: base model, sampling and prompt."""

    base: str = "tiny"
    """Base model: the name of a shipped one ("tiny") or of a packaged one ("smollm2"), a local folder, a GGUF file, or
    a Hugging Face hub name."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling parameters."""
    system: str | None = None
    """System prompt, which replaces the env's role text. null: the env's role text."""
    history: HistoryMode = "none"
    """History in the prompt: "none" shows the current observation only, "conversation" also the model's own earlier
    turns."""
    context: ContextConfig = ContextConfig()
    """Budget of conversations: when they are rewritten, and how long results of tools may be."""
    chat_template_kwargs: dict[str, Any] = {}
    """Options of the tokenizer's chat template, for example `enable_thinking: false`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the weights. "auto": bfloat16 on CUDA and float32 on CPU; float32 for a full model in training."""
    quantize: Quantization | None = None
    """Quantises the base's linear layers, under adapters (QLoRA): "nf4" 4.5 bits a weight, "int8" 8. null: not."""
    long_context: bool = False
    """LongRoPE's long factors for sequences of every length, which may then exceed the base's original length."""

    @property
    def prompt_options(self) -> dict[str, Any]:
        """Options of a `LanguagePolicy` that decide its prompts."""
        return {"system": self.system, "history": self.history, "context": self.context}


class LMLearnerConfig(LMPolicyConfig):
    """Options of a language model policy in training: batches, learning-rate schedule, memory and precision."""

    batch_size: int | None = Field(None, ge=1)
    """Number of samples per optimizer step. null: all samples of a training step at once."""
    epochs: int = Field(1, ge=1)
    """Number of passes over the samples of a training step."""
    optimizer: OptimizerName = "adamw"
    """Optimizer: "adamw"; "adamw_8bit", whose moments take a quarter of the memory (needs bitsandbytes); or "muon" for
    matrices of the adapter or of the layers, with AdamW for all else, at AdamW's learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or falling to 0 at the end of the run, linearly or as a cosine."""
    warmup_ratio: float = Field(0.0, ge=0, lt=1)
    """Share of the run, in [0, 1), over which the learning rate rises from 0."""
    micro_batch_tokens: int = Field(16384, ge=1)
    """Maximum number of tokens of a micro-batch, counted before prefixes are shared. Lower it if memory runs out."""
    precision: Precision = "auto"
    """Dtype of the matrix products of training passes. "auto": bf16 for a full model on CUDA, whose weights are then
    kept in float32; otherwise the dtype of the weights."""
    gradient_checkpointing: bool = False
    """Gradient checkpointing: recomputes each decoder layer in the backward pass instead of keeping its activations.
    Saves memory, costs time."""
    seed: int | None = None
    """Seed of the adapter's initialisation. null: derived from the seed of the run."""


class LoraPolicyConfig(LoraVariantsConfig, LMLearnerConfig):
    """A trained LoRA adapter on a base that other policies may share."""

    type: Literal["lora"] = "lora"
    """Kind of policy: a LoRA adapter in training."""
    lr: float | None = Field(None, ge=0, le=1_000_000)  # type: ignore[assignment]
    """Learning rate, at least 0. null: by the parameters of the base, 1e-3 below 20 million (the shipped bases), 2e-4
    below a billion, else 1e-4."""
    rank: int = Field(8, ge=1, le=4096)
    """Rank of the adapter's matrices, 1 to 4096."""
    alpha: float = Field(16.0, gt=0)
    """Scale of the adapter: its output is multiplied by alpha / rank."""
    target_modules: str | list[str] = "all-linear"
    """Linear layers with an adapter: "all-linear" (all of the decoder layers, without the head), or name suffixes such
    as "q_proj"."""

    @property
    def lora(self) -> LoraConfig:
        plain = {"rank": self.rank, "alpha": self.alpha, "target_modules": self.target_modules}
        return LoraConfig(**plain, **{name: getattr(self, name) for name in LoraVariantsConfig.model_fields})


class FullPolicyConfig(LMLearnerConfig):
    """A full model with all weights trained, on its own copy of the base."""

    type: Literal["full"] = "full"
    """Kind of policy: a full model in training."""
    lr: float = Field(2e-4, gt=0, le=1_000_000)
    """Learning rate, above 0."""
    reference: ReferenceKind = "none"
    """Reference of a KL penalty or a preference loss, the weights at the start of the stage: a `copy` in the memory of
    the device, or on `disk` in a temporary file, which is read whole for every micro-batch of a reference pass. `none`:
    for algorithms without a reference."""

    @model_validator(mode="after")
    def _not_quantized(self) -> Self:
        if self.quantize:
            raise ValueError(
                "quantize: quantised weights are not trained themselves: set type: lora, or quantize: null"
            )
        return self


def default_lora_lr(num_parameters: int) -> float:
    """Returns the learning rate of an adapter on a base of this size, if the config gives none: a cautious value, from
    which to search upwards."""
    return next(lr for limit, lr in LORA_LEARNING_RATES if num_parameters < limit)


@cache
def base_parameters(base: str) -> int:
    """Returns the number of parameters of a base model, from its config alone."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(resolve_base(base)))
    return int(model.num_parameters())


def autocast_dtype(config: FullPolicyConfig, device: str) -> torch.dtype | None:
    """Returns the autocast dtype of a full model's passes; None if it is that of its weights."""
    auto = "bf16" if device.startswith("cuda") and config.dtype == "auto" else "float32"
    return AUTOCAST_DTYPES.get(auto if config.precision == "auto" else config.precision)


class Weights(Protocol):
    """Protocol of weights in training, in this process or on a server: the engine operations that a learner needs."""

    def forward_backward(self, samples: Sequence[Sample], loss: Callable, **options: Any) -> Metrics: ...
    def optim_step(self, adam: AdamConfig) -> Metrics: ...
    def logprobs(self, samples: Sequence[Sample], *, reference: bool = False) -> list[np.ndarray]: ...
    def values(self, samples: Sequence[Sample]) -> list[np.ndarray]: ...
    def start_stage(self) -> None: ...
    def snapshot(self, name: str) -> Snapshot | None: ...
    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...


@runtime_checkable
class Exportable(Protocol):
    """Weights that can be exported for sampling in other processes."""

    def export(self, folder: Path) -> None:
        """Writes the current adapter in PEFT's format, or the model, without optimizer state."""
        ...


class LocalWeights:
    """`Weights` in this process: a new adapter on an engine's base, or its whole model.

    A full model has no snapshots: its policy samples from the weights in training, which change only between rollouts.
    """

    def __init__(
        self,
        config: LoraPolicyConfig | FullPolicyConfig,
        engine: Engine,
        *,
        seed: int,
        critic: bool = False,
        group: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        adapter = None
        if isinstance(config, LoraPolicyConfig):
            adapter = _new_adapter(config, engine, seed if config.seed is None else config.seed)
        self.trainer = Trainer(
            engine,
            adapter,
            pack_tokens=config.micro_batch_tokens,
            precision=config.precision,
            checkpointing=config.gradient_checkpointing,
            critic=critic,
            full_reference=config.reference if isinstance(config, FullPolicyConfig) else "none",
            group=group,
            optimizer=config.optimizer,
        )

    def forward_backward(self, samples: Sequence[Sample], loss: Callable, **options: Any) -> Metrics:
        return self.trainer.forward_backward(samples, loss, **options)

    def iter_forward_backward(self, samples: Sequence[Sample], loss: Callable, **options: Any) -> Iterator[Metrics]:
        """Runs `forward_backward` one micro-batch at a time; yields the metrics so far after each."""
        return self.trainer.iter_forward_backward(samples, loss, **options)

    def optim_step(self, adam: AdamConfig) -> Metrics:
        return self.trainer.optim_step(adam)

    def logprobs(self, samples: Sequence[Sample], *, reference: bool = False) -> list[np.ndarray]:
        return self.trainer.logprobs(samples, reference=reference)

    def values(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        return self.trainer.values(samples)

    def start_stage(self) -> None:
        self.trainer.reset_optimizer()
        self.trainer.set_reference()

    def snapshot(self, name: str) -> Snapshot | None:
        adapter = self.trainer.adapter
        return adapter.snapshot(name, self.trainer.engine.dtype) if adapter else None

    def save(self, folder: Path) -> None:
        save_trainer(folder, self.trainer)

    def load(self, folder: Path) -> None:
        load_trainer(folder, self.trainer)

    def export(self, folder: Path) -> None:
        """Writes the adapter or the model for sampling in other processes."""
        save_weights(folder, self.trainer)

    def load_exported(self, folder: Path) -> None:
        """Loads weights that another process published, for sampling."""
        load_weights(folder, self.trainer)


def _new_adapter(config: LoraPolicyConfig, engine: Engine, seed: int) -> Adapter:
    if engine.sharded_params and (config.use_dora or config.modules_to_save or config.target_parameters):
        raise ValueError(
            "use_dora, modules_to_save and target_parameters read weights of the base, of which parallel: fsdp leaves "
            "each process a part: set parallel: null, or leave them out"
        )
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
        self.name, self.config, self.weights, self.sampler = name, config, weights, sampler
        self.version = 0
        self.reference_version = 0  # version of the weights that are the reference
        self.teacher: Callable[[Sequence[Sample]], Awaitable[list[np.ndarray]]] | None = None  # scores as `logprobs`
        self.encoder = ChatEncoder(tokenizer, config.chat_template_kwargs)
        self._policy: LanguagePolicy | None = None

    @property
    def is_at_reference(self) -> bool:
        return self.version == self.reference_version

    def batches(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """Splits `samples` into batches of about `config.batch_size` for one optimizer step each, repeated for
        `config.epochs`. Samples are distributed round-robin, so that each batch has samples of every prompt; those of
        one group stay together. Batches without any gradient are left out."""
        if not samples:
            return []
        hands = by_group(samples)
        count = min(len(hands), math.ceil(len(samples) / (self.config.batch_size or len(samples))))
        dealt = [[sample for hand in hands[i::count] for sample in hand] for i in range(count)]
        dealt = [batch for batch in dealt if any(sample.has_gradient for sample in batch)]
        return [list(batch) for _ in range(self.config.epochs) for batch in dealt]

    async def forward_backward(self, samples: Sequence[Sample], loss: Callable, **options: Any) -> Metrics:
        """Adds the gradient of `loss`; returns its metrics. Other coroutines run between micro-batches."""
        # With a server or with remote samplers, training runs in a thread, so that the rollout continues.
        # Weights change only in `optim_step`.
        if not isinstance(self.weights, LocalWeights) or not isinstance(self.sampler, Sampler):
            return await asyncio.to_thread(self.weights.forward_backward, samples, loss, **options)
        total: Metrics = {}
        start = time.perf_counter()
        for so_far in self.weights.iter_forward_backward(samples, loss, **options):
            total = so_far
            await self._yield_to_others(time.perf_counter() - start)
            start = time.perf_counter()
        return total

    async def _yield_to_others(self, seconds: float) -> None:
        """Lets other coroutines run; while the sampler has requests, for up to `seconds`."""
        until = time.perf_counter() + seconds
        await asyncio.sleep(0)
        while isinstance(self.sampler, Sampler) and self.sampler.has_requests and time.perf_counter() < until:
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
        if not isinstance(self.weights, LocalWeights) or not isinstance(self.sampler, Sampler):
            return await asyncio.to_thread(read, samples)
        found: list[np.ndarray] = []
        trainer = self.weights.trainer
        if trainer.group.world_size > 1:
            return read(samples)  # the trainer distributes them over the ranks
        for pack in micro_batches(samples, trainer.pack_tokens):
            start = time.perf_counter()
            found += read(pack.samples)
            await self._yield_to_others(time.perf_counter() - start)
        return found

    def set_config(self, config: LoraPolicyConfig | FullPolicyConfig) -> None:
        """Replaces the config, for training and sampling."""
        self.config, self._policy = config, None

    def start_stage(self) -> None:
        self.weights.start_stage()
        self.reference_version = self.version

    async def optim_step(self, progress: float = 0.0) -> Metrics:
        config = self._config_at(progress)
        if isinstance(self.weights, LocalWeights):
            metrics = self.weights.optim_step(config)
        else:
            metrics = await asyncio.to_thread(self.weights.optim_step, config)
        self.version, self._policy = self.version + 1, None
        self.sampler.clear_cache()
        return metrics | {"lr": config.lr}

    def _config_at(self, progress: float) -> Any:
        """Returns the config with the learning rates of a step: the schedule's share of `lr` and of `critic_lr`."""
        config = self.config
        peak = default_lora_lr(base_parameters(config.base)) if config.lr is None else config.lr
        factor = lr_factor(progress, config.lr_schedule, config.warmup_ratio)
        critic_lr = None if config.critic_lr is None else factor * config.critic_lr
        return config.model_copy(update={"lr": factor * peak, "critic_lr": critic_lr})

    def policy(self) -> LanguagePolicy:
        if self._policy is None:
            name, config = f"{self.name}@{self.version}", self.config
            adapter = self.weights.snapshot(name)
            parts = (self.sampler, self.encoder, config.sampling, adapter)
            self._policy = LanguagePolicy(name, *parts, **config.prompt_options)
        return self._policy

    def export(self, folder: Path) -> None:
        """Exports the current weights for `load_exported` in another process."""
        assert isinstance(self.weights, Exportable)  # weights on a server are sampled there
        self.weights.export(folder)

    def load_exported(self, folder: Path, version: int) -> None:
        """Loads weights that were published as `version`, for sampling."""
        assert isinstance(self.weights, LocalWeights)
        self.weights.load_exported(folder)
        self.version, self._policy = version, None
        self.sampler.clear_cache()

    def save(self, folder: Path) -> None:
        self.weights.save(folder)
        about = {"name": self.name, "version": self.version, "type": self.config.type, "base": self.config.base}
        about |= {"reference_version": self.reference_version}
        (folder / "member.json").write_text(json.dumps(about))

    def load(self, folder: Path) -> None:
        self.weights.load(folder)
        about = json.loads((folder / "member.json").read_text())
        self.version, self.reference_version = about["version"], about.get("reference_version", 0)
        self._policy = None
        self.sampler.clear_cache()


def lr_factor(progress: float, kind: str, warmup: float) -> float:
    """Returns the learning-rate factor at `progress` in [0, 1]: rising over `warmup`, then constant or falling to
    0."""
    if progress < warmup:
        return (progress + 1e-9) / warmup
    rest = (progress - warmup) / (1 - warmup)
    return {"constant": 1.0, "linear": 1 - rest, "cosine": 0.5 * (1 + math.cos(math.pi * rest))}[kind]
