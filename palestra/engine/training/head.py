"""The output head a chunk of rows at a time: log-probabilities and entropies of tokens without the logits of all rows.

Logits are by far the largest tensors of a training pass: one row has as many values as the vocabulary has tokens. If
all rows together have at most `MAX_LOGITS` values, they are one chunk and autograd keeps its logits. Otherwise only the
logits of one chunk exist at a time. With a frozen head, the gradient of a token's log-probability with respect to its
hidden state is computed while the logits are there, and scaled in the backward pass: it depends on the loss only by one
factor per token, so nothing is computed twice. With a trained head, chunks are recomputed in the backward pass.

Logits are computed by the model itself, since some models scale or cap the output of their head.

Shapes: `M` tokens, `R` rows of hidden states, `C` rows of a chunk, `H` width of the model, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from palestra.engine.bases.model import Engine
from palestra.engine.forward.flat_row import AdapterRoute
from palestra.engine.forward.logits import cached_chunks, fits_at_once, row_chunks, widen
from palestra.engine.training.kept_tokens import KeptTokens

MAX_TOKENS_PER_ROW = 1.5  # with more, computing each row twice costs less than each token once


class LMHead:
    """The output head of `engine` with the adapters of `route`, in the autocast dtype that the engine has when the head
    is created."""

    def __init__(self, engine: Engine, route: AdapterRoute | None) -> None:
        self.engine = engine
        self.route = route
        self.autocast_dtype = engine.autocast_dtype
        self.vocab_size = engine.vocab_size

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Returns the logits [R, V] in at least float32, under the head's route and dtype, also in a backward pass."""
        with self.engine.precision_context(self.autocast_dtype):
            return widen(self.engine.head_logits(hidden_RH, self.route))

    def is_trained(self, hidden_RH: Tensor) -> bool:
        """Returns whether the head has weights with gradients, its own or an adapter's."""
        return self.logits(hidden_RH[:1].detach()).requires_grad

    def map_chunks(self, hidden_RH: Tensor, read: Callable[[Tensor, slice], Tensor]) -> Tensor:
        """Returns `read(logits, rows)` of all rows, concatenated. Logits are recomputed in the backward pass if there
        is more than one chunk."""
        parts = list(row_chunks(len(hidden_RH), self.vocab_size))
        if len(parts) == 1:
            return read(self.logits(hidden_RH), parts[0])

        def compute(chunk_CH: Tensor, rows: slice) -> Tensor:
            return read(self.logits(chunk_CH), rows)

        return torch.cat(
            [
                checkpoint(compute, hidden_RH[rows], rows, use_reentrant=False, preserve_rng_state=False)
                for rows in parts
            ]
        )


class ScoredTokens(NamedTuple):
    """Tokens to score, each [M]: the row of each in the hidden states and its id, int64, the temperature at which it
    was sampled, float32, and the tokens that were kept when it was sampled (None: all)."""

    row_M: Tensor
    token_M: Tensor
    temperature_M: Tensor | None
    kept: KeptTokens | None = None

    def at(self, index: slice | Tensor) -> ScoredTokens:
        """Returns some of the tokens."""
        temperature_M = None if self.temperature_M is None else self.temperature_M[index]
        kept = None if self.kept is None else self.kept.at(index)
        return ScoredTokens(self.row_M[index], self.token_M[index], temperature_M, kept)


def scored_tokens(
    engine: Engine, row_M: np.ndarray, token_M: np.ndarray, temperature_M: np.ndarray, kept: KeptTokens | None = None
) -> ScoredTokens:
    """Returns the tokens as tensors on the engine's device."""
    warm = bool((temperature_M != 1).any())
    temperature = engine.tensor(temperature_M, torch.float32) if warm else None
    return ScoredTokens(engine.tensor(row_M), engine.tensor(token_M), temperature, kept)


def score_tokens(head: LMHead, hidden_RH: Tensor, wanted: ScoredTokens, *, entropy_grad: bool) -> tuple[Tensor, Tensor]:
    """Returns the log-probability [M] of each token and the entropy [M] of its distribution in nats, at least float32.
    Log-probabilities have gradients; entropies only with `entropy_grad`."""
    if fits_at_once(len(hidden_RH), head.vocab_size):
        return score_logits(head.logits(hidden_RH), wanted, entropy_grad=entropy_grad)
    distinct, index_M = _distinct(wanted, head.vocab_size)
    many = len(distinct.row_M) > MAX_TOKENS_PER_ROW * len(hidden_RH)
    if many or (torch.is_grad_enabled() and head.is_trained(hidden_RH)):
        return _score_by_row(head, hidden_RH, wanted, entropy_grad)
    hidden_MH = select_rows(hidden_RH, distinct.row_M)
    logp_M, entropy_M = FrozenHeadScore.apply(hidden_MH, head, distinct, entropy_grad)
    return select_rows(logp_M, index_M), select_rows(entropy_M, index_M)


def _score_by_row(head: LMHead, hidden_RH: Tensor, wanted: ScoredTokens, entropy_grad: bool) -> tuple[Tensor, Tensor]:
    """Scores tokens with logits that are recomputed in the backward pass, each row's once for all of its tokens."""
    row_M, order_M = wanted.row_M.sort(stable=True)
    ordered = wanted.at(order_M)

    def read(logits_CV: Tensor, rows: slice) -> Tensor:
        ends = torch.tensor([rows.start, rows.stop], device=row_M.device)
        mine = ordered.at(slice(*torch.searchsorted(row_M, ends).tolist()))
        scores = _score(select_rows(logits_CV, mine.row_M - rows.start), mine, entropy_grad)
        return torch.stack(scores, -1)

    found = head.map_chunks(hidden_RH, read).index_select(0, order_M.argsort())
    return found[:, 0], found[:, 1] if entropy_grad else found[:, 1].detach()


def score_logits(logits_RV: Tensor, wanted: ScoredTokens, *, entropy_grad: bool) -> tuple[Tensor, Tensor]:
    """Returns what `score_tokens` returns, from the logits of all rows."""
    return _score(select_rows(logits_RV, wanted.row_M), wanted, entropy_grad)


def select_rows(rows: Tensor, index_M: Tensor) -> Tensor:
    """Returns the rows `index_M` of a tensor; the tensor itself if these are all rows in order."""
    if len(index_M) == len(rows) and torch.equal(index_M, torch.arange(len(rows), device=index_M.device)):
        return rows
    return rows.index_select(0, index_M)


def _score(logits_MV: Tensor, wanted: ScoredTokens, entropy_grad: bool) -> tuple[Tensor, Tensor]:
    logp_MV = _log_softmax(logits_MV, wanted)
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_grad):
        entropy_M = -(logp_MV.exp() * logp_MV).sum(-1)
    return logp_MV.gather(1, wanted.token_M[:, None])[:, 0], entropy_M


def _log_softmax(logits_MV: Tensor, wanted: ScoredTokens) -> Tensor:
    if wanted.temperature_M is not None:
        logits_MV = logits_MV / wanted.temperature_M[:, None]
    if wanted.kept is not None:
        logits_MV = wanted.kept.mask_removed(logits_MV)
    return torch.log_softmax(logits_MV, -1)


def _distinct(wanted: ScoredTokens, vocab_size: int) -> tuple[ScoredTokens, Tensor]:
    """Returns the distinct tokens in the order of their rows, and the index of each token among them: answers with a
    common beginning are scored once. With kept sets, which are not compared, tokens stay as they are."""
    if wanted.kept is not None:
        return wanted, torch.arange(len(wanted.row_M), device=wanted.row_M.device)
    key_M = wanted.row_M * vocab_size + wanted.token_M
    if wanted.temperature_M is not None:
        levels, level_M = wanted.temperature_M.unique(return_inverse=True)
        key_M = key_M * len(levels) + level_M
    keys, index_M = key_M.unique(return_inverse=True)
    first = index_M.new_empty(len(keys)).scatter_(0, index_M, torch.arange(len(index_M), device=index_M.device))
    return wanted.at(first), index_M


class FrozenHeadScore(torch.autograd.Function):
    """Scores tokens chunk by chunk with a head that is not trained. The forward pass keeps, per token, the gradients of
    its log-probability and (with `entropy_grad`) of its entropy with respect to its hidden state."""

    @staticmethod
    def forward(
        ctx: Any, hidden_MH: Tensor, head: LMHead, wanted: ScoredTokens, entropy_grad: bool
    ) -> tuple[Tensor, Tensor]:
        kinds = (1 + entropy_grad) if ctx.needs_input_grad[0] else 0
        grads = [torch.empty_like(hidden_MH) for _ in range(kinds)]
        # results are allocated before the chunks: allocations between chunks would fragment the memory
        dtype = torch.promote_types(hidden_MH.dtype, torch.float32)
        logp_M, entropy_M = (hidden_MH.new_empty(len(hidden_MH), dtype=dtype) for _ in range(2))
        for rows in row_chunks(len(hidden_MH), head.vocab_size):
            with torch.set_grad_enabled(kinds > 0):
                chunk_CH = hidden_MH[rows].detach().requires_grad_(kinds > 0)
                logits_CV = head.logits(chunk_CH)
            scores = _score_and_grad(chunk_CH, logits_CV, wanted.at(rows), [g[rows] for g in grads])
            logp_M[rows], entropy_M[rows] = scores
            del logits_CV, scores
        ctx.save_for_backward(*grads)
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy_M)
        return logp_M, entropy_M

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        total = sum(
            outer_M[:, None].to(grad_MH.dtype) * grad_MH
            for outer_M, grad_MH in zip(grad_outputs, ctx.saved_tensors, strict=False)
        )
        return total, None, None, None


def _score_and_grad(
    chunk_CH: Tensor, logits_CV: Tensor, wanted: ScoredTokens, grads: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Returns the scores of a chunk, and writes the gradients of the log-probabilities and of the entropies with
    respect to the hidden states to `grads` (of which there may be fewer)."""
    by_logit = [torch.empty_like(logits_CV) for _ in grads]
    scores = []
    for few in cached_chunks(logits_CV):
        grads_FV = [grad_CV[few] for grad_CV in by_logit]
        scores.append(_score_few(logits_CV.detach()[few], wanted.at(few), grads_FV))
    for grad_CH, grad_CV in zip(grads, by_logit, strict=True):
        is_last = grad_CH is grads[-1]
        grad_CH.copy_(torch.autograd.grad(logits_CV, chunk_CH, grad_CV, retain_graph=not is_last)[0])
    logp_C, entropy_C = (torch.cat(parts) for parts in zip(*scores, strict=True))
    return logp_C, entropy_C


def _score_few(logits_CV: Tensor, wanted: ScoredTokens, grads: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the scores of a few rows, and writes the gradients with respect to their logits to `grads`."""
    logp_CV = _log_softmax(logits_CV, wanted)
    prob_CV = logp_CV.exp()
    entropy_C = -torch.linalg.vecdot(prob_CV, logp_CV)
    logp_C = logp_CV.gather(1, wanted.token_M[:, None])[:, 0]
    if len(grads) == 2:  # d entropy / d logit = -p (log p + entropy)
        torch.mul(logp_CV.add_(entropy_C[:, None]), prob_CV, out=grads[1]).neg_()
    if grads:  # d log p of token t / d logit = [logit is t's] - p
        one = prob_CV.new_ones(len(prob_CV), 1)
        torch.neg(prob_CV, out=grads[0]).scatter_add_(1, wanted.token_M[:, None], one)
    if wanted.temperature_M is not None:
        for grad_CV in grads:
            grad_CV /= wanted.temperature_M[:, None]
    return logp_C, entropy_C
