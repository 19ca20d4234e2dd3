"""Layouts and routes: the arguments of a pass over one flat row of tokens, beside the tokens.

A *layout* (tree_attention.py for training, cached_attention.py for sampling) defines which tokens each token attends
to; the model passes it to our attention function, which is registered here. A *route* (lora_routes.py) defines which
adapter each row uses; the linear layers call it.

Shapes: `S` tokens of a flat row, `M` rows whose logits are kept, `H` heads, `h` heads of keys and values, `D` head
width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn
from transformers import AttentionInterface

from palestra.engine.forward.attention_terms import NO_TERMS, AttentionTerms

T = TypeVar("T")
MAX_PADDING_RATIO = 1.5  # maximum ratio of computed to needed values of a padded group


def packs(items: Iterable[T], size_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Yields the items in order, those of one flat row together: at most `limit` tokens by `size_of`, counted before
    sharing (a single item may exceed it)."""
    pack: list[T] = []
    size = 0
    for item in items:
        if pack and size + size_of(item) > limit:
            yield pack
            pack = []
            size = 0
        pack.append(item)
        size += size_of(item)
    if pack:
        yield pack


def groups_to_pad(items: Iterable[T], shape_of: Callable[[T], tuple[int, int]], always: int = 0) -> Iterator[list[T]]:
    """Yields the items in order, in groups of similar shape, so that padding all of a group to its largest rows and
    columns wastes little. A group of at most `always` values, with its padding, is never divided."""
    group: list[T] = []
    need = rows = columns = 0
    for item in items:
        height, width = shape_of(item)
        rows = max(rows, height)
        columns = max(columns, width)
        need += height * width
        if group and rows * columns * (len(group) + 1) > max(always, MAX_PADDING_RATIO * need):
            yield group
            group = []
            rows = height
            columns = width
            need = height * width
        group.append(item)
    if group:
        yield group


class AttentionLayout(Protocol):
    """Defines which tokens each token of a flat row attends to.

    A layout of a pass that keeps fewer rows than it has also implements `narrow(keep_M)`, which returns the layout in
    which only those rows have queries; keys and values are still those of all rows.
    """

    def attend(
        self, layer: int, q_HSD: Tensor, k_HSD: Tensor, v_HSD: Tensor, scale: float, terms: AttentionTerms = NO_TERMS
    ) -> Tensor:
        """Returns the attention output [S, H, D] of queries [H, S, D] over keys and values [h, S, D], in their
        dtype."""


class AdapterRoute(Protocol):
    """Defines which adapter each row of a flat row uses."""

    def linear(self, name: str, x: Tensor, layer: nn.Module) -> Tensor:
        """Returns `layer(x)` plus the output of the rows' adapters at the linear layer `name`."""

    def narrow(self, keep_M: Tensor) -> AdapterRoute:
        """Returns the route of the rows `keep_M` (rising indices) only."""

    def blocks(self, rows: int) -> Sequence[tuple[AdapterRoute | None, int]]:
        """Returns, for each block of `rows` rows, a route for any number of rows of its adapter, and its size."""


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    span = module.key_span
    softcap = kwargs.get("softcap")
    sinks_H = kwargs.get("s_aux")
    plain = span is None and softcap is None and sinks_H is None
    terms = NO_TERMS if plain else AttentionTerms(span, softcap, sinks_H)
    out = kwargs["layout"].attend(module.layer_idx, query[0], key[0], value[0], kwargs["scaling"], terms)
    return out[None], None


AttentionInterface.register("palestra", _attention)


class StopAfterKV(Exception):
    """Stops the first of the two passes of the last layer."""


class KVFirstLayout:
    """The layout of the last layer: a first pass of all rows up to keys and values, and a second pass of the kept rows
    to the end."""

    def __init__(self, kept: AttentionLayout) -> None:
        self.kept_layout = kept
        self.kv_HSD: tuple[Tensor, Tensor] | None = None

    def attend(
        self, layer: int, q_HSD: Tensor, k_HSD: Tensor, v_HSD: Tensor, scale: float, terms: AttentionTerms = NO_TERMS
    ) -> Tensor:
        if self.kv_HSD is None:
            self.kv_HSD = k_HSD, v_HSD
            raise StopAfterKV
        return self.kept_layout.attend(layer, q_HSD, *self.kv_HSD, scale, terms)


def select_rows(value: Any, keep_M: Tensor, size: int) -> Any:
    """Returns `value` with every tensor `[1, size, ...]` in it reduced to the rows `keep_M`."""
    if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == size:
        return value.index_select(1, keep_M)
    if isinstance(value, tuple):
        return tuple(select_rows(v, keep_M, size) for v in value)
    if isinstance(value, dict):
        return {k: select_rows(v, keep_M, size) for k, v in value.items()}
    return value
