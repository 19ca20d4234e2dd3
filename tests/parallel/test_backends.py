"""Conformance tests of all backends through the scheduler's interface, and recovery from lost workers."""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.toy_tasks import (
    Adder,
    LookTask,
    Odd,
    OddResult,
    OddTask,
    ProcessInfo,
    Sums,
    Teller,
    TellTask,
    Value,
    cannot,
    dies,
    expected,
    leaf,
    make,
)

from palestra.core.config import validate
from palestra.parallel.config import PopulationBackendConfig
from palestra.parallel.inline import InlineBackend
from palestra.parallel.local import LocalBackend
from palestra.parallel.tasks import Backend, TaskResult
from palestra.populations.scheduler import run_plan
from palestra.runs import Run, read_lines

pytest.importorskip("ray")

from helpers import ray_cluster

from palestra.parallel.ray.workers import RayBackend

KINDS: dict[str, Callable[..., Any]] = {
    "inline": lambda make, _: InlineBackend(make),
    "local": LocalBackend,
    "ray": RayBackend,
}
Open = Callable[..., Backend]


RAY = pytest.param("ray", marks=pytest.mark.slow)  # its actors take seconds to start


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One Ray cluster for all tests in this file."""
    with ray_cluster.cluster({"num_cpus": 4}):
        yield


def open_backends(kind: str, request: pytest.FixtureRequest) -> Iterator[Open]:
    if kind == "ray":
        request.getfixturevalue("cluster")
    backends: list[Backend] = []

    def make(make_worker: Callable[[], Any] = Adder, workers: int = 2) -> Backend:
        backends.append(KINDS[kind](make_worker, workers))
        return backends[-1]

    yield make
    for backend in backends:
        backend.close()


@pytest.fixture(params=["inline", "local", RAY])
def backend(request: pytest.FixtureRequest) -> Iterator[Open]:
    yield from open_backends(request.param, request)


@pytest.fixture(params=["local", RAY])
def process_backend(request: pytest.FixtureRequest) -> Iterator[Open]:
    """Backends whose workers are other processes."""
    yield from open_backends(request.param, request)


def run_sums(root: Path, backend: Backend, leaves: int = 8) -> Sums:
    plan = Sums(leaves)
    with Run.create(root, "leaves: 8\n") as run:
        assert run_plan(plan, backend, run)
    assert plan.total == expected(leaves)
    return plan


def make_member(backend: Backend, folder: Path) -> None:
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "number").write_text("11")
    backend.add_member(folder.name, folder)


def wait_result(backend: Backend, seconds: float = 60.0) -> TaskResult:
    found = backend.wait(seconds)
    assert found is not None
    return found


def process_info(backend: Backend) -> ProcessInfo:
    result = wait_result(backend).result
    assert isinstance(result, ProcessInfo)
    return result


def test_plan_runs_to_its_end(backend: Open, tmp_path: Path) -> None:
    plan = run_sums(tmp_path, backend())
    assert len(plan.heard) == 30


def test_task_outputs_belong_to_the_caller(backend: Open) -> None:
    open_backend = backend()
    open_backend.submit(make("a"))
    found = wait_result(open_backend)
    assert found.task.name == "train/a" and found.seconds >= 0 and found.folder
    assert (found.folder / "deep" / "number").read_text() == str(leaf("train/a")) and found.result == Value(
        leaf("train/a")
    )


def test_shared_members_are_found_by_workers(backend: Open, tmp_path: Path) -> None:
    open_backend = backend()
    make_member(open_backend, tmp_path / "x")
    for name in ("play/1", "play/2"):
        open_backend.submit(LookTask(name, members=("x",)))
    assert [wait_result(open_backend).result for _ in range(2)] == [Value(11)] * 2


def test_removed_member_is_gone_on_all_workers(backend: Open, tmp_path: Path) -> None:
    """A new member of the same name is then found, also by workers that had the old one."""
    open_backend = backend()
    for name, number in (("x", "11"), ("y", "22")):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "number").write_text(number)
        open_backend.add_member("x", tmp_path / name)
        for i in range(6):
            open_backend.submit(LookTask(f"play/{name}-{i}", members=("x",)))
        assert [wait_result(open_backend).result for _ in range(6)] == [Value(int(number))] * 6
        open_backend.remove_member("x")
    with pytest.raises(ValueError, match="needs x: no finished task made"):
        for _ in range(3):
            open_backend.submit(LookTask("play/late", members=("x",)))
            open_backend.wait(10.0)


def test_unknown_member_is_named(backend: Open) -> None:
    open_backend = backend()
    with pytest.raises(ValueError, match="task play/1 needs ghost: no finished task made"):
        for _ in range(3):  # reported once a worker is free
            open_backend.submit(LookTask("play/1", members=("ghost",)))
            open_backend.wait(10.0)


def test_task_error_names_the_task_and_the_workers_error(backend: Open) -> None:
    open_backend = backend(partial(Adder, bad="play/1"))
    open_backend.submit(LookTask("play/1"))
    with pytest.raises(ValueError, match=r"(?s)task play/1 failed: .*RuntimeError: no play/1 today"):
        wait_result(open_backend)


def test_results_survive_json(backend: Open) -> None:
    open_backend = backend(Odd)
    open_backend.submit(OddTask("good"))
    assert wait_result(open_backend).result == OddResult((1, 2), None, {"3": 0.5, "thing": None})
    open_backend.submit(OddTask("bad"))
    with pytest.raises(ValueError, match=r"(?s)task bad failed: .*TypeError: Object of type object is not JSON"):
        wait_result(open_backend)


def test_result_of_wrong_type_is_refused(backend: Open) -> None:
    open_backend = backend(Odd)
    open_backend.submit(OddTask("other"))
    with pytest.raises(ValueError, match=r"(?s)task other failed: .*the worker returned Value, not OddResult"):
        wait_result(open_backend)


def test_cancelled_tasks_are_dropped(backend: Open) -> None:
    open_backend = backend(partial(Adder, seconds=0.3))
    for i in range(8):
        open_backend.submit(LookTask(f"play/{i}"))
    first = wait_result(open_backend)
    busy = open_backend.cancel_pending()
    assert busy <= open_backend.workers and (busy > 0) != isinstance(open_backend, InlineBackend)
    rest = [wait_result(open_backend) for _ in range(busy)]
    assert open_backend.wait(0.5) is None
    assert len({found.task.name for found in [first, *rest]}) == busy + 1


def test_stop_finishes_running_tasks_and_resume_does_the_rest(backend: Open, tmp_path: Path) -> None:
    slow = partial(Adder, seconds=0.1)
    with Run.create(tmp_path, "") as run:
        plan = Sums(8)
        assert not run_plan(plan, backend(slow), run, stop=lambda: len(plan.heard) >= 3)
        assert 3 <= len(plan.heard) <= 5
        again = Sums(8)
        assert run_plan(again, backend(), run)
    assert again.heard[: len(plan.heard)] == plan.heard and again.total == expected(8)


# ---- workers that are processes


SLOW = {"train/sum-0-1": 1.0}  # seconds of the first task of `Sums`


def result_order(root: Path, backend: Backend, as_completed: bool) -> list[str]:
    """Names of the tasks in the order in which the plan got their results."""
    plan = Sums(4)
    with Run.create(root, "", f"{as_completed}") as run:
        assert run_plan(plan, backend, run, as_completed=as_completed)
    return [name for name, _ in plan.heard]


def test_results_are_in_task_order(process_backend: Open, tmp_path: Path) -> None:
    backend = process_backend(partial(Adder, slow=SLOW))
    assert backend.workers > 1
    alone = result_order(tmp_path / "alone", InlineBackend(Adder), as_completed=False)
    assert result_order(tmp_path / "others", backend, as_completed=False) == alone


def test_as_completed_yields_results_early(process_backend: Open, tmp_path: Path) -> None:
    backend = process_backend(partial(Adder, slow=SLOW))
    made = [name for name in result_order(tmp_path, backend, as_completed=True) if name.startswith("train/")]
    assert made.index("train/sum-0-1") > made.index("train/sum-1-2")


def test_workers_are_processes_of_one_thread_each(process_backend: Open) -> None:
    backend = process_backend(Teller)
    found: list[ProcessInfo] = []
    while len({result.pid for result in found}) < 2:  # one worker may take longer to start
        backend.submit(TellTask(f"play/{len(found)}", 0.1))
        backend.submit(TellTask(f"play/{len(found) + 1}", 0.1))
        found += [process_info(backend), process_info(backend)]
    assert os.getpid() not in {result.pid for result in found}
    assert {result.threads for result in found} == {"1"}


def test_task_of_a_killed_worker_is_retried(process_backend: Open, tmp_path: Path) -> None:
    bodies = tmp_path / "bodies"
    bodies.mkdir()
    fatal = {"train/sum-0-1": 1, "train/sum-0-4": 2, "train/sum-6-7": 1}
    plan = run_sums(tmp_path, process_backend(partial(Adder, fatal=fatal, bodies=str(bodies))))
    assert len(list(bodies.iterdir())) == 4
    assert len(plan.heard) == 30
    (path,) = tmp_path.glob("*/workers.jsonl")
    lines = read_lines(path)
    assert sum(line.get("lost", 0) for line in lines) == 4
    assert sum(line.get("done", 0) for line in lines) == 30
    assert all(f" on {socket.gethostname()}" in line["where"] for line in lines if "done" in line)


def test_task_that_kills_every_worker_is_given_up(process_backend: Open, tmp_path: Path) -> None:
    backend = process_backend(partial(Adder, fatal={"train/a": 9}, bodies=str(tmp_path)))
    backend.submit(make("a"))
    with pytest.raises(ValueError, match="3 workers died at task train/a"):
        wait_result(backend)
    assert len(list(tmp_path.iterdir())) == 3


def test_killed_idle_worker_is_replaced(process_backend: Open) -> None:
    backend = process_backend(Teller, 1)
    pids = set()
    for i in range(3):
        backend.submit(TellTask(f"play/{i}"))
        pids.add(pid := process_info(backend).pid)
        os.kill(pid, signal.SIGKILL)
    assert len(pids) == 3


def test_worker_start_error_is_reported(process_backend: Open) -> None:
    backend = process_backend(cannot)
    backend.submit(LookTask("play/1"))
    with pytest.raises(ValueError, match=r"(?s)a worker cannot be made: .*no worker today"):
        wait_result(backend)


def test_worker_restarts_are_limited(process_backend: Open) -> None:
    backend = process_backend(dies, 1)
    backend.submit(LookTask("play/1"))
    with pytest.raises(ValueError, match="3 workers in a row died before they were ready"):
        wait_result(backend)


def test_unpicklable_tasks_are_explained(process_backend: Open) -> None:
    with pytest.raises(ValueError, match="cannot be sent to another process"):
        process_backend(partial(Adder, bodies=threading.Lock()))  # type: ignore[arg-type]


def test_config_sets_the_tasks_that_run_at_once() -> None:
    """By default as many as there are CPUs; the limit applies only to a Ray cluster started on this machine."""
    config = partial(validate, PopulationBackendConfig)
    many = config({"type": "ray", "workers": 64})
    assert many.ray_tasks_at_once == os.cpu_count() and many.num_at_once == min(64, os.cpu_count() or 1)
    assert config({"type": "local", "workers": 64}).num_at_once == 64
    assert config({"type": "ray", "tasks_at_once": 7}).ray_tasks_at_once == 7
    assert config({"type": "ray", "address": "auto"}).ray_tasks_at_once is None
    for other in ({"type": "local"}, {"type": "ray", "address": "auto"}):
        with pytest.raises(ValueError, match="tasks_at_once: 7 is for a Ray cluster that is started on this machine"):
            config({"tasks_at_once": 7, **other})
