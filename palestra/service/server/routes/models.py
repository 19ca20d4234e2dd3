"""Routes for models: creation, gradients and optimizer steps."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Header

from palestra.service.server.deps import BodyDep, JsonBody, OwnerDep, metadata_as_text
from palestra.service.server.owner import Owner
from palestra.service.server.routes.sessions import touch_session
from palestra.service.server.state import BaseInfo
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
def create_model(call: JsonBody[CreateModelRequest], owner: OwnerDep) -> UntypedAPIFuture:
    """Creates a model with a new adapter."""
    if call.rollout_correction_config:
        raise BadRequest("rollout_correction_config is not served here: correct with loss inputs, such as weights")
    base = owner.context.base(call.base_model)
    lora = lora_settings(call.lora_config)
    touch_session(owner, call.session_id)
    info = {"base_model": call.base_model, "user_metadata": metadata_as_text(call.user_metadata)}
    id = _slot(owner, call.session_id, call.model_seq_id, base, lora, info)
    request = owner.submit("create_model", b"{}", key=f"create:{id}", model=id, seq=0)
    return UntypedAPIFuture(request_id=request, model_id=id)


def lora_settings(config: LoraConfig | None) -> LoraConfig:
    """Returns a client's adapter settings. Raises BadRequest if they adapt nothing."""
    lora = config or LoraConfig()
    if not (lora.train_mlp or lora.train_attn or lora.train_unembed):
        raise BadRequest("lora_config trains nothing: leave train_mlp, train_attn or train_unembed on")
    return lora


def create_from_checkpoint(call: LoadWeightsRequest, owner: Owner) -> UntypedAPIFuture:
    """Creates a model from a checkpoint; loading it is its first request. Raises BadRequest if `base_model` contradicts
    the checkpoint."""
    assert call.session_id is not None and call.model_seq_id is not None
    source = owner.checkpoint(call.path)
    base = owner.context.base_of(source)
    if call.base_model is not None and owner.context.base(call.base_model) is not base:
        raise BadRequest(f"{call.path} is of base {source.base}, not {call.base_model}: leave base_model out")
    job = load_job(call, source)
    touch_session(owner, call.session_id)
    info = {
        "base_model": call.base_model or source.info.get("base_model"),
        "user_metadata": metadata_as_text(call.user_metadata),
    }
    id = _slot(owner, call.session_id, call.model_seq_id, base, LoraConfig.model_validate(source.lora), info)
    request = owner.submit("load", job, key=f"create:{id}", model=id, seq=0)
    return UntypedAPIFuture(request_id=request, model_id=id)


def load_job(call: LoadWeightsRequest, source: Any) -> LoadJob:
    """Returns the job that loads the checkpoint row `source`. Raises BadRequest if an optimizer is requested that it
    does not have."""
    if call.optimizer and source.kind != "training":
        raise BadRequest(f"{call.path} holds no optimizer: load it without, or name a path of {source.run}/weights")
    return LoadJob(folder=source.folder, path=call.path, optimizer=call.optimizer)


def _slot(owner: Owner, session: str, number: int, base: BaseInfo, lora: LoraConfig, info: dict[str, Any]) -> str:
    """Returns the id of model `number` of a session, inserting its row if it is new. A repeated call returns the same
    row. Raises BadRequest if it exists with other settings."""
    id = f"{session}:train:{number}"
    now = time.time()
    row = owner.store.get(models, id)
    if row is None:
        _room_for_one_more(owner)
        new: dict[str, Any] = {"id": id, "session": session, "owner": owner.name, "base": base.name, "info": info}
        new |= {"lora": lora.model_dump(), "created": now, "used": now, "state": "live"}
        if owner.store.insert(models, **new, changed=0, kept=0, saved=None):
            return id
        row = owner.store.get(models, id)
    if row is None or (row.owner, row.base, row.lora) != (owner.name, base.name, lora.model_dump()):
        raise BadRequest(f"model {id} exists already, with other settings: take another model_seq_id")
    return id


def _room_for_one_more(owner: Owner) -> None:
    recent = sessions.c.seen > time.time() - SESSION_TIMEOUT_S
    alive = (models.c.owner == owner.name, models.c.state == "live", models.c.session == sessions.c.id, recent)
    if owner.store.count(models, *alive, sessions.c.finished.is_(None)) >= owner.context.limits.models:
        raise BadRequest(
            f"you have {owner.context.limits.models} models in use, the most that one key may: unload some"
        )


def adapter_settings(row: Any) -> dict[str, Any]:
    """Returns the settings that must be equal for the weights of one adapter to fit another."""
    return {"base": row.base, **LoraConfig.model_validate(row.lora).model_dump(exclude={"seed"})}


@router.post("/get_info")
def get_info(call: JsonBody[ModelRequest], owner: OwnerDep) -> GetInfoResponse:
    """Returns a model's metadata. `tokenizer_id` is the base's folder, which a client on this machine (or on a shared
    disk) can load directly; `model_name` is the base's public name, for other clients."""
    model = owner.model(call.model_id)
    base = owner.context.base_of(model)
    name = owner.context.client_base_name(model)
    data = ModelData(arch=base.architecture, model_name=name, tokenizer_id=base.path)
    rank = model.lora["rank"]
    return GetInfoResponse(model_data=data, model_id=model.id, is_lora=True, lora_rank=rank, model_name=name)


@router.post("/unload_model")
def unload_model(call: JsonBody[ModelRequest], owner: OwnerDep) -> UntypedAPIFuture:
    """Queues the removal of a model."""
    owner.model(call.model_id)
    return owner.submit_numbered("unload", b"{}", call.model_id, None)


@router.post("/forward")
def forward(body: BodyDep, owner: OwnerDep) -> UntypedAPIFuture:
    """Queues a forward pass."""
    with owner.recording_rejection("forward", body):
        return _gradients(codec.train_call_from_json(body, forward_only=True), owner)


@router.post("/forward_backward")
def forward_backward(
    body: BodyDep,
    owner: OwnerDep,
    content_type: Annotated[str, Header()] = "application/json",
) -> UntypedAPIFuture:
    """Queues a gradient pass, given as JSON or as protobuf."""
    if content_type.partition(";")[0].strip().lower() == "application/x-protobuf":
        call = codec.train_call_from_proto(body)
        with owner.recording_rejection("forward_backward", (call.model_id, call.seq_id)):
            return _gradients(codec.decode_call(call), owner)
    with owner.recording_rejection("forward_backward", body):
        return _gradients(codec.train_call_from_json(body, forward_only=False), owner)


def _gradients(call: codec.TrainCall, owner: Owner) -> UntypedAPIFuture:
    """Validates the call against its model's base and queues it in the worker's form."""
    base = owner.context.base_of(owner.model(call.model_id))
    if not call.forward_only:
        check_input_names(call.data)
    data = check_train_call(call.data, call.loss, call.options, **owner.context.call_sizes(base))
    kind = "forward" if call.forward_only else "forward_backward"
    job = TrainJob(call.loss, call.options, data)
    return owner.submit_numbered(kind, job.to_bytes(), call.model_id, call.seq_id)


@router.post("/optim_step")
def optim_step(body: BodyDep, owner: OwnerDep) -> UntypedAPIFuture:
    """Queues an optimizer step."""
    with owner.recording_rejection("optim_step", body):
        call = parse_body(OptimStepRequest, body)
        owner.model(call.model_id)
        return owner.submit_numbered("optim_step", call.adam_params, call.model_id, call.seq_id)


@router.post("/train_step")
async def train_step(owner: OwnerDep) -> None:
    """Rejects the call: it is not supported here."""
    raise BadRequest("train_step is for vision-language-action models, which are not served here", 404)
