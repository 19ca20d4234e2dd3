"""What the front end asks of the engine's worker: bodies of queued requests, checked and with every name resolved.

Gradients travel as the wire's own protobuf (`codec.py`). Folders are names in the vault.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from palestra.engine.sampler import Sampling

# A request's `kind`. Those of a model run in the order of their sequence numbers.
ModelKind = Literal[
    "create_model",
    "forward",
    "forward_backward",
    "reverse_kl",
    "optim_step",
    "save",
    "load",
    "unload",
]
FreeKind = Literal["sample", "interpolate"]


class Lora(BaseModel):
    """What a model trains: a LoRA adapter on some of its base's linear layers. `seed` null: drawn from the model's id.
    `alpha` is ours: official adapters have 32, whatever their rank."""

    rank: int = 32
    alpha: float = 32.0
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True


class SampleJob(BaseModel):
    """`num_samples` answers to `tokens` under the weights in `folder` (null: the bare base). The rest says which
    log-probabilities of the prompt are wanted: `prompt_logprobs`, the `topk_prompt` best at each position, those of
    `target_prompt` [P-1][K] (-1: skip), only of the `last_n` positions; `topk_sample` is how many of the likeliest are
    wanted beside each sampled token."""

    base: str
    folder: str | None
    tokens: list[int]
    num_samples: int
    sampling: Sampling
    seed: int
    prompt_logprobs: bool = False
    topk_prompt: int = 0
    topk_sample: int = 0
    target_prompt: list[list[int]] | None = None
    last_n: int | None = None

    @property
    def asks_prompt(self) -> bool:
        return bool(self.prompt_logprobs or self.topk_prompt or self.target_prompt)

    @property
    def size(self) -> int:
        """Tokens that its answer may have, each counted again for every log-probability asked for beside its own."""
        targets = len(self.target_prompt[0]) if self.target_prompt else 0
        prompt = len(self.tokens) * (1 + self.topk_prompt + targets) if self.asks_prompt else 0
        return prompt + self.num_samples * self.sampling.max_tokens * (1 + self.topk_sample)


class LessonJob(BaseModel):
    """An answer with its tokens' weights, after the student's prompt and after the reference's."""

    student: list[int]
    reference: list[int]
    answer: list[int]
    weights: list[float]


class ReverseKLJob(BaseModel):
    """A pass that draws a model's answers towards a reference's: the weights in `folder` (null: the bare base)."""

    folder: str | None
    lessons: list[LessonJob]
    temperature: float


class OptimJob(BaseModel):
    """AdamW's settings for one step; `grad_clip_norm` 0 clips nothing."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class SaveJob(BaseModel):
    """Keeps a model's weights at the tinker:// path `path`, or for the sampler called `sampler`, which has no path.

    A path of kind "training" holds the optimizer too. Where something stands at the path, `overwrite` false refuses;
    null and true replace it."""

    path: str | None = None
    sampler: str | None = None
    ttl_seconds: float | None = None
    overwrite: bool | None = None
    info: dict[str, Any] = {}


class LoadJob(BaseModel):
    """Gives a model the weights in `folder`, with `optimizer` its state too. `path` is what the client calls them."""

    folder: str
    path: str
    optimizer: bool


class InterpolateJob(BaseModel):
    """A weighted sum of adapters of one base and one shape, kept at `path`."""

    folders: list[str]
    coefficients: list[float]
    path: str
    source_paths: list[str]
