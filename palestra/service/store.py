"""What a restart must know, in one database: sessions, models, samplers, checkpoints, every request and its answer.

The table of requests is the queue between the front ends, which add rows, and the engine's worker, which takes them and
writes answers. A request is `queued`, then `taken`, then `done` or `failed`; it is kept for a day, so that an answer
can be read again. Its `key` (a model's or sampler's sequence number) is unique: a request sent twice is one row.

SQLite in WAL mode serves one machine, PostgreSQL several front ends. Times are seconds since 1970.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Self

import sqlalchemy as sql
from sqlalchemy.exc import IntegrityError

State = Literal["queued", "taken", "done", "failed"]
ResultKind = Literal["json", "forward_backward", "sample"]
Category = Literal["user", "server", "unknown"]
KEPT = 24 * 3600.0  # seconds that an answer stays readable
TAKES = 4  # deaths of a worker that a request may be part of

_meta = sql.MetaData()
_id = sql.String(400)

sessions = sql.Table(
    "sessions",
    _meta,
    sql.Column("id", _id, primary_key=True),
    sql.Column("owner", sql.String(200), nullable=False, index=True),
    sql.Column("created", sql.Float, nullable=False),
    sql.Column("seen", sql.Float, nullable=False),  # the last heartbeat or request
    sql.Column("finished", sql.Float),
    sql.Column("info", sql.JSON, nullable=False),
)
models = sql.Table(
    "models",
    _meta,
    sql.Column("id", _id, primary_key=True),
    sql.Column("session", _id, nullable=False, index=True),
    sql.Column("owner", sql.String(200), nullable=False, index=True),
    sql.Column("base", _id, nullable=False),
    sql.Column("lora", sql.JSON, nullable=False),  # rank, seed, train_mlp, train_attn, train_unembed
    sql.Column("info", sql.JSON, nullable=False),
    sql.Column("created", sql.Float, nullable=False),
    sql.Column("used", sql.Float, nullable=False),
    # live: in memory or to be had from `saved`; lost: changed after it was last saved, when the engine died
    sql.Column("state", sql.String(16), nullable=False),
    sql.Column("changed", sql.BigInteger, nullable=False),  # sequence number of the last request that changed it
    sql.Column("kept", sql.BigInteger, nullable=False),  # that number when it was last saved
    sql.Column("saved", sql.Text),  # where: a folder of the vault
)
samplers = sql.Table(
    "samplers",
    _meta,
    sql.Column("id", _id, primary_key=True),
    sql.Column("session", _id, nullable=False, index=True),
    sql.Column("owner", sql.String(200), nullable=False),
    sql.Column("base", _id, nullable=False),
    sql.Column("path", sql.Text),  # tinker:// path it was made from
    sql.Column("folder", sql.Text),  # weights in the vault; null: the bare base
    sql.Column("created", sql.Float, nullable=False),
)
checkpoints = sql.Table(
    "checkpoints",
    _meta,
    sql.Column("path", sql.String(600), primary_key=True),
    sql.Column("owner", sql.String(200), nullable=False, index=True),
    sql.Column("run", _id, nullable=False, index=True),
    sql.Column("kind", sql.String(16), nullable=False),  # training, sampler, external
    sql.Column("base", _id, nullable=False),
    sql.Column("lora", sql.JSON, nullable=False),
    sql.Column("folder", sql.Text, nullable=False),
    sql.Column("size", sql.BigInteger, nullable=False),
    sql.Column("created", sql.Float, nullable=False),
    sql.Column("expires", sql.Float),
    sql.Column("public", sql.Boolean, nullable=False),
    sql.Column("info", sql.JSON, nullable=False),
)
requests = sql.Table(
    "requests",
    _meta,
    sql.Column("serial", sql.BigInteger().with_variant(sql.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sql.Column("id", sql.String(32), nullable=False, unique=True),
    sql.Column("owner", sql.String(200), nullable=False, index=True),
    sql.Column("kind", sql.String(32), nullable=False),
    sql.Column("key", sql.String(600), unique=True),
    sql.Column("model", _id, index=True),
    sql.Column("seq", sql.BigInteger),
    sql.Column("state", sql.String(8), nullable=False, index=True),
    sql.Column("takes", sql.Integer, nullable=False, server_default="0"),  # how often a worker took it
    sql.Column("body", sql.LargeBinary),
    sql.Column("result", sql.LargeBinary),
    sql.Column("result_kind", sql.String(20)),
    sql.Column("created", sql.Float, nullable=False),
    sql.Column("finished", sql.Float),
)


@dataclass(frozen=True)
class Done:
    """The answer to a request: `result` is JSON, or protobuf where `kind` says so."""

    id: str
    result: bytes
    kind: ResultKind = "json"
    failed: bool = False

    @classmethod
    def json(cls, id: str, **values: Any) -> Self:
        return cls(id, json.dumps(values).encode())

    @classmethod
    def failure(cls, id: str, message: str, category: Category = "user") -> Self:
        return cls(id, json.dumps({"error": message, "category": category}).encode(), failed=True)


class Store:
    """Queries on one database; safe to use from several threads and processes."""

    def __init__(self, engine: sql.Engine) -> None:
        self._engine = engine
        self._turn = threading.Lock()
        _meta.create_all(engine)
        found = sql.inspect(engine)
        for table in _meta.sorted_tables:
            missing = set(table.c.keys()) - {column["name"] for column in found.get_columns(table.name)}
            if missing:
                raise ValueError(
                    f"the database {engine.url} was made by another version of palestra: its {table.name} have no "
                    f"{sorted(missing)[0]}. Serve with another --data (or --store), or with that version."
                )

    @classmethod
    def open(cls, url: str) -> Self:
        """The database at `url` (`sqlite:///path` or `postgresql+psycopg://...`), made if it is new."""
        engine = sql.create_engine(url)
        if engine.dialect.name == "sqlite":
            sql.event.listen(engine, "connect", _sqlite)
        return cls(engine)

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def _writing(self) -> Iterator[sql.Connection]:
        """A transaction that writes. The threads of a process take turns: SQLite has one writer at a time, and those
        who find it busy sleep, longer each time."""
        with self._turn, self._engine.begin() as connection:
            yield connection

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(
        self,
        owner: str,
        kind: str,
        body: bytes,
        *,
        key: str | None = None,
        model: str | None = None,
        seq: int | None = None,
    ) -> str:
        """Queues a request and returns its id; where `key` was there already, the id of the earlier one."""
        return self._queue(owner=owner, kind=kind, body=body, key=key, model=model, seq=seq)

    def reject(self, owner: str, kind: str, message: str, *, key: str, model: str, seq: int) -> str:
        """Notes that request `seq` of a model was refused: it is queued with its answer, and nobody waits for it."""
        refusal = {"result": Done.failure("", message).result, "result_kind": "json"}
        return self._queue(owner=owner, kind=kind, key=key, model=model, seq=seq, **refusal)

    def _queue(self, *, key: str | None, **values: Any) -> str:
        row = values | {"id": uuid.uuid4().hex, "key": key, "state": "queued", "created": time.time()}
        try:
            with self._writing() as connection:
                connection.execute(sql.insert(requests).values(row))
        except IntegrityError:
            with self._engine.connect() as connection:
                found = connection.execute(sql.select(requests.c.id).where(requests.c.key == key)).scalar()
            if found is None:
                raise
            return str(found)
        return str(row["id"])

    def take(self) -> list[sql.Row]:
        """Every queued request in the order of arrival, now taken."""
        values = {"state": "taken", "takes": requests.c.takes + 1}
        statement = sql.update(requests).where(requests.c.state == "queued").values(values).returning(requests)
        with self._engine.connect() as connection:
            if connection.execute(_ANY_QUEUED).scalar() is None:  # a look costs no write lock
                return []
        with self._writing() as connection:
            return sorted(connection.execute(statement).all(), key=lambda row: row.serial)

    def give_back(self) -> None:
        """What a worker took and does not come to is queued again."""
        with self._writing() as connection:
            again = {"state": "queued", "takes": 0}
            connection.execute(sql.update(requests).where(requests.c.state == "taken").values(again))

    def put_back(self) -> None:
        """What a worker that died had taken is queued again; but what was under way at several deaths in a row may be
        their cause, and is answered."""
        message = f"the server's worker died {TAKES} times while this request was under way: make it smaller"
        poison = Done.failure("", message, "server")
        values = {"state": "failed", "result": poison.result, "result_kind": "json", "finished": time.time()}
        taken = requests.c.state == "taken"
        with self._writing() as connection:
            connection.execute(sql.update(requests).where(taken, requests.c.takes >= TAKES).values(values))
            connection.execute(sql.update(requests).where(taken).values(state="queued"))

    def finish(self, answers: Iterable[Done], changes: Iterable[Change] = ()) -> None:
        """Writes answers, and what their execution changed, in one transaction."""
        now = time.time()
        with self._writing() as connection:
            for change in changes:
                connection.execute(change.statement)
            for done in answers:
                state: State = "failed" if done.failed else "done"
                values = {"state": state, "result": done.result, "result_kind": done.kind, "finished": now}
                connection.execute(sql.update(requests).where(requests.c.id == done.id).values(values | {"body": None}))

    def request(self, owner: str, id: str) -> sql.Row | None:
        return self._first(sql.select(requests).where(requests.c.id == id, requests.c.owner == owner))

    def finished(self, ids: Sequence[str]) -> set[str]:
        """Those of `ids` that have their answer."""
        found = sql.select(requests.c.id).where(requests.c.id.in_(ids), requests.c.state.in_(("done", "failed")))
        with self._engine.connect() as connection:
            return set(connection.execute(found).scalars())

    def cancel(self, owner: str, id: str) -> bool:
        """Answers a sample that nobody has begun with "cancelled"; False where it is too late or there is none such."""
        done = Done.failure(id, "cancelled by its client")
        mine = (
            requests.c.id == id,
            requests.c.owner == owner,
            requests.c.kind == "sample",
            requests.c.state == "queued",
        )
        values = {"state": "failed", "result": done.result, "result_kind": done.kind, "finished": time.time()}
        with self._writing() as connection:
            return connection.execute(sql.update(requests).where(*mine).values(values | {"body": None})).rowcount > 0

    def waiting(self, owner: str | None = None) -> int:
        """How many requests have no answer yet, of `owner` or of all."""
        count = sql.select(sql.func.count()).where(requests.c.state.in_(("queued", "taken")))
        if owner is not None:
            count = count.where(requests.c.owner == owner)
        with self._engine.connect() as connection:
            return int(connection.execute(count).scalar_one())

    def last_seq(self, model: str) -> int:
        """The highest sequence number of a model's answered requests; -1 where there is none. Its creation is number 0,
        and what clients number begins at 1."""
        answered = requests.c.state.in_(("done", "failed"))
        highest = sql.select(sql.func.max(requests.c.seq)).where(requests.c.model == model, answered)
        with self._engine.connect() as connection:
            found = connection.execute(highest).scalar()
        return -1 if found is None else int(found)

    def expire(self, now: float) -> None:
        """Removes the answers of yesterday, checkpoints past their time, and samplers of sessions nobody has used."""
        over = sql.select(sessions.c.id).where(sessions.c.seen < now - KEPT)
        with self._writing() as connection:
            connection.execute(sql.delete(requests).where(requests.c.finished < now - KEPT))
            connection.execute(sql.delete(checkpoints).where(checkpoints.c.expires < now))
            connection.execute(sql.delete(samplers).where(samplers.c.session.in_(over)))

    def folders(self) -> set[str]:
        """Every folder of the vault that a row names."""
        columns = (checkpoints.c.folder, samplers.c.folder, models.c.saved)
        with self._engine.connect() as connection:
            return {name for column in columns for name in connection.execute(sql.select(column)).scalars() if name}

    # -- rows of the other tables --------------------------------------------------------------------------------------

    def add(self, table: sql.Table, **values: Any) -> bool:
        """Inserts a row; False where its primary key is taken."""
        try:
            with self._writing() as connection:
                connection.execute(sql.insert(table).values(values))
        except IntegrityError:
            return False
        return True

    def get(self, table: sql.Table, id: str) -> sql.Row | None:
        """The row with this primary key."""
        (column,) = table.primary_key.columns
        return self._first(sql.select(table).where(column == id))

    def change(self, table: sql.Table, id: str, **values: Any) -> None:
        self.apply([Change.of(table, id, **values)])

    def apply(self, changes: Iterable[Change]) -> None:
        """Several changes in one transaction."""
        with self._writing() as connection:
            for change in changes:
                connection.execute(change.statement)

    def find(self, table: sql.Table, *where: sql.ColumnElement[bool], limit: int = 1000, offset: int = 0) -> list:
        """Rows that match, newest first."""
        query = sql.select(table).where(*where).order_by(table.c.created.desc()).limit(limit).offset(offset)
        with self._engine.connect() as connection:
            return list(connection.execute(query).all())

    def count(self, table: sql.Table, *where: sql.ColumnElement[bool]) -> int:
        with self._engine.connect() as connection:
            return int(connection.execute(sql.select(sql.func.count()).select_from(table).where(*where)).scalar_one())

    def _first(self, query: sql.Select) -> sql.Row | None:
        with self._engine.connect() as connection:
            return connection.execute(query).first()


@dataclass(frozen=True)
class Change:
    """One statement that changes a row, to be carried out together with others."""

    statement: sql.Executable

    @classmethod
    def of(cls, table: sql.Table, id: str, **values: Any) -> Self:
        (column,) = table.primary_key.columns
        return cls(sql.update(table).where(column == id).values(values))

    @classmethod
    def put(cls, table: sql.Table, values: Mapping[str, Any]) -> list[Self]:
        """A row in place of the one with its primary key, if there is one."""
        (column,) = table.primary_key.columns
        return [
            cls(sql.delete(table).where(column == values[column.name])),
            cls(sql.insert(table).values(dict(values))),
        ]

    @classmethod
    def drop(cls, table: sql.Table, id: str) -> Self:
        (column,) = table.primary_key.columns
        return cls(sql.delete(table).where(column == id))


_ANY_QUEUED = sql.select(requests.c.serial).where(requests.c.state == "queued").limit(1)


def _sqlite(connection: Any, _record: Any) -> None:
    """WAL lets readers and one writer work at once. FULL would wait for the disk at every commit: what must survive a
    power cut lies in the vault, whose folders are synced, and a killed process loses nothing that was committed."""
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=10000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()
