"""Log-probabilities of given tokens under snapshots: many prompts and many adapters in one pass, without gradients.

Each adapter's prompts form a separate forest (tree_attention.py), since the same tokens have other activations under
other weights; the forests are concatenated in one flat row. The pass ends before the model's head: the logits of all
rows would be by far the largest tensor, so they are computed and read a few rows at a time.

Shapes: `P` prompt tokens, `K` targets per position, `k` best tokens, `D` drawn tokens; `S` tokens of a forest, `H`
width of the model, `A` log-probabilities to compute, `C` rows at a time, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

import numpy as np
import torch
from torch import Tensor

from palestra.core.types import Sample
from palestra.engine.bases.model import Engine
from palestra.engine.forward.flat_row import packs
from palestra.engine.forward.logits import row_chunks, widen
from palestra.engine.forward.tree_attention import Forest, build_forest, concat_forests
from palestra.engine.lora.adapters import RowOrder, Snapshot, row_order
from palestra.engine.lora.routes import AdapterStack, MultiAdapterRoute
from palestra.engine.sampling.request import check_prompt, check_top_logprobs


@dataclass(frozen=True)
class AlternativeDraws:
    """`count` tokens to draw at each position of a prompt, with replacement, at `temperature` (0: the likeliest)."""

    count: int = 0
    temperature: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class ScoreRequest:
    """A request for the log-probabilities of the prompt `ids` [P] (int) under `adapter` (None: the bare base).

    `top_logprobs` is the number of most likely tokens to return at each position. `targets` [P-1, K] (int) are further
    tokens to score: row i is scored at the position of `ids[i + 1]` (-1: none). `draws` asks for tokens that the model
    would have said in place of each.
    """

    ids: np.ndarray
    adapter: Snapshot | None = None
    top_logprobs: int = 0
    targets: np.ndarray | None = None
    draws: AlternativeDraws = AlternativeDraws()


@dataclass(frozen=True)
class ScoreResult:
    """Log-probabilities at temperature 1, float32: `logprobs` [P-1] of `ids[1:]`, `top_logprobs` [P-1, k] of the most
    likely tokens `top_ids` [P-1, k] int64, best first, `target_logprobs` [P-1, K], 0 where the target is -1 (None
    without targets), and `drawn_logprobs` [P-1, D] of the drawn tokens `drawn_ids` [P-1, D] int64 (D is 0 without
    draws)."""

    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    target_logprobs: np.ndarray | None
    drawn_ids: np.ndarray
    drawn_logprobs: np.ndarray


def score_prompts(engine: Engine, requests: Sequence[ScoreRequest], *, pack_tokens: int = 16384) -> list[ScoreResult]:
    """Returns the scores of all `requests`, in their order.

    A pass has at most `pack_tokens` prompt tokens, counted before sharing (a single prompt may exceed it). Raises
    ValueError for the first invalid request: an empty or too long prompt, or token ids out of range.
    """
    for question in requests:
        _check(engine, question)
    scores: dict[int, ScoreResult] = {}
    for pack in _micro_batches(requests, pack_tokens):
        scores |= zip(pack, _score(engine, [requests[i] for i in pack]), strict=True)
    return [scores[i] for i in range(len(requests))]


def answer_logprobs(engine: Engine, adapter: Snapshot | None, samples: Sequence[Sample]) -> list[np.ndarray]:
    """Returns log-probabilities [T] float32 of each sample's answer tokens under `adapter` (None: the bare base), at
    temperature 1."""
    requests = [ScoreRequest(np.concatenate([s.prompt_ids, s.token_ids]), adapter) for s in samples]
    scores = score_prompts(engine, requests)
    return [score.logprobs[len(s.prompt_ids) - 1 :] for s, score in zip(samples, scores, strict=True)]


def _check(engine: Engine, question: ScoreRequest) -> None:
    check_prompt(engine, question.ids, 0)
    check_top_logprobs(engine, question.top_logprobs)
    if question.targets is None:
        return
    if question.targets.ndim != 2 or len(question.targets) != len(question.ids) - 1:
        shape = "x".join(map(str, question.targets.shape))
        raise ValueError(f"targets of {shape} for a prompt of {len(question.ids)} tokens: a row for each but the first")
    vocabulary = engine.vocab_size
    if question.targets.size and (question.targets.min() < -1 or question.targets.max() >= vocabulary):
        raise ValueError(f"targets must be token ids from 0 to {vocabulary - 1}, or -1 for none")


def _micro_batches(questions: Sequence[ScoreRequest], tokens: int) -> Iterator[list[int]]:
    """Returns indices of `questions`, sorted so that prompts with common prefixes are in one pack."""
    order = sorted(range(len(questions)), key=lambda i: (_owner(questions[i]), questions[i].ids.tolist()))
    return packs(order, lambda i: len(questions[i].ids), tokens)


def _owner(question: ScoreRequest) -> RowOrder:
    return row_order(question.adapter)


@torch.inference_mode()
def _score(engine: Engine, questions: list[ScoreRequest]) -> list[ScoreResult]:
    """Returns the scores of one pass; `questions` are sorted by owner."""
    blocks = [list(block) for _, block in groupby(questions, key=_owner)]
    # the last token's prediction is not needed, but a prompt of one token must keep it
    forests = []
    for block in blocks:
        forests.append(build_forest([q.ids[: max(1, len(q.ids) - 1)].astype(np.int64) for q in block]))
    adapters = [block[0].adapter for block in blocks]
    sizes = [len(forest.ids_S) for forest in forests]
    every = np.arange(sum(sizes))
    hidden_SH = engine.forest_states(concat_forests(forests), _route(engine, adapters, sizes), every)
    rows = zip(blocks, forests, hidden_SH.split(sizes), strict=True)
    return list(chain.from_iterable(_read(engine, block, forest, part_SH) for block, forest, part_SH in rows))


def _route(engine: Engine, adapters: Sequence[Snapshot | None], counts: Sequence[int]) -> MultiAdapterRoute | None:
    """Returns the route of blocks of `counts` rows under `adapters`, the bare base last; None if there is only the bare
    base."""
    used = [(adapter, count) for adapter, count in zip(adapters, counts, strict=True) if adapter]
    if not used:
        return None
    adapters, counts = zip(*used, strict=True)
    return MultiAdapterRoute(AdapterStack(adapters, engine.linear_layers), counts)


def _read(engine: Engine, questions: Sequence[ScoreRequest], forest: Forest, hidden_SH: Tensor) -> list[ScoreResult]:
    """Returns the scores of questions of one owner from the last hidden states of their forest."""
    paths = [path[: len(q.ids) - 1] for q, path in zip(questions, forest.paths, strict=True)]
    asked = [_scored_tokens(q) for q in questions]
    row_A = np.concatenate([np.repeat(path, ids.shape[1]) for path, ids in zip(paths, asked, strict=True)])
    token_A = np.concatenate([ids.ravel() for ids in asked])
    most = max(q.top_logprobs for q in questions)
    drawn = [_Drawn(q, path) for q, path in zip(questions, paths, strict=True)]
    logp_A, ids_Sk, logps_Sk = _gather_logprobs(engine, questions[0].adapter, hidden_SH, row_A, token_A, most, drawn)
    ends = np.cumsum([ids.size for ids in asked])[:-1]
    scores = []
    for q, path, ids, logps, draws in zip(questions, paths, asked, np.split(logp_A, ends), drawn, strict=True):
        logps_PK = np.where(ids < 0, 0.0, logps.reshape(ids.shape)).astype(np.float32)
        scores.append(
            ScoreResult(
                logprobs=logps_PK[:, 0],
                top_ids=ids_Sk[path, : q.top_logprobs],
                top_logprobs=logps_Sk[path, : q.top_logprobs],
                target_logprobs=None if q.targets is None else logps_PK[:, 1:],
                drawn_ids=draws.ids_PD,
                drawn_logprobs=draws.logps_PD,
            )
        )
    return scores


def _scored_tokens(question: ScoreRequest) -> np.ndarray:
    """Returns the tokens [P-1, 1 + K] to score at each position: the prompt's own, then the targets."""
    prompt = question.ids[1:, None].astype(np.int64)
    return prompt if question.targets is None else np.concatenate([prompt, question.targets.astype(np.int64)], 1)


class _Drawn:
    """The tokens that a request draws at the rows `path` [P-1] of its forest, filled in a few rows at a time."""

    def __init__(self, question: ScoreRequest, path: np.ndarray) -> None:
        self.path = path
        self.draws = question.draws
        shape = (len(path), self.draws.count)
        self.uniform_PD = np.random.default_rng(self.draws.seed).random(shape)
        self.ids_PD = np.zeros(shape, np.int64)
        self.logps_PD = np.zeros(shape, np.float32)

    def read(self, rows: slice, logp_CV: Tensor) -> None:
        """Draws by inverse transform at the positions among `rows`, whose log-probabilities are `logp_CV`."""
        here = np.flatnonzero((self.path >= rows.start) & (self.path < rows.stop))
        if not self.draws.count or not len(here):
            return
        logp_PV = logp_CV[torch.as_tensor(self.path[here] - rows.start, device=logp_CV.device)].double()
        if self.draws.temperature == 0:
            ids_PD = logp_PV.argmax(-1, keepdim=True).expand(-1, self.draws.count)
        else:
            cumulative_PV = torch.softmax(logp_PV / self.draws.temperature, -1).cumsum(-1)
            uniform_PD = torch.as_tensor(self.uniform_PD[here], device=logp_PV.device)
            # relative to the last sum, which rounding keeps from being exactly 1
            ids_PD = torch.searchsorted(cumulative_PV, uniform_PD * cumulative_PV[:, -1:], right=True)
            ids_PD = ids_PD.clamp(max=logp_PV.shape[-1] - 1)
        self.ids_PD[here] = ids_PD.cpu().numpy()
        self.logps_PD[here] = logp_PV.gather(-1, ids_PD).float().cpu().numpy()


def _gather_logprobs(
    engine: Engine,
    adapter: Snapshot | None,
    hidden_SH: Tensor,
    row_A: np.ndarray,
    token_A: np.ndarray,
    k: int,
    drawn: Sequence[_Drawn],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns log-probabilities [A] of `token_A` at `row_A`, and the `k` most likely tokens of each row with their
    log-probabilities [S, k]. The value is meaningless where a token is -1. Fills in `drawn`."""
    size = len(hidden_SH)
    order = np.argsort(row_A, kind="stable")
    logp_A = np.zeros(len(row_A), np.float32)
    ids_Sk = np.zeros((size, k), np.int64)
    logps_Sk = np.zeros((size, k))
    for rows in row_chunks(size, engine.vocab_size):
        route = _route(engine, [adapter], [rows.stop - rows.start])
        logp_CV = torch.log_softmax(widen(engine.head_logits(hidden_SH[rows], route)), -1)
        mine = order[slice(*np.searchsorted(row_A, [rows.start, rows.stop], sorter=order))]
        logp = logp_CV[engine.tensor(row_A[mine] - rows.start), engine.tensor(token_A[mine])]
        logp_A[mine] = logp.cpu().numpy()
        if k:
            logps_Sk[rows], ids_Sk[rows] = (best.cpu().numpy() for best in logp_CV.topk(k))
        for draws in drawn:
            draws.read(rows, logp_CV)
    return logp_A, ids_Sk, logps_Sk.astype(np.float32)
