"""Conversion of engine results to the types of the wire."""

from __future__ import annotations

from typing import Any

import numpy as np

from palestra.engine.sampling.request import Completion
from palestra.engine.sampling.scoring import ScoreResult
from palestra.engine.training.distill import ReverseKL
from palestra.service.wire import codec
from palestra.service.wire.jobs import SampleJob


def reverse_kl_answer(loss: ReverseKL) -> dict[str, Any]:
    """Returns the answer to a reverse-KL pass in the format of MinT's clients: the loss of each example, and means per
    token with nonzero weight."""
    sums = loss.example_losses.tolist()
    tokens = sum(int(np.count_nonzero(example.weights)) for example in loss.examples)
    mean = sum(sums) / max(1, tokens)
    return {
        "type": "mint_forward_backward_reverse_kl",
        "outputs": [{"loss": {"data": [value], "dtype": "float32", "shape": [1]}} for value in sums],
        "metrics": {
            "loss:sum": sum(sums),
            "loss:mean": mean,
            "reverse_kl:mean": mean,
            "num_samples:sum": float(len(sums)),
            "num_tokens:sum": float(tokens),
        },
    }


def to_sampled_sequence(sampled: Completion) -> codec.SampledSequence:
    """Converts one completion of the sampler."""
    topk = None
    if sampled.top_ids is not None and sampled.top_logprobs is not None:
        topk = codec.TopK(sampled.top_ids, sampled.top_logprobs)
    return codec.SampledSequence(sampled.token_ids, sampled.logprobs, sampled.stop_reason, topk)


def to_prompt_scores(scores: ScoreResult | None, job: SampleJob) -> codec.PromptScores:
    """Converts prompt scores: arrays with one row per prompt token, float32 [P] or [P, K], NaN for the first token and
    for those before the last `last_n`.

    `target_logprobs` and the drawn tokens stay [P-1, K], as scored.
    """
    if scores is None:
        return codec.PromptScores()
    size = len(job.tokens)
    quiet = size - min(size, job.last_n) if job.last_n is not None else 1

    def rows(values: np.ndarray) -> np.ndarray:
        whole = np.full((size, *values.shape[1:]), np.nan, np.float32)
        whole[1:] = values
        whole[: max(1, quiet)] = np.nan
        return whole

    topk = None
    if job.topk_prompt:
        ids = np.concatenate([np.zeros((1, job.topk_prompt), np.int64), scores.top_ids])
        topk = codec.TopK(ids, rows(scores.top_logprobs))
    drawn = None
    if job.drawn_prompt:
        drawn = codec.TopK(scores.drawn_ids, scores.drawn_logprobs)
    return codec.PromptScores(
        logprobs=rows(scores.logprobs) if job.prompt_logprobs else None,
        topk=topk,
        target_logprobs=scores.target_logprobs,
        sampled_alternatives=drawn,
    )
