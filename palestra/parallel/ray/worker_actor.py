"""The actor that runs tasks for the Ray backend: one worker, and the folders of members that it has fetched."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import ObjectLostError

from palestra.core.failures import ErrorText, describe_error
from palestra.core.tracing import TraceContext, stop_tracing
from palestra.parallel.file_bundle import FileBundle, pack_folder, unpack_folder
from palestra.parallel.task_queue import run_or_fault
from palestra.parallel.tasks import Result, Task, WorkerFactory
from palestra.parallel.worker_stats import process_label


class Package(NamedTuple):
    """A member's files in the object store, the hash of their content, and their bytes."""

    content: str
    files: ray.ObjectRef[Any]
    num_bytes: int


class FilesLost(NamedTuple):
    """The answer of an actor that could not fetch files because the node that stored them was lost: the hashes of the
    missing contents."""

    contents: tuple[str, ...]


class WorkerActor:
    """One worker and the folders it has fetched, each content once. The driver keeps track of them."""

    def __init__(self) -> None:
        self._scratch = tempfile.mkdtemp(prefix="palestra-")

    def make(self, make: WorkerFactory) -> tuple[str, str] | ErrorText:
        """Builds the worker and returns its location and its node's id, or the fault if that raises."""
        try:
            self._worker = make()
        except Exception as error:
            return describe_error(error)
        return process_label(), ray.get_runtime_context().get_node_id()

    def do(
        self,
        task: Task,
        members: Mapping[str, str],
        new: Mapping[str, ray.ObjectRef[Any]],
        unused: Sequence[str],
        trace: TraceContext | None,
    ) -> tuple[tuple[Result, float] | ErrorText | FilesLost, FileBundle]:
        """Removes the `unused` contents, fetches the `new` ones and runs the task; returns result and seconds, or the
        fault, and the output files. `members` are the contents of members by name."""
        for content in unused:
            shutil.rmtree(self._folder(content), ignore_errors=True)
        try:
            fetched = ray.get(list(new.values()))
        except ObjectLostError:
            return FilesLost(tuple(new)), {}
        for content, files in zip(new, fetched, strict=True):
            unpack_folder(files, self._folder(content))
        out = Path(tempfile.mkdtemp(dir=self._scratch)) if task.output_member else None
        folders = {name: self._folder(content) for name, content in members.items()}
        answer = run_or_fault(self._worker, task, folders, out, trace)
        made = pack_folder(out) if out else {}
        if out:
            shutil.rmtree(out)
        return answer, made

    def _folder(self, content: str) -> Path:
        return Path(self._scratch, "members", content)

    def greet(self) -> None:
        """Does nothing; the reply shows that the actor is alive."""

    def end(self) -> None:
        """Removes all files of this actor, and exports its last spans."""
        stop_tracing()
        shutil.rmtree(self._scratch, ignore_errors=True)
