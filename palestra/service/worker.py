"""The engine worker: the process that takes requests from the store, runs them, and writes their answers.

Each iteration of its loop takes new requests, runs one micro-batch of training, and samples one token for every active
row. Requests of one model run in the order of their sequence numbers; requests of different models, and all samples,
share batches. A request that fails is answered with its error and does not affect others.
"""

from __future__ import annotations

import json
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import sqlalchemy as sql
from pydantic import BaseModel

from palestra.engine.distill import Lesson, ReverseKL
from palestra.engine.joint import Job, Outcome
from palestra.engine.memory import give_back_freed_memory
from palestra.engine.models import Engine
from palestra.engine.sampler import Sampler
from palestra.engine.trainer import AdamConfig
from palestra.files import lock
from palestra.service import codec
from palestra.service.answers import distilled
from palestra.service.bell import Bell
from palestra.service.check import WEIGHTED_ONLY
from palestra.service.database import AWAY, first_line
from palestra.service.jobs import OptimJob, ReverseKLJob
from palestra.service.losses import wire_loss
from palestra.service.outbox import Outbox
from palestra.service.samples import Samples
from palestra.service.shelf import Shelf
from palestra.service.store import Done, Store
from palestra.service.tables import Change, models
from palestra.service.tenants import Base, Lost, Tenant, Tenants
from palestra.service.training import GRADIENTS, Training, Work
from palestra.service.vault import Vault

SHARED = (*GRADIENTS, "sample")  # kinds that share batches with other requests
SWEEP = 60.0  # seconds between two maintenance runs
REST = 1.0  # seconds without work after which memory is released
QUIET = 0.005  # seconds without a new request that end a burst
BURST = 0.1  # longest duration of a burst in seconds
GRACE = 60.0  # seconds for running samples to end on shutdown
FAREWELL = 3  # attempts to reach the database before giving up on shutdown
LONGEST_PAUSE = 15.0  # longest pause in seconds between two attempts


class Settings(BaseModel):
    """Settings that `palestra serve` passes to its worker."""

    store: str
    """URL of the database."""
    data: Path
    """Data folder of the server."""
    bases: dict[str, str]
    """Base models: name -> path."""
    device: str = "auto"
    """Torch device; "auto" chooses one."""
    dtype: str = "auto"
    """Dtype of the base model's weights; "auto" chooses one."""
    threads: int = 1
    """CPU threads of torch."""
    max_rows: int = 512
    """Sequences that are sampled in one batch, at most."""
    pack_tokens: int = 16384
    """Tokens of one training micro-batch, at most."""
    patience: float = 20.0
    """Seconds to wait for a missing sequence number before a model continues with the next request."""
    idle: float = 900.0
    """Seconds without requests after which a model is removed from memory."""
    resident: int = 64
    """Models kept in memory, at most; the least recently used are removed first."""


class Worker:
    """Runs requests until `stop` is called or the front-end process exits."""

    def __init__(self, settings: Settings, store: Store, bell: Bell) -> None:
        self.settings, self.store, self.bell = settings, store, bell
        self.vault = Vault(settings.data / "weights")
        self.bases = {name: load_base(name, path, settings) for name, path in settings.bases.items()}
        self.tenants = Tenants(store, self.vault, self.bases, most=settings.resident)
        self.outbox = Outbox(store)
        self.samples, self.shelf = Samples(self.tenants, self.outbox), Shelf(self.tenants, self.outbox)
        self.training = Training(self.tenants, settings.pack_tokens, settings.patience, self._read, self._learned)
        self.stopping = False
        self._swept = self._moved = time.monotonic()
        self._rested = True

    def run(self) -> None:
        """Recovers the state of an earlier worker, runs requests, and finishes on shutdown."""
        self.recover()
        while not self.stopping and not self.bell.gone:
            moved = self.turn()
            if not moved:
                self._reclaim()
            self._rest(moved)
            self.bell.wait(0 if moved else 0.02)
        self.finish()

    def stop(self) -> None:
        """Requests shutdown; the loop ends after the current iteration."""
        self.stopping = True

    def recover(self) -> None:
        """Restores the state left by an earlier worker: queues its requests again, and marks as lost the models that
        changed after they were last saved."""
        changed = self.store.find(models, models.c.state == "live", models.c.changed > models.c.kept, limit=1_000_000)
        self.store.apply(Change.of(models, row.id, state="lost") for row in changed)
        self.store.put_back()

    def finish(self) -> None:
        """Ends the current training, saves every model, and completes samples for up to `GRACE` seconds. Requests that
        were not started or not completed stay queued for the next worker."""
        self.training.finish()
        self.flush()
        for tenant in self.tenants:
            self._keeping(partial(self._release, tenant))
        self.flush()
        until = time.monotonic() + GRACE
        while time.monotonic() < until and self.samples.advance():
            self.flush()
        self.store.give_back()

    def turn(self) -> bool:
        """Runs one iteration of the loop. Returns False if there was nothing to do."""
        moved = self._take()
        moved |= self._train()
        moved |= self.samples.advance()
        self.flush()
        if time.monotonic() - self._swept > SWEEP:
            self._sweep()
        return moved

    def flush(self) -> None:
        """Writes pending answers and wakes the front end."""
        if self.outbox.flush():
            self.bell.ring()

    # -- taking requests -----------------------------------------------------------------------------------------------

    def _take(self) -> bool:
        rows = self.store.take()
        if rows and rows[-1].kind in SHARED and not self.training.busy and not self.samples.busy:
            rows += self._more()
        for row in rows:
            self.outbox.guarded(row, partial(self._place, row))
        return bool(rows)

    def _more(self) -> list[sql.Row]:
        """Returns the rest of a burst of requests.

        Rollouts request many samples at once, and clients that sampled together train together. A batch that is
        complete at its start needs fewer passes than one that grows while it runs.
        """
        rows, until = [], time.monotonic() + BURST
        while time.monotonic() < until and not self.stopping:
            time.sleep(QUIET)
            more = self.store.take()
            if not more:
                break
            rows += more
        return rows

    def _reclaim(self) -> None:
        """Queues again the requests that the store marks as taken by this worker but that it never received: the
        database connection failed while it returned them."""
        if self.store.database.troubled and not self.samples.busy and not any(t.queue for t in self.tenants):
            self.store.database.troubled = False
            self.store.give_back()

    def _rest(self, moved: bool) -> None:
        """Releases unused memory to the operating system after `REST` seconds without work."""
        if moved:
            self._moved, self._rested = time.monotonic(), False
        elif not self._rested and time.monotonic() - self._moved > REST:
            self.samples.rest()
            give_back_freed_memory()
            self._rested = True

    def _place(self, row: sql.Row) -> None:
        if row.kind == "sample":
            self.samples.begin(row)
        elif row.kind == "interpolate":
            self.shelf.interpolate(row)
        else:
            self._queue(row)

    def _queue(self, row: sql.Row) -> None:
        tenant = self.tenants.get(row.model)
        if row.seq is not None and row.seq < tenant.next:
            message = (
                f"request {row.seq} of model {row.model} came after request {tenant.next - 1} had run: send it again"
            )
            self.outbox.answers.append(Done.failure(row.id, message))
        else:
            tenant.push(row)

    # -- training ------------------------------------------------------------------------------------------------------

    def _train(self) -> bool:
        """Runs the ready tasks that are not batched, then one training micro-batch. Returns False if there was nothing
        to do."""
        single = [tenant for tenant in self.training.ready() if tenant.queue[0][2].kind not in GRADIENTS]
        for tenant in single:
            seq, row = tenant.pop()
            self.outbox.guarded(row, partial(self._alone, tenant, seq, row))
        return self.training.advance() or bool(single)

    def _alone(self, tenant: Tenant, seq: int, row: sql.Row) -> None:
        """Runs a request that is not batched. A request that the front end rejected holds its place in the order and is
        answered here."""
        if row.result is not None:
            self.outbox.answers.append(Done(row.id, row.result, failed=True))
            return
        if tenant.lost and row.kind not in ("load", "unload"):
            raise Lost(tenant.lost)
        verbs = {"create_model": self._created, "optim_step": self._optim_step, "save": self.shelf.save}
        (verbs | {"load": self.shelf.load, "unload": self.shelf.unload})[row.kind](tenant, seq, row)

    def _created(self, tenant: Tenant, seq: int, row: sql.Row) -> None:
        self.outbox.answers.append(Done.json(row.id, model_id=tenant.id, type="create_model"))

    def _read(self, tenant: Tenant, row: sql.Row) -> Job | None:
        found: Job | None = self.outbox.guarded(row, partial(self._job, tenant, row))
        return found

    def _job(self, tenant: Tenant, row: sql.Row) -> Job:
        if row.result is not None or tenant.lost:
            raise Lost(json.loads(row.result)["error"] if row.result else tenant.lost)
        if row.kind == "reverse_kl":
            kl = self._reverse_kl(tenant, ReverseKLJob.model_validate_json(row.body))
            return Job(tenant.trainer, kl.data, kl)
        call = codec.train_call_from_proto(row.body)
        options = codec.options_of(call)
        loss, weighted_only = wire_loss(call.loss_fn, options), bool(options.get(WEIGHTED_ONLY))
        backward = row.kind == "forward_backward" and not call.forward_only
        return Job(tenant.trainer, codec.data_of(call), loss, backward, weighted_only)

    def _reverse_kl(self, tenant: Tenant, job: ReverseKLJob) -> ReverseKL:
        reference = self.tenants.snapshot(tenant.base, job.folder)
        lessons = [
            Lesson(np.array(x.student), np.array(x.reference), np.array(x.answer), np.array(x.weights, np.float32))
            for x in job.lessons
        ]
        return ReverseKL(tenant.base.engine, reference, lessons, temperature=job.temperature)

    def _learned(self, work: Work, outcome: Outcome | Exception) -> None:
        self.outbox.guarded(work.row, partial(self._note, work.tenant, work.seq, work.row, work.job, outcome))

    def _note(self, tenant: Tenant, seq: int, row: sql.Row, job: Job, outcome: Outcome | Exception) -> None:
        if isinstance(outcome, Exception):
            raise outcome
        if isinstance(job.loss, ReverseKL):
            self.outbox.answers.append(Done.json(row.id, **distilled(job.loss)))
        else:
            metrics = {f"{name}:sum": value for name, value in outcome.figures.items()}
            result = codec.forward_backward_result([{"logprobs": logps} for logps in outcome.logps], metrics)
            self.outbox.answers.append(Done(row.id, result, "forward_backward"))
        if job.backward:
            tenant.gathered = True
            self._changed(tenant, seq)

    def _optim_step(self, tenant: Tenant, seq: int, row: sql.Row) -> None:
        job = OptimJob.model_validate_json(row.body)
        adam = AdamConfig(
            lr=job.learning_rate,
            betas=(job.beta1, job.beta2),
            eps=job.eps,
            weight_decay=job.weight_decay,
            grad_clip=job.grad_clip_norm or None,
        )
        tenant.gathered = False
        figures = tenant.trainer.optim_step(adam)
        self._changed(tenant, seq)
        self.outbox.answers.append(
            Done.json(row.id, metrics={"grad_norm:mean": figures["grad_norm"]}, type="optim_step")
        )

    def _changed(self, tenant: Tenant, seq: int) -> None:
        tenant.changed = max(seq, tenant.kept + 1)  # a request without a number has that of the one before
        self.outbox.changes.append(Change.of(models, tenant.id, changed=tenant.changed, used=tenant.used))

    # -- maintenance ---------------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Removes what has expired: idle models, checkpoints past their time to live, unreferenced folders, old
        answers."""
        self._swept, now = time.monotonic(), time.time()
        for tenant in self.tenants.crowd(self.settings.idle):
            self._keeping(partial(self._release, tenant))
        self.flush()
        self.store.expire(now)
        self._keeping(lambda: self.vault.sweep(self.store.folders()))

    def _release(self, tenant: Tenant) -> None:
        if change := self.tenants.release(tenant):
            self.outbox.changes.append(change)

    def _keeping(self, work: Callable[[], Any]) -> None:
        """Runs a maintenance task and prints its error: a failure such as a full disk must not lose the models in
        memory. Database errors propagate."""
        try:
            work()
        except AWAY:
            raise
        except Exception:
            traceback.print_exc()


class Patience:
    """Error handler of the worker's database: logs the error and retries with growing pauses.

    During shutdown, or if the front end has exited, it raises the error after `FAREWELL` attempts.
    """

    def __init__(self, bell: Bell) -> None:
        self.bell, self.ending, self.since = bell, False, 0.0

    def __call__(self, error: Exception, attempt: int) -> None:
        self.since = self.since if attempt else time.monotonic()
        self.bell.wait(0)  # updates `gone`
        if (self.ending or self.bell.gone) and attempt >= FAREWELL:
            raise error
        pause = min(0.5 * 2**attempt, LONGEST_PAUSE)
        what = f"the database does not answer ({first_line(error)}), for {time.monotonic() - self.since:.0f} s now"
        print(f"{what}: trying again in {pause:.1f} s", file=sys.stderr, flush=True)
        time.sleep(pause)


def load_base(name: str, path: str, settings: Settings) -> Base:
    """Loads a base model, with an engine and a sampler for it."""
    engine = Engine.load(path, device=settings.device, dtype=settings.dtype, threads=settings.threads)
    return Base(name, engine, Sampler(engine, max_rows=settings.max_rows))


def work(settings: Settings, bell: Bell) -> None:
    """Entry point of the worker process: runs until SIGTERM or until its front end exits. Exits with a message if the
    database does not answer during shutdown."""
    with _lock(settings.data):
        patience = Patience(bell)
        worker = Worker(settings, Store.open(settings.store, patience), bell)

        def stop(*_: object) -> None:
            worker.stop()
            patience.ending = True

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the front end ends the worker
        bell.ring()
        try:
            worker.run()
        except AWAY as error:
            sys.exit(
                f"the engine's worker stopped while the database did not answer ({first_line(error)}): answers that "
                "were not written, and what models learned after they were last saved, are lost"
            )


def _lock(data: Path) -> BinaryIO:
    """Acquires the lock that admits one worker per server, waiting for a worker that still saves models after its front
    end was killed. Raises ValueError if the lock stays taken for twice `GRACE` seconds."""
    until = time.monotonic() + 2 * GRACE
    while True:
        try:
            return lock(data / "worker.lock", f"the server's data in {data}")
        except ValueError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
