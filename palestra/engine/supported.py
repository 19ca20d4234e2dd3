"""Check at load: the architectures whose results the engine was compared on with transformers' own forward.

The engine runs packed rows and its own KV cache. A model whose layers do more than plain causal attention may load and
run, and give wrong log-probabilities. So a model is accepted only if tests/engine/test_supported.py compares its
architecture, packed and cached, with the model's own eager forward, and if its config enables nothing that the
comparison did not cover.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

# `model_type` in config.json. In mixtures of experts LoRA adapts attention only: experts are stacked tensors.
# fmt: off
SUPPORTED_MODEL_TYPES = frozenset({
    "apertus", "arcee", "bitnet", "cohere", "dots1", "ernie4_5", "ernie4_5_moe", "gemma", "glm", "glm4", "glm4_moe",
    "gpt_neox", "granite", "granitemoe", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "llama", "minimax_m2",
    "ministral3", "mistral", "mixtral", "nanochat", "olmo", "olmo2", "olmoe", "opt", "phi", "phi3", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "starcoder2",
})
# fmt: on
# Their frequencies depend on the longest sequence of a batch, so a packed row would differ from separate sequences.
LENGTH_DEPENDENT_ROPE = {"longrope", "dynamic"}


def check_supported(model: PreTrainedModel, base: str) -> None:
    """Raises ValueError with all reasons unless the engine's passes are tested to equal the model's own."""
    if reasons := list(_reasons(model)):
        raise ValueError(
            f"cannot run {base!r} ({type(model).__name__}): {'; '.join(reasons)}. Log-probabilities would be wrong "
            "without a word. Use one of the architectures compared with transformers: "
            f"{', '.join(sorted(SUPPORTED_MODEL_TYPES))}."
        )


def _reasons(model: PreTrainedModel) -> Iterator[str]:
    config = model.config.get_text_config()
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        yield f"architecture {config.model_type!r} has not been compared with transformers' own forward"
    if not getattr(model, "_supports_attention_backend", False):
        yield "its code does not take an attention function"
    yield from _attention_reasons(config)
    if ropes := LENGTH_DEPENDENT_ROPE & _rope_types(config):
        yield f"its rotary embedding ({', '.join(sorted(ropes))}) depends on the longest sequence of a batch"
    if getattr(model.config, "quantization_config", None) is not None:
        yield "it is quantised (quantization_config): load a copy in bfloat16 or float32"
    if kinds := {type(m).__name__ for m in model.modules() if isinstance(m, nn.Linear) and type(m) is not nn.Linear}:
        yield f"it has linear layers with a forward of their own ({', '.join(sorted(kinds))})"


def _attention_reasons(config: Any) -> Iterator[str]:
    layer_types = getattr(config, "layer_types", None)
    if other := set(layer_types or ()) - {"full_attention"}:
        yield f"it has layers other than full attention ({', '.join(sorted(other))})"
    window = getattr(config, "sliding_window", None)
    if window and not layer_types and window < config.max_position_embeddings:
        yield (
            f"it has a sliding window of {window} tokens (where no sequence is longer, load a copy whose config.json "
            f"says max_position_embeddings: {window})"
        )
    if getattr(config, "attn_logit_softcapping", None):
        yield "it caps attention logits"


def _rope_types(config: Any) -> set[str]:
    """Returns the kinds of rotary embedding in a config, over all kinds of layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(entry["rope_type"]) for entry in [parameters, *nested] if "rope_type" in entry}
