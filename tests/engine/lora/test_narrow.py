"""The last layer computes only the rows whose logits are needed, with unchanged results."""

import copy

import numpy as np
import pytest
import torch
from helpers.tolerances import GRADIENTS
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from palestra.core.losses import cross_entropy_loss
from palestra.core.types import Sample
from palestra.engine.bases.model import Engine
from palestra.engine.cache.cached_attention import PrefillLayout
from palestra.engine.cache.kv_cache import KVCache
from palestra.engine.forward.tree_attention import TreeLayout, build_forest
from palestra.engine.lora.adapters import Adapter
from palestra.engine.lora.config import LoraConfig
from palestra.engine.lora.routes import AdapterStack, MultiAdapterRoute, SingleAdapterRoute
from palestra.engine.training.adapter_weights import AdapterWeights
from palestra.testing import tiny_lm, tiny_tokenizer

SHAPE = {
    "vocab_size": 272,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 4,
}
KINDS = ["llama", "qwen2", "qwen3", "gemma", "phi3", "olmo2", "gpt_neox"]


def random_model(kind: str) -> PreTrainedModel:
    """A small model with no weight, norm or bias at its initial value."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SHAPE, **({"head_dim": 8} if kind in ("qwen3", "gemma") else {}))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    return model


def narrow_and_plain(kind: str) -> tuple[Engine, PreTrainedModel]:
    """An engine, and a copy of its model for transformers' own forward."""
    model = random_model(kind)
    plain = copy.deepcopy(model)
    model.set_attn_implementation("palestra")
    return Engine(model, tiny_tokenizer(), kind), plain


def conversations() -> list[Sample]:
    """Siblings, and a later turn of one of them: its answer follows tokens whose logits are not needed."""
    rng = np.random.default_rng(0)
    prompt, answers = rng.integers(5, 250, 12), rng.integers(5, 250, (3, 4))
    later = np.concatenate([prompt, answers[1], rng.integers(5, 250, 6)])
    pairs = [*((prompt, answer) for answer in answers), (later, rng.integers(5, 250, 3))]
    return [Sample(p, a, np.zeros(len(a), np.float32), np.ones(len(a), np.float32)) for p, a in pairs]


def forest_inputs(engine: Engine) -> tuple[torch.Tensor, torch.Tensor, TreeLayout]:
    forest = build_forest([np.concatenate([s.prompt_ids, s.token_ids]) for s in conversations()])
    return engine.tensor(forest.ids_S), engine.tensor(forest.positions_S), TreeLayout(forest, engine.device)


def randomised(engine: Engine, config: LoraConfig, seed: int) -> Adapter:
    adapter = Adapter(engine.linear_layers, config, seed=seed)
    with torch.no_grad():
        for _, b in adapter.weights.values():
            b.normal_(0, 0.05, generator=torch.Generator().manual_seed(seed))
    return adapter


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_and_gradients_equal_plain_transformers(kind):
    engine, plain = narrow_and_plain(kind)
    trainer, samples, total = AdapterWeights(engine, None), conversations(), 0.0
    for s, logp in zip(samples, trainer.logprobs(samples), strict=True):
        ids = torch.tensor(np.concatenate([s.prompt_ids, s.token_ids]))[None]
        logp_TV = torch.log_softmax(plain(ids[:, :-1], use_cache=False).logits[0], -1)[len(s.prompt_ids) - 1 :]
        expected = logp_TV.gather(1, torch.tensor(s.token_ids)[:, None])[:, 0]
        np.testing.assert_allclose(logp, expected.detach(), atol=2e-5)
        total = total - expected.sum() / sum(len(s.token_ids) for s in samples)
    total.backward()
    trainer.forward_backward(samples, cross_entropy_loss)
    for ours, theirs in zip(engine.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, **GRADIENTS)


@pytest.mark.parametrize("layers", [1, 3])
def test_selected_rows_have_unchanged_logits_and_gradients(layers):
    engine = tiny_lm(1, num_hidden_layers=layers)
    adapter = randomised(engine, LoraConfig(rank=3), 1)
    ids_S, positions_S, layout = forest_inputs(engine)
    keep_M = torch.randperm(len(ids_S), generator=torch.Generator().manual_seed(0))[:7].sort().values
    found = []
    for kept, asked in ((keep_M, slice(None)), (torch.arange(len(ids_S)), keep_M)):
        logits_MV = engine.logits(ids_S, positions_S, layout, SingleAdapterRoute(adapter), kept)[asked]
        found.append((logits_MV, *torch.autograd.grad(logits_MV.square().sum(), adapter.parameters())))
    for narrow, whole in zip(*found, strict=True):
        torch.testing.assert_close(narrow, whole, atol=2e-5, rtol=1e-4)


def test_last_layer_computes_only_keys_and_values_for_unselected_rows():
    engine = tiny_lm(2)
    ids_S, positions_S, layout = forest_inputs(engine)
    rows: dict[str, list[int]] = {}
    for name, module in engine.linear_layers.items():
        seen = rows.setdefault(name, [])
        module.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0].shape[1]))
    engine.logits(ids_S, positions_S, layout, None, torch.tensor([3, 9]))
    every = len(ids_S)
    assert all(rows[name] == [every] for name in rows if ".layers.0." in name)
    assert rows["model.layers.1.self_attn.k_proj"] == rows["model.layers.1.self_attn.v_proj"] == [every, 2]
    assert all(rows[f"model.layers.1.{name}"] == [2] for name in ("self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"))


def test_prefill_keeps_the_last_row_of_each_group_per_adapter():
    """Two adapters, one of them twice, and the bare base; one prompt's first tokens are already in the cache."""
    engine = tiny_lm(3)
    adapters = [
        randomised(engine, LoraConfig(rank=2), 1),
        randomised(engine, LoraConfig(rank=5, target_modules="q_proj"), 2),
    ]
    owners = [adapters[0], adapters[1], adapters[1], None]
    rng = np.random.default_rng(2)
    prompts = [rng.integers(5, 250, n) for n in (9, 4, 13, 6)]
    stack = AdapterStack([adapter.snapshot() for adapter in adapters], engine.linear_layers)
    cache = KVCache(2, 2, 16, engine.device, engine.dtype)
    slots = cache.allocate_prompts([len(prompt) for prompt in prompts], [1, 1, 9, 1])  # in two pools

    def prefill(starts: list[int], ends: list[int], counts: list[int]) -> torch.Tensor:
        for slot, end in zip(slots, ends, strict=True):
            slot.length = end
        layout = PrefillLayout(slots, np.array(starts))
        ids = np.concatenate([prompt[a:b] for prompt, a, b in zip(prompts, starts, ends, strict=True)])
        return engine.logits(
            engine.tensor(ids), layout.positions, layout, MultiAdapterRoute(stack, counts), layout.last_N
        )

    with torch.no_grad():
        prefill([0, 0, 0, 0], [1, 1, 5, 1], [1, 6])
        found = prefill([0, 0, 5, 0], [9, 4, 13, 6], [9, 12])
        for prompt, owner, logits_V in zip(prompts, owners, found, strict=True):
            ids_S, every = engine.tensor(prompt), torch.arange(len(prompt))
            layout, route = (
                TreeLayout(build_forest([prompt]), engine.device),
                SingleAdapterRoute(owner) if owner else None,
            )
            expected = engine.logits(ids_S, every, layout, route, every)[-1]
            torch.testing.assert_close(logits_V, expected, atol=2e-5, rtol=1e-4)
