"""Samples as micro-batches: packing into forests, token weights, cutting to a size, and the inputs
of a loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from palestra.core.losses import LossInputs
from palestra.core.sample_weights import batch_denominator, trained_weight
from palestra.core.types import Sample, is_sampled
from palestra.engine.bases.model import Engine
from palestra.engine.forward.flat_row import AdapterRoute, packs
from palestra.engine.forward.linear import padded_rows
from palestra.engine.forward.routing_replay import packed_experts
from palestra.engine.forward.tree_attention import Forest, TreeLayout, build_forest, common_prefix, padded_forest
from palestra.engine.lora.adapters import Adapter
from palestra.engine.lora.routes import SingleAdapterRoute
from palestra.engine.lora.variants import Dropout
from palestra.engine.training.head import LMHead, score_tokens, scored_tokens, select_rows
from palestra.engine.training.kept_tokens import KeptTokens, kept_tokens

MIN_PADDED_TOKENS = 1024  # smaller passes get no dummy tokens: adding rows to each product costs less (linear.py)


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one micro-batch, and the weight of each token of each sample in the batch
    mean."""

    samples: list[Sample]
    token_weights: list[float]


class TokenOutputs(NamedTuple):
    """Model outputs for `M` answer tokens: log-probabilities [M] and entropies [M], float32, and
    the features [M, H] from which the logits were computed."""

    logp_M: Tensor
    entropy_M: Tensor
    features_MH: Tensor


@dataclass(frozen=True)
class PackedBatch:
    """Samples packed for a pass: the flat rows that predict the `M` answer tokens (int64), the
    tokens (int64), the temperatures (float32), the tokens that were kept in sampling (None: all),
    and the experts [S, L, K] that were used in sampling (None: not recorded)."""

    forest: Forest
    layout: TreeLayout
    rows_M: np.ndarray
    targets_M: np.ndarray
    temperature_M: np.ndarray
    kept: KeptTokens | None = None
    experts_SLK: np.ndarray | None = None

    @classmethod
    def pack(cls, samples: Sequence[Sample], engine: Engine) -> PackedBatch:
        """Packs `samples`."""
        forest, rows_M, targets_M = pack_samples(samples)
        if engine.attention and engine.device.type == "cpu" and len(forest.ids_S) >= MIN_PADDED_TOKENS:
            forest = padded_forest(forest, padded_rows(len(forest.ids_S)))
        temperature_M = _spread([s.temperature or 1.0 for s in samples], samples)
        kept = kept_tokens(samples, engine.device)
        experts_SLK = None
        if any(s.routed_experts is not None for s in samples):
            layers = engine.model.config.get_text_config().num_hidden_layers
            experts_SLK = packed_experts(samples, forest, engine.routers, layers)
        return cls(forest, TreeLayout(forest, engine.device), rows_M, targets_M, temperature_M, kept, experts_SLK)

    @cached_property
    def distinct_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """The flat rows that predict a token, each once, and the index of each token's row among
        them [M]."""
        return np.unique(self.rows_M, return_inverse=True)

    def run_model(
        self, engine: Engine, adapter: Adapter | None, *, entropy_grad: bool = False, dropout: Dropout | None = None
    ) -> TokenOutputs:
        """Computes the outputs of the model with `adapter` and its `dropout`. Each distinct row of
        logits is computed once; with `entropy_grad`, entropies have gradients."""
        keep = engine.tensor(self.distinct_rows[0])
        tensor = engine.tensor
        route = SingleAdapterRoute(adapter, dropout) if adapter else None
        flat = tensor(self.forest.ids_S), tensor(self.forest.positions_S), self.layout, route, keep
        replayed = None if self.experts_SLK is None else tensor(self.experts_SLK)

        def compute() -> TokenOutputs:
            with engine.use_experts(replayed, keep):
                features = engine.hidden_states(*flat)
            engine.release_freed_memory()
            return self.read_outputs(engine, route, features, entropy_grad=entropy_grad)

        if engine.sharded_params:
            outputs: TokenOutputs = engine.sharded_params.in_pass(compute)
        else:
            outputs = compute()
        engine.release_freed_memory()
        return outputs

    def read_outputs(
        self, engine: Engine, route: AdapterRoute | None, hidden_RH: Tensor, *, entropy_grad: bool = False
    ) -> TokenOutputs:
        """Returns the outputs from the last hidden states of the rows that predict a token, each row once."""
        wanted = scored_tokens(engine, self.distinct_rows[1], self.targets_M, self.temperature_M, self.kept)
        scores = score_tokens(LMHead(engine, route), hidden_RH, wanted, entropy_grad=entropy_grad)
        return TokenOutputs(*scores, select_rows(hidden_RH, wanted.row_M))


def pack_samples(samples: Sequence[Sample]) -> tuple[Forest, np.ndarray, np.ndarray]:
    """Returns the forest of `samples`, the flat row that predicts each of the `M` answer tokens,
    and the tokens, both int64 [M]."""
    sequences = [np.concatenate([s.prompt_ids, s.token_ids[:-1]]).astype(np.int64) for s in samples]
    forest = build_forest(sequences)
    rows = [path[len(s.prompt_ids) - 1 :] for s, path in zip(samples, forest.paths, strict=True)]
    return forest, np.concatenate(rows), np.concatenate([s.token_ids for s in samples]).astype(np.int64)


def token_weight(samples: Sequence[Sample]) -> float:
    """Returns the weight of a token in the mean over all answer tokens of `samples` (Yu et al.,
    2025, eq. 12), for a sample weight of 1. Samples without gradient count too."""
    return 1.0 / batch_denominator(samples)


def trained_share(samples: Sequence[Sample]) -> float:
    """Returns the sum of the token weights of the samples with gradient: a loss's metric divided by
    it is a mean over the trained tokens."""
    return trained_weight(samples) / batch_denominator(samples)


def with_gradient(samples: Sequence[Sample]) -> list[Sample]:
    """Returns the samples that a pass is made for."""
    return [sample for sample in samples if sample.has_gradient]


def micro_batches(samples: Sequence[Sample], tokens: int, weight: float | None = None) -> list[MicroBatch]:
    """Splits `samples`, in order, into micro-batches of at most `tokens` tokens counted before
    sharing (a single group may exceed it). `weight` is the weight of a token (None: these samples
    are a whole batch)."""
    if weight is None:
        weight = token_weight(samples)
    result = []
    for groups in packs(by_group(samples), num_tokens, tokens):
        part = list(chain.from_iterable(groups))
        result.append(MicroBatch(part, [weight * s.weight for s in part]))
    return result


def split_over_ranks(samples: Sequence[Sample], count: int) -> list[list[Sample]]:
    """Splits `samples` into `count` consecutive runs of similar numbers of tokens. Samples of one
    group stay together; most samples with a common prompt do."""
    groups = by_group(samples)
    ends = np.cumsum([num_tokens(group) for group in groups])
    result: list[list[Sample]] = [[] for _ in range(count)]
    for group, end in zip(groups, ends.tolist(), strict=True):
        middle = end - num_tokens(group) / 2
        result[int(middle * count / ends[-1])] += group
    return result


def num_tokens(samples: Sequence[Sample]) -> int:
    """Returns the tokens of prompts and answers, before prompts are shared."""
    return sum(len(s.prompt_ids) + len(s.token_ids) for s in samples)


def build_loss_inputs(pack: MicroBatch, logp_M: Tensor, entropy_M: Tensor, value_M: Tensor | None = None) -> LossInputs:
    """Builds the loss inputs of a micro-batch from the model's outputs at its answer tokens, on the
    device of `logp_M`. `entropy_M` and `value_M` are [M] too."""
    samples = pack.samples
    lengths = [len(s.token_ids) for s in pack.samples]

    def tensor(values: np.ndarray, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.as_tensor(values, dtype=dtype, device=logp_M.device)

    def field_values(field: str) -> Tensor:
        return tensor(np.concatenate([getattr(s, field) for s in samples]))

    def optional_values(field: str) -> Tensor | None:
        if any(getattr(s, field) is None for s in samples):
            return None
        return field_values(field)

    sampler_logp_M = old_logp_M = field_values("logprobs")
    if samples[0].old_logprobs is not None:
        is_current = isinstance(samples[0].old_logprobs, str)
        old_logp_M = logp_M.detach() if is_current else field_values("old_logprobs")
    return LossInputs(
        logp_M,
        entropy_M,
        old_logp_M,
        optional_values("reference_logprobs"),
        field_values("advantages"),
        tensor(_spread(pack.token_weights, samples) * np.concatenate([is_sampled(s) for s in samples])),
        tensor(np.repeat(np.arange(len(samples)), lengths), torch.long),
        tensor(np.repeat(_numbers(samples), lengths), torch.long),
        value_M,
        optional_values("values"),
        optional_values("returns"),
        None if samples[0].old_logprobs is None else sampler_logp_M,
    )


def by_group(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Splits `samples` into units that must not be separated: neighbours of one group, or a single
    sample without a group."""
    groups: list[list[Sample]] = []
    for sample in samples:
        if groups and sample.group >= 0 and sample.group == groups[-1][-1].group:
            groups[-1].append(sample)
        else:
            groups.append([sample])
    return groups


def by_prompt(samples: Sequence[Sample], *, nested: bool = False) -> list[list[Sample]]:
    """Splits `samples` into units that compute a prompt once if they share a batch: neighbours with
    the same prompt or, if `nested`, neighbours of which one's prompt begins with the other's (turns
    of one conversation). Never splits what `by_group` keeps together."""
    units: list[list[Sample]] = []
    for group in by_group(samples):
        if units and _shares_prompt(units[-1][-1].prompt_ids, group[0].prompt_ids, nested=nested):
            units[-1] += group
        else:
            units.append(group)
    return units


def _shares_prompt(first: np.ndarray, second: np.ndarray, *, nested: bool) -> bool:
    length = min if nested else max
    return common_prefix(first, second) == length(len(first), len(second))


def _numbers(samples: Sequence[Sample]) -> np.ndarray:
    """Returns the index of each sample's group."""
    groups = by_group(samples)
    return np.repeat(np.arange(len(groups)), [len(group) for group in groups])


def _spread(values: Sequence[float], samples: Sequence[Sample]) -> np.ndarray:
    return np.repeat(np.asarray(values, np.float32), [len(s.token_ids) for s in samples])
