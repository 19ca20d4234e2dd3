"""The models that clients train, held in memory while in use, and the snapshots that samplers read.

A model that is unused for a while is written to the weight store and removed from memory; its next request restores it.
A model whose worker died is restored from its last save if it has not changed since; otherwise it is *lost*, and its
requests fail until its client loads weights.
"""

from __future__ import annotations

import hashlib
import heapq
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import sqlalchemy as sql
from safetensors.torch import load_file, save_file

from palestra.engine.bases.model import Engine
from palestra.engine.lora.adapters import Adapter, Snapshot
from palestra.engine.lora.config import LoraConfig
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.training.adapter_weights import AdapterWeights
from palestra.engine.training.checkpoints import load_training_state, save_training_state
from palestra.engine.training.peft_format import load_adapter, save_adapter
from palestra.service.storage.archives import lora_targets
from palestra.service.storage.store import Store
from palestra.service.storage.tables import TableRow, models, update_row
from palestra.service.storage.weight_store import WeightStore
from palestra.service.wire.schemas import requests

MAX_SNAPSHOTS = 256  # kept in memory, at most
GRADIENTS_FILE = "gradients.safetensors"


class StateLost(ValueError):
    """A model's state is not what its client expects."""


@dataclass
class LoadedBase:
    """A loaded base model with its engine and sampler."""

    name: str
    engine: Engine
    sampler: Sampler


@dataclass
class LiveModel:
    """One live model.

    `next_seq` is the sequence number that runs next, `queue` the waiting requests as (sequence number, serial, row), a
    heap; `waiting_since` is the time at which waiting for a missing sequence number began. `lost` is the reason why the
    trainer does not hold the expected state: until weights are loaded, all other requests fail with it.
    """

    id: str
    base: LoadedBase
    trainer: AdapterWeights
    next_seq: int
    changed_seq: int
    saved_seq: int
    queue: list[tuple[int, int, TableRow]] = field(default_factory=list)
    has_gradients: bool = False  # has accumulated gradients that no optimizer step has used
    num_training: int = 0  # unanswered gradient requests taken from the queue
    last_used: float = field(default_factory=time.time)
    waiting_since: float | None = None
    lost_reason: str | None = None

    def push(self, row: TableRow) -> None:
        """Queues a request. A request without a number runs after all that are queued and uses up no number."""
        last = max((seq for seq, _, _ in self.queue), default=self.next_seq - 1)
        heapq.heappush(self.queue, (last if row.seq is None else row.seq, row.serial, row))

    def ready(self, gap_timeout_s: float) -> bool:
        """Returns True if the first queued request may run: it is the next in order, or the missing one has been
        awaited for `gap_timeout_s` seconds."""
        if not self.queue:
            return False
        if self.queue[0][0] <= self.next_seq:
            self.waiting_since = None
            return True
        self.waiting_since = self.waiting_since or time.monotonic()
        return time.monotonic() - self.waiting_since > gap_timeout_s

    def pop(self) -> tuple[int, TableRow]:
        """Removes and returns the first queued request with its sequence number."""
        seq, _, row = heapq.heappop(self.queue)
        self.next_seq = max(self.next_seq, seq + 1)
        self.waiting_since = None
        self.last_used = time.time()
        return seq, row


class LiveModels:
    """Live models by id, and snapshots by their folder in the weight store."""

    def __init__(self, store: Store, weight_store: WeightStore, bases: dict[str, LoadedBase], *, max_live: int) -> None:
        self.store = store
        self.weight_store = weight_store
        self.bases = bases
        self.max_live = max_live
        self.live: OrderedDict[str, LiveModel] = OrderedDict()
        self.snapshots: OrderedDict[str, Snapshot] = OrderedDict()

    def __iter__(self) -> Iterator[LiveModel]:
        return iter(list(self.live.values()))

    def get(self, id: str) -> LiveModel:
        """Returns the model, restoring it to memory if necessary. Raises StateLost if it no longer exists."""
        if id not in self.live:
            self.live[id] = self._revive(id)
        self.live.move_to_end(id)
        return self.live[id]

    def base(self, name: str) -> LoadedBase:
        """Returns the loaded base. Raises StateLost if the worker was started without it; another front end may have
        been started with it."""
        if name not in self.bases:
            raise StateLost(f"the server's engine has no base {name}: start it with --base")
        return self.bases[name]

    def _revive(self, id: str) -> LiveModel:
        row = self.store.get(models, id)
        if row is None or row.state == "gone":
            raise StateLost(f"model {id} is gone: it was unloaded. Create a new one.")
        base = self.base(row.base)
        trainer = new_trainer(base.engine, requests.LoraConfig.model_validate(row.lora), id)
        live_model = LiveModel(id, base, trainer, self.store.last_seq(id) + 1, row.changed, row.kept)
        if row.state == "lost":
            where = row.info.get("path")
            steps = "all it had learned"
            fix = "create a new one"
            if where:
                steps = f"what it learned after it was last saved ({where})"
                fix = f'load "{where}" (load_state), or create a client from it'
            live_model.lost_reason = f"the server restarted, and model {row.id} lost {steps}: {fix}."
        elif row.saved:
            try:
                self.load(live_model, row.saved, optimizer=row.info.get("optimizer", True))
            except (OSError, ValueError) as error:
                live_model.lost_reason = (
                    f"model {id} was not in use and cannot be brought back ({error}): load other weights"
                )
        return live_model

    def load(self, live_model: LiveModel, folder: str, *, optimizer: bool) -> None:
        """Loads weights from the weight store, with the optimizer state if `optimizer` is true and a new optimizer
        otherwise. Raises ValueError if the shape differs, and then leaves the model unchanged."""
        path = self.weight_store.read(folder)
        old = live_model.trainer
        assert old.adapter is not None
        trainer = AdapterWeights(old.engine, Adapter(old.engine.linear_layers, old.adapter.config, seed=0))
        assert trainer.adapter is not None
        if optimizer:
            load_training_state(path, trainer)
        else:
            trainer.adapter.copy_from(load_adapter(path, trainer.engine))
        live_model.has_gradients = load_gradients(path, trainer)
        live_model.trainer = trainer
        live_model.lost_reason = None

    def save(self, live_model: LiveModel) -> sql.Update | None:
        """Saves a model as it is, including accumulated gradients. Returns the row update to store, or None if nothing
        changed."""
        if live_model.lost_reason or live_model.changed_seq == live_model.saved_seq:
            return None
        folder, _ = self.weight_store.write(partial(save_state, live_model=live_model))
        live_model.saved_seq = live_model.changed_seq
        row = self.store.get(models, live_model.id)
        return update_row(
            models,
            live_model.id,
            saved=folder,
            kept=live_model.saved_seq,
            info={k: v for k, v in (row.info if row else {}).items() if k != "optimizer"},
        )

    def evictable(self, idle: float) -> list[LiveModel]:
        """Returns the models to remove from memory: those unused for `idle` seconds, and the least recently used beyond
        `max_live`. Models with queued or running requests are excluded."""
        now = time.time()
        spare = len(self.live) - self.max_live
        resting = ((i, t) for i, t in enumerate(self) if not t.queue and not t.num_training)
        return [t for i, t in resting if i < spare or now - t.last_used > idle]

    def snapshot(self, base: LoadedBase, folder: str | None) -> Snapshot | None:
        """Returns the weights in `folder` as the sampler reads them; None for the bare base."""
        if folder is None:
            return None
        if folder not in self.snapshots:
            self.cache_snapshot(base, folder, load_adapter(self.weight_store.read(folder), base.engine))
        self.snapshots.move_to_end(folder)
        return self.snapshots[folder]

    def cache_snapshot(self, base: LoadedBase, folder: str, adapter: Adapter) -> None:
        """Caches a snapshot of the adapter in `folder`, dropping the least recently used beyond `MAX_SNAPSHOTS`."""
        self.snapshots[folder] = adapter.snapshot(folder, base.engine.dtype)
        while len(self.snapshots) > MAX_SNAPSHOTS:
            self.snapshots.popitem(last=False)


def new_trainer(engine: Engine, lora: requests.LoraConfig, id: str) -> AdapterWeights:
    """Returns a trainer with a new adapter for the client's settings. A missing seed is derived from the model's id."""
    seed = (
        int.from_bytes(hashlib.blake2b(id.encode(), digest_size=7).digest(), "big") if lora.seed is None else lora.seed
    )
    config = LoraConfig(rank=lora.rank, alpha=lora.alpha, target_modules=lora_targets(engine.linear_layers, lora))
    return AdapterWeights(engine, Adapter(engine.linear_layers, config, seed=seed))


def save_state(folder: Path, live_model: LiveModel) -> None:
    """Writes the complete state of a model: weights, optimizer, and accumulated gradients."""
    save_training_state(folder, live_model.trainer)
    if live_model.has_gradients:
        gradients = {f"{i}": w.grad for i, w in enumerate(live_model.trainer.parameters) if w.grad is not None}
        save_file({name: gradient.cpu().contiguous() for name, gradient in gradients.items()}, folder / GRADIENTS_FILE)


def load_gradients(folder: Path, trainer: AdapterWeights) -> bool:
    """Loads the accumulated gradients written by `save_state`. Returns False if there are none."""
    if not (folder / GRADIENTS_FILE).exists():
        return False
    for number, gradient in load_file(folder / GRADIENTS_FILE).items():
        trainer.parameters[int(number)].grad = gradient.to(trainer.engine.device)
    return True


def save_weights(folder: Path, live_model: LiveModel, *, optimizer: bool) -> None:
    """Writes the adapter, with the optimizer state if `optimizer` is true."""
    if optimizer:
        save_training_state(folder, live_model.trainer)
    else:
        trainer = live_model.trainer
        assert trainer.adapter is not None
        save_adapter(folder, trainer.adapter, live_model.base.name, trainer.engine.model)
