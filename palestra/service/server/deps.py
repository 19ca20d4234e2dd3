"""FastAPI dependencies shared by the routes: authentication, body reading within limits, and parsing."""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import zstandard
from fastapi import Depends, Request
from fastapi.concurrency import run_in_threadpool
from starlette.types import Message

from palestra.core.http.limits import bearer_token
from palestra.service.server.owner import Owner
from palestra.service.server.state import ServiceContext
from palestra.service.wire.schemas.wire_model import BadRequest, WireModel, parse_body

MAX_INLINE_PARSE_BYTES = 2**14  # bytes up to which a body is parsed on the event loop: a thread would cost more


async def get_context(request: Request) -> ServiceContext:
    """Returns the shared state of the app that serves the request."""
    context: ServiceContext = request.app.state.context
    return context


ContextDep = Annotated[ServiceContext, Depends(get_context)]


async def find_owner(request: Request, context: ContextDep) -> Owner:
    """Authenticates a request by X-API-Key or Authorization: Bearer and returns the key's owner. Raises BadRequest
    (401) if the key is unknown."""
    owner = context.keys.owner_of(request.headers.get("x-api-key") or bearer_token(request.headers) or None)
    if owner is None:
        raise BadRequest("this server needs a valid API key: set TINKER_API_KEY (or MINT_API_KEY)", 401)
    return Owner(owner, context, request.app.state.queue)


OwnerDep = Annotated[Owner, Depends(find_owner)]


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
