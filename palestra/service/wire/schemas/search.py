"""JSON request bodies for searching sessions and assigning them to projects."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AwareDatetime, Field

from palestra.service.wire.schemas.requests import MAX_ENTRIES, Id
from palestra.service.wire.schemas.wire_model import WireModel


class AssignProjectRequest(WireModel):
    """Body that assigns a session to a project."""

    project_id: Id


class SessionSearchOwner(WireModel):
    """Filter by owner. An API key only ever finds its own sessions."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: Annotated[list[Id], Field(max_length=MAX_ENTRIES)] | None = None


class SessionStatusQuery(WireModel):
    """Filter by session status."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: Annotated[list[str], Field(max_length=MAX_ENTRIES)] | None = None


class SessionCursor(WireModel):
    """Position after which the next page starts."""

    last_created_at: AwareDatetime
    last_session_id: Id


class SessionSearchRequest(WireModel):
    """Body of a session search. `display_name` holds words that the name must contain, in any order and case."""

    session_id: str | None = None
    project_ids: Annotated[list[str], Field(max_length=MAX_ENTRIES)] | None = None
    user_metadata: Annotated[dict[str, str], Field(max_length=MAX_ENTRIES)] = {}
    display_name: Annotated[str, Field(min_length=1)] | None = None
    owner: SessionSearchOwner = SessionSearchOwner()
    statuses: Annotated[list[SessionStatusQuery], Field(min_length=1, max_length=MAX_ENTRIES)] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: SessionCursor | None = None
