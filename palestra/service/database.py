"""One database, SQLite or PostgreSQL: its transactions, and what is done while it does not answer."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count
from typing import Any, TypeVar

import sqlalchemy as sql
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, NoSuchModuleError, OperationalError

AWAY = (OperationalError, InterfaceError, sql.exc.TimeoutError)  # what may pass: locked, restarted, no connection free
BUSY = 10_000  # milliseconds that SQLite waits for a lock
CONNECTIONS = 40  # as many as there are threads that ask

T = TypeVar("T")
Trouble = Callable[[Exception, int], None]


def give_up(error: Exception, attempt: int) -> None:
    """The trouble of those who have a client to tell."""
    raise error


class Database:
    """Transactions on one database; safe to use from several threads.

    Where the database does not answer, `trouble` is told the error and the number of the attempt: it raises, or returns
    when the transaction is to be tried again. It may then be carried out twice, where only its acknowledgement was
    lost. `troubled` is true from then on, until somebody sets it back.
    """

    def __init__(self, url: str, trouble: Trouble = give_up) -> None:
        self.engine, self.trouble, self.troubled = _engine(url), trouble, False
        # SQLite has one writer at a time, and those who find it busy sleep, longer each time: threads take turns
        lite = self.engine.dialect.name == "sqlite"
        self._turn: AbstractContextManager[Any] = threading.Lock() if lite else contextlib.nullcontext()

    def __str__(self) -> str:
        return self.engine.url.render_as_string(hide_password=True)

    def read(self, work: Callable[[sql.Connection], T]) -> T:
        return self._tried(self.engine.connect, work)

    def write(self, work: Callable[[sql.Connection], T]) -> T:
        with self._turn:
            return self._tried(self.engine.begin, work)

    def _tried(
        self, transaction: Callable[[], AbstractContextManager[sql.Connection]], work: Callable[[sql.Connection], T]
    ) -> T:
        for attempt in count():
            try:
                with transaction() as connection:
                    return work(connection)
            except AWAY as error:
                self.troubled = True
                self.trouble(error, attempt)
        raise AssertionError("count() does not end")


def _engine(url: str) -> sql.Engine:
    """Raises ValueError for a URL of another kind, a driver that is not installed, or a database that is not there."""
    try:
        parsed = sql.make_url(url)
    except ArgumentError:
        raise ValueError(_wanted(url)) from None
    if parsed.get_backend_name() not in ("sqlite", "postgresql"):
        raise ValueError(_wanted(parsed.render_as_string(hide_password=True)))
    try:
        if parsed.get_backend_name() == "sqlite":
            engine = sql.create_engine(parsed)
            sql.event.listen(engine, "connect", _sqlite)
        else:
            engine = sql.create_engine(parsed, pool_size=5, max_overflow=CONNECTIONS - 5, pool_pre_ping=True)
        with engine.connect():
            return engine  # an answer is all that was wanted
    except (ImportError, NoSuchModuleError) as error:
        raise ValueError(f"no driver for {_wanted(url)} ({error}): pip install 'palestra[postgres]'") from None
    except DBAPIError as error:
        shown = parsed.render_as_string(hide_password=True)
        raise ValueError(f"cannot open the database {shown}: {first_line(error)}") from None


def _wanted(url: str) -> str:
    return f'the database "{url}": write sqlite:///FILE or postgresql+psycopg://USER:PASSWORD@HOST/NAME'


def first_line(error: Exception) -> str:
    """What the driver said, without the statement and its values."""
    said = str(getattr(error, "orig", None) or error).strip()
    return said.splitlines()[0] if said else type(error).__name__


def _sqlite(connection: Any, _record: Any) -> None:
    """WAL lets readers and one writer work at once. FULL would wait for the disk at every commit: what must survive a
    power cut lies in the vault, whose folders are synced, and a killed process loses nothing that was committed."""
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", f"busy_timeout={BUSY}"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()
