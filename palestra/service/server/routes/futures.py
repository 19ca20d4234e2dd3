"""Routes for retrieving the results of long calls. A poll is held open until the result exists; results can be read
repeatedly."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Annotated

import sqlalchemy as sql
from fastapi import APIRouter, Header, Request, Response

from palestra.core.http.limits import cancel_on_disconnect
from palestra.service.server.answer_poller import AnswerPoller
from palestra.service.server.deps import JsonBody, OwnerDep
from palestra.service.server.owner import Owner
from palestra.service.storage.tables import TableRow, requests
from palestra.service.wire import codec
from palestra.service.wire.schemas.requests import (
    MAX_INT64,
    CancelFutureRequest,
    FutureRetrieveRequest,
    FuturesRetrieveRequest,
)
from palestra.service.wire.schemas.responses import FutureCompletion, FuturesRetrieveResponse, TryAgainResponse
from palestra.service.wire.schemas.wire_model import BadRequest

router = APIRouter()
PROTOBUF_TYPE = "application/x-protobuf"
MAX_COMPLETIONS = 100_000  # completions in one batch poll, at most
SEQS_PER_CLONE = 10**9  # sequence numbers reserved for each copy of a sampling client


@router.post("/retrieve_future")
async def retrieve_future(
    call: JsonBody[FutureRetrieveRequest],
    request: Request,
    owner: OwnerDep,
    accept: Annotated[str, Header()] = "*/*",
) -> Response:
    """Returns the result; after `limits.poll` seconds without one, 408, upon which clients poll again.

    An unknown id gives 410: newer clients then repeat their sampling request, all others report the loss.
    """
    row = await asyncio.to_thread(_request, owner, call.request_id)
    if row.finished is None and await _wait(request, [call.request_id], owner.context.limits.poll):
        row = await asyncio.to_thread(_request, owner, call.request_id)
    if row.finished is None:
        return await asyncio.to_thread(_try_again, owner, row)
    if row.result_kind == "json":
        return Response(row.result, media_type="application/json")
    if PROTOBUF_TYPE in accept:
        return Response(row.result, media_type=PROTOBUF_TYPE)
    as_json = codec.sample_to_json if row.result_kind == "sample" else codec.forward_backward_to_json
    return Response(as_json(row.result), media_type="application/json")


def _request(owner: Owner, id: str) -> TableRow:
    row = owner.store.get_request(owner.name, id)
    if row is None:
        raise BadRequest(f"there is no request {id}: its answer was kept for a day, or it is not yours", 410)
    return row


async def _wait(request: Request, ids: Sequence[str], seconds: float) -> bool:
    """Waits up to `seconds` and returns whether one of the requests `ids` has an answer. Raises RequestRejected if the
    client disconnects."""
    waiter: AnswerPoller = request.app.state.waiter
    return await cancel_on_disconnect(request.receive, waiter.wait(ids, seconds))


def _try_again(owner: Owner, row: TableRow) -> Response:
    ahead = owner.store.count(requests, requests.c.state.in_(("queued", "taken")), requests.c.serial < row.serial)
    depth = owner.depth().num_requests
    response = TryAgainResponse(
        request_id=row.id, status="pending", queue_depth=depth, queue_position=ahead, retry_after_s=0.0
    )
    headers = {"Retry-After": "0", "X-Queue-Depth": f"{depth}", "X-Queue-Position": f"{ahead}"}
    headers["X-Queue-Status"] = "running" if row.state == "taken" else "queued"
    return Response(response.model_dump_json(), 408, headers, "application/json")


@router.post("/retrieve_futures")
async def retrieve_futures(
    call: JsonBody[FuturesRetrieveRequest], request: Request, owner: OwnerDep
) -> FuturesRetrieveResponse:
    """Returns the samples of one sampling client that were answered after `prev_cursor`, as soon as there is one."""
    await asyncio.to_thread(owner.sampler, call.target.sampling_session_id)
    seconds = owner.context.limits.poll if call.timeout is None else min(call.timeout, owner.context.limits.poll)
    found, pending = await asyncio.to_thread(_completions, owner, call)
    if not found.completions and pending and seconds:
        await _wait(request, pending, seconds)
        found, _ = await asyncio.to_thread(_completions, owner, call)
    return found


def _completions(owner: Owner, call: FuturesRetrieveRequest) -> tuple[FuturesRetrieveResponse, list[str]]:
    """Returns the requests answered after the cursor, a time in microseconds, and the ids of unanswered ones."""
    first = call.target.cloned_sampler_id * SEQS_PER_CLONE
    if first > MAX_INT64 - SEQS_PER_CLONE:
        raise BadRequest("target.cloned_sampler_id is too large: it is seq_id // 1000000000")
    mine = (requests.c.model == call.target.sampling_session_id, requests.c.owner == owner.name)
    within = requests.c.seq.between(first, first + SEQS_PER_CLONE - 1)
    new = sql.or_(requests.c.finished.is_(None), requests.c.finished > call.prev_cursor / 1e6)
    rows = owner.store.find(requests, *mine, within, new, limit=MAX_COMPLETIONS)
    done = [row for row in rows if row.finished is not None]
    cursor = max([call.prev_cursor, *(math.ceil(row.finished * 1e6) for row in done)])
    completions = [_completion(row) for row in done]
    pending = [row.id for row in rows if row.finished is None]
    return FuturesRetrieveResponse(completions=completions, cursor=cursor), pending


def _completion(row: TableRow) -> FutureCompletion:
    if row.state == "failed":
        return FutureCompletion(state="failed", request_id=row.id)
    size = len(row.result)
    return FutureCompletion(state="finished", request_id=row.id, response_payload_uncompressed_size=size)


@router.post("/cancel_future")
def cancel_future(call: JsonBody[CancelFutureRequest], owner: OwnerDep) -> dict[str, bool]:
    """Cancels a sample that has not started; a running one shares its batch with others and is completed."""
    return {"cancelled": owner.store.cancel(owner.name, call.request_id)}
