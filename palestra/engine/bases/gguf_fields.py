"""Reads the fields and tensors of a GGUF file that transformers does not: each sets the config, or is refused.

transformers reads some fields of an architecture and drops the rest, and tensors that no weight takes. Here each of
them is set in the config (`ATTRIBUTES`, the rotary embedding), is known to change nothing (`HARMLESS`, `NEUTRAL`), or
is refused by its name. Fields are under the name of the architecture: `llama.rope.scaling.factor`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedModel, modeling_gguf_pytorch_utils
from transformers.integrations import GGUF_CONFIG_MAPPING
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

try:
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS as BY_NEWER_LOADER
    from transformers.integrations.gguf import read_gguf_metadata
except ImportError:  # older versions of transformers have one loader
    BY_NEWER_LOADER = {}

# Fields that transformers leaves out for some architectures, and the attributes that configs have for them.
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "attention.sliding_window": ("sliding_window",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_weights_norm": ("norm_topk_prob",),
    "use_parallel_residual": ("use_parallel_residual",),
}
# Fields that change no number, or whose values the shapes of the tensors fix.
HARMLESS = frozenset({"context_length", "feed_forward_length", "pooling_type", "tensor_data_layout", "vocab_size"})
HARMLESS |= {"rope.scaling.finetuned"}
WITHOUT_IF_ZERO = ("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
# Values that mean the same as no field.
NEUTRAL: dict[str, Any] = {
    "attention.causal": True,
    "attention.head_count": 0,  # of models without attention
    "attention.clamp_kqv": 0.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "attention.sliding_window": 0,
    "embedding_scale": 1.0,
    "expert_count": 0,
    "expert_gating_func": 1,  # softmax
    "expert_used_count": 0,
    "expert_weights_scale": 1.0,
    "leading_dense_block_count": 0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
}
# Files have no field for the scale of Gemma's attention: it is that of a head's width, and in the models with so many
# layers of the width over the heads, as llama.cpp has it.
GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
REMEDY = "Name the model's own weights: a folder that save_pretrained wrote, or its name on the hub"
ROPE_FREQS = "rope_freqs.weight"  # a divisor for each frequency: how Llama 3.1 and later scale the embedding
LLAMA3_RATIO = 4.0  # high_freq_factor, with low_freq_factor 1, of all Llama 3 models
SCALING = ("type", "factor", "original_context_length", "yarn_beta_fast", "yarn_beta_slow")


def complete_config(config: Any, reader: Any, file: str) -> None:
    """Sets in `config` what the file states and transformers does not read. `reader` is the `GGUFReader` of `file`.

    Raises ValueError with the names of the fields that cannot be set and are not known to change nothing.
    """
    architecture = reader.get_field("general.architecture").contents()
    fields = {
        key.removeprefix(f"{architecture}."): field.contents()
        for key, field in reader.fields.items()
        if key.startswith(f"{architecture}.")
    }
    read = _read_by_transformers(config, architecture, file)
    left = {key: value for key, value in fields.items() if key not in read and key not in HARMLESS}
    factors = next((tensor.data for tensor in reader.tensors if tensor.name == ROPE_FREQS), None)
    done = {key for key, value in left.items() if _set(config, key, value) or (key, value) in NEUTRAL.items()}
    done |= _set_rope(config, left, fields.get("context_length"), factors)  # by the width of the heads that is set
    refuse([f"{architecture}.{key} ({left[key]!s:.40})" for key in left if key not in done], file)
    if architecture in GEMMA_27B_LAYERS:
        is_27b = config.num_hidden_layers == GEMMA_27B_LAYERS[architecture]
        width = config.hidden_size // config.num_attention_heads if is_27b else config.head_dim
        config.query_pre_attn_scalar = width


def check_tensors(model: PreTrainedModel, reader: Any, file: str) -> None:
    """Raises ValueError if the file has tensors that no weight of `model` takes. For architectures that transformers
    reads by its newer loader, loading itself returns their names."""
    architecture = reader.get_field("general.architecture").contents()
    if architecture in BY_NEWER_LOADER:
        return
    loader = modeling_gguf_pytorch_utils
    kind = loader.TENSOR_PROCESSORS.get(architecture, loader.TensorProcessor)
    known = loader.get_gguf_hf_weights_map(model, kind(config=model.config.to_dict()))
    names = [tensor.name for tensor in reader.tensors]
    refuse([n for n in names if n not in known and n.removesuffix(".weight") not in known and n != ROPE_FREQS], file)


def refuse(names: Iterable[str], file: str, why: str = "") -> None:
    """Raises ValueError if there are `names` of fields or tensors that would be dropped."""
    if unread := list(names):
        shown = ", ".join(unread[:5])
        if len(unread) > 5:
            shown += f" and {len(unread) - 5} more"
        why = why or f"transformers {transformers.__version__} does not read that, and the results may depend on it"
        raise ValueError(f"cannot convert {file}, which has {shown}: {why}. {REMEDY}")


def _read_by_transformers(config: Any, architecture: str, file: str) -> set[str]:
    """Returns the fields of an architecture that transformers puts into the config."""
    if architecture in BY_NEWER_LOADER:
        metadata, tensors = read_gguf_metadata(file)
        noted = _Noted(metadata)
        BY_NEWER_LOADER[architecture](noted, tensors)
        return {key.removeprefix(f"{architecture}.") for key in noted.read}
    names = (architecture, config.model_type, config.model_type.removesuffix("_text"))
    mapping: dict[str, Any] = next((GGUF_CONFIG_MAPPING[name] for name in names if name in GGUF_CONFIG_MAPPING), {})
    return {key for key, attribute in mapping.items() if attribute is not None}


class _Noted(dict[str, Any]):
    """A dict that notes which keys are read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


def _set(config: Any, key: str, value: Any) -> bool:
    """Sets the config's attribute of a field; false if it has none, or none that its model uses."""
    layers = getattr(config, "layer_types", None)
    if key == "attention.sliding_window_pattern" and layers:
        every = value if isinstance(value, int) and value > 0 else 1
        slides = value if isinstance(value, list) else [bool((i + 1) % every) for i in range(len(layers))]
        if len(slides) == len(layers):
            config.layer_types = ["sliding_attention" if slide else "full_attention" for slide in slides]
        return len(slides) == len(layers) and (slides is value or every == value)
    if key == "attention.sliding_window" and layers and "sliding_attention" not in layers:
        return False
    if key in WITHOUT_IF_ZERO and not value:
        value = None
    for name in ATTRIBUTES.get(key, ()):
        if hasattr(config, name):
            current = getattr(config, name)
            if current is None or not isinstance(value, int | float) or not math.isclose(current, value, rel_tol=1e-6):
                try:
                    setattr(config, name, value)
                except StrictDataclassError:  # a value of another type
                    return False
            return True
    return key in ("attention.key_length", "attention.value_length") and bool(value == _head_dim(config))


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


# -- the rotary embedding ----------------------------------------------------------------------------------------------


def _set_rope(config: Any, left: Mapping[str, Any], context: int | None, factors: np.ndarray | None) -> set[str]:
    """Sets the rotary embedding as the fields `left` and the frequencies' divisors `factors` state it. Returns the
    fields that it has used. Raises ValueError if `factors` are not those of a known kind."""
    parameters = getattr(config, "rope_parameters", None) or {}
    full = parameters.get("full_attention", parameters)
    done = set()
    for key, of in (("rope.freq_base", full), ("rope.freq_base_swa", parameters.get("sliding_attention"))):
        if key in left and of:
            of["rope_theta"] = left[key]
            done.add(key)
    if full and left.get("rope.dimension_count") == int(_head_dim(config) * _rotary_share(config, full)):
        done.add("rope.dimension_count")
    scaling = {name: left[f"rope.scaling.{name}"] for name in SCALING if f"rope.scaling.{name}" in left}
    if "rope.scale_linear" in left:  # the name in old files
        scaling.setdefault("factor", left["rope.scale_linear"])
    new = _rope_of_scaling(scaling, context, sliding=full is not parameters)
    if new == {} or (new and full):  # of no scaling, or one that the model can have
        full.update(new)
        done |= {f"rope.scaling.{name}" for name in SCALING} | {"rope.scale_linear"}
    if factors is not None and not np.allclose(factors, 1):
        if full and not new and full is parameters:
            full.update(_llama3(config, factors))
        if full.get("rope_type") != "llama3":
            raise ValueError(f"{ROPE_FREQS} scales the rotary embedding in another way than Llama 3 does. {REMEDY}")
    return done


def _rotary_share(config: Any, rope: Mapping[str, Any]) -> float:
    return float(rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0)


def _rope_of_scaling(stated: Mapping[str, Any], context: int | None, *, sliding: bool) -> dict[str, Any] | None:
    """Returns the rope parameters of a stated scaling, empty for none; None if its kind is not known. With `sliding`
    layers, which have an embedding of their own, only a linear scaling is that of the others alone."""
    kind = stated.get("type", "linear")
    factor = stated.get("factor") or 1.0
    if kind == "none" or (factor == 1.0 and kind in ("linear", "yarn")):
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn" or sliding:
        return None
    betas = {name: stated[f"yarn_{name}"] for name in ("beta_fast", "beta_slow") if f"yarn_{name}" in stated}
    original = stated.get("original_context_length") or context
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original} | betas


def _llama3(config: Any, factors: np.ndarray) -> dict[str, Any]:
    """Returns the rope parameters of Llama 3's scaling that divide the frequencies by `factors`; empty if none do.

    The scaling divides by `factor` below a frequency, by nothing above 4 times that, and interpolates in between: so
    one frequency in between, or the two that enclose them, gives the original context length.
    """
    plain = _frequencies(config)
    if plain.shape != factors.shape or not np.all(factors >= 1):
        return {}
    factor = float(factors.max())
    share = (1 / factors - 1 / factor) / (1 - 1 / factor)  # of the plain frequency: 1 above, 0 below
    inside = (share > 1e-4) & (share < 1 - 1e-4)
    turns = plain / (2 * math.pi)
    lengths = (1 + (LLAMA3_RATIO - 1) * share[inside]) / turns[inside]
    if not len(lengths):
        lengths = 1 / turns[share <= 1e-4][:1]
    rope = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": LLAMA3_RATIO,
        "original_max_position_embeddings": round(float(np.median(lengths))),
    }
    scaled = _frequencies(config, rope)
    return rope if np.allclose(scaled, plain / factors, rtol=1e-5, atol=0) else {}


def _frequencies(config: Any, scaling: Mapping[str, Any] | None = None) -> np.ndarray:
    """Returns the frequencies of a config's rotary embedding, in radians per token, with a scaling or without."""
    rope = config.rope_parameters
    if scaling is None:
        size = int(_head_dim(config) * _rotary_share(config, rope))
        steps = torch.arange(0, size, 2, dtype=torch.float32) / size
        return (1.0 / rope["rope_theta"] ** steps).numpy()
    scaled = copy.deepcopy(config)
    scaled.rope_parameters = rope | scaling
    frequencies, _ = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](scaled, torch.device("cpu"))
    return frequencies.numpy()
