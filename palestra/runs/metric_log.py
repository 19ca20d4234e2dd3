"""Logs of a run as columns of numbers, read incrementally.

log = MetricLog(run / "metrics.jsonl", "policy")
log.refresh()
steps, values = log.column("planner", "entropy")
"""

from __future__ import annotations

import json
import threading
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from palestra.core.files import file_size

MARK_BYTES = 256  # bytes before the read position that are compared: if they differ, the log was rewritten
# Exceptions, besides ValueError, that reading files not written by palestra may raise.
PARSE_ERRORS = (KeyError, IndexError, TypeError, AttributeError, ArithmeticError, RecursionError)
CHUNK_BYTES = 2**22  # bytes read at once
MAX_READ_BYTES = 2**28  # bytes that one `refresh` reads; the next one continues there
MAX_LINE_BYTES = 2**22  # bytes of a line; longer ones are skipped
MAX_COLUMNS = 20_000  # columns of a log, over all names; further ones are dropped

Column = tuple["array[float]", "array[float]"]  # steps and values


class MetricLog:
    """A .jsonl file whose lines each belong to a name (of a policy, an evaluation, a worker), found under `key`.
    `version` changes when the file does. Thread-safe."""

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        self.key = key
        self.version = 0
        self.num_unparsed = 0  # lines that could not be parsed
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._offset = 0
        self._mark = b""
        self._stat = (-1, -1)
        self._columns: dict[str, dict[str, Column]] = {}
        self._width = 0  # number of columns over all names
        self._last: dict[str, dict[str, Any]] = {}

    def refresh(self) -> None:
        """Reads new lines, about `MAX_READ_BYTES` at most; all again if the file was rewritten."""
        with self._lock:
            stat = (file_size(self.path), self.path.stat().st_mtime_ns if self.path.exists() else 0)
            if stat == self._stat:
                return
            self.version += 1
            if not stat[0]:
                self._begin()
                self._stat = stat
                return
            with open(self.path, "rb") as file:
                self._seek_to_read_position(file, stat[0])
                self._stat = stat if self._read(file) else (-1, -1)

    def _seek_to_read_position(self, file: BinaryIO, length: int) -> None:
        """Seeks to the end of what was read; to the start if the bytes before that changed."""
        file.seek(self._offset - len(self._mark))
        if length < self._offset or file.read(len(self._mark)) != self._mark:
            self._begin()
            file.seek(0)

    def _read(self, file: BinaryIO) -> bool:
        """Reads whole lines, at most about `MAX_READ_BYTES` bytes; returns whether the end was reached."""
        rest = b""
        left = MAX_READ_BYTES
        while left > 0:
            piece = file.read(CHUNK_BYTES)
            if not piece:
                return True
            left -= len(piece)
            data = rest + piece
            whole = data.rfind(b"\n") + 1
            if not whole and len(data) > MAX_LINE_BYTES:  # inside an overlong line, whose end is read later
                self._advance(data)
                rest = b""
                continue
            for line in data[:whole].split(b"\n"):
                if line:
                    self._add(line)
            self._advance(data[:whole])
            rest = data[whole:]
        return False

    def _advance(self, data: bytes) -> None:
        self._offset += len(data)
        self._mark = (self._mark + data)[-MARK_BYTES:]

    def _add(self, raw: bytes) -> None:
        try:
            line: dict[str, Any] = json.loads(raw if len(raw) <= MAX_LINE_BYTES else b"")
            name = line[self.key]
            step = float(line["step"])
            if not isinstance(name, str):
                raise TypeError(f"{self.key} is not text")
            self._append(name, step, line)
        except (ValueError, *PARSE_ERRORS):
            self.num_unparsed += 1
            return
        self._last[name] = line

    def _append(self, name: str, step: float, line: dict[str, Any]) -> None:
        columns = self._columns.setdefault(name, {})
        for key, value in line.items():
            kind = type(value)
            if kind is float or kind is int or kind is bool:
                self._put(columns, key, step, value)
            elif kind is dict:  # {"returns": {"red": 1.0}} becomes the column returns/red
                for inner, number in value.items():
                    if type(number) in (int, float):
                        self._put(columns, f"{key}/{inner}", step, number)

    def _put(self, columns: dict[str, Column], key: str, step: float, value: float) -> None:
        if key not in columns:
            if self._width >= MAX_COLUMNS:
                return
            self._width += 1
            columns[key] = (array("d"), array("d"))
        steps, values = columns[key]
        values.append(value)  # raises OverflowError for an integer beyond float64
        steps.append(step)

    # ---- queries

    def names(self) -> list[str]:
        with self._lock:
            return list(self._columns)

    def metric_keys(self) -> dict[str, list[str]]:
        """Returns name -> the metrics that it has."""
        with self._lock:
            return {
                name: [key for key in columns if key not in ("step", self.key)]
                for name, columns in self._columns.items()
            }

    def column(self, name: str, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns steps [T] and values [T] of a metric, both float64; empty if there are none."""
        with self._lock:
            steps, values = self._columns.get(name, {}).get(key, ((), ()))
            return np.array(steps, float), np.array(values, float)

    def last_by_name(self) -> Mapping[str, dict[str, Any]]:
        """Returns the newest line of each name."""
        with self._lock:
            return dict(self._last)


def last_lines(path: Path, key: str, max_bytes: int = 1 << 16) -> dict[str, dict[str, Any]]:
    """Returns the newest line of each name within the last `max_bytes` bytes of a log, for runs that are not opened."""
    if not path.exists():
        return {}
    with open(path, "rb") as file:
        file.seek(max(0, file_size(path) - max_bytes))
        lines = file.read().split(b"\n")[:-1]
    found: dict[str, dict[str, Any]] = {}
    for line in lines if file_size(path) <= max_bytes else lines[1:]:
        try:
            values = json.loads(line)
            found[values[key]] = values
        except (ValueError, *PARSE_ERRORS):
            continue
    return found
