"""What the worker has to tell: answers, and changes of rows, on their way to the store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sql

from palestra.service.database import AWAY
from palestra.service.store import Category, Done, Store
from palestra.service.tables import Change


@dataclass
class Outbox:
    """Answers and changes that the store has not yet seen; `flush` writes them in one transaction."""

    store: Store
    answers: list[Done] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)

    def say(self, row: sql.Row, **values: Any) -> None:
        self.answers.append(Done.json(row.id, **values))

    def fail(self, row: sql.Row, error: Exception) -> None:
        self.answers.append(Done.failure(row.id, _message(error), _category(error)))

    def guarded(self, row: sql.Row, work: Callable[[], Any]) -> Any:
        """What `work` returns; where it fails, None, and the request is answered with its error. A database that is
        given up is no request's failure."""
        try:
            return work()
        except AWAY:
            raise
        except Exception as error:  # the boundary between clients: a failure is an answer
            self.fail(row, error)
            return None

    def flush(self) -> bool:
        """Whether there was anything to write."""
        if not self.answers and not self.changes:
            return False
        self.store.finish(self.answers, self.changes)
        self.answers, self.changes = [], []
        return True


def _category(error: Exception) -> Category:
    return "user" if isinstance(error, ValueError) else "server"


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
