"""Results of the worker that are not yet written to the store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sql

from palestra.service.storage.database import OUTAGE_ERRORS
from palestra.service.storage.store import Store, StoredAnswer
from palestra.service.storage.tables import TableRow


@dataclass
class Outbox:
    """Pending answers and statements that change rows; `flush` writes them in one transaction."""

    store: Store
    answers: list[StoredAnswer] = field(default_factory=list)
    updates: list[sql.Executable] = field(default_factory=list)

    def add_answer(self, row: TableRow, **values: Any) -> None:
        """Adds a successful JSON answer to the request `row`."""
        self.answers.append(StoredAnswer.json(row.id, **values))

    def fail(self, row: TableRow, error: Exception) -> None:
        """Adds a failed answer to the request `row`."""
        if isinstance(error, ValueError):
            answer = StoredAnswer.failure(row.id, str(error))
        else:
            answer = StoredAnswer.failure(row.id, f"{type(error).__name__}: {error}", "server")
        self.answers.append(answer)

    def run_guarded(self, row: TableRow, work: Callable[[], Any]) -> Any:
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
