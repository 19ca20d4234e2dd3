"""Low-rank adapters on one resident base (Hu et al., 2021): independent in training, stacked in sampling.

An `Adapter` is what a learner trains: for each target linear layer a pair `A [rank, in]`, `B [out, rank]`, adding
`(alpha / rank) * B A x`. A `Snapshot` is a frozen copy that samplers read: agent A's sampler does not move while A
trains on. Rows of several snapshots, and of the bare base, share one forward pass through a `Stacked` route.

Shapes: `R` rows of the flat row, `n` adapters, `r` the largest rank among them.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from palestra.config import Strict
from palestra.engine.memory import must_fit

_ids = itertools.count(1)
Weights = dict[str, tuple[Tensor, Tensor]]
MERGE = 2**18  # weights of a layer up to which a copy of it for one snapshot is worth its memory


class LoraConfig(Strict):
    """Rank and scale of an adapter, and the linear layers it sits on: "all-linear" (those of the decoder's layers; not
    the head) or suffixes such as "q_proj" and "lm_head"."""

    rank: int = Field(8, ge=1)
    alpha: float = Field(16.0, gt=0)
    targets: str | list[str] = "all-linear"


class Adapter:
    """Trainable low-rank weights for some linear layers of a base. B starts at zero, so it starts as the base."""

    def __init__(self, linears: dict[str, nn.Linear], config: LoraConfig, *, seed: int) -> None:
        self.config = config
        generator = torch.Generator().manual_seed(seed)
        self.weights: Weights = {}
        names = target_names(linears, config.targets)
        trained = config.rank * sum(sum(linears[name].weight.shape) for name in names)
        must_fit(16 * trained, f"an adapter of rank {config.rank}, with gradients and Adam's moments,", "lower rank")
        for name in names:
            base = linears[name].weight
            bound = 1 / math.sqrt(base.shape[1])  # kaiming_uniform with a = sqrt(5), as PEFT starts A
            a = torch.empty(config.rank, base.shape[1]).uniform_(-bound, bound, generator=generator)
            b = torch.zeros(base.shape[0], config.rank)
            self.weights[name] = (_leaf(a, base.device), _leaf(b, base.device))

    @property
    def scale(self) -> float:
        return self.config.alpha / self.config.rank

    def parameters(self) -> list[Tensor]:
        return [w for pair in self.weights.values() for w in pair]

    def apart(self) -> Adapter:
        """The same weights, in the same memory, with gradients of their own."""
        twin = copy.copy(self)
        twin.weights = {
            k: (a.detach().requires_grad_(), b.detach().requires_grad_()) for k, (a, b) in self.weights.items()
        }
        return twin

    def take(self, other: Adapter) -> None:
        """Takes over the weights of `other`. Raises ValueError where it has another rank, scale or other targets."""
        if (list(self.weights), self.config.rank, self.scale) != (list(other.weights), other.config.rank, other.scale):
            raise ValueError("that adapter has another rank, scale or other targets than this one")
        with torch.no_grad():
            for ours, theirs in zip(self.parameters(), other.parameters(), strict=True):
                ours.copy_(theirs)

    def snapshot(self, name: str = "", dtype: torch.dtype = torch.float32) -> Snapshot:
        return Snapshot({k: (a.to(dtype), b.to(dtype)) for k, (a, b) in self.weights.items()}, self.scale, name)


def weighted_sum(adapters: Sequence[Adapter], coefficients: Sequence[float], linears: dict[str, nn.Linear]) -> Adapter:
    """The adapter that adds to each layer the weighted sum of what `adapters` add. Its rank is the sum of theirs: low
    ranks side by side make the sum exact, where a sum of their factors would not."""
    names = [name for name in linears if any(name in adapter.weights for adapter in adapters)]
    rank = sum(adapter.config.rank for adapter in adapters)
    total = Adapter(linears, LoraConfig(rank=rank, alpha=rank, targets=names), seed=0)
    with torch.no_grad():
        for name, (a, b) in total.weights.items():
            a.zero_()
            first = 0
            for adapter, coefficient in zip(adapters, coefficients, strict=True):
                rows = slice(first, first + adapter.config.rank)
                if name in adapter.weights:
                    a[rows], b[:, rows] = (
                        adapter.weights[name][0],
                        adapter.weights[name][1] * (coefficient * adapter.scale),
                    )
                first = rows.stop
    return total


class Snapshot:
    """An immutable copy of an adapter's weights, the scale folded into B.

    `id` tells snapshots apart for the caches; `name` orders the rows of a batch, so that a resumed run lays its batches
    out as the uninterrupted one does.
    """

    def __init__(self, weights: Weights, scale: float, name: str = "") -> None:
        self.id, self.name = next(_ids), name
        self.weights = {k: (a.detach().clone(), b.detach() * scale) for k, (a, b) in weights.items()}

    @property
    def rank(self) -> int:
        return max(a.shape[0] for a, _ in self.weights.values())


class Single:
    """The route of a training pass: every row uses one adapter, and gradients flow into it."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter

    def linear(self, name: str, x: Tensor, layer: nn.Linear) -> Tensor:
        pair = self.adapter.weights.get(name)
        if pair is None:
            return F.linear(x, layer.weight, layer.bias)
        if layer.weight.dtype == torch.float32 and not torch.is_autocast_enabled(x.device.type):
            return MergedLinear.apply(x, layer.weight, layer.bias, *pair, self.adapter.scale)
        # in half precision a merged weight would round the adapter away
        a, b = (w.to(x.dtype) for w in pair)
        return F.linear(x, layer.weight, layer.bias) + self.adapter.scale * F.linear(F.linear(x, a), b)

    def narrow(self, keep_M: Tensor) -> Single:
        return self


class MergedLinear(torch.autograd.Function):
    """`x (W + scale * B A)' + bias` with a frozen `W`: one product of full size forward and one backward.

    Adding `B A` to `W` costs rank / rows of the product itself, and spares the low-rank products their passes over the
    activations. It is done again in the backward pass, so that no merged weight outlives its layer's turn.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        ctx.scale = scale
        return F.linear(x, torch.addmm(weight, b, a, alpha=scale), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b = ctx.saved_tensors
        rows, grad_rows = x.flatten(0, -2), grad.flatten(0, -2)
        # written so that the long side comes last: a product with few columns runs at a third of the speed
        grad_a = (b.T @ grad_rows.T) @ rows
        grad_b = ((a @ rows.T) @ grad_rows).T
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ torch.addmm(weight, b, a, alpha=ctx.scale)
        return grad_x, None, None, grad_a.mul_(ctx.scale), grad_b.mul(ctx.scale), None


def kept(counts: Sequence[int], keep_M: Tensor) -> list[int]:
    """How many of the rows `keep_M`, which rise, lie in each of consecutive blocks of `counts` rows."""
    ends: list[int] = np.diff(np.searchsorted(keep_M.cpu().numpy(), np.cumsum(counts)), prepend=0).tolist()
    return ends


class Stacked:
    """The route of a sampling pass: rows `[start, stop)` use snapshot i, rows beyond the last use the bare base.

    One snapshot for all rows is merged into small layers, and two plain products beside large ones. Several are two
    batched products over equal blocks of rows (padded where the blocks differ), so that 16 adapters cost as many kernel
    calls as one.
    """

    def __init__(self, stack: Stack, counts: Sequence[int]) -> None:
        self.stack, self.counts = stack, list(counts)
        self.rows, self.width = sum(counts), max(counts, default=0)
        even = all(c == self.width for c in counts)
        self._padding = None if even else self._pad()

    def _pad(self) -> tuple[Tensor, Tensor]:
        """Row of each padded place, and padded place of each row."""
        device, rows, places, start = self.stack.device, [], [], 0
        for i, count in enumerate(self.counts):
            rows += [start + min(j, count - 1) for j in range(self.width)]
            places += [i * self.width + j for j in range(count)]
            start += count
        return torch.tensor(rows, device=device), torch.tensor(places, device=device)

    def narrow(self, keep_M: Tensor) -> Stacked:
        return Stacked(self.stack, kept(self.counts, keep_M))

    def linear(self, name: str, x: Tensor, layer: nn.Linear) -> Tensor:
        if len(self.counts) == 1 and self.rows == x.shape[-2] and (merged := self.stack.merged(name)) is not None:
            return F.linear(x, merged, layer.bias)
        y = F.linear(x, layer.weight, layer.bias)
        pair = self.stack.pair(name)
        if pair is None:
            return y
        a_nir, b_nro = pair
        rows, out = x.flatten(0, -2)[: self.rows], y.flatten(0, -2)[: self.rows]
        if len(self.counts) == 1:
            out.addmm_(rows @ a_nir[0], b_nro[0])
            return y
        blocks = rows if self._padding is None else rows.index_select(0, self._padding[0])
        inner = torch.bmm(blocks.view(len(self.counts), self.width, -1), a_nir)
        if self._padding is None:
            out.view(len(self.counts), self.width, -1).baddbmm_(inner, b_nro)
        else:
            out += torch.bmm(inner, b_nro).flatten(0, 1).index_select(0, self._padding[1])
        return y


class Stack:
    """Several snapshots side by side: per linear layer `A [n, in, r]` and `B [n, r, out]`, zero where one has no
    weights or a smaller rank."""

    def __init__(self, snapshots: Sequence[Snapshot], linears: dict[str, nn.Linear]) -> None:
        self.snapshots, self.linears = list(snapshots), linears
        self.device = next(iter(linears.values())).weight.device
        self._pairs: dict[str, tuple[Tensor, Tensor] | None] = {}
        self._merged: dict[str, Tensor | None] = {}

    def merged(self, name: str) -> Tensor | None:
        """The layer's weight with the only snapshot added; None for layers that are large or in half precision."""
        if name not in self._merged:
            weight, pair = self.linears[name].weight, self.snapshots[0].weights.get(name)
            fits = pair is not None and weight.dtype == torch.float32 and weight.numel() <= MERGE
            self._merged[name] = torch.addmm(weight, pair[1], pair[0]) if pair is not None and fits else None
        return self._merged[name]

    def pair(self, name: str) -> tuple[Tensor, Tensor] | None:
        if name not in self._pairs:
            self._pairs[name] = self._build(name)
        return self._pairs[name]

    def _build(self, name: str) -> tuple[Tensor, Tensor] | None:
        pairs = [s.weights.get(name) for s in self.snapshots]
        ranks = [p[0].shape[0] for p in pairs if p]
        if not ranks:
            return None
        base = self.linears[name].weight
        a = base.new_zeros(len(pairs), base.shape[1], max(ranks))
        b = base.new_zeros(len(pairs), max(ranks), base.shape[0])
        for i, pair in enumerate(pairs):
            if pair:
                a[i, :, : pair[0].shape[0]], b[i, : pair[0].shape[0]] = pair[0].T, pair[1].T
        return a, b


def target_names(linears: Iterable[str], targets: str | list[str]) -> list[str]:
    """The linear layers that `targets` means, in model order. Raises ValueError for a target that matches none."""
    names = list(linears)
    if targets == "all-linear":
        return [name for name in names if any(part.isdigit() for part in name.split("."))]
    wanted = [targets] if isinstance(targets, str) else targets
    for target in wanted:
        if not any(_matches(name, target) for name in names):
            kinds = sorted({name.rsplit(".", 1)[-1] for name in names})
            raise ValueError(f"LoRA target {target!r} matches no linear layer. Use all-linear or some of {kinds}.")
    return [name for name in names if any(_matches(name, target) for target in wanted)]


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith("." + target)


def _leaf(weight: Tensor, device: torch.device) -> Tensor:
    return weight.to(device).requires_grad_()
