"""Dense layers and multilayer perceptrons of several networks of one shape. Consecutive layers are one autograd node;
large ones are computed by oneDNN, where it is faster than PyTorch.

Shapes: `P` members, `R` rows, `H` units.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from palestra.core.accel.onednn import Product, onednn_product

Activation = Literal["tanh", "relu"]
GAIN = {"tanh": 5 / 3, "relu": math.sqrt(2)}  # of initial weights, by activation function
# oneDNN computes a member's layer of at least this many multiplications (rows x inputs x outputs); in smaller layers
# its fixed cost of 12 us outweighs the gain. A tanh layer counts as having at least 64 inputs, and every layer as
# having at least 16 outputs, since PyTorch takes as long for fewer.
MIN_PRODUCTS = 2**19
TANH_PRODUCTS = 64
SMALLEST_COLUMNS = 16
FUNCTIONS: dict[str, Any] = {"tanh": torch.tanh, "relu": torch.relu}
IN_PLACE: dict[str, Any] = {"tanh": torch.tanh_, "relu": torch.relu_}
# by activation function: its derivative's operation, and the arguments after gradient and output
BACKWARD: dict[str, tuple[Any, tuple[int, ...]]] = {
    "tanh": (torch.ops.aten.tanh_backward, ()),
    "relu": (torch.ops.aten.threshold_backward, (0,)),
}
MIN_WIDTH = 64  # least number of inputs or outputs for oneDNN; in narrower layers results equal PyTorch's to the bit


def dense_layers(x: Tensor, activations: Sequence[Activation | None], *parameters: Tensor) -> Tensor:
    """Returns the output [P, R, out] of consecutive dense layers activation(x W + b) of P members for inputs [P, R,
    in]. `parameters` are each layer's weight [P, in, out] and bias [P, 1, out]."""
    if not torch.is_grad_enabled():
        return _outputs(x, activations, parameters)[-1]
    out: Tensor = DenseLayers.apply(x, activations, *parameters)[-1]
    return out


class DenseLayers(torch.autograd.Function):
    """`dense_layers` as one autograd node; PyTorch would create five nodes with copies for every layer. Returns the
    outputs of all layers. Those of inner layers are for second derivatives; if P is 1 they have no member dimension."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, activations: Sequence[Activation | None], *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        outputs = _outputs(x, activations, parameters)
        ctx.activations = activations
        ctx.save_for_backward(x, *parameters[::2], *outputs)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor | None) -> tuple[Tensor | None, ...]:
        depth = len(outer)
        x, *saved = (_unstack_single(tensor) for tensor in ctx.saved_tensors)
        weights = saved[:depth]
        outputs = saved[depth:]
        inputs = [x, *outputs]
        gradients: list[Tensor | None] = [None] * (2 * depth)
        g: Tensor | None = None
        for i in reversed(range(depth)):
            in_place = g is not None and not torch.is_grad_enabled()
            if (outer_grad := outer[i]) is not None:
                g = _unstack_single(outer_grad) if g is None else g + outer_grad
            if g is None:
                continue
            g = _before_activation(g, outputs[i], ctx.activations[i], in_place)
            if ctx.needs_input_grad[2 + 2 * i]:
                gradients[2 * i] = _stack_single(_weight_gradient(inputs[i], g))
                gradients[2 * i + 1] = _stack_single(g.sum(-2, keepdim=True))
            if i or ctx.needs_input_grad[0]:
                g = _product(g, weights[i].mT)
        if g is None or not ctx.needs_input_grad[0]:
            return None, None, *gradients
        return _stack_single(g), None, *gradients


def _outputs(x: Tensor, activations: Sequence[Activation | None], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Returns the outputs of all layers. If P is 1 the outputs of inner layers have no member
    dimension, since plain matrix products are faster than batched ones."""
    may_fuse = x.device.type == "cpu" and not torch.is_autocast_enabled("cpu") and not torch.compiler.is_exporting()
    product = onednn_product() if may_fuse else None
    x = _unstack_single(x)
    outputs = []
    for weight, bias, activation in zip(parameters[::2], parameters[1::2], activations, strict=True):
        if product is not None and _is_large(x, weight, activation):
            x = _by_onednn(product, x, _unstack_single(weight), _unstack_single(bias), activation)
        else:
            if x.is_cpu:
                x = _product(x, _unstack_single(weight)).add_(_unstack_single(bias))
            elif x.dim() == 3:  # one kernel; on the CPU the sum in place is faster
                x = torch.baddbmm(bias, x, weight)
            else:
                x = torch.addmm(bias.flatten(), x, weight[0])
            if activation is not None:
                IN_PLACE[activation](x)
        outputs.append(x)
    outputs[-1] = _stack_single(x)
    return outputs


def _is_large(x: Tensor, weight: Tensor, activation: Activation | None) -> bool:
    """Returns whether oneDNN computes a layer faster than PyTorch. It does for products with few
    outputs, though not with a single one, and for tanh."""
    _, inputs, outputs = weight.shape
    each = max(inputs, TANH_PRODUCTS) if activation == "tanh" else inputs
    large = x.shape[-2] * each * max(outputs, SMALLEST_COLUMNS) >= MIN_PRODUCTS and max(inputs, outputs) >= MIN_WIDTH
    return large and outputs > 1 and x.dtype == weight.dtype == torch.float32


def _by_onednn(product: Product, x: Tensor, weight: Tensor, bias: Tensor, activation: Activation | None) -> Tensor:
    fused: Literal["none", "tanh"] = "tanh" if activation == "tanh" else "none"
    if x.dim() == 2:
        out = product(x.contiguous(), weight.T, bias[0], fused)
    else:
        members = zip(x.contiguous(), weight.mT, bias[:, 0], strict=True)
        out = torch.stack([product(*member, fused) for member in members])
    if activation == "relu":
        out.relu_()
    return out


def _before_activation(g: Tensor, out: Tensor, activation: Activation | None, in_place: bool) -> Tensor:
    """Returns the gradient with respect to the input of the activation function. `g` is the
    gradient with respect to its output; `in_place` overwrites `g` with the result."""
    if activation is None:
        return g
    operation, more = BACKWARD[activation]
    if in_place:
        operation.grad_input(g, out, *more, grad_input=g)
        return g
    grad: Tensor = operation(g, out, *more)
    return grad


def _weight_gradient(x: Tensor, g: Tensor) -> Tensor:
    """Returns x' g [..., in, out], computed as the transpose of g' x if x has more columns than g:
    PyTorch takes five times as long for a product with few columns."""
    return _product(x.mT, g) if x.shape[-1] <= g.shape[-1] else _product(g.mT, x).mT


def _product(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b) if a.dim() == 2 else torch.bmm(a, b)


def _unstack_single(x: Tensor) -> Tensor:
    """Returns a stack of one member without its member dimension; returns other stacks unchanged."""
    return x.squeeze(0) if x.dim() == 3 else x


def _stack_single(x: Tensor) -> Tensor:
    """Returns a matrix as a stack of one member; returns stacks unchanged."""
    return x.unsqueeze(0) if x.dim() == 2 else x


# ---- layers


def orthogonal(shape: tuple[int, ...], gain: float, generators: Sequence[torch.Generator]) -> Tensor:
    """Returns weights [P, *shape]: an orthogonal matrix (Saxe et al., 2014) for each generator, scaled by `gain`."""
    weights = torch.empty(len(generators), *shape)
    for weight, generator in zip(weights, generators, strict=True):
        nn.init.orthogonal_(weight, gain, generator=generator)
    return weights


class Linear(nn.Module):
    """P linear layers: [P, R, in] -> [P, R, out]."""

    def __init__(self, inputs: int, outputs: int, gain: float, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        self.weight = nn.Parameter(orthogonal((inputs, outputs), gain, generators))
        self.bias = nn.Parameter(torch.zeros(len(generators), 1, outputs))

    def forward(self, x: Tensor, activation: Activation | None = None) -> Tensor:
        return dense_layers(x, (activation,), self.weight, self.bias)


class LayerNorm(nn.Module):
    """P layer normalisations (Ba et al., 2016): rows [P, R, H] with mean 0 and deviation 1, then scaled and shifted."""

    def __init__(self, units: int, members: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(members, 1, units))
        self.shift = nn.Parameter(torch.zeros(members, 1, units))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, x.shape[-1:]) * self.scale + self.shift


class MLP(nn.Module):
    """P multilayer perceptrons [P, R, in] -> [P, R, out]. Every hidden layer has the activation
    function, with `layer_norm` after a layer normalisation. `outputs` adds a linear last layer."""

    def __init__(
        self,
        inputs: int,
        hidden: Sequence[int],
        activation: Activation,
        generators: Sequence[torch.Generator],
        outputs: int | None = None,
        gain: float = 1.0,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        widths = [inputs, *hidden]
        self.layers = nn.ModuleList(Linear(a, b, GAIN[activation], generators) for a, b in itertools.pairwise(widths))
        if outputs is not None:
            self.layers.append(Linear(widths[-1], outputs, gain, generators))
        self.norms = nn.ModuleList(LayerNorm(units, len(generators)) for units in hidden if layer_norm)
        self.active = len(hidden)
        self.activation = activation

    def forward(self, x: Tensor, last: Linear | None = None) -> Tensor:
        """Returns the output [P, R, out]; with `last`, the output of that linear layer after the others."""
        layers: list[Any] = list(self.layers)
        norms = list(self.norms)
        for norm, layer in zip(norms, layers, strict=False):  # the last layer may have no norm
            x = FUNCTIONS[self.activation](norm(layer(x)))
        activations: list[Activation | None] = [self.activation] * self.active + [None] * (len(layers) - self.active)
        if last is not None:
            layers = [*layers, last]
            activations = [*activations, None]
        rest = layers[len(norms) :]
        parameters = list(chain.from_iterable((layer.weight, layer.bias) for layer in rest))
        return dense_layers(x, activations[len(norms) :], *parameters) if rest else x
