"""Passes of training: the forward pass of a micro-batch, its loss, and the backward pass.

Passes of several adapters on one base can be made together (`run_together`): the samples of each adapter are a block of
rows, everything but the adapters is computed for all blocks at once, and each block has its own loss. Roles with few
samples each then take one pass instead of many small ones, on a GPU.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from palestra.core.losses import LossFunction, LossInputs, check_loss
from palestra.core.types import Metrics
from palestra.engine.bases.model import Engine
from palestra.engine.forward.flat_row import packs
from palestra.engine.forward.tree_attention import Forest, concat_forests
from palestra.engine.lora.adapters import Adapter
from palestra.engine.lora.routes import BlockRoute, SingleAdapterRoute
from palestra.engine.lora.variants import Dropout
from palestra.engine.training.micro_batch import MicroBatch, PackedBatch, TokenOutputs, num_tokens
from palestra.parallel.process_group import ProcessGroup

# Launching many small passes takes a GPU longest. A CPU saves less (nothing with more than 512 rows an adapter), and
# with separate passes a run has the same numbers in this process and on Ray, where each learner has a process.
JOINING_DEVICES = ("cuda",)


class TrainedWeights(Protocol):
    """Protocol of the weights that a pass trains (`AdapterWeights`)."""

    engine: Engine
    adapter: Adapter | None
    pack_tokens: int
    autocast_dtype: torch.dtype | None
    checkpointing: bool
    loss_scale: Any  # LossScale or None
    group: ProcessGroup

    def loss_inputs(self, pack: MicroBatch, read: TokenOutputs) -> LossInputs: ...


@dataclass(eq=False)
class TrainPass:
    """A pass over one micro-batch. `trained` is the share of the batch's token weights that have a gradient. `metrics`
    are there after the pass was run: the loss, and those of the loss, as means over the trained tokens."""

    weights: TrainedWeights
    pack: MicroBatch
    loss: LossFunction
    options: Mapping[str, Any] = field(default_factory=dict)
    trained: float = 1.0
    dropout: Dropout | None = None
    metrics: Metrics = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens of the samples, before prompts are shared."""
        return num_tokens(self.pack.samples)

    @property
    def has_entropy_grad(self) -> bool:
        return bool(self.options.get("entropy"))

    @property
    def is_joinable(self) -> bool:
        """True if the pass may be made together with others."""
        weights = self.weights
        if weights.engine.device.type not in JOINING_DEVICES or weights.engine.sharded_params:
            return False
        if weights.adapter is None or self.dropout is not None or weights.group.world_size > 1:
            return False
        return all(sample.routed_experts is None for sample in self.pack.samples)

    @property
    def kind(self) -> Hashable:
        """Equal for passes that can be made together."""
        return id(self.weights.engine), self.weights.autocast_dtype, self.weights.checkpointing


def join_passes(queues: Sequence[Sequence[TrainPass]]) -> Iterator[list[TrainPass]]:
    """Yields all passes in the order of their queues, those to be made together as one list. The first passes of all
    queues come first, since no two of one queue are joined."""
    for row in zip_longest(*queues):
        joinable: dict[Hashable, list[TrainPass]] = {}
        for each in filter(None, row):
            if each.is_joinable:
                joinable.setdefault(each.kind, []).append(each)
            else:
                yield [each]
        for alike in joinable.values():
            limit = min(each.weights.pack_tokens for each in alike)
            yield from packs(alike, lambda each: each.num_tokens, limit)


def run_together(passes: Sequence[TrainPass]) -> None:
    """Makes passes of different adapters as one: adds the gradient of each to its weights, and sets its metrics."""
    first = passes[0].weights
    engine = first.engine
    packed = [PackedBatch.pack(each.pack.samples, engine) for each in passes]
    with engine.precision_context(first.autocast_dtype, recompute=first.checkpointing):
        if len(passes) == 1:
            dropout, bonus = passes[0].dropout, passes[0].has_entropy_grad
            outputs = [packed[0].run_model(engine, first.adapter, entropy_grad=bonus, dropout=dropout)]
        else:
            outputs = _run_model(engine, passes, packed)
    losses = []
    scaled = []
    for each, read in zip(passes, outputs, strict=True):
        inputs = each.weights.loss_inputs(each.pack, read)
        label = getattr(each.loss, "__qualname__", "the loss")
        value, metrics = check_loss(each.loss(inputs, **each.options), label, has_gradient=inputs.logp_M.requires_grad)
        losses.append((value.detach(), metrics))
        scale = each.weights.loss_scale
        scaled.append(value * scale.value if scale else value)
    sum(scaled[1:], scaled[0]).backward()
    engine.release_freed_memory()
    for each, (value, metrics) in zip(passes, losses, strict=True):  # after the backward pass: reading waits for a GPU
        each.metrics = {"loss": float(value)}
        each.metrics |= {name: float(figure / each.trained) for name, figure in metrics.items()}


def _run_model(engine: Engine, passes: Sequence[TrainPass], packed: Sequence[PackedBatch]) -> list[TokenOutputs]:
    """Returns the model's outputs for each pass; hidden states are computed together."""
    adapters = [each.weights.adapter for each in passes if each.weights.adapter is not None]
    kept = [batch.distinct_rows[0] for batch in packed]
    hidden_CH = hidden_of_blocks(engine, [batch.forest for batch in packed], adapters, kept)
    blocks = hidden_CH.split(list(map(len, kept)))
    outputs = []
    for each, batch, adapter, hidden_RH in zip(passes, packed, adapters, blocks, strict=True):
        route = SingleAdapterRoute(adapter)
        outputs.append(batch.read_outputs(engine, route, hidden_RH, entropy_grad=each.has_entropy_grad))
    return outputs


def hidden_of_blocks(
    engine: Engine, forests: Sequence[Forest], adapters: Sequence[Adapter], rows: Sequence[np.ndarray]
) -> Tensor:
    """Returns the last hidden states [C, H] of the `rows` of each forest, which rise, under its own adapter: one pass
    for all of them."""
    sizes = [len(forest.ids_S) for forest in forests]
    starts = np.cumsum([0, *sizes[:-1]])
    keep_C = np.concatenate([start + kept for start, kept in zip(starts, rows, strict=True)])
    return engine.forest_states(concat_forests(forests), BlockRoute(adapters, sizes), keep_C)
