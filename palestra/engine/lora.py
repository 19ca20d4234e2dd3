"""LoRA adapters on one shared base model (Hu et al., 2021): trained independently, batched together in sampling.

An `Adapter` holds trainable weights: for each target linear layer a pair `A [rank, in]`, `B [out, rank]`, float32,
which adds `(alpha / rank) * B A x`. A `Snapshot` is a frozen copy used by samplers, so that sampling is not affected by
further training. Rows of several snapshots, and of the bare base, share one forward pass through a `MultiAdapterRoute`
route.

Shapes: `R` rows of the flat row, `n` adapters, `r` the largest rank among them.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from palestra.engine.decoder import decoder_of
from palestra.engine.linear import linear, matmul
from palestra.engine.lora_config import LoraConfig as LoraConfig
from palestra.engine.lora_variants import Dropout, Extras, dora_gain, linear_by_blocks, new_extras, variant_output
from palestra.engine.malloc import check_fits_memory

_ids = itertools.count(1)
Weights = dict[str, tuple[Tensor, Tensor]]
MAX_MERGED_WEIGHTS = 2**18  # layers with at most this many weights are merged: a copy costs little memory


def find_linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Returns the linear layers of the model's decoder and its head, by name in model order: nn.Linear, GPT-2's Conv1D,
    and subclasses, such as quantised ones, that return one tensor. Not the routers of experts that return several."""
    decoder, head = decoder_of(model), model.get_output_embeddings()
    inside = {id(module) for module in decoder.modules()} | {id(head)}
    return {
        name: module
        for name, module in model.named_modules()
        if id(module) in inside and isinstance(module, nn.Linear | Conv1D) and _returns_one_tensor(module)
    }


def _returns_one_tensor(layer: nn.Module) -> bool:
    if type(layer) in (nn.Linear, Conv1D):
        return True
    out, size = layer_shape(layer)
    weight: Any = layer.weight
    dtype = weight.dtype if weight.is_floating_point() and weight.element_size() > 1 else torch.bfloat16
    try:
        with torch.no_grad():
            found = own_output(layer, torch.zeros(1, 2, size, dtype=dtype, device=weight.device))
    except Exception:  # any code of any architecture
        return False
    return isinstance(found, Tensor) and found.shape == (1, 2, out)


def layer_shape(layer: nn.Module) -> tuple[int, int]:
    """Returns the numbers of outputs and inputs of a linear layer. A quantised weight may have another shape."""
    if isinstance(layer, nn.Linear):
        return layer.out_features, layer.in_features
    assert isinstance(layer, Conv1D)
    return layer.nf, layer.nx


def own_output(layer: Any, x: Tensor) -> Tensor:
    """Returns the layer's own output, without adapters."""
    if type(layer) is nn.Linear:
        return linear(x, layer.weight, layer.bias)
    output: Tensor = type(layer).forward(layer, x)
    return output


def add_to_weight(layer: Any, delta: Tensor) -> None:
    """Adds `delta` [out, in] to a layer's weight in place. Raises ValueError for layers with a forward of their own,
    such as quantised ones."""
    if type(layer) not in (nn.Linear, Conv1D):
        raise ValueError(
            f"an adapter cannot be added to the weights of a {type(layer).__name__}: keep it as an adapter, or load "
            "the base in bfloat16 or float32"
        )
    layer.weight += delta if type(layer) is nn.Linear else delta.T


class Adapter:
    """Trainable low-rank weights, float32, for some linear layers of a base, and `extras` of other kinds of adapters
    (lora_variants.py). B is initialised to zero, so the adapter initially equals the base. `model` is needed for
    experts and for modules trained in full.

    Raises ValueError if a target matches no layer or the adapter does not fit into memory.
    """

    def __init__(
        self,
        linears: Mapping[str, nn.Module],
        config: LoraConfig,
        *,
        seed: int,
        model: PreTrainedModel | None = None,
    ) -> None:
        self.config, self.seed = config, seed
        generator = torch.Generator().manual_seed(seed)
        self.weights: Weights = {}
        names = target_names(linears, config.target_modules)
        trained = sum(config.rank_of(name) * sum(layer_shape(linears[name])) for name in names)
        check_fits_memory(
            16 * trained, f"an adapter of rank {config.rank}, with gradients and Adam's moments,", "lower rank"
        )
        for name in names:
            outputs, inputs = layer_shape(linears[name])
            device = next(linears[name].parameters()).device
            bound = 1 / math.sqrt(inputs)  # kaiming_uniform with a = sqrt(5), as PEFT initialises A
            a = torch.empty(config.rank_of(name), inputs).uniform_(-bound, bound, generator=generator)
            b = torch.zeros(outputs, config.rank_of(name))
            self.weights[name] = (_leaf(a, device), _leaf(b, device))
        self.extras = new_extras(config, linears, names, model, seed)
        config.check_patterns([*self.weights, *self.extras.experts])

    @property
    def mergeable(self) -> bool:
        """True if it has only pairs A and B on linear layers, so that their products can be added to the weights."""
        return not self.extras

    def scale_of(self, name: str) -> float:
        """Returns the factor of the adapter's output at the layer `name`."""
        return self.config.scale_of(name)

    def gain(self, name: str, layer: Any) -> Tensor:
        """Returns DoRA's factor [out] float32 of the output of the layer `name`."""
        return dora_gain(self.extras.magnitudes[name], layer, *self.weights[name], self.scale_of(name))

    def parameters(self) -> list[Tensor]:
        """Returns all tensors A and B, in layer order, then those of other kinds."""
        return [w for pair in self.weights.values() for w in pair] + self.extras.parameters()

    def shapes(self) -> list[tuple[str, float, list[tuple[int, ...]]]]:
        """Returns name, scale and shapes of all weights: equal for adapters that can have each other's weights."""
        extras = self.extras
        pairs = [(n, self.scale_of(n), [tuple(w.shape) for w in p]) for n, p in (self.weights | extras.experts).items()]
        return pairs + [(n, 1.0, [tuple(w.shape)]) for n, w in (*extras.magnitudes.items(), *extras.modules.items())]

    def with_separate_grads(self) -> Adapter:
        """Returns an adapter that shares the memory of these weights and has separate gradients."""
        twin = copy.copy(self)
        twin.weights = {
            k: (a.detach().requires_grad_(), b.detach().requires_grad_()) for k, (a, b) in self.weights.items()
        }
        twin.extras = self.extras.map(lambda w: w.detach().requires_grad_())
        return twin

    def copy_from(self, other: Adapter) -> None:
        """Copies the weights of `other`. Raises ValueError if it has another rank, scale or other targets."""
        if self.shapes() != other.shapes():
            raise ValueError("that adapter has another rank, scale or other targets than this one")
        with torch.no_grad():
            for ours, theirs in zip(self.parameters(), other.parameters(), strict=True):
                ours.copy_(theirs)

    def snapshot(self, name: str = "", dtype: torch.dtype = torch.float32) -> Snapshot:
        """Returns a frozen copy of the weights in `dtype`."""
        weights = {k: (a.to(dtype), b.to(dtype) * self.scale_of(k)) for k, (a, b) in self.weights.items()}
        return Snapshot(weights, name, self.extras.folded(dtype, self.scale_of))


def weighted_sum(
    adapters: Sequence[Adapter], coefficients: Sequence[float], linears: Mapping[str, nn.Module]
) -> Adapter:
    """Returns the adapter whose output at each layer is the weighted sum of the outputs of `adapters`. Its rank is the
    sum of their ranks: concatenating the factors makes the sum exact, adding the factors would not."""
    if not all(adapter.mergeable for adapter in adapters):
        raise ValueError(
            "adapters with DoRA, adapted experts or modules trained in full have no weighted sum: mix adapters "
            "without these"
        )
    names = [name for name in linears if any(name in adapter.weights for adapter in adapters)]
    rank = max(sum(adapter.config.rank_of(name) for adapter in adapters) for name in names)
    total = Adapter(linears, LoraConfig(rank=rank, alpha=rank, target_modules=names), seed=0)
    with torch.no_grad():
        for name, (a, b) in total.weights.items():
            a.zero_()
            first = 0
            for adapter, coefficient in zip(adapters, coefficients, strict=True):
                if name in adapter.weights:
                    own_a, own_b = adapter.weights[name]
                    rows = slice(first, first + len(own_a))
                    a[rows], b[:, rows] = own_a, own_b * (coefficient * adapter.scale_of(name))
                first += adapter.config.rank_of(name)
    return total


class Snapshot:
    """An immutable copy of an adapter's weights, with the scale folded into B. `mergeable` is false if it also has
    `extras`: then its weights alone are not the adapter.

    `id` identifies the snapshot in caches; `name` determines the order of the rows of a batch, so that a resumed run
    builds the same batches as an uninterrupted one.
    """

    def __init__(self, weights: Weights, name: str = "", extras: Extras | None = None) -> None:
        self.id, self.name = next(_ids), name
        self.weights = {k: (a.detach().clone(), b.detach().clone()) for k, (a, b) in weights.items()}
        self.extras = extras or Extras()
        self._gains: dict[str, Tensor] = {}

    @property
    def rank(self) -> int:
        """Largest rank of the weights."""
        return max((a.shape[-2] for a, _ in [*self.weights.values(), *self.extras.experts.values()]), default=1)

    @property
    def mergeable(self) -> bool:
        """True if it has only pairs A and B on linear layers, so that their products can be added to the weights."""
        return not self.extras

    def scale_of(self, name: str) -> float:
        """Returns 1: the scale is folded into B."""
        return 1.0

    def gain(self, name: str, layer: Any) -> Tensor:
        """Returns DoRA's factor [out] float32 of the output of the layer `name`, computed once."""
        if name not in self._gains:
            self._gains[name] = dora_gain(self.extras.magnitudes[name], layer, *self.weights[name], 1.0)
        return self._gains[name]


class SingleAdapterRoute:
    """The route of a single-adapter training pass: every row uses the adapter, and gradients flow into it. `dropout`
    is that of the pass (None: none)."""

    def __init__(self, adapter: Adapter, dropout: Dropout | None = None) -> None:
        self.adapter, self.dropout = adapter, dropout

    @property
    def owner(self) -> Adapter:
        """The adapter of the rows."""
        return self.adapter

    def linear(self, name: str, x: Tensor, layer: Any) -> Tensor:
        if self.dropout is not None or not self.adapter.mergeable:
            return variant_output(self.adapter, own_output, name, x, layer, self.dropout)
        pair = self.adapter.weights.get(name)
        if pair is None:
            return own_output(layer, x)
        mergeable = type(layer) is nn.Linear and layer.weight.dtype == torch.float32
        if mergeable and not torch.is_autocast_enabled(x.device.type):
            return MergedLinear.apply(x, layer.weight, layer.bias, *pair, self.adapter.scale_of(name))
        # a merged weight in half precision would lose the adapter to rounding
        a, b = (w.to(x.dtype) for w in pair)
        return own_output(layer, x) + self.adapter.scale_of(name) * F.linear(F.linear(x, a), b)

    def narrow(self, keep_M: Tensor) -> SingleAdapterRoute:
        return self

    def blocks(self, rows: int) -> list[tuple[SingleAdapterRoute, int]]:
        return [(self, rows)]


class SnapshotRoute:
    """The route of a sampling pass in which every row uses one snapshot, on the plain path."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot

    @property
    def owner(self) -> Snapshot:
        """The snapshot of the rows."""
        return self.snapshot

    def linear(self, name: str, x: Tensor, layer: Any) -> Tensor:
        if not self.snapshot.mergeable:
            return variant_output(self.snapshot, own_output, name, x, layer)
        pair = self.snapshot.weights.get(name)
        if pair is None:
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
        rows, grad_rows = x.flatten(0, -2), grad.flatten(0, -2)
        # transposed so that the long side is last: products with few columns run at a third of the speed
        grad_a = (b.T @ grad_rows.T) @ rows
        grad_b = ((a @ rows.T) @ grad_rows).T
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = matmul(grad, torch.addmm(weight, b, a, alpha=ctx.scale))
        return grad_x, None, None, grad_a.mul_(ctx.scale), grad_b.mul(ctx.scale), None


def count_kept_rows(counts: Sequence[int], keep_M: Tensor) -> list[int]:
    """Returns how many of the rows `keep_M` (rising indices) lie in each of consecutive blocks of `counts` rows."""
    ends: list[int] = np.diff(np.searchsorted(keep_M.cpu().numpy(), np.cumsum(counts)), prepend=0).tolist()
    return ends


class MultiAdapterRoute:
    """The route of a sampling pass: block i of `counts[i]` rows uses snapshot i, the rows after the last block use the
    bare base.

    One snapshot for all rows is merged into small layers, and applied with two plain products at large ones. Several
    snapshots are applied with two batched products over blocks of equal size (padded if they differ), so that 16
    adapters need as many kernel calls as one.
    """

    def __init__(self, stack: AdapterStack, counts: Sequence[int]) -> None:
        self.stack, self.counts = stack, list(counts)
        self.rows, self.width = sum(counts), max(counts, default=0)
        even = all(c == self.width for c in counts)
        self._padding = None if even else self._pad()

    def _pad(self) -> tuple[Tensor, Tensor]:
        """Returns the row of each padded index, and the padded index of each row."""
        device, rows, places, start = self.stack.device, [], [], 0
        for i, count in enumerate(self.counts):
            rows += [start + min(j, count - 1) for j in range(self.width)]
            places += [i * self.width + j for j in range(count)]
            start += count
        return torch.tensor(rows, device=device), torch.tensor(places, device=device)

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
        pair = self.stack.stacked_pair(name)
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


class AdapterStack:
    """Several snapshots, stacked: for each linear layer `A [n, in, r]` and `B [n, r, out]` in the base's dtype,
    zero-padded for snapshots without weights or with a smaller rank."""

    def __init__(self, snapshots: Sequence[Snapshot], linears: Mapping[str, nn.Module]) -> None:
        self.snapshots, self.linears = list(snapshots), linears
        self.mergeable = all(snapshot.mergeable for snapshot in snapshots)  # else no merged or stacked weights are used
        self.device = next(next(iter(linears.values())).parameters()).device
        self._pairs: dict[str, tuple[Tensor, Tensor] | None] = {}
        self._merged: dict[str, Tensor | None] = {}

    def merged_weight(self, name: str) -> Tensor | None:
        """Returns the layer's weight with the only snapshot added; None for layers that are large or not in float32."""
        if name not in self._merged:
            layer: Any = self.linears[name]
            weight, pair = layer.weight, self.snapshots[0].weights.get(name)
            small = weight.dtype == torch.float32 and weight.numel() <= MAX_MERGED_WEIGHTS
            fits = pair is not None and small and type(layer) is nn.Linear
            self._merged[name] = torch.addmm(weight, pair[1], pair[0]) if pair is not None and fits else None
        return self._merged[name]

    def stacked_pair(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Returns the stacked A and B of a layer; None if no snapshot adapts it."""
        if name not in self._pairs:
            self._pairs[name] = self._build(name)
        return self._pairs[name]

    def _build(self, name: str) -> tuple[Tensor, Tensor] | None:
        pairs = [s.weights.get(name) for s in self.snapshots]
        ranks = [p[0].shape[0] for p in pairs if p]
        if not ranks:
            return None
        layer: Any = self.linears[name]
        outputs, inputs = layer_shape(layer)
        # a quantised weight's dtype is not that of its outputs
        like = layer.weight if type(layer) in (nn.Linear, Conv1D) else next(p for p in pairs if p)[0]
        a = like.new_zeros(len(pairs), inputs, max(ranks))
        b = like.new_zeros(len(pairs), max(ranks), outputs)
        for i, pair in enumerate(pairs):
            if pair:
                a[i, :, : pair[0].shape[0]], b[i, : pair[0].shape[0]] = pair[0].T, pair[1].T
        return a, b


def target_names(linears: Iterable[str], targets: str | list[str]) -> list[str]:
    """Returns the names of the linear layers selected by `targets`, in model order. Raises ValueError if a
    target matches none."""
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
