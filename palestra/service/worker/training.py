"""Scheduler of training passes: one micro-batch at a time, fair among API keys.

Requests that fit into one micro-batch share it with those of other keys and models. A longer request is split over
several micro-batches of its own, which alternate with those of other keys. Each key's requests start in order of
arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from palestra.engine.sampling.fair_queue import WorkCounters
from palestra.engine.training.multi_adapter import Job, JobResult, train_jobs
from palestra.service.storage.tables import TableRow
from palestra.service.worker.live_models import LiveModel, LiveModels

GRADIENT_KINDS = ("forward_backward", "forward", "reverse_kl")


@dataclass(frozen=True)
class TrainRequest:
    """A gradient request taken from its model's queue."""

    model: LiveModel
    seq: int
    row: TableRow
    job: Job

    @property
    def num_tokens(self) -> int:
        """Tokens in the request's data."""
        return sum(len(datum.tokens) for datum in self.job.data)


class TrainScheduler:
    """Running and waiting gradient requests.

    `parse_job` parses a request into a job, or answers it and returns None; `on_outcome` receives each job's outcome or
    error.
    """

    def __init__(
        self,
        live_models: LiveModels,
        pack_tokens: int,
        gap_timeout_s: float,
        parse_job: Callable[[LiveModel, TableRow], Job | None],
        on_outcome: Callable[[TrainRequest, JobResult | Exception], None],
    ) -> None:
        self.live_models = live_models
        self.pack_tokens = pack_tokens
        self.gap_timeout_s = gap_timeout_s
        self.parse_job = parse_job
        self.on_outcome = on_outcome
        self.shares = WorkCounters()
        self._short: dict[str, TrainRequest] = {}  # by owner: the request that is read and not started
        self._long: dict[str, Generator[None, None, None]] = {}  # by owner: the running request, over several steps

    @property
    def busy(self) -> bool:
        """True while any request has left its queue and is not finished."""
        return bool(self._short or self._long)

    def ready_models(self) -> list[LiveModel]:
        """Returns the models whose next request has arrived and that have no gradient request running."""
        return [
            live_model
            for live_model in self.live_models
            if not live_model.num_training and live_model.ready(self.gap_timeout_s)
        ]

    def advance(self) -> bool:
        """Runs one micro-batch, of the least served owner first. Returns False if there is none."""
        batch: list[TrainRequest] = []
        tokens = 0
        for owner in self._turns():
            if owner in self._long:
                if not batch:
                    # one more micro-batch of the owner's long request
                    self.shares.add_work(owner, self.pack_tokens)
                    if next(self._long[owner], self) is self:
                        del self._long[owner]
                    return True
                continue
            work = self._short[owner]
            if batch and (tokens + work.num_tokens > self.pack_tokens or work.model.base is not batch[0].model.base):
                break
            self.shares.add_work(owner, work.num_tokens)
            tokens += work.num_tokens
            batch.append(self._short.pop(owner))
        _exhaust(self._run(batch))
        return bool(batch)

    def finish(self) -> None:
        """Completes the running requests and starts no others."""
        for passes in self._long.values():
            _exhaust(passes)
        for work in self._short.values():
            _exhaust(self._run([work]))
        self._long = {}
        self._short = {}

    def _turns(self) -> Iterator[str]:
        """Yields owners in scheduling order, the least served first. Each has either a running long request (yielded
        once) or its next short one."""
        passed: set[str] = set()
        while True:
            ready = {_owner(live_model) for live_model in self._trainable()}
            turns = self.shares.service_order(sorted({*self._long, *self._short, *ready}))
            owner = next((owner for owner in turns if owner not in passed), None)
            if owner is None:
                return
            if owner not in self._long and owner not in self._short and not self._read(owner):
                continue
            if owner in self._long:
                passed.add(owner)
            yield owner

    def _trainable(self) -> list[LiveModel]:
        """Returns the models whose next request is for gradients; some may share a micro-batch."""
        ready = (live_model for live_model in self.live_models if live_model.ready(self.gap_timeout_s))
        return [live_model for live_model in ready if live_model.queue[0][2].kind in GRADIENT_KINDS]

    def _read(self, owner: str) -> bool:
        """Reads the owner's next request into `_short` or `_long`. Returns False if it contained no job."""
        live_model = min((t for t in self._trainable() if _owner(t) == owner), key=lambda t: t.queue[0][2].serial)
        seq, row = live_model.pop()
        job = self.parse_job(live_model, row)
        if job is None:
            return False
        work = TrainRequest(live_model, seq, row, job)
        live_model.num_training += 1
        if work.num_tokens > self.pack_tokens:
            self._long[owner] = self._run([work])
        else:
            self._short[owner] = work
        return True

    def _run(self, works: list[TrainRequest]) -> Generator[None, None, None]:
        """Runs `works`, which share one base model; yields between micro-batches."""
        if not works:
            return
        engine = works[0].model.base.engine
        outcomes = yield from train_jobs(engine, [work.job for work in works], self.pack_tokens)
        for work, outcome in zip(works, outcomes, strict=True):
            work.model.num_training -= 1
            self.on_outcome(work, outcome)


def _owner(live_model: LiveModel) -> str:
    """Returns the API-key owner of the model's next request."""
    return str(live_model.queue[0][2].owner)


def _exhaust(passes: Generator[None, None, None]) -> None:
    for _ in passes:
        pass
