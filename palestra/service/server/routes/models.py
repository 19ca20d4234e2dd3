"""Routes for models: creation, gradients and optimizer steps."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Header

from palestra.service.server.deps import (
    BodyDep,
    ContextDep,
    JsonBody,
    OwnerDep,
    QueueDep,
    RequestQueue,
    metadata_as_text,
)
from palestra.service.server.routes.sessions import touch_session
from palestra.service.server.state import BaseInfo, ServiceContext
from palestra.service.storage.tables import models, sessions
from palestra.service.wire import codec
from palestra.service.wire.jobs import LoadJob, TrainJob
from palestra.service.wire.schemas.requests import CreateModelRequest, LoraConfig, ModelRequest, OptimStepRequest
from palestra.service.wire.schemas.responses import GetInfoResponse, ModelData, UntypedAPIFuture
from palestra.service.wire.schemas.weights import LoadWeightsRequest
from palestra.service.wire.schemas.wire_model import BadRequest, parse_body
from palestra.service.wire.validation import check_input_names, check_train_call

router = APIRouter()
SESSION_TIMEOUT_S = 600.0  # seconds without a heartbeat after which a session's models do not count as alive


@router.post("/create_model")
def create_model(
    call: JsonBody[CreateModelRequest], ctx: ContextDep, owner: OwnerDep, queue: QueueDep
) -> UntypedAPIFuture:
    """Creates a model with a new adapter."""
    if call.rollout_correction_config:
        raise BadRequest("rollout_correction_config is not served here: correct with loss inputs, such as weights")
    base = ctx.base(call.base_model)
    lora = lora_settings(call.lora_config)
    touch_session(ctx, owner, call.session_id)
    info = {"base_model": call.base_model, "user_metadata": metadata_as_text(call.user_metadata)}
    id = _slot(ctx, owner, call.session_id, call.model_seq_id, base, lora, info)
    request = queue.submit(owner, "create_model", b"{}", key=f"create:{id}", model=id, seq=0)
    return UntypedAPIFuture(request_id=request, model_id=id)


def lora_settings(config: LoraConfig | None) -> LoraConfig:
    """Returns a client's adapter settings. Raises BadRequest if they adapt nothing."""
    lora = config or LoraConfig()
    if not (lora.train_mlp or lora.train_attn or lora.train_unembed):
        raise BadRequest("lora_config trains nothing: leave train_mlp, train_attn or train_unembed on")
    return lora


def create_from_checkpoint(
    call: LoadWeightsRequest, ctx: ServiceContext, owner: str, queue: RequestQueue
) -> UntypedAPIFuture:
    """Creates a model from a checkpoint; loading it is its first request. Raises BadRequest if `base_model` contradicts
    the checkpoint."""
    assert call.session_id is not None and call.model_seq_id is not None
    source = ctx.checkpoint(owner, call.path)
    base = ctx.base_of(source)
    if call.base_model is not None and ctx.base(call.base_model) is not base:
        raise BadRequest(f"{call.path} is of base {source.base}, not {call.base_model}: leave base_model out")
    job = load_job(call, source)
    touch_session(ctx, owner, call.session_id)
    info = {
        "base_model": call.base_model or source.info.get("base_model"),
        "user_metadata": metadata_as_text(call.user_metadata),
    }
    id = _slot(ctx, owner, call.session_id, call.model_seq_id, base, LoraConfig.model_validate(source.lora), info)
    request = queue.submit(owner, "load", job, key=f"create:{id}", model=id, seq=0)
    return UntypedAPIFuture(request_id=request, model_id=id)


def load_job(call: LoadWeightsRequest, source: Any) -> LoadJob:
    """Returns the job that loads the checkpoint row `source`. Raises BadRequest if an optimizer is requested that it
    does not have."""
    if call.optimizer and source.kind != "training":
        raise BadRequest(f"{call.path} holds no optimizer: load it without, or name a path of {source.run}/weights")
    return LoadJob(folder=source.folder, path=call.path, optimizer=call.optimizer)


def _slot(
    ctx: ServiceContext, owner: str, session: str, number: int, base: BaseInfo, lora: LoraConfig, info: dict[str, Any]
) -> str:
    """Returns the id of model `number` of a session, inserting its row if it is new. A repeated call returns the same
    row. Raises BadRequest if it exists with other settings."""
    id = f"{session}:train:{number}"
    now = time.time()
    row = ctx.store.get(models, id)
    if row is None:
        _room_for_one_more(ctx, owner)
        new: dict[str, Any] = {"id": id, "session": session, "owner": owner, "base": base.name, "info": info}
        new |= {"lora": lora.model_dump(), "created": now, "used": now, "state": "live"}
        if ctx.store.insert(models, **new, changed=0, kept=0, saved=None):
            return id
        row = ctx.store.get(models, id)
    if row is None or (row.owner, row.base, row.lora) != (owner, base.name, lora.model_dump()):
        raise BadRequest(f"model {id} exists already, with other settings: take another model_seq_id")
    return id


def _room_for_one_more(ctx: ServiceContext, owner: str) -> None:
    recent = sessions.c.seen > time.time() - SESSION_TIMEOUT_S
    alive = (models.c.owner == owner, models.c.state == "live", models.c.session == sessions.c.id, recent)
    if ctx.store.count(models, *alive, sessions.c.finished.is_(None)) >= ctx.limits.models:
        raise BadRequest(f"you have {ctx.limits.models} models in use, the most that one key may: unload some")


def adapter_settings(row: Any) -> dict[str, Any]:
    """Returns the settings that must be equal for the weights of one adapter to fit another."""
    return {"base": row.base, **LoraConfig.model_validate(row.lora).model_dump(exclude={"seed"})}


@router.post("/get_info")
def get_info(call: JsonBody[ModelRequest], ctx: ContextDep, owner: OwnerDep) -> GetInfoResponse:
    """Returns a model's metadata. `tokenizer_id` is the base's folder, which a client on this machine (or on a shared
    disk) can load directly; `model_name` is the base's public name, for other clients."""
    model = ctx.model(owner, call.model_id)
    base = ctx.base_of(model)
    name = client_base_name(ctx, model)
    data = ModelData(arch=base.architecture, model_name=name, tokenizer_id=base.path)
    rank = model.lora["rank"]
    return GetInfoResponse(model_data=data, model_id=model.id, is_lora=True, lora_rank=rank, model_name=name)


def client_base_name(ctx: ServiceContext, row: Any) -> str:
    """Returns the name of the base of a model or checkpoint that its client used."""
    return str(
        row.info.get("base_model") or (public_base_name(ctx.bases[row.base]) if row.base in ctx.bases else row.base)
    )


def public_base_name(base: BaseInfo) -> str:
    """Returns a name of the base with which a client finds its tokenizer."""
    return base.public_names[0] if base.public_names else base.path


@router.post("/unload_model")
def unload_model(call: JsonBody[ModelRequest], ctx: ContextDep, owner: OwnerDep, queue: QueueDep) -> UntypedAPIFuture:
    """Queues the removal of a model."""
    ctx.model(owner, call.model_id)
    return queue.submit_numbered(owner, "unload", b"{}", call.model_id, None)


@router.post("/forward")
def forward(body: BodyDep, ctx: ContextDep, owner: OwnerDep, queue: QueueDep) -> UntypedAPIFuture:
    """Queues a forward pass."""
    with queue.recording_rejection(owner, "forward", body):
        return _gradients(codec.train_call_from_json(body, forward_only=True), ctx, owner, queue)


@router.post("/forward_backward")
def forward_backward(
    body: BodyDep,
    ctx: ContextDep,
    owner: OwnerDep,
    queue: QueueDep,
    content_type: Annotated[str, Header()] = "application/json",
) -> UntypedAPIFuture:
    """Queues a gradient pass, given as JSON or as protobuf."""
    if content_type.partition(";")[0].strip().lower() == "application/x-protobuf":
        call = codec.train_call_from_proto(body)
        with queue.recording_rejection(owner, "forward_backward", (call.model_id, call.seq_id)):
            return _gradients(codec.decode_call(call), ctx, owner, queue)
    with queue.recording_rejection(owner, "forward_backward", body):
        return _gradients(codec.train_call_from_json(body, forward_only=False), ctx, owner, queue)


def _gradients(call: codec.TrainCall, ctx: ServiceContext, owner: str, queue: RequestQueue) -> UntypedAPIFuture:
    """Validates the call against its model's base and queues it in the worker's form."""
    base = ctx.base_of(ctx.model(owner, call.model_id))
    sizes = {"vocab_size": base.vocab_size, "max_length": base.max_length, "max_tokens": ctx.limits.batch_tokens}
    if not call.forward_only:
        check_input_names(call.data)
    data = check_train_call(call.data, call.loss, call.options, **sizes)
    kind = "forward" if call.forward_only else "forward_backward"
    job = TrainJob(call.loss, call.options, data)
    return queue.submit_numbered(owner, kind, job.to_bytes(), call.model_id, call.seq_id)


@router.post("/optim_step")
def optim_step(body: BodyDep, ctx: ContextDep, owner: OwnerDep, queue: QueueDep) -> UntypedAPIFuture:
    """Queues an optimizer step."""
    with queue.recording_rejection(owner, "optim_step", body):
        call = parse_body(OptimStepRequest, body)
        ctx.model(owner, call.model_id)
        return queue.submit_numbered(owner, "optim_step", call.adam_params, call.model_id, call.seq_id)


@router.post("/train_step")
async def train_step(owner: OwnerDep) -> None:
    """Rejects the call: it is not supported here."""
    raise BadRequest("train_step is for vision-language-action models, which are not served here", 404)
