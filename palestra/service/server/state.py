"""Shared state of the routes (store, weight store, base models, limits)."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import sqlalchemy as sql
from pydantic import BaseModel

from palestra.service.server.api_keys import ApiKeys
from palestra.service.storage.store import Store
from palestra.service.storage.tables import TableRow, checkpoints, models, samplers, sessions
from palestra.service.storage.wakeup import WakeupSocket
from palestra.service.storage.weight_store import TinkerPath, WeightStore
from palestra.service.wire.schemas.wire_model import BadRequest


class ClientLimits(BaseModel):
    """Limits on what one client may request. A full queue is answered with 429 and Retry-After."""

    body: int = 64 * 2**20
    """Bytes of a request body after decompression; JSON has a lower limit of its own (wire_model.py)."""
    upload: int = 2**31
    """Bytes of an uploaded archive, compressed and decompressed."""
    batch_tokens: int = 2**22
    """Tokens in one forward_backward call."""
    answer_tokens: int = 2**21
    """Tokens in the answer to a sampling call; each counts once more for every additional log-probability."""
    models: int = 64
    """Live models of one API key."""
    queue: int = 20_000
    """Unanswered requests of one API key."""
    queue_bytes: int = 2**29
    """Bytes of the unanswered requests' bodies of one API key; they are held in the worker's memory."""
    poll: float = 30.0
    """Seconds that a poll is held open without an answer."""


@dataclass(frozen=True)
class BaseInfo:
    """Metadata of a base model, without its weights. `public_names` are the names that clients may use,
    `max_length` is the number of tokens, prompt and answer together, that the engine allows, `max_chars_per_token` an
    upper bound on the characters that one token stands for."""

    name: str
    path: str
    public_names: tuple[str, ...]
    architecture: str
    vocab_size: int
    max_length: int
    max_chars_per_token: int
    tokenizer: Any


@dataclass
class ServiceContext:
    """Shared state of one front end."""

    store: Store
    weight_store: WeightStore
    keys: ApiKeys
    bases: dict[str, BaseInfo]
    wakeup: WakeupSocket
    limits: ClientLimits = field(default_factory=ClientLimits)

    def base(self, name: str | None) -> BaseInfo:
        """Returns the base model that a client calls `name`. Raises BadRequest if it is unknown."""
        for base in self.bases.values():
            if name == base.name or name in base.public_names:
                return base
        known = ", ".join(sorted(set(chain.from_iterable((b.name, *b.public_names) for b in self.bases.values()))))
        raise BadRequest(
            f'this server has no base "{str(name)[:200]}": it has {known}. `palestra serve --alias` adds names.'
        )

    def base_of(self, row: TableRow) -> BaseInfo:
        """Returns the base of a model, sampler or checkpoint row. Raises BadRequest (410) if the server was started
        without it."""
        if row.base not in self.bases:
            raise BadRequest(f"this server no longer has base {row.base}: start it with --base {row.base}=PATH", 410)
        return self.bases[row.base]

    def session(self, owner: str, id: str) -> TableRow:
        """Returns the owner's session. Raises BadRequest (404) if there is none."""
        return self.own_row(sessions, owner, id, "session")

    def model(self, owner: str, id: str) -> TableRow:
        """Returns the owner's model. Raises BadRequest (404) if there is none or it was unloaded."""
        row = self.own_row(models, owner, id, "model")
        if row.state == "gone":
            raise BadRequest(f"model {id} was unloaded: create a new one", 404)
        return row

    def sampler(self, owner: str, id: str) -> TableRow:
        """Returns the owner's sampler. Raises BadRequest (404) if there is none."""
        return self.own_row(samplers, owner, id, "sampler")

    def checkpoint(self, owner: str, path: str | TinkerPath, *, to_change: bool = False) -> TableRow:
        """Returns the checkpoint at a tinker:// path that `owner` may read, or owns if `to_change` is true. Raises
        BadRequest (404) if there is none or it has expired."""
        path = TinkerPath.parse(path) if isinstance(path, str) else path
        row = self.store.get(checkpoints, str(path))
        over = row is not None and row.expires is not None and row.expires < time.time()
        if row is None or over or (row.owner != owner and (to_change or not row.public)):
            raise BadRequest(f"there are no weights at {path}, or they are not yours", 404)
        return row

    def own_row(self, table: sql.Table, owner: str, id: str, what: str) -> TableRow:
        """Returns the owner's row with this primary key. Raises BadRequest (404) if there is none."""
        row = self.store.get(table, id)
        if row is None or row.owner != owner:
            raise BadRequest(f'there is no {what} "{id[:200]}", or it is not yours', 404)
        return row
