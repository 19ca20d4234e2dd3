"""The engine compared with transformers and with itself: packed and unpacked, cached and plain, several adapters and
one."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.small_models import random_adapter
from helpers.tolerances import GRADIENTS, LOGPROB_ATOL

from palestra.core.losses import clipped_policy_loss, cross_entropy_loss
from palestra.core.types import Sample
from palestra.engine.bases.model import Engine
from palestra.engine.forward.tree_attention import build_forest
from palestra.engine.lora.adapters import Adapter
from palestra.engine.lora.config import LoraConfig
from palestra.engine.lora.routes import SingleAdapterRoute
from palestra.engine.sampling.request import Request
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.sampling.token_sampling import SamplingConfig, counter_uniform, sample_tokens
from palestra.engine.training.adapter_weights import AdapterWeights
from palestra.engine.training.micro_batch import pack_samples
from palestra.testing import tiny_lm


def sample(prompt, answer, logprobs=None, advantage=1.0):
    n = len(answer)
    return Sample(
        np.array(prompt, np.int32),
        np.array(answer, np.int32),
        np.zeros(n, np.float32) if logprobs is None else np.asarray(logprobs, np.float32),
        np.full(n, advantage, np.float32),
    )


def plain_logits(engine: Engine, ids: list[int]) -> torch.Tensor:
    """Next-token logits [T, V] by transformers' own eager attention, without palestra's layouts."""
    engine.model.config._attn_implementation = "eager"
    try:
        with torch.no_grad():
            return engine.model(torch.tensor([ids]), use_cache=False).logits[0]
    finally:
        engine.model.config._attn_implementation = "palestra"


def test_build_forest_shares_prefixes_and_keeps_every_path():
    sequences = [np.array(s) for s in ([1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2, 3, 4], [7, 8], [1, 2])]
    forest = build_forest(sequences)
    for sequence, path in zip(sequences, forest.paths, strict=True):
        assert forest.ids_S[path].tolist() == sequence.tolist()
        assert forest.positions_S[path].tolist() == list(range(len(sequence)))
    assert len(forest.ids_S) == 8  # 1 2 | 3 4 | 5 6 | 7 8


def test_packed_logprobs_equal_transformers():
    engine = tiny_lm(1)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, 250, n).tolist() for n in (9, 5, 17)]
    samples = [sample(p, rng.integers(5, 250, int(n)).tolist()) for p in prompts for n in rng.integers(1, 7, 4)]
    packed = AdapterWeights(engine, Adapter(engine.linear_layers, LoraConfig(), seed=0)).logprobs(samples)
    for s, logp in zip(samples, packed, strict=True):
        ids = [*s.prompt_ids.tolist(), *s.token_ids.tolist()]
        expected = torch.log_softmax(plain_logits(engine, ids[:-1]), -1)[len(s.prompt_ids) - 1 :]
        np.testing.assert_allclose(
            logp, expected.gather(1, torch.tensor(ids[len(s.prompt_ids) :])[:, None])[:, 0], atol=2e-5
        )


def test_sampler_and_trainer_agree_per_adapter_in_one_mixed_batch():
    engine = tiny_lm(2)
    adapters = [
        random_adapter(engine, LoraConfig(rank=4), 1),
        random_adapter(engine, LoraConfig(rank=9, alpha=3, target_modules=["q_proj", "down_proj"]), 2),
        None,
    ]
    rng = np.random.default_rng(1)
    sampler = Sampler(engine, max_num_seqs=20)  # fewer than the prompts: groups are admitted as others end
    requests, owners = [], []
    for i in range(24):
        owner = adapters[i % 3]
        prompt = rng.integers(5, 250, int(rng.integers(3, 30))).astype(np.int32)
        sampling = SamplingConfig(max_tokens=int(rng.integers(1, 12)))
        requests.append(Request(prompt, int(rng.integers(1, 6)), sampling, owner.snapshot() if owner else None, seed=i))
        owners.append(owner)
    # snapshots of one adapter share one version, as for a policy
    shared = [a.snapshot() if a else None for a in adapters]
    requests = [Request(r.prompt_ids, r.n, r.sampling, shared[i % 3], r.seed) for i, r in enumerate(requests)]
    results = sampler.sample_all(requests)
    for adapter in adapters:
        mine = [
            (r, a) for r, o, answers in zip(requests, owners, results, strict=True) if o is adapter for a in answers
        ]
        samples = [sample(r.prompt_ids, a.token_ids, a.logprobs) for r, a in mine]
        # B = 0: equals the base
        trainer = AdapterWeights(engine, adapter or Adapter(engine.linear_layers, LoraConfig(), seed=0))
        for (_, a), logp in zip(mine, trainer.logprobs(samples), strict=True):
            np.testing.assert_allclose(a.logprobs, logp, atol=1e-4)
    assert [len(r) for r in results] == [r.n for r in requests]


def test_snapshot_is_frozen_while_its_adapter_trains():
    engine = tiny_lm(3)
    adapter = random_adapter(engine, LoraConfig(), 0)
    snapshot = adapter.snapshot()
    before = {k: (a.clone(), b.clone()) for k, (a, b) in snapshot.weights.items()}
    with torch.no_grad():
        for w in adapter.parameters():
            w.add_(1.0)
    assert all(torch.equal(a, before[k][0]) and torch.equal(b, before[k][1]) for k, (a, b) in snapshot.weights.items())


def test_samples_do_not_depend_on_the_batch():
    engine = tiny_lm(4)
    rng = np.random.default_rng(3)
    requests = [
        Request(rng.integers(5, 250, 4 + i).astype(np.int32), 3, SamplingConfig(max_tokens=6), seed=100 + i)
        for i in range(8)
    ]
    together = Sampler(engine).sample_all(requests)
    alone = [Sampler(engine).sample_all([r])[0] for r in requests]
    for a, b in zip(together, alone, strict=True):
        assert [x.token_ids.tolist() for x in a] == [y.token_ids.tolist() for y in b]


def test_next_turn_reuses_the_cache_with_equal_samples():
    engine = tiny_lm(5)
    prompt = np.arange(10, 40, dtype=np.int32)
    sampler = Sampler(engine)
    first = sampler.sample_all([Request(prompt, 3, SamplingConfig(max_tokens=5), seed=1, keep_kv=True)])[0]
    later = np.concatenate([prompt, first[1].token_ids, np.array([50, 51, 52], np.int32)])
    request = Request(later, 2, SamplingConfig(max_tokens=5), seed=2)
    warm = sampler.sample_all([request])[0]
    cold = Sampler(engine).sample_all([request])[0]
    assert sampler.batch.counts["reused_tokens"] == len(prompt) + len(first[1].token_ids) - 1
    for a, b in zip(warm, cold, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=LOGPROB_ATOL)


def gradients(engine, adapter, samples, **options):
    trainer = AdapterWeights(engine, adapter, pack_tokens=options.pop("pack_tokens", 8192))
    if options.get("kl"):
        references = trainer.logprobs(samples, reference=True)
        samples = [replace(s, reference_logprobs=logprobs) for s, logprobs in zip(samples, references, strict=True)]
    metrics = trainer.forward_backward(samples, clipped_policy_loss, **options)
    result = [w.grad.clone() for w in trainer.parameters]
    for w in trainer.parameters:
        w.grad = None
    return result, metrics


@pytest.mark.parametrize("options", [{}, {"kl": 0.1, "entropy": 0.01}, {"pack_tokens": 40}])
def test_packed_gradients_equal_unpacked_ones(options):
    engine = tiny_lm(6)
    adapter = random_adapter(engine, LoraConfig(rank=3), 4)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(5, 250, 20).tolist() for _ in range(3)]
    samples = [
        sample(p, a := rng.integers(5, 9, int(rng.integers(2, 6))).tolist(), rng.normal(-5, 0.3, len(a)), rng.normal())
        for p in prompts
        for _ in range(5)
    ]
    packed, metrics = gradients(engine, adapter, samples, **options)
    tokens = sum(len(s.token_ids) for s in samples)
    plain = [torch.zeros_like(g) for g in packed]
    for s in samples:
        alone, _ = gradients(engine, adapter, [s], **{k: v for k, v in options.items() if k != "pack_tokens"})
        for total, g in zip(plain, alone, strict=True):
            total += g * len(s.token_ids) / tokens
    for a, b in zip(packed, plain, strict=True):
        torch.testing.assert_close(a, b, **GRADIENTS)
    assert np.isfinite(metrics["loss"])


def test_samples_without_gradient_count_in_the_mean_without_a_pass():
    """Gradient, loss and metrics of answers with advantages 1, 0, -1 are the same whether a pass is made for the second
    or not, except that metrics are means over the answers of a pass."""
    samples = [sample([5, 6], ids, advantage=a) for ids, a in (([7, 8], 1.0), ([9, 10, 11], 0.0), ([12], -1.0))]
    marked = [replace(s, has_gradient=bool(s.advantages.any())) for s in samples]
    found = []
    for batch in (samples, marked, [marked[0], marked[2]]):
        trainer = AdapterWeights(engine := tiny_lm(3), random_adapter(engine, LoraConfig(), 1))
        metrics = trainer.forward_backward(batch, clipped_policy_loss)
        found.append((torch.cat([p.grad.flatten() for p in trainer.parameters]), metrics))
    (whole, one), (skipped, other), (alone, third) = found
    torch.testing.assert_close(skipped, whole)
    torch.testing.assert_close(alone, whole * 2)  # of 3 tokens, not of 6
    assert other["loss"] == pytest.approx(one["loss"]) and other["loss"] != pytest.approx(third["loss"])
    assert other["entropy"] == pytest.approx(third["entropy"])


def test_packed_gradient_equals_plain_transformers():
    """Full weights, cross-entropy: palestra's packed forest against a plain causal forward, gradient by gradient."""
    engine = tiny_lm(7)
    rng = np.random.default_rng(6)
    prompt = rng.integers(5, 250, 12).tolist()
    samples = [sample(prompt, rng.integers(5, 250, 4).tolist()) for _ in range(3)]
    trainer = AdapterWeights(engine, None)
    trainer.forward_backward(samples, cross_entropy_loss)
    packed = [w.grad.clone() for w in trainer.parameters]
    for w in trainer.parameters:
        w.grad = None
    engine.model.config._attn_implementation = "eager"
    total = 0.0
    for s in samples:
        ids = torch.tensor([[*s.prompt_ids.tolist(), *s.token_ids.tolist()]])
        logp = torch.log_softmax(engine.model(ids[:, :-1], use_cache=False).logits[0], -1)
        total = total - logp[len(prompt) - 1 :].gather(1, ids[0, len(prompt) :, None]).sum() / 12
    total.backward()
    for ours, w in zip(packed, trainer.parameters, strict=True):
        torch.testing.assert_close(ours, w.grad, **GRADIENTS)


def test_target_rows_precede_their_tokens():
    forest, rows, targets = pack_samples([sample([5, 6], [7, 8]), sample([5, 6], [9])])
    assert forest.ids_S.tolist() == [5, 6, 7]
    assert [(int(forest.ids_S[r]), int(t)) for r, t in zip(rows, targets, strict=True)] == [(6, 7), (7, 8), (6, 9)]


def test_training_raises_the_probability_of_rewarded_answers(check_score):
    engine = tiny_lm(8)
    adapter = Adapter(engine.linear_layers, LoraConfig(), seed=0)
    trainer = AdapterWeights(engine, adapter)
    good, bad = sample([10, 11, 12], [20, 4]), sample([10, 11, 12], [30, 4], advantage=-1.0)
    from palestra.engine.training.adapter_weights import OptimConfig

    before = trainer.logprobs([good, bad])
    for _ in range(20):
        good.logprobs, bad.logprobs = trainer.logprobs([good, bad])
        trainer.forward_backward([good, bad], clipped_policy_loss)
        trainer.optim_step(OptimConfig(lr=3e-3))
    after = trainer.logprobs([good, bad])
    check_score(after[0].sum() - before[0].sum(), "rewarded")
    check_score(after[1].sum() - before[1].sum(), "punished")


def test_sample_tokens_matches_the_truncated_distribution():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(4000, 1)
    u = counter_uniform(np.arange(4000, dtype=np.uint64), np.zeros(4000, np.uint64), np.zeros(4000, np.uint64))
    tokens, logps, _ = sample_tokens(logits, [SamplingConfig()] * 4000, u)
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / 4000, [0.5, 0.3, 0.15, 0.05], atol=0.03)
    np.testing.assert_allclose(np.exp(logps), np.array([0.5, 0.3, 0.15, 0.05])[tokens], atol=LOGPROB_ATOL)
    assert set(sample_tokens(logits, [SamplingConfig(top_k=2)] * 4000, u)[0]) == {0, 1}
    assert set(sample_tokens(logits, [SamplingConfig(top_p=0.81)] * 4000, u)[0]) == {0, 1, 2}
    assert set(sample_tokens(logits, [SamplingConfig(temperature=0)] * 4000, u)[0]) == {0}


def test_stop_strings_end_answers():
    engine = tiny_lm(9)
    request = Request(np.array([40, 41, 42], np.int32), 8, SamplingConfig(max_tokens=200, stop=("e",)), seed=5)
    answers = Sampler(engine).sample_all([request])[0]
    ended = [a.token_ids for a in answers if a.stop_reason == "stop" and a.token_ids[-1] != 4]
    texts = [engine.tokenizer.decode(ids, skip_special_tokens=True) for ids in ended]
    assert texts and all(t.endswith("e") and t.count("e") == 1 for t in texts)


def test_prompt_beyond_the_context_is_refused_with_the_fix():
    with pytest.raises(ValueError, match="context length, 512"):
        Sampler(tiny_lm()).sample_all([Request(np.ones(510, np.int32), 1, SamplingConfig(max_tokens=8))])


def test_single_adapter_route_leaves_other_layers_alone():
    engine = tiny_lm()
    route = SingleAdapterRoute(Adapter(engine.linear_layers, LoraConfig(target_modules="q_proj"), seed=0))
    x, layer = torch.ones(1, 2, 64), engine.linear_layers["model.layers.0.mlp.up_proj"]
    torch.testing.assert_close(route.linear("model.layers.0.mlp.up_proj", x, layer), x @ layer.weight.T)
