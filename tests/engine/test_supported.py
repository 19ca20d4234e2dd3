"""Architectures that the gate lets through, packed and cached, against transformers' own forward; others refused."""

import copy
import json

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama4.modeling_llama4 import Llama4Router, Llama4TextConfig

from palestra.engine.lora import Adapter, LoraConfig
from palestra.engine.models import Engine
from palestra.engine.sampler import Request, Sampler, SamplingConfig
from palestra.engine.supported import SUPPORTED_MODEL_TYPES, check_supported
from palestra.engine.trainer import Trainer
from palestra.losses.policy import cross_entropy_loss
from palestra.testing import tiny_tokenizer
from palestra.types import Sample

SHAPE = {
    "vocab_size": 272,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "eos_token_id": 4,
}
# Given only to configs that have the key.
OPTIONAL = {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": None,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
STRETCHED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10_000.0}
ROPES = {"apertus": ROPE, "ministral3": STRETCHED | {"llama_4_scaling_beta": 0.1}, "qwen3": STRETCHED}


def random_model(kind: str, **changes: object) -> PreTrainedModel:
    """A small model with no weight, norm or bias left at the value that it is initialised to."""
    default = AutoConfig.for_model(kind)
    optional = {key: value for key, value in OPTIONAL.items() if hasattr(default, key)}
    if kind in ROPES:
        optional["rope_parameters"] = ROPES[kind]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SHAPE, **(optional | changes))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    return model


def expected_logprobs(plain: PreTrainedModel, prompt_ids: np.ndarray, token_ids: np.ndarray) -> torch.Tensor:
    """Log-probabilities [T] of an answer by one unpadded eager forward of transformers."""
    ids = torch.tensor([[*prompt_ids.tolist(), *token_ids.tolist()]])
    logits = plain(ids[:, :-1], use_cache=False).logits[0].float()
    answers = ids[0, len(prompt_ids) :, None]
    return torch.log_softmax(logits, -1)[len(prompt_ids) - 1 :].gather(1, answers)[:, 0]


def play(engine: Engine) -> list[Sample]:
    """Sampled answers to prompts of several lengths in one batch, siblings each, and a later turn on a kept prefix."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, 250, n).astype(np.int32) for n in (9, 40, 120)]
    sampler = Sampler(engine)
    requests = [Request(p, 3, SamplingConfig(max_tokens=12), seed=len(p), keep_kv=True) for p in prompts]
    answers = sampler.sample_all(requests)
    later = np.concatenate([prompts[-1], answers[-1][1].token_ids, rng.integers(5, 250, 5)]).astype(np.int32)
    requests.append(Request(later, 2, SamplingConfig(max_tokens=6), seed=3))
    answers += sampler.sample_all(requests[-1:])
    assert sampler.batch.counts["reused_tokens"]
    return [
        Sample(request.prompt_ids, answer.token_ids, answer.logprobs, np.ones(len(answer.token_ids), np.float32))
        for request, group in zip(requests, answers, strict=True)
        for answer in group
    ]


@pytest.mark.filterwarnings("ignore:.*xIELU.*")
@pytest.mark.parametrize("kind", sorted(SUPPORTED_MODEL_TYPES))
def test_packed_and_cached_passes_equal_transformers(kind: str):
    model = random_model(kind)
    plain = copy.deepcopy(model)
    model.set_attn_implementation("palestra")
    check_supported(model, kind)
    engine = Engine(model, tiny_tokenizer(), kind)
    samples = play(engine)
    expected = [expected_logprobs(plain, s.prompt_ids, s.token_ids) for s in samples]
    trained = Trainer(engine, Adapter(engine.linear_layers, LoraConfig(), seed=0)).logprobs(samples)
    for sample, packed, own in zip(samples, trained, expected, strict=True):
        np.testing.assert_allclose(sample.logprobs, own.detach(), atol=2e-5, err_msg="sampled, from the cache")
        np.testing.assert_allclose(packed, own.detach(), atol=2e-5, err_msg="trained, packed")

    trainer = Trainer(engine, None)
    trainer.forward_backward(samples, cross_entropy_loss)
    (-sum(own.sum() for own in expected) / sum(len(own) for own in expected)).backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, atol=2e-5, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("mistral", {"sliding_window": 16}, "sliding window of 16 tokens"),
        ("phi3", {"sliding_window": 16}, "sliding window of 16 tokens"),
        ("mixtral", {"sliding_window": 16}, "sliding window of 16 tokens"),
        ("starcoder2", {"sliding_window": 16}, "sliding window of 16 tokens"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, "sliding_attention"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "conv"),
        ("gemma2", {}, "caps attention logits"),
        ("diffllama", {}, "'diffllama' has not been compared"),
        ("doge", {}, "'doge' has not been compared"),
        ("llama4_text", {"layer_types": ["chunked_attention", "full_attention"]}, "chunked_attention"),
        ("llama", {"rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 2.0}}, "longest sequence of a batch"),
    ],
)
def test_what_was_not_compared_is_refused_with_the_reason(kind: str, changes: dict[str, object], reason: str):
    with pytest.raises(ValueError, match=reason):
        check_supported(random_model(kind, **changes), "mine")


def test_a_window_as_wide_as_the_context_is_no_window():
    check_supported(random_model("mistral", sliding_window=SHAPE["max_position_embeddings"]), "mine")


def test_linear_layers_with_a_forward_of_their_own_are_refused():
    model = random_model("llama")
    model.model.layers[0].mlp.up_proj = Llama4Router(Llama4TextConfig(hidden_size=32, num_local_experts=48))
    with pytest.raises(ValueError, match="Llama4Router"):
        check_supported(model, "mine")


def test_a_folder_that_is_not_supported_is_refused_at_load(tmp_path):
    random_model("mistral").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    Engine.load(str(tmp_path), device="cpu")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": 32}))
    with pytest.raises(ValueError, match=r"cannot run .* sliding window of 32 tokens.*Use one of the architectures"):
        Engine.load(str(tmp_path), device="cpu")
