"""LoRA adapters on one shared base model (Hu et al., 2021).

An `Adapter` holds trainable weights: for each target linear layer a pair `A [rank, in]`, `B [out, rank]`, float32,
which adds `(alpha / rank) * B A x`. A `Snapshot` is a frozen copy used by samplers, so that sampling is not affected by
further training. lora_routes.py applies both in a forward pass.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from palestra.core.accel.malloc import check_fits_memory
from palestra.engine.forward.decoder import decoder_of
from palestra.engine.forward.linear import linear
from palestra.engine.lora.config import LoraConfig, names_of_targets
from palestra.engine.lora.variants import Extras, dora_gain, new_extras

_ids = itertools.count(1)
Weights = dict[str, tuple[Tensor, Tensor]]
RowOrder = tuple[bool, int, str, int]


def find_linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Returns the linear layers of the model's decoder and its head, by name in model order: nn.Linear, GPT-2's Conv1D,
    and subclasses, such as quantised ones, that return one tensor. Routers of experts, which return several, are left
    out."""
    decoder = decoder_of(model)
    head = model.get_output_embeddings()
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
            output = own_output(layer, torch.zeros(1, 2, size, dtype=dtype, device=weight.device))
    except Exception:  # any code of any architecture
        return False
    return isinstance(output, Tensor) and output.shape == (1, 2, out)


def layer_shape(layer: nn.Module) -> tuple[int, int]:
    """Returns the numbers of outputs and inputs of a linear layer. A quantised weight may have another shape."""
    if isinstance(layer, nn.Linear):
        return layer.out_features, layer.in_features
    assert isinstance(layer, Conv1D)
    return layer.nf, layer.nx


def own_output(layer: Any, x: Tensor) -> Tensor:
    """Returns the layer's own output, without adapters."""
    if type(layer) is nn.Linear:
        return linear(x, layer.weight, layer.bias, layer.__dict__.get("packed_weight"))
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
        self, linears: Mapping[str, nn.Module], config: LoraConfig, *, seed: int, model: PreTrainedModel | None = None
    ) -> None:
        self.config = config
        self.seed = seed
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
            self.weights[name] = (a.to(device).requires_grad_(), b.to(device).requires_grad_())
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
        return [*chain.from_iterable(self.weights.values()), *self.extras.parameters()]

    def shapes(self) -> list[tuple[str, float, list[tuple[int, ...]]]]:
        """Returns name, scale and shapes of all weights: equal for adapters that can have each other's weights."""
        extras = self.extras
        pairs = (self.weights | extras.experts).items()
        others = (*extras.magnitudes.items(), *extras.modules.items())
        shapes = [(name, self.scale_of(name), [tuple(a.shape), tuple(b.shape)]) for name, (a, b) in pairs]
        return shapes + [(name, 1.0, [tuple(weight.shape)]) for name, weight in others]

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
        return Snapshot(weights, name, self.extras.fold_scale(dtype, self.scale_of))


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
    adapted = set(chain.from_iterable(adapter.weights for adapter in adapters))
    names = [name for name in linears if name in adapted]
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
    """An immutable copy of an adapter's weights, with the scale folded into B. `rank` is the largest of its layers;
    `mergeable` is false if it also has `extras`: then its weights alone are not the adapter.

    `id` identifies the snapshot in caches; `name` determines the order of the rows of a batch, so that a resumed run
    builds the same batches as an uninterrupted one.
    """

    def __init__(self, weights: Weights, name: str = "", extras: Extras | None = None) -> None:
        self.id = next(_ids)
        self.name = name
        self.weights = {k: (a.detach().clone(), b.detach().clone()) for k, (a, b) in weights.items()}
        self.extras = extras or Extras()
        pairs = [*self.weights.values(), *self.extras.experts.values()]
        self.rank = max((a.shape[-2] for a, _ in pairs), default=1)
        self._gains: dict[str, Tensor] = {}

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


def row_order(adapter: Snapshot | None) -> RowOrder:
    """Returns the sort key of rows by their adapter's rank, name and id, the bare base last: the order of the rows of a
    `MultiAdapterRoute`, in which adapters of one rank share batched products."""
    if adapter is None:
        return True, 0, "", 0
    return False, adapter.rank, adapter.name, adapter.id


def is_in_layer(name: str) -> bool:
    """True for a module of a decoder layer, whose name has the layer's number; false for the output head."""
    return any(part.isdigit() for part in name.split("."))


def target_names(linears: Iterable[str], targets: str | list[str]) -> list[str]:
    """Returns the names of the linear layers selected by `targets`, in model order. Raises ValueError if a
    target matches none."""
    names = list(linears)
    if targets == "all-linear":
        return [name for name in names if is_in_layer(name)]
    wanted = [targets] if isinstance(targets, str) else targets
    for target in wanted:
        if not names_of_targets(names, [target]):
            kinds = sorted({name.rsplit(".", 1)[-1] for name in names})
            raise ValueError(f"LoRA target {target!r} matches no linear layer. Use all-linear or some of {kinds}.")
    return names_of_targets(names, wanted)
