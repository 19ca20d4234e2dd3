"""The live batch of the sampler: the rows that are being sampled, and the choice of their next tokens.

A row is one answer being sampled: answer `k` of a group. `start` computes prompts and samples the first token of
new rows, `decode` samples the next token of live rows, `remove_finished` removes finished rows. Rows need not be in
step: each has its own position and its own counter-based random stream (seed, sibling, position), so its tokens do not
depend on the other rows of a pass, except for floating-point rounding, which depends on the shapes of a pass.

How logits are computed is up to batch.py (packed rows and our KV cache) and plain_batch.py (transformers' own forward
and cache).

Shapes: `R` rows, `V` vocabulary, `k` best tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from palestra.engine.bases.model import Engine
from palestra.engine.conversation.answers import end_tokens
from palestra.engine.sampling.request import LiveSequence, SequenceGroup
from palestra.engine.sampling.token_sampling import StopStringMatcher, counter_uniform, sample_tokens, top_tokens


class LiveBatch(ABC):
    """The live groups and rows of one engine. `counts` counts sampled, prefilled and reused tokens, and preempted
    answers. By default nothing is kept beyond the rows, and their memory has no budget."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.end_ids = end_token_ids(engine)
        self.groups: dict[SequenceGroup, None] = {}  # in order of admission
        self.rows: list[LiveSequence] = []  # by adapter
        self.counts = {"sampled_tokens": 0, "prefill_tokens": 0, "reused_tokens": 0, "preempted_answers": 0}
        self.gathers_prompts = False  # a pass over prompts takes as long as many decoding steps, whatever its size
        self._over: list[LiveSequence] = []  # rows that finished since the last `remove_finished`
        self._stop_strings = StopStringMatcher(engine.tokenizer)

    def reset(self) -> None:
        """Drops all groups, all rows and the cache."""
        self.groups = {}
        self.rows = []
        self._over = []

    def clear_cache(self) -> None:  # noqa: B027
        """Drops the stored keys, values and weights of earlier snapshots."""

    def release_memory(self) -> None:  # noqa: B027
        """Frees memory that no row uses."""

    @abstractmethod
    def start(self, groups: list[SequenceGroup]) -> None:
        """Computes the missing prompts of `groups` (equal prompts once), recomputes their resumed answers, and samples
        the first tokens of their admitted siblings, which become live rows."""

    @abstractmethod
    def decode(self, rows: Sequence[LiveSequence]) -> None:
        """Samples the next token of each of `rows`, which must be live and in batch order."""

    @abstractmethod
    def remove_finished(self) -> list[SequenceGroup]:
        """Removes finished rows. Returns the groups of which all rows are finished; these are removed too."""

    @abstractmethod
    def cancel(self, group: SequenceGroup) -> None:
        """Removes a group and its rows."""

    @property
    def free_bytes(self) -> int | None:
        """Bytes of the cache for more answers; None without a budget."""
        return None

    def fitting(self, group: SequenceGroup, count: int, free: int, *, new_prompt: bool) -> tuple[int, int]:
        """Returns how many of `count` more siblings of `group` can start in `free` bytes, and the bytes that they take
        (with `new_prompt`, their prompt's too)."""
        return count, 0

    def grow(self, rows: Sequence[LiveSequence]) -> None:  # noqa: B027
        """Makes room for the last token of each of `rows` in the cache. Raises CacheFull if there is no room for all of
        them; some may have grown."""

    @abstractmethod
    def preempt(self, rows: Sequence[LiveSequence]) -> None:
        """Frees the cache slots of live rows; their groups keep their tokens as `preempted`."""

    def release_idle(self, keep: Sequence[SequenceGroup] = ()) -> bool:
        """Frees the prompts of groups without live rows, except those in `keep`: they will be computed again. Returns
        whether there were any."""
        return False

    def lower_budget(self) -> None:  # noqa: B027
        """Sets the budget to what is in use: the machine has less memory than the budget says."""

    def rest(self) -> None:  # noqa: B027
        """Restores the budget and frees much unused memory, since training may need it. Called when there are no more
        requests."""

    def _new_rows(self, groups: Sequence[SequenceGroup]) -> list[LiveSequence]:
        """Returns the rows of the siblings that were admitted and not started."""
        rows = []
        for group in groups:
            rows += [LiveSequence(group, k) for k in range(group.num_started, group.num_admitted)]
        for row in rows:
            if stop := row.group.request.sampling.stop:
                row.tail = StopStringMatcher.empty_tail(stop)
        return rows

    def _draw(self, rows: Sequence[LiveSequence], logits_RV: Tensor) -> list[LiveSequence]:
        """Samples the next token of each row, or of none if this fails; returns the rows that are not finished."""
        settings = [row.group.request.sampling for row in rows]
        seeds = np.array([row.group.seed for row in rows], np.uint64)
        siblings = np.array([row.sibling for row in rows], np.uint64)
        steps = np.array([len(row.token_ids) for row in rows], np.uint64)
        allowed = {i: row.allowed_ids for i, row in enumerate(rows) if row.group.request.choices}
        u_R = counter_uniform(seeds, siblings, steps)
        tokens_R, logps_R, kept_ids = sample_tokens(logits_RV, settings, u_R, allowed)
        if np.isnan(logps_R).any():
            raise ValueError(
                "the weights give no probabilities (NaN): they grew without bound. Lower the learning rate."
            )
        top = self._top(rows, logits_RV)
        is_end = np.isin(tokens_R, self.end_ids).tolist()
        tokens = tokens_R.tolist()
        drawn = [self._stops(row, token, end) for row, token, end in zip(rows, tokens, is_end, strict=True)]
        self.counts["sampled_tokens"] += len(rows)
        live = []
        columns = rows, tokens, logps_R.tolist(), kept_ids, drawn
        for row, token, logp, mask_ids, (stops, tail) in zip(*columns, strict=True):
            row.token_ids.append(token)
            row.logprobs.append(logp)
            row.kept_ids.append(mask_ids)
            row.tail = tail
            if row in top:
                row.top_tokens.append(top[row])
            if stops or row.is_full:
                row.group.finished[row.sibling] = row.to_completion("stop" if stops else "length")
            else:
                live.append(row)
        return live

    def _note_preempted(self, rows: Sequence[LiveSequence]) -> None:
        """Notes live rows that were removed before their end as `preempted` in their groups."""
        for row in rows:
            row.group.preempted = sorted([*row.group.preempted, row], key=lambda row: row.sibling)
        self.counts["preempted_answers"] += len(rows)

    def _stops(self, row: LiveSequence, token: int, end: bool) -> tuple[bool, deque[int]]:
        """Returns whether `token` ends the answer, and the row's tail including that token."""
        sampling = row.group.request.sampling
        if choices := row.group.request.choices:
            return (*row.token_ids, token) in choices, row.tail
        if (end and sampling.stop_at_eos) or token in sampling.stop_token_ids:
            return True, row.tail
        if not sampling.stop:
            return False, row.tail
        tail = row.tail.copy()
        return self._stop_strings.append_and_match(sampling.stop, tail, token), tail

    def _top(
        self, rows: Sequence[LiveSequence], logits_RV: Tensor
    ) -> dict[LiveSequence, tuple[np.ndarray, np.ndarray]]:
        """Returns the most likely tokens and their log-probabilities, for the rows whose requests ask for them."""
        if not (asking := [i for i, row in enumerate(rows) if row.group.request.top_logprobs]):
            return {}
        settings = [rows[i].group.request.sampling for i in asking]
        wanted = [rows[i].group.request.top_logprobs for i in asking]
        top = zip(asking, wanted, *top_tokens(logits_RV[asking], settings, max(wanted)), strict=True)
        return {rows[i]: (ids[:k].astype(np.int32), logps[:k].copy()) for i, k, ids, logps in top}


def without(rows: Sequence[LiveSequence], others: Sequence[LiveSequence]) -> list[LiveSequence]:
    """Returns the rows that are not among `others`, in their order."""
    out = set(others)
    return [row for row in rows if row not in out]


def end_token_ids(engine: Engine) -> np.ndarray:
    """Returns the tokens that end an answer, int64, sorted: those of the tokenizer, of its chat template and of the
    generation config."""
    config = getattr(engine.model.generation_config, "eos_token_id", None)
    ends = end_tokens(engine.tokenizer) | set(config if isinstance(config, list) else [config])
    return np.array(sorted(e for e in ends if e is not None), np.int64)
