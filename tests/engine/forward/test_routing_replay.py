"""Routing replay compared with transformers' own forward pass, whose routers are given the same experts."""

import numpy as np
import pytest
import torch
from helpers.small_models import write_models
from helpers.tolerances import LOGPROB_ATOL
from transformers import AutoModelForCausalLM, GptOssConfig, MixtralConfig, OlmoeConfig, Qwen3MoeConfig

from palestra.core.losses import cross_entropy_loss
from palestra.core.types import Sample
from palestra.engine.bases.model import Engine
from palestra.engine.forward.routing_replay import OWN_CHOICE
from palestra.engine.lora.adapters import Adapter
from palestra.engine.lora.config import LoraConfig
from palestra.engine.training.adapter_weights import AdapterWeights
from palestra.testing import tiny_lm

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": 4,
}
TWO_OF_FOUR = {"num_experts": 4, "num_experts_per_tok": 2}
QWEN = SHAPE | TWO_OF_FOUR | {"head_dim": 8, "moe_intermediate_size": 24}
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(**QWEN, norm_topk_prob=True),
    "dense_first": Qwen3MoeConfig(**QWEN, norm_topk_prob=False, mlp_only_layers=[0]),
    "olmoe": OlmoeConfig(**SHAPE, **TWO_OF_FOUR),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": GptOssConfig(**SHAPE, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=64),
}
SHARED = [11, 12, 13, 14, 15]  # a prompt of two answers
ANSWERS = ([21, 22, 23], [31, 32, 33, 34])


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("moe"), CONFIGS, seed=1, noise=0.2)


def routers_of(model):
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


def transformers_pass(folder, name, ids, experts=None):
    """Log-probabilities [N - 1] of each next token, and the chosen experts [N, L, K] of one sequence. `experts` [N, L,
    K] replace each router's own choice."""
    model, used = AutoModelForCausalLM.from_pretrained(folder / name, attn_implementation="eager").float(), []

    def choose(module, inputs, output, number):
        logits, weights, own = output
        if experts is not None:
            own = torch.as_tensor(experts[:, number])
            chances = torch.softmax(logits, -1).gather(1, own)
            scale = name in ("qwen3_moe", "mixtral", "gpt_oss")
            weights = chances / chances.sum(-1, keepdim=True) if scale else chances
        used.append(own.numpy())
        return logits, weights, own

    for number, router in enumerate(routers_of(model)):
        router.register_forward_hook(lambda m, i, o, number=number: choose(m, i, o, number))
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    logps = logits[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return logps.numpy(), np.stack(used, 1)


def sample(answer, experts=None):
    count = len(answer)
    ids = [np.array(part, np.int32) for part in (SHARED, answer)]
    return Sample(*ids, np.zeros(count, np.float32), np.ones(count, np.float32), routed_experts=experts)


def shifted(experts):
    """Experts other than these, with two different ones for each token."""
    return (experts + 1) % 4


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.few(2)
def test_passes_use_the_given_experts(bases, name):
    """Two answers to one prompt in one packed pass. The first has other experts from its first token on, so that the
    prompt is still shared."""
    engine = Engine.load(str(bases / name), device="cpu")
    trainer = AdapterWeights(engine, Adapter(engine.linear_layers, LoraConfig(rank=2), seed=0))
    own = [transformers_pass(bases, name, SHARED + list(answer))[1][:-1] for answer in ANSWERS]
    plain = trainer.logprobs([sample(answer) for answer in ANSWERS])
    replayed = trainer.logprobs([sample(*pair) for pair in zip(ANSWERS, own, strict=True)])
    for one, other in zip(plain, replayed, strict=True):
        np.testing.assert_allclose(one, other, atol=LOGPROB_ATOL)
    changed = own[0].copy()
    changed[len(SHARED) :] = shifted(own[0][len(SHARED) :])
    found = trainer.logprobs([sample(ANSWERS[0], changed), sample(ANSWERS[1], own[1])])
    ids = SHARED + list(ANSWERS[0])
    whole = np.concatenate([changed, changed[-1:]])  # the last token's experts do not matter
    expected = transformers_pass(bases, name, ids, whole)[0][len(SHARED) - 1 :]
    np.testing.assert_allclose(found[0], expected, atol=LOGPROB_ATOL)
    np.testing.assert_allclose(found[1], plain[1], atol=LOGPROB_ATOL)
    assert np.abs(found[0] - plain[0])[1:].min() > 10 * LOGPROB_ATOL


def test_samples_without_experts_keep_their_own(bases):
    engine = Engine.load(str(bases / "qwen3_moe"), device="cpu")
    trainer = AdapterWeights(engine, None)
    own = transformers_pass(bases, "qwen3_moe", SHARED + list(ANSWERS[0]))[1][:-1]
    partly = np.where(np.arange(len(own))[:, None, None] < 3, OWN_CHOICE, own)
    plain = trainer.logprobs([sample(answer) for answer in ANSWERS])
    found = trainer.logprobs([sample(ANSWERS[0], partly), sample(ANSWERS[1])])
    for one, other in zip(plain, found, strict=True):
        np.testing.assert_allclose(one, other, atol=LOGPROB_ATOL)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_only_the_given_experts_have_gradients(bases, checkpointing):
    """Only the given experts have gradients; the router has one through their weights."""
    engine = Engine.load(str(bases / "qwen3_moe"), device="cpu")
    trainer = AdapterWeights(engine, None, checkpointing=checkpointing)
    experts = np.broadcast_to(np.array([0, 2]), (len(SHARED) + 2, 3, 2)).astype(np.int32)
    trainer.forward_backward([sample(ANSWERS[0], experts)], cross_entropy_loss)
    for layer in engine.model.model.layers:
        by_expert = layer.mlp.experts.gate_up_proj.grad.abs().amax((1, 2))
        assert (by_expert > 0).tolist() == [True, False, True, False]
        assert layer.mlp.gate.weight.grad.abs().max() > 0


def test_experts_of_all_layers_fit_a_base_with_dense_layers(bases):
    """Some servers return experts for every layer, also for dense ones."""
    engine = Engine.load(str(bases / "dense_first"), device="cpu")
    trainer = AdapterWeights(engine, None)
    own = transformers_pass(bases, "dense_first", SHARED + list(ANSWERS[0]))[1][:-1]
    assert own.shape[1:] == (2, 2)
    padded = np.concatenate([np.zeros_like(own[:, :1]), shifted(own)], 1)
    one, other = (trainer.logprobs([sample(ANSWERS[0], experts)])[0] for experts in (shifted(own), padded))
    np.testing.assert_array_equal(one, other)


def test_experts_that_do_not_fit_are_refused(bases):
    engine = Engine.load(str(bases / "qwen3_moe"), device="cpu")
    short = np.zeros((len(SHARED), 3, 2), np.int32)
    with pytest.raises(ValueError, match=r"of shape \[5, 3, 2\] for an answer with 7 tokens before its last"):
        AdapterWeights(engine, None).logprobs([sample(ANSWERS[0], short)])
    with pytest.raises(ValueError, match=r"the routers of .* cannot be given a choice"):
        AdapterWeights(tiny_lm(), None).logprobs([sample(ANSWERS[0], short)])
