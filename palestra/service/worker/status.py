"""Figures of the worker for the console: memory, models, work by API key."""

from __future__ import annotations

import os
import time
from collections import Counter

from palestra.core.accel.malloc import free_memory
from palestra.core.process_memory import resident_memory
from palestra.engine.sampling.cached_batch import CachedBatch
from palestra.service.wire.schemas.console import BaseStatus, OwnerWork, WorkerStatus
from palestra.service.worker.live_models import LiveModels, LoadedBase
from palestra.service.worker.pending_samples import SampleScheduler
from palestra.service.worker.training import TrainScheduler


def build_status(live_models: LiveModels, samples: SampleScheduler, training: TrainScheduler) -> WorkerStatus:
    """Returns memory, models in memory, and the work done for each API key."""
    return WorkerStatus(
        at=time.time(),
        pid=os.getpid(),
        memory=resident_memory(),
        loaded_models=[live_model.id for live_model in live_models],
        num_snapshots=len(live_models.snapshots),
        bases=[_base_status(base) for base in live_models.bases.values()],
        work=_work_by_owner(live_models, samples, training),
    )


def _base_status(base: LoadedBase) -> BaseStatus:
    batch = base.sampler.batch
    memory = batch.memory if isinstance(batch, CachedBatch) else None
    device = str(base.engine.device)
    return BaseStatus(
        name=base.name,
        device=device,
        free_memory=free_memory(device),
        answers=len(batch.rows),
        waiting=len(base.sampler.waiting),
        cache_bytes=memory.used if memory else None,
        cache_limit=memory.limit if memory else None,
    )


def _work_by_owner(live_models: LiveModels, samples: SampleScheduler, training: TrainScheduler) -> dict[str, OwnerWork]:
    sampled: Counter[str] = Counter()
    answers: Counter[str] = Counter()
    for base in live_models.bases.values():
        for owner, tokens in base.sampler.waiting.work_counters.counters.items():
            sampled[owner] += int(tokens)
        answers.update(row.group.request.client for row in base.sampler.batch.rows)
    trained = training.shares.counters
    scored = samples.questions.work_counters.counters
    return {
        owner: OwnerWork(
            sampling=sampled[owner],
            training=trained.get(owner, 0.0),
            scoring=scored.get(owner, 0.0),
            answers=answers[owner],
        )
        for owner in sorted({*sampled, *trained, *scored, *answers})
    }
