"""Routes for downloading and uploading weights, as archives or as single files at signed URLs."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import uuid
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from fastapi import APIRouter, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, RedirectResponse, StreamingResponse
from starlette.datastructures import UploadFile

from palestra.core.files import TEMPORARY_PREFIX, fsync_path
from palestra.service.server.deps import ContextDep, JsonBody, OwnerDep, limit_body
from palestra.service.server.owner import Owner
from palestra.service.server.routes.checkpoints import CHECKPOINT_ROUTE, PathDep
from palestra.service.server.routes.models import lora_settings
from palestra.service.server.state import BaseInfo, ServiceContext
from palestra.service.storage import archives
from palestra.service.storage.tables import TableRow, checkpoints, delete_row, uploads
from palestra.service.storage.weight_store import TinkerPath
from palestra.service.wire.schemas import responses, weights
from palestra.service.wire.schemas.requests import LoraConfig
from palestra.service.wire.schemas.wire_model import BadRequest

router = APIRouter()
ARCHIVE_NAME = "archive.tar.gz"
URL_TTL_S = 3600  # seconds for which a URL is valid
Expires = Annotated[int, Query(ge=0, le=2**40)]
Signature = Annotated[str, Query(max_length=200)]


@router.get(f"{CHECKPOINT_ROUTE}/archive", status_code=302)
def archive(path: PathDep, request: Request, owner: OwnerDep) -> Response:
    """Redirects to the signed URL of the archive, which needs no API key."""
    row = owner.checkpoint(path)
    expires = int(time.time()) + URL_TTL_S
    when = format_datetime(datetime.fromtimestamp(expires, UTC), usegmt=True)
    return RedirectResponse(_address(request, owner.context, row, ARCHIVE_NAME, expires), 302, {"Expires": when})


@router.get(f"{CHECKPOINT_ROUTE}/external_weights_urls")
def external_weights_urls(path: PathDep, request: Request, owner: OwnerDep) -> responses.ExternalWeightsUrlsResponse:
    """Returns signed URLs of all files of a checkpoint."""
    row = owner.checkpoint(path)
    expires = int(time.time()) + URL_TTL_S
    urls = {file.name: _address(request, owner.context, row, file.name, expires) for file in _files(owner.context, row)}
    return responses.ExternalWeightsUrlsResponse(urls=urls, expires=datetime.fromtimestamp(expires, UTC))


def _address(request: Request, ctx: ServiceContext, row: TableRow, file: str, expires: int) -> str:
    return _sign_url(request, ctx, _download_route(row.path, file), row.folder, expires)


def _download_route(path: str, file: str) -> str:
    return f"downloads/{path.removeprefix('tinker://')}/{file}"


def _sign_url(request: Request, ctx: ServiceContext, where: str, folder: str, expires: int) -> str:
    signature = ctx.keys.sign(f"{where} {folder} {expires}")
    return f"{str(request.base_url).rstrip('/')}/api/v1/{where}?expires={expires}&signature={signature}"


def _check_url(ctx: ServiceContext, where: str, row: TableRow | None, expires: int, signature: str) -> TableRow:
    """Returns the row to whose folder a signed URL leads. Raises BadRequest (403) if the URL is not valid."""
    good = row is not None and ctx.keys.is_signed(f"{where} {row.folder} {expires}", signature)
    if row is None or not good or expires < time.time():
        raise BadRequest("this address is invalid or has expired: request a new one", 403)
    return row


def _files(ctx: ServiceContext, row: TableRow) -> list[Path]:
    folder = ctx.weight_store.read(row.folder)
    return sorted(path for path in folder.iterdir() if path.name != weights.MANIFEST)


@router.get("/downloads/{run}/{kind}/{name}/{file}")
def download(path: PathDep, file: str, ctx: ContextDep, expires: Expires, signature: Signature) -> Response:
    """Sends a file at a signed URL, which is valid until it expires and for these weights only."""
    found_row = ctx.store.get(checkpoints, str(TinkerPath.parse(path)))
    row = _check_url(ctx, _download_route(path, file), found_row, expires, signature)
    files = _files(ctx, row)
    if file == ARCHIVE_NAME:
        return StreamingResponse(archives.pack_archive(files), media_type="application/gzip")
    found = [each for each in files if each.name == file]
    if not found:
        raise BadRequest(f"the weights have no file {file[:100]}", 404)
    return FileResponse(found[0], media_type="application/octet-stream")


@router.post("/checkpoints/upload")
async def upload(request: Request, owner: OwnerDep) -> dict[str, str]:
    """Accepts an adapter as PEFT saves it (tar.gz, multipart field `file`), for the base in its config or in the field
    `base_model`. It becomes a checkpoint for sampling: optimizers of other clients are not read."""
    async with limit_body(request, owner.context.limits.upload).form(max_files=1, max_fields=10) as form:
        file = form.get("file")
        named = form.get("base_model")
        if not isinstance(file, UploadFile):
            raise BadRequest('send the archive as a file in the multipart field "file"')
        path = await run_in_threadpool(_take_in, owner, file.file, named if isinstance(named, str) else None)
    return {"path": str(path), "checkpoint_id": path.id}


def _take_in(owner: Owner, file: BinaryIO, named: str | None) -> TinkerPath:
    with tempfile.TemporaryDirectory(dir=owner.context.weight_store.root, prefix=TEMPORARY_PREFIX) as temporary:
        unpacked = Path(temporary)
        archives.unpack_archive(file, unpacked, owner.context.limits.upload)
        base = owner.context.base(named) if named else _base_of(owner.context, unpacked)
        lora = _lora(*archives.check_adapter(unpacked, archives.layer_shapes(base.path)))
        path = TinkerPath(f"upload-{uuid.uuid4().hex[:16]}", "sampler", "uploaded")
        _add_checkpoint(
            owner.context, path, unpacked, owner=owner.name, base=base.name, lora=lora.model_dump(), info={}
        )
    return path


def _add_checkpoint(ctx: ServiceContext, path: TinkerPath, adapter: Path, **values: Any) -> None:
    """Moves the files in the folder `adapter` to the weight store, as a checkpoint at `path` if there is none."""
    folder, size = ctx.weight_store.write(lambda place: _move(adapter, place))
    ctx.store.insert(checkpoints, **path.row(folder=folder, size=size, **values))


def _move(source: Path, target: Path) -> None:
    for path in source.iterdir():
        shutil.move(path, target / path.name)


def _base_of(ctx: ServiceContext, folder: Path) -> BaseInfo:
    """Returns the base that the adapter's config gives as a name or as a folder."""
    name = str(archives.read_config(folder).get("base_model_name_or_path"))
    for base in ctx.bases.values():
        if base.path == name:
            return base
    return ctx.base(name)


def _lora(rank: int, alpha: float, layers: list[str]) -> LoraConfig:
    attn = any("attn" in name or "attention" in name for name in layers)
    head = "lm_head" in layers
    mlp = any("mlp" in name for name in layers)
    return LoraConfig(rank=rank, alpha=alpha, train_attn=attn, train_mlp=mlp, train_unembed=head)


@router.post("/external_weights_upload_start")
def start_upload(
    call: JsonBody[weights.ExternalWeightsUploadStartRequest], request: Request, owner: OwnerDep
) -> responses.ExternalWeightsUploadStartResponse:
    """Returns a signed URL for each file of an adapter, in the format of `save_weights_external`."""
    base = owner.context.base(call.base_model)
    lora = lora_settings(call.lora_config).model_dump()
    id = uuid.uuid4().hex
    folder = uuid.uuid4().hex
    now = int(time.time())
    expires = now + URL_TTL_S
    info = {"base_model": call.base_model, "project": call.destination_project_id}
    values = {"owner": owner.name, "base": base.name, "lora": lora, "info": info, "created": now, "expires": expires}
    owner.store.insert(uploads, id=id, folder=folder, **values)
    names = (archives.CONFIG_FILE, archives.WEIGHTS_FILE)
    urls = {name: _sign_url(request, owner.context, f"uploads/{id}/{name}", folder, expires) for name in names}
    return responses.ExternalWeightsUploadStartResponse(
        upload_id=id, urls=urls, expires=datetime.fromtimestamp(expires, UTC)
    )


@router.put("/uploads/{id}/{file}")
async def put_file(
    id: str, file: str, request: Request, ctx: ContextDep, expires: Expires, signature: Signature
) -> Response:
    """Stores a file that is sent to its signed URL; sent again, it replaces the earlier one."""
    found = await run_in_threadpool(ctx.store.get, uploads, id)
    upload = _check_url(ctx, f"uploads/{id}/{file}", found, expires, signature)
    folder = ctx.weight_store.root / upload.folder
    folder.mkdir(exist_ok=True)
    limit = archives.MAX_CONFIG_BYTES if file == archives.CONFIG_FILE else ctx.limits.upload
    with tempfile.TemporaryDirectory(dir=folder, prefix=TEMPORARY_PREFIX) as temporary:
        arriving = Path(temporary, file)
        with arriving.open("wb") as target:
            async for chunk in limit_body(request, limit).stream():
                await run_in_threadpool(target.write, chunk)
        await run_in_threadpool(_replace_file, arriving, folder / file)
    return Response()


def _replace_file(source: Path, target: Path) -> None:
    """Moves a file to `target` once it is on disk. Raises BadRequest if its upload was removed."""
    try:
        fsync_path(source)
        os.replace(source, target)
        fsync_path(target.parent)
    except FileNotFoundError:
        raise BadRequest("the upload expired while this file was under way: start a new one", 403) from None


@router.post("/external_weights_upload_finish")
def finish_upload(
    call: JsonBody[weights.ExternalWeightsUploadFinishRequest], owner: OwnerDep
) -> responses.ExternalWeightsUploadFinishResponse:
    """Makes a checkpoint of the files of an upload. A repeated request returns the same path."""
    path = TinkerPath(f"upload-{call.upload_id}", "external", "uploaded")
    done = owner.store.get(checkpoints, str(path))
    if done is None or done.owner != owner.name:
        upload = owner.own_row(uploads, call.upload_id, "upload")
        _finish(owner.context, upload, path)
        owner.store.execute(delete_row(uploads, upload.id))
    return responses.ExternalWeightsUploadFinishResponse(tinker_path=str(path))


def _finish(ctx: ServiceContext, upload: TableRow, path: TinkerPath) -> None:
    """Adds the checkpoint. Raises BadRequest unless the files are an adapter with the settings that were announced."""
    shapes = archives.layer_shapes(ctx.base_of(upload).path)
    lora = LoraConfig.model_validate(upload.lora)
    with tempfile.TemporaryDirectory(dir=ctx.weight_store.root, prefix=TEMPORARY_PREFIX) as temporary:
        # copies: a file may be sent again meanwhile, and if the files are refused or the server dies, they are there
        for name in (archives.CONFIG_FILE, archives.WEIGHTS_FILE):
            try:
                shutil.copyfile(ctx.weight_store.root / upload.folder / name, Path(temporary, name))
            except FileNotFoundError:
                raise BadRequest(f"{name} has not arrived: send it to its URL by PUT, then finish again") from None
        rank, alpha, layers = archives.check_adapter(Path(temporary), shapes)
        wanted = sorted(archives.lora_targets(shapes, lora))
        if (rank, alpha, layers) != (lora.rank, lora.alpha, wanted):
            other = "".join(f" (see {name})" for name in sorted(set(layers) ^ set(wanted))[:1])
            raise BadRequest(
                f"the files have rank {rank}, lora_alpha {alpha:g} and {len(layers)} layers{other}, not {lora.rank}, "
                f"{lora.alpha:g} and {len(wanted)} as their upload was started: send others, or start another upload"
            )
        values = {name: getattr(upload, name) for name in ("owner", "base", "lora", "info")}
        _add_checkpoint(ctx, path, Path(temporary), **values)
