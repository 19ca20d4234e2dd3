"""Adapters replaced while their requests are sampled: the version of each token, and its probability under that
version."""

import numpy as np
import pytest
from helpers.adapter_versions import adapter_versions
from helpers.tolerances import LOGPROB_ATOL

from palestra.core.types import Sample
from palestra.engine.bases.model import Engine
from palestra.engine.lora.adapters import Snapshot
from palestra.engine.sampling.request import Completion, Request
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.sampling.scoring import answer_logprobs
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.testing import tiny_lm, tiny_tokenizer


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_lm(4)


@pytest.fixture(scope="module")
def versions(engine: Engine) -> list[Snapshot]:
    return adapter_versions(engine, 3)


def ask(seed: int, adapter: Snapshot | None, *, n: int = 3, tokens: int = 24, **more: object) -> Request:
    prompt = np.random.default_rng(seed).integers(5, 250, 10 + seed).astype(np.int32)
    return Request(prompt, n, SamplingConfig(max_tokens=tokens, stop_at_eos=False), adapter, seed, **more)


def sample_with_updates(
    sampler: Sampler, requests: list[Request], versions: list[Snapshot], *, every: int, recompute: bool
) -> list[list[Completion]]:
    """The answers to `requests`, whose adapter is replaced by the next version after each `every` passes."""
    outcomes: list = [None] * len(requests)
    for i, request in enumerate(requests):
        sampler.submit(request, lambda outcome, i=i: outcomes.__setitem__(i, outcome))
    passes, now = 0, 0
    while sampler.step():
        passes += 1
        if passes % every == 0 and now + 1 < len(versions):
            sampler.replace_adapter(versions[now], versions[now + 1], recompute=recompute)
            now += 1
    return outcomes


def own_logprobs(engine: Engine, request: Request, answer: Completion, versions: list[Snapshot]) -> np.ndarray:
    """Log-probabilities [T] of the answer's tokens, each under the version recorded for it."""
    sample = Sample(request.prompt_ids, answer.token_ids, answer.logprobs, answer.logprobs)
    by_name = {v.name: answer_logprobs(engine, v, [sample])[0] for v in versions}
    ends = [*(start for start, _ in answer.adapters[1:]), len(answer.token_ids)]
    parts = [by_name[name][start:end] for (start, name), end in zip(answer.adapters, ends, strict=True)]
    return np.concatenate(parts)


@pytest.mark.parametrize("max_num_seqs", [64, 4])
def test_each_token_has_the_probability_of_the_version_that_sampled_it(engine, versions, max_num_seqs):
    """Also if siblings and whole requests start later (`max_num_seqs`), and beside requests of another adapter."""
    sampler = Sampler(engine, max_num_seqs=max_num_seqs)
    requests = [*(ask(i, versions[0]) for i in range(4)), ask(1, versions[0], tokens=5), ask(7, None)]
    outcomes = sample_with_updates(sampler, requests, versions, every=7, recompute=True)
    starts = set()
    for request, answers in zip(requests[:-1], outcomes[:-1], strict=True):
        for answer in answers:
            starts.add(tuple(name for _, name in answer.adapters))
            expected = own_logprobs(engine, request, answer, versions)
            np.testing.assert_allclose(answer.logprobs, expected, atol=LOGPROB_ATOL, rtol=0)
    assert ("walker@0", "walker@1", "walker@2") in starts
    assert (
        ("walker@2",) if max_num_seqs == 4 else ("walker@0",)
    ) in starts  # started after the last replacement, or ended before the first
    (alone,) = Sampler(engine).sample_all([requests[-1]])
    for ours, theirs in zip(outcomes[-1], alone, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist() and ours.adapters == ((0, ""),)
    assert not sampler.has_requests


def test_kept_keys_and_values_mix_versions(engine, versions):
    """Tokens before the replacement are those of the old version; later ones attend to its keys and values."""
    requests = [ask(i, versions[0], keep_kv=True) for i in range(3)]
    sampler = Sampler(engine)
    outcomes = sample_with_updates(sampler, requests, versions[:2], every=9, recompute=False)
    gaps = []
    for request, answers in zip(requests, outcomes, strict=True):
        for answer in answers:
            assert [name for _, name in answer.adapters] == ["walker@0", "walker@1"]
            gap = np.abs(answer.logprobs - own_logprobs(engine, request, answer, versions[:2]))
            start = answer.adapters[1][0]
            assert gap[:start].max() < LOGPROB_ATOL
            gaps.append(gap[start:].max())
    assert min(gaps) > 10 * LOGPROB_ATOL
    assert sampler.batch.prefix_store.num_tokens == 0  # no later turn continues from keys and values of two versions


def test_tokens_sampled_before_a_replacement_are_kept(engine, versions):
    requests = [ask(i, versions[0]) for i in range(3)]
    old = Sampler(engine).sample_all(requests)
    for recompute in (True, False):
        new = sample_with_updates(Sampler(engine), requests, versions[:2], every=9, recompute=recompute)
        for ours, theirs in zip(new, old, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                start = one.adapters[1][0]
                assert start >= 8 and one.token_ids[:start].tolist() == other.token_ids[:start].tolist()


def test_a_later_turn_continues_from_recomputed_keys_and_values(engine, versions):
    sampler = Sampler(engine)
    request = ask(3, versions[0], n=1, keep_kv=True)
    ((answer,),) = sample_with_updates(sampler, [request], versions[:2], every=9, recompute=True)
    ids = np.concatenate([request.prompt_ids, answer.token_ids, [7, 8, 9]]).astype(np.int32)
    before = sampler.batch.counts["reused_tokens"]
    later = Request(ids, 1, request.sampling, versions[1], 5)
    ((second,),) = sampler.sample_all([later])
    assert sampler.batch.counts["reused_tokens"] - before == len(ids) - 4
    np.testing.assert_allclose(
        second.logprobs, own_logprobs(engine, later, second, versions), atol=LOGPROB_ATOL, rtol=0
    )


@pytest.mark.parametrize("recompute", [True, False])
def test_replacement_on_the_plain_path(versions, recompute):
    engine = tiny_lm(4)
    requests = [ask(i, versions[0]) for i in range(2)]
    expected = sample_with_updates(Sampler(engine), requests, versions, every=7, recompute=recompute)
    plain = Engine(tiny_lm(4).model, tiny_tokenizer(), "plain", plain=True)
    outcomes = sample_with_updates(Sampler(plain), requests, versions, every=7, recompute=recompute)
    for ours, theirs in zip(outcomes, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.adapters == other.adapters and one.token_ids.tolist() == other.token_ids.tolist()
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=LOGPROB_ATOL, rtol=0)


def test_finished_requests_and_other_snapshots_are_not_replaced(engine, versions):
    sampler = Sampler(engine)
    sampler.sample_all([ask(0, versions[0])])
    assert sampler.replace_adapter(versions[0], versions[1], recompute=True) == 0
    sampler.submit(ask(1, versions[2]), lambda outcome: None)
    sampler.step()
    assert sampler.replace_adapter(versions[0], versions[1], recompute=True) == 0
    assert sampler.replace_adapter(versions[2], versions[1], recompute=False) == 1
