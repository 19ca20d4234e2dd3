"""The Ray backend on a cluster of two nodes: placement of tasks, and recovery from the loss of a node."""

import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.toy_tasks import Adder, LookTask, Shelf, Sums, Teller, TellTask, TellToAssess, TellToTrain, expected

from palestra.parallel.tasks import Task, TaskResult
from palestra.populations.scheduler import PlanCallback, run_plan
from palestra.runs import Run, read_lines

ray = pytest.importorskip("ray")

from helpers import ray_cluster  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from ray.exceptions import ObjectLostError  # noqa: E402

from palestra.parallel.ray import cluster as clusters  # noqa: E402
from palestra.parallel.ray import workers  # noqa: E402
from palestra.parallel.ray.workers import RayBackend, _is_node_lost, traffic  # noqa: E402


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    with ray_cluster.worker_environment():
        yield


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Two nodes of two CPUs; one is called "home", the other "away"."""
    home, away = ({"num_cpus": 2, "resources": {name: 2}} for name in ("home", "away"))
    with ray_cluster.cluster(home, away) as nodes:
        yield nodes


def run_tasks(backend: RayBackend, *tasks: Task) -> dict[str, Any]:
    for task in tasks:
        backend.submit(task)
    found = [backend.wait(120.0) for _ in tasks]
    return {done.task.name: done.result for done in found if done}


def start_workers(backend: RayBackend, begun: Path) -> None:
    """Returns when every worker has run a task."""
    number = 0
    while len({file.suffix for file in begun.iterdir()}) < backend.workers:
        run_tasks(backend, *(LookTask(f"play/{number + i}") for i in range(backend.workers)))
        number += backend.workers
    for file in begun.iterdir():
        file.unlink()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_members_of_equal_content_are_sent_once(cluster: Cluster, tmp_path: Path) -> None:
    """Three members, of which two have equal files: each content is put into the object store once for all workers, and
    stays there while a member has it."""
    for name, number in {"one": "7", "same": "7", "other": "80"}.items():
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "number").write_text(number)
    before = traffic.copy()
    with closing(RayBackend(Adder, 4)) as backend:
        for name in ("one", "same", "other"):
            backend.add_member(name, tmp_path / name)
        names = [("one", "same"), ("same", "other"), ("one", "other")] * 4
        found = run_tasks(backend, *(LookTask(f"play/{i}", members=each) for i, each in enumerate(names)))
        assert [found[f"play/{i}"].value for i in range(3)] == [14, 87, 87]
        assert traffic["puts"] - before["puts"] == 2 and traffic["put_bytes"] - before["put_bytes"] == 3
        backend.remove_member("one")
        found = run_tasks(backend, *(LookTask(f"again/{i}", members=("same",)) for i in range(8)))
        assert {result.value for result in found.values()} == {7}
        backend.remove_member("same")
        backend.add_member("one", tmp_path / "one")  # deleted from the workers, so it is put again
        assert run_tasks(backend, LookTask("last", members=("one",)))["last"].value == 7
    assert traffic["puts"] - before["puts"] == 3


def lost_object() -> Any:
    """An object whose owner, an actor, has been killed."""

    class Owner:
        def put(self) -> list[Any]:
            return [ray.put(bytes(200_000))]

    owner = ray.remote(Owner).remote()
    (found,) = ray.get(owner.put.remote())
    ray.kill(owner)
    for _ in range(600):
        try:
            ray.get(found)
        except ObjectLostError:
            return found
        time.sleep(0.1)
    raise AssertionError("the object outlives its owner")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_large_outputs_are_sent_once(tmp_path: Path) -> None:
    """Later tasks fetch the object that the first task returned: nothing is sent twice. If the object was lost with a
    process, it is put again from its folder."""
    plan, before = Sums(4), traffic.copy()
    with Run.create(tmp_path, "") as run, closing(RayBackend(partial(Adder, ballast=200_000), 2)) as backend:
        assert run_plan(plan, backend, run)
        assert plan.total == expected(4) and traffic["returned_bytes"] - before["returned_bytes"] > 1_400_000
        assert traffic["puts"] == before["puts"]
        name, content = next(iter(backend._contents.items()))
        backend._stored[content] = backend._stored[content]._replace(files=lost_object())
        for hand in backend._idle:
            hand.drop(content)
        number = int((run.path / "members" / name / "deep" / "number").read_text())
        found = run_tasks(backend, *(LookTask(f"again/{i}", members=(name,)) for i in range(4)))
        assert {result.value for result in found.values()} == {number}
    assert 1 <= traffic["puts"] - before["puts"] <= 2  # by each of two workers, if both requested it at the same time


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_actor_evicts_least_recently_used_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "MAX_HELD", 3)
    names = [str(i) for i in range(8)]
    before = traffic.copy()
    with closing(RayBackend(Shelf, 1)) as backend:
        for name in names:
            (tmp_path / name).mkdir()
            (tmp_path / name / "number").write_text(name)
            backend.add_member(name, tmp_path / name)
        found = run_tasks(backend, *(LookTask(f"one/{name}", members=(name,)) for name in names))
        assert [found[f"one/{name}"].value for name in names] == [1, 2, 3, 3, 3, 3, 3, 3]
        assert run_tasks(backend, LookTask("all", members=tuple(names)))["all"].value == 8  # whatever a task needs
        assert run_tasks(backend, LookTask("next", members=("0",)))["next"].value == 3
        backend.remove_member("0")
        assert run_tasks(backend, LookTask("last", members=("1",)))["last"].value <= 3
    assert traffic["puts"] - before["puts"] == 8


class LoseNode(PlanCallback):
    """Kills the processes of the other node once some members have been made."""

    def __init__(self, nodes: Cluster, log: Path) -> None:
        self.nodes, self.log, self.before = nodes, log, b""

    def on_task_done(self, number: int, done: TaskResult, lines: Mapping[str, object]) -> None:
        if number == 6:
            self.before = self.log.read_bytes()
            away = next(node for node in self.nodes.list_all_nodes() if not node.is_head())
            self.nodes.remove_node(away, allow_graceful=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_run_survives_the_loss_of_a_node(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the workers die with their tasks and the members that they made; the remaining workers run these tasks
    again, and all others."""
    plan = Sums(16)
    begun = tmp_path / "begun"
    begun.mkdir()
    make = partial(Adder, 0.5, begun=str(begun), ballast=200_000)
    with Run.create(tmp_path, "") as run, closing(RayBackend(make, 4)) as backend:
        start_workers(backend, begun)
        watcher = LoseNode(cluster, run.path / "tasks.jsonl")
        queue, lost = backend._common.queue, []
        finish = queue.finish

        def finish_and_keep(task: Task) -> None:
            lost.extend(queue.deaths.get(task.name, []))  # the queue forgets the task once it is done
            finish(task)

        monkeypatch.setattr(queue, "finish", finish_and_keep)
        assert run_plan(plan, backend, run, callback=watcher)
        for _ in range(600):  # the cluster may notice the loss only after the run
            if all(map(_is_node_lost, lost)):
                break
            time.sleep(0.1)
        assert lost and all(map(_is_node_lost, lost))  # no loss counts against a task
    assert plan.total == expected(16)
    assert watcher.before.count(b"\n") == 7
    assert (run.path / "tasks.jsonl").read_bytes().startswith(watcher.before)
    assert len(read_lines(run.path / "tasks.jsonl")) == 62
    assert sum(node["Alive"] for node in ray.nodes()) == 1
    assert len(list(begun.iterdir())) > 62  # tasks that ran on the lost node were started twice


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tasks_run_on_their_placement(cluster: Cluster, tmp_path: Path) -> None:
    apart = {
        "train": {"workers": 2, "resources": {"home": 1}, "num_cpus": 0.5},
        "play": {"resources": {"away": 1}, "num_cpus": 0.5},
    }
    with closing(RayBackend(Teller, 1, placement=apart)) as backend:
        assert backend.workers == 4
        types = (TellToTrain, TellTask, TellToAssess)
        tasks = [type_(f"{type_.kind}/{i}", 0.2) for type_ in types for i in range(4)]
        results = run_tasks(backend, *tasks)
    parents = {
        kind: {result.parent for name, result in results.items() if name.startswith(kind)}
        for kind in ("train", "play", "assess")
    }
    assert len(results) == 12 and all(len(nodes) == 1 for nodes in parents.values())
    assert parents["train"] != parents["play"]
    pids = {kind: {r.pid for name, r in results.items() if name.startswith(kind)} for kind in parents}
    assert not pids["train"] & pids["play"] and not pids["assess"] & (pids["train"] | pids["play"])


@pytest.mark.slow
def test_missing_placement_is_explained(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "PLACEMENT_TIMEOUT_S", 3.0)
    with closing(RayBackend(Teller, 0, placement={"train": {"resources": {"moon": 1}}})) as backend:
        with pytest.raises(ValueError, match=r"no worker for task train/1 in 3 s: one needs .*moon.*nodes have .*away"):
            run_tasks(backend, TellToTrain("train/1"))
        with pytest.raises(ValueError, match="no worker does play/1: placement has no play"):
            backend.submit(TellTask("play/1"))


@pytest.mark.slow
def test_single_machine_offers_the_named_resources() -> None:
    with closing(RayBackend(Teller, 0, placement={"play": {"workers": 2, "resources": {"moon": 0.5}}})):
        assert ray.cluster_resources()["moon"] == 1.0
    assert not ray.is_initialized()


@pytest.mark.slow
def test_workers_of_a_cluster_started_here_take_turns(tmp_path: Path) -> None:
    """Three workers, of which two may run a task at a time: all three get some."""
    with closing(RayBackend(Teller, 3, placement={"train": {"workers": 1}}, at_once=2)) as backend:
        for i in range(12):
            backend.submit(TellTask(f"play/{i}", 0.2))
        backend.submit(TellToTrain("train/0", 0.2))
        found, most = [], 0
        while done := backend.wait(120.0):
            found.append(done.result)
            most = max(most, backend._running(backend._common))
    assert len(found) == 13 and most == 2
    assert len({result.pid for result in found}) == 4  # the worker with a placement is not counted


@pytest.mark.parametrize(
    ("workers", "placement", "message"),
    [
        (0, None, "workers is 0, and placement has none"),
        (1, {"train": {"gpus": 1}}, r'placement.train has "gpus"; there are workers, num_cpus, num_gpus'),
        (1, {"train": {"workers": 0}}, "placement.train.workers is 0: leave train out"),
    ],
)
def test_invalid_placements_are_explained(workers: int, placement: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RayBackend(Teller, workers, placement=placement)
    assert not ray.is_initialized()
