"""Backend with Ray actors as workers, on one machine or many.

Members and task outputs travel through Ray's object store: nodes need palestra installed, but no shared file system.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError

from palestra.backends.file_bundle import FileBundle, content_hash, num_bytes, pack_folder, unpack_folder
from palestra.backends.ray import cluster
from palestra.backends.ray.cluster import (
    ActorResources,
    join_cluster,
    leave_cluster,
    parse_placement,
    placement_error,
    put_factory,
)
from palestra.backends.task_queue import (
    MAX_ATTEMPTS,
    MemberFolders,
    TaskQueue,
    run_or_fault,
    task_error,
    worker_start_error,
)
from palestra.populations.tasks import Result, Task, TaskResult, WorkerFactory
from palestra.rollouts.failures import ErrorText, describe_error
from palestra.runs.worker_stats import process_label, worker_stats
from palestra.tracing import TraceContext, export_wait_s, stop_tracing

WORKER_KIND = "Ray worker"
END_TIMEOUT_S = 1.0  # seconds that actors have to remove their files

traffic: Counter[str] = Counter()  # `puts` of folders into the object store, `put_bytes`, `returned_bytes`


class _Package(NamedTuple):
    """A member's files in the object store, and the hash of their content."""

    content: str
    files: ray.ObjectRef


# ---- in the actor's process


class _Actor:
    """One worker and the folders it has fetched, each content once."""

    def __init__(self) -> None:
        self._scratch = tempfile.mkdtemp(prefix="palestra-")
        self._folders: dict[str, Path] = {}  # by hash of the content

    def make(self, make: WorkerFactory) -> tuple[str, str] | ErrorText:
        """Builds the worker and returns its location and its node's id, or the fault if that raises."""
        try:
            self._worker = make()
        except Exception as error:
            return describe_error(error)
        return process_label(), ray.get_runtime_context().get_node_id()

    def do(
        self, task: Task, members: Mapping[str, _Package], trace: TraceContext | None
    ) -> tuple[Result, float, FileBundle] | ErrorText:
        """Fetches missing members, runs the task and returns result, seconds and output files, or the fault."""
        for package in members.values():
            if package.content not in self._folders:
                folder = Path(self._scratch, "members", package.content)
                self._folders[package.content] = unpack_folder(ray.get(package.files), folder)
        out = Path(tempfile.mkdtemp(dir=self._scratch)) if task.output_member else None
        folders = {name: self._folders[package.content] for name, package in members.items()}
        answer = run_or_fault(self._worker, task, folders, out, trace)
        made = pack_folder(out) if out else {}
        if out:
            shutil.rmtree(out)
        return answer if isinstance(answer, ErrorText) else (*answer, made)

    def greet(self) -> None:
        """Does nothing; the reply shows that the actor is alive."""

    def forget(self, content: str) -> None:
        """Removes files that no member has any more."""
        if folder := self._folders.pop(content, None):
            shutil.rmtree(folder, ignore_errors=True)

    def end(self) -> None:
        """Removes all files of this actor, and exports its last spans."""
        stop_tracing()
        shutil.rmtree(self._scratch, ignore_errors=True)


# ---- in the driver


def _is_node_lost(node: str) -> bool:
    """True once the cluster has noticed that a node is gone. The errors of its actors do not tell, at first."""
    return not any(each["Alive"] and each["NodeID"] == node for each in ray.nodes())


@dataclass
class _Group:
    """Workers with equal resources, and the queue of their tasks.

    `unready_since` is the time (`time.monotonic`) since which none of them is ready; None while one is.
    """

    needs: ActorResources
    queue: TaskQueue = field(default_factory=TaskQueue)
    unready_since: float | None = field(default_factory=time.monotonic)


@dataclass
class _RayWorkerHandle:
    """One actor of a group: `ready` once its worker is built; `task` is None while it is idle."""

    group: _Group
    actor: Any
    ready: bool = False
    task: Task | None = None
    where: str = ""
    node: str = ""


class RayBackend:
    """Backend with `workers` Ray actors on the cluster at `address`.

    Without an address a cluster is started on this machine; it ends with `close`. If this process has joined a cluster
    already, that one is used.

    `placement` reserves workers for one kind of task and gives the resources of each as Ray options. All other kinds
    are run by the `workers`, with one CPU each:

        RayBackend(make, 4, "auto", {"train": {"workers": 2, "num_gpus": 1}, "assess": {"workers": 1, "num_cpus": 2}})

    If an actor or its node dies, it is replaced on any node with free resources, and its task goes to the next free
    worker. Raises ValueError if `placement` is invalid or there is no worker, and in `wait` if no actor could be placed
    for ten minutes.
    """

    def __init__(
        self,
        make_worker: WorkerFactory,
        workers: int,
        address: str | None = None,
        placement: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self._apart = {kind: _Group(parse_placement(kind, own)) for kind, own in (placement or {}).items()}
        self._common = _Group(ActorResources(workers, {"num_cpus": 1}))
        self._groups = [*self._apart.values(), self._common]
        if self.workers < 1:
            raise ValueError(f"workers is {workers}, and placement has none: at least one is needed to do the tasks")
        self._owner = join_cluster(address, [group.needs for group in self._groups])
        self._make = put_factory(make_worker)
        self._actor: Any = ray.remote(_Actor)
        self._scratch = tempfile.mkdtemp(prefix="palestra-")
        self._remove = weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)
        self._members = MemberFolders()
        self._packed: dict[str, _Package] = {}  # by name of the member
        self._stored: dict[str, _Package] = {}  # by hash of the content
        self._users: Counter[str] = Counter()  # members of a content
        self._stillborn = 0  # workers in a row that died before they were ready
        self._idle: list[_RayWorkerHandle] = []
        self._busy: dict[ray.ObjectRef, _RayWorkerHandle] = {}
        for group in self._groups:
            for _ in range(group.needs.num_actors):
                self._hire(group)

    @property
    def workers(self) -> int:
        return sum(group.needs.num_actors for group in self._groups)

    def add_member(self, name: str, folder: Path) -> None:
        self._members[name] = folder

    def remove_member(self, name: str) -> None:
        del self._members[name]
        if (package := self._packed.pop(name, None)) is None:
            return
        self._users[package.content] -= 1
        if not self._users[package.content]:
            del self._users[package.content], self._stored[package.content]
            for hand in [*self._idle, *self._busy.values()]:
                hand.actor.forget.remote(package.content)  # actors run calls in order: after the current task

    def submit(self, task: Task) -> None:
        group = self._apart.get(task.kind, self._common)
        if group.needs.num_actors == 0:
            raise ValueError(f"no worker does {task.name}: placement has no {task.kind}, and workers is 0")
        group.queue.add(task)
        self._hand_out()

    def wait(self, timeout: float | None = None) -> TaskResult | None:
        end = time.monotonic() + (float("inf") if timeout is None else timeout)
        while self._busy:
            left = max(0.0, min(1.0, end - time.monotonic()))
            ready, _ = ray.wait(list(self._busy), timeout=left)
            done = self._hear(ready[0]) if ready else None
            self._hand_out()
            if done or time.monotonic() >= end:
                return done
            self._complain()
        return None

    def cancel_pending(self) -> int:
        for group in self._groups:
            group.queue.clear()
        return sum(hand.task is not None for hand in self._busy.values())

    def close(self) -> None:
        hands = [*self._idle, *self._busy.values()]
        if hands and ray.is_initialized():
            ray.wait(
                [hand.actor.end.remote() for hand in hands],
                num_returns=len(hands),
                timeout=END_TIMEOUT_S + export_wait_s(),
            )
            for hand in hands:
                ray.kill(hand.actor)
        if self._owner:
            leave_cluster()
        self._idle.clear()
        self._busy.clear()
        self._remove()

    def _hire(self, group: _Group) -> None:
        actor = self._actor.options(scheduling_strategy="SPREAD", **group.needs.options).remote()
        self._busy[actor.make.remote(self._make)] = _RayWorkerHandle(group, actor)

    def _hand_out(self) -> None:
        for hand in list(self._idle):
            if task := hand.group.queue.pop():
                members = {
                    name: self._fetchable(name, folder) for name, folder in self._members.folders_for(task).items()
                }
                self._idle.remove(hand)
                hand.task = task
                self._busy[hand.actor.do.remote(task, members, hand.group.queue.traces.get(task.name))] = hand

    def _fetchable(self, name: str, folder: Path) -> _Package:
        """Returns a member's files in the object store, where they are put when a task first needs them, unless files
        of equal content are there."""
        if name not in self._packed:
            files = pack_folder(folder)
            content = content_hash(files)
            if content not in self._stored:
                traffic.update(puts=1, put_bytes=num_bytes(files))
                self._stored[content] = _Package(content, ray.put(files))
            self._users[content] += 1
            self._packed[name] = self._stored[content]
        return self._packed[name]

    def _hear(self, ref: ray.ObjectRef) -> TaskResult | None:
        """Reads an actor's reply: a finished task, "ready", or (on a Ray error) that it died."""
        hand = self._busy.pop(ref)
        try:
            answer = ray.get(ref)
        except RayTaskError as error:
            answer = describe_error(error)
        except RayError as error:
            self._replace(hand, f"{type(error).__name__}: {error}")
            return None
        if isinstance(answer, ErrorText):
            raise task_error(hand.task, answer) if hand.task else worker_start_error(answer)
        self._stillborn, hand.ready, hand.group.unready_since = 0, True, None
        task, hand.task = hand.task, None
        self._idle.append(hand)
        if task:
            worker_stats.count(WORKER_KIND, hand.where, done=1, seconds=answer[1])
            hand.group.queue.finish(task)
            return self._done(task, *answer)
        if answer:  # the reply to `make`; that to `greet` is None
            hand.where, hand.node = answer
        return None

    def _done(self, task: Task, result: Result, seconds: float, files: FileBundle) -> TaskResult:
        traffic["returned_bytes"] += num_bytes(files)
        out = unpack_folder(files, Path(tempfile.mkdtemp(dir=self._scratch))) if task.output_member else None
        return TaskResult(task, result, out, seconds)

    def _replace(self, hand: _RayWorkerHandle, why: str) -> None:
        """Starts a new actor in place of a dead one and puts its task at the front of the queue."""
        ray.kill(hand.actor)  # it may be alive but unreachable
        worker_stats.count(WORKER_KIND, hand.where or "not placed yet", why, lost=1)
        if hand.task:
            hand.group.queue.retry(hand.task, why, node=hand.node, is_node_lost=_is_node_lost)
        elif not hand.ready:
            self._stillborn += 1
            if self._stillborn >= MAX_ATTEMPTS:
                raise ValueError(f"{MAX_ATTEMPTS} workers in a row died before they were ready, the last so: {why}")
        self._hire(hand.group)
        for idle in self._idle:  # their node may be gone too: check before giving them a task
            self._busy[idle.actor.greet.remote()] = idle
        self._idle.clear()
        if hand.group.unready_since is None and not any(
            other.ready for other in self._busy.values() if other.group is hand.group
        ):
            hand.group.unready_since = time.monotonic()

    def _complain(self) -> None:
        """Raises ValueError if tasks have waited longer than `PLACEMENT_TIMEOUT_S` for a first worker."""
        for group in self._groups:
            since = time.monotonic() - group.unready_since if group.unready_since is not None else 0.0
            if group.queue.tasks and since > cluster.PLACEMENT_TIMEOUT_S:
                raise placement_error(f"task {group.queue.tasks[0].name}", group.needs.options)
