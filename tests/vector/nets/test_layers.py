"""Stacked networks, against PyTorch's own layers and against each network alone."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from palestra.vector.nets.dense import MLP, Activation, Linear, orthogonal
from palestra.vector.nets.images import ConvolutionKind
from palestra.vector.nets.layers import (
    GRU,
    Convolutions,
    Net,
    NetConfig,
    make_generators,
    member_weights,
    with_member_weights,
)

CONFIGS = [NetConfig(hidden=[8, 6]), NetConfig(hidden=[8], activation="relu"), NetConfig(hidden=[8], gru_units=5)]
PIXELS = (36, 40, 3)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def jitter(module: nn.Module, seed: int = 0) -> None:
    """Changes every weight, so that biases are not zero and members differ everywhere."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


# ---- against PyTorch


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_layer_norm_equals_torch(activation: Activation) -> None:
    """Normalised before the activation, each member with its own scale and shift."""
    mlp = MLP(4, [6], activation, make_generators([3, 4]), outputs=2, layer_norm=True)
    jitter(mlp)
    x = noise(2, 5, 4)
    for p in range(2):
        weights, norm = member_weights(mlp, p), nn.LayerNorm(6)
        norm.load_state_dict({"weight": weights["norms.0.scale"][0], "bias": weights["norms.0.shift"][0]})
        hidden = getattr(torch, activation)(norm(x[p] @ weights["layers.0.weight"] + weights["layers.0.bias"]))
        torch.testing.assert_close(mlp(x)[p], hidden @ weights["layers.1.weight"] + weights["layers.1.bias"])


def test_gru_cell_equals_torch() -> None:
    gru, cell = GRU(4, 5, make_generators([3])), nn.GRUCell(4, 5)
    jitter(gru)
    with torch.no_grad():
        cell.weight_ih.copy_(gru.inputs.weight[0].T)
        cell.weight_hh.copy_(gru.recurrent.weight[0].T)
        cell.bias_ih.copy_(gru.inputs.bias[0, 0])
        cell.bias_hh.copy_(gru.recurrent.bias[0, 0])
    x, memory = noise(1, 7, 3, 4), noise(1, 3, 5, seed=1)
    out = gru(x, memory, None)
    hidden = memory[0]
    for t in range(7):
        hidden = cell(x[0, t], hidden)
        torch.testing.assert_close(out[0, t], hidden)


def test_mlp_is_linear_layers_with_activations() -> None:
    for activation, function in (("tanh", torch.tanh), ("relu", torch.relu)):
        mlp = MLP(3, [4, 5], activation, make_generators([1]), outputs=2, gain=0.5)  # type: ignore[arg-type]
        jitter(mlp)
        x = noise(1, 6, 3)
        expected = x[0]
        for number, layer in enumerate(mlp.layers):
            expected = nn.functional.linear(expected, layer.weight[0].T, layer.bias[0, 0])
            expected = function(expected) if number < 2 else expected
        torch.testing.assert_close(mlp(x)[0], expected)


@pytest.mark.parametrize(("kind", "strides", "units"), [("nature", (4, 2, 1), 512), ("small", (4, 2), 256)])
def test_convolutions_equal_torch_on_scaled_bytes(kind: ConvolutionKind, strides: tuple[int, ...], units: int) -> None:
    net = Convolutions(PIXELS, make_generators([1]), kind)
    jitter(net)
    pixels = torch.randint(0, 256, (1, 2, *PIXELS), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    x = pixels[0].permute(0, 3, 1, 2) / 255
    for kernel, bias, stride in zip(net.kernels, net.biases, strides, strict=True):
        x = torch.relu(nn.functional.conv2d(x, kernel[0], bias[0], stride))
    expected = torch.relu(x.flatten(1) @ net.last.weight[0] + net.last.bias[0])
    assert expected.shape == (2, units)
    torch.testing.assert_close(net(pixels)[0], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(net(pixels / 255), net(pixels), rtol=1e-4, atol=1e-4)


def test_bfloat16_convolutions_are_close_and_train_float32_weights() -> None:
    wide, narrow = (
        Net(PIXELS, 3, NetConfig(convolutions="small", precision=precision), make_generators([1, 2]))
        for precision in ("float32", "bfloat16")
    )
    pixels = torch.randint(0, 256, (2, 4, *PIXELS), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    outs = [net(pixels) for net in (wide, narrow)]
    assert outs[1].dtype == torch.float32 and not torch.equal(*outs)
    assert (outs[1] - outs[0]).norm() < 0.02 * outs[0].norm()
    for out in outs:
        out.square().sum().backward()
    for weight, other in zip(wide.parameters(), narrow.parameters(), strict=True):
        assert other.grad is not None and other.grad.dtype == torch.float32
        assert (other.grad - weight.grad).norm() < 0.1 * weight.grad.norm()


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_first_and_second_gradients_pass_gradcheck(activation: Activation, members: int) -> None:
    """Also second gradients: a discriminator's gradient penalty needs them."""
    mlp = MLP(3, [4], activation, make_generators(range(members)), outputs=2).double()
    names = [name for name, _ in mlp.named_parameters()]
    x = noise(members, 5, 3).double().requires_grad_()

    def out(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(mlp, dict(zip(names, weights, strict=True)), x)

    weights = [weight.detach().clone().requires_grad_() for weight in mlp.parameters()]
    assert torch.autograd.gradcheck(out, (x, *weights))
    assert torch.autograd.gradgradcheck(out, (x, *weights))


# ---- weights at the start


@pytest.mark.parametrize("shape", [(4, 7), (7, 4), (5, 3, 2, 2)])
def test_initial_weights_are_orthogonal(shape: tuple[int, ...]) -> None:
    for weight in orthogonal(shape, 2.0, make_generators([1, 2])):
        matrix = weight.flatten(1)
        small = matrix @ matrix.T if len(matrix) <= matrix.shape[1] else matrix.T @ matrix
        torch.testing.assert_close(small, 4 * torch.eye(len(small)), rtol=1e-4, atol=1e-4)


def test_initial_gain_follows_the_activation() -> None:
    for activation, gain in (("tanh", 5 / 3), ("relu", math.sqrt(2))):
        mlp = MLP(6, [6], activation, make_generators([1]), outputs=6, gain=0.01)  # type: ignore[arg-type]
        norms = [torch.linalg.matrix_norm(layer.weight[0], 2).item() for layer in mlp.layers]
        assert norms == pytest.approx([gain, 0.01], rel=1e-4)


def test_small_output_gain_gives_nearly_uniform_policy() -> None:
    for config in CONFIGS:
        net = Net((4,), 3, config, make_generators([0]), gain=0.01)
        out, _ = net.unroll(noise(1, 5, 4, 4))
        assert out.abs().max() < 0.05


# ---- members


@pytest.mark.parametrize("config", CONFIGS)
@settings(max_examples=10)
@given(seeds=st.lists(st.integers(0, 2**31), min_size=2, max_size=4, unique=True))
def test_member_outputs_do_not_depend_on_the_stack(config: NetConfig, seeds: list[int]) -> None:
    stack = Net((4,), 3, config, make_generators(seeds))
    x = noise(len(seeds), 5, 2, 4)
    together, _ = stack.unroll(x)
    for p, seed in enumerate(seeds):
        alone = Net((4,), 3, config, make_generators([seed]))
        for name, weight in member_weights(alone, 0).items():
            assert torch.equal(weight, member_weights(stack, p)[name]), name
        torch.testing.assert_close(together[p], alone.unroll(x[p : p + 1])[0][0], rtol=1e-5, atol=1e-6)


def test_pixel_member_outputs_do_not_depend_on_the_stack() -> None:
    stack = Net(PIXELS, 2, NetConfig(hidden=[8]), make_generators([1, 2]))
    alone = Net(PIXELS, 2, NetConfig(hidden=[8]), make_generators([2]))
    x = torch.rand(2, 2, *PIXELS, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(stack(x)[1], alone(x[1:])[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", CONFIGS)
def test_member_gradients_are_separate(config: NetConfig) -> None:
    net = Net((4,), 3, config, make_generators([1, 2, 3]))
    net.unroll(noise(3, 5, 2, 4))[0][1].square().sum().backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None
        moved = parameter.grad.flatten(1).abs().sum(1)
        assert moved[0] == moved[2] == 0, name
        assert moved[1] > 0, name


def test_nan_member_does_not_affect_others() -> None:
    net, x = Net((4,), 3, CONFIGS[2], make_generators([1, 2])), noise(2, 5, 2, 4)
    before, _ = net.unroll(x)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter[0] = math.nan
    after, _ = net.unroll(x)
    assert after[0].isnan().all() and torch.equal(after[1], before[1])


@pytest.mark.parametrize("config", CONFIGS)
def test_member_of_a_stack_plays_alone_as_in_it(config: NetConfig) -> None:
    source, pattern = Net((4,), 3, config, make_generators([1, 2])), Net((4,), 3, config, make_generators([3]))
    jitter(source)
    kept = member_weights(pattern, 0)
    taken = {name: weight.numpy() for name, weight in member_weights(source, 1).items()}
    alone = with_member_weights(pattern, taken)
    x = noise(1, 5, 2, 4)
    torch.testing.assert_close(alone.unroll(x)[0][0], source.unroll(x.expand(2, -1, -1, -1))[0][1])
    taken["head.weight"][:] = 0.0  # its weights share memory neither with the arrays that it was made of
    jitter(alone)  # nor with the network that it was copied from
    assert all(torch.equal(weight, member_weights(pattern, 0)[name]) for name, weight in kept.items())
    assert not torch.equal(alone.head.weight[0], torch.zeros_like(alone.head.weight[0]))


def test_extracted_weights_are_copies() -> None:
    net = Net((4,), 3, CONFIGS[0], make_generators([1]))
    taken = member_weights(net, 0)
    before = {name: weight.clone() for name, weight in taken.items()}
    jitter(net)
    assert all(torch.equal(taken[name], before[name]) for name in before)


def test_weights_of_another_network_are_refused() -> None:
    net, other = Net((4,), 3, CONFIGS[0], make_generators([1])), Net((5,), 3, CONFIGS[0], make_generators([1]))
    with pytest.raises(ValueError, match=r"layers\.0\.weight should have shape \(4, 8\) and has \(5, 8\)"):
        with_member_weights(net, member_weights(other, 0))
    with pytest.raises(ValueError, match=r"layers\.0\.weight should have shape \(4, 8\) and has none"):
        with_member_weights(net, {})


# ---- time


def test_single_member_layer_equals_stacked_layer() -> None:
    one, two = Linear(3, 4, 1.0, make_generators([1])), Linear(3, 4, 1.0, make_generators([1, 2]))
    x = noise(1, 6, 3)
    torch.testing.assert_close(one(x)[0], two(x.expand(2, -1, -1))[0])


@pytest.mark.parametrize("members", [1, 2])
def test_unroll_equals_stepping(members: int) -> None:
    net = Net((4,), 3, CONFIGS[2], make_generators(range(members)))
    x, fresh = noise(members, 6, 3, 4), noise(members, 6, 3, seed=1) > 0.5
    whole, memories = net.unroll(x, noise(members, 3, 5), fresh)
    memory: torch.Tensor | None = noise(members, 3, 5)
    for t in range(6):
        out, after = net.unroll(x[:, t : t + 1], memory, fresh[:, t : t + 1])
        assert after is not None and memories is not None
        torch.testing.assert_close(out[:, 0], whole[:, t])
        torch.testing.assert_close(after[:, 0], memories[:, t])
        memory = after[:, 0]


def test_recurrent_state_is_reset_at_episode_start() -> None:
    net, x = Net((4,), 3, CONFIGS[2], make_generators([0])), noise(1, 6, 2, 4)
    fresh = torch.zeros(1, 6, 2, dtype=torch.bool)
    fresh[0, 3, 1] = True
    out, _ = net.unroll(x, noise(1, 2, 5), fresh)
    anew, _ = net.unroll(x[:, 3:], net.initial_state(1, 2))
    torch.testing.assert_close(out[:, 3:, 1], anew[:, :, 1])
    assert not torch.allclose(out[:, 3:, 0], anew[:, :, 0])
    given_none, _ = net.unroll(x)
    given_empty, _ = net.unroll(x, net.initial_state(1, 2))
    assert torch.equal(given_none, given_empty)


def test_feedforward_outputs_do_not_depend_on_time() -> None:
    net, x = Net((2, 3), 4, CONFIGS[0], make_generators([0, 1])), noise(2, 5, 3, 2, 3)
    out, memory = net.unroll(x)
    assert memory is None
    for t in range(5):
        torch.testing.assert_close(out[:, t], net(x[:, t]))


# ---- errors


@pytest.mark.parametrize("view", [(35, 36, 3), (36, 35, 1), (5, 5, 4)])
def test_too_small_images_are_refused(view: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="36 x 36 at least"):
        Net(view, 2, NetConfig(), make_generators([0]))


def test_small_convolutions_accept_smaller_images() -> None:
    small = NetConfig(convolutions="small")
    assert Net((20, 20, 1), 2, small, make_generators([0]))(torch.zeros(1, 3, 20, 20, 1)).shape == (1, 3, 2)
    with pytest.raises(ValueError, match="20 x 20 at least"):
        Net((20, 19, 1), 2, small, make_generators([0]))


@pytest.mark.parametrize("wrong", [{"hidden": []}, {"memory": -1}, {"activation": "gelu"}, {"convolutions": "big"}])
def test_invalid_shapes_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError):
        NetConfig(**wrong)


def test_byte_vectors_are_accepted_as_numbers() -> None:
    """Observations of uint8 are not always pixels: a board of small integers is a vector of bytes."""
    net = Net((4,), 3, CONFIGS[0], make_generators([0]))
    board = torch.tensor(np.array([[[0, 1, 2, 3]]], np.uint8))
    torch.testing.assert_close(net(board), net(board.float()))
