"""oneDNN's products equal PyTorch's, with their gradients, and are used for large float32 weights only."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from palestra.core.accel.onednn import onednn_packing, onednn_product
from palestra.core.losses import clipped_policy_loss
from palestra.core.types import Sample
from palestra.engine.bases.model import Engine
from palestra.engine.forward import linear as linear_module
from palestra.engine.forward.linear import OneDNNLinear, PackedWeight, linear, low_rank_grads, matmul, pack_weights
from palestra.engine.lora.adapters import Adapter
from palestra.engine.lora.config import LoraConfig
from palestra.engine.lora.routes import LowRankLinear
from palestra.engine.sampling.request import Request
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.engine.training import micro_batch
from palestra.engine.training.adapter_weights import AdapterWeights
from palestra.testing import tiny_lm

needs_onednn = pytest.mark.skipif(onednn_product() is None, reason="no oneDNN product on this machine")


needs_packing = pytest.mark.skipif(onednn_packing() is None, reason="oneDNN packs no weights on this machine")


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def wide_lm() -> Engine:
    """A model of two layers with weights large enough for oneDNN."""
    return tiny_lm(3, hidden_size=320, intermediate_size=640, head_dim=64)


@needs_onednn
@pytest.mark.parametrize("rows", [(4,), (1, 33), (2, 3, 5)])
@pytest.mark.parametrize("bias", [False, True])
def test_product_and_gradient_match_float64(rows, bias):
    x, weight = normal(*rows, 300).requires_grad_(), normal(400, 300, seed=1)
    shift = normal(400, seed=2) if bias else None
    wide = x.detach().double().requires_grad_()
    found = linear(x, weight, shift)
    exact = F.linear(wide, weight.double(), None if shift is None else shift.double())
    assert isinstance(found.grad_fn, OneDNNLinear._backward_cls)
    outer = normal(*rows, 400, seed=3)
    (grad,), (exact_grad,) = torch.autograd.grad(found, x, outer), torch.autograd.grad(exact, wide, outer.double())
    # sums of up to 400 products: float32's rounding gives about 2e-5
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=2e-4)
    torch.testing.assert_close(grad.double(), exact_grad, rtol=0, atol=2e-4)
    torch.testing.assert_close(matmul(outer, weight), outer @ weight, rtol=0, atol=2e-4)


@pytest.mark.parametrize("rows", [7, 1345])  # by PyTorch's products, and (padded to more rows) by oneDNN's
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_rank_gradients_match_float64(rows, dtype):
    x, grad = normal(rows, 400, dtype=dtype), normal(rows, 640, seed=1, dtype=dtype)
    a, b = normal(16, 400, seed=2, dtype=dtype), normal(640, 16, seed=3, dtype=dtype)
    x64, grad64, *pair = (t.double().requires_grad_() for t in (x, grad, a, b))
    exact = torch.autograd.grad(x64 @ pair[0].T @ pair[1].T, pair, grad64)
    share = 1e-5 if dtype == torch.float32 else 2e-2
    for found, wanted in zip(low_rank_grads(x, grad, a, b), exact, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=share * float(wanted.abs().max()))


def test_trained_weights_are_multiplied_by_pytorch():
    x, weight = normal(8, 300), normal(400, 300, seed=1).requires_grad_()
    assert torch.equal(linear(x, weight, None), F.linear(x, weight))


@needs_onednn
def test_views_and_strided_rows_are_multiplied_as_copies():
    weight, x = normal(900, 300), normal(8, 3, 300, seed=1)
    torch.testing.assert_close(linear(x[:, 1], weight[100:500], None), x[:, 1] @ weight[100:500].T, rtol=0, atol=2e-4)
    torch.testing.assert_close(linear(x, weight.T[:, :300], None), x @ weight[:300], rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (normal(8, 128), normal(384, 128)),
        (normal(3, 300), normal(400, 300)),
        (normal(8, 300, dtype=torch.float64), normal(400, 300, dtype=torch.float64)),
        (normal(8, 300, dtype=torch.bfloat16), normal(400, 300, dtype=torch.bfloat16)),
    ],
    ids=["small", "few rows", "float64", "bfloat16"],
)
def test_other_products_are_pytorchs_bit_for_bit(x, weight):
    assert torch.equal(linear(x, weight, None), F.linear(x, weight))


def test_autocast_still_computes_in_its_dtype():
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(normal(8, 300), normal(400, 300), None).dtype == torch.bfloat16


def test_products_are_padded_to_few_row_counts(monkeypatch):
    """oneDNN keeps a kernel for each row count. Training and sampling with padding, for samples of all lengths, equal
    those without."""
    seen, engine = set(), wide_lm()

    def product(x, weight, bias, activation="none"):
        seen.add(x.numel() // x.shape[-1])
        return F.linear(x, weight, bias)

    monkeypatch.setattr(linear_module, "onednn_product", lambda: product)
    monkeypatch.setattr(linear_module, "onednn_packing", lambda: None)
    adapter = Adapter(engine.linear_layers, LoraConfig(rank=4), seed=1)
    trainer = AdapterWeights(engine, adapter)

    def grads() -> list[torch.Tensor]:
        for length in (3, 40, 150, 411):
            ids = np.random.default_rng(length).integers(3, 100, length).astype(np.int32)
            zeros = np.zeros(length, np.float32)
            samples = [Sample(ids[:2], ids, zeros - 5, zeros + a) for a in (1.0, -0.5)]
            samples[1].token_ids[length // 2] ^= 1
            trainer.forward_backward(samples, clipped_policy_loss)
        trainer.logprobs(samples)
        found = [p.grad for p in adapter.parameters()]
        trainer.reset_optimizer()
        for p in adapter.parameters():
            p.grad = None
        return found

    plain = grads()
    monkeypatch.setattr(micro_batch, "MIN_PADDED_TOKENS", 1)
    for ours, theirs in zip(grads(), plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for n in range(1, 40, 3):
        Sampler(engine).sample_all([Request(np.arange(3, 3 + n, dtype=np.int32), n, SamplingConfig(max_tokens=3))])
    assert seen <= {*range(4, 17, 4), *range(16, 257, 8), *range(288, 1025, 32)} and len(seen) >= 8


@needs_onednn
def test_sampling_and_training_give_the_same_as_without_onednn(monkeypatch):
    """A model sampled and trained with two adapters, with and without oneDNN."""

    def run() -> tuple[list[np.ndarray], np.ndarray, list[torch.Tensor]]:
        engine = wide_lm()
        adapters = [Adapter(engine.linear_layers, LoraConfig(rank=4), seed=seed) for seed in (1, 2)]
        with torch.no_grad():
            for adapter in adapters:
                for _, b in adapter.weights.values():
                    b.normal_(0, 0.05, generator=torch.Generator().manual_seed(5))
        prompts = [np.arange(5 + i, 25 + i, dtype=np.int32) for i in range(3)]
        config = SamplingConfig(max_tokens=6, stop_at_eos=False)
        owners = [adapters[0].snapshot("a"), adapters[1].snapshot("b"), None]
        groups = Sampler(engine).sample_all(
            [Request(ids, 4, config, owner, seed=i) for i, (ids, owner) in enumerate(zip(prompts, owners, strict=True))]
        )
        trainer = AdapterWeights(engine, adapters[0])
        trainer.forward_backward(
            [
                Sample(prompts[0], a.token_ids, a.logprobs, np.full(6, i - 1.5, np.float32))
                for i, a in enumerate(groups[0])
            ],
            clipped_policy_loss,
        )
        answers = [answer for group in groups for answer in group]
        grads = [p.grad for p in adapters[0].parameters() if p.grad is not None]
        return [a.token_ids for a in answers], np.concatenate([a.logprobs for a in answers]), grads

    ours = run()
    monkeypatch.setattr(linear_module, "onednn_product", lambda: None)
    theirs = run()
    assert [ids.tolist() for ids in ours[0]] == [ids.tolist() for ids in theirs[0]]
    np.testing.assert_allclose(ours[1], theirs[1], atol=1e-4)  # float32's rounding over two layers
    assert len(ours[2]) == len(theirs[2]) > 0
    for a, b in zip(ours[2], theirs[2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()))


@needs_packing
@pytest.mark.parametrize("rows", [4, 8, 33])
def test_products_with_packed_weights_match_float64(rows):
    x, weight, bias = (
        normal(rows, 300),
        nn.Parameter(normal(400, 300, seed=1), requires_grad=False),
        normal(400, seed=2),
    )
    found = linear(x, weight, bias, PackedWeight())
    torch.testing.assert_close(found.double(), F.linear(x.double(), weight.double(), bias.double()), rtol=0, atol=2e-4)


@needs_packing
def test_changed_weights_are_packed_again_and_trained_ones_are_not():
    weight, packed, x = nn.Parameter(normal(400, 300), requires_grad=False), PackedWeight(), normal(8, 300, seed=1)
    first = packed.of(weight)
    assert first is not weight and packed.of(weight) is first
    weight.add_(1)
    torch.testing.assert_close(linear(x, weight, None, packed), F.linear(x, weight), rtol=0, atol=2e-3)
    weight.data = normal(400, 300, seed=3)
    torch.testing.assert_close(linear(x, weight, None, packed), F.linear(x, weight), rtol=0, atol=2e-4)
    weight.requires_grad_(True)
    assert packed.of(weight) is weight


@needs_packing
def test_sampling_with_packed_weights_gives_the_same_answers(monkeypatch):
    """The weights of one base are packed and those of an equal one are not, since they exceed the limit; a copy of the
    model packs its own weights."""
    prompts = [np.arange(5 + i, 25 + i, dtype=np.int32) for i in range(4)]
    config = SamplingConfig(max_tokens=6, stop_at_eos=False)

    def run(engine: Engine) -> tuple[list, np.ndarray]:
        adapter = Adapter(engine.linear_layers, LoraConfig(rank=4), seed=1)
        owners = [adapter.snapshot("a"), None]
        requests = [Request(ids, 4, config, owners[i % 2], seed=i) for i, ids in enumerate(prompts)]
        answers = [answer for group in Sampler(engine).sample_all(requests) for answer in group]
        return [a.token_ids.tolist() for a in answers], np.concatenate([a.logprobs for a in answers])

    engine = wide_lm()
    ids, logps = run(engine)
    packed = [layer for layer in engine.linear_layers.values() if "packed_weight" in vars(layer)]
    assert packed and all(layer.packed_weight._packed is not None for layer in packed)
    twin = copy.deepcopy(packed[0])
    assert twin.packed_weight is not packed[0].packed_weight and twin.packed_weight._packed is None
    assert set(engine.model.state_dict()) == set(wide_lm().model.state_dict())
    monkeypatch.setattr(linear_module, "MAX_PACKED_BYTES", 0)
    plain = wide_lm()
    plain_ids, plain_logps = run(plain)
    assert not any("packed_weight" in vars(layer) for layer in plain.linear_layers.values())
    assert ids == plain_ids
    np.testing.assert_allclose(logps, plain_logps, atol=1e-5)


def test_small_weights_are_not_packed():
    small = nn.Linear(64, 64)
    pack_weights([small])
    assert "packed_weight" not in vars(small)


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_of_low_rank_products_in_half_precision(bias):
    """float64 against finite differences; bfloat16 close to float64."""
    x, weight, a, b = normal(2, 5, 24), normal(16, 24), normal(4, 24), normal(16, 4)
    offset = normal(16) if bias else None
    double = [t.double().requires_grad_(t is not weight) for t in (x, weight, a, b)]
    wide = None if offset is None else offset.double()

    def out(x, weight, a, b, offset):
        return LowRankLinear.apply(x, weight, offset, a, b, 0.7)

    assert torch.autograd.gradcheck(lambda x, a, b: out(x, double[1], a, b, wide), (double[0], double[2], double[3]))
    expected = F.linear(double[0], double[1] + 0.7 * double[3] @ double[2], wide)
    torch.testing.assert_close(out(*double, wide), expected)

    half = [x.bfloat16().requires_grad_(), weight.bfloat16(), a.clone().requires_grad_(), b.clone().requires_grad_()]
    found = out(*half, None if offset is None else offset.bfloat16())
    assert found.dtype == torch.bfloat16
    (found * found).sum().backward()
    (expected * expected).sum().backward()
    for ours, theirs in ((half[i].grad, double[i].grad) for i in (0, 2, 3)):
        assert ours.dtype == (torch.bfloat16 if ours is half[0].grad else torch.float32)
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=0.05 * float(theirs.abs().max()))
