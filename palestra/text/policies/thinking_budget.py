"""A budget for thoughts: answers are sampled in two parts, and the thought ends with the first.

The first part has as many tokens as the budget. If it is still a thought, the marks with which the chat template ends
one follow, and the second part is sampled after them, so that any sampler can do it. The marks were not sampled: the
answer's sampling mask says so, which gives them probability 1 and no share in any mean over tokens. A second thought of
an answer has no budget.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from palestra.core.seeding import derive_seed
from palestra.core.types import SamplingMask
from palestra.engine.sampling.request import Completion, Request


def first_part(request: Request) -> Request:
    """Returns the request of the first parts, whose keys and values are kept for the second ones."""
    sampling = request.sampling.model_copy(
        update={"max_tokens": request.sampling.thinking_token_budget, "thinking_token_budget": None}
    )
    return replace(request, sampling=sampling, keep_kv=True)


def second_part(request: Request, sibling: int, first: Completion, forced: np.ndarray) -> Request:
    """Returns the request of what follows the `first` part of an answer and the `forced` tokens [F]."""
    tokens = request.sampling.max_tokens - len(first.token_ids) - len(forced)
    return replace(
        request,
        prompt_ids=np.concatenate([request.prompt_ids, first.token_ids, forced]),
        n=1,
        sampling=request.sampling.model_copy(update={"max_tokens": tokens, "thinking_token_budget": None}),
        seed=derive_seed(request.seed, "after the thought", sibling),  # other random numbers than the first part's
    )


def join_parts(prompt: int, first: Completion, forced: np.ndarray, second: Completion) -> Completion:
    """Returns the whole answer to a prompt of `prompt` tokens: its parts, and the `forced` tokens [F] between them."""
    experts = None
    if first.routed_experts is not None and second.routed_experts is not None:
        sampled = prompt + len(first.token_ids) - 1
        experts = np.concatenate([first.routed_experts, second.routed_experts[sampled:]])
    start = len(first.token_ids)
    return Completion(
        np.concatenate([first.token_ids, forced, second.token_ids]),
        np.concatenate([first.logprobs, np.zeros(len(forced), np.float32), second.logprobs]),
        second.stop_reason,
        adapters=(*first.adapters, *((start + index, name) for index, name in second.adapters)),
        sampling_mask=_joined_mask(first, forced, second),
        routed_experts=experts,
    )


def _joined_mask(first: Completion, forced: np.ndarray, second: Completion) -> SamplingMask | None:
    if not len(forced) and first.sampling_mask is None and second.sampling_mask is None:
        return None
    one = _mask(first)
    other = _mask(second)
    counts = one.counts, np.full(len(forced), -1, np.int32), other.counts
    return SamplingMask(np.concatenate([one.ids, forced, other.ids]), np.concatenate(counts))


def _mask(part: Completion) -> SamplingMask:
    every = SamplingMask(np.zeros(0, np.int32), np.zeros(len(part.token_ids), np.int32))
    return every if part.sampling_mask is None else part.sampling_mask
