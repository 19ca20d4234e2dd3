"""Checkpoint operations of the worker: `save`, `load`, `unload` and `interpolate`."""

from __future__ import annotations

import time
from functools import partial

from palestra.engine.lora.adapters import weighted_sum
from palestra.engine.training.peft_format import load_adapter, save_adapter
from palestra.service.storage.outbox import Outbox
from palestra.service.storage.tables import TableRow, checkpoints, models, samplers, update_row, upsert_row
from palestra.service.storage.weight_store import TinkerPath
from palestra.service.wire.jobs import InterpolateJob, LoadJob, SaveJob
from palestra.service.worker.live_models import LiveModel, LiveModels, save_weights

REPLY_TYPES = {  # `type` fields that older clients require
    "training": "save_weights",
    "sampler": "save_weights_for_sampler",
    "external": "save_weights_external",
}


class CheckpointOps:
    """Moves weights between the models in memory and the weight store; results go to the outbox."""

    def __init__(self, live_models: LiveModels, outbox: Outbox) -> None:
        self.live_models = live_models
        self.outbox = outbox
        self.store = live_models.store
        self.weight_store = live_models.weight_store

    def save(self, live_model: LiveModel, seq: int, row: TableRow) -> None:
        """Saves a model's weights as a checkpoint or for a sampler. Raises ValueError if the path exists and may not be
        overwritten."""
        job = SaveJob.model_validate_json(row.body)
        path = TinkerPath.parse(job.path) if job.path else None
        if path and job.overwrite is False and self.store.get(checkpoints, str(path)):
            raise ValueError(f"{path} exists already: choose another name, or save with overwrite")
        whole = bool(path and path.kind == "training")
        fill = partial(save_weights, live_model=live_model, optimizer=whole)
        # a sampler ends with its session, so losing it in a power failure is acceptable
        folder, size = self.weight_store.write(fill, synced=path is not None)
        model = self.store.get(models, live_model.id)
        assert model is not None
        if path is None:
            self._sampler(live_model, job, model, folder)
            self.outbox.add_answer(row, sampling_session_id=job.sampler, type="save_weights_for_sampler")
            return
        expires = time.time() + job.ttl_seconds if job.ttl_seconds else None
        values = {"owner": model.owner, "base": live_model.base.name, "lora": model.lora, "info": job.info}
        checkpoint = path.row(**values, folder=folder, size=size, expires=expires)
        self.outbox.updates += upsert_row(checkpoints, checkpoint)
        if whole and not live_model.has_gradients:
            live_model.saved_seq = live_model.changed_seq
            info = {k: v for k, v in model.info.items() if k != "optimizer"} | {"path": str(path)}
            self.outbox.updates.append(
                update_row(models, live_model.id, saved=folder, kept=live_model.changed_seq, info=info)
            )
        self.outbox.add_answer(row, path=str(path), type=REPLY_TYPES[path.kind])

    def interpolate(self, row: TableRow) -> None:
        """Saves a weighted sum of adapters as a checkpoint for sampling."""
        job = InterpolateJob.model_validate_json(row.body)
        source = self.store.get(checkpoints, job.source_paths[0])
        assert source is not None
        base = self.live_models.base(source.base)
        path = TinkerPath.parse(job.path)
        adapters = [load_adapter(self.weight_store.read(folder), base.engine) for folder in job.folders]
        mixed = weighted_sum(adapters, job.coefficients, base.engine.linear_layers)
        folder, size = self.weight_store.write(partial(save_adapter, adapter=mixed, base=base.name))
        values = {"owner": row.owner, "base": base.name, "lora": source.lora, "info": {}}
        self.outbox.updates += upsert_row(checkpoints, path.row(**values, folder=folder, size=size))
        details = {"source_paths": job.source_paths, "coefficients": job.coefficients, "has_rank_shards": False}
        self.outbox.add_answer(row, path=str(path), checkpoint_type="sampler", **details)

    def load(self, live_model: LiveModel, seq: int, row: TableRow) -> None:
        """Loads weights into a model. Raises ValueError if they are damaged or do not fit."""
        job = LoadJob.model_validate_json(row.body)
        self.live_models.load(live_model, job.folder, optimizer=job.optimizer)
        live_model.changed_seq = live_model.saved_seq = seq
        model = self.store.get(models, live_model.id)
        info = (model.info if model else {}) | {"path": job.path, "optimizer": job.optimizer}
        values = {"saved": job.folder, "changed": seq, "kept": seq, "state": "live", "info": info}
        self.outbox.updates.append(update_row(models, live_model.id, **values))
        self.outbox.add_answer(row, path=job.path, model_id=live_model.id, type="load_weights")

    def unload(self, live_model: LiveModel, seq: int, row: TableRow) -> None:
        """Removes a model; the requests that it still has queued fail."""
        self.live_models.live.pop(live_model.id)
        self.outbox.updates.append(update_row(models, live_model.id, state="gone", saved=None))
        self.outbox.add_answer(row, model_id=live_model.id, type="unload_model")
        for _, _, later in live_model.queue:
            self.outbox.fail(later, ValueError(f"model {live_model.id} was unloaded before this request"))

    def _sampler(self, live_model: LiveModel, job: SaveJob, model: TableRow, folder: str) -> None:
        assert live_model.trainer.adapter is not None
        values = {"session": model.session, "owner": model.owner, "base": live_model.base.name, "created": time.time()}
        self.outbox.updates += upsert_row(samplers, {**values, "id": job.sampler, "folder": folder})
        self.live_models.cache_snapshot(live_model.base, folder, live_model.trainer.adapter)
