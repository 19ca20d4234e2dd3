"""The owner of a request's API key: the owner's sessions, models, samplers and checkpoints, and the
owner's requests for the worker."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import sqlalchemy as sql
from pydantic import BaseModel

from palestra.service.server.state import ServiceContext
from palestra.service.storage.store import QueueDepth, Store
from palestra.service.storage.tables import TableRow, checkpoints, models, samplers, sessions
from palestra.service.storage.weight_store import TinkerPath
from palestra.service.wire.schemas.requests import MAX_INT32
from palestra.service.wire.schemas.responses import UntypedAPIFuture
from palestra.service.wire.schemas.wire_model import BadRequest, check_json_size

DEPTH_CACHE_S = 1.0  # seconds for which a queue count is cached
RequestNumber = tuple[object, object]  # unvalidated model id and sequence number


class QueueFull(BadRequest):
    """The owner's queue is full (429): the client should retry later."""

    def __init__(self, waiting: QueueDepth) -> None:
        what = f"{waiting.num_requests} of your requests ({waiting.num_bytes / 2**20:.1f} MiB) wait for an answer"
        super().__init__(f"{what}: send more when some of them have one", 429)


class QueueCounts:
    """The unanswered requests of each owner, counted anew after `DEPTH_CACHE_S`, and their limits."""

    def __init__(self, context: ServiceContext) -> None:
        self.context = context
        self._seen: dict[str, tuple[float, QueueDepth]] = {}

    def admit(self, owner: str, size: int) -> None:
        """Counts one more request of `size` bytes. Raises QueueFull if the number or total size
        exceeds the limits; a single request may have any size that a body may have."""
        limits = self.context.limits
        waiting = self.depth(owner)
        more = QueueDepth(waiting.num_requests + 1, waiting.num_bytes + size)
        if more.num_requests > limits.queue or (waiting.num_requests and more.num_bytes > limits.queue_bytes):
            raise QueueFull(waiting)
        self._seen[owner] = (self._seen[owner][0], more)

    def depth(self, owner: str) -> QueueDepth:
        now = time.monotonic()
        if owner not in self._seen or now - self._seen[owner][0] > DEPTH_CACHE_S:
            self._seen[owner] = (now, self.context.store.queue_depth(owner))
        return self._seen[owner][1]


@dataclass(frozen=True)
class Owner:
    """The owner of an API key, by name. Things of others are answered like things that do not exist."""

    name: str
    context: ServiceContext
    queue: QueueCounts

    @property
    def store(self) -> Store:
        return self.context.store

    # -- what the owner has --------------------------------------------------------------------------------------------

    def session(self, id: str) -> TableRow:
        """Returns the owner's session. Raises BadRequest (404) if there is none."""
        return self.own_row(sessions, id, "session")

    def model(self, id: str) -> TableRow:
        """Returns the owner's model. Raises BadRequest (404) if there is none or it was unloaded."""
        row = self.own_row(models, id, "model")
        if row.state == "gone":
            raise BadRequest(f"model {id} was unloaded: create a new one", 404)
        return row

    def sampler(self, id: str) -> TableRow:
        """Returns the owner's sampler. Raises BadRequest (404) if there is none."""
        return self.own_row(samplers, id, "sampler")

    def checkpoint(self, path: str | TinkerPath, *, to_change: bool = False) -> TableRow:
        """Returns the checkpoint at a tinker:// path that the owner may read, or owns if `to_change`
        is true. Raises BadRequest (404) if there is none or it has expired."""
        path = TinkerPath.parse(path) if isinstance(path, str) else path
        row = self.store.get(checkpoints, str(path))
        over = row is not None and row.expires is not None and row.expires < time.time()
        if row is None or over or (row.owner != self.name and (to_change or not row.public)):
            raise BadRequest(f"there are no weights at {path}, or they are not yours", 404)
        return row

    def own_row(self, table: sql.Table, id: str, what: str) -> TableRow:
        """Returns the owner's row with this primary key. Raises BadRequest (404) if there is none."""
        row = self.store.get(table, id)
        if row is None or row.owner != self.name:
            raise BadRequest(f'there is no {what} "{id[:200]}", or it is not yours', 404)
        return row

    # -- requests for the worker ---------------------------------------------------------------------------------------

    def depth(self) -> QueueDepth:
        """Returns the owner's unanswered requests, cached for up to a second."""
        return self.queue.depth(self.name)

    def submit(
        self,
        kind: str,
        job: BaseModel | bytes,
        *,
        key: str | None = None,
        model: str | None = None,
        seq: int | None = None,
    ) -> str:
        """Queues a request and returns its id; a repeated `key` returns the id of the first request.
        Raises QueueFull if the owner's queue is full."""
        body = job if isinstance(job, bytes) else job.model_dump_json().encode()
        self.queue.admit(self.name, len(body))
        id = self.store.submit(self.name, kind, body, key=key, model=model, seq=seq)
        self.context.wakeup.wake()
        return id

    def submit_numbered(self, kind: str, job: BaseModel | bytes, model: str, seq: int | None) -> UntypedAPIFuture:
        """Queues request `seq` of a model, as `submit` does, and returns the reply to its client.
        Clients send 0 for "not numbered", which becomes None."""
        key = _request_key(model, seq) if seq else None
        id = self.submit(kind, job, key=key, model=model, seq=seq or None)
        return UntypedAPIFuture(request_id=id, model_id=model)

    @contextmanager
    def recording_rejection(self, kind: str, body: bytes | RequestNumber) -> Iterator[None]:
        """Context manager that records the sequence number of a rejected request as used, since the
        client continues with the next one.

        `body` is the request's JSON, or its model and number. A full queue uses up no number, since
        the client sends the request again.
        """
        try:
            yield
        except QueueFull:
            raise
        except BadRequest as error:
            self._reject(kind, str(error), *(_number(body) if isinstance(body, bytes) else body))
            raise

    def _reject(self, kind: str, message: str, model: object, seq: object) -> None:
        """Records that request `seq` of one of the owner's models was rejected. Does nothing if there
        is no such model or the number is invalid."""
        if not isinstance(model, str) or not isinstance(seq, int) or not 0 < seq <= MAX_INT32:
            return
        try:
            self.model(model)
        except BadRequest:
            return
        self.store.reject(self.name, kind, message, key=_request_key(model, seq), model=model, seq=seq)
        self.context.wakeup.wake()


def _request_key(model: str, seq: int) -> str:
    return f"model:{model}:{seq}"


def _number(body: bytes) -> RequestNumber:
    """Returns the model and sequence number named in a JSON body, even if the rest is invalid."""
    try:
        check_json_size(body)
        tree = json.loads(body)
    except (ValueError, RecursionError):
        return None, None
    return (tree.get("model_id"), tree.get("seq_id")) if isinstance(tree, dict) else (None, None)
