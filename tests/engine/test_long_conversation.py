"""A GRPO update on conversations of many turns: it equals a plain computation, and its memory is bounded."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from palestra.core.losses import clipped_policy_loss
from palestra.core.types import Answer, Episode, Node
from palestra.engine.forward.tree_attention import TreeLayout, build_forest
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.training.adapter_weights import AdapterWeights
from palestra.testing import tiny_lm
from palestra.text.algorithms.grpo import GRPO
from palestra.text.learners.lm import LanguageLearner, build_weights
from palestra.text.learners.lm_config import LoraPolicyConfig
from palestra.text.training.update import update_learner

ANSWER_TOKENS = 8
ALGORITHM = GRPO(branch_at="root", group_size=2, scale="none", entropy_coef=0.0, old_logprobs="sampler")


def conversation(turns: int, tokens: int, logp: float = -5.5) -> Episode:
    """Two siblings of `tokens` random tokens each, in `turns` turns, every prompt being the whole conversation so far.
    The first turn's prompt is shared; the first sibling earns 1, the second 0. `logp` is roughly the log-probability of
    a token under a random model."""
    rng, size = np.random.default_rng(0), tokens // turns
    episode = Episode("hand", 0, {"agent": "agent"})
    begin = rng.integers(5, 250, size - ANSWER_TOKENS)
    for sibling in range(2):
        ids = np.concatenate([begin, rng.integers(5, 250, tokens - len(begin))]).astype(np.int32)
        for turn in range(turns):
            end = (turn + 1) * size
            prompt, said = ids[: end - ANSWER_TOKENS], ids[end - ANSWER_TOKENS : end]
            logprobs = np.full(ANSWER_TOKENS, logp, np.float32)
            parent = episode.nodes[-1].id if turn else None
            last = turn == turns - 1
            node = Node(len(episode.nodes), parent, turn, {}, {"agent": Answer("x", "agent@0", prompt, said, logprobs)})
            node.done, node.rewards = last, {"agent": float(last and sibling == 0)}
            episode.nodes.append(node)
    return episode


def plain_model() -> Qwen3ForCausalLM:
    model = tiny_lm(1).model
    model.config._attn_implementation = "eager"
    return model.requires_grad_(True)


def test_update_equals_a_plain_computation_of_each_turn_alone() -> None:
    """The clipped surrogate of 12 turns and its gradient, by transformers' own attention, one answer at a time."""
    samples, _ = ALGORITHM.build_samples([conversation(12, 360)], "agent")
    plain, total, count = plain_model(), torch.zeros(()), sum(len(s.token_ids) for s in samples)
    assert {float(a) for s in samples for a in s.advantages} == {0.5, -0.5}
    for s in samples:
        ids = torch.tensor(np.concatenate([s.prompt_ids, s.token_ids]).astype(np.int64))[None]
        logp_TV = torch.log_softmax(plain(ids[:, :-1], use_cache=False).logits[0], -1)[len(s.prompt_ids) - 1 :]
        ratio = (logp_TV.gather(1, ids[0, len(s.prompt_ids) :, None])[:, 0] - torch.tensor(s.logprobs)).exp()
        advantages = torch.tensor(s.advantages)
        total = total - torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum() / count
    total.backward()
    engine = tiny_lm(1)
    engine.model.requires_grad_(True)
    metrics = AdapterWeights(engine, None, pack_tokens=10**6).forward_backward(samples, clipped_policy_loss)
    assert metrics["loss"] == pytest.approx(total.item(), abs=1e-5)
    for ours, theirs in zip(engine.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=2e-5, rtol=1e-3)


def test_turns_of_a_conversation_share_their_keys() -> None:
    """With 40 turns and 4,000 tokens in each of two siblings, separate keys for every turn would be 160,000 rows."""
    samples, _ = ALGORITHM.build_samples([conversation(40, 4000)], "agent")
    forest = build_forest([np.concatenate([s.prompt_ids, s.token_ids[:-1]]).astype(np.int64) for s in samples])
    layout, width = TreeLayout(forest, torch.device("cpu")), 16
    heads = torch.randn(2, len(forest.ids_S), width)
    layout.attend(0, heads, heads, heads, width**-0.5)
    (padded,) = layout._padded.values()
    assert sum(len(bucket.keys) for bucket in padded.buckets) < 1.1 * 8000
    assert all(bucket.mask_N1QK is None for bucket in padded.buckets)


def memory(name: str) -> float:
    """Memory of this process in MiB: VmRSS, the current, or VmHWM, the peak."""
    return int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0]) / 1024


def measure_update(turns: int, tokens: int) -> None:
    """Prints the metrics of a GRPO update, and its peak memory in MiB."""
    engine = tiny_lm(1, max_position_embeddings=40_000, vocab_size=32_768)
    config = LoraPolicyConfig(lr=1e-3, rank=4, micro_batch_tokens=10**8)
    learner = LanguageLearner("agent", config, build_weights(config, engine, seed=1), Sampler(engine), engine.tokenizer)
    episode = conversation(turns, tokens, logp=-10.4)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    metrics = asyncio.run(update_learner(ALGORITHM, learner, [episode], 0.0))
    moved = sum(float(b.detach().abs().sum()) for _, b in learner.weights.adapter.weights.values())
    print(json.dumps(metrics | {"peak_mib": memory("VmHWM") - before, "moved": moved}))


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak is read from Linux's /proc")
def test_200_turns_and_32k_tokens_train_in_bounded_memory() -> None:
    """Two conversations of 32,000 tokens in one pass. The answers' logits alone would take 400 MiB per copy, separate
    keys and values for every turn 1,600 MiB per layer, the mask of all pairs 1,000 MiB."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["samples"] == 400 and found["updates"] == 1
    assert np.isfinite(found["grad_norm"]) and found["grad_norm"] > 0 and found["moved"] > 0
    assert found["peak_mib"] < 1600


if __name__ == "__main__":
    measure_update(200, 32_000)
