"""Estimates of the memory that a base model takes in sampling and training, from the shapes in its config.

The activations are counted for the engine's own passes (models.py, lora_routes.py, tree_attention.py) of a decoder with
gated MLPs; other decoders differ a little. tests/text/build/test_memory_plan.py compares them with measured peaks.

Units: bytes, unless named otherwise. A token's values: `width` of the model, `query` and `kv` of all its heads,
`inner` of the MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from palestra.engine.bases.names import model_without_weights, resolve_base
from palestra.engine.cache.kv_cache import pages_of
from palestra.engine.cache.kv_pages import PAGE_TOKENS, SLACK_DIVISOR
from palestra.engine.forward.linear import packed_bytes
from palestra.engine.forward.logits import MAX_DRAWN_LOGITS, MAX_DRAWN_LOGITS_GPU, MAX_LOGITS
from palestra.engine.lora.adapters import find_linear_layers, target_names
from palestra.engine.lora.config import LoraConfig, names_of_targets
from palestra.engine.lora.variants import stacked_parameters

FLOAT32 = 4
TRAINED_LOGITS_BYTES = 20  # per logit of a chunk with a trained head, measured; a frozen head takes half of that
DRAWN_LOGITS_BYTES = 24  # per logit of a chunk in sampling, beside the logits themselves, measured
PROCESS = 550 * 2**20  # Python, torch and transformers without a model


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder; `linears` are (inputs, outputs) of its linear layers by name, `experts` the shapes of stacked
    weights, `embedding` the name of the embeddings of tokens."""

    params: int
    linears: dict[str, tuple[int, int]]
    layers: int
    width: int
    query: int
    kv: int
    inner: int
    vocab: int
    positions: int
    experts: dict[str, tuple[int, ...]]
    embedding: str


def model_shape(base: str) -> ModelShape:
    """Returns the sizes of the base `base`, from its config alone. Raises ValueError if transformers cannot build a
    model from its config."""
    path = resolve_base(base)
    try:
        model = model_without_weights(path)
    except ValueError as error:
        raise ValueError(f'cannot read the config of the base "{base}": {error}') from error
    return shape_of(model)


def shape_of(model: PreTrainedModel) -> ModelShape:
    """Returns the sizes of a decoder, without reading its weights."""
    text = model.config.get_text_config()
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    experts = getattr(text, "num_experts_per_tok", None) or 1
    inner = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", 4 * text.hidden_size)
    return ModelShape(
        params=sum(p.numel() for p in model.parameters()),
        linears={
            name: (module.in_features, module.out_features)
            for name, module in find_linear_layers(model).items()
            if isinstance(module, torch.nn.Linear)
        },
        layers=text.num_hidden_layers,
        width=text.hidden_size,
        query=head * text.num_attention_heads,
        kv=head * kv_heads,
        inner=inner * experts,
        vocab=text.vocab_size,
        positions=getattr(text, "max_position_embeddings", 0) or 2**31,
        experts={name: tuple(model.get_parameter(name).shape) for name in stacked_parameters(model)},
        embedding=next(name for name, module in model.named_modules() if module is model.get_input_embeddings()),
    )


def adapter_params(shape: ModelShape, config: LoraConfig) -> int:
    """Returns the number of weights of an adapter."""
    names = target_names(shape.linears, config.target_modules)
    pairs = sum(config.rank_of(name) * sum(shape.linears[name]) for name in names)
    magnitudes = sum(shape.linears[name][1] for name in names) if config.use_dora else 0
    modules = {name: inputs * outputs for name, (inputs, outputs) in shape.linears.items()}
    modules[shape.embedding] = shape.vocab * shape.width
    saved = sum(size for name, size in modules.items() if name.endswith(tuple(config.modules_to_save)))
    experts = 0
    for name in names_of_targets(shape.experts, config.target_parameters):
        count, *sizes = shape.experts[name]
        experts += config.rank_of(name) * count * sum(sizes)
    return pairs + magnitudes + saved + experts


def packed_copy_bytes(shape: ModelShape) -> int:
    """Returns the bytes of the packed copies of a base's float32 weights for sampling on CPU; 0 if it is too large."""
    return packed_bytes(inputs * outputs for inputs, outputs in shape.linears.values())


def cache_bytes(
    shape: ModelShape, answers: int, prompts: int, *, max_tokens: int, prompt_tokens: int, size: int, on_cpu: bool
) -> int:
    """Returns the bytes of a KV cache with `answers` answers of `max_tokens` tokens to `prompts` prompts and elements
    of `size` bytes, with the spare pages of a cache that has grown: on a GPU up to as many again."""
    page_bytes = 2 * shape.layers * shape.kv * size * PAGE_TOKENS
    pages = answers * pages_of(max_tokens) + prompts * pages_of(prompt_tokens)
    return page_bytes * (pages + pages // (SLACK_DIVISOR if on_cpu else 1))


def activation_bytes(shape: ModelShape, tokens: int, *, size: int, checkpointing: bool) -> int:
    """Returns the bytes of the activations that a training pass of `tokens` tokens keeps for its backward pass, and of
    the temporary ones of one layer."""
    # residual stream and its norm, twice; queries, gathered and not, output and its rows; keys likewise, values; gate,
    # other half and product of the MLP (fused_layers.py)
    per_layer = 4 * shape.width + 4 * shape.query + 3 * shape.kv + 3 * shape.inner
    layer = per_layer + 2 * shape.inner  # in its backward pass also two gradients of the MLP
    if checkpointing:
        return tokens * size * (shape.layers * shape.width + layer)
    return tokens * size * (shape.layers * per_layer + 2 * shape.inner)


def pass_bytes(shape: ModelShape, tokens: int, *, size: int) -> int:
    """Returns the bytes of the temporary activations of a pass without gradients: those of one layer."""
    return tokens * size * (3 * shape.width + max(3 * shape.query + 4 * shape.kv, 3 * shape.inner))


def logits_bytes(shape: ModelShape, tokens: int, *, trained: bool, on_cpu: bool) -> int:
    """Returns the bytes of the logits that exist at a time in a pass that reads those of `tokens` tokens: in training,
    those of a chunk that autograd keeps and their gradients; in sampling, all in float32 and, for a chunk, their
    probabilities and float64 cumulative sums."""
    logits = tokens * shape.vocab
    if trained:
        return TRAINED_LOGITS_BYTES * min(logits, MAX_LOGITS)
    most = MAX_DRAWN_LOGITS if on_cpu else MAX_DRAWN_LOGITS_GPU
    return FLOAT32 * logits + DRAWN_LOGITS_BYTES * min(logits, most)


@dataclass(frozen=True)
class MemoryPart:
    """Memory of one part of a run: its name, bytes, and how they were computed. `phase` is "sampling" or "training" for
    memory of one phase only: the phases do not overlap."""

    name: str
    bytes: int
    detail: str
    phase: str = ""


def peak_bytes(parts: Sequence[MemoryPart]) -> int:
    """Returns the peak memory of a run in bytes: the parts without a phase, and the larger of its two phases."""
    sizes = {"": 0, "sampling": 0, "training": 0}
    for part in parts:
        sizes[part.phase] += part.bytes
    return sizes[""] + max(sizes["sampling"], sizes["training"])
