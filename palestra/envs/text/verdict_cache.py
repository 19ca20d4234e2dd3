"""Verdicts that were paid for: kept in memory for the life of the process and, with a path, in an SQLite file.

The file holds a row for each question, `key` (SHA-256 of model and question), `model`, and the scores of `pro` and
`con`. Rows are only ever added, and the first verdict stands, so several processes may share it.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

Scores = tuple[float, float]
MOST = 100_000  # verdicts in memory; the oldest go first
WAIT = 30.0  # seconds for another process to finish writing
_TABLE = "CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, model TEXT, pro REAL, con REAL) WITHOUT ROWID"
_memory: dict[str, Scores] = {}


def open_cache(path: Path) -> None:
    """Make the file if it is not there. Raises ValueError where it cannot be one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _on_disk(path, lambda database: None)


async def known(path: Path | None, key: str) -> Scores | None:
    """The verdict for `key`, if there is one."""
    if key not in _memory and path:
        row = await asyncio.to_thread(_on_disk, path, lambda database: _row(database, key))
        if row:
            _keep(key, row)
    return _memory.get(key)


async def remember(path: Path | None, key: str, model: str, scores: Scores) -> Scores:
    """Keep a verdict; the one that stands, which is another process's where that was faster."""

    def add(database: sqlite3.Connection) -> Scores | None:
        database.execute("INSERT OR IGNORE INTO verdicts VALUES (?, ?, ?, ?)", (key, model, *scores))
        database.commit()
        return _row(database, key)

    standing = await asyncio.to_thread(_on_disk, path, add) if path else scores
    return _keep(key, standing or scores)


def _row(database: sqlite3.Connection, key: str) -> Scores | None:
    found: Scores | None = database.execute("SELECT pro, con FROM verdicts WHERE key = ?", (key,)).fetchone()
    return found


def _keep(key: str, scores: Scores) -> Scores:
    while len(_memory) >= MOST:
        del _memory[next(iter(_memory))]
    return _memory.setdefault(key, scores)


def _on_disk(path: Path, use: Callable[[sqlite3.Connection], Scores | None]) -> Scores | None:
    try:
        with closing(sqlite3.connect(path, timeout=WAIT)) as database:
            database.execute(_TABLE)
            return use(database)
    except sqlite3.Error as error:
        raise ValueError(
            f"cannot keep verdicts in {path}: {error}; name another file as judge.cache, or remove that one"
        ) from error
