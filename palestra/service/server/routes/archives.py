"""Routes for downloading weights, as archives or single files at signed URLs, and for uploading archives."""

from __future__ import annotations

import shutil
import tempfile
import time
import uuid
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Annotated, BinaryIO

from fastapi import APIRouter, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, RedirectResponse, StreamingResponse
from starlette.datastructures import UploadFile
from starlette.types import Message

from palestra.core.files import TEMPORARY_PREFIX
from palestra.service.server.deps import ContextDep, OwnerDep, body_too_long
from palestra.service.server.routes.checkpoints import CHECKPOINT_ROUTE, checkpoint_path
from palestra.service.server.state import BaseInfo, ServiceContext
from palestra.service.storage.archives import check_adapter, layer_shapes, pack_archive, read_config, unpack_archive
from palestra.service.storage.tables import TableRow, checkpoints
from palestra.service.storage.weight_store import TinkerPath
from palestra.service.wire.jobs import LoraSettings
from palestra.service.wire.schemas.responses import ExternalWeightsUrlsResponse
from palestra.service.wire.schemas.weights import MANIFEST
from palestra.service.wire.schemas.wire_model import BadRequest

router = APIRouter()
ARCHIVE_NAME = "archive.tar.gz"
URL_TTL_S = 3600  # seconds for which a URL is valid


@router.get(f"{CHECKPOINT_ROUTE}/archive", status_code=302)
def archive(run: str, kind: str, name: str, request: Request, ctx: ContextDep, owner: OwnerDep) -> Response:
    """Redirects to the signed URL of the archive, which needs no API key."""
    row = ctx.checkpoint(owner, checkpoint_path(run, kind, name))
    expires = int(time.time()) + URL_TTL_S
    when = format_datetime(datetime.fromtimestamp(expires, UTC), usegmt=True)
    return RedirectResponse(_address(request, ctx, row, ARCHIVE_NAME, expires), 302, {"Expires": when})


@router.get(f"{CHECKPOINT_ROUTE}/external_weights_urls")
def external_weights_urls(
    run: str, kind: str, name: str, request: Request, ctx: ContextDep, owner: OwnerDep
) -> ExternalWeightsUrlsResponse:
    """Returns signed URLs of all files of a checkpoint."""
    row = ctx.checkpoint(owner, checkpoint_path(run, kind, name))
    expires = int(time.time()) + URL_TTL_S
    urls = {path.name: _address(request, ctx, row, path.name, expires) for path in _files(ctx, row)}
    return ExternalWeightsUrlsResponse(urls=urls, expires=datetime.fromtimestamp(expires, UTC))


def _address(request: Request, ctx: ServiceContext, row: TableRow, file: str, expires: int) -> str:
    where = f"{row.path.removeprefix('tinker://')}/{file}"
    signature = ctx.keys.sign(f"{where} {row.folder} {expires}")
    return f"{str(request.base_url).rstrip('/')}/api/v1/downloads/{where}?expires={expires}&signature={signature}"


def _files(ctx: ServiceContext, row: TableRow) -> list[Path]:
    folder = ctx.weight_store.read(row.folder)
    return sorted(path for path in folder.iterdir() if path.name != MANIFEST)


@router.get("/downloads/{run}/{kind}/{name}/{file}")
def download(
    run: str,
    kind: str,
    name: str,
    file: str,
    ctx: ContextDep,
    expires: Annotated[int, Query(ge=0, le=2**40)],
    signature: Annotated[str, Query(max_length=200)],
) -> Response:
    """Sends a file at a signed URL, which is valid until it expires and only for the weights for which it was
    issued."""
    row = ctx.store.get(checkpoints, str(TinkerPath.parse(checkpoint_path(run, kind, name))))
    good = row is not None and ctx.keys.is_signed(f"{run}/{kind}/{name}/{file} {row.folder} {expires}", signature)
    if row is None or not good or expires < time.time():
        raise BadRequest("this address is invalid or has expired: request a new one", 403)
    files = _files(ctx, row)
    if file == ARCHIVE_NAME:
        return StreamingResponse(pack_archive(files), media_type="application/gzip")
    found = [path for path in files if path.name == file]
    if not found:
        raise BadRequest(f"the weights have no file {file[:100]}", 404)
    return FileResponse(found[0], media_type="application/octet-stream")


@router.post("/checkpoints/upload")
async def upload(request: Request, ctx: ContextDep, owner: OwnerDep) -> dict[str, str]:
    """Accepts an adapter as PEFT saves it (tar.gz, multipart field `file`), for the base in its config or in the field
    `base_model`. It becomes a checkpoint for sampling: optimizers of other clients are not read."""
    async with _limit_body(request, ctx.limits.upload).form(max_files=1, max_fields=10) as form:
        file = form.get("file")
        named = form.get("base_model")
        if not isinstance(file, UploadFile):
            raise BadRequest('send the archive as a file in the multipart field "file"')
        path = await run_in_threadpool(_take_in, ctx, owner, file.file, named if isinstance(named, str) else None)
    return {"path": str(path), "checkpoint_id": path.id}


def _limit_body(request: Request, limit: int) -> Request:
    """Returns the request with a body limit: raises BadRequest (413) once more than `limit` bytes have arrived."""
    left = limit

    async def receive() -> Message:
        nonlocal left
        message = await request.receive()
        left -= len(message.get("body", b""))
        if left < 0:
            raise body_too_long(limit)
        return message

    return Request(request.scope, receive)


def _take_in(ctx: ServiceContext, owner: str, file: BinaryIO, named: str | None) -> TinkerPath:
    with tempfile.TemporaryDirectory(dir=ctx.weight_store.root, prefix=TEMPORARY_PREFIX) as temporary:
        unpacked = Path(temporary)
        unpack_archive(file, unpacked, ctx.limits.upload)
        base = ctx.base(named) if named else _base_of(ctx, unpacked)
        rank, alpha, layers = check_adapter(unpacked, layer_shapes(base.path))
        folder, size = ctx.weight_store.write(lambda place: _move(unpacked, place))
    path = TinkerPath(f"upload-{uuid.uuid4().hex[:16]}", "sampler", "uploaded")
    names = {"path": str(path), "owner": owner, "run": path.run, "kind": path.kind, "base": base.name}
    values = {"lora": _lora(rank, alpha, layers).model_dump(), "size": size, "created": time.time(), "expires": None}
    ctx.store.insert(checkpoints, **names, **values, folder=folder, public=False, info={})
    return path


def _move(source: Path, target: Path) -> None:
    for path in source.iterdir():
        shutil.move(path, target / path.name)


def _base_of(ctx: ServiceContext, folder: Path) -> BaseInfo:
    """Returns the base that the adapter's config gives as a name or as a folder."""
    name = str(read_config(folder).get("base_model_name_or_path"))
    for base in ctx.bases.values():
        if base.path == name:
            return base
    return ctx.base(name)


def _lora(rank: int, alpha: float, layers: list[str]) -> LoraSettings:
    attn = any("attn" in name or "attention" in name for name in layers)
    head = "lm_head" in layers
    mlp = any("mlp" in name for name in layers)
    return LoraSettings(rank=rank, alpha=alpha, train_attn=attn, train_mlp=mlp, train_unembed=head)
