"""Encoding of the engine's results for the wire."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from palestra.engine.sampling.request import Completion
from palestra.engine.sampling.scoring import ScoreResult
from palestra.engine.training.distill import ReverseKL
from palestra.service.wire import codec, tensors
from palestra.service.wire import wire_pb2 as pb
from palestra.service.wire.jobs import SampleJob


def reverse_kl_answer(loss: ReverseKL) -> dict[str, Any]:
    """Returns MinT's answer: each example's loss, and means per token with nonzero weight."""
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


def encode_sample(completions: Iterable[Completion], job: SampleJob, scores: ScoreResult | None = None) -> bytes:
    """Encodes a SampleResponse: token ids as int32, log-probabilities as float32; `scores` are those of the prompt, if
    any were requested."""
    message = pb.SampleResponse()
    for sampled in completions:
        sequence = message.sequences.add(
            stop_reason=codec.STOPS[sampled.stop_reason],
            tokens=tensors.encode_values(sampled.token_ids, pb.DTYPE_INT32),
            logprobs=tensors.encode_values(sampled.logprobs, pb.DTYPE_FLOAT32),
        )
        if sampled.top_ids is not None and sampled.top_logprobs is not None:
            sequence.topk_sampled_logprobs.CopyFrom(_topk(sampled.top_ids, sampled.top_logprobs))
    if scores is not None:
        _add_prompt_scores(message, job, scores)
    return message.SerializeToString()


def _add_prompt_scores(message: pb.SampleResponse, job: SampleJob, scores: ScoreResult) -> None:
    """Adds arrays with one row per prompt token, [P] or [P, K], NaN for the first token and for those before the last
    `last_n`. The log-probabilities of given ids and the drawn tokens stay [P-1, K], as scored."""
    size = len(job.tokens)
    quiet = size - min(size, job.last_n) if job.last_n is not None else 1

    def rows(values: np.ndarray) -> np.ndarray:
        whole = np.full((size, *values.shape[1:]), np.nan, np.float32)
        whole[1:] = values
        whole[: max(1, quiet)] = np.nan
        return whole

    if job.prompt_logprobs:
        message.prompt_logprobs = tensors.encode_values(rows(scores.logprobs), pb.DTYPE_FLOAT32)
    if job.topk_prompt:
        ids = np.concatenate([np.zeros((1, job.topk_prompt), np.int64), scores.top_ids])
        message.topk_prompt_logprobs.CopyFrom(_topk(ids, rows(scores.top_logprobs)))
    if scores.target_logprobs is not None:
        message.target_prompt_logprobs.CopyFrom(tensors.from_array(scores.target_logprobs))
    if job.drawn_prompt:
        drawn = tensors.encode_values(scores.drawn_ids, pb.DTYPE_INT32)
        tokens = pb.Tensor(dense=drawn, dtype=pb.DTYPE_INT32, shape=scores.drawn_ids.shape)
        message.prompt_alt_tokens.tokens.CopyFrom(tokens)
        message.prompt_alt_tokens.logprobs.CopyFrom(tensors.from_array(scores.drawn_logprobs))


def _topk(ids: np.ndarray, logprobs: np.ndarray) -> pb.TopkLogprobs:
    """Returns tokens and their log-probabilities, both [N, K]; NaN marks an empty cell."""
    length, k = logprobs.shape
    none = np.isnan(logprobs)
    return pb.TopkLogprobs(
        token_ids=tensors.encode_values(np.where(none, 0, ids), pb.DTYPE_INT32),
        logprobs=tensors.encode_values(np.where(none, codec.EMPTY_LOGPROB, logprobs), pb.DTYPE_FLOAT32),
        k=k,
        length=length,
    )
