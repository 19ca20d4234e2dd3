"""Routes for checkpoints: saving, loading, lists of runs and checkpoints, and changes of one checkpoint."""

from __future__ import annotations

import hashlib
import time
import uuid
from datetime import UTC, datetime
from typing import Annotated, Any

import sqlalchemy as sql
from fastapi import APIRouter, Depends, Header, Response

from palestra.service.server.deps import BodyDep, JsonBody, OwnerDep, metadata_as_text
from palestra.service.server.owner import Owner
from palestra.service.server.routes.models import adapter_settings, create_from_checkpoint, load_job
from palestra.service.server.routes.sessions import Limit, Offset
from palestra.service.server.state import ServiceContext
from palestra.service.storage.tables import TableRow, checkpoints, delete_row, models, sessions
from palestra.service.storage.weight_store import KIND_SEGMENTS, TinkerPath
from palestra.service.wire.jobs import SaveJob
from palestra.service.wire.schemas import responses, weights
from palestra.service.wire.schemas.wire_model import BadRequest, parse_body

router = APIRouter()
SEARCH_BLOCK = 500  # rows that a search reads at once
CHECKPOINT_ROUTE = "/training_runs/{run}/checkpoints/{kind}/{name}"  # a checkpoint's id, "weights/step-10", has a slash
KINDLESS_ROUTE = "/training_runs/{run}/checkpoints/{id}"  # rejected: training and sampling weights may share a name


async def checkpoint_path(run: str, kind: str, name: str) -> str:
    """Returns the tinker:// path of the checkpoint in a route; `kind` is its wire name, such as "weights"."""
    return f"tinker://{run}/{kind}/{name}"


PathDep = Annotated[str, Depends(checkpoint_path)]

# -- saving and loading ------------------------------------------------------------------------------------------------


@router.post("/save_weights")
def save_weights(body: BodyDep, owner: OwnerDep) -> responses.UntypedAPIFuture:
    """Queues a checkpoint with optimizer state. Older clients, which send no `overwrite`, replace an existing one;
    newer ones only with `overwrite` true."""
    with owner.recording_rejection("save", body):
        call = parse_body(weights.SaveWeightsRequest, body)
        overwrite = call.overwrite if "overwrite" in call.model_fields_set else None
        job = _save_job(owner, call, "training", overwrite=overwrite)
        return owner.submit_numbered("save", job, call.model_id, call.seq_id)


@router.post("/save_weights_for_sampler")
def save_weights_for_sampler(body: BodyDep, owner: OwnerDep) -> responses.UntypedAPIFuture:
    """Queues a checkpoint or a sampler of the current weights."""
    with owner.recording_rejection("save", body):
        call = parse_body(weights.SaveWeightsForSamplerRequest, body)
        if call.kind != "snapshot":
            raise BadRequest('samplers whose weights change under way are not served here: send kind "snapshot"')
        job = _save_job(owner, call, "sampler")
        if call.path is None:
            session = owner.model(call.model_id).session
            job = SaveJob(sampler=f"{session}:sample:{call.sampling_session_seq_id}")
        return owner.submit_numbered("save", job, call.model_id, call.seq_id)


@router.post("/save_weights_external")
def save_weights_external(body: BodyDep, owner: OwnerDep) -> responses.UntypedAPIFuture:
    """Queues a checkpoint for download."""
    with owner.recording_rejection("save", body):
        call = parse_body(weights.SaveWeightsExternalRequest, body)
        if call.age_encryption_recipients:
            raise BadRequest("age_encryption_recipients is not served here: encrypt the files once you have them")
        job = _save_job(owner, call, "external")
        return owner.submit_numbered("save", job, call.model_id, call.seq_id)


def _save_job(
    owner: Owner,
    call: weights.SaveWeightsRequest | weights.SaveWeightsForSamplerRequest | weights.SaveWeightsExternalRequest,
    kind: str,
    *,
    overwrite: bool | None = None,
) -> SaveJob:
    model = owner.model(call.model_id)
    name = call.path or f"unnamed-{uuid.uuid4().hex[:12]}"
    path = TinkerPath.parse(f"tinker://{model.id}/{KIND_SEGMENTS[kind]}/{name}")
    metadata = None if isinstance(call, weights.SaveWeightsExternalRequest) else call.user_metadata
    info = {"base_model": owner.context.client_base_name(model), "user_metadata": metadata_as_text(metadata)}
    return SaveJob(path=str(path), ttl_seconds=call.ttl_seconds, overwrite=overwrite, info=info)


@router.post("/load_weights")
def load_weights(body: BodyDep, owner: OwnerDep) -> responses.UntypedAPIFuture:
    """Queues loading into an existing model, or, for the newest clients, into one that is created by the call."""
    with owner.recording_rejection("load", body):
        call = parse_body(weights.LoadWeightsRequest, body)
        if call.model_id is None:
            return create_from_checkpoint(call, owner)
        model = owner.model(call.model_id)
        source = owner.checkpoint(call.path)
        has = adapter_settings(source)
        needs = adapter_settings(model)
        differs = [f"{name} {has[name]}, not {needs[name]}" for name in needs if has[name] != needs[name]]
        if differs:
            raise BadRequest(
                f"{call.path} does not fit model {model.id}: it has {', '.join(differs)}. Create a client from it."
            )
        return owner.submit_numbered("load", load_job(call, source), call.model_id, call.seq_id)


@router.post("/weights_info")
def weights_info(call: JsonBody[weights.WeightsInfoRequest], owner: OwnerDep) -> responses.WeightsInfoResponse:
    """Returns base and adapter settings of a checkpoint."""
    row = owner.checkpoint(call.tinker_path)
    return responses.WeightsInfoResponse(
        base_model=owner.context.client_base_name(row),
        is_lora=True,
        lora_rank=row.lora.get("rank"),
        train_unembed=row.lora.get("train_unembed"),
        train_mlp=row.lora.get("train_mlp"),
        train_attn=row.lora.get("train_attn"),
    )


# -- lists -------------------------------------------------------------------------------------------------------------


@router.get("/training_runs")
def training_runs(
    owner: OwnerDep, limit: Limit = 20, offset: Offset = 0, project_id: str | None = None
) -> responses.TrainingRunsResponse:
    """Lists the owner's training runs, newest first."""
    mine = [models.c.owner == owner.name]
    if project_id is not None:
        mine.append(_in_projects([project_id]))
    rows = owner.store.find(models, *mine, limit=limit, offset=offset)
    cursor = responses.Cursor(offset=offset, limit=limit, total_count=owner.store.count(models, *mine))
    return responses.TrainingRunsResponse(training_runs=[_run(owner.context, row) for row in rows], cursor=cursor)


def _in_projects(ids: list[str]) -> sql.ColumnElement[bool]:
    """Returns the condition that a model's session is in one of the projects."""
    return models.c.session.in_(sql.select(sessions.c.id).where(sessions.c.info["project"].as_string().in_(ids)))


@router.get("/training_runs/{run}")
def training_run(run: str, owner: OwnerDep) -> responses.TrainingRun:
    """Returns one run. The run of an unloaded model remains, for its checkpoints."""
    return _run(owner.context, owner.own_row(models, run, "training run"))


def _run(ctx: ServiceContext, row: TableRow) -> responses.TrainingRun:
    def last(kind: str) -> responses.Checkpoint | None:
        found = ctx.store.find(checkpoints, checkpoints.c.run == row.id, checkpoints.c.kind == kind, _alive(), limit=1)
        return _checkpoint_reply(ctx, found[0]) if found else None

    return responses.TrainingRun(
        training_run_id=row.id,
        base_model=ctx.client_base_name(row),
        model_owner=row.owner,
        is_lora=True,
        corrupted=row.state == "lost",
        lora_rank=row.lora["rank"],
        last_request_time=_time(row.used),
        last_checkpoint=last("training"),
        last_sampler_checkpoint=last("sampler"),
        user_metadata=row.info.get("user_metadata") or None,
    )


@router.get("/training_runs/{run}/checkpoints")
def run_checkpoints(run: str, owner: OwnerDep) -> responses.CheckpointsListResponse:
    """Lists the checkpoints of a run."""
    owner.own_row(models, run, "training run")
    rows = owner.store.find(checkpoints, checkpoints.c.run == run, _alive())
    return responses.CheckpointsListResponse(checkpoints=[_checkpoint_reply(owner.context, row) for row in rows])


@router.get("/checkpoints")
def all_checkpoints(owner: OwnerDep, limit: Limit = 100, offset: Offset = 0) -> responses.CheckpointsListResponse:
    """Lists the owner's checkpoints, newest first."""
    mine = (checkpoints.c.owner == owner.name, _alive())
    rows = owner.store.find(checkpoints, *mine, limit=limit, offset=offset)
    cursor = responses.Cursor(offset=offset, limit=limit, total_count=owner.store.count(checkpoints, *mine))
    return responses.CheckpointsListResponse(
        checkpoints=[_checkpoint_reply(owner.context, row) for row in rows], cursor=cursor
    )


@router.post("/checkpoints/search")
def search_checkpoints(
    call: JsonBody[weights.CheckpointSearchRequest], owner: OwnerDep
) -> responses.CheckpointSearchResponse:
    """Lists the owner's checkpoints that match, newest first."""
    matching = [checkpoints.c.owner == owner.name, _alive()]
    if call.project_ids is not None:
        # of a run, or given when the checkpoint was copied or uploaded
        run = checkpoints.c.run.in_(sql.select(models.c.id).where(_in_projects(call.project_ids)))
        matching.append(sql.or_(run, checkpoints.c.info["project"].as_string().in_(call.project_ids)))
    if call.checkpoint_type is not None:
        matching.append(checkpoints.c.kind == call.checkpoint_type)
    if call.base_models is not None:
        named = set(call.base_models)
        bases = {base.name for base in owner.context.bases.values() if not named.isdisjoint(base.public_names)}
        used = checkpoints.c.info["base_model"].as_string().in_(named)
        matching.append(sql.or_(checkpoints.c.base.in_(bases | named), used))
    rows = _find_page(owner.context, matching, call)
    page = rows[: call.limit]
    cursor = None
    if len(rows) > call.limit:
        cursor = weights.CheckpointSearchCursor(
            last_created_at=_time(page[-1].created), last_checkpoint_uuid=page[-1].path
        )
    return responses.CheckpointSearchResponse(
        checkpoints=[_checkpoint_reply(owner.context, row) for row in page], next_cursor=cursor
    )


def _find_page(
    ctx: ServiceContext, matching: list[sql.ColumnElement[bool]], call: weights.CheckpointSearchRequest
) -> list[TableRow]:
    """Returns the rows of a page, and one more if there are more. Metadata are compared here, since databases differ in
    which names they find in JSON."""
    where = list(matching)
    if call.cursor is not None:
        last = ctx.store.get(checkpoints, call.cursor.last_checkpoint_uuid)
        when = call.cursor.last_created_at
        # a row has fractions of a microsecond, which the cursor has not
        created = last.created if last is not None and _time(last.created) == when else when.timestamp()
        where.append(_is_older(created, call.cursor.last_checkpoint_uuid))
    page: list[TableRow] = []
    while len(page) <= call.limit:
        rows = ctx.store.find(checkpoints, *where, limit=SEARCH_BLOCK)
        wanted = call.user_metadata.items()
        page += [row for row in rows if wanted <= (row.info.get("user_metadata") or {}).items()]
        if len(rows) < SEARCH_BLOCK:
            break
        where = [*matching, _is_older(rows[-1].created, rows[-1].path)]
    return page[: call.limit + 1]


def _is_older(created: float, path: str) -> sql.ColumnElement[bool]:
    """Returns the condition that a checkpoint follows this one in lists, which have the newest first."""
    return sql.tuple_(checkpoints.c.created, checkpoints.c.path) < sql.tuple_(sql.literal(created), sql.literal(path))


def _alive() -> sql.ColumnElement[bool]:
    return sql.or_(checkpoints.c.expires.is_(None), checkpoints.c.expires > time.time())


def _checkpoint_reply(ctx: ServiceContext, row: TableRow) -> responses.Checkpoint:
    return responses.Checkpoint(
        checkpoint_id=TinkerPath.parse(row.path).id,
        checkpoint_type=row.kind,
        time=_time(row.created),
        tinker_path=row.path,
        size_bytes=row.size,
        public=row.public,
        user_metadata=row.info.get("user_metadata") or None,
        expires_at=_time(row.expires) if row.expires else None,
        base_model=ctx.client_base_name(row),
    )


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


# -- one checkpoint ----------------------------------------------------------------------------------------------------


@router.delete(KINDLESS_ROUTE)
@router.get(f"{KINDLESS_ROUTE}/archive")
@router.post(f"{KINDLESS_ROUTE}/publish")
@router.put(f"{KINDLESS_ROUTE}/ttl")
def without_kind(run: str, id: str, owner: OwnerDep) -> Response:
    """Raises BadRequest: like hosted services, this server requires the kind in a checkpoint's id."""
    id = id[:200]
    raise BadRequest(f'checkpoint id "{id}" has no kind: say "weights/{id}" or "sampler_weights/{id}"')


@router.delete(CHECKPOINT_ROUTE, status_code=204)
def delete(path: PathDep, owner: OwnerDep) -> Response:
    """Deletes a checkpoint."""
    row = owner.checkpoint(path, to_change=True)
    owner.store.execute(delete_row(checkpoints, row.path))
    return Response(status_code=204)


@router.post(f"{CHECKPOINT_ROUTE}/publish", status_code=204)
def publish(path: PathDep, owner: OwnerDep) -> Response:
    """Makes a checkpoint readable for every API key."""
    return _change(owner, path, public=True)


@router.delete(f"{CHECKPOINT_ROUTE}/publish", status_code=204)
def unpublish(path: PathDep, owner: OwnerDep) -> Response:
    """Makes a checkpoint readable for its owner only. URLs signed before stay valid until they expire."""
    return _change(owner, path, public=False)


@router.put(f"{CHECKPOINT_ROUTE}/ttl", status_code=204)
def set_ttl(path: PathDep, call: JsonBody[weights.TtlRequest], owner: OwnerDep) -> Response:
    """Sets a checkpoint's time to live."""
    return _change(owner, path, expires=_expires(call.ttl_seconds))


def _expires(ttl: float | None) -> float | None:
    return None if ttl is None else time.time() + ttl


def _change(owner: Owner, path: str, **values: Any) -> Response:
    row = owner.checkpoint(path, to_change=True)
    owner.store.update(checkpoints, row.path, **values)
    return Response(status_code=204)


@router.post("/copy_weights")
def copy_weights(
    call: JsonBody[weights.CopyWeightsRequest],
    owner: OwnerDep,
    x_idempotency_key: Annotated[str, Header()] = "",
) -> responses.CopyWeightsResponse:
    """Copies weights that the caller may read to a new run of the caller's. The files are shared. A repeated request
    makes one copy."""
    source = owner.checkpoint(call.source_path)
    if call.session_id is not None:
        owner.session(call.session_id)
    slot = f"{call.session_id}:train:{call.model_seq_id}"
    unique = x_idempotency_key or uuid.uuid4().hex
    what = unique if call.session_id is None or call.model_seq_id is None else slot
    seed = f"{owner.name} {what}"
    run = f"copy-{hashlib.blake2b(seed.encode(), digest_size=8).hexdigest()}"
    path = TinkerPath(run, source.kind, TinkerPath.parse(source.path).name)
    kept = {name: getattr(source, name) for name in ("base", "lora", "folder", "size")}
    info = source.info | {"project": call.destination_project_id}
    row = path.row(**kept, owner=owner.name, info=info, expires=_expires(call.ttl_seconds))
    if not owner.store.insert(checkpoints, **row):
        there = owner.checkpoint(path)
        if there.folder != source.folder:
            raise BadRequest(f"{path} is a copy of other weights: take another model_seq_id")
    return responses.CopyWeightsResponse(tinker_path=str(path))
