"""Backend with Ray actors as workers, on one machine or many.

Members and task outputs travel through Ray's object store: nodes need palestra installed, but no shared file system.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from palestra.core.failures import ErrorText, describe_error
from palestra.core.tracing import export_wait_s
from palestra.parallel.file_bundle import FileBundle, content_hash, num_bytes, pack_folder, unpack_folder
from palestra.parallel.ray import cluster
from palestra.parallel.ray.cluster import (
    ActorResources,
    join_cluster,
    leave_cluster,
    parse_placement,
    placement_error,
    put_factory,
)
from palestra.parallel.ray.worker_actor import FilesLost, Package, WorkerActor
from palestra.parallel.task_queue import MAX_ATTEMPTS, MemberFolders, TaskQueue, task_error, worker_start_error
from palestra.parallel.tasks import Result, Task, TaskResult, WorkerFactory
from palestra.parallel.worker_stats import worker_stats

WORKER_KIND = "Ray worker"
END_TIMEOUT_S = 1.0  # seconds that actors have to remove their files
# most recently used folders that an actor keeps
MAX_HELD = 512
MAX_HELD_BYTES = 4 * 2**30
MIN_STORED_BYTES = 128 * 1024  # outputs from which Ray keeps a returned object in the store, not in the driver's memory

traffic: Counter[str] = Counter()  # `puts` of folders into the object store, `put_bytes`, `returned_bytes`


def _is_node_lost(node: str) -> bool:
    """True once the cluster has noticed that a node is gone. At first the errors of its actors do not show it."""
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
    """One actor of a group: `ready` once its worker is built; `task` is None while it is idle, else `output` are the
    files that it returns. `held` are the bytes of each content that it has, the one used last at the end; `unused` are
    to be removed before its next task."""

    group: _Group
    actor: Any
    ready: bool = False
    task: Task | None = None
    output: ray.ObjectRef[Any] | None = None
    where: str = ""
    node: str = ""
    held: OrderedDict[str, int] = field(default_factory=OrderedDict)
    unused: list[str] = field(default_factory=list)

    def take(self, packages: Sequence[Package]) -> dict[str, ray.ObjectRef[Any]]:
        """Records what the actor will have, without those used longest ago; returns the files that it lacks."""
        new = {each.content: each.files for each in packages if each.content not in self.held}
        for each in packages:
            self.held[each.content] = each.num_bytes
            self.held.move_to_end(each.content)
        needed = len({each.content for each in packages})
        total = sum(self.held.values())
        while len(self.held) > needed and (len(self.held) > MAX_HELD or total > MAX_HELD_BYTES):
            content, size = self.held.popitem(last=False)
            self.unused.append(content)
            total -= size
        return new

    def drop(self, content: str) -> None:
        """Marks a content as no longer needed."""
        if self.held.pop(content, None) is not None:
            self.unused.append(content)


def _store(content: str, files: FileBundle) -> Package:
    """Puts files into the object store."""
    size = num_bytes(files)
    traffic.update(puts=1, put_bytes=size)
    return Package(content, ray.put(files), size)


class RayBackend:
    """Backend with `workers` Ray actors on the cluster at `address`.

    Without an address a cluster is started on this machine; it ends with `close`. If this process has joined a cluster
    already, that one is used.

    `placement` reserves workers for one kind of task and gives the resources of each as Ray options. All other kinds
    are run by the `workers`, with one CPU each:

        RayBackend(make, 4, "auto", {"train": {"workers": 2, "num_gpus": 1}, "assess": {"workers": 1, "num_cpus": 2}})

    On a cluster that is started here, the `workers` run at most `at_once` tasks at a time (None: one each); the next
    one goes to the worker that has waited longest.

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
        *,
        at_once: int | None = None,
    ) -> None:
        self._apart = {kind: _Group(parse_placement(kind, own)) for kind, own in (placement or {}).items()}
        self._common = _Group(ActorResources(workers, {"num_cpus": 1}))
        self._groups = [*self._apart.values(), self._common]
        if self.workers < 1:
            raise ValueError(f"workers is {workers}, and placement has none: at least one is needed to do the tasks")
        self._owner = join_cluster(address, [group.needs for group in self._groups])
        self._at_once = workers if at_once is None or not self._owner else at_once
        self._make = put_factory(make_worker)
        self._actor: Any = ray.remote(WorkerActor)
        self._scratch = tempfile.mkdtemp(prefix="palestra-")
        self._remove = weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)
        self._members = MemberFolders()
        self._contents: dict[str, str] = {}  # by name of the member
        self._returned: dict[str, Package] = {}  # by name of a future member: the files that its task returned
        self._stored: dict[str, Package] = {}  # by hash of the content
        self._users: Counter[str] = Counter()  # members of a content
        self._stillborn = 0  # workers in a row that died before they were ready
        self._idle: list[_RayWorkerHandle] = []
        self._busy: dict[ray.ObjectRef[Any], _RayWorkerHandle] = {}
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
        self._returned.pop(name, None)
        if (content := self._contents.pop(name, None)) is None:
            return
        self._users[content] -= 1
        if not self._users[content]:
            del self._users[content], self._stored[content]
            for worker in [*self._idle, *self._busy.values()]:
                worker.drop(content)

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
        return sum(map(self._running, self._groups))

    def close(self) -> None:
        workers = [*self._idle, *self._busy.values()]
        if workers and ray.is_initialized():
            ray.wait(
                [worker.actor.end.remote() for worker in workers],
                num_returns=len(workers),
                timeout=END_TIMEOUT_S + export_wait_s(),
            )
            for worker in workers:
                ray.kill(worker.actor)
        if self._owner:
            leave_cluster()
        self._idle.clear()
        self._busy.clear()
        self._remove()

    def _running(self, group: _Group) -> int:
        """Returns the number of tasks that the workers of a group are running."""
        return sum(worker.task is not None and worker.group is group for worker in self._busy.values())

    def _hire(self, group: _Group) -> None:
        actor = self._actor.options(scheduling_strategy="SPREAD", **group.needs.options).remote()
        self._busy[actor.make.remote(self._make)] = _RayWorkerHandle(group, actor)

    def _hand_out(self) -> None:
        free = self._at_once - self._running(self._common)
        for worker in list(self._idle):
            if worker.group is self._common and not free:
                continue
            if task := worker.group.queue.pop():
                packages = {
                    name: self._fetchable(name, folder) for name, folder in self._members.folders_for(task).items()
                }
                self._idle.remove(worker)
                free -= worker.group is self._common
                worker.task, trace = task, worker.group.queue.traces.get(task.name)
                new = worker.take(list(packages.values()))
                contents = {name: package.content for name, package in packages.items()}
                do = worker.actor.do.options(num_returns=2)
                answer, worker.output = do.remote(task, contents, new, worker.unused, trace)
                worker.unused = []
                self._busy[answer] = worker

    def _fetchable(self, name: str, folder: Path) -> Package:
        """Returns a member's files in the object store: the files that its task returned, files of equal content, or
        else its folder's files, which are put there now."""
        if name not in self._contents:
            package = self._returned.pop(name, None)
            if package is None:
                files = pack_folder(folder)
                content = content_hash(files)
                package = self._stored.get(content) or _store(content, files)
            self._stored.setdefault(package.content, package)
            self._contents[name] = package.content
            self._users[package.content] += 1
        return self._stored[self._contents[name]]

    def _put_again(self, task: Task, lost: Sequence[str]) -> None:
        """Puts the files of a task's members whose contents were lost with a node, from their folders."""
        for content, folder in {self._contents[name]: self._members[name] for name in task.members}.items():
            if content in lost:
                self._stored[content] = _store(content, pack_folder(folder))

    def _hear(self, ref: ray.ObjectRef[Any]) -> TaskResult | None:
        """Reads an actor's reply: a finished task, "ready", or (on a Ray error) that it died."""
        worker = self._busy.pop(ref)
        try:
            answer = ray.get(ref)
            files = {} if worker.output is None else ray.get(worker.output)
        except RayTaskError as error:
            answer = describe_error(error)
        except RayError as error:
            self._replace(worker, f"{type(error).__name__}: {error}")
            return None
        if isinstance(answer, ErrorText):
            raise task_error(worker.task, answer) if worker.task else worker_start_error(answer)
        self._stillborn, worker.ready, worker.group.unready_since = 0, True, None
        (task, worker.task), (output, worker.output) = (worker.task, None), (worker.output, None)
        self._idle.append(worker)
        if task and isinstance(answer, FilesLost):
            self._put_again(task, answer.contents)
            for content in answer.contents:
                worker.held.pop(content, None)
            worker.group.queue.tasks.appendleft(task)
        elif task:
            result, seconds = answer
            worker_stats.count(WORKER_KIND, worker.where, done=1, seconds=seconds)
            worker.group.queue.finish(task)
            return self._task_result(task, result, seconds, files, output)
        elif answer:  # the reply to `make`; the reply to `greet` is None
            worker.where, worker.node = answer
        return None

    def _task_result(
        self, task: Task, result: Result, seconds: float, files: FileBundle, output: ray.ObjectRef[Any] | None
    ) -> TaskResult:
        size = num_bytes(files)
        traffic["returned_bytes"] += size
        if output is not None and task.is_output_member and size >= MIN_STORED_BYTES:
            self._returned[task.output_member] = Package(content_hash(files), output, size)
        out = unpack_folder(files, Path(tempfile.mkdtemp(dir=self._scratch))) if task.output_member else None
        return TaskResult(task, result, out, seconds)

    def _replace(self, worker: _RayWorkerHandle, why: str) -> None:
        """Starts a new actor in place of a dead one and puts its task at the front of the queue."""
        ray.kill(worker.actor)  # it may be alive but unreachable
        worker_stats.count(WORKER_KIND, worker.where or "not placed yet", why, lost=1)
        if worker.task:
            worker.group.queue.retry(worker.task, why, node=worker.node, is_node_lost=_is_node_lost)
        elif not worker.ready:
            self._stillborn += 1
            if self._stillborn >= MAX_ATTEMPTS:
                raise ValueError(f"{MAX_ATTEMPTS} workers in a row died before they were ready, the last one: {why}")
        self._hire(worker.group)
        for idle in self._idle:  # their node may be gone too: check before giving them a task
            self._busy[idle.actor.greet.remote()] = idle
        self._idle.clear()
        if worker.group.unready_since is None and not any(
            other.ready for other in self._busy.values() if other.group is worker.group
        ):
            worker.group.unready_since = time.monotonic()

    def _complain(self) -> None:
        """Raises ValueError if tasks have waited longer than `PLACEMENT_TIMEOUT_S` for a first worker."""
        for group in self._groups:
            since = time.monotonic() - group.unready_since if group.unready_since is not None else 0.0
            if group.queue.tasks and since > cluster.PLACEMENT_TIMEOUT_S:
                raise placement_error(f"task {group.queue.tasks[0].name}", group.needs.options)
