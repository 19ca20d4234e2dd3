"""The index of a run's episodes: their summaries, built on a thread while the server answers requests.

A run of 10,000 steps has 10,000 files, and reading them all takes longer than a request may. So a thread reads them
from the newest back; what is read so far can be queried at once, and the number of missing files is returned with it.
The result is cached in the user's cache folder, never in the run, so that the next server starts from it.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from palestra.core.files import replacing_file
from palestra.dashboard.episode_columns import EpisodeColumns
from palestra.dashboard.episode_summary import summarize_episodes
from palestra.runs.metric_log import PARSE_ERRORS

CHUNK_FILES = 64  # files read at once
# seconds: wait while nothing is known; wait when there are rows to show
FIRST_WAIT_S = 0.2
NEXT_WAIT_S = 0.02
CLOCK_RESOLUTION_NS = 50_000_000  # nanoseconds: an upper bound on the resolution of file modification times
CACHE_FORMAT = 1  # format version of the cached table; increase it to rebuild caches
FILE_NAME = re.compile(r"step-(\d+)\.parquet")
READ_ERRORS = (ValueError, *PARSE_ERRORS, pa.ArrowException)  # errors of files that palestra did not write
VERSION_COLUMN = "stamp"  # column with the version of the row's file
EMPTY_TABLE = pa.table({"step": pa.array([], pa.int32()), VERSION_COLUMN: pa.array([], pa.int64())})


class EpisodeIndex:
    """The summaries of the episode files in `folder`, stored in the file `cache`, if any."""

    def __init__(self, folder: Path, cache: Path | None = None) -> None:
        self.folder = folder
        self.cache = cache
        self.unreadable: dict[int, str] = {}  # step -> why its file cannot be read
        self._columns: EpisodeColumns | None = None  # None before the first scan
        self._known: dict[int, int] = {}  # step -> version of its file in the table
        self._missing: dict[int, int] = {}
        self._took = 0.0  # seconds that the last scan took
        self._seen = -1  # the folder's modification time at the last scan
        self._lock = threading.Lock()
        self._keeping = threading.Lock()
        self._settled = threading.Event()  # no worker runs, or it only writes the cache
        self._settled.set()
        self._worker: threading.Thread | None = None

    def table(self, timeout_s: float | None = None) -> tuple[pa.Table, int]:
        """Returns the rows known so far, by step and episode, and the number of files not yet included."""
        columns, missing = self.columns(timeout_s)
        return columns.table, missing

    def columns(self, timeout_s: float | None = None) -> tuple[EpisodeColumns, int]:
        """Returns the same as arrays, after waiting for missing files: `timeout_s` seconds, by
        default longer while nothing is known, and not at all if a scan takes longer."""
        self._begin()
        if timeout_s is None and not self._columns:
            timeout_s = FIRST_WAIT_S
        elif timeout_s is None and self._took < NEXT_WAIT_S:
            timeout_s = NEXT_WAIT_S
        elif timeout_s is None:
            timeout_s = 0.0
        settled = self._settled.wait(timeout_s)
        with self._lock:
            return self._columns or EpisodeColumns(EMPTY_TABLE), max(len(self._missing), int(not settled))

    def _begin(self) -> None:
        """Starts the worker thread if the folder changed: scanning 10,000 files takes longer than a sort."""
        with self._lock:
            if not self._settled.is_set() or (self._folder_mtime_ns() == self._seen and not self._missing):
                return
            self._settled.clear()
            self._worker = threading.Thread(target=self._work, name=f"index {self.folder}", daemon=True)
            self._worker.start()

    def _folder_mtime_ns(self) -> int:
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
        if fresh >= CHUNK_FILES:
            self._keep()

    def _look(self) -> None:
        """Finds the files that are new, changed or gone, and drops the rows of the latter two."""
        if self._columns is None:
            self._recall()
        changed = self._folder_mtime_ns()
        start = time.monotonic()
        # Another change within the clock's resolution would go unnoticed: scan again later.
        late = time.time_ns() - changed > CLOCK_RESOLUTION_NS
        now = file_versions(self.folder)
        stale = [step for step, stamp in self._known.items() if now.get(step) != stamp]
        table = self._table
        if stale:
            table = table.filter(pc.invert(pc.is_in(table["step"], value_set=pa.array(stale, pa.int32()))))
        with self._lock:
            self._seen = changed if late else -1
            for step in stale:
                del self._known[step]
            self._missing = {step: stamp for step, stamp in now.items() if step not in self._known}
            self.unreadable = {step: why for step, why in self.unreadable.items() if step in self._known}
            if stale or not self._columns:
                self._columns = EpisodeColumns(table)
        self._took = time.monotonic() - start

    @property
    def _table(self) -> pa.Table:
        return self._columns.table if self._columns else EMPTY_TABLE

    def _next(self) -> dict[int, int]:
        """Returns the newest missing files: 8 at first, so that there is a result soon."""
        with self._lock:
            size = CHUNK_FILES if self._known else 8
            return dict(sorted(self._missing.items(), reverse=True)[:size])

    def _read(self, chunk: dict[int, int]) -> tuple[list[pa.Table], dict[int, str]]:
        """Returns the tables of the files, and by step the error of each unreadable one."""
        try:
            return [self._summarize_steps(sorted(chunk), chunk)], {}
        except READ_ERRORS:  # one of them is broken, or gone: one by one
            tables = []
            broken = {}
            for step in sorted(chunk):
                try:
                    tables.append(self._summarize_steps([step], chunk))
                except READ_ERRORS as error:
                    broken[step] = str(error)
            return tables, broken

    def _summarize_steps(self, steps: list[int], stamps: dict[int, int]) -> pa.Table:
        """Returns the summaries of the files of these steps, with their versions in the column `VERSION_COLUMN`."""
        table = summarize_episodes([self.folder / f"step-{step:06d}.parquet" for step in steps])
        return table.append_column(
            VERSION_COLUMN, pa.array([stamps[step] for step in table["step"].to_pylist()], pa.int64())
        )

    def _take(self, chunk: dict[int, int], tables: list[pa.Table], broken: dict[int, str]) -> None:
        columns = EpisodeColumns(merge_sorted([self._table, *tables]))
        with self._lock:
            self._columns = columns
            self.unreadable |= broken
            for step, stamp in chunk.items():
                self._known[step] = stamp
                self._missing.pop(step, None)

    def _recall(self) -> None:
        """Loads the cache file, if it exists and can be read."""
        if self.cache and self.cache.exists():
            try:
                table = pq.read_table(self.cache)
            except (OSError, pa.ArrowInvalid):
                return  # rebuild instead
            pairs = table.select(["step", VERSION_COLUMN]).group_by(["step", VERSION_COLUMN]).aggregate([])
            with self._lock:
                self._columns = EpisodeColumns(table.combine_chunks())
                self._known = dict(zip(pairs["step"].to_pylist(), pairs[VERSION_COLUMN].to_pylist(), strict=True))

    def _keep(self) -> None:
        """Writes the cache file; a failure disables the cache."""
        with self._keeping:  # another worker may have started and finish soon
            if self.cache:
                try:
                    with replacing_file(self.cache) as temporary:
                        pq.write_table(self._table, temporary, compression="zstd")
                except OSError:
                    self.cache = None  # full or read-only disk: continue without a cache


def file_versions(folder: Path) -> dict[int, int]:
    """Returns step -> version (a number that changes when the file does) of the episode files in a folder."""
    if not folder.is_dir():
        return {}
    versions = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            name = FILE_NAME.fullmatch(entry.name)
            if name and entry.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):  # just removed
                    stat = entry.stat()
                    versions[int(name[1])] = stat.st_mtime_ns ^ stat.st_size << 1
    return versions


def merge_sorted(tables: Sequence[pa.Table]) -> pa.Table:
    """Returns one table by step and episode; columns missing in some tables are null there."""
    filled = [table for table in tables if len(table)] or [EMPTY_TABLE]
    merged = pa.concat_tables(filled, promote_options="default")
    ends = [(table["step"][0].as_py(), table["step"][-1].as_py()) for table in filled if len(table)]
    if any(after[0] <= before[1] for before, after in pairwise(ends)):  # a growing run's new rows are last already
        merged = merged.take(pc.sort_indices(merged, [("step", "ascending"), ("episode", "ascending")]))
    return merged.combine_chunks()


def cache_file(folder: Path) -> Path:
    """Returns the path of the cached index of the episodes in `folder`."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:32]
    return root / "palestra" / "dashboard" / f"{name}-{CACHE_FORMAT}.parquet"
