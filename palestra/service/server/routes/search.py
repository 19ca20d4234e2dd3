"""Routes for searching sessions and assigning them to projects.

A project is a label that the client chooses; it groups sessions and needs no creation. A search only ever returns the
sessions of the requesting API key.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sql
from fastapi import APIRouter, Response

from palestra.service.server.deps import ContextDep, JsonBody, OwnerDep
from palestra.service.server.routes.models import SESSION_TIMEOUT_S
from palestra.service.server.state import ServiceContext
from palestra.service.storage.tables import TableRow, checkpoints, models, sessions
from palestra.service.wire.schemas.requests import (
    AssignProjectRequest,
    SessionCursor,
    SessionSearchRequest,
    SessionStatusQuery,
)
from palestra.service.wire.schemas.responses import SessionSearchResponse, SessionSummary

router = APIRouter()
MAX_ROWS = 1_000_000
NO_PROJECT = "default"  # project id on the wire of a session without a project


@router.put("/sessions/{id}/project")
def assign_project(id: str, call: JsonBody[AssignProjectRequest], ctx: ContextDep, owner: OwnerDep) -> Response:
    """Assigns a session to a project."""
    session = ctx.session(owner, id)
    ctx.store.update(sessions, id, info={**session.info, "project": call.project_id})
    return Response(status_code=204)


@router.post("/sessions/search")
def search_sessions(call: JsonBody[SessionSearchRequest], ctx: ContextDep, owner: OwnerDep) -> SessionSearchResponse:
    """Returns a page of sessions, newest first. `session_id` and `display_name` are alternatives; all other conditions
    must hold."""
    if call.owner.owner_urns is not None and owner not in call.owner.owner_urns:
        return SessionSearchResponse(sessions=[])
    mine = ctx.store.find(sessions, sessions.c.owner == owner, limit=MAX_ROWS)
    rows = sorted((row for row in mine if _matches(row, call)), key=_place, reverse=True)
    if call.cursor is not None:
        last = (call.cursor.last_created_at.timestamp(), call.cursor.last_session_id)
        rows = [row for row in rows if _place(row) < last]
    page = [_summary(ctx, row) for row in rows[: call.limit]]
    more = len(rows) > len(page)
    cursor = SessionCursor(last_created_at=page[-1].created_at, last_session_id=page[-1].session_id) if more else None
    return SessionSearchResponse(sessions=page, next_cursor=cursor)


def _place(row: TableRow) -> tuple[float, str]:
    """Returns the sort key of a session, with the precision in which a cursor is returned."""
    return datetime.fromtimestamp(row.created, UTC).timestamp(), row.id


def _matches(row: TableRow, call: SessionSearchRequest) -> bool:
    name = str(row.info.get("display_name") or "").lower()
    named = call.display_name is not None and all(word in name for word in call.display_name.lower().split())
    if (call.session_id is not None or call.display_name is not None) and not (named or row.id == call.session_id):
        return False
    if call.project_ids is not None and _project(row) not in call.project_ids:
        return False
    metadata = row.info.get("user_metadata") or {}
    if any(metadata.get(key) != value for key, value in call.user_metadata.items()):
        return False
    return call.statuses is None or any(_is(_status(row), wanted) for wanted in call.statuses)


def _project(row: TableRow) -> str:
    return str(row.info.get("project") or NO_PROJECT)


def _status(row: TableRow) -> dict[str, Any] | None:
    """Returns the status of a session; None if it is neither finished nor in use. Sessions never fail and are never
    cancelled here."""
    if row.finished is not None:
        finish = row.info.get("finish") or {}
        reason = {"type": finish.get("reason", "success")}
        return {"type": "client_finished", "reason": reason, "detail": finish.get("detail")}
    return {"type": "active"} if row.seen > time.time() - SESSION_TIMEOUT_S else None


def _is(status: dict[str, Any] | None, wanted: SessionStatusQuery) -> bool:
    if status is None or status["type"] != wanted.type:
        return False
    return wanted.reasons is None or status["type"] == "active" or status["reason"]["type"] in wanted.reasons


def _summary(ctx: ServiceContext, row: TableRow) -> SessionSummary:
    of_session = sql.select(models.c.id).where(models.c.session == row.id)
    kept = ctx.store.find(checkpoints, checkpoints.c.run.in_(of_session), limit=MAX_ROWS)
    return SessionSummary(
        session_id=row.id,
        created_at=datetime.fromtimestamp(row.created, UTC),
        owner=row.owner,
        project_id=_project(row),
        status=_status(row),
        checkpoints_count=len(kept),
        display_name=row.info.get("display_name"),
        user_metadata=row.info.get("user_metadata"),
        checkpoint_storage_bytes=sum(checkpoint.size for checkpoint in kept),
    )
