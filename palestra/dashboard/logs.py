"""Logs of a run as columns of numbers, read on from where the last look ended.

log = Log(run / "metrics.jsonl", "policy")
log.look()
steps, values = log.column("planner", "entropy")
"""

from __future__ import annotations

import json
import threading
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from palestra.files import size

MARK = 256  # bytes before the point reached that must still be there: else the log was cut back and made again


class Log:
    """A .jsonl file whose lines belong to a name each: of a policy, of an exam. `version` changes when it does."""

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.key = path, key
        self.version = 0
        self.torn = 0  # lines that are no JSON objects
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._offset, self._mark, self._stat = 0, b"", (-1, -1)
        self._columns: dict[str, dict[str, tuple[array[float], array[float]]]] = {}
        self._last: dict[str, dict[str, Any]] = {}

    def look(self) -> None:
        """Reads what was added since; everything anew where the log was cut back in between."""
        with self._lock:
            stat = (size(self.path), self.path.stat().st_mtime_ns if self.path.exists() else 0)
            if stat == self._stat:
                return
            data = self._grown(stat[0])
            self._stat = stat
            self.version += 1
            whole = data.rfind(b"\n") + 1
            for line in data[:whole].split(b"\n"):
                if line:
                    self._add(line)
            self._offset += whole
            self._mark = (self._mark + data[:whole])[-MARK:]

    def _grown(self, length: int) -> bytes:
        if not length:
            self._begin()
            return b""
        with open(self.path, "rb") as file:
            file.seek(self._offset - len(self._mark))
            if length < self._offset or file.read(len(self._mark)) != self._mark:
                self._begin()
                file.seek(0)
            return file.read()

    def _add(self, raw: bytes) -> None:
        try:
            line = json.loads(raw)
            name, step = line[self.key], float(line["step"])
        except (ValueError, TypeError, KeyError):
            self.torn += 1
            return
        self._last[name] = line
        columns = self._columns.setdefault(name, {})
        for key, value in line.items():
            kind = type(value)
            if kind is float or kind is int or kind is bool:
                _append(columns, key, step, value)
            elif kind is dict:  # {"returns": {"red": 1.0}} becomes the column returns/red
                for inner, number in value.items():
                    if type(number) in (int, float):
                        _append(columns, f"{key}/{inner}", step, number)

    # ---- questions

    def names(self) -> list[str]:
        with self._lock:
            return list(self._columns)

    def keys(self) -> dict[str, list[str]]:
        """By name, the figures that it has."""
        with self._lock:
            return {
                name: [key for key in columns if key not in ("step", self.key)]
                for name, columns in self._columns.items()
            }

    def column(self, name: str, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values; both empty where there are none."""
        with self._lock:
            steps, values = self._columns.get(name, {}).get(key, ((), ()))
            return np.array(steps, float), np.array(values, float)

    def last(self) -> Mapping[str, dict[str, Any]]:
        """The newest line of each name."""
        with self._lock:
            return dict(self._last)


def _append(columns: dict[str, tuple[array[float], array[float]]], key: str, step: float, value: float) -> None:
    if key not in columns:
        columns[key] = (array("d"), array("d"))
    steps, values = columns[key]
    steps.append(step)
    values.append(value)


def last_lines(path: Path, key: str, length: int = 1 << 16) -> dict[str, dict[str, Any]]:
    """The newest line of each name, from the file's end alone: for a list of runs that are not opened."""
    if not path.exists():
        return {}
    with open(path, "rb") as file:
        file.seek(max(0, size(path) - length))
        lines = file.read().split(b"\n")[:-1]
    found: dict[str, dict[str, Any]] = {}
    for line in lines if size(path) <= length else lines[1:]:
        try:
            values = json.loads(line)
            found[values[key]] = values
        except (ValueError, TypeError, KeyError):
            continue
    return found
