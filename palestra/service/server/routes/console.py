"""The route of the console: sessions, queues, models, memory and errors, for the server's operator."""

from __future__ import annotations

import json
import time
from collections import Counter

import sqlalchemy as sql
from fastapi import APIRouter

from palestra.service.server.api_keys import ANONYMOUS_OWNER
from palestra.service.server.deps import OwnerDep
from palestra.service.storage.store import Store
from palestra.service.storage.tables import models, requests, samplers, sessions, worker_status
from palestra.service.wire.schemas.console import (
    AdapterStatus,
    ConnectedSession,
    ConsoleResponse,
    FailedRequest,
    OwnerAnswers,
    WaitingRequests,
    WorkerStatus,
)
from palestra.service.wire.schemas.wire_model import BadRequest

OPERATOR = "operator"  # the owner of the key that may see what other keys do
CONNECTED_S = 120.0  # seconds without a heartbeat or request after which a session is not connected
MINUTE_S = 60.0
MAX_ROWS = 200  # of each list
MAX_ERRORS = 20

router = APIRouter()


@router.get("/console")
def console(owner: OwnerDep) -> ConsoleResponse:
    """Returns sessions, queues, models in training, memory, shares and errors of all API keys. Where keys are checked,
    it needs the operator's."""
    if owner.name not in (OPERATOR, ANONYMOUS_OWNER):
        raise BadRequest(
            f"the console shows what all keys do, and {owner.name}'s is not the operator's: make one with "
            f"`palestra keys add {OPERATOR} --auth {owner.context.keys.path}`",
            403,
        )
    now = time.time()
    row = owner.store.get(worker_status, "worker")
    worker = None if row is None else WorkerStatus.model_validate(row.status)
    return ConsoleResponse(
        at=now,
        sessions=_connected_sessions(owner.store, now),
        queues=_waiting_requests(owner.store),
        answers=_recent_answers(owner.store, now),
        adapters=_adapters(owner.store, worker),
        errors=_errors(owner.store),
        worker=worker,
    )


def _connected_sessions(store: Store, now: float) -> list[ConnectedSession]:
    recent = (sessions.c.seen > now - CONNECTED_S, sessions.c.finished.is_(None))
    rows = store.find(sessions, *recent, limit=MAX_ROWS)
    ids = [row.id for row in rows]
    num_models = Counter(row.session for row in store.find(models, models.c.session.in_(ids), models.c.state != "gone"))
    num_samplers = Counter(row.session for row in store.find(samplers, samplers.c.session.in_(ids)))
    return [
        ConnectedSession(
            id=row.id,
            owner=row.owner,
            name=row.info.get("display_name"),
            created=row.created,
            seen=row.seen,
            num_models=num_models[row.id],
            num_samplers=num_samplers[row.id],
        )
        for row in rows
    ]


def _waiting_requests(store: Store) -> list[WaitingRequests]:
    queued = sql.func.sum(sql.case((requests.c.state == "queued", 1), else_=0))
    size = sql.func.coalesce(sql.func.sum(sql.func.length(requests.c.body)), 0)
    query = (
        sql.select(requests.c.owner, requests.c.kind, sql.func.count(), queued, size, sql.func.min(requests.c.created))
        .where(requests.c.state.in_(("queued", "taken")))
        .group_by(requests.c.owner, requests.c.kind)
        .limit(MAX_ROWS)
    )
    rows = store.database.read(lambda connection: connection.execute(query).all())
    return [
        WaitingRequests(owner=owner, kind=kind, queued=int(n), taken=count - int(n), bytes=int(size), oldest=oldest)
        for owner, kind, count, n, size, oldest in rows
    ]


def _recent_answers(store: Store, now: float) -> list[OwnerAnswers]:
    took = requests.c.finished - requests.c.created
    query = (
        sql.select(requests.c.owner, sql.func.count(), sql.func.avg(took), sql.func.max(took))
        .where(requests.c.finished > now - MINUTE_S)
        .group_by(requests.c.owner)
        .limit(MAX_ROWS)
    )
    rows = store.database.read(lambda connection: connection.execute(query).all())
    return [OwnerAnswers(owner=owner, num_answers=n, mean_s=mean, max_s=longest) for owner, n, mean, longest in rows]


def _adapters(store: Store, worker: WorkerStatus | None) -> list[AdapterStatus]:
    loaded = set(worker.loaded_models) if worker else set()
    return [
        AdapterStatus(
            id=row.id,
            owner=row.owner,
            base=row.base,
            rank=row.lora["rank"],
            state=row.state,
            is_loaded=row.id in loaded,
            has_unsaved=row.changed > row.kept,
            used=row.used,
        )
        for row in store.find(models, models.c.state != "gone", limit=MAX_ROWS)
    ]


def _errors(store: Store) -> list[FailedRequest]:
    errors = []
    for row in store.find(requests, requests.c.state == "failed", limit=MAX_ERRORS):
        answer = json.loads(row.result)
        errors.append(
            FailedRequest(
                at=row.finished,
                owner=row.owner,
                kind=row.kind,
                model=row.model,
                category=answer["category"],
                message=answer["error"],
            )
        )
    return errors
