"""Sampling with transformers' `generate` on one CPU thread, to compare palestra's sampler with."""

import time
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from palestra.core.accel.malloc import keep_freed_memory


@torch.inference_mode()
def generate_rate(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], *, new: int, K: int, prompts_at_once: int, seed: int = 0
) -> float:
    """Sampled tokens per CPU second: K continuations of exactly `new` tokens for each prompt, temperature 1.

    A call has `prompts_at_once` prompts, that is K times as many rows. Prompts must have equal length, so that there is
    no padding; ValueError if they differ.
    """
    if len({len(prompt) for prompt in prompts}) != 1:
        raise ValueError("prompts differ in length: the peer would pay for padding. Pass prompts of one length.")
    torch.manual_seed(seed)
    start = time.process_time()
    for first in range(0, len(prompts), prompts_at_once):
        _generate(model, torch.tensor([list(prompt) for prompt in prompts[first : first + prompts_at_once]]), new, K)
    return len(prompts) * K * new / (time.process_time() - start)


def best_generate_rate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    new: int,
    K: int,
    sizes: Sequence[int] = (4, 8, 16, 32),
    repeats: int = 2,
) -> tuple[float, dict[int, float]]:
    """The best rate over `sizes` (prompts per call) and the best rate at each size, in sampled tokens per CPU second.

    Sets torch to one thread and calls `keep_freed_memory`; both stay set. A short first call warms up and does not
    count.
    """
    keep_freed_memory()
    torch.set_num_threads(1)
    model.eval()
    generate_rate(model, prompts[:2], new=new, K=K, prompts_at_once=2)
    fitting = [size for size in sizes if size <= len(prompts)] or [len(prompts)]
    rates = {
        size: max(
            generate_rate(model, prompts, new=new, K=K, prompts_at_once=size, seed=seed) for seed in range(repeats)
        )
        for size in fitting
    }
    return max(rates.values()), rates


def _generate(model: PreTrainedModel, prompts_BT: torch.Tensor, new: int, K: int) -> torch.Tensor:
    return model.generate(
        prompts_BT,
        attention_mask=torch.ones_like(prompts_BT),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_new_tokens=new,
        max_new_tokens=new,
        num_return_sequences=K,
    )
