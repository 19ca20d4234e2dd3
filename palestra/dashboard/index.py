"""The episodes of a run that filters look through, gathered from its files while the server does other things.

A run of 10,000 steps has 10,000 files, and to look into each takes longer than a person waits. So a thread goes through
them from the newest back, what it has found so far is there to be asked at once, and how much is missing is said. What
was found is kept in the user's cache folder, never in the run, so that the next server begins where this one ended.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from palestra.dashboard.digest import digest
from palestra.files import replaced

CHUNK = 64  # files that are read at once
PATIENCE = 0.2
FORM = 1  # of the kept table; another number makes it anew
NAME = re.compile(r"step-(\d+)\.parquet")
STAMP = "stamp"  # the column that says which version of its file a row is of
EMPTY = pa.table({"step": pa.array([], pa.int32()), STAMP: pa.array([], pa.int64())})


class EpisodeIndex:
    """The digests of the episode files in `folder`. `cache` is the file that keeps them, None for no such file."""

    def __init__(self, folder: Path, cache: Path | None = None) -> None:
        self.folder, self.cache = folder, cache
        self.broken: dict[int, str] = {}  # by step, why its file cannot be read
        self._table = EMPTY
        self._known: dict[int, int] = {}  # by step, the version of its file that the table has
        self._missing: dict[int, int] = {}
        self._seen = -1  # the folder's time of change when it was last looked at
        self._lock = threading.Lock()
        self._worker: threading.Thread | None = None

    def table(self, patience: float = PATIENCE) -> tuple[pa.Table, int]:
        """What is known by now, by step and episode, and how many files are not in it yet. Waits as long as `patience`
        (seconds) for all of them, so that a few are never missing."""
        self._look()
        worker = self._worker
        if worker and self._missing:
            worker.join(patience)
        with self._lock:
            return self._table, len(self._missing)

    def _look(self) -> None:
        """Note which files are new, changed and gone, if the folder has changed."""
        with self._lock:
            changed = self.folder.stat().st_mtime_ns if self.folder.is_dir() else 0
            if changed != self._seen:
                if self._seen == -1:
                    self._recall()
                self._seen = changed
                self._compare(versions(self.folder))
            if self._missing and not (self._worker and self._worker.is_alive()):
                self._worker = threading.Thread(target=self._work, name=f"index {self.folder}", daemon=True)
                self._worker.start()

    def _compare(self, now: dict[int, int]) -> None:
        stale = [step for step, stamp in self._known.items() if now.get(step) != stamp]
        if stale:
            gone = pc.is_in(self._table["step"], value_set=pa.array(stale, pa.int32()))
            self._table = self._table.filter(pc.invert(gone))
            for step in stale:
                del self._known[step]
        self._missing = {step: stamp for step, stamp in now.items() if step not in self._known}
        self.broken = {step: why for step, why in self.broken.items() if step in self._known}

    def _work(self) -> None:
        fresh = 0
        while chunk := self._next():
            found, broken = self._read(chunk)
            with self._lock:
                self._take(chunk, found, broken)
            fresh += len(chunk)
        if fresh >= CHUNK:
            self._keep()

    def _next(self) -> dict[int, int]:
        """The newest files that are missing; the first few of them alone, so that something is there at once."""
        with self._lock:
            size = CHUNK if self._known else 8
            return dict(sorted(self._missing.items(), reverse=True)[:size])

    def _read(self, chunk: dict[int, int]) -> tuple[list[pa.Table], dict[int, str]]:
        try:
            return [self._stamped(sorted(chunk), chunk)], {}
        except ValueError:  # one of them is broken, or gone: one by one
            return self._read_each(chunk)

    def _read_each(self, chunk: dict[int, int]) -> tuple[list[pa.Table], dict[int, str]]:
        found, broken = [], {}
        for step in sorted(chunk):
            try:
                found.append(self._stamped([step], chunk))
            except ValueError as error:
                broken[step] = str(error)
        return found, broken

    def _stamped(self, steps: list[int], stamps: dict[int, int]) -> pa.Table:
        table = digest([self.folder / f"step-{step:06d}.parquet" for step in steps])
        return table.append_column(STAMP, pa.array([stamps[step] for step in table["step"].to_pylist()], pa.int64()))

    def _take(self, chunk: dict[int, int], found: list[pa.Table], broken: dict[int, str]) -> None:
        self._table = in_order([self._table, *found])
        self.broken |= broken
        for step, stamp in chunk.items():
            self._known[step] = stamp
            if self._missing.get(step) == stamp:
                del self._missing[step]

    def _recall(self) -> None:
        if self.cache and self.cache.exists():
            try:
                self._table = pq.read_table(self.cache)
            except (OSError, pa.ArrowInvalid):
                return  # a cache is only a cache
            pairs = self._table.select(["step", STAMP]).group_by(["step", STAMP]).aggregate([])
            self._known = dict(zip(pairs["step"].to_pylist(), pairs[STAMP].to_pylist(), strict=True))

    def _keep(self) -> None:
        if self.cache:
            try:
                with replaced(self.cache) as temporary:
                    pq.write_table(self._table, temporary, compression="zstd")
            except OSError:
                self.cache = None  # a full or read-only disk: go on without


def versions(folder: Path) -> dict[int, int]:
    """The episode files of a folder: step -> a number that changes when the file does."""
    if not folder.is_dir():
        return {}
    with os.scandir(folder) as entries:
        files = [entry for entry in entries if _step(entry.name) >= 0 and entry.is_file(follow_symlinks=False)]
        return {_step(file.name): _version(file.stat()) for file in files}


def _step(name: str) -> int:
    found = NAME.fullmatch(name)
    return int(found[1]) if found else -1


def _version(stat: os.stat_result) -> int:
    return stat.st_mtime_ns ^ stat.st_size << 1


def in_order(tables: Iterable[pa.Table]) -> pa.Table:
    """One table by step and episode; a column that some lack is null there."""
    whole = pa.concat_tables([table for table in tables if len(table)] or [EMPTY], promote_options="default")
    if len(whole):
        whole = whole.take(pc.sort_indices(whole, [("step", "ascending"), ("episode", "ascending")]))
    return whole.combine_chunks()


def cache_file(folder: Path) -> Path:
    """Where the index of the episodes in `folder` is kept between servers."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:32]
    return root / "palestra" / "dashboard" / f"{name}-{FORM}.parquet"
