"""A population's run with damaged files ends as the undamaged run, or is refused with one line and not changed."""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers.toy_follow import contents, done_run, new_run, resume
from helpers.toy_tasks import Adder, Sums

from palestra.api.agents.trained_agent import find_agents
from palestra.core.files import to_checksummed_line
from palestra.evaluation.report.population_data import read_record
from palestra.parallel.inline import InlineBackend
from palestra.parallel.tasks import Result, Task
from palestra.populations.scheduler import PlanCallback, run_plan
from palestra.populations.task_json import TaskRecord
from palestra.populations.tasks import PlayResult, PlayTask
from palestra.runs import Run

Damage = Callable[[Path], object]
NUMBER = "members/sum-0-1/deep/number"


class StopAfter(PlanCallback):
    """Requests a stop after some tasks."""

    def __init__(self, tasks: int) -> None:
        self.left = tasks

    def on_task_done(self, number: int, done: object, lines: object) -> None:
        self.left -= 1


class Stopped(NamedTuple):
    run: Path
    whole: dict[str, bytes]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """A run that stopped after 12 of its 30 tasks, and the result of the uninterrupted run."""
    root, watcher = tmp_path_factory.mktemp("tasks"), StopAfter(12)
    backend = InlineBackend(Adder)
    with new_run(root) as run:
        run_plan(Sums(8), backend, run, callback=watcher, stop=lambda: watcher.left <= 0)
    backend.close()
    return Stopped(run.path, contents(done_run(root, name="whole")[0]))


@pytest.fixture
def copied(stopped: Stopped, tmp_path: Path) -> Path:
    shutil.copytree(stopped.run, tmp_path / "demo")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").write_text("precious")
    return tmp_path / "demo"


def write(name: str, data: bytes) -> Damage:
    return lambda run: (run / name).write_bytes(data)


def lines(change: Callable[[list[bytes]], list[bytes]], name: str = "tasks.jsonl") -> Damage:
    return lambda run: (run / name).write_bytes(b"".join(change((run / name).read_bytes().splitlines(keepends=True))))


def forge(number: int, **changes: object) -> Damage:
    """Changes a line of tasks.jsonl, and gives it the checksum of its new contents."""

    def change(kept: list[bytes]) -> list[bytes]:
        line = json.loads(kept[number]) | changes
        del line["checksum"]
        kept[number] = to_checksummed_line(line)
        return kept

    return lines(change)


def both(*damages: Damage) -> Damage:
    return lambda run: [damage(run) for damage in damages]


def pipe(run: Path) -> None:
    (run / "tasks.jsonl").unlink()
    os.mkfifo(run / "tasks.jsonl")


def link_out(run: Path) -> None:
    shutil.move(run / "members", run.parent / "outside" / "members")
    (run / "members").symlink_to(run.parent / "outside" / "members")


OUT = {"../../outside/precious": {"bytes": 8, "sha256": "0" * 64}}
SAME: dict[str, Damage] = {
    "nothing": lambda run: None,
    "metrics missing": lambda run: (run / "metrics.jsonl").unlink(),
    "metrics garbage": write("metrics.jsonl", b"\xff\n"),
    "timings missing": lambda run: (run / "timings.jsonl").unlink(),
    "the last task and its timing missing": both(
        lines(lambda kept: kept[:-1]), lines(lambda kept: kept[:-1], "timings.jsonl")
    ),
    "a torn line": lines(lambda kept: [*kept, kept[-1][:20]]),
    "a member without a task": lambda run: shutil.copytree(run / "members/sum-0-1", run / "members/stranger"),
    "a half-written member": lambda run: (run / "members/.tmp-sum-0-8/deep").mkdir(parents=True),
    "a file among the members": write("members/notes", b""),
}
REFUSED: dict[str, tuple[Damage, str]] = {
    "tasks missing": (lambda run: (run / "tasks.jsonl").unlink(), "tasks.jsonl is missing"),
    "tasks empty": (write("tasks.jsonl", b""), "has lost lines"),
    "tasks and timings empty": (both(write("tasks.jsonl", b""), write("timings.jsonl", b"")), "has lost lines"),
    "the last task missing": (lines(lambda kept: kept[:-1]), "has lost lines: it has 11, and the run has done 12"),
    "the first task missing": (lines(lambda kept: kept[1:]), "has lost lines"),
    "tasks reversed": (lines(lambda kept: kept[::-1]), "line 1 is not the line of task number 0"),
    "a task twice": (lines(lambda kept: [*kept, kept[-1]]), "line 13 is not the line of task number 12"),
    "a byte of a task": (
        lines(lambda kept: [kept[0].replace(b"value", b"valve"), *kept[1:]]),
        "line 1 is not as it was",
    ),
    "tasks of JSON without checksums": (write("tasks.jsonl", b'{"task": "x"}\n' * 12), "line 1 is not as it was"),
    "tasks are a pipe": (pipe, "neither a file nor a folder"),
    "a forged task": (forge(0, task=["x"]), "line 1 is not the line of task number 0"),
    "a task of another kind": (forge(0, kind="play"), "line 1: the run did play task train/sum-0-1, which is not in"),
    "a key of the task missing": (
        forge(0, task={"name": "train/sum-0-1", "output_member": "sum-0-1", "members": [], "low": 0}),
        'tasks.jsonl, line 1: task: key "high" is missing',
    ),
    "a key of the task unknown": (
        forge(0, task={"name": "train/sum-0-1", "output_member": "sum-0-1", "members": [], "low": 0, "heigh": 1}),
        "tasks.jsonl, line 1: task.heigh: this key is unknown",
    ),
    "a key of the line unknown": (forge(0, makes="sum-0-1"), 'line 1: key "makes" is unknown; there are number, kind'),
    "a key of the result missing": (forge(1, result={}), r"tasks.jsonl, line 2: result\.value: this key is missing"),
    "a result of another type": (forge(1, result={"value": "much"}), r"line 2: result\.value: input should be a valid"),
    "no result": (forge(1, result=3), "line 2: result: input should be a dictionary or an instance of Value"),
    "forged files": (forge(0, files=["x"]), "line 1: files: input should be a valid dictionary"),
    "forged checksums": (forge(0, files={"x": {}}), "line 1: files: these are not checksums"),
    "files outside": (forge(0, files=OUT), "is not a path inside"),
    "timings garbage": (write("timings.jsonl", b"nonsense\n"), "timings.jsonl, line 1 is not a JSON object"),
    "a byte of a member": (write(NUMBER, b"9"), f"{NUMBER} is damaged"),
    "a member missing": (lambda run: shutil.rmtree(run / "members/sum-0-1"), f"{NUMBER} is missing"),
    "members are a link that leads out": (link_out, "a link that leads out"),
}


@pytest.mark.parametrize("name", SAME)
def test_damaged_task_logs_resume_to_the_undamaged_result(stopped: Stopped, copied: Path, name: str) -> None:
    SAME[name](copied)
    resume(copied)
    assert contents(copied) == stopped.whole


@pytest.mark.parametrize("name", REFUSED)
def test_damaged_tasks_are_refused_and_kept(copied: Path, name: str) -> None:
    damage, message = REFUSED[name]
    damage(copied)
    before = {
        str(file): file.read_bytes() for file in copied.parent.rglob("*") if file.is_file() and file.name != ".lock"
    }
    with pytest.raises(ValueError, match=message) as refusal, Run.open(copied) as run:
        run_plan(Sums(8), InlineBackend(Adder), run)
    assert "\n" not in str(refusal.value)
    after = {
        str(file): file.read_bytes() for file in copied.parent.rglob("*") if file.is_file() and file.name != ".lock"
    }
    assert after == before


def test_result_that_the_plan_rejects_is_named(tmp_path: Path) -> None:
    class Forgetful(Sums):
        def on_result(self, task: Task, result: Result) -> Sequence[Task]:
            if task.kind == "assess":
                raise KeyError(task.name)
            return super().on_result(task, result)

    path, _ = done_run(tmp_path, 2)
    refusal = r"line 6: the plan cannot take the result of assess/sum-0-2 \(KeyError"
    with pytest.raises(ValueError, match=refusal), Run.open(path) as run:
        run_plan(Forgetful(2), InlineBackend(Adder), run)


@pytest.mark.parametrize("name", ["../../outside", "/etc", "..", "", "a\0b"])
def test_member_paths_outside_the_run_are_refused(tmp_path: Path, name: str) -> None:
    with Run.create(tmp_path, "population: {type: psro}\n", "demo") as run:
        (run.path / "population.json").write_text(json.dumps([{"name": name, "player": "a"}]))
        task = PlayTask("x", cells=(), games_per_cell=1)
        run.append_line("tasks.jsonl", TaskRecord(0, task, {}, PlayResult(())).to_json())
    for read in (find_agents, read_record):
        with pytest.raises(ValueError, match="is not a path inside"):
            read(run.path)
