"""Dense layers of several networks of one shape, one autograd node for all layers in a row, computed by oneDNN where
that is faster; and multilayer perceptrons of them.

Shapes: `P` members, `R` rows, `H` units.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from palestra.onednn import Product, onednn_product

Activation = Literal["tanh", "relu"]
GAIN = {"tanh": 5 / 3, "relu": math.sqrt(2)}  # of initial weights, by activation function
MIN_PRODUCTS = 2**19  # multiplications of a member; oneDNN's fixed cost, 12 us, counts more in smaller layers
MIN_WIDTH = 64  # of the wider side of a layer; narrower ones keep the numbers of PyTorch's products to the last bit


def dense_layers(x: Tensor, activations: Sequence[Activation | None], *parameters: Tensor) -> Tensor:
    """Returns the output of dense layers, activation(x W + b) one after another, for P members: [P, R, in], then a
    weight [P, in, out] and a bias [P, 1, out] of every layer -> [P, R, out]."""
    if not torch.is_grad_enabled():
        return _stacked(_outputs(x, activations, parameters, _products(x, parameters[::2]))[-1])
    out: Tensor = DenseLayers.apply(x, activations, *parameters)[-1]
    return out


class DenseLayers(torch.autograd.Function):
    """`dense_layers` as one autograd node, where PyTorch creates five with copies for every layer. Returns the outputs
    of all layers; those of inner ones are for second derivatives, and without a member dimension if P is 1."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, activations: Sequence[Activation | None], *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.activations, ctx.products = activations, _products(x, parameters[::2])
        *inner, last = _outputs(x, activations, parameters, ctx.products)
        outputs = (*inner, _stacked(last))
        ctx.save_for_backward(x, *parameters[::2], *outputs)
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *outer: Tensor | None) -> tuple[Tensor | None, ...]:
        depth, (x, *saved) = len(outer), [_unstacked(tensor) for tensor in ctx.saved_tensors]
        weights, outputs = saved[:depth], saved[depth:]
        gradients: list[Tensor | None] = [None] * (2 * depth)
        g: Tensor | None = None
        for i in reversed(range(depth)):
            if (own := outer[i]) is not None:
                g = _unstacked(own) if g is None else g + own
            if g is None:
                continue
            g = _before_activation(g, outputs[i], ctx.activations[i])
            # oneDNN's product has no gradient for a second derivative
            product = None if torch.is_grad_enabled() else ctx.products[i]
            if ctx.needs_input_grad[2 + 2 * i]:
                below = x if i == 0 else outputs[i - 1]
                gradients[2 * i] = _stacked(_weight_gradient(product, below, g))
                gradients[2 * i + 1] = _stacked(g.sum(-2, keepdim=True))
            g = _input_gradient(product, g, weights[i]) if i > 0 or ctx.needs_input_grad[0] else None
        return None if g is None else _stacked(g), None, *gradients


def _outputs(
    x: Tensor,
    activations: Sequence[Activation | None],
    parameters: Sequence[Tensor],
    products: Sequence[Product | None],
) -> list[Tensor]:
    """Returns the outputs of all layers; without the member dimension if P is 1, since plain matrix products are faster
    than batched ones."""
    outputs = [_unstacked(x)]
    for weight, bias, activation, product in zip(parameters[::2], parameters[1::2], activations, products, strict=True):
        layer = outputs[-1], _unstacked(weight), _unstacked(bias)
        outputs.append(_layer(product, activation, *layer))
    return outputs[1:]


def _layer(product: Product | None, activation: Activation | None, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns activation(x W + b), [R, out] or [P, R, out]."""
    if product is None:
        out = _product(x, weight).add_(bias)
        return out if activation is None else out.tanh_() if activation == "tanh" else out.relu_()
    fused: Literal["none", "tanh"] = "tanh" if activation == "tanh" else "none"
    out = _each(lambda x, w, b: product(x, w.T, b[0], fused), x.contiguous(), weight, bias)
    return out.relu_() if activation == "relu" else out


def _before_activation(g: Tensor, out: Tensor, activation: Activation | None) -> Tensor:
    """Returns the gradient before the activation function from that after it."""
    if activation is None:
        return g
    backward = torch.ops.aten.tanh_backward if activation == "tanh" else torch.ops.aten.threshold_backward
    found: Tensor = backward(g, out) if activation == "tanh" else backward(g, out, 0)
    return found


def _input_gradient(product: Product | None, g: Tensor, weight: Tensor) -> Tensor:
    """Returns g W' [..., R, in]."""
    if product is None:
        return _product(g, weight.mT)
    return _each(lambda g, w: product(g, w, None), g.contiguous(), weight)


def _weight_gradient(product: Product | None, x: Tensor, g: Tensor) -> Tensor:
    """Returns x' g [..., in, out]. oneDNN takes twice as long if the first factor of a product is a transposed view, so
    the narrower one is copied."""
    if product is None:
        return _product(x.mT, g)
    if x.shape[-1] <= g.shape[-1]:
        return _each(lambda x, g: product(x.T.contiguous(), g.T, None), x, g.contiguous())
    return _each(lambda x, g: product(g.T.contiguous(), x.T, None).T, x, g.contiguous())


def _products(x: Tensor, weights: Sequence[Tensor]) -> list[Product | None]:
    """Returns for every layer oneDNN's product where it is faster than PyTorch's own, otherwise None."""
    found = onednn_product() if x.device.type == "cpu" and not torch.is_autocast_enabled("cpu") else None
    return [found if found and _is_large(x, weight) else None for weight in weights]


def _is_large(x: Tensor, weight: Tensor) -> bool:
    _, inputs, outputs = weight.shape
    large = x.shape[1] * inputs * outputs >= MIN_PRODUCTS and max(inputs, outputs) >= MIN_WIDTH
    return large and x.dtype == weight.dtype == torch.float32


def _each(function: Callable[..., Tensor], *stacks: Tensor) -> Tensor:
    """Returns the result of a function of matrices; of stacks [P, ...] a stack of the results of each member."""
    if stacks[0].dim() == 2:
        return function(*stacks)
    members = zip(*(stack.unbind() for stack in stacks), strict=True)
    return torch.stack([function(*member) for member in members])


def _product(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b) if a.dim() == 2 else torch.bmm(a, b)


def _unstacked(x: Tensor) -> Tensor:
    """Returns a stack of one without its member dimension; others as they are."""
    return x.squeeze(0) if x.dim() == 3 else x


def _stacked(x: Tensor) -> Tensor:
    """Returns a matrix as a stack of one; stacks as they are."""
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
    """P multilayer perceptrons [P, R, in] -> [P, R, out]: every layer has the activation, except an optional last one
    of `outputs`; with `layer_norm` its inputs are normalised."""

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
        self.active, self.activation = len(hidden), activation

    def forward(self, x: Tensor, last: Linear | None = None) -> Tensor:
        """Returns the output [P, R, out]; with `last` that of another layer after these, without activation."""
        layers, norms = list(self.layers), list(self.norms)
        for norm, layer in zip(norms, layers, strict=False):  # the last layer may have no norm
            x = norm(layer(x))
            x = torch.tanh(x) if self.activation == "tanh" else torch.relu(x)
        activations: list[Activation | None] = [self.activation] * self.active + [None] * (len(layers) - self.active)
        if last is not None:
            layers, activations = [*layers, last], [*activations, None]
        rest = layers[len(norms) :]
        parameters = [parameter for layer in rest for parameter in (layer.weight, layer.bias)]
        return dense_layers(x, activations[len(norms) :], *parameters) if rest else x
