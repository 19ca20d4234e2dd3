"""Cache of judge verdicts: in memory for the life of the process and, with a path, in an SQLite file.

The file has one row per question: `key` (SHA-256 of model, request body and question), `model`, scores `pro` and `con`.
Rows are only added and the first verdict for a key is final, so several processes may share the file.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

ScorePair = tuple[float, float]
MAX_MEMORY_ENTRIES = 100_000  # maximum verdicts in memory; the oldest are dropped first
LOCK_TIMEOUT_S = 30.0  # seconds to wait for another process to finish writing
_TABLE = "CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, model TEXT, pro REAL, con REAL) WITHOUT ROWID"
_memory: dict[str, ScorePair] = {}


def open_cache(path: Path) -> None:
    """Creates the file, and its folder, if they do not exist. Raises ValueError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(path, error) from error
    _on_disk(path, lambda database: None)


async def find_verdict(path: Path | None, key: str) -> ScorePair | None:
    """Returns the verdict for `key`, None if there is none. Raises ValueError if the file cannot be read."""
    if key not in _memory and path:
        row = await asyncio.to_thread(_on_disk, path, lambda database: _row(database, key))
        if row:
            _keep(key, row)
    return _memory.get(key)


async def store_verdict(path: Path | None, key: str, model: str, scores: ScorePair) -> ScorePair:
    """Stores a verdict and returns the final one, which may be an earlier one of another process.

    Raises ValueError if the file cannot be written.
    """

    def add(database: sqlite3.Connection) -> ScorePair | None:
        database.execute("INSERT OR IGNORE INTO verdicts VALUES (?, ?, ?, ?)", (key, model, *scores))
        database.commit()
        return _row(database, key)

    standing = await asyncio.to_thread(_on_disk, path, add) if path else scores
    return _keep(key, standing or scores)


def _row(database: sqlite3.Connection, key: str) -> ScorePair | None:
    found: ScorePair | None = database.execute("SELECT pro, con FROM verdicts WHERE key = ?", (key,)).fetchone()
    return found


def _keep(key: str, scores: ScorePair) -> ScorePair:
    while len(_memory) >= MAX_MEMORY_ENTRIES:
        del _memory[next(iter(_memory))]
    return _memory.setdefault(key, scores)


def _on_disk(path: Path, use: Callable[[sqlite3.Connection], ScorePair | None]) -> ScorePair | None:
    try:
        with closing(sqlite3.connect(path, timeout=LOCK_TIMEOUT_S)) as database:
            database.execute(_TABLE)
            return use(database)
    except sqlite3.Error as error:
        raise _unusable(path, error) from error


def _unusable(path: Path, error: Exception) -> ValueError:
    return ValueError(f"cannot keep verdicts in {path}: {error}; name another file as judge.cache, or remove that one")
