"""Linear layers of a recorded decoding step: adapters at a fixed place, and layers of the same input as one product.

The steps of decode_graphs.py read the low-rank matrices of all adapters from tensors in which they lie side by side.
Frozen layers that read the same tensor, such as those of queries, keys and values, are found by watching a plain step;
their weights become views of one matrix, so that they and their adapters take three products instead of three each.

Shapes: `R` rows, `T` columns: the sum of the adapters' ranks, padded; `i` and `o` inputs and outputs of a layer.
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
from palestra.engine.lora.routes import AdapterStack

MAX_JOINED_COLUMNS = 256  # of all layers together: most of their joined matrix B is 0
NO_ADAPTER = -1


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
    """The low-rank matrices of several adapters side by side, at a fixed place: `A [i, T]` and `B [T, o]` of each
    layer. Columns that no adapter uses are 0. `stack` None: no adapters.

    Joined layers that all have adapters have one A, with the columns of each, and one B, which is 0 outside the rows of
    a layer's own columns and its outputs.
    """

    def __init__(self, stack: AdapterStack | None, columns: int, joined: Mapping[str, JoinedLayers]) -> None:
        self.joined = joined
        self.pairs: dict[str, tuple[Tensor, Tensor]] = {}
        self.joined_pairs: dict[JoinedLayers, tuple[Tensor, Tensor]] = {}
        self._loaded: AdapterStack | None = None
        if stack is None:
            return
        for layers in dict.fromkeys(joined.values()):
            if len(layers.names) * columns <= MAX_JOINED_COLUMNS and stack.adapted_layers.issuperset(layers.names):
                self._add_joined(layers, columns)
        for name in stack.adapted_layers - self.pairs.keys():
            pair = stack.stacked_pair(name)
            assert pair is not None
            a_nir, b_nro = pair
            self.pairs[name] = a_nir.new_zeros(a_nir.shape[1], columns), b_nro.new_zeros(columns, b_nro.shape[2])
        self._owner_T = torch.full((columns,), NO_ADAPTER - 1, device=stack.device)

    def _add_joined(self, layers: JoinedLayers, columns: int) -> None:
        (outputs, inputs), number = layers.weight.shape, len(layers.names)
        a_iT = layers.weight.new_zeros(inputs, number * columns)
        b_To = layers.weight.new_zeros(number * columns, outputs)
        self.joined_pairs[layers] = a_iT, b_To
        pairs = zip(a_iT.split(columns, 1), b_To.split(columns), strict=True)
        for at, (name, (a, b)) in enumerate(zip(layers.names, pairs, strict=True)):
            self.pairs[name] = a, b.split(layers.sizes, 1)[at]

    def load(self, stack: AdapterStack) -> None:
        """Copies the adapters of `stack` here, each to as many columns as the largest rank."""
        if stack is self._loaded:
            return
        n = len(stack.snapshots)
        used = stack.num_columns
        torch._foreach_zero_(list(chain.from_iterable(self.pairs.values())))
        targets = []
        sources = []
        for name, (a_iT, b_To) in self.pairs.items():
            stacked = stack.stacked_pair(name)
            assert stacked is not None
            rank = stacked[0].shape[2]
            targets += [a_iT[:, :used].unflatten(1, (n, -1))[..., :rank], b_To[:used].unflatten(0, (n, -1))[:, :rank]]
            sources += [stacked[0].transpose(0, 1), stacked[1]]
        torch._foreach_copy_(targets, sources)
        self._owner_T.fill_(NO_ADAPTER - 1)
        self._owner_T[:used] = torch.arange(n, device=self._owner_T.device).repeat_interleave(used // n)
        self._loaded = stack

    def route(self, adapter_R: Tensor | None) -> ColumnRoute:
        """Returns the route of rows that use the adapters of these numbers (None: all use the only one)."""
        return ColumnRoute(self, None if adapter_R is None else adapter_R[:, None] == self._owner_T)


class ColumnRoute:
    """The route of a recorded step: each row uses the columns `own_RT` (None: all)."""

    def __init__(self, columns: AdapterColumns, own_RT: Tensor | None) -> None:
        self.columns = columns
        self.own_RT = own_RT
        # inputs and outputs of layers that were computed with others
        self._ahead: dict[str, tuple[Tensor, Tensor]] = {}
        self._own: dict[int, Tensor] = {}  # by number of layers

    def linear(self, name: str, x: Tensor, layer: nn.Module) -> Tensor:
        if (layers := self.columns.joined.get(name)) is None:
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
        if (pair := self.columns.joined_pairs.get(layers)) is not None:
            self._add_product(x, y, pair, len(layers.names))
        outputs = y.split(layers.sizes, -1)
        if pair is None:
            for name, output in zip(layers.names, outputs, strict=True):
                self._add_adapter(name, x, output)
        return outputs

    def _add_adapter(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """Adds the output of a layer's adapters to `y`; returns it."""
        if (pair := self.columns.pairs.get(name)) is not None:
            self._add_product(x, y, pair, 1)
        return y

    def _add_product(self, x: Tensor, y: Tensor, pair: tuple[Tensor, Tensor], layers: int) -> None:
        inner_RT = x.flatten(0, -2) @ pair[0]
        if self.own_RT is not None:
            if layers not in self._own:
                self._own[layers] = self.own_RT.repeat(1, layers)
            inner_RT = inner_RT * self._own[layers]
        y.flatten(0, -2).addmm_(inner_RT, pair[1])

    def narrow(self, keep_M: Tensor) -> ColumnRoute:
        return ColumnRoute(self.columns, None if self.own_RT is None else self.own_RT[keep_M])

    def blocks(self, rows: int) -> list[tuple[None, int]]:
        return [(None, rows)]  # adapters of other kinds are not recorded
