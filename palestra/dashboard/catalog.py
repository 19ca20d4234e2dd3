"""The runs of one folder, opened on demand. No file outside that folder is ever read."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path

from palestra.core.config import Tree, hide_credentials, parse
from palestra.core.files import DamagedFile, file_size, read_bytes, read_json
from palestra.dashboard.index import EpisodeIndex, cache_file
from palestra.runs.metric_log import PARSE_ERRORS, MetricLog

MAX_OPEN_RUNS = 32  # runs whose metrics are kept in memory
MAX_TREE_BYTES = 2**20  # bytes of the largest config or JSON file that is read


class NotFound(Exception):
    """Raised if a requested object does not exist or may not be shown; becomes HTTP 404."""


UNREADABLE = (NotFound, OSError, ValueError, *PARSE_ERRORS)  # raised by reading runs that others may have made


class CatalogRun:
    """An open run: its logs and its episode index, read incrementally."""

    def __init__(self, root: Path, name: str) -> None:
        self.root = root
        self.name = name
        self.path = root / name
        self.metrics = MetricLog(self.file("metrics.jsonl"), "policy")
        self.timings = MetricLog(self.file("timings.jsonl"), "policy")
        self.evals = MetricLog(self.file("evals.jsonl"), "name")
        self.workers = MetricLog(self.file("workers.jsonl"), "worker")
        self.charted_logs = {"metrics": self.metrics, "timings": self.timings, "evals": self.evals}
        folder = self.file("episodes")
        self.episodes = EpisodeIndex(folder, cache_file(folder))
        self._config: tuple[int, Tree] = (-1, {})

    def file(self, name: str) -> Path:
        """Returns the path of a file or folder of the run. Raises NotFound if it, or a link on the way, leads out of
        the run; ValueError for a pipe or a device, on which a read would block."""
        path = self.path / name
        if "\0" in name or not path.resolve().is_relative_to(self.path.resolve()):
            raise NotFound(f"{name} is not in the run {self.name}")
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ValueError(f"{name} is neither a file nor a folder: remove it from the run {self.name}")
        return path

    def refresh(self, *logs: MetricLog) -> None:
        """Reads new lines of `logs` (default: of all)."""
        for log in logs or (*self.charted_logs.values(), self.workers):
            self.file(log.path.name)
            log.refresh()

    @property
    def config(self) -> Tree:
        """The config as a tree; {} if it cannot be read as one."""
        path = self.file("config.yaml")
        changed = path.stat().st_mtime_ns
        if self._config[0] != changed:
            self._config = (changed, read_config(path))
        return self._config[1]

    @property
    def meta(self) -> Tree:
        """The contents of meta.json; {} if it cannot be read."""
        return read_object(self.file("meta.json"))


class RunCatalog:
    """The runs directly in `root`. Raises ValueError if that is not a folder, or is a run itself."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise ValueError(
                f"{root} is not a folder; name the one that holds runs, such as `palestra dashboard --root runs`"
            )
        if (root / "config.yaml").is_file():
            raise ValueError(f"{root} is a run; the dashboard needs the folder that holds it: {root.resolve().parent}")
        self.root = root.resolve()
        self._open: OrderedDict[str, CatalogRun] = OrderedDict()
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """Returns the names of all runs, unsorted."""
        return [path.parent.name for path in self.root.glob("*/config.yaml") if self._is_run_name(path.parent.name)]

    def run(self, name: str) -> CatalogRun:
        """Returns a run; the `MAX_OPEN_RUNS` newest used stay open. Raises NotFound."""
        if not self._is_run_name(name):
            raise NotFound(f"there is no run {name!r} here")
        with self._lock:
            run = self._open.get(name) or CatalogRun(self.root, name)
            self._open[name] = run
            self._open.move_to_end(name)
            while len(self._open) > MAX_OPEN_RUNS:
                self._open.popitem(last=False)
        return run

    def _is_run_name(self, name: str) -> bool:
        """Returns True if `name` is a plain folder name in `root`, not a link out of it, with a config file."""
        if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
            return False
        folder = self.root / name
        config = folder / "config.yaml"
        return folder.resolve() == folder and config.is_file() and config.resolve().is_relative_to(folder)


def read_config(path: Path) -> Tree:
    """Returns a config without credentials; {} if it is none, or above `MAX_TREE_BYTES`."""
    try:
        return parse(hide_credentials(read_bytes(path, MAX_TREE_BYTES).decode()), str(path))
    except (ValueError, OSError, *PARSE_ERRORS):
        return {}


def read_object(path: Path) -> Tree:
    """Returns the JSON object in a file; {} if there is none."""
    if file_size(path) > MAX_TREE_BYTES:
        return {}
    try:
        return read_json(path, dict, {})
    except DamagedFile:
        return {}
