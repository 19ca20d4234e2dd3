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
from itertools import chain, islice, repeat
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from palestra.core.losses import TensorMetrics
from palestra.core.types import Datum
from palestra.engine.bases.model import Engine
from palestra.engine.forward.flat_row import packs
from palestra.engine.forward.logits import fits_at_once, widen
from palestra.engine.forward.tree_attention import Forest, build_forest
from palestra.engine.lora.adapters import Adapter
from palestra.engine.lora.routes import BlockRoute, SingleAdapterRoute
from palestra.engine.training.adapter_weights import AdapterWeights
from palestra.engine.training.head import LMHead, ScoredTokens, score_tokens
from palestra.engine.training.train_pass import hidden_of_blocks

ReadLogits = Callable[[Tensor, slice], Tensor]


class JobLossInputs(NamedTuple):
    """Inputs of a job's loss: log-probabilities of the targets [M] float32, the data's `inputs` [M] float32 by name,
    and the index of each target's sequence [M] int64. `map_logits(read, index_A)`, for losses that need the logits,
    returns the results of `read(logits_CV, rows)` for the targets `index_A` (None: all), a slice `rows` of them at a
    time, with their logits float32; `read` returns a tensor [C]."""

    logp_M: Tensor
    inputs: dict[str, Tensor]
    sequence_M: Tensor
    map_logits: Callable[[ReadLogits, Tensor | None], Tensor]


JobLossFunction = Callable[[JobLossInputs], tuple[Tensor, TensorMetrics]]


@dataclass(frozen=True)
class Job:
    """One client's pass over its data; with `backward` false it only computes log-probabilities and losses. With
    `weighted_only`, targets of weight 0 (such as those of a prompt) are not computed; their log-probabilities are
    returned as 0."""

    trainer: AdapterWeights
    data: Sequence[Datum]
    loss: JobLossFunction
    backward: bool = True
    weighted_only: bool = False

    def scored_positions(self, datum: Datum) -> np.ndarray:
        """Returns the scored positions of `datum`, int64 [n]."""
        if not self.weighted_only:
            return np.arange(len(datum.tokens))
        weighted = np.flatnonzero((datum.inputs["weights"].reshape(len(datum.tokens), -1) != 0).any(1))
        if not len(weighted):
            return np.zeros(1, np.int64)
        return weighted


@dataclass
class JobResult:
    """Log-probabilities of each datum's targets, float32 in the targets' shape, and the loss's metrics summed over the
    data."""

    logprobs: list[np.ndarray] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class _JobState:
    """State of a running job, or the error that ended it."""

    job: Job
    adapter: Adapter = field(init=False)
    result: JobResult = field(default_factory=JobResult)
    gradients: list[Tensor] | None = None
    error: Exception | None = None

    def __post_init__(self) -> None:
        assert self.job.trainer.adapter is not None
        self.adapter = self.job.trainer.adapter.with_separate_grads()

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Adds gradients to those of the job."""
        if self.gradients is None:
            self.gradients = list(gradients)
        else:
            torch._foreach_add_(self.gradients, list(gradients))

    def end(self) -> JobResult | Exception:
        """Returns the outcome or the error. On success, adds the gradients of the job to those of its adapter."""
        if self.error is not None:
            return self.error
        for parameter, gradient in zip(self.job.trainer.parameters, self.gradients or (), strict=False):
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return self.result


class JobSlice(NamedTuple):
    """The data of a job in one micro-batch, with the scored positions of each datum."""

    state: _JobState
    data: list[Datum]
    scored_positions: list[np.ndarray]

    def build_forest(self) -> Forest:
        return build_forest([datum.tokens for datum in self.data])

    def find_rows(self, forest: Forest) -> list[np.ndarray]:
        """Returns the rows [n] of its forest whose logits are needed, for each datum."""
        return [path[n] for n, path in zip(self.scored_positions, forest.paths, strict=True)]


def train_jobs(
    engine: Engine, jobs: Sequence[Job], pack_tokens: int
) -> Generator[None, None, list[JobResult | Exception]]:
    """Runs `jobs` together; returns an outcome or an error for each.

    Yields after each micro-batch of at most `pack_tokens` tokens (counted before sharing), so that other work can run
    in between. A failed job leaves all gradients unchanged.
    """
    runs = [_JobState(job) for job in jobs]
    for pack in _micro_batches(jobs, pack_tokens):
        parts = []
        for number, data in pack.items():
            run = runs[number]
            parts.append(JobSlice(run, data, [run.job.scored_positions(datum) for datum in data]))
        _run_slices(engine, parts)
        yield
    return [run.end() for run in runs]


def _micro_batches(jobs: Sequence[Job], tokens: int) -> Generator[dict[int, list[Datum]], None, None]:
    """Yields the data of all jobs in order, by job number, at most `tokens` tokens at a time (a single datum may exceed
    it)."""
    numbered = chain.from_iterable(zip(repeat(number), job.data, strict=False) for number, job in enumerate(jobs))
    for pack in packs(numbered, lambda part: len(part[1].tokens), tokens):
        data: dict[int, list[Datum]] = {}
        for number, datum in pack:
            data.setdefault(number, []).append(datum)
        yield data


def _run_slices(engine: Engine, parts: list[JobSlice]) -> None:
    """Runs one pass for all `parts`. If it fails, runs each part alone, so that only the jobs that cause the error
    fail."""
    if not (parts := [part for part in parts if part.state.error is None]):
        return
    try:
        _pass(engine, parts)
    except Exception as error:  # for example out of memory
        if len(parts) == 1:
            parts[0].state.error = error
            return
        for part in parts:
            _run_slices(engine, [part])


def _pass(engine: Engine, parts: list[JobSlice]) -> None:
    """Runs one forward pass for all data, one loss per job, and one backward pass for all losses. Results are recorded
    only after everything has succeeded; only failed losses are recorded before."""
    forests = [part.build_forest() for part in parts]
    adapters = [part.state.adapter for part in parts]
    rows = [part.find_rows(forest) for part, forest in zip(parts, forests, strict=True)]
    kept = [np.unique(np.concatenate(part_rows)) for part_rows in rows]
    counts = list(map(len, kept))
    starts = np.cumsum([0, *counts[:-1]])
    with torch.set_grad_enabled(any(part.state.job.backward for part in parts)):
        hidden_CH = hidden_of_blocks(engine, forests, adapters, kept)
        head_of = _heads(engine, BlockRoute(adapters, counts), hidden_CH)
        judged = []
        for part, part_rows, kept_rows, start in zip(parts, rows, kept, starts, strict=True):
            at = [start + np.searchsorted(kept_rows, row_n) for row_n in part_rows]
            judgement = _compute_loss(part, _loss_inputs(engine, part, at, head_of(part)))
            if judgement is not None:
                judged.append(judgement)
        gradients = _gradients([(j.state, j.loss) for j in judged if j.state.job.backward and j.loss.requires_grad])
    for run, found in gradients:
        run.add(found)
    for judgement in judged:
        judgement.record()


def _gradients(losses: Sequence[tuple[_JobState, Tensor]]) -> list[tuple[_JobState, list[Tensor]]]:
    """Returns the gradients of each job's loss with respect to its own leaves only, since those of a failed job may be
    NaN."""
    if not losses:
        return []
    leaves = [run.adapter.parameters() for run, _ in losses]
    total = torch.stack([loss for _, loss in losses]).sum()
    flat = iter(torch.autograd.grad(total, list(chain.from_iterable(leaves)), materialize_grads=True))
    return [(run, list(islice(flat, len(part)))) for (run, _), part in zip(losses, leaves, strict=True)]


class WholeHead:
    """The head of a pass whose logits fit at once: those of all jobs are computed together. `logprobs` returns those
    of the tokens `token_M` in the rows `row_M` of the pass [M] float32, `map_logits` the results of `read(logits_CV,
    rows)` for its rows `row_A`."""

    def __init__(self, engine: Engine, route: BlockRoute, hidden_CH: Tensor) -> None:
        self.logits_CV = widen(engine.head_logits(hidden_CH, route))
        self.norm_C = torch.logsumexp(self.logits_CV, -1)

    def logprobs(self, row_M: Tensor, token_M: Tensor) -> Tensor:
        return self.logits_CV[row_M, token_M] - self.norm_C[row_M]

    def map_logits(self, row_A: Tensor, read: ReadLogits) -> Tensor:
        return read(self.logits_CV.index_select(0, row_A), slice(0, len(row_A)))


class ChunkedHead:
    """The head of one job in a pass whose logits do not fit at once, with the methods of `WholeHead`."""

    def __init__(self, engine: Engine, adapter: Adapter, hidden_CH: Tensor) -> None:
        self.head = LMHead(engine, SingleAdapterRoute(adapter))
        self.hidden_CH = hidden_CH

    def logprobs(self, row_M: Tensor, token_M: Tensor) -> Tensor:
        rows, row_M = row_M.unique(return_inverse=True)
        wanted = ScoredTokens(row_M, token_M, None)
        return score_tokens(self.head, self.hidden_CH.index_select(0, rows), wanted, entropy_grad=False)[0]

    def map_logits(self, row_A: Tensor, read: ReadLogits) -> Tensor:
        return self.head.map_chunks(self.hidden_CH.index_select(0, row_A), read)


TargetHead = WholeHead | ChunkedHead


def _heads(engine: Engine, route: BlockRoute, hidden_CH: Tensor) -> Callable[[JobSlice], TargetHead]:
    """Returns the head of each part of a pass with the hidden states `hidden_CH`."""
    if fits_at_once(len(hidden_CH), engine.vocab_size):
        whole = WholeHead(engine, route, hidden_CH)
        return lambda part: whole
    return lambda part: ChunkedHead(engine, part.state.adapter, hidden_CH)


def _loss_inputs(engine: Engine, part: JobSlice, at: Sequence[np.ndarray], head: TargetHead) -> JobLossInputs:
    """Builds the loss inputs; `at` are the rows of the pass's hidden states for each datum's scored positions."""
    _, data, wanted = part
    targets = [datum.targets[n] for datum, n in zip(data, wanted, strict=True)]
    widths = [datum.targets.size // len(datum.tokens) for datum in data]
    row_M = engine.tensor(np.concatenate([np.repeat(r, width) for r, width in zip(at, widths, strict=True)]))
    inputs = {}
    for name in data[0].inputs:
        values = [datum.inputs[name][n].ravel() for datum, n in zip(data, wanted, strict=True)]
        inputs[name] = engine.tensor(np.concatenate(values), torch.float32)
    sequence_M = engine.tensor(np.repeat(np.arange(len(data)), [target.size for target in targets]))
    token_M = engine.tensor(np.concatenate([t.ravel() for t in targets]))

    def map_logits(read: ReadLogits, index_A: Tensor | None) -> Tensor:
        return head.map_logits(row_M if index_A is None else row_M[index_A], read)

    return JobLossInputs(head.logprobs(row_M, token_M), inputs, sequence_M, map_logits)


@dataclass(frozen=True)
class _JobLoss:
    """A job's loss on one part of its data, recorded after the pass has succeeded."""

    state: _JobState
    loss: Tensor
    logprobs: list[np.ndarray]
    metrics: dict[str, float]

    def record(self) -> None:
        """Adds log-probabilities and metrics to the job's outcome."""
        outcome = self.state.result
        outcome.logprobs += self.logprobs
        for name, value in self.metrics.items():
            outcome.metrics[name] = outcome.metrics.get(name, 0.0) + value


def _compute_loss(part: JobSlice, predicted: JobLossInputs) -> _JobLoss | None:
    """Computes the job's loss. If it fails or is not finite, records the error, which ends the job, and returns
    None."""
    run = part.state
    try:
        loss, metrics = run.job.loss(predicted)
        if not torch.isfinite(loss):
            raise ValueError(f"the loss is {float(loss)}: look for extreme log-probabilities, weights or advantages")
    except ValueError as error:
        run.error = error
        return None
    logps = _spread(part, predicted.logp_M.detach().cpu().numpy())
    return _JobLoss(run, loss, logps, {k: float(v) for k, v in {"loss": loss.detach(), **metrics}.items()})


def _spread(part: JobSlice, logp_M: np.ndarray) -> list[np.ndarray]:
    """Returns the log-probabilities of each datum in the shape of its targets, 0 at positions that were not scored."""
    spread = []
    first = 0
    for datum, wanted in zip(part.data, part.scored_positions, strict=True):
        logps = np.zeros(datum.targets.shape, np.float32)
        size = logps[wanted].size
        logps[wanted] = logp_M[first : first + size].reshape(logps[wanted].shape)
        spread.append(logps)
        first += size
    return spread
