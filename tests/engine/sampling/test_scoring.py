"""Scores compared with transformers, the trainer and the sampler, with adapters of different ranks in one call."""

import numpy as np
import pytest
import torch
from helpers.small_models import plain_logps, random_adapter
from transformers import GraniteConfig, GraniteForCausalLM

from palestra.core.types import Sample
from palestra.engine.bases.model import Engine
from palestra.engine.forward import logits as chunks
from palestra.engine.lora.adapters import Adapter
from palestra.engine.lora.config import LoraConfig
from palestra.engine.sampling.request import Request
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.sampling.scoring import AlternativeDraws, ScoreRequest, score_prompts
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.engine.training.adapter_weights import AdapterWeights
from palestra.testing import tiny_lm, tiny_tokenizer


def prompts(count, seed=0):
    """Prompts of several lengths; each of the second half continues one of the first."""
    rng = np.random.default_rng(seed)
    first = [rng.integers(5, 250, int(rng.integers(2, 20))).astype(np.int32) for _ in range(count // 2)]
    return first + [np.concatenate([p, rng.integers(5, 250, 6).astype(np.int32)]) for p in first]


@pytest.fixture(scope="module")
def engine():
    return tiny_lm(2)


@pytest.fixture(scope="module")
def adapters(engine):
    configs = [
        LoraConfig(rank=4),
        LoraConfig(rank=9, alpha=3, target_modules=["q_proj", "down_proj"]),
        LoraConfig(rank=1, target_modules="v_proj"),
    ]
    return [random_adapter(engine, config, i) for i, config in enumerate(configs)]


def test_base_scores_equal_transformers(engine):
    ids = prompts(2)[1]
    targets = np.random.default_rng(1).integers(0, 272, (len(ids) - 1, 3))
    targets[2, 1] = targets[0, :] = -1
    (scores,) = score_prompts(engine, [ScoreRequest(ids, top_logprobs=5, targets=targets)])
    plain = plain_logps(engine, ids)[:-1]
    row = np.arange(len(ids) - 1)
    np.testing.assert_allclose(scores.logprobs, plain[row, ids[1:]], atol=2e-5)
    assert (scores.top_ids == np.argsort(-plain, 1)[:, :5]).all()
    np.testing.assert_allclose(scores.top_logprobs, -np.sort(-plain, 1)[:, :5], atol=2e-5)
    expected = np.where(targets < 0, 0, plain[row[:, None], targets])
    np.testing.assert_allclose(scores.target_logprobs, expected, atol=2e-5)
    assert scores.target_logprobs.shape == (len(ids) - 1, 3) and scores.logprobs.dtype == scores.target_logprobs.dtype


@pytest.mark.parametrize(("pack_tokens", "logits"), [(16384, 2**26), (40, 272 * 7), (1, 1)])
def test_mixed_adapter_scores_equal_each_trainer(engine, adapters, monkeypatch, pack_tokens, logits):
    """For any split of the prompts into passes and of the passes into rows; the same prompts with several adapters."""
    monkeypatch.setattr(chunks, "MAX_LOGITS", logits)
    owners = [*adapters, None]
    snapshots = [a.snapshot(f"a{i}") if a else None for i, a in enumerate(owners)]
    asked = [(ids, i % 4) for i, ids in enumerate(prompts(12))] + [
        (ids, (i + 1) % 4) for i, ids in enumerate(prompts(12))
    ]
    found = score_prompts(engine, [ScoreRequest(ids, snapshots[o]) for ids, o in asked], pack_tokens=pack_tokens)
    for o, adapter in enumerate(owners):
        mine = [(ids, scores) for (ids, owner), scores in zip(asked, found, strict=True) if owner == o]
        zeros = [np.zeros(len(ids) - 1, np.float32) for ids, _ in mine]
        samples = [Sample(ids[:1], ids[1:], z, z) for (ids, _), z in zip(mine, zeros, strict=True)]
        # B = 0: equals the base
        trainer = AdapterWeights(engine, adapter or Adapter(engine.linear_layers, LoraConfig(), seed=0))
        for (_, scores), logps in zip(mine, trainer.logprobs(samples), strict=True):
            np.testing.assert_allclose(scores.logprobs, logps, atol=1e-4)


def test_scores_equal_sampler_logprobs(engine, adapters):
    rng = np.random.default_rng(3)
    snapshots = [*(a.snapshot() for a in adapters), None]
    requests = [
        Request(
            rng.integers(5, 250, 9 + i).astype(np.int32), 2, SamplingConfig(max_tokens=7), s, seed=i, top_logprobs=3
        )
        for i, s in enumerate(snapshots)
    ]
    sampled = [
        (r, a) for r, answers in zip(requests, Sampler(engine).sample_all(requests), strict=True) for a in answers
    ]
    questions = [
        ScoreRequest(np.concatenate([r.prompt_ids, a.token_ids]), r.adapter, top_logprobs=3) for r, a in sampled
    ]
    for (request, answer), scores in zip(sampled, score_prompts(engine, questions), strict=True):
        first = len(request.prompt_ids) - 1
        np.testing.assert_allclose(scores.logprobs[first:], answer.logprobs, atol=1e-4)
        np.testing.assert_allclose(scores.top_logprobs[first:], answer.top_logprobs, atol=1e-4)
        assert (scores.top_ids[first:] == answer.top_ids).mean() > 0.9  # except for near ties


def test_each_request_returns_only_what_it_requested(engine):
    ids = prompts(2)[0]
    plain, top, single = score_prompts(
        engine, [ScoreRequest(ids), ScoreRequest(ids, top_logprobs=2), ScoreRequest(ids[:1], top_logprobs=2)]
    )
    assert plain.top_ids.shape == plain.top_logprobs.shape == (len(ids) - 1, 0) and plain.target_logprobs is None
    assert top.top_ids.shape == (len(ids) - 1, 2)
    np.testing.assert_allclose(plain.logprobs, top.logprobs)
    assert single.logprobs.shape == (0,) and single.top_ids.shape == (0, 2)  # the first token has no score
    assert score_prompts(engine, []) == []


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_drawn_alternatives_follow_the_models_distribution(engine, monkeypatch, temperature):
    """Of an adapter's prompt that shares its beginning with another; rows of logits are read in several parts."""
    monkeypatch.setattr(chunks, "MAX_LOGITS", 3 * engine.vocab_size)
    short, long = prompts(2)
    count = 4000
    requests = []
    for seed, ids in enumerate((short, long)):
        requests.append(ScoreRequest(ids, draws=AlternativeDraws(count, temperature, seed)))
    first, second = score_prompts(engine, requests)
    assert first.drawn_ids.shape == (len(short) - 1, count) and second.drawn_ids.shape == (len(long) - 1, count)
    assert (first.drawn_ids[0] != second.drawn_ids[0]).mean() > 0.5  # one position, two seeds
    logps_PV = plain_logps(engine, long)[: len(long) - 1]
    scaled_PV = logps_PV / temperature
    wanted_PV = np.exp(scaled_PV - np.logaddexp.reduce(scaled_PV, -1, keepdims=True))
    for drawn, wanted, logps, read in zip(second.drawn_ids, wanted_PV, logps_PV, second.drawn_logprobs, strict=True):
        shares = np.bincount(drawn, minlength=len(wanted)) / count
        # a total variation of n draws is below sqrt(V / n) / 2 on average
        assert np.abs(shares - wanted).sum() / 2 < 0.7 * np.sqrt(len(wanted) / count)
        np.testing.assert_allclose(read, logps[drawn], atol=2e-5)  # at temperature 1, whatever they were drawn at
    (again,) = score_prompts(engine, requests[:1])
    np.testing.assert_array_equal(again.drawn_ids, first.drawn_ids)


def test_alternatives_at_temperature_zero_are_the_likeliest_tokens(engine):
    (scores,) = score_prompts(
        engine, [ScoreRequest(prompts(2)[1], top_logprobs=1, draws=AlternativeDraws(3, 0.0, seed=1))]
    )
    np.testing.assert_array_equal(scores.drawn_ids, scores.top_ids.repeat(3, 1))


def test_logits_include_scaling_after_the_head():
    """Granite divides its logits by a constant."""
    torch.manual_seed(0)
    shape = {"vocab_size": 272, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2, "logits_scaling": 4.0, "initializer_range": 0.5}
    model = GraniteForCausalLM(GraniteConfig(**shape, attn_implementation="palestra")).eval().requires_grad_(False)
    ids, engine = prompts(2)[0], Engine(model, tiny_tokenizer(), "granite")
    expected = plain_logps(engine, ids)[np.arange(len(ids) - 1), ids[1:]]
    np.testing.assert_allclose(score_prompts(engine, [ScoreRequest(ids)])[0].logprobs, expected, atol=2e-5)


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (ScoreRequest(np.zeros(0, np.int32)), "at least one token"),
        (ScoreRequest(np.array([1, 272])), "ids from 0 to 271"),
        (ScoreRequest(np.array([-1, 2])), "ids from 0 to 271"),
        (ScoreRequest(np.ones(513, np.int32)), "context length, 512"),
        (ScoreRequest(np.ones(3, np.int32), top_logprobs=273), "0 to 272"),
        (ScoreRequest(np.ones(3, np.int32), targets=np.ones((3, 1), np.int64)), "targets of 3x1"),
        (ScoreRequest(np.ones(3, np.int32), targets=np.ones(2, np.int64)), "targets of 2"),
        (ScoreRequest(np.ones(3, np.int32), targets=np.full((2, 1), 272)), "or -1 for none"),
        (ScoreRequest(np.ones(3, np.int32), targets=np.full((2, 1), -2)), "or -1 for none"),
    ],
)
def test_invalid_score_requests_are_refused_with_the_reason(engine, question, message):
    with pytest.raises(ValueError, match=message):
        score_prompts(engine, [ScoreRequest(np.ones(3, np.int32)), question])
