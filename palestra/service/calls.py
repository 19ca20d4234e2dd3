"""What all routes share: who asks, a body read within its limits, and a request put into the queue."""

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

from palestra.service.context import Context
from palestra.service.context import context as find_context
from palestra.service.context import owner as find_owner
from palestra.service.store import Waiting
from palestra.service.wire import INT32, BadRequest, Wire, check_json, parse

FRESH = 1.0  # seconds that a count of the queue is believed
SHORT = 2**14  # bytes of a body that is parsed on the event loop: a thread costs more
Number = tuple[object, object]  # a model and a sequence number, as a client gave them


class Busy(BadRequest):
    """The owner's queue is full: ask again in a while."""

    def __init__(self, waiting: Waiting) -> None:
        what = f"{waiting.number} of your requests ({waiting.size / 2**20:.1f} MiB) wait for an answer"
        super().__init__(f"{what}: send more when some of them have one", 429)


class Queue:
    """Puts requests where the worker finds them, as many and as large as one owner may have there."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._seen: dict[str, tuple[float, Waiting]] = {}

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
        """The id of the request; a second one with the same `key` is the first. Raises Busy."""
        body = job if isinstance(job, bytes) else job.model_dump_json().encode()
        self.admit(owner, len(body))
        id = self.context.store.submit(owner, kind, body, key=key, model=model, seq=seq)
        self.context.bell.ring()
        return id

    def train(self, owner: str, kind: str, job: BaseModel | bytes, model: str, seq: int | None) -> str:
        """`submit`, for request `seq` of a model; 0, which clients send for "not numbered", is taken as None."""
        return self.submit(owner, kind, job, key=_key(model, seq), model=model, seq=seq or None)

    @contextmanager
    def numbered(self, owner: str, kind: str, body: bytes | Number) -> Iterator[None]:
        """Where a request of a model (its JSON, or its number) is refused within, the number is noted as used up: the
        client goes on with the next one. A full queue uses up nothing, since the request comes again."""
        try:
            yield
        except Busy:
            raise
        except BadRequest as error:
            self.refused(owner, kind, str(error), *(_number(body) if isinstance(body, bytes) else body))
            raise

    def refused(self, owner: str, kind: str, message: str, model: object, seq: object) -> None:
        """Notes that request `seq` of one of the owner's models was refused; nothing where there is none such."""
        if not isinstance(model, str) or not isinstance(seq, int) or not 0 < seq <= INT32:
            return
        try:
            self.context.model(owner, model)
        except BadRequest:
            return
        self.context.store.reject(owner, kind, message, key=f"model:{model}:{seq}", model=model, seq=seq)
        self.context.bell.ring()

    def admit(self, owner: str, size: int) -> None:
        """Counts one more request of the owner's, of `size` bytes. Raises Busy where there are too many, or too many
        bytes of them; one alone may be as large as a body may be."""
        limits, waiting = self.context.limits, self.waiting(owner)
        more = Waiting(waiting.number + 1, waiting.size + size)
        if more.number > limits.queue or (waiting.number and more.size > limits.queue_bytes):
            raise Busy(waiting)
        self._seen[owner] = (self._seen[owner][0], more)

    def waiting(self, owner: str) -> Waiting:
        """The owner's requests without an answer, as of the last second."""
        now = time.monotonic()
        if owner not in self._seen or now - self._seen[owner][0] > FRESH:
            self._seen[owner] = (now, self.context.store.waiting(owner))
        return self._seen[owner][1]


def _key(model: str, seq: int | None) -> str | None:
    return f"model:{model}:{seq}" if seq else None


def _number(body: bytes) -> Number:
    """The model and sequence number that a JSON body names, whatever else is wrong with it."""
    try:
        check_json(body)
        tree = json.loads(body)
    except (ValueError, RecursionError):
        return None, None
    return (tree.get("model_id"), tree.get("seq_id")) if isinstance(tree, dict) else (None, None)


# -- dependencies ------------------------------------------------------------------------------------------------------


async def _context(request: Request) -> Context:
    return find_context(request)


async def _owner(request: Request) -> str:
    return find_owner(request)


async def _queue(request: Request) -> Queue:
    found: Queue = request.app.state.queue
    return found


Ctx = Annotated[Context, Depends(_context)]
Owner = Annotated[str, Depends(_owner)]
Queued = Annotated[Queue, Depends(_queue)]


async def read(request: Request, owner: Owner) -> bytes:
    """The body, unpacked, once it is known who asks. Raises BadRequest (413) as soon as it is longer than the limit,
    packed or not, and before it is read where it says so itself."""
    limit = find_context(request).limits.body
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > limit:
        raise too_long(limit)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise too_long(limit)
    encoding = request.headers.get("content-encoding", "").strip().lower()
    return await run_in_threadpool(unpacked, bytes(body), encoding, limit) if encoding else bytes(body)


def unpacked(body: bytes, encoding: str, limit: int) -> bytes:
    """`body` without its Content-Encoding. Raises BadRequest, and never makes more than `limit` bytes of it."""
    if encoding in ("", "identity"):
        return body
    if encoding not in _UNPACK:
        raise BadRequest(f'Content-Encoding "{encoding[:40]}" is not read here: send zstd, gzip or none', 415)
    try:
        plain = _UNPACK[encoding](body, limit + 1)
    except (zlib.error, zstandard.ZstdError) as error:
        raise BadRequest(f"the body is no {encoding}: {error}") from None
    if len(plain) > limit:
        raise too_long(limit)
    return plain


def _unzstd(body: bytes, most: int) -> bytes:
    return zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(body, read_across_frames=True).read(most)


def _gunzip(body: bytes, most: int) -> bytes:
    return zlib.decompressobj(wbits=31).decompress(body, most)


_UNPACK = {"zstd": _unzstd, "gzip": _gunzip}


def too_long(limit: int) -> BadRequest:
    return BadRequest(f"the body is longer than {limit} bytes: send the data in several requests", 413)


Body = Annotated[bytes, Depends(read)]


class Reader:
    """The dependency that reads a body as `model`."""

    def __init__(self, model: type[Wire]) -> None:
        self.model = model

    async def __call__(self, body: Body) -> Wire:
        return parse(self.model, body) if len(body) < SHORT else await run_in_threadpool(parse, self.model, body)


if TYPE_CHECKING:
    M = TypeVar("M", bound=Wire)
    Json = Annotated[M, Reader]
else:

    class Json:
        """`Json[Model]` marks the argument of a route that is its body."""

        def __class_getitem__(cls, model):
            return Annotated[model, Depends(Reader(model))]


def said(metadata: dict[str, Any] | None) -> dict[str, str]:
    """A client's metadata as the wire gives it back: texts."""
    return {name: v if isinstance(v, str) else json.dumps(v) for name, v in (metadata or {}).items()}
