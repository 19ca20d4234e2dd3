"""Workers as Ray actors, on one machine or many. Members travel through Ray's object store, and so does what a task
makes: nodes need no file system in common, only palestra installed."""

from __future__ import annotations

import logging
import math
import os
import shutil
import tempfile
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError

from palestra.backends.waiting import TRIES, Members, Waiting, attempt, failed, unsendable
from palestra.populations.tasks import Done, MakeWorker, Result, Task

Files = dict[str, np.ndarray]  # a folder's bytes, by path: arrays pass the object store without a copy

OPTIONS = ("workers", "num_cpus", "num_gpus", "resources", "accelerator_type")
PATIENCE = 600.0  # seconds without one worker for a task that waits: a cluster may have to grow first


# ---- in the actor's process


class _Actor:
    """A worker, and the members it has fetched so far: each once."""

    def make(self, make: MakeWorker) -> str | None:
        """Makes the worker; the traceback where that raises."""
        self._scratch = tempfile.mkdtemp(prefix="palestra-")
        self._members = Members()
        try:
            self._worker = make()
        except Exception:
            return traceback.format_exc()
        return None

    def do(self, task: Task, members: Mapping[str, ray.ObjectRef]) -> tuple[Result, float, Files] | str:
        for name, files in members.items():
            if name not in self._members:
                self._members[name] = _unpacked(ray.get(files), Path(self._scratch, "members", name))
        out = Path(tempfile.mkdtemp(dir=self._scratch)) if task.makes else None
        answer = attempt(self._worker, task, self._members.of(task), out)
        made = _packed(out) if out else {}
        if out:
            shutil.rmtree(out)
        return answer if isinstance(answer, str) else (*answer, made)

    def greet(self) -> None:
        """Shows that it is alive."""

    def forget(self) -> None:
        """Removes its files."""
        shutil.rmtree(self._scratch, ignore_errors=True)


def _packed(folder: Path) -> Files:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): np.fromfile(path, np.uint8) for path in files}


def _unpacked(files: Files, folder: Path) -> Path:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data.tofile(path)
    folder.mkdir(parents=True, exist_ok=True)  # where there are none
    return folder


# ---- in the driver


@dataclass
class _Group:
    """So many workers with these resources, and the tasks that wait for them. `missing` is the time since which none of
    them is ready; None while one is."""

    workers: int
    options: dict[str, Any]
    waiting: Waiting = field(default_factory=Waiting)
    missing: float | None = field(default_factory=time.monotonic)


@dataclass
class _Hand:
    """One actor of a group: not `ready` until its worker is made; doing `task`, or none."""

    group: _Group
    actor: Any
    ready: bool = False
    task: Task | None = None


class RayBackend:
    """`workers` Ray actors on the cluster at `address` (None: one that is started on this machine, and ends with
    `close`; a Ray that this process has joined already is used as it is).

    `placement` sets workers apart for a kind of task and says what each of them needs, in Ray's own terms; the other
    kinds are done by the `workers`, which need a CPU each:

        RayBackend(make, 4, "auto", {"train": {"workers": 2, "num_gpus": 1}, "assess": {"workers": 1, "num_cpus": 2}})

    An actor that dies, or whose node does, is replaced wherever there is room, and its task done again by the next that
    is free. Raises ValueError for a placement that is not one, and where for ten minutes no actor can be placed.
    """

    def __init__(
        self,
        make_worker: MakeWorker,
        workers: int,
        address: str | None = None,
        placement: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self._apart = {kind: _apart(kind, needs) for kind, needs in (placement or {}).items()}
        self._common = _Group(workers, {"num_cpus": 1})
        self._groups = [*self._apart.values(), self._common]
        if self.workers < 1:
            raise ValueError(f"workers is {workers}, and placement has none: at least one is needed to do the tasks")
        self._owner = not ray.is_initialized()
        if self._owner:
            _join(address, self._groups)
        self._make = _put(make_worker)
        self._actor: Any = ray.remote(_Actor)
        self._scratch = tempfile.mkdtemp(prefix="palestra-")
        self._remove = weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)
        self._members = Members()
        self._packed: dict[str, ray.ObjectRef] = {}
        self._stillborn = 0  # workers in a row that died before they were ready
        self._idle: list[_Hand] = []
        self._busy: dict[ray.ObjectRef, _Hand] = {}
        for group in self._groups:
            for _ in range(group.workers):
                self._hire(group)

    @property
    def workers(self) -> int:
        return sum(group.workers for group in self._groups)

    def share(self, name: str, folder: Path) -> None:
        self._members[name] = folder

    def submit(self, task: Task) -> None:
        group = self._apart.get(task.kind, self._common)
        if group.workers == 0:
            raise ValueError(f"no worker does {task.name}: placement has no {task.kind}, and workers is 0")
        group.waiting.add(task)
        self._hand_out()

    def wait(self, timeout: float | None = None) -> Done | None:
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

    def withdraw(self) -> int:
        for group in self._groups:
            group.waiting.clear()
        return sum(hand.task is not None for hand in self._busy.values())

    def close(self) -> None:
        hands = [*self._idle, *self._busy.values()]
        if hands and ray.is_initialized():
            ray.wait([hand.actor.forget.remote() for hand in hands], num_returns=len(hands), timeout=1.0)
            for hand in hands:
                ray.kill(hand.actor)
        if self._owner:
            ray.shutdown()
        self._idle.clear()
        self._busy.clear()
        self._remove()

    def _hire(self, group: _Group) -> None:
        actor = self._actor.options(scheduling_strategy="SPREAD", **group.options).remote()
        self._busy[actor.make.remote(self._make)] = _Hand(group, actor)

    def _hand_out(self) -> None:
        for hand in list(self._idle):
            if task := hand.group.waiting.next():
                members = {name: self._fetchable(name, folder) for name, folder in self._members.of(task).items()}
                self._idle.remove(hand)
                hand.task = task
                self._busy[hand.actor.do.remote(task, members)] = hand

    def _fetchable(self, name: str, folder: Path) -> ray.ObjectRef:
        """A member's files in the object store, put there when a task first needs them."""
        if name not in self._packed:
            self._packed[name] = ray.put(_packed(folder))
        return self._packed[name]

    def _hear(self, ref: ray.ObjectRef) -> Done | None:
        """What an actor says: a task is done, or it is ready, or (by an error of Ray's) dead."""
        hand = self._busy.pop(ref)
        try:
            answer = ray.get(ref)
        except RayTaskError as error:
            answer = str(error)
        except RayError as error:
            self._replace(hand, f"{type(error).__name__}: {error}")
            return None
        if isinstance(answer, str):
            raise failed(hand.task, answer) if hand.task else ValueError(f"a worker cannot be made: {answer}")
        self._stillborn, hand.ready, hand.group.missing = 0, True, None
        task, hand.task = hand.task, None
        self._idle.append(hand)
        return self._done(task, *answer) if task else None

    def _done(self, task: Task, result: Result, seconds: float, files: Files) -> Done:
        out = _unpacked(files, Path(tempfile.mkdtemp(dir=self._scratch))) if task.makes else None
        return Done(task, result, out, seconds)

    def _replace(self, hand: _Hand, why: str) -> None:
        """A new actor in place of a dead one, whose task waits in front."""
        ray.kill(hand.actor)  # it may only be out of reach
        if hand.task:
            hand.group.waiting.again(hand.task, why)
        elif not hand.ready:
            self._stillborn += 1
            if self._stillborn >= TRIES:
                raise ValueError(f"{TRIES} workers in a row died before they were ready, the last so: {why}")
        self._hire(hand.group)
        for idle in self._idle:  # their node may be gone too, and no task is to find that out by dying there
            self._busy[idle.actor.greet.remote()] = idle
        self._idle.clear()
        if hand.group.missing is None and not any(
            other.ready for other in self._busy.values() if other.group is hand.group
        ):
            hand.group.missing = time.monotonic()

    def _complain(self) -> None:
        """Raises ValueError where tasks have waited for too long for a first worker."""
        for group in self._groups:
            since = time.monotonic() - group.missing if group.missing is not None else 0.0
            if group.waiting.tasks and since > PATIENCE:
                nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
                raise ValueError(
                    f"no worker for task {group.waiting.tasks[0].name} in {PATIENCE:g} s: one needs {group.options}, "
                    f"the cluster's nodes have {nodes}; ask for less in placement, or add a node"
                )


def _apart(kind: str, needs: Mapping[str, Any]) -> _Group:
    """The workers that `placement` sets apart for a kind of task."""
    if unknown := [name for name in needs if name not in OPTIONS]:
        raise ValueError(f'placement.{kind} has "{unknown[0]}"; there are {", ".join(OPTIONS)}')
    workers = needs.get("workers", 1)
    if workers < 1:
        raise ValueError(f"placement.{kind}.workers is {workers}: leave {kind} out to have the other workers do it")
    return _Group(workers, {"num_cpus": 1} | {name: need for name, need in needs.items() if name != "workers"})


def _join(address: str | None, groups: Sequence[_Group]) -> None:
    """Joins the cluster at `address`, or starts one here that has the CPUs which these workers need."""
    if address is not None:
        ray.init(address=address, logging_level=logging.WARNING)
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 leaves workers little beside any other work here
    own: Counter[str] = Counter()  # resources of the user's naming, which no machine has by itself
    for group in groups:
        own.update({name: need * group.workers for name, need in group.options.get("resources", {}).items()})
    cpus = math.ceil(sum(group.workers * group.options["num_cpus"] for group in groups))
    ray.init(
        "local", num_cpus=max(cpus, 1), resources=dict(own), include_dashboard=False, logging_level=logging.WARNING
    )


def _put(make_worker: MakeWorker) -> ray.ObjectRef:
    try:
        return ray.put(make_worker)
    except TypeError as error:
        raise unsendable(error) from error
