"""Stores that fail, and small runs to be mirrored to them."""

from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from fsspec.implementations.memory import MemoryFileSystem

from palestra.core.files import write_arrays
from palestra.runs import Run


class FlakyFileSystem(MemoryFileSystem):
    """A store in memory that can be down, or fail after a number of writes."""

    protocol = "flaky"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    writes_left: int | None = None
    is_down = False
    num_writes = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("flaky://", "memory://"))

    @classmethod
    def reset(cls) -> None:
        cls.store.clear()
        cls.pseudo_dirs[:] = [""]
        cls.writes_left, cls.is_down, cls.num_writes = None, False, 0

    def _check(self) -> None:
        if type(self).is_down:
            raise OSError("the store is down")

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        self._check()
        return super().ls(path, detail=detail, **kwargs)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        self._check()
        return super().cat_file(path, start=start, end=end, **kwargs)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self._count_write()
        super().pipe_file(path, value, mode=mode, **kwargs)

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> None:
        self._count_write()
        super().put_file(lpath, rpath, **kwargs)

    def _count_write(self) -> None:
        self._check()
        cls = type(self)
        if cls.writes_left is not None:
            if cls.writes_left <= 0:
                raise OSError("killed before this write")
            cls.writes_left -= 1
        cls.num_writes += 1


fsspec.register_implementation("flaky", FlakyFileSystem, clobber=True)


def new_run(root: Path, name: str = "demo") -> Run:
    return Run.create(root, f"name: {name}\nsteps: 9\n", name, {"seed": 0})


def train(run: Run, steps: int, frozen: bool = False) -> None:
    """Logs steps, with a checkpoint after each: of a policy that changes and one that does not."""
    for step in range(run.next_step, run.next_step + steps):
        run.log_metrics(step, "planner", {"loss": step / 4})
        run.log_timings(step, "team", {"rollout_s": 0.5})
        run.log_eval(step, "test", {"success": step / 10})

        def write(folder: Path, step: int = step) -> None:
            write_arrays(folder / "planner" / "weights.safetensors", {"w": np.full(64, float(step))})
            write_arrays(folder / "base" / "weights.safetensors", {"w": np.arange(50_000.0)})

        run.checkpoint(step, write, {"planner": "planner", "base": "base"})


def contents(run: Path) -> dict[str, bytes]:
    """The files that a resume needs, by name."""
    files = [*(run / "checkpoints").rglob("*"), *run.glob("*.jsonl"), run / "config.yaml", run / "meta.json"]
    return {str(path.relative_to(run)): path.read_bytes() for path in files if path.is_file()}
