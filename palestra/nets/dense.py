"""Dense layers of several networks of one shape, each one autograd node, computed by oneDNN where that is faster; and
multilayer perceptrons of them.

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


class Dense(torch.autograd.Function):
    """activation(x W + b) for P members: [P, R, in], [P, in, out], [P, 1, out] -> [P, R, out]. One autograd node where
    PyTorch creates five with copies; a single member uses plain matrix products, which are faster."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, activation: Activation | None) -> Tensor:
        ctx.product = _faster_product(x, weight)
        if ctx.product is not None:
            out = _by_onednn(ctx.product, x, weight, bias, activation)
        else:
            out = _product(x, weight).add_(bias)
            if activation is not None:
                out = out.tanh_() if activation == "tanh" else out.relu_()
        ctx.save_for_backward(x, weight, out)
        ctx.activation = activation
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None]:
        x, weight, out = ctx.saved_tensors
        if ctx.activation == "tanh":
            g = torch.ops.aten.tanh_backward(g, out)
        elif ctx.activation == "relu":
            g = torch.ops.aten.threshold_backward(g, out, 0)
        shift = g.sum(1, keepdim=True)
        product: Product | None = ctx.product
        if product is None or torch.is_grad_enabled():  # oneDNN's product has no gradient for a second derivative
            below = _product(g, weight.transpose(1, 2)) if ctx.needs_input_grad[0] else None
            return below, _product(x.transpose(1, 2), g), shift, None
        g = g.contiguous()
        below = _each(lambda g, w: product(g, w, None), g, weight) if ctx.needs_input_grad[0] else None
        return below, _each(lambda x, g: _weight_gradient(product, x, g), x, g), shift, None


def _faster_product(x: Tensor, weight: Tensor) -> Product | None:
    """Returns oneDNN's product where it is faster than PyTorch's own, otherwise None."""
    _, inputs, outputs = weight.shape
    large = x.shape[1] * inputs * outputs >= MIN_PRODUCTS and max(inputs, outputs) >= MIN_WIDTH
    fits = x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
    return onednn_product() if large and fits and not torch.is_autocast_enabled("cpu") else None


def _by_onednn(product: Product, x: Tensor, weight: Tensor, bias: Tensor, activation: Activation | None) -> Tensor:
    fused: Literal["none", "tanh"] = "tanh" if activation == "tanh" else "none"
    out = _each(lambda x, w, b: product(x, w.T, b[0], fused), x.contiguous(), weight, bias)
    return out.relu_() if activation == "relu" else out


def _weight_gradient(product: Product, x: Tensor, g: Tensor) -> Tensor:
    """Returns x' g [in, out] of [R, in] and [R, out]. oneDNN takes twice as long if the first factor of a product is a
    transposed view, so the narrower one is copied."""
    if x.shape[1] <= g.shape[1]:
        return product(x.T.contiguous(), g.T, None)
    return product(g.T.contiguous(), x.T, None).T


def _each(function: Callable[..., Tensor], *stacks: Tensor) -> Tensor:
    """Returns the results of a function of each member as a stack; of a single member without a copy."""
    results = [function(*members) for members in zip(*stacks, strict=True)]
    return results[0].unsqueeze(0) if len(results) == 1 else torch.stack(results)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Returns the batched product of [P, n, m] and [P, m, k]."""
    return torch.mm(a.squeeze(0), b.squeeze(0)).unsqueeze(0) if len(a) == 1 else torch.bmm(a, b)


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
        out: Tensor = Dense.apply(x, self.weight, self.bias, activation)
        return out


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

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number < len(self.norms):
                x = self.norms[number](layer(x))
                x = torch.tanh(x) if self.activation == "tanh" else torch.relu(x)
            else:
                x = layer(x, self.activation if number < self.active else None)
        return x
