"""Results of the worker that are not yet written to the store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sql

from palestra.service.storage.database import OUTAGE_ERRORS
from palestra.service.storage.store import ErrorCategory, Store, StoredAnswer


@dataclass
class Outbox:
    """Pending answers and statements that change rows; `flush` writes them in one transaction."""

    store: Store
    answers: list[StoredAnswer] = field(default_factory=list)
    updates: list[sql.Executable] = field(default_factory=list)

    def add_answer(self, row: sql.Row, **values: Any) -> None:
        """Adds a successful JSON answer to the request `row`."""
        self.answers.append(StoredAnswer.json(row.id, **values))

    def fail(self, row: sql.Row, error: Exception) -> None:
        """Adds a failed answer to the request `row`."""
        self.answers.append(StoredAnswer.failure(row.id, _message(error), _category(error)))

    def run_guarded(self, row: sql.Row, work: Callable[[], Any]) -> Any:
        """Returns the result of `work`. If it raises, answers the request with the error and returns None; errors of
        the database propagate, since they are not the request's fault."""
        try:
            return work()
        except OUTAGE_ERRORS:
            raise
        except Exception as error:  # isolates clients: a failure becomes an answer
            self.fail(row, error)
            return None

    def flush(self) -> bool:
        """Writes everything pending. Returns False if there was nothing to write."""
        if not self.answers and not self.updates:
            return False
        self.store.write_answers(self.answers, self.updates)
        self.answers = []
        self.updates = []
        return True


def _category(error: Exception) -> ErrorCategory:
    return "user" if isinstance(error, ValueError) else "server"


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
