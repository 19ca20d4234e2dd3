"""The runs of one folder, opened when somebody looks at them. Nothing outside that folder is ever read."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

from palestra.config import load
from palestra.dashboard.index import EpisodeIndex, cache_file
from palestra.dashboard.logs import FOREIGN, Log
from palestra.files import size

OPEN = 32  # runs whose figures are kept in memory
MAX_TREE = 2**20  # bytes of a config or a JSON file that is read whole
Tree = dict[str, Any]


class Absent(Exception):
    """What was asked for is not here, or not for the dashboard to show."""


class OpenRun:
    """A run that somebody looks at: its logs and the index of its episodes, read as far as they were asked for."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name, self.path = root, name, root / name
        self.metrics = Log(self.file("metrics.jsonl"), "policy")
        self.timings = Log(self.file("timings.jsonl"), "policy")
        self.evals = Log(self.file("evals.jsonl"), "name")
        self.workers = Log(self.file("workers.jsonl"), "worker")
        folder = self.file("episodes")
        self.episodes = EpisodeIndex(folder, cache_file(folder))
        self._config: tuple[int, Tree] = (-1, {})

    def file(self, name: str) -> Path:
        """The path of a file or folder of the run. Raises Absent where it, or a link on the way, leads out, and
        ValueError for a pipe or a device, at which a reader would wait for good."""
        path = self.path / name
        if "\0" in name or not path.resolve().is_relative_to(self.path.resolve()):
            raise Absent(f"{name} is not in the run {self.name}")
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ValueError(f"{name} is neither a file nor a folder: remove it from the run {self.name}")
        return path

    def look(self) -> None:
        """Reads on in the logs."""
        for log in (self.metrics, self.timings, self.evals, self.workers):
            self.file(log.path.name)
            log.look()

    @property
    def config(self) -> Tree:
        """The config as a tree; {} where it cannot be read as one."""
        path = self.file("config.yaml")
        changed = path.stat().st_mtime_ns
        if self._config[0] != changed:
            self._config = (changed, read_config(path))
        return self._config[1]

    @property
    def meta(self) -> Tree:
        return read_json(self.file("meta.json"))

    def bytes(self, name: str) -> int:
        return size(self.file(name))


class Library:
    """The runs directly in `root`. Raises ValueError where that is no folder, or is a run itself."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise ValueError(f"{root} is no folder; name the one that holds runs, such as `palestra dashboard runs`")
        if (root / "config.yaml").is_file():
            raise ValueError(f"{root} is a run; the dashboard wants the folder that holds it: {root.resolve().parent}")
        self.root = root.resolve()
        self._open: OrderedDict[str, OpenRun] = OrderedDict()
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """The runs there are, in no order."""
        return [path.parent.name for path in self.root.glob("*/config.yaml") if self._shown(path.parent.name)]

    def run(self, name: str) -> OpenRun:
        """An open run. Raises Absent for names that are not of a run in the folder."""
        if not self._shown(name):
            raise Absent(f"there is no run {name!r} here")
        with self._lock:
            run = self._open.get(name) or OpenRun(self.root, name)
            self._open[name] = run
            self._open.move_to_end(name)
            while len(self._open) > OPEN:
                self._open.popitem(last=False)
        return run

    def _shown(self, name: str) -> bool:
        """Whether it is a plain name of a folder that is really here, with a config that is."""
        if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
            return False
        folder = self.root / name
        return folder.resolve() == folder and (folder / "config.yaml").is_file() and self._within(folder)

    def _within(self, folder: Path) -> bool:
        return (folder / "config.yaml").resolve().is_relative_to(folder)


def read_config(path: Path) -> Tree:
    """The config as a tree; {} where it is none, or too large for one."""
    try:
        return load(path) if size(path) <= MAX_TREE else {}
    except (ValueError, *FOREIGN):
        return {}


def read_json(path: Path) -> Tree:
    """The object in a file; {} where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if size(path) <= MAX_TREE else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
