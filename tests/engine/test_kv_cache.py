"""The cache's memory follows what is live, whatever came before, and no place holds another's keys and values."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.engine.kv_cache import KVCache
from palestra.engine.sampler import Request, Sampler, SamplingConfig
from palestra.testing import tiny_lm

TOKEN = 2 * 2 * 2 * 16 * 4  # bytes of a token of tiny_lm: layers, keys and values, heads, width, float32


def cache():
    return KVCache(2, 2, 16, torch.device("cpu"), torch.float32)


def request(seed, n, tokens, prompt=8, **given):
    ids = np.random.default_rng(seed).integers(5, 250, prompt).astype(np.int32)
    return Request(ids, n, SamplingConfig(max_tokens=tokens, stop_at_eos=False), seed=seed, **given)


def peak(sampler, requests):
    """The most bytes that the cache had, in multiples of what the live sequences needed at most."""
    needed = held = 0
    for r in requests:
        sampler.submit(r, lambda outcome: None)
    while sampler.step():
        prompts = {group.prompt.slot for group in sampler.batch.groups if group.prompt}
        live = [*prompts, *(row.slot for row in sampler.batch.rows)]
        needed = max(needed, sum(max(16, slot.length) for slot in live) * TOKEN)
        held = max(held, sampler.batch.cache.bytes)
    return held / needed


@pytest.fixture(scope="module")
def engine():
    return tiny_lm(4)


def test_small_requests_after_a_large_one_take_little_memory(engine):
    """A large group, then many groups of one, then a middling group: rows are not padded to the largest group."""
    sampler = Sampler(engine)
    assert peak(sampler, [request(0, 128, 8)]) < 5
    assert peak(sampler, [request(i, 1, 8) for i in range(120)]) < 5
    assert peak(sampler, [request(1, 64, 8)]) < 5
    assert peak(sampler, [request(0, 128, 8), *(request(i, 1, 8) for i in range(120))]) < 5
    sampler.release_memory()
    assert sampler.batch.cache.bytes == 0


def test_long_sequence_does_not_pad_short_ones(engine):
    short = [request(i, 1, 4, prompt=6) for i in range(100)]
    assert peak(Sampler(engine), [request(500, 1, 4, prompt=500), *short]) < 5
    assert peak(Sampler(engine), [request(500, 1, 300), *short]) < 5


def test_answers_beyond_max_rows_are_sampled_in_parts_unchanged(engine):
    """The prompt is computed once, at most `max_rows` answers are live, and how they are split does not show."""
    whole = Sampler(engine).sample_all([request(3, 40, 12)])[0]
    sampler, outcome = Sampler(engine, max_rows=7), []
    sampler.submit(request(3, 40, 12), outcome.extend)
    most = 0
    while sampler.step():
        most = max(most, len(sampler.batch.rows))
    assert most == 7
    assert [a.token_ids.tolist() for a in outcome] == [a.token_ids.tolist() for a in whole]
    assert sampler.batch.counts["prefill_tokens"] == 8


def test_branching_answers_are_cached_for_the_next_turn(engine):
    sampler = Sampler(engine, max_rows=2)
    first = sampler.sample_all([request(5, 5, 6, keep_kv=True)])[0]
    for answer in first:
        on = np.concatenate([request(5, 1, 6).prompt_ids, answer.token_ids, [9]]).astype(np.int32)
        later = Request(on, 1, SamplingConfig(max_tokens=5, stop_at_eos=False), seed=1)
        (warm,), (cold,) = sampler.sample_all([later])[0], Sampler(engine).sample_all([later])[0]
        assert warm.token_ids.tolist() == cold.token_ids.tolist()
    assert sampler.batch.counts["reused_tokens"] >= 5 * 12


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60)), max_size=40))
def test_slots_keep_their_contents(steps):
    """Against a plain dict: sequences come, grow, move and go."""
    pools, slots, written, number = cache(), [], {}, 0
    for verb, size in steps:
        if verb <= 1 or not slots:
            new = pools.allocate_answers([size]) if verb == 0 else pools.allocate_prompts([size], [1 + size % 30])
            new[0].length = size
            number += 1
            new[0].kv_L2hTD[:] = number
            slots += new
            written[new[0]] = (number, size)
        elif verb == 2:
            gone = slots[: 1 + size % len(slots)]
            slots = slots[len(gone) :]
            pools.free(gone)
        elif verb == 3:
            pools.regroup(slots, [1 + (size * i) % 70 for i in range(len(slots))])
        else:
            pools.grow(slots)
            assert all(slot.length < slot.pool.capacity for slot in slots)
        for slot in slots:
            value, length = written[slot]
            assert slot.kv_L2hTD.shape[-2] == length and bool((slot.kv_L2hTD == value).all())
            assert slot.pool.slots[slot.index] is slot
    pools.free(slots)
    pools.free_empty_pools()
    assert pools.bytes == 0
