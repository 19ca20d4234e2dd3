"""Training passes of several adapters at once, for a server with many clients.

Each adapter's sequences form a separate forest, since the same tokens have other activations under other weights. The
forests are concatenated in one flat row, and a route assigns an adapter to each block of it: the base model, and
everything but linear layers, is computed for all jobs together. Losses are sums; gradients accumulate in each adapter
until its optimizer step.

Jobs are isolated: neither the results nor a failure of one job may affect another. Each job therefore has its own leaf
tensors, whose gradients are added to its adapter's only after the whole job has succeeded.

Shapes: `S` tokens of the flat row, `C` rows whose logits are computed, `M` scored targets of a job, `n` scored
positions of a datum, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from palestra.engine.attention import Forest, TreeLayout, joined, plant
from palestra.engine.lora import Adapter, Single, kept
from palestra.engine.models import Engine
from palestra.engine.trainer import Trainer
from palestra.losses.policy import Figures
from palestra.types import Datum


class Predicted(NamedTuple):
    """Inputs of a job's loss: log-probabilities of the targets [M] float32, the data's `inputs` [M] float32 by name,
    and the index of each target's sequence [M] int64. `logits_MV` returns the full logits [M, V] float32, for losses
    that need them."""

    logp_M: Tensor
    inputs: dict[str, Tensor]
    sequence_M: Tensor
    logits_MV: Callable[[], Tensor]


JointLoss = Callable[[Predicted], tuple[Tensor, Figures]]


@dataclass(frozen=True)
class Job:
    """One client's pass over its data; with `backward` false it only computes log-probabilities and losses. With
    `weighted_only`, targets of weight 0 (such as those of a prompt) are not computed; their log-probabilities are
    returned as 0."""

    trainer: Trainer
    data: Sequence[Datum]
    loss: JointLoss
    backward: bool = True
    weighted_only: bool = False

    def wanted(self, datum: Datum) -> np.ndarray:
        """Returns the scored positions of `datum`, int64 [n]."""
        if not self.weighted_only:
            return np.arange(len(datum.tokens))
        weighted = np.flatnonzero((datum.inputs["weights"].reshape(len(datum.tokens), -1) != 0).any(1))
        return weighted if len(weighted) else np.zeros(1, np.int64)


@dataclass
class Outcome:
    """Log-probabilities of each datum's targets, float32 in the targets' shape, and the loss's metrics summed over the
    data."""

    logps: list[np.ndarray] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)


class Blocks:
    """The route of a multi-adapter training pass: block i of the rows uses adapter i, and gradients flow into it."""

    def __init__(self, adapters: Sequence[Adapter], counts: Sequence[int]) -> None:
        self.routes, self.counts = [Single(adapter) for adapter in adapters], list(counts)

    def linear(self, name: str, x: Tensor, layer: nn.Linear) -> Tensor:
        if len(self.routes) == 1:
            return self.routes[0].linear(name, x, layer)  # no copy
        blocks = zip(self.routes, x.split(self.counts, dim=-2), strict=True)
        return torch.cat([route.linear(name, block, layer) for route, block in blocks], dim=-2)

    def narrow(self, keep_M: Tensor) -> Blocks:
        return Blocks([route.adapter for route in self.routes], kept(self.counts, keep_M))


@dataclass
class _Run:
    """State of a running job, or the error that ended it."""

    job: Job
    adapter: Adapter = field(init=False)
    outcome: Outcome = field(default_factory=Outcome)
    gradients: list[Tensor] | None = None
    error: Exception | None = None

    def __post_init__(self) -> None:
        assert self.job.trainer.adapter is not None
        self.adapter = self.job.trainer.adapter.apart()

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Adds gradients to those of the job."""
        if self.gradients is None:
            self.gradients = list(gradients)
        else:
            torch._foreach_add_(self.gradients, list(gradients))

    def end(self) -> Outcome | Exception:
        """Returns the outcome or the error. On success, adds the gradients of the job to those of its adapter."""
        if self.error is not None:
            return self.error
        for parameter, gradient in zip(self.job.trainer.parameters, self.gradients or (), strict=False):
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return self.outcome


class Part(NamedTuple):
    """The data of a job in one micro-batch, with the scored positions of each datum."""

    run: _Run
    data: list[Datum]
    wanted: list[np.ndarray]


def train_together(
    engine: Engine, jobs: Sequence[Job], pack_tokens: int
) -> Generator[None, None, list[Outcome | Exception]]:
    """Runs `jobs` together; returns an outcome or an error for each.

    Yields after each micro-batch of at most `pack_tokens` tokens (counted before sharing), so that other work can run
    in between. A failed job leaves all gradients unchanged.
    """
    runs = [_Run(job) for job in jobs]
    for pack in _packs(jobs, pack_tokens):
        parts = [(runs[number], data) for number, data in pack.items()]
        _together(engine, [Part(run, data, [run.job.wanted(datum) for datum in data]) for run, data in parts])
        yield
    return [run.end() for run in runs]


def _packs(jobs: Sequence[Job], tokens: int) -> Generator[dict[int, list[Datum]], None, None]:
    """Yields the data of all jobs in order, by job number, at most `tokens` tokens at a time (a single datum may exceed
    it)."""
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


def _together(engine: Engine, parts: list[Part]) -> None:
    """Runs one pass for all `parts`. If it fails, runs each part alone, so that only the jobs that cause the error
    fail."""
    parts = [part for part in parts if part.run.error is None]
    if not parts:
        return
    try:
        _pass(engine, parts)
    except Exception as error:  # for example out of memory
        if len(parts) == 1:
            parts[0].run.error = error
            return
        for part in parts:
            _together(engine, [part])


def _pass(engine: Engine, parts: list[Part]) -> None:
    """Runs one forward pass for all data, one loss per job, and one backward pass for all losses. Results are recorded
    only after everything has succeeded; only failed losses are recorded before."""
    forests = [plant([datum.tokens for datum in part.data]) for part in parts]
    flat, sizes = joined(forests), [len(forest.ids_S) for forest in forests]
    route = Blocks([part.run.adapter for part in parts], sizes)
    rows = _rows(parts, forests)
    keep = np.unique(np.concatenate([row_n for part_rows in rows for row_n in part_rows]))
    with torch.set_grad_enabled(any(part.run.job.backward for part in parts)):
        positions, layout = engine.tensor(flat.positions_S), TreeLayout(flat, engine.device)
        logits_CV = engine.logits(engine.tensor(flat.ids_S), positions, layout, route, engine.tensor(keep)).float()
        norm_C = torch.logsumexp(logits_CV, -1)
        judged = []
        for part, part_rows in zip(parts, rows, strict=True):
            at = [np.searchsorted(keep, row_n) for row_n in part_rows]
            judgement = _judge(part, _predicted(engine, part, at, logits_CV, norm_C))
            if judgement is not None:
                judged.append(judgement)
        gradients = _gradients([(j.run, j.loss) for j in judged if j.run.job.backward and j.loss.requires_grad])
    for run, found in gradients:
        run.add(found)
    for judgement in judged:
        judgement.note()


def _gradients(losses: Sequence[tuple[_Run, Tensor]]) -> list[tuple[_Run, list[Tensor]]]:
    """Returns the gradients of each job's loss with respect to its own leaves only, since those of a failed job may be
    NaN."""
    if not losses:
        return []
    leaves = [run.adapter.parameters() for run, _ in losses]
    total = torch.stack([loss for _, loss in losses]).sum()
    flat = iter(torch.autograd.grad(total, [w for part in leaves for w in part], materialize_grads=True))
    return [(run, [next(flat) for _ in part]) for (run, _), part in zip(losses, leaves, strict=True)]


def _rows(parts: Sequence[Part], forests: Sequence[Forest]) -> list[list[np.ndarray]]:
    """Returns, for each datum of each part, the flat rows [n] whose logits are needed."""
    starts = np.cumsum([0] + [len(forest.ids_S) for forest in forests])
    return [
        [start + path[n] for n, path in zip(part.wanted, forest.paths, strict=True)]
        for part, forest, start in zip(parts, forests, starts, strict=False)
    ]


def _predicted(engine: Engine, part: Part, at: Sequence[np.ndarray], logits_CV: Tensor, norm_C: Tensor) -> Predicted:
    """Builds the loss inputs; `at` are the rows of `logits_CV` for each datum's scored positions."""
    _, data, wanted = part
    targets = [datum.targets[n] for datum, n in zip(data, wanted, strict=True)]
    widths = [datum.targets.size // len(datum.tokens) for datum in data]
    row_M = engine.tensor(np.concatenate([np.repeat(r, width) for r, width in zip(at, widths, strict=True)]))
    inputs = {
        name: engine.tensor(
            np.concatenate([d.inputs[name][n].ravel() for d, n in zip(data, wanted, strict=True)]), torch.float32
        )
        for name in data[0].inputs
    }
    sequence_M = engine.tensor(np.repeat(np.arange(len(data)), [target.size for target in targets]))
    logp_M = logits_CV[row_M, engine.tensor(np.concatenate([t.ravel() for t in targets]))] - norm_C[row_M]
    return Predicted(logp_M, inputs, sequence_M, lambda: logits_CV.index_select(0, row_M))


@dataclass(frozen=True)
class _Judgement:
    """A job's loss on one part of its data, recorded after the pass has succeeded."""

    run: _Run
    loss: Tensor
    logps: list[np.ndarray]
    figures: dict[str, float]

    def note(self) -> None:
        """Adds log-probabilities and metrics to the job's outcome."""
        outcome = self.run.outcome
        outcome.logps += self.logps
        for name, value in self.figures.items():
            outcome.figures[name] = outcome.figures.get(name, 0.0) + value


def _judge(part: Part, predicted: Predicted) -> _Judgement | None:
    """Computes the job's loss. If it fails or is not finite, records the error, which ends the job, and returns
    None."""
    run = part.run
    try:
        loss, figures = run.job.loss(predicted)
        if not torch.isfinite(loss):
            raise ValueError(f"the loss is {float(loss)}: look for extreme log-probabilities, weights or advantages")
    except ValueError as error:
        run.error = error
        return None
    logps = _spread(part, predicted.logp_M.detach().cpu().numpy())
    return _Judgement(run, loss, logps, {k: float(v) for k, v in {"loss": loss.detach(), **figures}.items()})


def _spread(part: Part, logp_M: np.ndarray) -> list[np.ndarray]:
    """Returns the log-probabilities of each datum in the shape of its targets, 0 at positions that were not scored."""
    spread, first = [], 0
    for datum, wanted in zip(part.data, part.wanted, strict=True):
        logps = np.zeros(datum.targets.shape, np.float32)
        size = logps[wanted].size
        logps[wanted] = logp_M[first : first + size].reshape(logps[wanted].shape)
        spread.append(logps)
        first += size
    return spread
