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
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from palestra.dashboard.columns import Columns
from palestra.dashboard.digest import digest
from palestra.dashboard.logs import FOREIGN
from palestra.files import replaced

CHUNK = 64  # files that are read at once
PATIENCE, BRIEF = 0.2, 0.02
TICK = 50_000_000  # nanoseconds that a disk's clock surely does not stand still
FORM = 1  # of the kept table; another number makes it anew
NAME = re.compile(r"step-(\d+)\.parquet")
UNFIT = (ValueError, *FOREIGN, pa.ArrowException)  # what a file may raise that is not as palestra writes it
STAMP = "stamp"  # the column that says which version of its file a row is of
EMPTY = pa.table({"step": pa.array([], pa.int32()), STAMP: pa.array([], pa.int64())})


class EpisodeIndex:
    """The digests of the episode files in `folder`. `cache` is the file that keeps them, None for no such file."""

    def __init__(self, folder: Path, cache: Path | None = None) -> None:
        self.folder, self.cache = folder, cache
        self.broken: dict[int, str] = {}  # by step, why its file cannot be read
        self._columns: Columns | None = None  # None where nothing was looked at yet
        self._known: dict[int, int] = {}  # by step, the version of its file that the table has
        self._missing: dict[int, int] = {}
        self._took = 0.0  # seconds of the last look at the files
        self._seen = -1  # the folder's time of change when it was last looked at
        self._lock = threading.Lock()
        self._keeping = threading.Lock()
        self._settled = threading.Event()  # nobody is at work, or the one who is only writes the cache
        self._settled.set()
        self._worker: threading.Thread | None = None

    def table(self, patience: float | None = None) -> tuple[pa.Table, int]:
        """What is known by now, by step and episode, and how many files are not in it yet."""
        columns, missing = self.columns(patience)
        return columns.table, missing

    def columns(self, patience: float | None = None) -> tuple[Columns, int]:
        """The same as arrays. Waits as long as `patience` (seconds) for what is missing, so that a few files are not;
        without one, longer where nothing is known than where there is something to be shown, and not at all where
        that is in vain."""
        self._begin()
        if patience is None:
            patience = PATIENCE if not (self._columns and len(self._columns)) else BRIEF if self._took < BRIEF else 0.0
        settled = self._settled.wait(patience)
        with self._lock:
            return self._columns or Columns(EMPTY), max(len(self._missing), int(not settled))

    def _begin(self) -> None:
        """Puts somebody to work where the folder has changed: a look at 10,000 files takes longer than a sort."""
        with self._lock:
            if not self._settled.is_set() or (self._changed() == self._seen and not self._missing):
                return
            self._settled.clear()
            self._worker = threading.Thread(target=self._work, name=f"index {self.folder}", daemon=True)
            self._worker.start()

    def _changed(self) -> int:
        return self.folder.stat().st_mtime_ns if self.folder.is_dir() else 0

    def _work(self) -> None:
        fresh = 0
        try:
            self._look()
            while chunk := self._next():
                self._take(chunk, *self._read(chunk))
                fresh += len(chunk)
        finally:
            self._settled.set()
        if fresh >= CHUNK:
            self._keep()

    def _look(self) -> None:
        """Notes which files are new, changed and gone."""
        if self._columns is None:
            self._recall()
        changed, start = self._changed(), time.monotonic()
        # A change in the same tick of the disk's clock as the last one would not show: look again later.
        late = time.time_ns() - changed > TICK
        now = versions(self.folder)
        stale = [step for step, stamp in self._known.items() if now.get(step) != stamp]
        table = without(self._table, stale) if stale else self._table
        with self._lock:
            self._seen = changed if late else -1
            for step in stale:
                del self._known[step]
            self._missing = {step: stamp for step, stamp in now.items() if step not in self._known}
            self.broken = {step: why for step, why in self.broken.items() if step in self._known}
            self._columns = self._columns if self._columns and not stale else Columns(table)
        self._took = time.monotonic() - start

    @property
    def _table(self) -> pa.Table:
        return self._columns.table if self._columns else EMPTY

    def _next(self) -> dict[int, int]:
        """The newest files that are missing; the first few of them alone, so that something is there at once."""
        with self._lock:
            size = CHUNK if self._known else 8
            return dict(sorted(self._missing.items(), reverse=True)[:size])

    def _read(self, chunk: dict[int, int]) -> tuple[list[pa.Table], dict[int, str]]:
        try:
            return [self._stamped(sorted(chunk), chunk)], {}
        except UNFIT:  # one of them is broken, or gone: one by one
            return self._read_each(chunk)

    def _read_each(self, chunk: dict[int, int]) -> tuple[list[pa.Table], dict[int, str]]:
        found, broken = [], {}
        for step in sorted(chunk):
            try:
                found.append(self._stamped([step], chunk))
            except UNFIT as error:
                broken[step] = str(error)
        return found, broken

    def _stamped(self, steps: list[int], stamps: dict[int, int]) -> pa.Table:
        table = digest([self.folder / f"step-{step:06d}.parquet" for step in steps])
        return table.append_column(STAMP, pa.array([stamps[step] for step in table["step"].to_pylist()], pa.int64()))

    def _take(self, chunk: dict[int, int], found: list[pa.Table], broken: dict[int, str]) -> None:
        columns = Columns(in_order([self._table, *found]))
        with self._lock:
            self._columns = columns
            self.broken |= broken
            for step, stamp in chunk.items():
                self._known[step] = stamp
                self._missing.pop(step, None)

    def _recall(self) -> None:
        if self.cache and self.cache.exists():
            try:
                table = pq.read_table(self.cache)
            except (OSError, pa.ArrowInvalid):
                return  # a cache is only a cache
            pairs = table.select(["step", STAMP]).group_by(["step", STAMP]).aggregate([])
            with self._lock:
                self._columns = Columns(table.combine_chunks())
                self._known = dict(zip(pairs["step"].to_pylist(), pairs[STAMP].to_pylist(), strict=True))

    def _keep(self) -> None:
        with self._keeping:  # another one may be at work by now, and be done soon
            if self.cache:
                try:
                    with replaced(self.cache) as temporary:
                        pq.write_table(self._table, temporary, compression="zstd")
                except OSError:
                    self.cache = None  # a full or read-only disk: go on without


def without(table: pa.Table, steps: list[int]) -> pa.Table:
    """The rows of other steps."""
    return table.filter(pc.invert(pc.is_in(table["step"], value_set=pa.array(steps, pa.int32()))))


def versions(folder: Path) -> dict[int, int]:
    """The episode files of a folder: step -> a number that changes when the file does."""
    if not folder.is_dir():
        return {}
    with os.scandir(folder) as entries:
        found = ((_step(entry.name), entry) for entry in entries if entry.is_file(follow_symlinks=False))
        return {step: version for step, file in found if step >= 0 and (version := _version(file)) is not None}


def _step(name: str) -> int:
    found = NAME.fullmatch(name)
    return int(found[1]) if found else -1


def _version(file: os.DirEntry[str]) -> int | None:
    """None for a file that was removed just now."""
    try:
        stat = file.stat()
    except FileNotFoundError:
        return None
    return stat.st_mtime_ns ^ stat.st_size << 1


def in_order(tables: Sequence[pa.Table]) -> pa.Table:
    """One table by step and episode, of tables that are so; a column that some lack is null there."""
    filled = [table for table in tables if len(table)] or [EMPTY]
    whole = pa.concat_tables(filled, promote_options="default")
    ends = [(table["step"][0].as_py(), table["step"][-1].as_py()) for table in filled if len(table)]
    if any(after[0] <= before[1] for before, after in pairwise(ends)):  # what a growing run adds comes last anyway
        whole = whole.take(pc.sort_indices(whole, [("step", "ascending"), ("episode", "ascending")]))
    return whole.combine_chunks()


def cache_file(folder: Path) -> Path:
    """Where the index of the episodes in `folder` is kept between servers."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:32]
    return root / "palestra" / "dashboard" / f"{name}-{FORM}.parquet"
