"""The live batch of models on the plain path: rows of equal length share a pass and a transformers cache.

A *cohort* is a set of rows of one adapter and one length. It begins with prompts of equal length that are computed
together, with a copy of a prompt's cache for each of its answers, and ends with its last row. A pass changes the cache
that it extends; if it fails, the cohort's sequences are computed again from their tokens.

Shapes: `B` prompts or rows of a cohort, `T` their length, `R` rows, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palestra.engine.bases.model import Engine
from palestra.engine.forward.plain import PlainPath
from palestra.engine.lora.adapters import RowOrder
from palestra.engine.lora.routes import SnapshotRoute
from palestra.engine.sampling.live_batch import LiveBatch, without
from palestra.engine.sampling.request import LiveSequence, SequenceGroup


@dataclass(eq=False)
class Cohort:
    """Rows of one adapter and one length, and the cache of all their tokens but the last (None: to be computed)."""

    rows: list[LiveSequence]
    cache: Any

    @property
    def route(self) -> SnapshotRoute | None:
        return _route(self.rows[0].group)


class PlainBatch(LiveBatch):
    """A live batch that is computed by transformers' own forward. Prompts are not kept for later turns. Its memory has
    no budget: a pass makes the room that it needs, and rows are preempted when memory runs out."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.cohorts: list[Cohort] = []

    @property
    def _path(self) -> PlainPath:
        assert self.engine.plain_path is not None
        return self.engine.plain_path

    def reset(self) -> None:
        super().reset()
        self.cohorts = []

    def start(self, groups: list[SequenceGroup]) -> None:
        groups = sorted(groups, key=_cohort_key)
        self.groups |= dict.fromkeys(groups)
        for group in groups:
            for _, rows in groupby(sorted(group.resumed, key=_length), key=_length):
                self.cohorts.append(Cohort(list(rows), None))
            self.rows += group.resumed
            group.resumed = []
        if new := [group for group in groups if group.num_started < group.num_admitted]:
            self._start_new(new)
        self.rows.sort(key=lambda row: row.group.sort_key)

    def _start_new(self, groups: list[SequenceGroup]) -> None:
        started = []
        rows = []
        logits = []
        for _, part in groupby(groups, key=_cohort_key):
            cohort, logits_RV = self._prefill(list(part))
            started.append(cohort)
            rows += cohort.rows
            logits.append(logits_RV)
        live = set(self._draw(rows, torch.cat(logits)))
        for group in groups:
            group.num_started = group.num_admitted
        for cohort in started:
            self._keep(cohort, [row for row in cohort.rows if row in live])
        self.cohorts += [cohort for cohort in started if cohort.rows]
        self.rows += [row for row in rows if row in live]
        self._over += [row for row in rows if row not in live]

    def _prefill(self, groups: list[SequenceGroup]) -> tuple[Cohort, Tensor]:
        """Returns the new rows of `groups`, whose prompts are of equal length, and the logits [R, V] of their first
        tokens. Equal prompts are computed once."""
        prompts = {group.prompt_key: group.request.prompt_ids for group in groups}
        ids_BT = np.stack(list(prompts.values()))
        rows = self._new_rows(groups)
        numbers = {key: number for number, key in enumerate(prompts)}
        index = self.engine.tensor([numbers[row.group.prompt_key] for row in rows])
        logits_BV, cache = self._path.prefill(self.engine.tensor(ids_BT), _route(groups[0]))
        self.counts["prefill_tokens"] += ids_BT.size
        self.counts["reused_tokens"] += sum(group.prompt_length for group in groups) - ids_BT.size
        if cache is not None:
            cache.reorder_cache(index)  # an index may occur several times
        return Cohort(rows, cache), logits_BV.index_select(0, index)

    def decode(self, rows: Sequence[LiveSequence]) -> None:
        chosen = set(rows)
        logits = dict[LiveSequence, Tensor]()
        cohorts = [self._split(cohort, chosen) for cohort in list(self.cohorts) if chosen.intersection(cohort.rows)]
        try:
            for cohort in cohorts:
                logits |= zip(cohort.rows, self._next_logits(cohort), strict=True)
            live = self._draw(rows, torch.stack([logits[row] for row in rows]))
        except Exception:
            for cohort in cohorts:
                cohort.cache = None  # it may hold a token that no row has
            raise
        self._over += without(rows, live)

    def _split(self, cohort: Cohort, chosen: set[LiveSequence]) -> Cohort:
        """Returns a cohort of the chosen rows of `cohort`; the other rows stay in `cohort`."""
        mine = [row for row in cohort.rows if row in chosen]
        if len(mine) == len(cohort.rows):
            return cohort
        part = Cohort(mine, None)  # computed again: a cache cannot be copied in general
        self.cohorts.append(part)
        self._keep(cohort, without(cohort.rows, mine))
        return part

    def _next_logits(self, cohort: Cohort) -> Tensor:
        """Returns the logits [B, V] after the last token of each row."""
        if cohort.cache is not None:
            last_B = self.engine.tensor([row.token_ids[-1] for row in cohort.rows])
            position = cohort.rows[0].group.prompt_length + len(cohort.rows[0].token_ids) - 1
            logits_BV, cohort.cache = self._path.decode(last_B, position, cohort.cache, cohort.route)
            return logits_BV
        ids_BT = np.stack([np.concatenate([row.group.request.prompt_ids, row.token_ids]) for row in cohort.rows])
        logits_BV, cohort.cache = self._path.prefill(self.engine.tensor(ids_BT), cohort.route)
        self.counts["prefill_tokens"] += ids_BT.size
        return logits_BV

    def _keep(self, cohort: Cohort, rows: list[LiveSequence]) -> None:
        """Reduces a cohort to `rows`."""
        if len(rows) == len(cohort.rows):
            return
        index = self.engine.tensor([i for i, row in enumerate(cohort.rows) if row in set(rows)])
        cohort.rows = rows
        if rows and cohort.cache is not None:
            cohort.cache.reorder_cache(index)

    def remove_finished(self) -> list[SequenceGroup]:
        rows = self._over
        self._over = []
        self._leave(rows)
        over = list(dict.fromkeys(row.group for row in rows if row.group.is_done))
        for group in over:
            self.groups.pop(group, None)
        return over

    def _leave(self, rows: Sequence[LiveSequence]) -> None:
        self.rows = without(self.rows, rows)
        for cohort in self.cohorts:
            self._keep(cohort, without(cohort.rows, rows))
        self.cohorts = [cohort for cohort in self.cohorts if cohort.rows]

    def cancel(self, group: SequenceGroup) -> None:
        self._over = [row for row in self._over if row.group is not group]
        self._leave([row for row in self.rows if row.group is group])
        self.groups.pop(group, None)

    def preempt(self, rows: Sequence[LiveSequence]) -> None:
        self._leave(rows)
        self._note_preempted(rows)


def _length(row: LiveSequence) -> int:
    return len(row.token_ids)


def _route(group: SequenceGroup) -> SnapshotRoute | None:
    return SnapshotRoute(group.request.adapter) if group.request.adapter else None


def _cohort_key(group: SequenceGroup) -> tuple[RowOrder, int]:
    """Returns the sort key of a group: by adapter, then by the length of the prompt."""
    return group.sort_key, group.prompt_length
