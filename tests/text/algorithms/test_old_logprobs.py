"""Ratios are relative to the trainer's own log-probabilities, so the sampler's rounding is never clipped."""

import asyncio

import numpy as np
import pytest
import torch

from palestra.core.types import Answer, Episode, Node
from palestra.engine.bases.model import Engine
from palestra.engine.sampling.request import Request
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.testing import tiny_lm
from palestra.text.algorithms.grpo import GRPO
from palestra.text.learners.lm import LanguageLearner, build_weights
from palestra.text.learners.lm_config import LoraPolicyConfig
from palestra.text.training.update import update_learner

GSPO = {
    "branch_at": "root",
    "loss_aggregation": "sequence",
    "surrogate": "gspo",
    "clip": 3e-4,
    "clip_high": 4e-4,
    "group_size": 4,
}


def played(engine: Engine, groups: int = 4) -> list[Episode]:
    """Episodes with answers of 12 tokens, four to each prompt, sampled by the base; rewards are arbitrary."""
    rng = np.random.default_rng(0)
    sampling = SamplingConfig(max_tokens=12, stop_at_eos=False)
    requests = [Request(rng.integers(5, 250, 9).astype(np.int32), 4, sampling, seed=i) for i in range(groups)]
    episodes = []
    for request, answers in zip(requests, Sampler(engine).sample_all(requests), strict=True):
        nodes = [
            Node(i, None, 0, {}, {"a": Answer("", "p@0", request.prompt_ids, a.token_ids, a.logprobs)}, {"a": float(i)})
            for i, a in enumerate(answers)
        ]
        for node in nodes:
            node.done = True
        episodes.append(Episode("hand", 0, {"a": "p"}, nodes))
    return episodes


def updated(dtype: torch.dtype, batch_size: int | None = None, **settings) -> dict[str, float]:
    """The metrics of one update by GSPO on answers that were just sampled."""
    engine = tiny_lm(0, initializer_range=0.2)
    engine.model.to(dtype)
    engine = Engine(engine.model, engine.tokenizer, "tiny-random")
    config = LoraPolicyConfig(batch_size=batch_size, lr=0.0)
    learner = LanguageLearner("p", config, build_weights(config, engine, seed=0), Sampler(engine), engine.tokenizer)
    return asyncio.run(update_learner(GRPO(**GSPO, **settings), learner, played(engine), 0.0))


@pytest.mark.parametrize("batch_size", [None, 8])
def test_gspo_clips_nothing_in_the_first_update_in_bf16(batch_size):
    """Also before the second optimizer step (with a learning rate of 0), from log-probabilities of a pass of its own.
    The sampler's differ by more than the bounds, which is a metric of its own."""
    metrics = updated(torch.bfloat16, batch_size)
    assert metrics["clip_fraction"] == 0 and metrics["kl"] == 0 and metrics["updates"] == (2 if batch_size else 1)
    assert 1e-4 < abs(metrics["sampler_kl"]) < 1e-1 and metrics["importance_cap_fraction"] == 0
    assert updated(torch.bfloat16, batch_size, old_logprobs="sampler")["clip_fraction"] > 0.2


def test_sampler_logprobs_suffice_in_float32():
    assert abs(updated(torch.float32)["sampler_kl"]) < 1e-6
    assert updated(torch.float32, old_logprobs="sampler")["clip_fraction"] == 0
