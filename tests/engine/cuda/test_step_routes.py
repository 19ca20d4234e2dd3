"""Products that recorded decoding steps share: linear layers of the same input, and rotary embeddings."""

import sys

import numpy as np
import pytest
import torch
from helpers.recorded_steps import SHAPE, assert_equal_answers, recording, requests, snapshots
from transformers import AutoModelForCausalLM, CohereConfig, LlamaConfig, Qwen2Config

from palestra.core.losses import cross_entropy_loss
from palestra.core.types import Sample
from palestra.engine.bases.model import Engine
from palestra.engine.check.self_check import choose_engine
from palestra.engine.cuda.rotary import NAME, Rotary, fused_rotary, rotate, watched_rotary
from palestra.engine.lora.adapters import Adapter
from palestra.engine.lora.config import LoraConfig
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.training.adapter_weights import AdapterWeights
from palestra.testing import tiny_tokenizer


def load(config) -> Engine:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            weight.data.normal_(0, 0.3)  # B starts at 0
    family = config.model_type
    return choose_engine(model, family, lambda of, plain: Engine(of, tiny_tokenizer(), family, plain=plain))


def gradients(engine: Engine) -> list[torch.Tensor]:
    """The gradients of an adapter in a pass over one answer."""
    adapter = Adapter(engine.linear_layers, LoraConfig(rank=4), seed=0)
    with torch.no_grad():
        for _, b in adapter.weights.values():
            b.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    answer = np.arange(20, 40, dtype=np.int32)
    samples = [Sample(np.arange(5, 15, dtype=np.int32), answer, np.zeros(20), np.ones(20, np.float32))]
    AdapterWeights(engine, adapter).forward_backward(samples, cross_entropy_loss)
    return [weight.grad for pair in adapter.weights.values() for weight in pair]


@pytest.mark.parametrize("config", [LlamaConfig(**SHAPE), Qwen2Config(**SHAPE)], ids=["llama", "biases"])
def test_layers_of_one_input_share_a_product_and_train_unchanged(config):
    engine, other = load(config), load(config)
    before = {name: weight.clone() for name, weight in engine.model.named_parameters()}
    for ranks in ((4,), (4, 8)):
        sampler, graphs = recording(engine)
        asked = requests([*snapshots(engine, *ranks), None])
        assert_equal_answers(sampler.sample_all(asked), Sampler(other).sample_all(asked))
        assert graphs.num_repeated > 10 and not graphs.refusal
        joined = {layers.names for layers in graphs._joined.values()}
    names = {tuple(name.rpartition(".")[2] for name in group) for group in joined}
    assert names == {("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")} and len(joined) == 4
    layer = engine.model.model.layers[1].mlp
    assert layer.gate_proj.weight.untyped_storage().data_ptr() == layer.up_proj.weight.untyped_storage().data_ptr()
    for name, weight in engine.model.named_parameters():
        torch.testing.assert_close(weight, before[name], rtol=0, atol=0)
    for ours, theirs in zip(gradients(engine), gradients(other), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_samplers_of_one_base_share_the_joined_weights():
    engine, places = load(LlamaConfig(**SHAPE)), []
    samplers = [recording(engine) for _ in range(2)]
    asked = requests([None])
    for _ in range(2):
        for sampler, _ in samplers:
            sampler.sample_all(asked)
            places.append([weight.data_ptr() for weight in engine.model.parameters()])
    assert places[0] == places[1] == places[2] == places[3]
    assert not any(graphs.refusal for _, graphs in samplers)


def test_joined_base_is_saved_with_separate_layers(tmp_path):
    engine = load(LlamaConfig(**SHAPE))
    sampler, graphs = recording(engine)
    sampler.sample_all(requests([None]))
    assert graphs._joined
    engine.model.save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    for ours, theirs in zip(engine.model.parameters(), saved.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def angles(rows: int, width: int, *, paired: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [1, R, D] of random angles: equal for halves, or for pairs of neighbours."""
    angle = torch.rand(1, rows, width // 2, generator=torch.Generator().manual_seed(0)) * 6
    angle = angle.repeat_interleave(2, -1) if paired else torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shape", [(4, 2, 16), (9, 3, 64), (2, 1, 80)])
def test_rotary_kernel_equals_complex_rotation(shape, device):
    heads, kv_heads, width = shape
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, 5, n, width, generator=generator).transpose(1, 2) for n in (heads, kv_heads))
    cos, sin = angles(5, width, paired=False)
    turn = torch.complex(cos, sin)[:, None, :, : width // 2]
    for found, x in zip(rotate(*(x.to(device) for x in (q, k, cos, sin))), (q, k), strict=True):
        turned = torch.complex(*x.chunk(2, -1)) * turn
        torch.testing.assert_close(found.cpu(), torch.cat([turned.real, turned.imag], -1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("config", "agrees"), [(LlamaConfig, True), (CohereConfig, False)])
def test_rotary_function_of_neighbouring_pairs_is_not_replaced(config, agrees, monkeypatch):
    """Cohere rotates pairs of neighbours: the kernel, which rotates halves, is not used there."""
    model = AutoModelForCausalLM.from_config(config(**SHAPE))
    code = sys.modules[type(model).__module__]
    own = getattr(code, NAME)
    monkeypatch.setattr(code, NAME, own.own if isinstance(own, Rotary) else own)
    own = getattr(code, NAME)
    q, k = torch.randn(2, 1, 4, 5, 16)
    cos, sin = angles(5, 16, paired=not agrees)
    expected = own(q, k, cos, sin)
    with torch.no_grad(), watched_rotary(model):
        found = getattr(code, NAME)
        assert isinstance(found, Rotary) and found.own is own
        torch.testing.assert_close(found(q, k, cos, sin), expected)
    assert found.agrees == agrees
    monkeypatch.setattr(found, "own", None)
    with fused_rotary(), torch.no_grad():
        if agrees:
            torch.testing.assert_close(found(q, k, cos, sin), expected)
        else:
            with pytest.raises(TypeError):  # the model's own function is called
                found(q, k, cos, sin)
    monkeypatch.setattr(found, "own", own)
    q.requires_grad_()
    found(q, k, cos, sin)[0].sum().backward()  # training uses the model's own function
    assert q.grad is not None
