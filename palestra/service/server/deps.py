"""FastAPI dependencies shared by the routes: authentication, body reading within limits, and request queueing."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import zstandard
from fastapi import Depends, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel
from starlette.types import Message

from palestra.core.http.limits import bearer_token
from palestra.service.server.state import ServiceContext
from palestra.service.storage.store import QueueDepth
from palestra.service.wire.schemas.requests import MAX_INT32
from palestra.service.wire.schemas.responses import UntypedAPIFuture
from palestra.service.wire.schemas.wire_model import BadRequest, WireModel, check_json_size, parse_body

DEPTH_CACHE_S = 1.0  # seconds for which a queue count is cached
MAX_INLINE_PARSE_BYTES = 2**14  # bytes up to which a body is parsed on the event loop: a thread would cost more
RequestNumber = tuple[object, object]  # unvalidated model id and sequence number


class QueueFull(BadRequest):
    """The owner's queue is full (429): the client should retry later."""

    def __init__(self, waiting: QueueDepth) -> None:
        what = f"{waiting.num_requests} of your requests ({waiting.num_bytes / 2**20:.1f} MiB) wait for an answer"
        super().__init__(f"{what}: send more when some of them have one", 429)


class RequestQueue:
    """Queues requests for the worker, within the limits of each owner."""

    def __init__(self, context: ServiceContext) -> None:
        self.context = context
        self._seen: dict[str, tuple[float, QueueDepth]] = {}

    def submit(
        self,
        owner: str,
        kind: str,
        job: BaseModel | bytes,
        *,
        key: str | None = None,
        model: str | None = None,
        seq: int | None = None,
    ) -> str:
        """Queues a request and returns its id; a repeated `key` returns the id of the first request. Raises QueueFull
        if the owner's queue is full."""
        body = job if isinstance(job, bytes) else job.model_dump_json().encode()
        self.admit(owner, len(body))
        id = self.context.store.submit(owner, kind, body, key=key, model=model, seq=seq)
        self.context.wakeup.wake()
        return id

    def submit_numbered(
        self, owner: str, kind: str, job: BaseModel | bytes, model: str, seq: int | None
    ) -> UntypedAPIFuture:
        """Queues request `seq` of a model, as `submit` does, and returns the reply to its client. Clients send 0 for
        "not numbered", which becomes None."""
        key = _request_key(model, seq) if seq else None
        id = self.submit(owner, kind, job, key=key, model=model, seq=seq or None)
        return UntypedAPIFuture(request_id=id, model_id=model)

    @contextmanager
    def recording_rejection(self, owner: str, kind: str, body: bytes | RequestNumber) -> Iterator[None]:
        """Context manager that records the sequence number of a rejected request as used, since the client continues
        with the next one.

        `body` is the request's JSON, or its model and number. A full queue uses up no number, since the client sends
        the request again.
        """
        try:
            yield
        except QueueFull:
            raise
        except BadRequest as error:
            self.reject(owner, kind, str(error), *(_number(body) if isinstance(body, bytes) else body))
            raise

    def reject(self, owner: str, kind: str, message: str, model: object, seq: object) -> None:
        """Records that request `seq` of one of the owner's models was rejected. Does nothing if there is no such model
        or the number is invalid."""
        if not isinstance(model, str) or not isinstance(seq, int) or not 0 < seq <= MAX_INT32:
            return
        try:
            self.context.model(owner, model)
        except BadRequest:
            return
        self.context.store.reject(owner, kind, message, key=_request_key(model, seq), model=model, seq=seq)
        self.context.wakeup.wake()

    def admit(self, owner: str, size: int) -> None:
        """Counts one more request of `size` bytes for the owner. Raises QueueFull if the number or total size
        exceeds the limits; a single request may have any size that a body may have."""
        limits = self.context.limits
        waiting = self.depth(owner)
        more = QueueDepth(waiting.num_requests + 1, waiting.num_bytes + size)
        if more.num_requests > limits.queue or (waiting.num_requests and more.num_bytes > limits.queue_bytes):
            raise QueueFull(waiting)
        self._seen[owner] = (self._seen[owner][0], more)

    def depth(self, owner: str) -> QueueDepth:
        """Returns the owner's unanswered requests, cached for up to a second."""
        now = time.monotonic()
        if owner not in self._seen or now - self._seen[owner][0] > DEPTH_CACHE_S:
            self._seen[owner] = (now, self.context.store.queue_depth(owner))
        return self._seen[owner][1]


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


# -- dependencies ------------------------------------------------------------------------------------------------------


async def get_context(request: Request) -> ServiceContext:
    """Returns the shared state of the app that serves the request."""
    context: ServiceContext = request.app.state.context
    return context


ContextDep = Annotated[ServiceContext, Depends(get_context)]


async def find_owner(request: Request, context: ContextDep) -> str:
    """Authenticates a request by X-API-Key or Authorization: Bearer and returns the key's owner. Raises BadRequest
    (401) if the key is unknown."""
    owner = context.keys.owner_of(request.headers.get("x-api-key") or bearer_token(request.headers) or None)
    if owner is None:
        raise BadRequest("this server needs a valid API key: set TINKER_API_KEY (or MINT_API_KEY)", 401)
    return owner


async def get_queue(request: Request) -> RequestQueue:
    """Returns the queue of the app that serves the request."""
    queue: RequestQueue = request.app.state.queue
    return queue


OwnerDep = Annotated[str, Depends(find_owner)]
QueueDep = Annotated[RequestQueue, Depends(get_queue)]


async def read_body(request: Request, context: ContextDep, owner: OwnerDep) -> bytes:
    """Returns the decompressed body of an authenticated request. Raises BadRequest (413) as soon as it exceeds the
    limit, compressed or not, and before reading if its Content-Length does."""
    limit = context.limits.body
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > limit:
        raise _body_too_long(limit)
    body = await limit_body(request, limit).body()
    encoding = request.headers.get("content-encoding", "").strip().lower()
    return await run_in_threadpool(decompress_body, body, encoding, limit) if encoding else body


def decompress_body(body: bytes, encoding: str, limit: int) -> bytes:
    """Decodes the body's Content-Encoding, producing at most `limit` bytes. Raises BadRequest if the encoding is not
    supported (415), the data is invalid, or the result is too long (413)."""
    if encoding in ("", "identity"):
        return body
    if encoding not in _UNPACK:
        raise BadRequest(f'Content-Encoding "{encoding[:40]}" is not read here: send zstd, gzip or none', 415)
    try:
        plain = _UNPACK[encoding](body, limit + 1)
    except (zlib.error, zstandard.ZstdError) as error:
        raise BadRequest(f"the body is not {encoding}: {error}") from None
    if len(plain) > limit:
        raise _body_too_long(limit)
    return plain


def _unzstd(body: bytes, most: int) -> bytes:
    return zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(body, read_across_frames=True).read(most)


def _gunzip(body: bytes, most: int) -> bytes:
    return zlib.decompressobj(wbits=31).decompress(body, most)


_UNPACK = {"zstd": _unzstd, "gzip": _gunzip}


def limit_body(request: Request, limit: int) -> Request:
    """Returns the request with a body limit: raises BadRequest (413) once more than `limit` bytes have arrived."""
    left = limit

    async def receive() -> Message:
        nonlocal left
        message = await request.receive()
        left -= len(message.get("body", b""))
        if left < 0:
            raise _body_too_long(limit)
        return message

    return Request(request.scope, receive)


def _body_too_long(limit: int) -> BadRequest:
    """Returns the BadRequest (413) for a body that is longer than `limit` bytes."""
    return BadRequest(f"the body is longer than {limit} bytes: send the data in several requests", 413)


BodyDep = Annotated[bytes, Depends(read_body)]


class BodyParser:
    """FastAPI dependency that parses the body as `model`."""

    def __init__(self, model: type[WireModel]) -> None:
        self.model = model

    async def __call__(self, body: BodyDep) -> WireModel:
        return (
            parse_body(self.model, body)
            if len(body) < MAX_INLINE_PARSE_BYTES
            else await run_in_threadpool(parse_body, self.model, body)
        )


if TYPE_CHECKING:
    M = TypeVar("M", bound=WireModel)
    JsonBody = Annotated[M, BodyParser]
else:

    class JsonBody:
        """`JsonBody[Model]` marks the argument of a route that receives its parsed JSON body."""

        def __class_getitem__(cls, model):
            return Annotated[model, Depends(BodyParser(model))]


def metadata_as_text(metadata: dict[str, Any] | None) -> dict[str, str]:
    """Returns a client's metadata with all values as strings, the form in which the wire returns it."""
    return {name: v if isinstance(v, str) else json.dumps(v) for name, v in (metadata or {}).items()}
