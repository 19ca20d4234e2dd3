"""Routes: which adapter each row of a pass uses, and the products that apply it to a linear layer.

Training uses one adapter for all rows (`SingleAdapterRoute`), with gradients, or one for each block of them
(`BlockRoute`). Sampling uses many: rows of several snapshots, and of the bare base, share one forward pass
(`MultiAdapterRoute`); on the plain path all rows have one (`SnapshotRoute`). All implement `AdapterRoute` of
flat_row.py.

Shapes: `R` rows of the flat row, `r` rank of an adapter, `T` sum of the ranks of several, `i` and `o` inputs and
outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from palestra.engine.forward.linear import linear, low_rank_grads, matmul
from palestra.engine.lora.adapters import Adapter, Snapshot, layer_shape, own_output
from palestra.engine.lora.low_rank import (
    GroupedLinear,
    Products,
    RowColumns,
    Run,
    add_by_kernels,
    add_by_runs,
    choose_products,
    columns_of,
    padded_rank,
    runs_of,
    uses_kernels,
)
from palestra.engine.lora.variants import Dropout, linear_by_blocks, variant_output

MAX_GROUPED_ROWS = 512  # an adapter, on average: with more rows, adding it to the weights takes a CPU less time
MAX_MERGED_WEIGHTS = 2**18  # layers with at most this many weights are merged: a copy costs little memory


class SingleAdapterRoute:
    """The route of a single-adapter training pass: every row uses the adapter, and gradients flow into it. `dropout`
    holds the pass's dropout masks (None: no dropout)."""

    def __init__(self, owner: Adapter, dropout: Dropout | None = None) -> None:
        self.owner = owner
        self.dropout = dropout

    def linear(self, name: str, x: Tensor, layer: Any) -> Tensor:
        if self.dropout is not None or not self.owner.mergeable:
            return variant_output(self.owner, own_output, name, x, layer, self.dropout)
        if (pair := self.owner.weights.get(name)) is None:
            return own_output(layer, x)
        if type(layer) is nn.Linear and not torch.is_autocast_enabled(x.device.type):
            # a merged weight in half precision would lose the adapter to rounding
            product = MergedLinear if layer.weight.dtype == torch.float32 else LowRankLinear
            return product.apply(x, layer.weight, layer.bias, *pair, self.owner.scale_of(name))
        a, b = (w.to(x.dtype) for w in pair)
        return own_output(layer, x) + self.owner.scale_of(name) * F.linear(F.linear(x, a), b)

    def narrow(self, keep_M: Tensor) -> SingleAdapterRoute:
        return self

    def blocks(self, rows: int) -> list[tuple[SingleAdapterRoute, int]]:
        return [(self, rows)]


class BlockRoute:
    """The route of a multi-adapter training pass: block i of the rows uses adapter i, and gradients flow into it."""

    def __init__(self, adapters: Sequence[Adapter], counts: Sequence[int]) -> None:
        self.routes = [SingleAdapterRoute(adapter) for adapter in adapters]
        self.counts = list(counts)
        # products and scales, by the adapters' ranks and scales at a layer
        self._groups: dict[tuple[tuple[int, float], ...], tuple[Products, Tensor]] = {}

    def blocks(self, rows: int) -> list[tuple[SingleAdapterRoute, int]]:
        return list(zip(self.routes, self.counts, strict=True))

    def linear(self, name: str, x: Tensor, layer: Any) -> Tensor:
        if len(self.routes) == 1:
            return self.routes[0].linear(name, x, layer)  # no copy
        owners = [route.owner for route in self.routes]
        is_merged = type(layer) is nn.Linear and not x.is_cuda and sum(self.counts) > MAX_GROUPED_ROWS * len(owners)
        can_group = all(owner.mergeable for owner in owners) and not torch.is_autocast_enabled(x.device.type)
        if can_group and not is_merged:
            return self._linear_by_groups(name, x, layer, owners)
        return linear_by_blocks(self.blocks(x.shape[-2]), own_output, name, x, layer)

    def _linear_by_groups(self, name: str, x: Tensor, layer: Any, owners: Sequence[Adapter]) -> Tensor:
        adapted = [owner for owner in owners if name in owner.weights]
        if not adapted:
            return own_output(layer, x)
        products, scale_T1 = self._group(name, x, owners)
        a_Ti = torch.cat([owner.weights[name][0] for owner in adapted])
        b_To = torch.cat([owner.weights[name][1].T for owner in adapted]) * scale_T1
        if type(layer) is nn.Linear:
            return GroupedLinear.apply(x, layer.weight, layer.bias, a_Ti, b_To, products)
        return own_output(layer, x) + GroupedLinear.apply(x, None, None, a_Ti, b_To, products)

    def _group(self, name: str, x: Tensor, owners: Sequence[Adapter]) -> tuple[Products, Tensor]:
        """Returns the products of a layer, and the scale of each column [T, 1] float32, which are copied to the device
        once for all layers with these ranks and scales."""
        ranks = [len(owner.weights[name][0]) if name in owner.weights else 0 for owner in owners]
        scales = [owner.scale_of(name) for owner in owners]
        key = tuple(zip(ranks, scales, strict=True))
        if key not in self._groups:
            scale_T = torch.tensor(np.repeat(scales, ranks), dtype=torch.float32, device=x.device)
            self._groups[key] = choose_products(x, self.counts, ranks), scale_T[:, None]
        return self._groups[key]

    def narrow(self, keep_M: Tensor) -> BlockRoute:
        return BlockRoute([route.owner for route in self.routes], count_kept_rows(self.counts, keep_M))


class SnapshotRoute:
    """The route of a sampling pass in which every row uses one snapshot, on the plain path."""

    def __init__(self, owner: Snapshot) -> None:
        self.owner = owner

    def linear(self, name: str, x: Tensor, layer: Any) -> Tensor:
        if not self.owner.mergeable:
            return variant_output(self.owner, own_output, name, x, layer)
        if (pair := self.owner.weights.get(name)) is None:
            return own_output(layer, x)
        a, b = (w.to(x.dtype) for w in pair)
        return own_output(layer, x) + F.linear(F.linear(x, a), b)

    def narrow(self, keep_M: Tensor) -> SnapshotRoute:
        return self

    def blocks(self, rows: int) -> list[tuple[SnapshotRoute, int]]:
        return [(self, rows)]


class MergedLinear(torch.autograd.Function):
    """`x (W + scale * B A)' + bias` with a frozen `W`: one full-size product forward and one backward.

    Adding `B A` to `W` costs rank / rows of the full product, and avoids the low-rank products' passes over the
    activations. It is recomputed in the backward pass, so that merged weights are never kept.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        ctx.scale = scale
        return linear(x, torch.addmm(weight, b, a, alpha=scale), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b = ctx.saved_tensors
        grad_a, grad_b = low_rank_grads(x.flatten(0, -2), grad.flatten(0, -2), a, b)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = matmul(grad, torch.addmm(weight, b, a, alpha=ctx.scale))
        return grad_x, None, None, grad_a.mul_(ctx.scale), grad_b.mul(ctx.scale), None


class LowRankLinear(torch.autograd.Function):
    """`x W' + bias + scale * (x A') B'` with a frozen `W`, in the dtype of `x`; the gradients of A and B have the
    dtypes of A and B.

    It launches a third of the kernels that separate autograd nodes would: on a GPU, launching them takes longer than
    running them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        a_x = a.to(x.dtype)
        b_x = b.to(x.dtype)
        rows = x.flatten(0, -2)
        inner = rows @ a_x.T
        out = linear(rows, weight, bias).addmm_(inner, b_x.T, alpha=scale)
        ctx.save_for_backward(x, weight, a_x, b_x, inner)
        ctx.scale = scale
        ctx.dtypes = (a.dtype, b.dtype)
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, inner = ctx.saved_tensors
        rows = x.flatten(0, -2)
        grad_rows = grad.flatten(0, -2)
        grad_inner = torch.empty_like(inner).addmm_(grad_rows, b, beta=0, alpha=ctx.scale)
        grad_a = (grad_inner.T @ rows).to(ctx.dtypes[0])
        grad_b = torch.empty_like(b).addmm_(grad_rows.T, inner, beta=0, alpha=ctx.scale).to(ctx.dtypes[1])
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = matmul(grad_rows, weight).addmm_(grad_inner, a).view_as(x)
        return grad_x, None, None, grad_a, grad_b, None


def count_kept_rows(counts: Sequence[int], keep_M: Tensor) -> list[int]:
    """Returns how many of the rows `keep_M` (rising indices) lie in each of consecutive blocks of `counts` rows."""
    ends: list[int] = np.diff(np.searchsorted(keep_M.cpu().numpy(), np.cumsum(counts)), prepend=0).tolist()
    return ends


class MultiAdapterRoute:
    """The route of a sampling pass: block i of `counts[i]` rows uses snapshot i, the rows after the last block use the
    bare base.

    One snapshot for all rows is merged into small layers, and applied with two plain products at large ones; several
    are applied by low_rank.py.
    """

    def __init__(self, stack: AdapterStack, counts: Sequence[int]) -> None:
        self.stack = stack
        self.counts = list(counts)
        self.rows = sum(counts)

    @cached_property
    def runs(self) -> list[Run]:
        """The blocks, for batched products."""
        return runs_of(self.counts, self.stack.ranks, self.stack.device)

    @cached_property
    def columns(self) -> RowColumns:
        """The columns of each row's adapter."""
        first_R, rank_R = torch.tensor(columns_of(self.counts, self.stack.ranks), device=self.stack.device)
        return RowColumns(first_R, rank_R, padded_rank(self.stack.ranks))

    def narrow(self, keep_M: Tensor) -> MultiAdapterRoute:
        return MultiAdapterRoute(self.stack, count_kept_rows(self.counts, keep_M))

    def blocks(self, rows: int) -> list[tuple[SnapshotRoute | None, int]]:
        owners = [SnapshotRoute(snapshot) for snapshot in self.stack.snapshots]
        return [*zip(owners, self.counts, strict=True), (None, rows - self.rows)]

    def linear(self, name: str, x: Tensor, layer: Any) -> Tensor:
        if not self.stack.mergeable:
            return linear_by_blocks(self.blocks(x.shape[-2]), own_output, name, x, layer)
        if (
            len(self.counts) == 1
            and self.rows == x.shape[-2]
            and (merged := self.stack.merged_weight(name)) is not None
        ):
            return linear(x, merged, layer.bias)
        y = own_output(layer, x)
        if (pair := self.stack.pair(name)) is None:
            return y
        a_Ti, b_To = pair
        x_Ri = x.flatten(0, -2)[: self.rows]
        y_Ro = y.flatten(0, -2)[: self.rows]
        if len(self.counts) > 1 and uses_kernels(x_Ri):
            add_by_kernels(x_Ri, y_Ro, a_Ti[None], b_To, [b_To.shape[1]], self.columns)
        else:
            add_by_runs(x_Ri, y_Ro, a_Ti, b_To, self.runs)
        return y


class AdapterStack:
    """Several snapshots, one after another: for each linear layer `A [T, i]` and `B [T, o]` in the base's dtype. A
    snapshot of rank r has r rows of both, which are 0 where it has no weights or fewer."""

    def __init__(self, snapshots: Sequence[Snapshot], linears: Mapping[str, nn.Module]) -> None:
        self.snapshots = list(snapshots)
        self.ranks = [snapshot.rank for snapshot in snapshots]
        self.linears = linears
        self.mergeable = all(snapshot.mergeable for snapshot in snapshots)  # else no merged or joined weights are used
        self.device = next(next(iter(linears.values())).parameters()).device
        self._pairs: dict[str, tuple[Tensor, Tensor] | None] = {}
        self._merged: dict[str, Tensor | None] = {}

    @cached_property
    def adapted_layers(self) -> frozenset[str]:
        """Names of the layers that a snapshot adapts."""
        return frozenset(chain.from_iterable(snapshot.weights for snapshot in self.snapshots))

    def merged_weight(self, name: str) -> Tensor | None:
        """Returns the layer's weight with the only snapshot added; None for layers that are large or not in float32."""
        if name not in self._merged:
            layer: Any = self.linears[name]
            weight = layer.weight
            pair = self.snapshots[0].weights.get(name)
            small = weight.dtype == torch.float32 and weight.numel() <= MAX_MERGED_WEIGHTS
            fits = pair is not None and small and type(layer) is nn.Linear
            self._merged[name] = torch.addmm(weight, pair[1], pair[0]) if pair is not None and fits else None
        return self._merged[name]

    def pair(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Returns the matrices A and B of a layer; None if no snapshot adapts it."""
        if name not in self._pairs:
            self._pairs[name] = self._build(name)
        return self._pairs[name]

    def _build(self, name: str) -> tuple[Tensor, Tensor] | None:
        pairs = [snapshot.weights.get(name) for snapshot in self.snapshots]
        if not any(pairs):
            return None
        layer: Any = self.linears[name]
        outputs, inputs = layer_shape(layer)
        # a quantised weight's dtype is not that of its outputs
        like = layer.weight if type(layer) in (nn.Linear, Conv1D) else next(p for p in pairs if p)[0]
        a_Ti = like.new_zeros(sum(self.ranks), inputs)
        b_To = like.new_zeros(sum(self.ranks), outputs)
        for pair, a_ri, b_ro in zip(pairs, a_Ti.split(self.ranks), b_To.split(self.ranks), strict=True):
            if pair:
                a_ri[: len(pair[0])], b_ro[: len(pair[0])] = pair[0], pair[1].T
        return a_Ti, b_To
