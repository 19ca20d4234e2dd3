"""The scheduler: every finished task counts once, and a resume after any kill is exact."""

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
from helpers.toy_follow import contents, done_run, new_run, resume
from helpers.toy_tasks import Adder, LookTask, Sums, Value, expected, make

from palestra.core.files import read_checksummed, read_lines
from palestra.core.types import Metrics
from palestra.parallel.inline import InlineBackend
from palestra.parallel.tasks import Result, Task, TaskResult
from palestra.populations.scheduler import PlanCallback, run_plan
from palestra.runs import Run

ROOT = Path(__file__).parent.parent.parent


class Given:
    """A plan of given tasks, none of which adds others."""

    def __init__(self, *tasks: Task) -> None:
        self.tasks = tasks

    def initial_tasks(self) -> Sequence[Task]:
        return self.tasks

    def on_result(self, task: Task, result: Result) -> Sequence[Task]:
        return []

    def task_metrics(self, task: Task, result: Result) -> Mapping[str, Metrics]:
        return {}


def follow_given(root: Path, *tasks: Task) -> None:
    with new_run(root) as run:
        run_plan(Given(*tasks), InlineBackend(Adder), run)


def test_plan_runs_to_its_end(tmp_path: Path) -> None:
    path, plan = done_run(tmp_path)
    assert plan.total == expected(8)
    assert (path / "members" / "sum-0-8" / "deep" / "number").read_text() == str(plan.total)
    lines = read_lines(path / "tasks.jsonl")
    assert [(line["task"]["name"], Value(**line["result"])) for line in lines] == plan.heard
    assert len(lines) == 15 + 15  # 8 + 4 + 2 + 1 members, each trained and played
    assert sorted(file.name for file in (path / "members").iterdir()) == sorted(plan.made)


def test_task_log_records_finished_tasks(tmp_path: Path) -> None:
    path, plan = done_run(tmp_path, 2)
    line = read_checksummed(path / "tasks.jsonl")[-2]
    number = str(plan.total).encode()
    assert line == {
        "number": 4,
        "kind": "train",
        "task": {
            "name": "train/sum-0-2",
            "members": ["sum-0-1", "sum-1-2"],
            "output_member": "sum-0-2",
            "low": 0,
            "high": 2,
        },
        "files": {"deep/number": line["files"]["deep/number"]},
        "result": {"value": plan.total},
    }
    summed = subprocess.run(["sha256sum"], input=number, capture_output=True, check=True).stdout.split()[0].decode()
    assert line["files"]["deep/number"] == {"bytes": len(number), "sha256": summed}
    timings = read_lines(path / "timings.jsonl")
    assert [t["task"] for t in timings] == [t["task"]["name"] for t in read_lines(path / "tasks.jsonl")]
    assert all(0 <= t["seconds"] <= t["elapsed_s"] for t in timings)
    assert read_lines(path / "metrics.jsonl") == [
        {"step": 0, "policy": "team", "made": 1},
        {"step": 1, "policy": "team", "made": 2},
        {"step": 4, "policy": "team", "made": 3},
    ]


def test_equal_plans_give_identical_files(tmp_path: Path) -> None:
    (one, _), (two, _) = done_run(tmp_path), done_run(tmp_path, name="other")
    assert contents(one) == contents(two)


def test_finished_run_is_replayed_without_tasks(tmp_path: Path) -> None:
    path, plan = done_run(tmp_path)
    before = contents(path)
    again, backend = Sums(8), InlineBackend(partial(Adder, bad="train/sum-0-1"))
    with Run.open(path) as run:
        assert run_plan(again, backend, run)
    assert again.heard == plan.heard and contents(path) == before


@pytest.mark.parametrize("tasks", [0, 1, 7, 29])
def test_resume_after_stop_is_bit_identical(tmp_path: Path, tasks: int) -> None:
    class StopAfter(PlanCallback):
        seen = 0

        def on_task_done(self, number: int, done: TaskResult, lines: Mapping[str, object]) -> None:
            assert number == self.seen
            self.seen += 1

    watcher = StopAfter()
    with new_run(tmp_path) as run:
        assert not run_plan(Sums(8), InlineBackend(Adder), run, callback=watcher, stop=lambda: watcher.seen >= tasks)
    assert len(read_lines(run.path / "tasks.jsonl")) == tasks
    elapsed = max((t["elapsed_s"] for t in read_lines(run.path / "timings.jsonl")), default=0.0)
    assert resume(run.path).total == expected(8)
    assert contents(run.path) == contents(done_run(tmp_path, name="whole")[0])
    assert all(t["elapsed_s"] >= elapsed for t in read_lines(run.path / "timings.jsonl")[tasks:])


def test_leftovers_of_a_crash_are_removed(tmp_path: Path) -> None:
    path, _ = done_run(tmp_path)
    whole = contents(path)
    lines = (path / "tasks.jsonl").read_bytes().splitlines(keepends=True)
    (path / "tasks.jsonl").write_bytes(b"".join(lines[:10]) + lines[10][:20])  # its last line is torn
    (path / "metrics.jsonl").write_text('{"step": 0, "poli')
    timings = (path / "timings.jsonl").read_bytes().splitlines(keepends=True)
    (path / "timings.jsonl").write_bytes(b"".join(timings[:10]))
    (path / "members" / ".tmp-sum-0-1").mkdir()
    (path / "members" / "sum-0-8" / "deep" / "number").write_text("1")  # a member without a line is ignored
    resume(path)
    assert contents(path) == whole


@pytest.mark.parametrize("damage", ["damaged", "missing"])
def test_changed_member_is_named(tmp_path: Path, damage: str) -> None:
    path, _ = done_run(tmp_path)
    number = path / "members" / "sum-0-2" / "deep" / "number"
    number.unlink() if damage == "missing" else number.write_text("1")
    with pytest.raises(ValueError, match=f"sum-0-2/deep/number is {damage}"):
        resume(path)


def test_resume_with_another_plan_is_refused(tmp_path: Path) -> None:
    path, _ = done_run(tmp_path)
    with pytest.raises(ValueError, match=r"line 5: the run did train task train/sum-4-5, which is not in the plan"):
        resume(path, leaves=4)


def test_member_names_are_unique_and_plain(tmp_path: Path) -> None:
    first = make("x")
    twice = LookTask(first.name)
    for second, what in (twice, "task train/x"), (LookTask("b", output_member="x"), "member x"):
        with pytest.raises(ValueError, match=f"the plan names {what} twice"):
            follow_given(tmp_path, first, second)
    for name in ("a/b", "..", ".hidden"):
        with pytest.raises(ValueError, match="a member's name is a plain folder name"):
            follow_given(tmp_path, make(name))


def test_failed_task_ends_the_run_and_keeps_finished_tasks(tmp_path: Path) -> None:
    with new_run(tmp_path) as run, pytest.raises(ValueError, match="task train/sum-0-2 failed: RuntimeError: no train"):
        run_plan(Sums(8), InlineBackend(partial(Adder, bad="train/sum-0-2")), run)
    assert resume(run.path).total == expected(8)
    assert contents(run.path) == contents(done_run(tmp_path, name="whole")[0])


def in_another_process(path: Path, kind: str, leaves: int, deadly: int = -1) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "helpers.toy_follow", str(path), kind, str(leaves), str(deadly)]
    return subprocess.Popen(command, cwd=ROOT / "tests")


def kill_at(root: Path, deadly: int) -> bool:
    """Runs in a process that dies at one of its file operations, then to the end; returns False if the run ended before
    that."""
    with new_run(root, f"killed-{deadly}") as run:
        pass
    died = in_another_process(run.path, "inline", 4, deadly).wait() == -signal.SIGKILL
    kept = (run.path / "tasks.jsonl").read_bytes() if (run.path / "tasks.jsonl").exists() else b""
    resume(run.path, 4)
    assert (run.path / "tasks.jsonl").read_bytes().startswith(kept)
    assert contents(run.path) == contents(done_run(root, 4, f"whole-{deadly}")[0])
    return died


@pytest.mark.parametrize("deadly", [0, 37, 90])
def test_kill_at_a_file_operation_loses_no_task(tmp_path: Path, deadly: int) -> None:
    assert kill_at(tmp_path, deadly)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kill_at_every_file_operation_loses_no_task(tmp_path: Path) -> None:
    deadly = 0
    while kill_at(tmp_path, deadly):
        deadly += 7
    assert deadly > 100  # at least as many as its tasks make, otherwise the test proves nothing


def kill_again_and_again(root: Path, kind: str, leaves: int, kills: int) -> None:
    """Runs in processes that are killed at random moments, then to the end. With several workers only the order of the
    lines may differ."""
    chance, killed = random.Random(0), 0
    new_run(root, "killed").close()
    path = root / "killed"
    for kill in range(1, kills + 1):
        process = in_another_process(path, kind, leaves)
        enough = (4 * leaves - 2) * kill // (kills + 1)
        while process.poll() is None and len(read_lines(path / "tasks.jsonl")) < enough:
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 0.02))
        process.kill()
        if process.wait() == 0:
            break  # on a busy machine the run ended before the kill
        assert process.returncode == -signal.SIGKILL
        killed += 1
    assert killed
    assert in_another_process(path, kind, leaves).wait() == 0
    whole, ended = contents(done_run(root, leaves, "whole")[0]), contents(path)
    assert as_set(ended.pop("tasks.jsonl")) == as_set(whole.pop("tasks.jsonl"))
    assert ended.pop("metrics.jsonl").count(b"\n") == whole.pop("metrics.jsonl").count(b"\n")
    assert ended == whole


def as_set(log: bytes) -> set[str]:
    lines = [json.loads(line) for line in log.splitlines()]
    assert [line.pop("number") for line in lines] == list(range(len(lines)))
    tasks = {json.dumps(line | {"checksum": ""}) for line in lines}
    assert len(tasks) == len(lines)
    return tasks


def test_resume_after_three_kills_is_bit_identical(tmp_path: Path) -> None:
    kill_again_and_again(tmp_path, "local", 16, 3)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["inline", "local"])
def test_resume_after_twenty_kills_is_bit_identical(tmp_path: Path, kind: str) -> None:
    kill_again_and_again(tmp_path, kind, 128, 20)
