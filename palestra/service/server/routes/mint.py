"""Routes of MinT's clients that Tinker's API does not have."""

from __future__ import annotations

import uuid
from typing import Annotated

from fastapi import APIRouter, Header, Response

from palestra.service.server.deps import BodyDep, JsonBody, OwnerDep
from palestra.service.server.owner import Owner
from palestra.service.server.routes.models import adapter_settings
from palestra.service.server.routes.sampling import resolve_source
from palestra.service.server.state import BaseInfo
from palestra.service.storage.tables import checkpoints, models
from palestra.service.storage.weight_store import TinkerPath
from palestra.service.wire.jobs import InterpolateJob, ReverseKLJob
from palestra.service.wire.schemas.requests import ReverseKLRequest
from palestra.service.wire.schemas.responses import UntypedAPIFuture
from palestra.service.wire.schemas.weights import InterpolateRequest
from palestra.service.wire.schemas.wire_model import BadRequest, parse_body
from palestra.service.wire.validation import check_reverse_kl

router = APIRouter()


@router.post("/mint/checkpoints/interpolate")
def interpolate(
    call: JsonBody[InterpolateRequest],
    owner: OwnerDep,
    x_idempotency_key: Annotated[str, Header(max_length=200)] = "",
) -> UntypedAPIFuture:
    """Queues a weighted sum of adapters with the same base and shape, saved as a checkpoint for sampling."""
    rows = [owner.checkpoint(path) for path in call.source_paths]
    if any(adapter_settings(row) != adapter_settings(rows[0]) for row in rows):
        raise BadRequest("source_paths differ in base, rank, scale or layers: only adapters of one shape can be mixed")
    path = _output(owner, call.output_path)
    job = InterpolateJob(
        folders=[row.folder for row in rows],
        coefficients=call.coefficients,
        path=str(path),
        source_paths=[row.path for row in rows],
    )
    key = f"interpolate:{owner.name}:{x_idempotency_key}" if x_idempotency_key else None
    return UntypedAPIFuture(request_id=owner.submit("interpolate", job, key=key))


def _output(owner: Owner, wanted: str | None) -> TinkerPath:
    """Returns the path of the result: in a new run, or a given path in one of the owner's runs."""
    if wanted is None:
        return TinkerPath(f"mix-{uuid.uuid4().hex[:16]}", "sampler", "mixed")
    path = TinkerPath.parse(wanted)
    run = owner.store.get(models, path.run)
    there = owner.store.get(checkpoints, str(path))
    if (
        path.kind != "sampler"
        or run is None
        or run.owner != owner.name
        or (there is not None and there.owner != owner.name)
    ):
        raise BadRequest("output_path must be tinker://<run>/sampler_weights/<name> in a run of yours", 404)
    return path


@router.post("/mint/forward_backward_reverse_kl")
def reverse_kl(
    body: BodyDep,
    owner: OwnerDep,
    x_idempotency_key: Annotated[str, Header(max_length=200)] = "",
) -> UntypedAPIFuture:
    """Queues the gradient of KL(model || reference) over the whole vocabulary, at each token of answers to two prompts.

    A request without a number, as MinT's client sends it, runs after all earlier ones, and once for each idempotency
    key.
    """
    with owner.recording_rejection("reverse_kl", body):
        call = parse_body(ReverseKLRequest, body)
        base = owner.context.base_of(owner.model(call.model_id))
        examples = check_reverse_kl(call.data, **owner.context.call_sizes(base))
        folder = _reference(owner, call.reference_model_path, base)
        job = ReverseKLJob(folder=folder, lessons=examples, temperature=call.temperature)
        if call.seq_id or not x_idempotency_key:
            return owner.submit_numbered("reverse_kl", job, call.model_id, call.seq_id)
        key = f"reverse_kl:{owner.name}:{x_idempotency_key}"
        request = owner.submit("reverse_kl", job, key=key, model=call.model_id)
        return UntypedAPIFuture(request_id=request, model_id=call.model_id)


def _reference(owner: Owner, name: str, base: BaseInfo) -> str | None:
    """Returns the folder of the reference's weights, or None for the bare base. Raises BadRequest if its base
    differs."""
    path, public = (name, None) if "://" in name else (None, name)
    source = resolve_source(owner, path, public)
    if source.base.name != base.name:
        raise BadRequest(f"reference_model_path is of base {source.base.name}, but the model of {base.name}")
    return source.folder


@router.delete("/models/{id}", status_code=204)
def delete_model(id: str, owner: OwnerDep) -> Response:
    """Unloads a model; its checkpoints remain."""
    owner.model(id)
    owner.submit_numbered("unload", b"{}", id, None)
    return Response(status_code=204)
