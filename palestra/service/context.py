"""What every route needs: the store, the vault, the bases, the limits, and who is asking."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sql
from fastapi import Request
from pydantic import BaseModel

from palestra.service.bell import Bell
from palestra.service.keys import Keys
from palestra.service.store import Store
from palestra.service.tables import checkpoints, models, samplers, sessions
from palestra.service.vault import TinkerPath, Vault
from palestra.service.wire import BadRequest


class Limits(BaseModel):
    """What one client may ask for. Beyond the queue's length the answer is 429 with Retry-After."""

    body: int = 64 * 2**20  # bytes, after decompression; JSON has a lower limit of its own (wire.py)
    upload: int = 2**31  # bytes of an uploaded archive, packed and unpacked
    batch_tokens: int = 2**22  # in one forward_backward
    answer_tokens: int = 2**21  # in the answer to a sample, counted again for every likeliest token beside them
    models: int = 64  # alive, for each key
    queue: int = 20_000  # unanswered requests, for each key
    queue_bytes: int = 2**29  # of their bodies, for each key: they wait in the worker's memory
    poll: float = 30.0  # seconds that a poll is held


@dataclass(frozen=True)
class BaseInfo:
    """A base as the front end knows it, without weights. `public` are the names that clients may call it by,
    `longest_token` the most characters that one of its tokens stands for."""

    name: str
    path: str
    public: tuple[str, ...]
    arch: str
    vocab: int
    max_length: int
    longest_token: int
    tokenizer: Any


@dataclass
class Context:
    """One front end."""

    store: Store
    vault: Vault
    keys: Keys
    bases: dict[str, BaseInfo]
    bell: Bell
    limits: Limits = field(default_factory=Limits)

    def base(self, name: str | None) -> BaseInfo:
        """The base that a client calls `name`. Raises BadRequest for an unknown one."""
        for base in self.bases.values():
            if name == base.name or name in base.public:
                return base
        known = ", ".join(sorted({n for b in self.bases.values() for n in (b.name, *b.public)}))
        raise BadRequest(
            f'this server has no base "{str(name)[:200]}": it has {known}. `palestra serve --alias` adds names.'
        )

    def base_of(self, row: sql.Row) -> BaseInfo:
        """The base of a model, sampler or checkpoint. Raises BadRequest where the server was started without it."""
        if row.base not in self.bases:
            raise BadRequest(f"this server no longer has base {row.base}: start it with --base {row.base}=PATH", 410)
        return self.bases[row.base]

    def session(self, owner: str, id: str) -> sql.Row:
        return self._own(sessions, owner, id, "session")

    def model(self, owner: str, id: str) -> sql.Row:
        row = self._own(models, owner, id, "model")
        if row.state == "gone":
            raise BadRequest(f"model {id} was unloaded: create a new one", 404)
        return row

    def sampler(self, owner: str, id: str) -> sql.Row:
        return self._own(samplers, owner, id, "sampler")

    def checkpoint(self, owner: str, path: str | TinkerPath, *, to_change: bool = False) -> sql.Row:
        """The weights at a tinker:// path that `owner` may read, or with `to_change` owns."""
        path = TinkerPath.parse(path) if isinstance(path, str) else path
        row = self.store.get(checkpoints, str(path))
        over = row is not None and row.expires is not None and row.expires < time.time()
        if row is None or over or (row.owner != owner and (to_change or not row.public)):
            raise BadRequest(f"there are no weights at {path}, or they are not yours", 404)
        return row

    def _own(self, table: sql.Table, owner: str, id: str, what: str) -> sql.Row:
        row = self.store.get(table, id)
        if row is None or row.owner != owner:
            raise BadRequest(f'there is no {what} "{id[:200]}", or it is not yours', 404)
        return row


def context(request: Request) -> Context:
    found: Context = request.app.state.context
    return found


def owner(request: Request) -> str:
    """Who is asking, by X-API-Key or Authorization: Bearer. Raises BadRequest (401)."""
    given = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
    found = context(request).keys.owner(given or None)
    if found is None:
        raise BadRequest("this server wants an API key that it knows: set TINKER_API_KEY (or MINT_API_KEY)", 401)
    return found
