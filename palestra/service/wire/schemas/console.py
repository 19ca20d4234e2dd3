"""The server's state for its operator: `GET /api/v1/console`, and the part of it that the worker reports.

Times are seconds since 1970. Neither keys nor what clients sent are in it.
"""

from __future__ import annotations

from palestra.service.wire.schemas.wire_model import WireModel


class BaseStatus(WireModel):
    """A base model in the worker: its answers in progress, the requests that wait for a place among them, the bytes of
    its KV cache (null where it has none) and the free memory of its device."""

    name: str
    device: str
    free_memory: int
    answers: int
    waiting: int
    cache_bytes: int | None
    cache_limit: int | None


class OwnerWork(WireModel):
    """The counters of an API key by which the fair queue decides, in tokens: the smallest is served first."""

    sampling: float = 0.0
    training: float = 0.0
    scoring: float = 0.0
    answers: int = 0
    """Answers in progress."""


class WorkerStatus(WireModel):
    """The worker at time `at`, with its resident memory in bytes and the number of adapters held for samplers."""

    at: float
    pid: int
    memory: int | None
    loaded_models: list[str]
    num_snapshots: int
    bases: list[BaseStatus]
    work: dict[str, OwnerWork]


class ConnectedSession(WireModel):
    """A session that sent something recently."""

    id: str
    owner: str
    name: str | None
    created: float
    seen: float
    num_models: int
    num_samplers: int


class WaitingRequests(WireModel):
    """Unanswered requests of one API key and kind: how many the worker has not taken yet, and how many it has."""

    owner: str
    kind: str
    queued: int
    taken: int
    bytes: int
    oldest: float


class OwnerAnswers(WireModel):
    """The answers that an API key got in the last minute, with the mean and the longest time that one took."""

    owner: str
    num_answers: int
    mean_s: float
    max_s: float


class AdapterStatus(WireModel):
    """A model in training. `has_unsaved` is true if its last changes would be lost with the worker."""

    id: str
    owner: str
    base: str
    rank: int
    state: str
    is_loaded: bool
    has_unsaved: bool
    used: float


class FailedRequest(WireModel):
    """A request that was answered with an error; `category` says whose it is: the user's or the server's."""

    at: float
    owner: str
    kind: str
    model: str | None
    category: str
    message: str


class ConsoleResponse(WireModel):
    """The server at time `at`; each list is bounded, newest first. `worker` is null until it has reported."""

    at: float
    sessions: list[ConnectedSession]
    queues: list[WaitingRequests]
    answers: list[OwnerAnswers]
    adapters: list[AdapterStatus]
    errors: list[FailedRequest]
    worker: WorkerStatus | None
