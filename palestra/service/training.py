"""Scheduler of training passes: one micro-batch at a time, fair among API keys.

Requests that fit into one micro-batch share it with those of other keys and models. A longer request is split over
several micro-batches of its own, which alternate with those of other keys. Each key's requests start in order of
arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

import sqlalchemy as sql

from palestra.engine.fair_queue import Shares
from palestra.engine.joint import Job, Outcome, train_together
from palestra.service.tenants import Tenant, Tenants

GRADIENTS = ("forward_backward", "forward", "reverse_kl")


@dataclass(frozen=True)
class Work:
    """A gradient request taken from its model's queue."""

    tenant: Tenant
    seq: int
    row: sql.Row
    job: Job

    @property
    def tokens(self) -> int:
        """Tokens in the request's data."""
        return sum(len(datum.tokens) for datum in self.job.data)


class Training:
    """Running and waiting gradient requests.

    `read` parses a request into a job, or answers it and returns None; `learned` receives each job's outcome or error.
    """

    def __init__(
        self,
        tenants: Tenants,
        pack_tokens: int,
        patience: float,
        read: Callable[[Tenant, sql.Row], Job | None],
        learned: Callable[[Work, Outcome | Exception], None],
    ) -> None:
        self.tenants, self.pack_tokens, self.patience = tenants, pack_tokens, patience
        self.read, self.learned = read, learned
        self.shares = Shares()
        self._short: dict[str, Work] = {}  # by owner: the request that is read and not started
        self._long: dict[str, Generator[None, None, None]] = {}  # by owner: the running request, over several steps

    @property
    def busy(self) -> bool:
        """True while any request has left its queue and is not finished."""
        return bool(self._short or self._long)

    def ready(self) -> list[Tenant]:
        """Returns the models whose next request has arrived and that have no gradient request running."""
        return [tenant for tenant in self.tenants if not tenant.training and tenant.ready(self.patience)]

    def advance(self) -> bool:
        """Runs one micro-batch for the least served owner, filled up with requests of others that fit. Returns False if
        there was nothing to do."""
        batch: list[Work] = []
        tokens = 0
        for owner in self._turns():
            if owner in self._long:
                if not batch:
                    self._go_on(owner)
                    return True
                continue
            work = self._short[owner]
            if batch and (tokens + work.tokens > self.pack_tokens or work.tenant.base is not batch[0].tenant.base):
                break
            self.shares.charge(owner, work.tokens)
            tokens += work.tokens
            batch.append(self._short.pop(owner))
        _exhaust(self._run(batch))
        return bool(batch)

    def finish(self) -> None:
        """Completes the running requests and starts no others."""
        for passes in self._long.values():
            _exhaust(passes)
        for work in self._short.values():
            _exhaust(self._run([work]))
        self._long, self._short = {}, {}

    def _turns(self) -> Iterator[str]:
        """Yields owners in scheduling order, the least served first. Each has either a running long request (yielded
        once) or its next short one."""
        passed: set[str] = set()
        while True:
            ready = {_owner(tenant) for tenant in self._trainable()}
            turns = self.shares.order(sorted({*self._long, *self._short, *ready}))
            owner = next((owner for owner in turns if owner not in passed), None)
            if owner is None:
                return
            if owner not in self._long and owner not in self._short and not self._read(owner):
                continue
            if owner in self._long:
                passed.add(owner)
            yield owner

    def _trainable(self) -> list[Tenant]:
        """Returns the models whose next request is for gradients; several requests of one model may share a
        micro-batch."""
        ready = (tenant for tenant in self.tenants if tenant.ready(self.patience))
        return [tenant for tenant in ready if tenant.queue[0][2].kind in GRADIENTS]

    def _read(self, owner: str) -> bool:
        """Reads the owner's next request into `_short` or `_long`. Returns False if it contained no job."""
        tenant = min((t for t in self._trainable() if _owner(t) == owner), key=lambda t: t.queue[0][2].serial)
        seq, row = tenant.pop()
        job = self.read(tenant, row)
        if job is None:
            return False
        work = Work(tenant, seq, row, job)
        tenant.training += 1
        if work.tokens > self.pack_tokens:
            self._long[owner] = self._run([work])
        else:
            self._short[owner] = work
        return True

    def _go_on(self, owner: str) -> None:
        """Runs one more micro-batch of the owner's long request."""
        self.shares.charge(owner, self.pack_tokens)
        if next(self._long[owner], self) is self:
            del self._long[owner]

    def _run(self, works: list[Work]) -> Generator[None, None, None]:
        """Runs `works`, which share one base model; yields between micro-batches."""
        if not works:
            return
        engine = works[0].tenant.base.engine
        outcomes = yield from train_together(engine, [work.job for work in works], self.pack_tokens)
        for work, outcome in zip(works, outcomes, strict=True):
            work.tenant.training -= 1
            self.learned(work, outcome)


def _owner(tenant: Tenant) -> str:
    """Returns the API-key owner of the model's next request."""
    return str(tenant.queue[0][2].owner)


def _exhaust(passes: Generator[None, None, None]) -> None:
    for _ in passes:
        pass
