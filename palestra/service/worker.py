"""The engine's worker: one process that takes requests from the store, runs them, and writes their answers.

Each turn of its loop does a little of everything: take what is new, one micro-batch of training, one token for every
row being sampled. Requests of a model run in the order of their sequence numbers; those of different models, and all
samples, share batches. A request that fails is answered with what was wrong and harms no other.
"""

from __future__ import annotations

import json
import signal
import time
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import sqlalchemy as sql
from pydantic import BaseModel

from palestra.engine.checkpoints import load_adapter, save_adapter
from palestra.engine.distill import Lesson, ReverseKL
from palestra.engine.joint import Job, Outcome, train_together
from palestra.engine.lora import weighted_sum
from palestra.engine.models import Engine
from palestra.engine.sampler import Request, Sampled, Sampler
from palestra.engine.scoring import Question, Scores, score
from palestra.engine.trainer import AdamConfig
from palestra.files import lock
from palestra.service import codec
from palestra.service.answers import distilled, judged, spoken
from palestra.service.bell import Bell
from palestra.service.check import WEIGHTED_ONLY
from palestra.service.jobs import InterpolateJob, LoadJob, OptimJob, ReverseKLJob, SampleJob, SaveJob
from palestra.service.losses import wire_loss
from palestra.service.store import Category, Change, Done, Store, checkpoints, models, samplers
from palestra.service.tenants import Base, Lost, Tenant, Tenants, save_weights
from palestra.service.vault import TinkerPath, Vault

GRADIENTS = ("forward_backward", "forward", "reverse_kl")
SHARED = (*GRADIENTS, "sample")  # what makes one batch with others of its kind
AHEAD = 4  # requests of one model that may share a pass
SAVED = {  # what older clients want to read in the answer
    "training": "save_weights",
    "sampler": "save_weights_for_sampler",
    "external": "save_weights_external",
}
SWEEP = 60.0  # seconds between two looks for what is over
QUIET = 0.005  # seconds without a new request after which a burst of them is taken to be over
BURST = 0.1  # seconds that a burst may take
GRACE = 60.0  # seconds that samples have to end when the worker stops


class Settings(BaseModel):
    """What `palestra serve` tells its worker. `patience` seconds are waited for a request that its client skipped;
    models unused for `idle` seconds, and all beyond `resident`, leave memory."""

    store: str
    data: Path
    bases: dict[str, str]
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 1
    max_rows: int = 512
    pack_tokens: int = 16384
    patience: float = 20.0
    idle: float = 900.0
    resident: int = 64


@dataclass
class Sample:
    """A request for samples on its way: its answers, and what was asked about its prompt."""

    row: sql.Row
    job: SampleJob
    sampled: list[Sampled] | None = None
    scores: Scores | None = None
    asked: bool = False


class Worker:
    """Runs requests until `stop` is called or the front end is gone."""

    def __init__(self, settings: Settings, store: Store, bell: Bell) -> None:
        self.settings, self.store, self.bell = settings, store, bell
        self.vault = Vault(settings.data / "weights")
        self.bases = {name: load_base(name, path, settings) for name, path in settings.bases.items()}
        self.tenants = Tenants(store, self.vault, self.bases, most=settings.resident)
        self.answers: list[Done] = []
        self.changes: list[Change] = []
        self.training: Generator[None, None, None] | None = None
        self.stopping = False
        self._swept = time.monotonic()

    def run(self) -> None:
        self.recover()
        while not self.stopping and not self.bell.gone:
            moved = self.turn()
            self.bell.wait(0 if moved else 0.02)
        self.finish()

    def stop(self) -> None:
        self.stopping = True

    def recover(self) -> None:
        """What an earlier worker left: its requests are queued again, and models it had changed since they were last
        saved are lost."""
        changed = self.store.find(models, models.c.state == "live", models.c.changed > models.c.kept, limit=1_000_000)
        self.store.apply(Change.of(models, row.id, state="lost") for row in changed)
        self.store.put_back()

    def finish(self) -> None:
        """Ends the training under way, saves every model, and lets samples end. What has not begun, or takes too long,
        is there for the next worker."""
        while self.training:
            self._train()
            self.flush()
        for tenant in self.tenants:
            self._keeping(partial(self._release, tenant))
        self.flush()
        until = time.monotonic() + GRACE
        while time.monotonic() < until and self._sample():
            self.flush()
        self.store.give_back()

    def turn(self) -> bool:
        """A little of everything; False when there was nothing to do."""
        moved = self._take()
        moved |= self._train()
        moved |= self._sample()
        self.flush()
        if time.monotonic() - self._swept > SWEEP and self.training is None:  # what is trained must not leave memory
            self._sweep()
        return moved

    def flush(self) -> None:
        if self.answers or self.changes:
            self.store.finish(self.answers, self.changes)
            self.answers, self.changes = [], []
            self.bell.ring()

    # -- taking --------------------------------------------------------------------------------------------------------

    def _take(self) -> bool:
        rows = self.store.take()
        if rows and rows[-1].kind in SHARED and not self.training and not self._sampling():
            rows += self._more()
        questions: list[Sample] = []
        for row in rows:
            self._guarded(row, partial(self._place, row, questions))
        self._score(questions)
        return bool(rows)

    def _more(self) -> list[sql.Row]:
        """The rest of a burst: rollouts ask for many samples at once, and clients that sampled together train together.
        A batch that starts whole needs fewer passes than one that others join as it goes."""
        rows, until = [], time.monotonic() + BURST
        while time.monotonic() < until and not self.stopping:
            time.sleep(QUIET)
            more = self.store.take()
            if not more:
                break
            rows += more
        return rows

    def _sampling(self) -> bool:
        return any(base.sampler.busy for base in self.bases.values())

    def _place(self, row: sql.Row, questions: list[Sample]) -> None:
        if row.kind == "sample":
            self._begin_sample(row, questions)
        elif row.kind == "interpolate":
            self._interpolate(row)
        else:
            self._queue(row)

    def _queue(self, row: sql.Row) -> None:
        tenant = self.tenants.get(row.model)
        if row.seq is not None and row.seq < tenant.next:
            message = (
                f"request {row.seq} of model {row.model} came after request {tenant.next - 1} had run: send it again"
            )
            self.answers.append(Done.failure(row.id, message))
        else:
            tenant.push(row)

    # -- training ------------------------------------------------------------------------------------------------------

    def _train(self) -> bool:
        if self.training is None:
            ready = [t for t in self.tenants if t.ready(self.settings.patience)]
            single = [t for t in ready if t.queue[0][2].kind not in GRADIENTS]
            for tenant in single:
                seq, row = tenant.pop()
                self._guarded(row, partial(self._alone, tenant, seq, row))
            self.training = self._gradients([t for t in ready if t not in single]) if len(ready) > len(single) else None
            return bool(single) or self.training is not None
        if next(self.training, self) is self:
            self.training = None
        return True

    def _alone(self, tenant: Tenant, seq: int, row: sql.Row) -> None:
        """A request that shares nothing with others. One that the front end had refused kept its place until now."""
        if row.result is not None:
            self.answers.append(Done(row.id, row.result, failed=True))
            return
        if tenant.lost and row.kind not in ("load", "unload"):
            raise Lost(tenant.lost)
        verbs = {"create_model": self._created, "optim_step": self._optim_step, "save": self._save}
        (verbs | {"load": self._load, "unload": self._unload})[row.kind](tenant, seq, row)

    def _created(self, tenant: Tenant, seq: int, row: sql.Row) -> None:
        self.answers.append(Done.json(row.id, model_id=tenant.id, type="create_model"))

    def _gradients(self, tenants: list[Tenant]) -> Generator[None, None, None]:
        """Forward and backward passes that are ready, together for each base."""
        for base in self.bases.values():
            work: list[tuple[Tenant, int, sql.Row, Job]] = []
            for tenant in (t for t in tenants if t.base is base):
                while len(work) < AHEAD * len(tenants) and tenant.ready(0) and tenant.queue[0][2].kind in GRADIENTS:
                    seq, row = tenant.pop()
                    job = self._guarded(row, partial(self._job, tenant, row))
                    if job:
                        work.append((tenant, seq, row, job))
            outcomes = yield from train_together(base.engine, [w[3] for w in work], self.settings.pack_tokens)
            for (tenant, seq, row, job), outcome in zip(work, outcomes, strict=True):
                self._guarded(row, partial(self._learned, tenant, seq, row, job, outcome))

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

    def _learned(self, tenant: Tenant, seq: int, row: sql.Row, job: Job, outcome: Outcome | Exception) -> None:
        if isinstance(outcome, Exception):
            raise outcome
        if isinstance(job.loss, ReverseKL):
            self.answers.append(Done.json(row.id, **distilled(job.loss)))
        else:
            metrics = {f"{name}:sum": value for name, value in outcome.figures.items()}
            result = codec.forward_backward_result([{"logprobs": logps} for logps in outcome.logps], metrics)
            self.answers.append(Done(row.id, result, "forward_backward"))
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
        self.answers.append(Done.json(row.id, metrics={"grad_norm:mean": figures["grad_norm"]}, type="optim_step"))

    def _changed(self, tenant: Tenant, seq: int) -> None:
        tenant.changed = max(seq, tenant.kept + 1)  # a request without a number runs under that of the one before
        self.changes.append(Change.of(models, tenant.id, changed=tenant.changed, used=tenant.used))

    # -- weights -------------------------------------------------------------------------------------------------------

    def _save(self, tenant: Tenant, seq: int, row: sql.Row) -> None:
        job = SaveJob.model_validate_json(row.body)
        path = TinkerPath.parse(job.path) if job.path else None
        if path and job.overwrite is False and self.store.get(checkpoints, str(path)):
            raise ValueError(f"{path} is there already: choose another name, or save with overwrite")
        whole = bool(path and path.kind == "training")
        fill = partial(save_weights, tenant=tenant, optimizer=whole)
        # a sampler is gone with its session: it may be lost in a power cut
        folder, size = self.vault.write(fill, synced=path is not None)
        model = self.store.get(models, tenant.id)
        assert model is not None and tenant.trainer.adapter is not None
        now = time.time()
        if path is None:
            values = {"session": model.session, "owner": model.owner, "base": tenant.base.name}
            self.changes += Change.put(samplers, {**values, "id": job.sampler, "folder": folder, "created": now})
            self.tenants.remember(folder, tenant.trainer.adapter.snapshot(folder, tenant.base.engine.dtype))
            self.answers.append(Done.json(row.id, sampling_session_id=job.sampler, type="save_weights_for_sampler"))
            return
        expires = now + job.ttl_seconds if job.ttl_seconds else None
        values = {"owner": model.owner, "run": tenant.id, "base": tenant.base.name, "lora": model.lora}
        values |= {"path": str(path), "kind": path.kind, "folder": folder, "size": size, "created": now}
        self.changes += Change.put(checkpoints, {**values, "expires": expires, "public": False, "info": job.info})
        if whole and not tenant.gathered:
            tenant.kept = tenant.changed
            info = {k: v for k, v in model.info.items() if k != "optimizer"} | {"path": str(path)}
            self.changes.append(Change.of(models, tenant.id, saved=folder, kept=tenant.changed, info=info))
        self.answers.append(Done.json(row.id, path=str(path), type=SAVED[path.kind]))

    def _load(self, tenant: Tenant, seq: int, row: sql.Row) -> None:
        job = LoadJob.model_validate_json(row.body)
        self.tenants.load(tenant, job.folder, optimizer=job.optimizer)
        tenant.changed = tenant.kept = seq
        model = self.store.get(models, tenant.id)
        info = (model.info if model else {}) | {"path": job.path, "optimizer": job.optimizer}
        values = {"saved": job.folder, "changed": seq, "kept": seq, "state": "live", "info": info}
        self.changes.append(Change.of(models, tenant.id, **values))
        self.answers.append(Done.json(row.id, path=job.path, model_id=tenant.id, type="load_weights"))

    def _unload(self, tenant: Tenant, seq: int, row: sql.Row) -> None:
        self.tenants.live.pop(tenant.id)
        self.changes.append(Change.of(models, tenant.id, state="gone", saved=None))
        self.answers.append(Done.json(row.id, model_id=tenant.id, type="unload_model"))
        for _, _, later in tenant.queue:
            self.answers.append(Done.failure(later.id, f"model {tenant.id} was unloaded before this request"))

    def _interpolate(self, row: sql.Row) -> None:
        job = InterpolateJob.model_validate_json(row.body)
        source = self.store.get(checkpoints, job.source_paths[0])
        assert source is not None
        base, path = self.bases[source.base], TinkerPath.parse(job.path)
        adapters = [load_adapter(self.vault.read(folder), base.engine) for folder in job.folders]
        mixed = weighted_sum(adapters, job.coefficients, base.engine.linears)
        folder, size = self.vault.write(partial(save_adapter, adapter=mixed, base=base.name))
        values = {"path": str(path), "owner": row.owner, "run": path.run, "kind": path.kind, "base": base.name}
        values |= {"lora": source.lora, "folder": folder, "size": size, "created": time.time(), "expires": None}
        self.changes += Change.put(checkpoints, {**values, "public": False, "info": {}})
        said = {"source_paths": job.source_paths, "coefficients": job.coefficients, "has_rank_shards": False}
        self.answers.append(Done.json(row.id, path=str(path), checkpoint_type="sampler", **said))

    # -- sampling ------------------------------------------------------------------------------------------------------

    def _begin_sample(self, row: sql.Row, questions: list[Sample]) -> None:
        job = SampleJob.model_validate_json(row.body)
        base, ids = self.bases[job.base], np.array(job.tokens, np.int32)
        adapter = self.tenants.snapshot(base, job.folder)
        sample = Sample(row, job, asked=bool(job.prompt_logprobs or job.topk_prompt or job.target_prompt))
        request = Request(ids, job.num_samples, job.sampling, adapter, job.seed, top_logprobs=job.topk_sample)
        base.sampler.submit(request, partial(self._sampled, sample))
        if sample.asked:
            questions.append(sample)

    def _score(self, samples: list[Sample]) -> None:
        for base in self.bases.values():
            mine = [s for s in samples if self.bases[s.job.base] is base]
            try:
                self._answer_scores(base, mine)
            except Exception:  # one of them cannot be asked, or all are too much: each for itself
                for sample in mine:
                    self._guarded(sample.row, partial(self._answer_scores, base, [sample]))

    def _answer_scores(self, base: Base, samples: list[Sample]) -> None:
        questions = [
            Question(
                np.array(s.job.tokens, np.int32),
                self.tenants.snapshot(base, s.job.folder),
                s.job.topk_prompt,
                np.array(s.job.target_prompt) if s.job.target_prompt else None,
            )
            for s in samples
        ]
        for sample, scores in zip(samples, score(base.engine, questions), strict=True):
            sample.scores = scores
            self._answer_sample(sample)

    def _sampled(self, sample: Sample, sampled: list[Sampled] | Exception) -> None:
        if isinstance(sampled, Exception):
            self.answers.append(Done.failure(sample.row.id, str(sampled), _category(sampled)))
            return
        sample.sampled = sampled
        self._guarded(sample.row, partial(self._answer_sample, sample))

    def _answer_sample(self, sample: Sample) -> None:
        if sample.sampled is not None and (sample.scores is not None or not sample.asked):
            sequences = [spoken(sampled) for sampled in sample.sampled]
            result = codec.sample_result(sequences, judged(sample.scores, sample.job))
            self.answers.append(Done(sample.row.id, result, "sample"))

    def _sample(self) -> bool:
        return any([base.sampler.advance() for base in self.bases.values()])

    # -- keeping house -------------------------------------------------------------------------------------------------

    def _guarded(self, row: sql.Row, work: Callable[[], Any]) -> Any:
        """What `work` returns; where it fails, None, and the request is answered with its error."""
        try:
            return work()
        except Exception as error:  # the boundary between clients: a failure is an answer
            self.answers.append(Done.failure(row.id, _message(error), _category(error)))
            return None

    def _sweep(self) -> None:
        """Lets go of what is over: idle models, weights past their time, folders without a row, old answers."""
        self._swept, now = time.monotonic(), time.time()
        for tenant in self.tenants.crowd(self.settings.idle):
            self._keeping(partial(self._release, tenant))
        self.flush()
        self.store.expire(now)
        self._keeping(lambda: self.vault.sweep(self.store.folders()))

    def _release(self, tenant: Tenant) -> None:
        if change := self.tenants.release(tenant):
            self.changes.append(change)

    def _keeping(self, work: Callable[[], Any]) -> None:
        """House keeping that fails, for want of room on the disk perhaps, must not take the models with it."""
        try:
            work()
        except Exception:
            traceback.print_exc()


def load_base(name: str, path: str, settings: Settings) -> Base:
    engine = Engine.load(path, device=settings.device, dtype=settings.dtype, threads=settings.threads)
    return Base(name, engine, Sampler(engine, max_rows=settings.max_rows))


def work(settings: Settings, bell: Bell) -> None:
    """The worker process: until it is told to stop (SIGTERM) or its front end is gone."""
    held = _lock(settings.data)
    worker = Worker(settings, Store.open(settings.store), bell)
    signal.signal(signal.SIGTERM, lambda *_: worker.stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the front end says when to stop
    bell.ring()
    worker.run()
    held.close()


def _lock(data: Path) -> BinaryIO:
    """The lock of a server's only worker. That of a front end which was killed may still be saving its models."""
    until = time.monotonic() + 2 * GRACE
    while True:
        try:
            return lock(data / "worker.lock", f"the server's data in {data}")
        except ValueError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def _category(error: Exception) -> Category:
    return "user" if isinstance(error, ValueError) else "server"


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
