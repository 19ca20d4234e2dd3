"""Samplers that record their decoding steps, and requests for them.

On a CPU nothing is recorded: instead of a replay, a step is computed again on the same tensors.
"""

import numpy as np
import torch
from helpers.tolerances import LOGPROB_ATOL

from palestra.engine.cuda.decode_graphs import DecodeGraphs
from palestra.engine.lora.adapters import Adapter
from palestra.engine.lora.config import LoraConfig
from palestra.engine.sampling.cached_batch import CachedBatch
from palestra.engine.sampling.request import Request
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.testing import TINY_SHAPE

SHAPE = TINY_SHAPE | {"initializer_range": 0.2}


def compute_again(compute):
    """Stands for a recorded graph: repeats the computation, writing to the same tensors."""
    result = compute().clone()
    return lambda: result.copy_(compute()), result


def recording(engine, record=compute_again, **options):
    """A sampler that records its decoding steps, and its recorder."""
    sampler = Sampler(engine, **options)
    graphs = DecodeGraphs(engine, record)
    limits = {"keep_tokens": 65536, "prefill_tokens": 8192}
    batch = CachedBatch(engine, cache_bytes=options.get("cache_bytes"), graphs=graphs, **limits)
    sampler.batch = sampler.scheduler.batch = batch
    return sampler, graphs


def snapshots(engine, *ranks):
    found = []
    for seed, rank in enumerate(ranks):
        adapter = Adapter(engine.linear_layers, LoraConfig(rank=rank), seed=seed)
        with torch.no_grad():
            for _, b in adapter.weights.values():
                b.normal_(0, 0.3)
        found.append(adapter.snapshot(f"adapter-{seed}"))
    return found


def requests(adapters, count=6, tokens=40, **sampling):
    rng = np.random.default_rng(0)
    return [
        Request(
            rng.integers(5, 250, 5 + 23 * i).astype(np.int32),
            1 + i % 3,
            SamplingConfig(max_tokens=tokens - 5 * (i % 2), **sampling),
            adapters[i % len(adapters)],
            seed=i,
        )
        for i in range(count)
    ]


def assert_equal_answers(found, expected, atol=LOGPROB_ATOL):
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=atol)
