"""Configs of language model policies in training: base, sampling, prompt, adapter or full model, learning rates."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import Field, field_validator, model_validator

from palestra.core.config import StrictModel
from palestra.engine.bases.names import model_without_weights
from palestra.engine.conversation.encoder import ChatEncoder, HistoryThoughts
from palestra.engine.conversation.rendering import is_jinja, with_chat_template
from palestra.engine.forward.quantized import Quantization
from palestra.engine.lora.config import LoraConfig, LoraVariantsConfig
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.engine.training.adapter_weights import AUTOCAST_DTYPES, OptimConfig, Precision, ReferenceKind
from palestra.text.policies.context import ContextConfig
from palestra.text.policies.lm import HistoryMode

LORA_LEARNING_RATES = ((20e6, 1e-3), (1e9, 2e-4), (math.inf, 1e-4))  # (parameters of the base below, learning rate)


class LMPolicyConfig(StrictModel):
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
    chat_template: str | None = None
    """Chat template instead of the base's own: a .jinja file, the name of one of its templates, or "none" for plain
    text (after the tokenizer's first token, such as <bos>). null: the base's own."""
    chat_template_kwargs: dict[str, Any] = {}
    """Options of the tokenizer's chat template, for example `enable_thinking: false`."""
    history_thoughts: HistoryThoughts = "template"
    """Thoughts of earlier turns in later prompts: "template" shows them only if the chat template does, as servers
    do; "keep" keeps the tokens as they were sampled."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the weights. "auto": bfloat16 on CUDA and float32 on CPU; float32 for a full model in training."""
    quantize: Quantization | None = None
    """Quantises the base's linear layers, under adapters (QLoRA): "nf4" (4.5 bits per weight) or "int8" (8 bits). null:
    no quantisation."""
    long_context: bool = False
    """Use LongRoPE's long factors for all sequences, which may then exceed the base's original context length."""

    @field_validator("chat_template")
    @classmethod
    def _read_template(cls, given: str | None) -> str | None:
        """Replaces a .jinja file by its text, so that a run does not depend on the file."""
        if given is None or is_jinja(given) or not given.endswith(".jinja"):
            return given
        try:
            return Path(given).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read the chat template {given}: {error}") from None

    def encoder(self, tokenizer: Any) -> ChatEncoder:
        """Returns the encoder of this policy's conversations. Raises ValueError for a chat template that takes no plain
        message, and for a `thinking_token_budget` that cannot be kept."""
        tokenizer = with_chat_template(tokenizer, self.chat_template)
        encoder = ChatEncoder(tokenizer, self.chat_template_kwargs, history_thoughts=self.history_thoughts)
        encoder.check_template()
        encoder.check_thinking_budget(self.sampling.thinking_token_budget, self.sampling.max_tokens)
        return encoder

    @property
    def prompt_options(self) -> dict[str, Any]:
        return {"system": self.system, "history": self.history, "context": self.context}


class LMLearnerConfig(LMPolicyConfig, OptimConfig):
    """Options of a language model policy in training: batches, learning-rate schedule, memory and precision."""

    batch_size: int | None = Field(None, ge=1)
    """About how many samples an optimizer step has. Turns of one conversation, or the answers to one prompt, are in one
    step where possible, so that a prompt is computed once. null: all samples of a training step at once."""
    epochs: int = Field(1, ge=1)
    """Number of passes over the samples of a training step."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or falling to 0 at the end of the stage, linearly or as a cosine. A
    run without stages is one."""
    warmup_ratio: float = Field(0.0, ge=0, lt=1)
    """Share of the stage, in [0, 1), over which the learning rate rises from 0; a run without stages is one."""
    micro_batch_tokens: int = Field(16384, ge=1)
    """Maximum number of tokens of a micro-batch, counted before prefixes are shared. Lower it if memory runs out."""
    precision: Precision = "auto"
    """Dtype of the matrix products of training passes. "auto": bfloat16 for a full model on CUDA, whose weights are
    then stored in float32; otherwise the dtype of the weights."""
    gradient_checkpointing: bool = False
    """Gradient checkpointing: recomputes each decoder layer in the backward pass instead of keeping its activations.
    Saves memory, costs time."""
    seed: int | None = None
    """Seed of the adapter's initialisation. null: derived from the seed of the run."""

    def at(self, progress: float) -> Self:
        """Returns the config with the learning rates at `progress` in [0, 1]: the schedule's share of `lr`, or of the
        default for the base's size, and of `critic_lr`."""
        peak = default_lora_lr(base_parameters(self.base)) if self.lr is None else self.lr
        factor = lr_factor(progress, self.lr_schedule, self.warmup_ratio)
        critic_lr = None if self.critic_lr is None else factor * self.critic_lr
        return self.model_copy(update={"lr": factor * peak, "critic_lr": critic_lr})


class LoraPolicyConfig(LoraVariantsConfig, LMLearnerConfig):
    """A trained LoRA adapter on a base that other policies may share."""

    type: Literal["lora"] = "lora"
    """Kind of policy: a LoRA adapter in training."""
    lr: float | None = Field(None, ge=0, le=1_000_000)  # type: ignore[assignment]
    """Learning rate, at least 0. null: depends on the base's number of parameters: 1e-3 below 20 million (the shipped
    bases), 2e-4 below a billion, else 1e-4."""
    rank: int = Field(8, ge=1, le=4096)
    """Rank of the adapter's matrices, 1 to 4096."""
    alpha: float = Field(16.0, gt=0)
    """Scale of the adapter: its output is multiplied by alpha / rank."""
    target_modules: str | list[str] = "all-linear"
    """Linear layers with an adapter: "all-linear" (all of the decoder layers, without the head), or name suffixes such
    as "q_proj"."""
    path: str | None = None
    """Folder of a saved adapter (PEFT's format) whose weights training starts from; rank, alpha and target_modules must
    be its own. It is also the reference of the first stage. null: a new adapter, which changes nothing at first."""

    @property
    def lora(self) -> LoraConfig:
        plain = {"rank": self.rank, "alpha": self.alpha, "target_modules": self.target_modules}
        return LoraConfig(**plain, **{name: getattr(self, name) for name in LoraVariantsConfig.model_fields})


class FullPolicyConfig(LMLearnerConfig):
    """A full model with all weights trained, on its own copy of the base."""

    type: Literal["full"] = "full"
    """Kind of policy: a full model in training."""
    lr: float = Field(2e-4, ge=0, le=1_000_000)
    """Learning rate, at least 0."""
    reference: ReferenceKind = "none"
    """Where the reference of a KL penalty or a preference loss (the weights at the start of the stage) is stored: as a
    `copy` in the memory of the device, or on `disk` in a temporary file, which is read whole for every micro-batch of a
    reference pass. `none`: for algorithms without a reference."""

    @model_validator(mode="after")
    def _not_quantized(self) -> Self:
        if self.quantize:
            raise ValueError(
                "quantize: quantised weights are not trained themselves: set type: lora, or quantize: null"
            )
        return self


def default_lora_lr(num_parameters: int) -> float:
    """Returns the learning rate of an adapter on a base of this size if the config sets none: a cautious value; a
    search should try larger ones."""
    return next(lr for limit, lr in LORA_LEARNING_RATES if num_parameters < limit)


@cache
def base_parameters(base: str) -> int:
    """Returns the number of parameters of a base model, from its config alone."""
    return int(model_without_weights(base).num_parameters())


def autocast_dtype(config: FullPolicyConfig, device: str) -> torch.dtype | None:
    """Returns the autocast dtype of a full model's passes; None if they use the dtype of the weights."""
    auto = "bfloat16" if device.startswith("cuda") and config.dtype == "auto" else "float32"
    return AUTOCAST_DTYPES.get(auto if config.precision == "auto" else config.precision)


def lr_factor(progress: float, kind: str, warmup: float) -> float:
    """Returns the learning-rate factor at `progress` in [0, 1]: rising over `warmup`, then constant or falling to
    0."""
    if progress < warmup:
        return (progress + 1e-9) / warmup
    rest = (progress - warmup) / (1 - warmup)
    return {"constant": 1.0, "linear": 1 - rest, "cosine": 0.5 * (1 + math.cos(math.pi * rest))}[kind]
