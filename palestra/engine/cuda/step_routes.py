"""Linear layers of a recorded decoding step: adapters at a fixed place, and layers of the same input as one product.

The steps of decode_graphs.py read the low-rank matrices of all adapters from tensors in which they lie one after
another. Frozen layers that read the same tensor, such as those of queries, keys and values, are found by watching a
plain step; their weights become views of one matrix, so that they and their adapters take three products instead of
three each.

Shapes: `R` rows, `T` columns: room for the sum of the adapters' ranks; `i` inputs, `o` outputs of a layer or of all `L`
joined layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from palestra.engine.forward.flat_row import AdapterRoute
from palestra.engine.forward.linear import linear
from palestra.engine.lora.adapters import own_output
from palestra.engine.lora.low_rank import RowColumns, add_products
from palestra.engine.lora.routes import AdapterStack


class Call(NamedTuple):
    """A call of a linear layer in a pass."""

    name: str
    x: Tensor
    layer: nn.Module


class WatchedRoute:
    """A route that records the calls of linear layers in a pass and otherwise does what `route` does (None: no
    adapters)."""

    def __init__(self, route: AdapterRoute | None) -> None:
        self.route = route
        self.calls: list[Call] = []

    def linear(self, name: str, x: Tensor, layer: nn.Module) -> Tensor:
        self.calls.append(Call(name, x, layer))
        if self.route is None:
            return own_output(layer, x)
        return self.route.linear(name, x, layer)

    def narrow(self, keep_M: Tensor) -> WatchedRoute:
        if self.route is None:
            return WatchedRoute(None)
        return WatchedRoute(self.route.narrow(keep_M))

    def blocks(self, rows: int) -> Sequence[tuple[AdapterRoute | None, int]]:
        if self.route is None:
            return [(None, rows)]
        return self.route.blocks(rows)


class JoinedLayers:
    """Frozen linear layers with the same input, joined into one of weight [o, i]; their own weights become views of
    it."""

    def __init__(self, layers: Mapping[str, nn.Linear]) -> None:
        self.names = tuple(layers)
        self.sizes = [layer.out_features for layer in layers.values()]
        self.weight = _as_one([layer.weight for layer in layers.values()])
        biases = [layer.bias for layer in layers.values() if layer.bias is not None]
        self.bias = _as_one(biases) if biases else None


def _as_one(parameters: Sequence[Tensor]) -> Tensor:
    """Returns the parameters concatenated along rows; afterwards they are views of the result."""
    with torch.inference_mode(False), torch.no_grad():  # training reads them too
        ends = [p.data_ptr() + p.nbytes for p in parameters]
        storages = {p.untyped_storage().data_ptr() for p in parameters}
        if len(storages) == 1 and [p.data_ptr() for p in parameters[1:]] == ends[:-1]:
            rows = sum(len(p) for p in parameters)
            return parameters[0].as_strided((rows, *parameters[0].shape[1:]), parameters[0].stride())
        one = torch.cat([p.data for p in parameters])
        for parameter, view in zip(parameters, one.split([len(p) for p in parameters]), strict=True):
            parameter.data = view
    return one


def join_layers(calls: Iterable[Call]) -> dict[str, JoinedLayers]:
    """Joins the layers that were called one after another with the same tensor; returns the joined ones by the name of
    each layer."""
    joined: dict[str, JoinedLayers] = {}
    for _, group in itertools.groupby(calls, key=lambda call: id(call.x)):
        named = [(call.name, call.layer) for call in group]
        layers = dict(named)
        if len(layers) == len(named) > 1 and _fit_together(layers):
            joined |= dict.fromkeys(layers, JoinedLayers(layers))
    return joined


def _fit_together(layers: Mapping[str, nn.Module]) -> TypeGuard[Mapping[str, nn.Linear]]:
    """True for plain frozen linear layers of one dtype, with a bias each or none."""
    kinds = {
        (layer.weight.dtype, layer.bias is None) if type(layer) is nn.Linear and _is_plain(layer) else None
        for layer in layers.values()
    }
    return len(kinds) == 1 and None not in kinds


def _is_plain(layer: nn.Linear) -> bool:
    return all(
        type(p) is nn.Parameter and p.is_contiguous() and not p.requires_grad and not p.is_inference()
        for p in layer.parameters()
    )


class AdapterColumns:
    """The low-rank matrices of several adapters at a fixed place: `A [L, T, i]` and `B [T, o]` of each layer, or of the
    joined layers that all have adapters. `stack` None: no adapters."""

    def __init__(self, stack: AdapterStack | None, columns: int, joined: Mapping[str, JoinedLayers]) -> None:
        self.joined = joined
        self.pairs: dict[str, tuple[Tensor, Tensor]] = {}  # by the name of the layer, the first of joined ones
        self._places: dict[str, tuple[Tensor, Tensor]] = {}  # A [T, i] and B [T, o] of each layer
        self._loaded: AdapterStack | None = None
        if stack is None:
            return
        for name in stack.adapted_layers:
            layers = joined.get(name)
            if layers is None or not stack.adapted_layers.issuperset(layers.names):
                self._add([name], stack, columns)
            elif name == layers.names[0]:
                self._add(layers.names, stack, columns)

    def _add(self, names: Sequence[str], stack: AdapterStack, columns: int) -> None:
        pairs = [pair for name in names if (pair := stack.pair(name)) is not None]
        sizes = [b_To.shape[1] for _, b_To in pairs]
        first_a, first_b = pairs[0]
        a_LTi = first_a.new_zeros(len(names), columns, first_a.shape[1])
        b_To = first_b.new_zeros(columns, sum(sizes))
        self.pairs[names[0]] = a_LTi, b_To
        self._places |= zip(names, zip(a_LTi, b_To.split(sizes, 1), strict=True), strict=True)

    def load(self, stack: AdapterStack) -> None:
        """Copies the adapters of `stack` here."""
        if stack is self._loaded:
            return
        used = sum(stack.ranks)
        pairs = [stack.pair(name) for name in self._places]
        sources = chain.from_iterable(pair for pair in pairs if pair is not None)
        places = [place[:used] for place in chain.from_iterable(self._places.values())]
        torch._foreach_copy_(places, list(sources))
        self._loaded = stack


class ColumnRoute:
    """The route of a recorded step: each row uses its own `columns`."""

    def __init__(self, adapters: AdapterColumns, columns: RowColumns) -> None:
        self.adapters = adapters
        self.columns = columns
        # inputs and outputs of layers that were computed with others
        self._ahead: dict[str, tuple[Tensor, Tensor]] = {}

    def linear(self, name: str, x: Tensor, layer: nn.Module) -> Tensor:
        if (layers := self.adapters.joined.get(name)) is None:
            return self._add_adapter(name, x, own_output(layer, x))
        if name == layers.names[0]:
            outputs = zip(layers.names, self._joined_outputs(layers, x), strict=True)
            self._ahead = {of: (x, output) for of, output in outputs}
        of_x, output = self._ahead.pop(name, (None, x))
        if of_x is x:
            return output
        return self._add_adapter(name, x, own_output(layer, x))

    def _joined_outputs(self, layers: JoinedLayers, x: Tensor) -> Sequence[Tensor]:
        y = linear(x, layers.weight, layers.bias)
        pair = self.adapters.pairs.get(layers.names[0])
        if pair is not None and len(pair[0]) == len(layers.names):
            self._add_products(x, y, pair, layers.sizes)
            return y.split(layers.sizes, -1)
        outputs = y.split(layers.sizes, -1)
        for name, output in zip(layers.names, outputs, strict=True):
            self._add_adapter(name, x, output)
        return outputs

    def _add_adapter(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """Adds the output of a layer's adapters to `y`; returns it."""
        if (pair := self.adapters.pairs.get(name)) is not None:
            self._add_products(x, y, pair, [y.shape[-1]])
        return y

    def _add_products(self, x: Tensor, y: Tensor, pair: tuple[Tensor, Tensor], sizes: Sequence[int]) -> None:
        add_products(x.flatten(0, -2), y.flatten(0, -2), *pair, sizes, self.columns)

    def narrow(self, keep_M: Tensor) -> ColumnRoute:
        first_R, rank_R, width = self.columns
        return ColumnRoute(self.adapters, RowColumns(first_R[keep_M], rank_R[keep_M], width))

    def blocks(self, rows: int) -> list[tuple[None, int]]:
        return [(None, rows)]  # adapters of other kinds are not recorded
