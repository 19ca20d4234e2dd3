"""Routing replay: a training pass of a mixture of experts uses the experts that the sampler used.

A router takes the k most likely experts of a token. Rounding, other kernels or older weights make the trainer's choice
differ from the sampler's for some tokens, which then go through other weights: their log-probabilities differ by much
more than rounding. With replay (R3, Ma et al., 2025, arXiv:2510.11370) the sampler's choice is used, with the router's
own weights for the chosen experts: the gradient flows through these weights, not through the choice.

Shapes: `S` tokens of a flat row, `M` of them that reach the end of the last layer, `L` layers with a router, `D`
decoder layers, `K` experts of a token, `E` experts of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from palestra.core.types import Sample
from palestra.engine.forward.decoder import decoder_of
from palestra.engine.forward.tree_attention import Forest

OWN_CHOICE = -1  # in place of an expert's number: the router chooses


class Router(NamedTuple):
    """A router, the number of its decoder layer, its number of experts for a token, and whether the weights of these
    are normalised to sum to one."""

    module: nn.Module
    layer: int
    top_k: int
    is_normalised: bool


class ReplayedExperts(NamedTuple):
    """Experts of the rows of a pass [S, L, K], and of those that reach the end of the last layer [M, L, K]."""

    all_SLK: Tensor
    kept_MLK: Tensor

    def of(self, rows: int, number: int) -> Tensor:
        """Returns the experts [rows, K] of router `number`, in a layer with `rows` rows."""
        return (self.all_SLK if rows == len(self.all_SLK) else self.kept_MLK)[:, number]


def find_routers(model: PreTrainedModel) -> list[Router]:
    """Returns the routers of `model`, layer by layer. Raises ValueError if it has none that can be replayed.

    A router can be replayed if it returns logits, weights and indices of its experts, and computes the weights from the
    logits: a softmax over all experts, as it is or normalised over the chosen ones (Mixtral, Qwen-MoE, OLMoE, gpt-oss).
    """
    routers = []
    for number, layer in enumerate(getattr(decoder_of(model), "layers", ())):
        for module in layer.modules():
            if type(module).__name__.endswith("TopKRouter"):
                routers.append(_router(module, number))
    if not routers or None in routers:
        raise ValueError(
            f"the sampler returned routed experts, and the routers of {type(model).__name__} cannot be given a choice "
            "here: start vLLM without --enable-return-routed-experts"
        )
    return [router for router in routers if router]


def _router(module: Any, layer: int) -> Router | None:
    """Returns the router that `module` is, found by calling it; None if its weights follow neither rule."""
    weight = module.weight
    probe = torch.linspace(-1, 1, 4 * weight.shape[1], device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        output = module(probe.reshape(4, -1))
    if not (isinstance(output, tuple) and len(output) == 3):
        return None
    logits, weights, chosen = output
    for is_normalised in (False, True):
        expected = expert_weights(logits, chosen, is_normalised=is_normalised)
        if weights.shape == expected.shape and torch.allclose(expected, weights.float(), atol=1e-2):
            return Router(module, layer, chosen.shape[1], is_normalised)
    return None


def expert_weights(logits_NE: Tensor, chosen_NK: Tensor, *, is_normalised: bool) -> Tensor:
    """Returns the weights [N, K] float32 of the chosen experts."""
    weights_NK = logits_NE.float().softmax(-1).gather(1, chosen_NK)
    return weights_NK / weights_NK.sum(-1, keepdim=True) if is_normalised else weights_NK


def replay_experts(routers: Sequence[Router], current: Callable[[], ReplayedExperts | None]) -> None:
    """Makes the routers use the experts that `current` returns during a pass; None: their own choice."""
    for number, router in enumerate(routers):
        router.module.register_forward_hook(partial(_replay_experts, router=router, number=number, current=current))


def _replay_experts(
    module: nn.Module,
    inputs: Any,
    output: tuple[Tensor, Tensor, Tensor],
    *,
    router: Router,
    number: int,
    current: Callable[[], ReplayedExperts | None],
) -> tuple[Tensor, Tensor, Tensor]:
    if (replayed := current()) is None:
        return output
    logits_NE, weights_NK, own_NK = output
    given_NK = replayed.of(len(logits_NE), number).to(own_NK.dtype)
    chosen_NK = torch.where((given_NK >= 0).all(-1, keepdim=True), given_NK, own_NK)
    new_NK = expert_weights(logits_NE, chosen_NK, is_normalised=router.is_normalised)
    return logits_NE, new_NK.to(weights_NK.dtype), chosen_NK


def packed_experts(samples: Sequence[Sample], forest: Forest, routers: Sequence[Router], layers: int) -> np.ndarray:
    """Returns the experts [S, L, K] int64 of the tokens of a forest, `OWN_CHOICE` where no sample has any.

    A sample's experts are [P + T - 1, L or D, K], for its prompt and all its tokens but the last, which is not read.
    Raises ValueError for another shape.
    """
    top_k = routers[0].top_k
    packed_SLK = np.full((len(forest.ids_S), len(routers), top_k), OWN_CHOICE, np.int64)
    for sample, path in zip(samples, forest.paths, strict=True):
        if (experts := sample.routed_experts) is None:
            continue
        if experts.shape not in ((len(path), len(routers), top_k), (len(path), layers, top_k)):
            raise ValueError(
                f"the sampler returned routed experts of shape {list(experts.shape)} for an answer with {len(path)} "
                f"tokens before its last, by a base with {len(routers)} routers of {top_k} experts a token: does it "
                "serve the same base, with a vLLM of 0.22 or newer?"
            )
        numbers = range(len(routers)) if experts.shape[1] == len(routers) else [router.layer for router in routers]
        packed_SLK[path] = experts[:, list(numbers)]
    return packed_SLK
