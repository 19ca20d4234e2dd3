"""The models that clients train, in memory while they are used, and the snapshots that samplers read.

A model that nobody has used for a while is written to the vault and leaves memory; its next request brings it back. A
model whose engine died comes back from where it was last saved, if it has not changed since; else it is *lost*, and
says so until its client loads weights.
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
from typing import Any

import sqlalchemy as sql
from safetensors.torch import load_file, save_file

from palestra.engine.checkpoints import load_adapter, load_trainer, save_adapter, save_trainer
from palestra.engine.lora import Adapter, LoraConfig, Snapshot
from palestra.engine.models import Engine
from palestra.engine.sampler import Sampler
from palestra.engine.trainer import Trainer
from palestra.service.jobs import Lora
from palestra.service.store import Store
from palestra.service.tables import Change, models
from palestra.service.vault import Vault

SNAPSHOTS = 256  # kept in memory
GRADIENTS = "gradients.safetensors"


class Lost(ValueError):
    """A model's state is not what its client believes."""


@dataclass
class Base:
    """A resident base model and what runs on it."""

    name: str
    engine: Engine
    sampler: Sampler


@dataclass
class Tenant:
    """One client's model. `next` is the sequence number that runs next, `queue` the requests that came, as (sequence
    number, row); `since` is when it began to wait for one that has not come. `lost` says why the trainer does not hold
    what the client believes: until weights are loaded, every other request is answered with it."""

    id: str
    base: Base
    trainer: Trainer
    next: int
    changed: int
    kept: int
    queue: list[tuple[int, int, sql.Row]] = field(default_factory=list)
    gathered: bool = False  # gradients that no optimizer step has used yet
    training: int = 0  # requests for gradients that left the queue and are not answered
    used: float = field(default_factory=time.time)
    since: float | None = None
    lost: str | None = None

    def push(self, row: sql.Row) -> None:
        """Takes a request into the order. One without a number runs after all that are there, and uses up none."""
        last = max((seq for seq, _, _ in self.queue), default=self.next - 1)
        heapq.heappush(self.queue, (last if row.seq is None else row.seq, row.serial, row))

    def ready(self, patience: float) -> bool:
        """Whether its first request is the next in order. One that never came is waited for `patience` seconds."""
        if not self.queue:
            return False
        if self.queue[0][0] <= self.next:
            self.since = None
            return True
        self.since = self.since or time.monotonic()
        return time.monotonic() - self.since > patience

    def pop(self) -> tuple[int, sql.Row]:
        seq, _, row = heapq.heappop(self.queue)
        self.next, self.since, self.used = max(self.next, seq + 1), None, time.time()
        return seq, row


class Tenants:
    """Live models by id, and snapshots by their folder in the vault."""

    def __init__(self, store: Store, vault: Vault, bases: dict[str, Base], *, most: int) -> None:
        self.store, self.vault, self.bases, self.most = store, vault, bases, most
        self.live: OrderedDict[str, Tenant] = OrderedDict()
        self._snapshots: OrderedDict[str, Snapshot] = OrderedDict()

    def __iter__(self) -> Iterator[Tenant]:
        return iter(list(self.live.values()))

    def get(self, id: str) -> Tenant:
        """The model, brought to memory where it is not. Raises Lost where there is none such any more."""
        if id not in self.live:
            self.live[id] = self._revive(id)
        self.live.move_to_end(id)
        return self.live[id]

    def base(self, name: str) -> Base:
        """Raises Lost where the engine was started without it: another front end may have been started with it."""
        if name not in self.bases:
            raise Lost(f"the server's engine has no base {name}: start it with --base")
        return self.bases[name]

    def _revive(self, id: str) -> Tenant:
        row = self.store.get(models, id)
        if row is None or row.state == "gone":
            raise Lost(f"model {id} is gone: it was unloaded. Create a new one.")
        base = self.base(row.base)
        trainer = new_trainer(base.engine, Lora.model_validate(row.lora), id)
        tenant = Tenant(id, base, trainer, self.store.last_seq(id) + 1, row.changed, row.kept)
        if row.state == "lost":
            tenant.lost = self._what_is_lost(row)
        elif row.saved:
            try:
                self.load(tenant, row.saved, optimizer=row.info.get("optimizer", True))
            except (OSError, ValueError) as error:
                tenant.lost = f"model {id} was not in use and cannot be brought back ({error}): load other weights"
        return tenant

    def _what_is_lost(self, row: sql.Row) -> str:
        where = row.info.get("path")
        steps = f"what it learned after it was last saved ({where})" if where else "all it had learned"
        fix = f'load "{where}" (load_state), or create a client from it' if where else "create a new one"
        return f"the server restarted, and model {row.id} lost {steps}: {fix}."

    def load(self, tenant: Tenant, folder: str, *, optimizer: bool) -> None:
        """Weights, and with `optimizer` its state, from the vault; without, the optimizer begins anew. Raises
        ValueError for another shape, and then leaves the model as it was."""
        path, old = self.vault.read(folder), tenant.trainer
        assert old.adapter is not None
        trainer = Trainer(old.engine, Adapter(old.engine.linears, old.adapter.config, seed=0))
        assert trainer.adapter is not None
        if optimizer:
            load_trainer(path, trainer)
        else:
            trainer.adapter.take(load_adapter(path, trainer.engine))
        tenant.gathered = load_gradients(path, trainer)
        tenant.trainer, tenant.lost = trainer, None

    def release(self, tenant: Tenant) -> Change | None:
        """Writes a model to the vault and lets it leave memory; what to note in the store."""
        change = self.keep(tenant)
        self.live.pop(tenant.id)
        return change

    def keep(self, tenant: Tenant) -> Change | None:
        """Writes a model to the vault as it stands, gathered gradients too; what to note in the store."""
        if tenant.lost or tenant.changed == tenant.kept:
            return None
        folder, _ = self.vault.write(partial(save_whole, tenant=tenant))
        tenant.kept = tenant.changed
        return Change.of(models, tenant.id, saved=folder, kept=tenant.kept, info=self._info(tenant.id))

    def _info(self, id: str) -> dict[str, Any]:
        row = self.store.get(models, id)
        return {k: v for k, v in (row.info if row else {}).items() if k != "optimizer"}

    def crowd(self, idle: float) -> list[Tenant]:
        """Models unused for `idle` seconds, and the least recently used beyond `most`; none that has requests."""
        now, spare = time.time(), len(self.live) - self.most
        resting = ((i, t) for i, t in enumerate(self) if not t.queue and not t.training)
        return [t for i, t in resting if i < spare or now - t.used > idle]

    def snapshot(self, base: Base, folder: str | None) -> Snapshot | None:
        """The weights in `folder`, as the sampler reads them; None for the bare base."""
        if folder is None:
            return None
        if folder not in self._snapshots:
            adapter = load_adapter(self.vault.read(folder), base.engine)
            self.remember(folder, adapter.snapshot(folder, base.engine.dtype))
        self._snapshots.move_to_end(folder)
        return self._snapshots[folder]

    def remember(self, folder: str, snapshot: Snapshot) -> None:
        self._snapshots[folder] = snapshot
        while len(self._snapshots) > SNAPSHOTS:
            self._snapshots.popitem(last=False)


def new_trainer(engine: Engine, lora: Lora, id: str) -> Trainer:
    """A new adapter as the client asked for it."""
    seed = (
        int.from_bytes(hashlib.blake2b(id.encode(), digest_size=7).digest(), "big") if lora.seed is None else lora.seed
    )
    config = LoraConfig(rank=lora.rank, alpha=lora.alpha, targets=lora_targets(engine, lora))
    return Trainer(engine, Adapter(engine.linears, config, seed=seed))


def lora_targets(engine: Engine, lora: Lora) -> list[str]:
    """The linear layers that the three switches mean."""

    def wanted(name: str) -> bool:
        if not any(part.isdigit() for part in name.split(".")):  # of no decoder layer: the head
            return lora.train_unembed
        return lora.train_attn if "attn" in name or "attention" in name else lora.train_mlp

    return [name for name in engine.linears if wanted(name)]


def save_whole(folder: Path, tenant: Tenant) -> None:
    """All that the model is: weights, optimizer, and the gradients that its next step will use."""
    save_trainer(folder, tenant.trainer)
    if tenant.gathered:
        gradients = {f"{i}": w.grad for i, w in enumerate(tenant.trainer.parameters) if w.grad is not None}
        save_file({name: gradient.cpu().contiguous() for name, gradient in gradients.items()}, folder / GRADIENTS)


def load_gradients(folder: Path, trainer: Trainer) -> bool:
    """Gives a trainer the gradients that `save_whole` wrote; whether there were any."""
    if not (folder / GRADIENTS).exists():
        return False
    for number, gradient in load_file(folder / GRADIENTS).items():
        trainer.parameters[int(number)].grad = gradient.to(trainer.engine.device)
    return True


def save_weights(folder: Path, tenant: Tenant, *, optimizer: bool) -> None:
    if optimizer:
        save_trainer(folder, tenant.trainer)
    else:
        assert tenant.trainer.adapter is not None
        save_adapter(folder, tenant.trainer.adapter, tenant.base.name)
