"""The attention paths of a GPU, run on the CPU: repeated heads with a mask, and no mask for new prompts."""

import numpy as np
import pytest
import torch
from helpers.tolerances import GRADIENTS, LOGPROB_ATOL
from torch.nn import functional as F

from palestra.core.losses import cross_entropy_loss
from palestra.core.types import Sample
from palestra.engine.forward import sdpa
from palestra.engine.lora.adapters import Adapter
from palestra.engine.lora.config import LoraConfig
from palestra.engine.sampling.request import Request
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.engine.training.adapter_weights import AdapterWeights
from palestra.testing import tiny_lm


def test_repeated_heads_equal_grouped_query_attention():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 5, 8, generator=generator) for heads in (6, 2, 2))
    mask = torch.rand(2, 1, 5, 5, generator=generator) < 0.6
    mask |= torch.eye(5, dtype=torch.bool)
    repeated = F.scaled_dot_product_attention(q, sdpa.repeat_heads(k, 3), sdpa.repeat_heads(v, 3), mask, scale=0.3)
    torch.testing.assert_close(sdpa.grouped_attention(q, k, v, mask, 0.3), repeated)
    torch.testing.assert_close(repeated, F.scaled_dot_product_attention(q, k, v, mask, scale=0.3, enable_gqa=True))


def test_gpu_code_paths_give_equal_results(monkeypatch):
    """Prompts of several lengths, one of them in two parts, and siblings that share a prefix."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, 250, n).astype(np.int32) for n in (9, 40, 41, 120)]
    requests = [Request(p, 3, SamplingConfig(max_tokens=8), seed=len(p)) for p in prompts]

    def numbers() -> tuple[list, list[torch.Tensor]]:
        engine = tiny_lm(1, initializer_range=0.2)
        answers = Sampler(engine, prefill_tokens=100).sample_all(requests)
        samples = [
            Sample(r.prompt_ids, a.token_ids, a.logprobs, np.ones(len(a.token_ids), np.float32))
            for r, siblings in zip(requests, answers, strict=True)
            for a in siblings
        ]
        trainer = AdapterWeights(engine, Adapter(engine.linear_layers, LoraConfig(rank=4), seed=0))
        trainer.forward_backward(samples, cross_entropy_loss)
        return answers, [parameter.grad for parameter in trainer.parameters]

    answers, gradients = numbers()
    monkeypatch.setattr(sdpa, "uses_cuda", lambda tensor: True)
    called = []
    forward = F.scaled_dot_product_attention

    def watched(q, k, v, mask, *, is_causal, scale, enable_gqa):
        assert not (mask is not None and enable_gqa), "the math kernel"
        called.append(is_causal)
        return forward(q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)

    monkeypatch.setattr(sdpa.F, "scaled_dot_product_attention", watched)
    found, found_gradients = numbers()
    assert True in called and False in called
    for ours, theirs in zip(found, answers, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=LOGPROB_ATOL)
    for ours, theirs in zip(found_gradients, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, **GRADIENTS)


@pytest.mark.gpu
def test_attention_scores_are_not_kept_on_a_gpu():
    """Memory of the backward pass grows with the number of keys, not with pairs of queries and keys."""
    device = torch.device("cuda")
    q = torch.randn(1, 16, 4096, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(1, 4, 4096, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    mask = torch.ones(1, 1, 4096, 4096, device=device, dtype=torch.bool).tril()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sdpa.grouped_attention(q, k, v, mask, 0.125).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 16 * 4096 * 4096  # a byte per score
