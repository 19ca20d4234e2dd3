"""Transactions on one SQLite or PostgreSQL database, with handling of outages."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count
from typing import Any, TypeVar

import sqlalchemy as sql
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, NoSuchModuleError, OperationalError

OUTAGE_ERRORS = (
    OperationalError,
    InterfaceError,
    sql.exc.TimeoutError,
)  # temporary: locked, restarted, no free connection
BUSY_TIMEOUT_MS = 10_000  # milliseconds that SQLite waits for a lock
MAX_CONNECTIONS = 40  # at most: one for each thread of the front end's pool

T = TypeVar("T")
ErrorHandler = Callable[[Exception, int], None]


def raise_error(error: Exception, attempt: int) -> None:
    """Raises the error: the error handler of callers whose client gets the error."""
    raise error


class Database:
    """Transactions on one database; safe to use from several threads.

    If the database does not answer, `on_error` is called with the error and the number of the attempt; it raises, or
    returns to retry the transaction. A retried transaction may be executed twice, if only its acknowledgement was lost.
    `had_outage` is set to True by every such error and must be reset by the caller.
    """

    def __init__(self, url: str, on_error: ErrorHandler = raise_error) -> None:
        self.engine = _engine(url)
        self.on_error = on_error
        self.had_outage = False
        # SQLite has one writer at a time and blocked writers sleep with growing pauses: a lock is faster
        lite = self.engine.dialect.name == "sqlite"
        self._turn: AbstractContextManager[Any] = threading.Lock() if lite else contextlib.nullcontext()

    def __str__(self) -> str:
        return self.engine.url.render_as_string(hide_password=True)

    def read(self, work: Callable[[sql.Connection], T]) -> T:
        """Runs `work` on a connection and returns its result."""
        return self._run(self.engine.connect, work)

    def write(self, work: Callable[[sql.Connection], T]) -> T:
        """Runs `work` in a transaction that is committed, and returns its result."""
        with self._turn:
            return self._run(self.engine.begin, work)

    def _run(
        self, transaction: Callable[[], AbstractContextManager[sql.Connection]], work: Callable[[sql.Connection], T]
    ) -> T:
        for attempt in count():
            try:
                with transaction() as connection:
                    return work(connection)
            except OUTAGE_ERRORS as error:
                self.had_outage = True
                self.on_error(error, attempt)
        raise AssertionError("count() does not end")


def _engine(url: str) -> sql.Engine:
    """Opens the database. Raises ValueError if the URL is of another kind, the driver is not installed, or the database
    cannot be opened."""
    try:
        parsed = sql.make_url(url)
    except ArgumentError:
        raise ValueError(_url_format(url)) from None
    if parsed.get_backend_name() not in ("sqlite", "postgresql"):
        raise ValueError(_url_format(parsed.render_as_string(hide_password=True)))
    try:
        if parsed.get_backend_name() == "sqlite":
            engine = sql.create_engine(parsed)
            sql.event.listen(engine, "connect", _sqlite)
        else:
            engine = sql.create_engine(parsed, pool_size=5, max_overflow=MAX_CONNECTIONS - 5, pool_pre_ping=True)
        with engine.connect():
            return engine  # only checks that the database answers
    except (ImportError, NoSuchModuleError) as error:
        raise ValueError(f"no driver for {_url_format(url)} ({error}): pip install 'palestra[postgres]'") from None
    except DBAPIError as error:
        shown = parsed.render_as_string(hide_password=True)
        raise ValueError(f"cannot open the database {shown}: {first_line(error)}") from None


def _url_format(url: str) -> str:
    return f'the database "{url}": write sqlite:///FILE or postgresql+psycopg://USER:PASSWORD@HOST/NAME'


def first_line(error: Exception) -> str:
    """Returns the first line of the driver's message, without the statement and its values."""
    message = str(getattr(error, "orig", None) or error).strip()
    return message.splitlines()[0] if message else type(error).__name__


def _sqlite(connection: Any, _record: Any) -> None:
    """Sets the SQLite pragmas of a new connection.

    WAL lets readers and one writer work at once. `synchronous=FULL` would wait for the disk at every commit: data that
    must survive a power failure is in the weight store, whose folders are synced, and a killed process loses nothing
    that was committed.
    """
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", f"busy_timeout={BUSY_TIMEOUT_MS}"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()
