"""The engine worker: the process that takes requests from the store, runs them, and writes their answers.

Each iteration of its loop takes new requests, runs one micro-batch of training, and samples for as long as that took,
at least one token for every active row. Requests of one model run in the order of their sequence numbers; requests of
different models, and all samples, share batches. A request that fails is answered with its error and does not affect
others.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from palestra.core.accel.malloc import release_freed_memory
from palestra.core.optimizers import AdamW
from palestra.engine.bases.model import Engine
from palestra.engine.cache.kv_cache import budget_bytes
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.training.adapter_weights import OptimConfig
from palestra.engine.training.distill import DistillExample, ReverseKL
from palestra.engine.training.multi_adapter import Job, JobResult
from palestra.service.storage.database import OUTAGE_ERRORS
from palestra.service.storage.outbox import Outbox
from palestra.service.storage.store import Store, StoredAnswer
from palestra.service.storage.tables import TableRow, models, update_row, upsert_row, worker_status
from palestra.service.storage.wakeup import WakeupSocket
from palestra.service.storage.weight_store import WeightStore
from palestra.service.wire import codec
from palestra.service.wire.jobs import ReverseKLJob, TrainJob
from palestra.service.wire.schemas.requests import AdamParams
from palestra.service.wire.validation import WEIGHTED_ONLY
from palestra.service.worker.checkpoint_ops import CheckpointOps
from palestra.service.worker.encoding import reverse_kl_answer
from palestra.service.worker.live_models import LiveModel, LiveModels, LoadedBase, StateLost
from palestra.service.worker.losses import build_loss
from palestra.service.worker.pending_samples import SampleScheduler
from palestra.service.worker.status import build_status
from palestra.service.worker.training import GRADIENT_KINDS, TrainRequest, TrainScheduler

BATCHED_KINDS = (*GRADIENT_KINDS, "sample")  # kinds that share batches with other requests
SWEEP_INTERVAL_S = 60.0  # seconds between two maintenance runs
STATUS_INTERVAL_S = 2.0  # seconds between two reports for the console
MEMORY_RELEASE_DELAY_S = 1.0  # seconds without work after which memory is released
BURST_GAP_S = 0.005  # seconds without a new request that end a burst
MAX_BURST_S = 0.1  # longest duration of a burst in seconds
SAMPLE_GRACE_S = 60.0  # seconds for running samples to end on shutdown


class EngineOptions(BaseModel):
    """Options of `palestra serve` for its worker."""

    data: Path = Path("palestra-data")
    """Folder for weights, database and secret."""
    bases: dict[str, str] = {"tiny": "tiny"}
    """Base models: name -> path or model id."""
    device: str = "auto"
    """Torch device; "auto" chooses one."""
    dtype: str = "auto"
    """Dtype of the base model's weights; "auto" chooses one."""
    threads: int = 1
    """CPU threads of torch."""
    max_num_seqs: int = 512
    """Sequences that are sampled in one batch, at most."""
    kv_cache_gib: float | None = None
    """Memory of a base's KV cache in GiB; None is half of the memory that is free when the base is loaded."""


class WorkerSettings(EngineOptions):
    """Settings that `palestra serve` passes to its worker."""

    store: str
    """URL of the database."""
    pack_tokens: int = 16384
    """Tokens of one training micro-batch, at most."""
    patience: float = 20.0
    """Seconds to wait for a missing sequence number before a model continues with the next request."""
    idle: float = 900.0
    """Seconds without requests after which a model is removed from memory."""
    resident: int = 64
    """Models kept in memory, at most; the least recently used are removed first."""


class Worker:
    """Runs requests until the front-end process exits, or asks over the wake-up socket to end."""

    def __init__(self, settings: WorkerSettings, store: Store, wakeup: WakeupSocket) -> None:
        self.settings = settings
        self.store = store
        self.wakeup = wakeup
        self.weight_store = WeightStore(settings.data / "weights")
        self.bases = {name: load_base(name, path, settings) for name, path in settings.bases.items()}
        self.live_models = LiveModels(store, self.weight_store, self.bases, max_live=settings.resident)
        self.outbox = Outbox(store)
        self.sample_scheduler = SampleScheduler(self.live_models, self.outbox)
        self.checkpoint_ops = CheckpointOps(self.live_models, self.outbox)
        self.train_scheduler = TrainScheduler(
            self.live_models, settings.pack_tokens, settings.patience, self._read, self._on_outcome
        )
        self._last_sweep = self._last_work = time.monotonic()
        self._next_status = 0.0
        self._has_released = True

    def run(self) -> None:
        """Recovers the state of an earlier worker, runs requests, and finishes on shutdown."""
        self.recover()
        while not self.wakeup.peer_gone:
            has_worked = self.step()
            if not has_worked:
                self._reclaim()
            self._release_idle_memory(has_worked)
            self.wakeup.wait(0 if has_worked else 0.02)
        self.shut_down()

    def recover(self) -> None:
        """Queues an earlier worker's requests again; marks as lost the models with unsaved changes."""
        changed = self.store.find(models, models.c.state == "live", models.c.changed > models.c.kept, limit=1_000_000)
        self.store.execute(*(update_row(models, row.id, state="lost") for row in changed))
        self.store.requeue_after_crash()

    def shut_down(self) -> None:
        """Ends the current training, saves every model, and completes samples for up to `SAMPLE_GRACE_S` seconds.
        Requests that were not started or not completed stay queued for the next worker."""
        self.train_scheduler.finish()
        self.flush()
        for live_model in self.live_models:
            self._log_errors(partial(self._release, live_model))
        self.flush()
        until = time.monotonic() + SAMPLE_GRACE_S
        while time.monotonic() < until and self.sample_scheduler.advance():
            self.flush()
        self.store.release_taken()

    def step(self) -> bool:
        """Runs one iteration of the loop. Returns False if there was nothing to do."""
        has_worked = self._take_requests()
        start = time.monotonic()
        has_worked |= self._train()
        has_worked |= self._sample(time.monotonic() - start)
        if time.monotonic() - self._last_sweep > SWEEP_INTERVAL_S:
            self._sweep()
        if time.monotonic() > self._next_status:
            self._report_status()
        return has_worked

    def _sample(self, seconds: float) -> bool:
        """Samples a token for every active row, and further tokens for up to `seconds`: a training micro-batch of many
        models takes as long as hundreds of tokens, and an answer would wait for one of them at each token. Returns
        False if there was nothing to do."""
        until = time.monotonic() + seconds
        has_worked = False
        while self.sample_scheduler.advance():
            has_worked = True
            self.flush()
            if time.monotonic() >= until:
                break
            self._take_requests()
        self.flush()
        return has_worked

    def flush(self) -> None:
        """Writes pending answers and wakes the front end."""
        if self.outbox.flush():
            self.wakeup.wake()

    # -- taking requests -----------------------------------------------------------------------------------------------

    def _take_requests(self) -> bool:
        rows = self.store.take_queued()
        if rows and rows[-1].kind in BATCHED_KINDS and not self.train_scheduler.busy and not self.sample_scheduler.busy:
            rows += self._wait_for_burst()
        for row in rows:
            self.outbox.run_guarded(row, partial(self._dispatch, row))
        return bool(rows)

    def _wait_for_burst(self) -> list[TableRow]:
        """Returns the rest of a burst of requests.

        Rollouts request many samples at once, and clients that sampled together train together. A batch that is
        complete at its start needs fewer passes than one that grows while it runs.
        """
        rows = []
        until = time.monotonic() + MAX_BURST_S
        while time.monotonic() < until:
            time.sleep(BURST_GAP_S)
            more = self.store.take_queued()
            if not more:
                break
            rows += more
        return rows

    def _reclaim(self) -> None:
        """Queues again the requests that the store marks as taken by this worker but that it never received: the
        database connection failed while it returned them."""
        if (
            self.store.database.had_outage
            and not self.sample_scheduler.busy
            and not any(t.queue for t in self.live_models)
        ):
            self.store.database.had_outage = False
            self.store.release_taken()

    def _release_idle_memory(self, has_worked: bool) -> None:
        """Releases unused memory to the operating system after `MEMORY_RELEASE_DELAY_S` seconds without work."""
        if has_worked:
            self._last_work = time.monotonic()
            self._has_released = False
        elif not self._has_released and time.monotonic() - self._last_work > MEMORY_RELEASE_DELAY_S:
            self.sample_scheduler.release_memory()
            release_freed_memory()
            self._has_released = True

    def _dispatch(self, row: TableRow) -> None:
        if row.kind == "sample":
            self.sample_scheduler.submit(row)
        elif row.kind == "interpolate":
            self.checkpoint_ops.interpolate(row)
        else:
            live_model = self.live_models.get(row.model)
            if row.seq is not None and row.seq < live_model.next_seq:
                raise ValueError(
                    f"request {row.seq} of model {row.model} came after request {live_model.next_seq - 1} had run: "
                    "send it again"
                )
            live_model.push(row)

    # -- training ------------------------------------------------------------------------------------------------------

    def _train(self) -> bool:
        """Runs the ready tasks that are not batched, then one training micro-batch. Returns False if there was nothing
        to do."""
        ready = self.train_scheduler.ready_models()
        single = [model for model in ready if model.queue[0][2].kind not in GRADIENT_KINDS]
        for live_model in single:
            seq, row = live_model.pop()
            self.outbox.run_guarded(row, partial(self._run_single, live_model, seq, row))
        return self.train_scheduler.advance() or bool(single)

    def _run_single(self, live_model: LiveModel, seq: int, row: TableRow) -> None:
        """Runs a request that is not batched. A request that the front end rejected holds its place in the order and is
        answered here."""
        if row.result is not None:
            self.outbox.answers.append(StoredAnswer(row.id, row.result, failed=True))
            return
        if live_model.lost_reason and row.kind not in ("load", "unload"):
            raise StateLost(live_model.lost_reason)
        verbs = {"create_model": self._answer_created, "optim_step": self._optim_step, "save": self.checkpoint_ops.save}
        verbs |= {"load": self.checkpoint_ops.load, "unload": self.checkpoint_ops.unload}
        verbs[row.kind](live_model, seq, row)

    def _answer_created(self, live_model: LiveModel, seq: int, row: TableRow) -> None:
        self.outbox.add_answer(row, model_id=live_model.id, type="create_model")

    def _read(self, live_model: LiveModel, row: TableRow) -> Job | None:
        found: Job | None = self.outbox.run_guarded(row, partial(self._job, live_model, row))
        return found

    def _job(self, live_model: LiveModel, row: TableRow) -> Job:
        if row.result is not None or live_model.lost_reason:
            raise StateLost(json.loads(row.result)["error"] if row.result else live_model.lost_reason)
        if row.kind == "reverse_kl":
            kl = self._reverse_kl(live_model, ReverseKLJob.model_validate_json(row.body))
            return Job(live_model.trainer, kl.data, kl)
        job = TrainJob.from_bytes(row.body)
        loss = build_loss(job.loss, job.options)
        weighted_only = bool(job.options.get(WEIGHTED_ONLY))
        return Job(live_model.trainer, job.data, loss, row.kind == "forward_backward", weighted_only)

    def _reverse_kl(self, live_model: LiveModel, job: ReverseKLJob) -> ReverseKL:
        reference = self.live_models.snapshot(live_model.base, job.folder)
        examples = [
            DistillExample(
                np.array(x.student), np.array(x.reference), np.array(x.answer), np.array(x.weights, np.float32)
            )
            for x in job.lessons
        ]
        return ReverseKL(live_model.base.engine, reference, examples, temperature=job.temperature)

    def _on_outcome(self, work: TrainRequest, outcome: JobResult | Exception) -> None:
        self.outbox.run_guarded(work.row, partial(self._record_result, work, outcome))

    def _record_result(self, work: TrainRequest, outcome: JobResult | Exception) -> None:
        if isinstance(outcome, Exception):
            raise outcome
        if isinstance(work.job.loss, ReverseKL):
            self.outbox.add_answer(work.row, **reverse_kl_answer(work.job.loss))
        else:
            metrics = {f"{name}:sum": value for name, value in outcome.metrics.items()}
            result = codec.encode_forward_backward([{"logprobs": logps} for logps in outcome.logprobs], metrics)
            self.outbox.answers.append(StoredAnswer(work.row.id, result, "forward_backward"))
        if work.job.backward:
            work.model.has_gradients = True
            self._mark_changed(work.model, work.seq)

    def _optim_step(self, live_model: LiveModel, seq: int, row: TableRow) -> None:
        job = AdamParams.model_validate_json(row.body)
        adam = OptimConfig(
            lr=job.learning_rate,
            optimizer=AdamW(betas=(job.beta1, job.beta2), eps=job.eps, weight_decay=job.weight_decay),
            max_grad_norm=job.grad_clip_norm or None,
        )
        live_model.has_gradients = False
        metrics = live_model.trainer.optim_step(adam)
        self._mark_changed(live_model, seq)
        self.outbox.add_answer(row, metrics={"grad_norm:mean": metrics["grad_norm"]}, type="optim_step")

    def _mark_changed(self, live_model: LiveModel, seq: int) -> None:
        # a request without a number has the number of the one before
        live_model.changed_seq = max(seq, live_model.saved_seq + 1)
        self.outbox.updates.append(
            update_row(models, live_model.id, changed=live_model.changed_seq, used=live_model.last_used)
        )

    # -- maintenance ---------------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Removes idle models and what has expired, with folders that nothing refers to."""
        self._last_sweep = time.monotonic()
        for live_model in self.live_models.evictable(self.settings.idle):
            self._log_errors(partial(self._release, live_model))
        self.flush()
        self.store.expire(time.time())
        self._log_errors(lambda: self.weight_store.sweep(self.store.referenced_folders()))

    def _report_status(self) -> None:
        """Writes what the console shows of this worker."""
        self._next_status = time.monotonic() + STATUS_INTERVAL_S
        status = build_status(self.live_models, self.sample_scheduler, self.train_scheduler)
        self.outbox.updates += upsert_row(worker_status, {"id": "worker", "status": status.model_dump()})
        self.flush()

    def _release(self, live_model: LiveModel) -> None:
        """Saves a model and removes it from memory."""
        update = self.live_models.save(live_model)
        self.live_models.live.pop(live_model.id)
        if update is not None:
            self.outbox.updates.append(update)

    def _log_errors(self, work: Callable[[], Any]) -> None:
        """Runs a maintenance task and prints its error: a failure such as a full disk must not lose the models in
        memory. Database errors propagate."""
        try:
            work()
        except OUTAGE_ERRORS:
            raise
        except Exception:
            traceback.print_exc()


def load_base(name: str, path: str, settings: WorkerSettings) -> LoadedBase:
    """Loads a base model, with an engine and a sampler for it."""
    engine = Engine.load(path, device=settings.device, dtype=settings.dtype, threads=settings.threads)
    sampler = Sampler(engine, max_num_seqs=settings.max_num_seqs, cache_bytes=budget_bytes(settings.kv_cache_gib))
    return LoadedBase(name, engine, sampler)
