"""A small model of the same architecture as a large one, with a layer of each kind.

Widths, heads and everything that the config says about a layer stay. The small model has as few layers as contain one
of each kind, a small vocabulary, few experts, and short windows, so that a prompt of 50 tokens exceeds them; as short
are the lengths from which queries are scaled by position. Weights are random and large enough that every part of a
layer changes the output.
"""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import torch
from transformers import PreTrainedModel

MAX_VOCABULARY = 512
MAX_WINDOW = 16
MAX_EXPERTS = 16
MAX_INTERMEDIATE = 64
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
PERIODS = re.compile(r"(period|interval|freq|pattern|step|every|offset)s?$")  # periods at which a kind of layer occurs
FIRST_LAYERS = re.compile(r"^(first_k_|num_dense_|n_dense_|moe_layer_start|max_window_layers)")  # numbers of layers
NAMED_BY_LAYER = {"max_window_layers"}  # of no further effect where `layer_types` names each layer's attention
WINDOWS = re.compile(r"(window|chunk|block)(_size)?$|window_size|index_topk|floor_scale|scaling_n_floor")
WIDTHS = re.compile(r"(intermediate_size|ffn_dim|ffn_hidden_size|n_inner)$")


def reduced_model(model: PreTrainedModel, seed: int) -> PreTrainedModel | None:
    """Returns a small model of the class and kind of `model`, float32, on its device (or the CPU), with weights by
    `seed`; None if the class cannot build one."""
    for narrow in (True, False):
        data = _reduce_config(model.config.to_dict(), narrow)
        try:
            config = type(model.config).from_dict(data)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                small = type(model)._from_config(config, attn_implementation="eager", dtype=torch.float32)
                # matrices get noise that keeps the scale of their inputs, vectors a tenth
                generator = torch.Generator().manual_seed(seed)
                with torch.no_grad():
                    for weight in small.parameters():
                        size = 1 / math.sqrt(weight.shape[-1]) if weight.dim() > 1 else 0.1
                        weight.add_(torch.randn(weight.shape, generator=generator).to(weight), alpha=size)
        except Exception:  # any code of any architecture
            continue
        device = "cpu" if model.device.type == "meta" else model.device
        return small.to(device).eval().requires_grad_(False)
    return None


def _reduce_config(data: dict[str, Any], narrow: bool) -> dict[str, Any]:
    """Returns a config with fewer and smaller parts; with `narrow` false, only with fewer layers, fewer tokens of the
    vocabulary and shorter windows."""
    parts = {key: part for key, part in data.items() if isinstance(part, dict) and key.endswith("_config")}
    data = data | {key: _reduce_config(part, narrow) for key, part in parts.items()}
    if "rope_parameters" in data:
        data["rope_parameters"] = _reduced_rope(data["rope_parameters"])
    data.pop("quantization_config", None)
    layers = next((data[key] for key in LAYER_COUNTS if isinstance(data.get(key), int)), 0)
    num_kept = _layers_of_each_kind(data, layers)
    vocabulary = min(data.get("vocab_size") or MAX_VOCABULARY, MAX_VOCABULARY)
    for key, value in data.items():
        if key in LAYER_COUNTS:
            data[key] = min(value, num_kept) if isinstance(value, int) else value
        elif isinstance(value, list) and len(value) == layers > 1:
            data[key] = copy.copy(value[:num_kept])
        elif key.endswith("_token_id"):
            data[key] = _valid_id(value, vocabulary)
        elif isinstance(value, int) and not isinstance(value, bool):
            data[key] = _reduced_size(key, value, narrow)
    return data


def _reduced_rope(rope: Any) -> Any:
    """Returns parameters of rotary embeddings with a short length from which queries are scaled (Ministral 3)."""
    if not isinstance(rope, dict):
        return rope
    rope = {key: _reduced_rope(value) for key, value in rope.items()}
    length = "original_max_position_embeddings"
    if rope.get("llama_4_scaling_beta") and rope.get(length):
        rope[length] = min(rope[length], MAX_WINDOW)
    return rope


def _valid_id(value: Any, vocabulary: int) -> Any:
    if isinstance(value, list):
        return [_valid_id(each, vocabulary) for each in value]
    return 0 if isinstance(value, int) and value >= vocabulary else value


def _reduced_size(key: str, value: int, narrow: bool) -> int:
    if key.startswith("vocab_size"):
        return min(value, MAX_VOCABULARY)
    if WINDOWS.search(key):
        return min(value, MAX_WINDOW)
    if narrow and key in EXPERT_COUNTS:
        return min(value, MAX_EXPERTS)
    if narrow and WIDTHS.search(key):
        return min(value, MAX_INTERMEDIATE)
    return value


def _layers_of_each_kind(data: dict[str, Any], layers: int) -> int:
    """Returns how many of the first layers contain one of each kind, at least two."""
    lists = [value for value in data.values() if isinstance(value, list) and len(value) == layers > 1]
    kinds = [str(kind) for kind in zip(*lists, strict=True)]
    needed = max([2, *(kinds.index(kind) + 1 for kind in kinds)])
    redundant = NAMED_BY_LAYER if isinstance(data.get("layer_types"), list) else ()
    for key, value in data.items():
        if key not in redundant and isinstance(value, int) and not isinstance(value, bool) and 0 < value < layers:
            if PERIODS.search(key):
                needed = max(needed, value + ("offset" in key))
            if FIRST_LAYERS.search(key):
                needed = max(needed, value + 1)
    return min(needed, layers)
