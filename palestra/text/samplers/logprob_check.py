"""Compares log-probabilities of remote samplers with those of the local trainer before training starts.

Each server answers a few random prompts, under the bare base and under adapters with random weights, all in one batch;
the trainer then scores the same tokens. This detects a different base, an adapter that is not applied or is applied to
the wrong rows, a window of attention that one side does not have, and log-probabilities with a different definition.
Any of these would make the policy gradient wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from palestra.core.types import Sample
from palestra.engine.bases.model import Engine
from palestra.engine.check.probe import longest_span
from palestra.engine.lora.adapters import Adapter
from palestra.engine.lora.config import LoraConfig
from palestra.engine.sampling.request import Completion, Request, max_positions
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.engine.training.adapter_weights import AdapterWeights
from palestra.text.samplers.vllm import SamplerServer, VllmSampler

# counts per policy and prompt; lengths in tokens
NUM_PROMPTS = 2
COMPLETIONS_PER_PROMPT = 2
PROMPT_TOKENS = 12
COMPLETION_TOKENS = 8
MAX_LONG_PROMPT = 8192  # tokens of the prompt that goes past a base's windows: longer ones would take too long
ADAPTER_OUTPUT_RATIO = 0.1  # approximate size of a random adapter's output relative to its layer's output


class SampledPolicy(NamedTuple):
    """A policy that uses a remote sampler: its adapter config (None: the bare base) and its sampling parameters."""

    name: str
    lora: LoraConfig | None
    sampling: SamplingConfig


def check_logprobs(
    sampler: VllmSampler, engine: Engine, policies: Sequence[SampledPolicy], tolerance: float | None
) -> None:
    """Compares every server of `sampler` with the local trainer on every policy in `policies`.

    Raises ValueError, with server, policy and measured differences, if the mean absolute difference of
    log-probabilities exceeds `tolerance` (None: 1e-3 in float32, 0.05 otherwise) or is NaN.
    """
    limit = tolerance or (1e-3 if engine.dtype == torch.float32 else 0.05)
    sampler.vocabulary = engine.model.config.get_text_config().vocab_size
    _check_masks(sampler, policies)
    adapters = [_random(engine, claim.lora, seed) if claim.lora else None for seed, claim in enumerate(policies)]
    if sampler.zero_adapter is None and any(adapters):
        sampler.zero_adapter = _zero(engine).snapshot("base", engine.dtype)
    requests = []
    for claim, adapter in zip(policies, adapters, strict=True):
        requests += _requests(engine, claim, adapter)
    for server in sampler.servers:
        answers = sampler.sample_on_server(server, requests)
        for i, (claim, adapter) in enumerate(zip(policies, adapters, strict=True)):
            part = slice(i * NUM_PROMPTS, (i + 1) * NUM_PROMPTS)
            pairs = []
            for request, each in zip(requests[part], answers[part], strict=True):
                pairs += [(request.prompt_ids, answer) for answer in each]
            ours = _training_logprobs(engine, adapter, pairs, claim.sampling.temperature or 1.0)
            theirs = [answer.logprobs for _, answer in pairs]
            gaps = np.abs(np.concatenate(ours) - np.concatenate(theirs))
            if not gaps.mean() <= limit:  # also true for NaN
                raise ValueError(_disagreement(server, engine, claim, gaps, limit))


def _check_masks(sampler: VllmSampler, policies: Sequence[SampledPolicy]) -> None:
    """Raises ValueError if a policy records sampling masks and a server cannot return them."""
    asking = [policy.name for policy in policies if policy.sampling.records_mask]
    without = [server.url for server in sampler.servers if not server.is_palestra]
    if asking and without:
        raise ValueError(
            f"policies.{asking[0]}.sampling keeps only some tokens in training (legal_only, keep_sampling_mask), and "
            f"vLLM's /v1/completions at {without[0]} does not return them: sample in this process, or with sampler: "
            "{type: processes}, or set legal_only: false, top_p: 1.0 and top_k: 0"
        )


def _requests(engine: Engine, claim: SampledPolicy, adapter: Adapter | None) -> list[Request]:
    snapshot = adapter.snapshot(claim.name, engine.dtype) if adapter else None
    # without stop conditions, so that all completions have equal length
    changes = {
        "max_tokens": COMPLETION_TOKENS,
        "stop": (),
        "stop_token_ids": (),
        "stop_at_eos": False,
        "legal_only": False,
    }
    sampling = claim.sampling.model_copy(update=changes)
    return [
        Request(prompt, COMPLETIONS_PER_PROMPT, sampling, snapshot, seed=i) for i, prompt in enumerate(_prompts(engine))
    ]


def _disagreement(server: SamplerServer, engine: Engine, claim: SampledPolicy, gaps: np.ndarray, limit: float) -> str:
    weights = f"with random weights of rank {claim.lora.rank}" if claim.lora else "the bare base"
    sampling = claim.sampling
    hint = ""
    if sampling.temperature not in (0, 1) and not server.is_palestra:
        hint = f" At temperature {sampling.temperature:g} start vLLM with --logprobs-mode processed_logprobs."
    if sampling.top_k or sampling.top_p < 1:
        hint = (
            " With top_k or top_p vLLM's processed log-probabilities are of what these leave, ours of the whole: use "
            "--logprobs-mode raw_logprobs at temperature 1, or do without them."
        )
    return (
        f'the sampler at {server.url} does not agree with the trainer on policy "{claim.name}" ({weights}): log-'
        f"probabilities of the same {len(gaps)} tokens differ by {gaps.mean():.3g} in the mean and {gaps.max():.3g} at "
        f"most, and {limit:g} in the mean is allowed (sampler.logprob_tolerance). Does it serve {engine.name} in "
        f"{str(engine.dtype).removeprefix('torch.')}, and does it know the adapter's layers?{hint}"
    )


def _training_logprobs(
    engine: Engine, adapter: Adapter | None, pairs: Sequence[tuple[np.ndarray, Completion]], temperature: float
) -> list[np.ndarray]:
    """Returns the log-probabilities [T] of each completion's tokens after its prompt, computed as in training."""
    zeros = [np.zeros(len(answer.token_ids), np.float32) for _, answer in pairs]
    samples = [
        Sample(
            prompt,
            answer.token_ids,
            none,
            none,
            temperature,
            sampling_mask=answer.sampling_mask,
            routed_experts=answer.routed_experts,
        )
        for (prompt, answer), none in zip(pairs, zeros, strict=True)
    ]
    return AdapterWeights(engine, adapter or _zero(engine)).logprobs(samples)


def _zero(engine: Engine) -> Adapter:
    """Returns a new adapter, which adds zero to every layer."""
    return Adapter(engine.linear_layers, LoraConfig(rank=1, alpha=1), seed=0)


def _random(engine: Engine, config: LoraConfig, seed: int) -> Adapter:
    """Returns an adapter with random non-zero weights; a new adapter would be equal to the base."""
    adapter = Adapter(engine.linear_layers, config, seed=seed, model=engine.model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, (_, b) in (adapter.weights | adapter.extras.experts).items():
            spread = ADAPTER_OUTPUT_RATIO / (adapter.scale_of(name) * config.rank_of(name) ** 0.5)
            b.copy_(torch.randn(b.shape, generator=generator) * spread)
    return adapter


def _prompts(engine: Engine) -> list[np.ndarray]:
    """Returns random prompts. If the base has windows of attention or chunks, the first prompt is longer than these, up
    to the base's own length and `MAX_LONG_PROMPT`."""
    vocabulary = engine.model.config.get_text_config().vocab_size
    draws = np.random.default_rng(0)
    span = longest_span(engine.model)
    most = min(MAX_LONG_PROMPT, (max_positions(engine) or MAX_LONG_PROMPT) - COMPLETION_TOKENS)
    long = span + PROMPT_TOKENS if span and span + PROMPT_TOKENS <= most else PROMPT_TOKENS
    sizes = [long, *[PROMPT_TOKENS] * (NUM_PROMPTS - 1)]
    return [draws.integers(0, vocabulary, size).astype(np.int32) for size in sizes]
