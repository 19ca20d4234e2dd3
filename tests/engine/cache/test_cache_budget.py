"""A cache with a budget: answers wait or are preempted, all complete, and equal those of a cache without a budget."""

import numpy as np
import pytest
import torch
from helpers.tolerances import LOGPROB_ATOL
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.engine.bases.model import Engine
from palestra.engine.cache.kv_cache import KVCache
from palestra.engine.cache.kv_pages import CacheFull, CacheMemory
from palestra.engine.cache.prefix_store import PrefixStore, StoredPart
from palestra.engine.lora.adapters import Adapter, Snapshot
from palestra.engine.lora.config import LoraConfig
from palestra.engine.sampling.request import Request
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.testing import tiny_lm

TOKEN = 2 * 2 * 2 * 16 * 8  # bytes of a token of tiny_lm: layers, keys and values, heads, width, float64
GIB = 2**30


@pytest.fixture(scope="module")
def engine() -> Engine:
    """In float64: float32's rounding, which depends on the shapes of a pass, changes one token in some ten thousand."""
    engine = tiny_lm(4)
    engine.model.double()
    engine.dtype = torch.float64
    return engine


@pytest.fixture(scope="module")
def snapshots(engine: Engine) -> list[Snapshot | None]:
    adapters = [Adapter(engine.linear_layers, LoraConfig(rank=4), seed=seed) for seed in (1, 2)]
    with torch.no_grad():
        for adapter in adapters:
            for _, b in adapter.weights.values():
                b.normal_(0, 0.05, generator=torch.Generator().manual_seed(5))
    return [*(a.snapshot(f"a{i}") for i, a in enumerate(adapters)), None]


def make_request(seed: int, n: int, tokens: int, prompt: int, **given: object) -> Request:
    ids = np.random.default_rng(seed).integers(5, 250, prompt).astype(np.int32)
    return Request(ids, n, SamplingConfig(max_tokens=tokens, stop_at_eos=seed % 2 == 0), seed=seed, **given)


def mixed_requests(snapshots: list[Snapshot | None]) -> list[Request]:
    """Groups of several adapters, prompt and answer lengths, some of which end early."""
    rng = np.random.default_rng(0)
    return [
        make_request(
            i, int(rng.integers(1, 7)), int(rng.integers(20, 120)), int(rng.integers(4, 90)), adapter=snapshots[i % 3]
        )
        for i in range(6)
    ]


def peak_of(sampler: Sampler, requests: list[Request]) -> int:
    """The most bytes that the cache held after a pass."""
    most = 0
    for request in requests:
        sampler.submit(request, lambda outcome: None)
    while sampler.step():
        most = max(most, sampler.batch.memory.used)
    return most


def drive(sampler: Sampler, requests: list[Request]) -> list:
    """Outcomes of `requests`; asserts that the cache keeps to its budget after every pass."""
    outcomes: list = [None] * len(requests)
    for i, request in enumerate(requests):
        sampler.submit(request, lambda outcome, i=i: outcomes.__setitem__(i, outcome))
    while sampler.step():
        memory, cache = sampler.batch.memory, sampler.batch.cache
        assert memory.used <= memory.limit
        assert memory.used == cache.bytes + sampler.batch.prefix_store.bytes
    return outcomes


def check_equal(found: list, expected: list) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert not isinstance(ours, Exception), ours
        for a, b in zip(ours, theirs, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist() and a.stop_reason == b.stop_reason
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=LOGPROB_ATOL)


@pytest.mark.parametrize("share", [pytest.param(0.5, marks=pytest.mark.slow), 0.2])
def test_half_of_the_cache_budget_gives_the_same_answers(engine, snapshots, share):
    requests = mixed_requests(snapshots)
    expected = Sampler(engine, cache_bytes=GIB).sample_all(requests)
    budget = int(share * peak_of(Sampler(engine, cache_bytes=GIB), requests))
    sampler = Sampler(engine, cache_bytes=budget)
    check_equal(drive(sampler, requests), expected)
    assert sampler.batch.counts["preempted_answers"] > 0
    assert not sampler.batch.groups and not sampler.batch.rows and not sampler.waiting


@pytest.mark.slow
def test_siblings_are_preempted_and_resume(engine):
    """Siblings outgrow the budget together; preempted ones are computed again from their tokens."""
    requests = [make_request(1, 12, 200, 40)]
    expected = Sampler(engine, cache_bytes=GIB).sample_all(requests)
    sampler = Sampler(engine, cache_bytes=5 * 256 * TOKEN)
    check_equal(drive(sampler, requests), expected)
    assert sampler.batch.counts["preempted_answers"] > 0
    sampled = sum(len(answer.token_ids) for answer in expected[0])
    assert sampler.batch.counts["sampled_tokens"] == sampled, "preempted answers keep their tokens"


def test_answer_beyond_the_whole_budget_fails_alone(engine):
    requests = [make_request(1, 2, 300, 20), make_request(3, 2, 30, 20), make_request(5, 1, 30, 450)]
    expected = Sampler(engine, cache_bytes=GIB).sample_all(requests)
    outcomes = drive(Sampler(engine, cache_bytes=400 * TOKEN), requests)
    check_equal(outcomes[1:2], expected[1:2])
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome, CacheFull) and "kv_cache_gib" in str(outcome)


def test_stored_prefixes_are_evicted_for_answers(engine):
    first = [make_request(i, 2, 40, 30, keep_kv=True) for i in range(6)]
    sampler = Sampler(engine, cache_bytes=6 * 256 * TOKEN)
    drive(sampler, first)
    assert sampler.batch.prefix_store.num_tokens
    requests = [make_request(1, 5, 200, 40)]
    check_equal(drive(sampler, requests), Sampler(engine, cache_bytes=GIB).sample_all(requests))


def test_preempted_request_can_be_cancelled(engine):
    sampler, outcomes = Sampler(engine, cache_bytes=5 * 256 * TOKEN), {}
    groups = [
        sampler.submit(make_request(seed, 4, 200, 40), lambda outcome, seed=seed: outcomes.__setitem__(seed, outcome))
        for seed in (1, 3, 5)
    ]
    while not (preempted := [group for group in groups if group.preempted]):
        assert sampler.step()
    sampler.cancel(preempted[0])
    while sampler.step():
        pass
    assert len(outcomes) == 2 and not any(isinstance(outcome, Exception) for outcome in outcomes.values())
    sampler.release_memory()
    assert sampler.batch.memory.used == 0


@pytest.mark.slow
def test_out_of_memory_in_a_pass_preempts_answers(engine, snapshots, monkeypatch):
    """The machine has less memory than the budget: passes of more than 9 rows fail."""
    requests = mixed_requests(snapshots)
    expected = Sampler(engine).sample_all(requests)
    forward = Engine.logits

    def limited(self, ids_S, positions_S, layout, route, keep_M):
        if len(keep_M) == len(ids_S) > 9:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, ids_S, positions_S, layout, route, keep_M)

    monkeypatch.setattr(Engine, "logits", limited)
    sampler = Sampler(engine)
    limit = sampler.batch.memory.limit
    check_equal(drive(sampler, requests), expected)
    assert sampler.batch.counts["preempted_answers"] > 0 and sampler.batch.memory.limit == limit


def test_long_prompts_are_prefilled_in_chunks(engine, snapshots):
    requests = [
        make_request(1, 2, 8, 301, adapter=snapshots[0], keep_kv=True),
        make_request(3, 2, 8, 20),
        make_request(5, 1, 8, 64),
    ]
    expected = Sampler(engine).sample_all(requests)
    sampler, passes = Sampler(engine, prefill_tokens=64), []
    forward = sampler.batch._fill_once
    sampler.batch._fill_once = lambda slots, starts, ids, groups: (
        passes.append(sum(map(len, ids))) or forward(slots, starts, ids, groups)
    )
    check_equal(drive(sampler, requests), expected)
    assert max(passes) == 64 and sum(passes) == 301 + 20 + 64
    later = np.concatenate([requests[0].prompt_ids, expected[0][1].token_ids, np.arange(5, 105)]).astype(np.int32)
    follow = [Request(later, 2, SamplingConfig(max_tokens=8), snapshots[0], seed=9)]
    check_equal(drive(sampler, follow), Sampler(engine).sample_all(follow))
    assert sampler.batch.counts["reused_tokens"]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 60)), max_size=40), st.integers(40, 400))
def test_full_cache_refuses_without_losing_sequences(steps, tokens):
    """Compared with a plain dict: whatever is refused, the budget holds and every sequence stays as it was written."""
    memory = CacheMemory(tokens * TOKEN)
    store = PrefixStore(1000, memory)
    cache = KVCache(2, 2, 16, torch.device("cpu"), torch.float64, memory=memory, store=store)
    slots, written, number = [], {}, 0
    for verb, size in steps:
        try:
            if verb <= 1 or not slots:
                allocate = cache.allocate_answers if verb == 0 else lambda n: cache.allocate_prompts(n, [2, 9])
                new = allocate([size, 1 + size // 2])
                for slot, length in zip(new, (size, 1 + size // 2), strict=True):
                    number += 1
                    slot.length = length
                    cache.write(slot, 0, torch.full((2, 2, 2, length, 16), number, dtype=torch.float64))
                    written[slot] = (number, length)
                slots += new
            elif verb == 2:
                gone = slots[: 1 + size % len(slots)]
                slots = slots[len(gone) :]
                cache.free(gone)
            elif verb == 3:
                cache.regroup(slots, [1 + (size * i) % 70 for i in range(len(slots))])
            elif verb == 4:
                part = StoredPart(torch.zeros(2, 2, 2, size, 16, dtype=torch.float64))
                store.put(size, np.arange(size), [part])
            else:
                cache.grow(slots)
        except CacheFull:
            assert not store._entries, "stored prefixes are dropped first"
        assert memory.used <= memory.limit
        assert memory.used == cache.bytes + store.bytes
        for slot in slots:
            value, length = written[slot]
            assert slot.length == length and bool((cache.read(slot) == value).all())
    cache.free(slots)
    cache.free_empty_pools()
    store.clear()
    assert memory.used == 0
