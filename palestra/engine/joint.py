"""Training passes of several adapters at once, as a server of many clients needs them.

Each adapter's sequences are a forest of their own, since under other weights the same tokens are other activations. The
forests lie end to end in one flat row, and a route gives every block of it its adapter: what the base computes, and all
that is not a linear layer, is computed for everybody together. Losses are sums, gradients gather in each adapter until
its optimizer's step.

Shapes: `S` tokens of the flat row, `M` scored targets of a job, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from palestra.engine.attention import Forest, TreeLayout, plant
from palestra.engine.lora import Adapter, Single
from palestra.engine.models import Engine
from palestra.engine.trainer import Trainer
from palestra.losses import Figures
from palestra.types import Datum


class Predicted(NamedTuple):
    """What a job's loss reads: the targets' log-probabilities [M], the data's inputs [M] by name, and the number of the
    sequence that each target belongs to [M]. `logits_MV` gives the whole rows to losses that ask."""

    logp_M: Tensor
    inputs: dict[str, Tensor]
    sequence_M: Tensor
    logits_MV: Callable[[], Tensor]


JointLoss = Callable[[Predicted], tuple[Tensor, Figures]]


@dataclass(frozen=True)
class Job:
    """One client's pass over its data; `backward` false only scores."""

    trainer: Trainer
    data: Sequence[Datum]
    loss: JointLoss
    backward: bool = True


@dataclass
class Outcome:
    """Log-probabilities of each datum's targets, in its shape, and the loss's figures summed over the data."""

    logps: list[np.ndarray] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)


class Blocks:
    """The route of a joint pass: block i of the rows uses adapter i, and gradients flow into it."""

    def __init__(self, adapters: Sequence[Adapter], counts: Sequence[int]) -> None:
        self.routes, self.counts = [Single(adapter) for adapter in adapters], list(counts)

    def linear(self, name: str, x: Tensor, layer: nn.Linear) -> Tensor:
        blocks = zip(self.routes, x.split(self.counts, dim=-2), strict=True)
        return torch.cat([route.linear(name, block, layer) for route, block in blocks], dim=-2)

    def narrow(self, keep_M: Tensor) -> Blocks:
        ends = np.searchsorted(keep_M.cpu().numpy(), np.cumsum(self.counts))
        return Blocks([route.adapter for route in self.routes], np.diff(ends, prepend=0).tolist())


def train_together(
    engine: Engine, jobs: Sequence[Job], pack_tokens: int
) -> Generator[None, None, list[Outcome | Exception]]:
    """Runs `jobs`, pausing after each micro-batch of at most `pack_tokens` (before sharing) so that others may go
    between; returns an outcome for each, or what made it fail. A job that fails leaves the others' gradients alone."""
    outcomes: list[Outcome | Exception] = [Outcome() for _ in jobs]
    for pack in _packs(jobs, pack_tokens):
        _run(engine, jobs, {job: data for job, data in pack.items() if isinstance(outcomes[job], Outcome)}, outcomes)
        yield
    return outcomes


def _packs(jobs: Sequence[Job], tokens: int) -> Generator[dict[int, list[Datum]], None, None]:
    """The data of all jobs in order, by job, at most `tokens` at a time (one datum alone may have more)."""
    pack: dict[int, list[Datum]] = {}
    size = 0
    for number, job in enumerate(jobs):
        for datum in job.data:
            if pack and size + len(datum.tokens) > tokens:
                yield pack
                pack, size = {}, 0
            pack.setdefault(number, []).append(datum)
            size += len(datum.tokens)
    if pack:
        yield pack


def _run(
    engine: Engine, jobs: Sequence[Job], pack: dict[int, list[Datum]], outcomes: list[Outcome | Exception]
) -> None:
    """One forward pass for all data of a pack, a loss for each job, one backward pass for all losses."""
    if not pack:
        return
    forests = {number: plant([datum.tokens for datum in data]) for number, data in pack.items()}
    flat = joined(list(forests.values()))
    adapters = [jobs[number].trainer.adapter for number in pack]
    route = Blocks([a for a in adapters if a], [len(forest.ids_S) for forest in forests.values()])
    backward = any(jobs[number].backward for number in pack)
    with torch.set_grad_enabled(backward):
        every = engine.tensor(np.arange(len(flat.ids_S)))
        positions, layout = engine.tensor(flat.positions_S), TreeLayout(flat, engine.device)
        logits_SV = engine.logits(engine.tensor(flat.ids_S), positions, layout, route, every).float()
        norm_S = torch.logsumexp(logits_SV, -1)
        losses, first = [], 0
        for number, data in pack.items():
            rows = [first + path for path in forests[number].paths]
            predicted = _predicted(engine, data, rows, logits_SV, norm_S)
            first += len(forests[number].ids_S)
            loss = _judge(jobs[number], data, predicted, outcomes, number)
            if loss is not None:
                losses.append(loss)
        if losses:
            torch.stack(losses).sum().backward()


def _predicted(
    engine: Engine, data: Sequence[Datum], rows: Sequence[np.ndarray], logits_SV: Tensor, norm_S: Tensor
) -> Predicted:
    widths = [datum.targets.size // len(datum.tokens) for datum in data]
    row_M = engine.tensor(np.concatenate([np.repeat(r, width) for r, width in zip(rows, widths, strict=True)]))
    target_M = engine.tensor(np.concatenate([datum.targets.ravel() for datum in data]))
    sizes = [datum.targets.size for datum in data]
    inputs = {
        name: engine.tensor(np.concatenate([d.inputs[name].ravel() for d in data]), torch.float32)
        for name in data[0].inputs
    }
    sequence_M = engine.tensor(np.repeat(np.arange(len(data)), sizes))
    logp_M = logits_SV[row_M, target_M] - norm_S[row_M]
    return Predicted(logp_M, inputs, sequence_M, lambda: logits_SV.index_select(0, row_M))


def _judge(
    job: Job, data: Sequence[Datum], predicted: Predicted, outcomes: list[Outcome | Exception], number: int
) -> Tensor | None:
    """Notes the outcome of a job's part of the pack; its loss, where that has gradients."""
    outcome = outcomes[number]
    assert isinstance(outcome, Outcome)
    try:
        loss, figures = job.loss(predicted)
        if not torch.isfinite(loss):
            raise ValueError(f"the loss is {float(loss)}: look for extreme log-probabilities, weights or advantages")
    except ValueError as error:
        outcomes[number] = error
        return None
    sizes = np.cumsum([datum.targets.size for datum in data])[:-1]
    parts = np.split(predicted.logp_M.detach().cpu().numpy(), sizes)
    outcome.logps += [part.reshape(datum.targets.shape) for part, datum in zip(parts, data, strict=True)]
    for name, value in {"loss": loss.detach(), **figures}.items():
        outcome.figures[name] = outcome.figures.get(name, 0.0) + float(value)
    return loss if job.backward and loss.requires_grad else None


def joined(forests: Sequence[Forest]) -> Forest:
    """Forests end to end, nothing shared between them."""
    starts = np.cumsum([0] + [len(forest.ids_S) for forest in forests])
    placed = list(zip(forests, starts, strict=False))
    return Forest(
        ids_S=np.concatenate([forest.ids_S for forest in forests]),
        positions_S=np.concatenate([forest.positions_S for forest in forests]),
        paths=[path + start for forest, start in placed for path in forest.paths],
        segments=[(cut, path + start) for forest, start in placed for cut, path in forest.segments],
    )
