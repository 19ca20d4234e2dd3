"""Finds out what a model's attention layers do (heads, widths, windows, chunks) by running the model's own code.

A pass of a few tokens runs with an attention function that only records its calls, and with a mask function that gets
the predicate (query position, key position) of each mask that the model creates. No table of architectures has to be
maintained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from palestra.engine.forward.attention_terms import KeySpan
from palestra.engine.forward.decoder import decoder_of

PROBE = "palestra_probe"
PROBE_TOKENS = 4
KNOWN_TENSORS = {"position_ids", "position_embeddings", "cache_position", "s_aux"}
KNOWN_PARTS = ("Norm", "Dropout", "Rotary", "RotaryEmbedding", "Identity")  # ends of class names, besides linear layers
MASK_POINTS = 48  # positions at which a mask's predicate is compared with the one assumed


class UnsupportedAttention(ValueError):
    """A model's attention cannot run on packed rows; the message says why."""


@dataclass(frozen=True)
class AttentionShape:
    """Shape of a model's keys and values: layers, heads, and the width of the wider of the two."""

    layers: int
    kv_heads: int
    width: int


@dataclass
class _Call:
    module: nn.Module
    kv_heads: int
    width: int
    mask: Any
    has_layout: bool
    tensors: set[str]  # keyword arguments that are tensors


_calls: list[_Call] = []


def _record(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    width = max(key.shape[-1], value.shape[-1])
    tensors = {name for name, value in kwargs.items() if isinstance(value, Tensor)}
    has_layout = "layout" in kwargs and "scaling" in kwargs
    _calls.append(_Call(module, key.shape[1], width, attention_mask, has_layout, tensors))
    return query.new_zeros(*query.shape[:1], query.shape[2], query.shape[1], value.shape[-1]), None


def _span(mask_function: Callable[..., Tensor], local_size: int | None = None, **kwargs: Any) -> KeySpan | None:
    """Returns the span of keys of the mask that a model creates; None for all earlier keys."""
    for span in (None,) if local_size is None else (KeySpan(local_size), KeySpan(local_size, chunked=True)):
        if _equal(mask_function, span, kwargs.get("device")):
            return span
    raise UnsupportedAttention("it has an attention mask other than causal, with a window or with chunks")


def _equal(mask_function: Callable[..., Tensor], span: KeySpan | None, device: Any) -> bool:
    """Returns whether a mask's predicate is the causal one over `span`, at a sample of positions."""
    size = span.size if span else 100
    near = torch.tensor([edge + offset for edge, offset in product((0, size, 2 * size), range(-2, 3))])
    far = torch.randint(4 * size + 8, (MASK_POINTS,), generator=torch.Generator().manual_seed(0))
    points = torch.cat([near[near >= 0], far])
    first = torch.as_tensor(span.first_key(points.numpy())) if span else torch.zeros_like(points)
    expected = (points <= points[:, None]) & (points >= first[:, None])
    at = points.to(device)
    zero = torch.zeros((), dtype=torch.long, device=device)
    try:
        mask = mask_function(zero, zero, at[:, None], at[None])
    except (IndexError, RuntimeError):
        return False  # a mask that depends on the batch, not on positions alone
    return torch.equal(mask.expand_as(expected).cpu(), expected)


AttentionInterface.register(PROBE, _record)
AttentionMaskInterface.register(PROBE, _span)


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Makes every part of `model` use the attention function `name` from now on."""
    for config in _configs(model):
        config._attn_implementation = name


def restore_forwards(model: PreTrainedModel) -> None:
    """Undoes an engine's changes to a model: all modules get their own forwards again, and eager attention."""
    for module in model.modules():
        module.__dict__.pop("forward", None)
    set_attention(model, "eager")


def _configs(model: PreTrainedModel) -> list[Any]:
    configs = [getattr(module, "config", None) for module in model.modules()]
    configs.append(model.config.get_text_config())
    return list({id(config): config for config in configs if hasattr(config, "_attn_implementation")}.values())


@torch.no_grad()
def probe_attention(model: PreTrainedModel) -> AttentionShape:
    """Returns the shape of the model's keys and values, and sets `key_span` on each attention module. Raises
    UnsupportedAttention unless every layer calls one attention function once, with masks that are spans of keys."""
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedAttention("its code does not take an attention function")
    ids = torch.arange(PROBE_TOKENS, device=next(model.parameters()).device)[None]
    before = [(config, config._attn_implementation) for config in _configs(model)]
    set_attention(model, PROBE)
    _calls.clear()
    try:
        decoder_of(model)(input_ids=ids, position_ids=ids, use_cache=False, layout=None, keep_M=None)
        return _shape(list(_calls))
    except UnsupportedAttention:
        raise
    except Exception as error:  # any code of any architecture
        raise UnsupportedAttention(
            f"its code does not run with another attention function ({type(error).__name__}: {error})"
        ) from error
    finally:
        _calls.clear()
        for config, old in before:
            config._attn_implementation = old


def _shape(calls: list[_Call]) -> AttentionShape:
    if not calls or not all(call.has_layout for call in calls):
        raise UnsupportedAttention("its layers do not call the attention function that they are given")
    layers = [getattr(call.module, "layer_idx", -1) for call in calls]
    if -1 in layers or len(set(layers)) < len(layers):
        raise UnsupportedAttention("its layers call attention more than once")
    if len({call.kv_heads for call in calls}) > 1:
        raise UnsupportedAttention("its layers have different numbers of key-value heads")
    for call in calls:
        if not isinstance(call.mask, KeySpan | None):
            raise UnsupportedAttention("its layers change the attention mask")
        if unknown := sorted(call.tensors - KNOWN_TENSORS) + sorted(_own_parts(call.module)):
            raise UnsupportedAttention(f"its attention has parts of its own ({', '.join(unknown)})")
        call.module.key_span = call.mask  # type: ignore[assignment]
    return AttentionShape(max(layers) + 1, calls[0].kv_heads, max(call.width for call in calls))


def longest_span(model: PreTrainedModel) -> int:
    """Returns the size of the model's longest window or chunk of keys, 0 if all layers attend to all earlier keys. If
    probing the model failed, this is read from its config."""
    spans = [module.__dict__.get("key_span", module) for module in model.modules()]
    if probed := [span for span in spans if isinstance(span, KeySpan | None)]:
        return max((span.size for span in probed if span), default=0)
    config = model.config.get_text_config()
    sizes = [getattr(config, key, None) for key in ("sliding_window", "attention_chunk_size")]
    return max((size for size in sizes if isinstance(size, int)), default=0)


def _own_parts(module: nn.Module) -> set[str]:
    """Returns the class names of parts of an attention module that may mix tokens, such as an indexer or a compressor
    of keys. Their effect shows only in sequences longer than what they select or join."""
    kinds = {type(child) for child in module.children() if not isinstance(child, nn.Linear | Conv1D)}
    return {kind.__name__ for kind in kinds if not kind.__name__.endswith(KNOWN_PARTS)}
