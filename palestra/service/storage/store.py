"""Persistent state of the service in one database: sessions, models, samplers, checkpoints, requests and their answers.

The table of requests is the queue between the front ends, which insert rows, and the engine worker, which takes them
and writes answers. A request is `queued`, then `taken`, then `done` or `failed`; it is kept for a day, so that an
answer can be read again. Its `key` (a model's or sampler's sequence number) is unique: a request sent twice is one row.

SQLite in WAL mode serves one machine, PostgreSQL several.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

import sqlalchemy as sql
from sqlalchemy.exc import IntegrityError

from palestra.service.storage.database import Database, ErrorHandler, raise_error
from palestra.service.storage.tables import (
    TableRow,
    checkpoints,
    folders,
    meta,
    models,
    requests,
    samplers,
    sessions,
    update_row,
    uploads,
)

RequestState = Literal["queued", "taken", "done", "failed"]
ResultKind = Literal["json", "forward_backward", "sample"]
ErrorCategory = Literal["user", "server", "unknown"]
ANSWER_TTL_S = 24 * 3600.0  # seconds for which an answer can be read
UPLOAD_GRACE_S = 3600.0  # seconds for which an upload is kept after its URLs have expired: a file may be under way
ANSWER_STEP_S = 1e-5  # seconds between answers at the same time: cursors of pollers have microseconds
ANSWERS_LOCK_KEY = 0x70616C  # of PostgreSQL's advisory lock
MAX_TAKES = 4  # worker deaths after which a request fails


class QueueDepth(NamedTuple):
    """Unanswered requests: their number and the total bytes of their bodies."""

    num_requests: int = 0
    num_bytes: int = 0


@dataclass(frozen=True)
class StoredAnswer:
    """The answer to a request: `result` is JSON, or protobuf for other values of `kind`."""

    id: str
    result: bytes
    kind: ResultKind = "json"
    failed: bool = False

    @classmethod
    def json(cls, id: str, **values: Any) -> Self:
        """Returns a successful answer with `values` as its JSON object."""
        return cls(id, json.dumps(values).encode())

    @classmethod
    def failure(cls, id: str, message: str, category: ErrorCategory = "user") -> Self:
        """Returns a failed answer with the error message; `category` names the cause: the user or the server."""
        return cls(id, json.dumps({"error": message, "category": category}).encode(), failed=True)


class Store:
    """Queries on one database; safe to use from several threads and processes.

    Opens the database at `url` (`sqlite:///path` or `postgresql+psycopg://...`), creating its tables if it is new;
    `on_error` handles outages (see `Database`). Raises ValueError if it cannot be opened, or its tables were created by
    an incompatible version.
    """

    def __init__(self, url: str, on_error: ErrorHandler = raise_error) -> None:
        self.database = Database(url, on_error)
        engine = self.database.engine
        meta.create_all(engine)
        found = sql.inspect(engine)
        for table in meta.sorted_tables:
            missing = set(table.c.keys()) - {column["name"] for column in found.get_columns(table.name)}
            if missing:
                self.close()
                raise ValueError(
                    f"the database {self.database} was made by another version of palestra: its {table.name} have no "
                    f"{sorted(missing)[0]}. Serve with another --data (or --store), or with that version."
                )
        for index in requests.indexes:  # of a database that was made without it
            index.create(engine, checkfirst=True)

    def close(self) -> None:
        """Closes all connections."""
        self.database.engine.dispose()

    def bind_data_folder(self, mark: str) -> None:
        """Binds the database to the data folder identified by `mark`. Raises ValueError if it is bound to another
        folder, which holds the weights that its rows refer to."""

        def tie(connection: sql.Connection) -> str:
            found = connection.execute(sql.select(folders.c.mark)).scalar()
            if found is None:
                connection.execute(sql.insert(folders).values(mark=mark))
            return found or mark

        if self.database.write(tie) != mark:
            raise ValueError(
                f"the database {self.database} belongs to the server of another data folder: start with that --data, "
                "or with another --store"
            )

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(
        self,
        owner: str,
        kind: str,
        body: bytes | None,
        *,
        key: str | None = None,
        model: str | None = None,
        seq: int | None = None,
        **answer: Any,
    ) -> str:
        """Queues a request and returns its id; if `key` exists, returns the id of the earlier request. `answer` are
        columns that hold its answer, if that is known."""
        id = uuid.uuid4().hex
        row: dict[str, Any] = {"id": id, "owner": owner, "kind": kind, "body": body, "key": key, "model": model}
        row |= {"seq": seq, "state": "queued", "created": time.time(), **answer}
        try:
            self.execute(sql.insert(requests).values(row))
        except IntegrityError:
            found = self._value(sql.select(requests.c.id).where(requests.c.key == key))
            if found is None:
                raise
            return str(found)
        return id

    def reject(self, owner: str, kind: str, message: str, *, key: str, model: str, seq: int) -> str:
        """Records that request `seq` of a model was rejected: it is queued together with its answer, to keep its place
        in the order."""
        result = StoredAnswer.failure("", message).result
        return self.submit(owner, kind, None, key=key, model=model, seq=seq, result=result, result_kind="json")

    def take_queued(self) -> list[TableRow]:
        """Marks all queued requests as taken and returns them in order of arrival."""
        if self._value(_ANY_QUEUED) is None:  # reading needs no write lock
            return []
        values = {"state": "taken", "takes": requests.c.takes + 1}
        statement = sql.update(requests).where(requests.c.state == "queued").values(values).returning(requests)
        taken = self.database.write(lambda connection: connection.execute(statement).all())
        return sorted(taken, key=lambda row: row.serial)

    def release_taken(self) -> None:
        """Queues again all taken requests that the worker did not run."""
        again = {"state": "queued", "takes": 0}
        self.execute(sql.update(requests).where(requests.c.state == "taken").values(again))

    def requeue_after_crash(self) -> None:
        """Queues again the requests taken by a worker that died. A request that was running at `MAX_TAKES` deaths may
        be their cause and is answered with an error."""
        message = f"the server's worker died {MAX_TAKES} times while this request was under way: make it smaller"
        values = _failure_columns(message, "server")
        taken = requests.c.state == "taken"
        self.execute(
            *self._answers_lock(),
            sql.update(requests).where(taken, requests.c.takes >= MAX_TAKES).values(values),
            sql.update(requests).where(taken).values(state="queued"),
        )

    def write_answers(self, answers: Iterable[StoredAnswer], updates: Iterable[sql.Executable] = ()) -> None:
        """Writes answers and the row updates of their requests in one transaction."""
        parameters = [_answer_parameters(answer) for answer in answers]
        statements = [*self._answers_lock(), *updates]

        def work(connection: sql.Connection) -> None:
            for statement in statements:
                connection.execute(statement)
            if parameters:
                connection.execute(_ANSWER, parameters)

        try:
            self.database.write(work)
        except IntegrityError:  # a front end inserted the same key concurrently; the retry replaces its row
            self.database.write(work)

    def get_request(self, owner: str, id: str) -> TableRow | None:
        """Returns the owner's request with this id, or None."""
        return self._first(sql.select(requests).where(requests.c.id == id, requests.c.owner == owner))

    def answered_ids(self, ids: Sequence[str]) -> set[str]:
        """Returns those of `ids` that have an answer."""
        found = sql.select(requests.c.id).where(requests.c.id.in_(ids), requests.c.state.in_(("done", "failed")))
        return set(self._values(found))

    def cancel(self, owner: str, id: str) -> bool:
        """Answers a queued sample with "cancelled". Returns False if it has started or does not exist."""
        mine = (requests.c.id == id, requests.c.owner == owner)
        waiting = (requests.c.kind == "sample", requests.c.state == "queued")
        values = _failure_columns("cancelled by its client") | {"body": None}
        return self.execute(*self._answers_lock(), sql.update(requests).where(*mine, *waiting).values(values)) > 0

    def queue_depth(self, owner: str | None = None) -> QueueDepth:
        """Returns the unanswered requests of `owner`, or of all owners."""
        sizes = sql.func.coalesce(sql.func.sum(sql.func.length(requests.c.body)), 0)
        query = sql.select(sql.func.count(), sizes).where(requests.c.state.in_(("queued", "taken")))
        row = self._first(query if owner is None else query.where(requests.c.owner == owner))
        assert row is not None
        return QueueDepth(int(row[0]), int(row[1]))

    def oldest_request(self) -> float | None:
        """Returns the time at which the oldest unanswered request came, in seconds since 1970; None if there is
        none."""
        unanswered = requests.c.state.in_(("queued", "taken"))
        found: float | None = self._value(sql.select(sql.func.min(requests.c.created)).where(unanswered))
        return found

    def last_seq(self, model: str) -> int:
        """Returns the highest sequence number of a model's answered requests, or -1. The model's creation is number 0;
        clients number from 1."""
        answered = requests.c.state.in_(("done", "failed"))
        found = self._value(sql.select(sql.func.max(requests.c.seq)).where(requests.c.model == model, answered))
        return -1 if found is None else int(found)

    def expire(self, now: float) -> None:
        """Deletes answers that are older than a day, expired checkpoints and uploads, and samplers of sessions that
        were unused for a day. `now` is in seconds since 1970."""
        over = sql.select(sessions.c.id).where(sessions.c.seen < now - ANSWER_TTL_S)
        self.execute(
            sql.delete(requests).where(requests.c.finished < now - ANSWER_TTL_S),
            sql.delete(checkpoints).where(checkpoints.c.expires < now),
            sql.delete(samplers).where(samplers.c.session.in_(over)),
            sql.delete(uploads).where(uploads.c.expires < now - UPLOAD_GRACE_S),
        )

    def referenced_folders(self) -> set[str]:
        """Returns all folders of the weight store that a row refers to."""
        columns = (checkpoints.c.folder, samplers.c.folder, models.c.saved, uploads.c.folder)
        return {name for column in columns for name in self._values(sql.select(column)) if name}

    # -- rows of the other tables --------------------------------------------------------------------------------------

    def insert(self, table: sql.Table, **values: Any) -> bool:
        """Inserts a row. Returns False if its primary key exists."""
        try:
            self.execute(sql.insert(table).values(values))
        except IntegrityError:
            return False
        return True

    def get(self, table: sql.Table, id: str) -> TableRow | None:
        """Returns the row with this primary key, or None."""
        (column,) = table.primary_key.columns
        return self._first(sql.select(table).where(column == id))

    def update(self, table: sql.Table, id: str, **values: Any) -> None:
        """Updates columns of the row with this primary key."""
        self.execute(update_row(table, id, **values))

    def execute(self, *statements: sql.Executable) -> int:
        """Executes the statements in one transaction. Returns the number of rows affected by the last one."""

        def work(connection: sql.Connection) -> int:
            met = 0
            for statement in statements:
                met = connection.execute(statement).rowcount
            return met

        return self.database.write(work)

    def find(
        self, table: sql.Table, *where: sql.ColumnElement[bool], limit: int = 1000, offset: int = 0
    ) -> list[TableRow]:
        """Returns matching rows, newest first, and those of one time by their primary key."""
        order = [column.desc() for column in (table.c.created, *table.primary_key)]
        query = sql.select(table).where(*where).order_by(*order).limit(limit).offset(offset)
        return self.database.read(lambda connection: list(connection.execute(query).all()))

    def count(self, table: sql.Table, *where: sql.ColumnElement[bool]) -> int:
        return int(self._value(sql.select(sql.func.count()).select_from(table).where(*where)))

    def _answers_lock(self) -> list[sql.Executable]:
        """Returns the first statements of a transaction with answers. These transactions run one after another, so that
        `finished` is in the order of commits; SQLite has one writer anyway."""
        lock = sql.select(sql.func.pg_advisory_xact_lock(ANSWERS_LOCK_KEY))
        return [lock] if self.database.engine.dialect.name == "postgresql" else []

    def _first(self, query: sql.Select[*tuple[Any, ...]]) -> TableRow | None:
        return self.database.read(lambda connection: connection.execute(query).first())

    def _value(self, query: sql.Select[*tuple[Any, ...]]) -> Any:
        return self.database.read(lambda connection: connection.execute(query).scalar())

    def _values(self, query: sql.Select[*tuple[Any, ...]]) -> list[Any]:
        return self.database.read(lambda connection: list(connection.execute(query).scalars()))


def _next_finished(now: Any) -> sql.ColumnElement[float]:
    """Returns the present time `now`, or a little more than the latest answer's, if that is later: another writer may
    have committed since, or have a clock that is ahead. Pollers ask for answers after the latest that they know, and an
    earlier one would never reach them."""
    others = requests.alias()
    latest = sql.select(sql.func.coalesce(sql.func.max(others.c.finished), 0.0)).scalar_subquery()
    return sql.case((latest + ANSWER_STEP_S > now, latest + ANSWER_STEP_S), else_=now)


def _failure_columns(message: str, category: ErrorCategory = "user") -> dict[str, Any]:
    """Returns the columns of a request that is answered with an error now."""
    result = StoredAnswer.failure("", message, category).result
    finished = _next_finished(time.time())
    return {"state": "failed", "result": result, "result_kind": "json", "finished": finished}


def _answer_parameters(done: StoredAnswer) -> dict[str, Any]:
    """Returns the parameters of `_ANSWER`."""
    state: RequestState = "failed" if done.failed else "done"
    return {"of": done.id, "to": state, "answer": done.result, "answer_kind": done.kind, "now": time.time()}


_ANSWER = (
    sql.update(requests)
    .where(requests.c.id == sql.bindparam("of"))
    .values(
        state=sql.bindparam("to"),
        result=sql.bindparam("answer"),
        result_kind=sql.bindparam("answer_kind"),
        finished=_next_finished(sql.bindparam("now", type_=sql.Float)),
        body=None,
    )
)
"""Statement that answers a request. It is built once: building takes as long as an answer of a small base."""
_ANY_QUEUED = sql.select(requests.c.serial).where(requests.c.state == "queued").limit(1)
