"""Decides which answers the sampler admits, and which rows are in its next pass.

Clients share the rows fairly. The least served client is admitted first (fair_queue.py), and each may have
`FREE_ROWS_FACTOR` times as many rows as are free (dynamic thresholds, Choudhury and Hahne, 1998): a single client gets
`max_num_seqs`, and beyond those some rows always stay free for other clients.

A client with few rows is light: it gets extra passes of its own, and for `LIGHT_CLIENT_WINDOW_S` seconds after it last
had rows, passes of the other clients are cut to 1/`SHORT_PASS_DIVISOR` of the rows, so that it does not wait long for a
running pass.

Where decoding steps are recorded (decode_graphs.py), a pass over prompts takes as long as many of them: prompts are
gathered for it until an eighth of the rows are free.

The groups of a single client start as a whole if they have at most `MAX_WHOLE_GROUP_ROWS` rows. If `max_num_seqs` is
the size of one group, no two requests share a batch, so the answers are bit-identical whenever the requests arrive.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from palestra.engine.sampling.fair_queue import FairQueue
from palestra.engine.sampling.live_batch import LiveBatch
from palestra.engine.sampling.request import LiveSequence, SequenceGroup

FREE_ROWS_FACTOR = 8
LIGHT_CLIENT_DIVISOR = 16  # light clients together have at most 1/16 of all rows
LIGHT_CLIENT_WINDOW_S = 1.0  # seconds
MAX_WHOLE_GROUP_ROWS = 32  # the rows of a group that starts as a whole
GATHER_DIVISOR = 8  # with recorded decoding steps, admission waits until 1/8 of the rows are free, or all that wait fit
SHORT_PASS_DIVISOR = 4  # shortened passes have 1/4 of `max_num_seqs` and 1/8 of `prefill_tokens`


class Scheduler:
    """Queue of the groups whose siblings are not all admitted, and the rules of admission to `batch`: at most
    `max_num_seqs` rows of a client, and `prefill_tokens` tokens of prompts at a time."""

    def __init__(self, batch: LiveBatch, *, max_num_seqs: int, prefill_tokens: int) -> None:
        self.batch = batch
        self.max_num_seqs = max_num_seqs
        self.prefill_tokens = prefill_tokens
        self.waiting: FairQueue[SequenceGroup] = FairQueue()  # groups with siblings that are not admitted
        self.holds_back = False  # after a preemption nothing is admitted until an answer has ended
        self._light_until = 0.0  # light clients count as active until this `time.monotonic()`
        self._first_row = 0  # index of the first row of the next partial pass

    def admit(self) -> tuple[list[SequenceGroup], bool]:
        """Raises `num_admitted` of the groups to start now. Returns them, and whether more are waiting only because of
        the limits of a pass: `prefill_tokens` of prompts (equal ones count once) and `max_num_seqs`, or a part of
        both."""
        room = self.max_num_seqs
        limit = self.prefill_tokens
        if self.is_shortened:
            room = -(-room // SHORT_PASS_DIVISOR)
            limit = -(-limit // (2 * SHORT_PASS_DIVISOR))
        rows_by_client: Counter[str] = Counter()
        for row in self.batch.rows:
            rows_by_client[row.group.request.client] += row.group.rows_per_answer
        batch: dict[SequenceGroup, None] = {}
        if self.batch.rows and (self.holds_back or self._gathers(rows_by_client.total())):
            return [], False
        free = self.batch.free_bytes
        asked: set[tuple[int, bytes]] = set()
        tokens = 0
        while allowance := self._next(rows_by_client):
            client, most = allowance
            group = self.waiting.peek(client)
            new = 0 if group.prompt or group.prompt_key in asked else group.prompt_length
            if batch and (tokens + new > limit or room < group.rows_per_answer):
                return list(batch), True
            count = min(group.num_unadmitted, max(1, min(most, room) // group.rows_per_answer))
            if count < group.num_unadmitted and self._starts_whole(group, rows_by_client):
                break  # until the rows of others have ended
            if free is not None:
                fits, needed = self.batch.fitting(group, count, free, new_prompt=bool(new))
                if not fits and (batch or self.batch.rows):
                    break  # until answers have ended
                count = max(1, fits)
                free = free - needed
            room -= count * group.rows_per_answer
            group.admit(count)
            rows_by_client[client] += count * group.rows_per_answer
            tokens += new
            asked.add(group.prompt_key)
            batch[group] = None
            self.waiting.work_counters.add_work(client, new + count)
            if not group.num_unadmitted:
                self.waiting.pop(client)
        return list(batch), False

    def _gathers(self, num_rows: int) -> bool:
        """True if admission waits until more rows have ended: not all that wait would find room, and few rows are
        free."""
        free = self.max_num_seqs - num_rows
        if not self.batch.gathers_prompts or free >= self.max_num_seqs // GATHER_DIVISOR:
            return False
        return sum(group.num_unadmitted * group.rows_per_answer for group in self.waiting) > free

    def _starts_whole(self, group: SequenceGroup, rows_by_client: Counter[str]) -> bool:
        """True if `group` waits until there is room for all of its rows: a small group of the only client."""
        rows = group.num_unadmitted * group.rows_per_answer
        clients = {*rows_by_client, *(waiting.request.client for waiting in self.waiting)}
        return rows <= min(MAX_WHOLE_GROUP_ROWS, self.max_num_seqs) and len(clients) == 1

    def _next(self, rows_by_client: Counter[str]) -> tuple[str, int] | None:
        """Returns the least served client that may have more rows than it holds, and how many more."""
        total = rows_by_client.total()
        for client in self.waiting.next_clients():
            count = row_allowance(rows_by_client[client], total, self.max_num_seqs)
            if count > 0:
                return client, count
        return None

    @property
    def is_shortened(self) -> bool:
        """True if a light client has rows, or had some within the last `LIGHT_CLIENT_WINDOW_S` seconds."""
        return time.monotonic() < self._light_until

    def partial_rows(self) -> list[LiveSequence]:
        """Returns the rows of the next partial pass. They are adjacent in the cache if possible, since attention
        computes the pages between the first and the last of them, too."""
        rows = sorted(self.batch.rows, key=lambda row: row.cache_position)
        start = self._first_row if self._first_row < len(rows) else 0
        chosen = set(rows[start : start + -(-self.max_num_seqs // SHORT_PASS_DIVISOR)])
        self._first_row = start + len(chosen)
        return [row for row in self.batch.rows if row in chosen]

    def light_rows(self) -> list[LiveSequence]:
        """Returns the rows of light clients. Their extra passes delay other clients little; a pass with all rows would
        delay the light clients much."""
        rows_by_client = Counter(row.group.request.client for row in self.batch.rows)
        if 2 * max(rows_by_client.values(), default=0) <= len(self.batch.rows):
            return []  # unless one client has most of the rows, short passes only cost throughput
        few = len(self.batch.rows) // LIGHT_CLIENT_DIVISOR
        light = set()
        for client, rows in sorted(rows_by_client.items(), key=lambda item: item[1]):
            few -= rows
            if few < 0:
                break
            light.add(client)
        if light:
            self._light_until = time.monotonic() + LIGHT_CLIENT_WINDOW_S
        return [row for row in self.batch.rows if row.group.request.client in light]

    def put_back(self, groups: Sequence[SequenceGroup], count: int | None = None) -> None:
        """Takes back the admission of the last `count` siblings of each group that were to start (None: of all)."""
        for group in groups:
            group.take_back(group.num_starting if count is None else count)
        self.requeue([group for group in reversed(groups) if group.num_unadmitted])  # none, if it had started

    def requeue(self, groups: Sequence[SequenceGroup]) -> None:
        """Puts groups whose siblings wait for memory at the head of their clients' queues, the last one first; none is
        admitted until an answer has ended."""
        for group in groups:
            if group not in self.waiting:
                self.waiting.push_front(group.request.client, group)
        self.holds_back = True


def row_allowance(rows: int, total: int, max_num_seqs: int) -> int:
    """Returns the number of further rows for a client that holds `rows` of the `total` live ones; at most 0 if it gets
    none."""
    free = max_num_seqs + -(-max_num_seqs // FREE_ROWS_FACTOR) - total
    return min(max_num_seqs - rows, -((rows - FREE_ROWS_FACTOR * free) // (FREE_ROWS_FACTOR + 1)))
