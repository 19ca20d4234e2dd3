"""Layers by oneDNN equal float64 up to rounding, with their gradients, as PyTorch's own products do."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from palestra.core.accel.onednn import Product, is_right, onednn_product
from palestra.vector.nets import dense
from palestra.vector.nets.dense import MLP, Activation, dense_layers
from palestra.vector.nets.layers import make_generators

needs_onednn = pytest.mark.skipif(onednn_product() is None, reason="no oneDNN product on this machine")
ROWS = 8200  # with the narrowest layer, 64 to 1, above `MIN_PRODUCTS`


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(members: int, inputs: int, outputs: int) -> list[Tensor]:
    """Inputs, weights and biases of a layer that oneDNN computes."""
    parts = normal(members, ROWS, inputs), normal(members, inputs, outputs, seed=1) / 8, normal(members, 1, outputs)
    return [part.requires_grad_() for part in parts]


def float64_layer(parts: list[Tensor], activation: Activation | None, outer: Tensor) -> list[Tensor]:
    """The layer in float64 by PyTorch's operations, and its gradients."""
    wide = [part.detach().double().requires_grad_() for part in parts]
    out = torch.baddbmm(wide[2], wide[0], wide[1])
    out = out if activation is None else torch.tanh(out) if activation == "tanh" else torch.relu(out)
    return [out.detach(), *torch.autograd.grad(out, wide, outer.double())]


def count_products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Returns a list, to which the shape of the weights of each oneDNN product is appended."""
    seen, product = [], onednn_product()
    assert product is not None

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "none") -> Tensor:
        seen.append(tuple(weight.shape))
        return product(x, weight, bias, activation)  # type: ignore[arg-type]

    monkeypatch.setattr(dense, "onednn_product", lambda: counted)
    return seen


@needs_onednn
@pytest.mark.parametrize("shape", [(18, 64), (64, 64), (64, 5), (64, 1)])
@pytest.mark.parametrize("activation", ["tanh", "relu", None])
@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.few(8)
def test_outputs_and_gradients_match_float64(monkeypatch, members, activation, shape):
    parts, seen = layer(members, *shape), count_products(monkeypatch)
    before = float64_layer(parts, None, torch.zeros(members, ROWS, shape[1]))[0]
    # units within rounding of 0 may be active in one precision only
    outer = normal(members, ROWS, shape[1], seed=3).masked_fill(before.abs() < 1e-5, 0.0)
    out = dense_layers(parts[0], (activation,), *parts[1:])
    found = [out, *torch.autograd.grad(out, parts, outer)]
    assert len(seen) == (members if shape[1] > 1 else 0)
    for mine, right in zip(found, float64_layer(parts, activation, outer), strict=True):
        # sums of up to 8200 products in float32: rounding gives about 1e-6 of the largest
        torch.testing.assert_close(mine.detach().double(), right, rtol=0, atol=1e-5 * float(right.abs().max()))


@needs_onednn
def test_columns_and_expanded_gradients_are_computed_as_copies(monkeypatch):
    _, weight, bias = layer(1, 64, 64)
    seen = count_products(monkeypatch)
    apart = normal(1, ROWS, 130)[..., 1:129:2].requires_grad_()
    for activation in ("tanh", None):
        sums = dense_layers(apart, (activation,), weight, bias).sum()  # its gradient is one number, expanded
        found = torch.autograd.grad(sums, (apart, weight, bias))
        right = float64_layer([apart, weight, bias], activation, torch.ones(1, ROWS, 64))[1:]
        for mine, one in zip(found, right, strict=True):
            torch.testing.assert_close(mine.double(), one, rtol=0, atol=1e-5 * float(one.abs().max()))
    assert len(seen) == 2


@needs_onednn
@pytest.mark.parametrize("activation", ["tanh", "relu", None])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nonfinite_values_are_propagated(monkeypatch, activation, value):
    """A run stops at a loss that is not finite, so no layer may hide it."""
    x, weight, bias = (part.detach() for part in layer(1, 64, 64))
    seen = count_products(monkeypatch)
    bias[0, 0, 3] = value
    out = dense_layers(x, (activation,), weight, bias)[..., 3]
    assert seen and torch.equal(out.isnan(), torch.full_like(out, value != value).bool())
    assert value != value or bool((out == (1.0 if activation == "tanh" else torch.inf)).all())


@needs_onednn
@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_second_gradients_match_pytorch(monkeypatch, activation):
    """A discriminator's gradient penalty needs them."""

    def penalty_gradients() -> list[Tensor]:
        net = MLP(18, [64], activation, make_generators([0]), outputs=64)
        x = normal(1, ROWS, 18).requires_grad_()
        (slope,) = torch.autograd.grad(net(x).square().mean(), x, create_graph=True)
        return list(torch.autograd.grad((1000 * slope).square().sum(), list(net.parameters()), materialize_grads=True))

    seen = count_products(monkeypatch)
    ours = penalty_gradients()
    assert seen
    monkeypatch.setattr(dense, "onednn_product", lambda: None)
    for mine, theirs in zip(ours, penalty_gradients(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))  # three products deep
    assert float(ours[0].abs().max()) > 0


@pytest.mark.parametrize("kind", ["few rows", "narrow", "float64", "bfloat16", "autocast"])
def test_other_layers_are_pytorchs_bit_for_bit(kind):
    rows = 64 if kind == "few rows" else ROWS
    dtype = {"float64": torch.float64, "bfloat16": torch.bfloat16}.get(kind, torch.float32)
    width = 63 if kind == "narrow" else 64
    x, weight, bias = (normal(1, *shape).to(dtype) for shape in ((rows, width), (width, width), (1, width)))
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        found, right = dense_layers(x, ("tanh",), weight, bias), torch.mm(x[0], weight[0]).add_(bias[0]).tanh_()
    assert torch.equal(found[0], right)


@needs_onednn
@pytest.mark.parametrize("fault", ["weight", "transposed", "tanh"])
def test_a_wrong_product_is_refused(fault):
    def wrong(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "none") -> Tensor:
        faulty = fault == "weight" or (fault == "transposed" and not weight.is_contiguous())
        out = F.linear(x, weight.roll(1) if faulty else weight, bias)
        return out if activation == "none" else torch.tanh(out) + 2e-6 * (fault == "tanh")

    right: Product = lambda x, weight, bias, activation="none": (  # noqa: E731
        F.linear(x, weight, bias) if activation == "none" else torch.tanh(F.linear(x, weight, bias))
    )
    assert is_right(right) and not is_right(wrong)
