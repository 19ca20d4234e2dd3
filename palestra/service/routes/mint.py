"""What MinT's clients call beyond Tinker's wire."""

from __future__ import annotations

import uuid
from typing import Annotated

from fastapi import APIRouter, Header, Response

from palestra.service.calls import Body, Ctx, Json, Owner, Queued
from palestra.service.context import Context
from palestra.service.jobs import InterpolateJob
from palestra.service.replies import UntypedAPIFuture
from palestra.service.routes.models import shape
from palestra.service.store import checkpoints, models
from palestra.service.vault import TinkerPath
from palestra.service.wire import BadRequest, InterpolateRequest

router = APIRouter()


@router.post("/mint/checkpoints/interpolate")
def interpolate(
    call: Json[InterpolateRequest],
    ctx: Ctx,
    owner: Owner,
    queue: Queued,
    x_idempotency_key: Annotated[str, Header(max_length=200)] = "",
) -> UntypedAPIFuture:
    """A weighted sum of adapters of one base and one shape, as a sampler's checkpoint."""
    rows = [ctx.checkpoint(owner, path) for path in call.source_paths]
    if any(shape(row) != shape(rows[0]) for row in rows):
        raise BadRequest("source_paths differ in base, rank, scale or layers: only adapters of one shape can be mixed")
    path = _output(ctx, owner, call.output_path)
    job = InterpolateJob(
        folders=[row.folder for row in rows],
        coefficients=call.coefficients,
        path=str(path),
        source_paths=[row.path for row in rows],
    )
    key = f"interpolate:{owner}:{x_idempotency_key}" if x_idempotency_key else None
    return UntypedAPIFuture(request_id=queue.submit(owner, "interpolate", job, key=key))


def _output(ctx: Context, owner: str, wanted: str | None) -> TinkerPath:
    """Where the mixture goes: a run of its own, or a path in one of the owner's runs."""
    if wanted is None:
        return TinkerPath(f"mix-{uuid.uuid4().hex[:16]}", "sampler", "mixed")
    path = TinkerPath.parse(wanted)
    run, there = ctx.store.get(models, path.run), ctx.store.get(checkpoints, wanted)
    if path.kind != "sampler" or run is None or run.owner != owner or (there is not None and there.owner != owner):
        raise BadRequest("output_path must be tinker://<run>/sampler_weights/<name> in a run of yours", 404)
    return path


@router.post("/mint/forward_backward_reverse_kl")
def reverse_kl(body: Body, owner: Owner, queue: Queued) -> None:
    with queue.numbered(owner, "forward_backward", body):
        raise BadRequest("forward_backward_reverse_kl is not served here: use forward_backward_custom", 404)


@router.delete("/models/{id}", status_code=204)
def delete_model(id: str, ctx: Ctx, owner: Owner, queue: Queued) -> Response:
    """Its checkpoints stay."""
    ctx.model(owner, id)
    queue.train(owner, "unload", b"{}", id, None)
    return Response(status_code=204)
