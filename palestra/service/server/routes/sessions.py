"""Routes for bootstrap, sessions and telemetry."""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from palestra.service.server.deps import JsonBody, OwnerDep, metadata_as_text
from palestra.service.server.owner import Owner
from palestra.service.storage.tables import models, samplers, sessions
from palestra.service.wire.schemas import requests, responses
from palestra.service.wire.schemas.wire_model import BadRequest

router = APIRouter()
# SDK versions that read the redirect to an archive's URL. pyqwest would follow it, so they must not use pyqwest.
REDIRECT_SDK_VERSIONS = tuple(f"0.{minor}." for minor in range(18, 36))
Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, le=2**31)]


@router.get("/healthz")
async def healthz() -> responses.HealthResponse:
    """Answers a health check; needs no API key."""
    return responses.HealthResponse()


@router.post("/client/config")
async def client_config(request: Request) -> responses.ClientConfigResponse:
    """Returns the client's feature flags. Clients with a MinT key ("sk-...") must exchange it for a token, since
    they refuse to send it directly. The body is not read, because the request is not authenticated."""
    key, version = (request.headers.get(name, "") for name in ("x-api-key", "x-stainless-package-version"))
    return responses.ClientConfigResponse(
        pjwt_auth_enabled=key.startswith("sk-"), use_pyqwest_transport=not version.startswith(REDIRECT_SDK_VERSIONS)
    )


@router.post("/client/dynamic_config")
async def dynamic_config() -> responses.ClientDynamicConfigResponse:
    """Returns the feature flags that clients refresh while they run."""
    return responses.ClientDynamicConfigResponse(sample_cancel_enabled=True)


@router.post("/auth/token")
async def auth_token(owner: OwnerDep) -> responses.AuthTokenResponse:
    """Issues a token for the API key."""
    return responses.AuthTokenResponse(jwt=owner.context.keys.issue_token(owner.name))


@router.post("/telemetry")
async def telemetry(owner: OwnerDep) -> responses.TelemetryResponse:
    """Accepts telemetry and discards it."""
    return responses.TelemetryResponse()


@router.get("/get_server_capabilities")
async def capabilities(owner: OwnerDep) -> responses.GetServerCapabilitiesResponse:
    """Lists the base models under all their names."""
    named = [
        (name, base.max_length) for base in owner.context.bases.values() for name in (base.name, *base.public_names)
    ]
    return responses.GetServerCapabilitiesResponse(
        supported_models=[
            responses.SupportedModel(model_name=name, max_context_length=length) for name, length in named
        ]
    )


@router.post("/create_session")
def create_session(call: JsonBody[requests.CreateSessionRequest], owner: OwnerDep) -> responses.CreateSessionResponse:
    """Creates a session."""
    info: dict[str, Any] = {"tags": call.tags, "display_name": call.display_name, "project": call.project_id}
    info["user_metadata"] = metadata_as_text(call.user_metadata)
    id = f"s{uuid.uuid4().hex[:16]}"
    _begin(owner, id, info)
    return responses.CreateSessionResponse(session_id=id)


def touch_session(owner: Owner, id: str) -> None:
    """Records that a session is in use; creates it if it does not exist, since scripts choose their own ids. Raises
    BadRequest if it belongs to another owner."""
    if not _begin(owner, id, {}):
        owner.session(id)
        owner.store.update(sessions, id, seen=time.time(), finished=None)


def _begin(owner: Owner, id: str, info: dict[str, Any]) -> bool:
    now = time.time()
    return owner.store.insert(sessions, id=id, owner=owner.name, created=now, seen=now, finished=None, info=info)


@router.post("/session_heartbeat")
def heartbeat(call: JsonBody[requests.SessionHeartbeatRequest], owner: OwnerDep) -> responses.SessionHeartbeatResponse:
    """Keeps a session alive. Answers 410, upon which clients stop calling, only if the session was finished."""
    session = owner.session(call.session_id)
    if session.finished is not None:
        raise BadRequest(f"session {call.session_id} was finished: create a new one", 410)
    owner.store.update(sessions, call.session_id, seen=time.time())
    return responses.SessionHeartbeatResponse()


@router.post("/sessions/{id}/finish")
def finish_session(id: str, call: JsonBody[requests.FinishSessionRequest], owner: OwnerDep) -> dict[str, str]:
    """Marks a session as finished."""
    session = owner.session(id)
    info = {**session.info, "finish": {"reason": call.reason.type, "detail": call.detail}}
    owner.store.update(sessions, id, finished=time.time(), info=info)
    return {"status": "ok"}


@router.put("/sessions/{id}/project")
def assign_project(id: str, call: JsonBody[requests.AssignProjectRequest], owner: OwnerDep) -> Response:
    """Assigns a session to a project: a label that the client chooses, by which runs are listed."""
    session = owner.session(id)
    owner.store.update(sessions, id, info={**session.info, "project": call.project_id})
    return Response(status_code=204)


@router.get("/sessions")
def list_sessions(owner: OwnerDep, limit: Limit = 20, offset: Offset = 0) -> responses.ListSessionsResponse:
    """Lists the owner's sessions, newest first."""
    found = owner.store.find(sessions, sessions.c.owner == owner.name, limit=limit, offset=offset)
    return responses.ListSessionsResponse(sessions=[row.id for row in found])


@router.get("/sessions/{id}")
def get_session(id: str, owner: OwnerDep) -> responses.GetSessionResponse:
    """Returns the models and samplers of a session."""
    session = owner.session(id)
    return responses.GetSessionResponse(
        training_run_ids=[row.id for row in owner.store.find(models, models.c.session == id)],
        sampler_ids=[row.id for row in owner.store.find(samplers, samplers.c.session == id)],
        user_metadata=session.info.get("user_metadata"),
        display_name=session.info.get("display_name"),
    )
