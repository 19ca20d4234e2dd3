"""Quantised bases: equal to the dequantised weights, equal to bitsandbytes, and trainable from a config."""

import asyncio
import copy
import importlib.util

import numpy as np
import pytest
import torch
from helpers.tolerances import GRADIENTS
from torch import nn
from transformers import AutoModelForCausalLM

from palestra.core.config import validate
from palestra.core.losses import cross_entropy_loss
from palestra.core.optimizers import Muon
from palestra.core.types import Sample
from palestra.engine.bases.model import Engine
from palestra.engine.check.self_check import choose_engine
from palestra.engine.forward.quantized import NF4_LEVELS, QuantizedLinear, quantize_model
from palestra.engine.lora.adapters import Adapter
from palestra.engine.lora.config import LoraConfig
from palestra.engine.sampling.request import Request
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.engine.training.adapter_weights import AdapterWeights
from palestra.text.build.engines import Engines
from palestra.text.build.memory_plan import plan_memory
from palestra.text.config import TextConfig
from palestra.text.learners.lm_config import FullPolicyConfig, LoraPolicyConfig

IDS = np.random.default_rng(0).integers(5, 90, 24).astype(np.int32)
SAMPLE = Sample(IDS[:4], IDS[4:], np.zeros(20, np.float32), np.ones(20, np.float32))
KINDS = ["nf4", "int8"]
bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="make test-bitsandbytes installs it"
)


def random_layer(inputs=192, outputs=80):
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs)


@pytest.mark.peers
@bitsandbytes
@pytest.mark.parametrize("kind", KINDS)
def test_dequantised_weights_equal_bitsandbytes(kind):
    import bitsandbytes.functional as bnb

    layer = random_layer()
    found = QuantizedLinear(layer, kind).dequantize()
    if kind == "nf4":
        codes, state = bnb.quantize_4bit(layer.weight.data, quant_type="nf4", blocksize=64)
        expected = bnb.dequantize_4bit(codes, state)
    else:
        codes, scales, _ = bnb.int8_vectorwise_quant(layer.weight.data.half())
        expected = codes.float() * scales[:, None] / 127
    gaps = (found - expected).abs()
    if kind == "nf4":
        assert gaps.max() < 1e-6
        return
    # bitsandbytes reads weights in half precision: the quotient of a weight and its row's maximum has an error of two
    # roundings, of 2^-11 each, so that a weight may get the next code if it is that near to halfway between two.
    weight = layer.weight.detach().abs()
    step = weight.amax(1, keepdim=True) / 127
    levels = weight / step
    is_halfway = (levels - levels.floor() - 0.5).abs() <= 2 * 2**-11 * levels
    assert gaps.max() < 1.05 * step.max() and is_halfway[gaps > step / 2].all() and is_halfway.float().mean() < 0.15


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_the_nearest_levels(kind):
    layer = random_layer(inputs=50, outputs=7)  # 350 values: the last block of 64 is not full
    found = QuantizedLinear(layer, kind).dequantize()
    if kind == "int8":
        step = layer.weight.abs().amax(1, keepdim=True) / 127
        assert ((found - layer.weight).abs() <= step / 2 + 1e-7).all()
        torch.testing.assert_close(found, (layer.weight / step).round() * step)
    else:
        scale = torch.cat([b.abs().max().expand(len(b)) for b in layer.weight.detach().flatten().split(64)]).view(7, 50)
        levels = torch.tensor(NF4_LEVELS)
        nearest = ((layer.weight / scale)[..., None] - levels).abs().argmin(-1)
        torch.testing.assert_close(found, levels[nearest] * scale)


def test_nf4_takes_four_and_a_half_bits_and_int8_eight():
    layer = random_layer(inputs=1024, outputs=256)
    sizes = {kind: sum(t.numel() * t.element_size() for t in QuantizedLinear(layer, kind).buffers()) for kind in KINDS}
    weights = {kind: QuantizedLinear(layer, kind).weight.numel() for kind in KINDS}
    assert 8 * (sizes["nf4"] + weights["nf4"]) / layer.weight.numel() == 4.5
    assert 8 * (sizes["int8"] + weights["int8"]) / layer.weight.numel() == pytest.approx(8, rel=0.01)


def dequantised_engine(base, kind):
    """An engine of ordinary layers with the dequantised weights."""
    whole = Engine.load(str(base), device="cpu")
    quantised = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    quantize_model(quantised, kind)
    layers = {name: m for name, m in quantised.named_modules() if isinstance(m, QuantizedLinear)}
    assert {name.rsplit(".", 1)[-1] for name in layers} >= {"q_proj", "down_proj"} and "lm_head" not in layers
    for name, layer in layers.items():
        whole.model.get_submodule(name).weight.data.copy_(layer.dequantize())
    return whole


def shaken_adapter(engine, config):
    adapter = Adapter(engine.linear_layers, config, seed=1, model=engine.model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in adapter.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.1)
    return adapter


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_training_and_sampling_equal_the_dequantised_weights(base, kind, options):
    engines = [Engine.load(str(base), device="cpu", quantize=kind), dequantised_engine(base, kind)]
    results = []
    for engine in engines:
        adapter = shaken_adapter(engine, LoraConfig(rank=3, **options))
        trainer = AdapterWeights(engine, adapter)
        logps = trainer.logprobs([SAMPLE])[0]
        trainer.forward_backward([SAMPLE], cross_entropy_loss)
        results.append([torch.as_tensor(logps), *(w.grad for w in adapter.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, **GRADIENTS)
    plain = AdapterWeights(Engine.load(str(base), device="cpu"), None).logprobs([SAMPLE])[0]
    assert np.abs(results[0][0].numpy() - plain).max() > 1e-3  # otherwise the test would prove nothing


@pytest.mark.parametrize("kind", KINDS)
def test_the_self_check_refuses_a_quantised_base_whose_passes_differ(base, kind):
    """The engine's layers have other weights than the model had when it computed its own results."""
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").eval().requires_grad_(False)
    quantize_model(model, kind)
    first = next(m for m in model.modules() if isinstance(m, QuantizedLinear))
    first.scales.mul_(1.25)  # weights that were not checked before
    right = copy.deepcopy(first.scales)

    def build(of, plain):
        if of is model:
            first.scales.copy_(right * 3)
        return Engine(of, None, "broken", plain=plain)

    with pytest.raises(ValueError, match="would not be those of transformers"):
        choose_engine(model, "broken", build)


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_policy_trains_and_its_sampler_agrees(base, kind, check_score):
    config = LoraPolicyConfig(base=str(base), quantize=kind, lr=1e-2, optimizer=Muon())
    engines = Engines("cpu", 8)
    learner = engines.build_learner("a", config, 0)
    assert learner.sampler is engines.build_learner("b", config, 1).sampler  # they share one base
    losses = []

    async def step():
        losses.append((await learner.forward_backward([SAMPLE], cross_entropy_loss))["loss"])
        await learner.optim_step()

    for _ in range(8):
        asyncio.run(step())
    check_score(losses[0] - losses[-1])
    request = Request(IDS[:6], 2, SamplingConfig(max_tokens=5, stop_at_eos=False), learner.weights.snapshot("a@8"), 3)
    for completion in asyncio.run(learner.sampler.sample(request)):
        zeros = np.zeros(5, np.float32)
        logps = learner.weights.logprobs([Sample(IDS[:6], completion.token_ids, completion.logprobs, zeros)])[0]
        np.testing.assert_allclose(completion.logprobs, logps, atol=1e-4)


def test_a_full_model_is_not_quantised(base):
    with pytest.raises(ValueError, match="quantised weights are not trained themselves"):
        validate(FullPolicyConfig, {"type": "full", "base": str(base), "quantize": "nf4"})


@pytest.mark.parametrize("kind", KINDS)
def test_the_memory_plan_counts_quantised_weights(base, kind):
    config = {
        "env": {"type": "sokoban"},
        "policies": {"default": {"type": "lora", "base": str(base), "quantize": kind, "dtype": "float32"}},
    }
    planned = next(p.bytes for p in plan_memory(validate(TextConfig, config)).parts if p.name.startswith("weights"))
    model = Engine.load(str(base), device="cpu", quantize=kind).model
    tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers())}
    held = sum(t.numel() * t.element_size() for t in tensors.values())
    assert planned == pytest.approx(held, rel=0.05)  # the plan leaves out int8's scales of narrow layers
