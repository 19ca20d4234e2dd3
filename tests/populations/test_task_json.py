"""Tasks and results survive JSON bit for bit, and invalid records are named."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.core.files import DamagedFile, parse_checksummed, to_checksummed_line, to_json_line
from palestra.parallel.task_json import through_json
from palestra.parallel.tasks import Result, Task
from palestra.populations.payoffs import PayoffCell
from palestra.populations.task_json import TaskRecord, read_records, task_record
from palestra.populations.tasks import (
    AssessResult,
    AssessTask,
    Lineup,
    OpponentResult,
    Opponents,
    PlayResult,
    PlayTask,
    SolveResult,
    SolveTask,
    TrainResult,
    TrainTask,
)

FILES = {"policy.safetensors": {"bytes": 3, "sha256": "0" * 64}}
TRAIN = TrainTask(
    "train/red-2",
    player="red",
    opponents=Opponents({"blue": {"blue-1": 1 / 3, "uniform": 2 / 3}}),
    start="red-1",
    self_play=0.1,
    env_steps=1000,
    settings={"lr": 1e-3},
    learner="main_0",
    copied_from="main_1",
    members=("red-1", "blue-1"),
    output_member="red-2",
)
TRAINED = TrainResult(
    env_steps=1024,
    mean_return=1 / 3,
    opponents={"blue-1": OpponentResult(3, 1 / 3, 1 / 7, 1, 0.5)},
    metrics={"loss": 0.1, "entropy": None},
    policy_digest="ab",
)
JOINT = TrainTask("t", player="a", opponents=Opponents(joint=(Lineup({"b": "x", "c": "y"}, 0.25),)), train_steps=3)
PAIRS: list[tuple[Task, Result]] = [
    (TRAIN, TRAINED),
    (JOINT, TrainResult(env_steps=0, mean_return=None)),
    (
        PlayTask("p", cells=(("a", "b"), ("b", "b")), games_per_cell=9),
        PlayResult((PayoffCell(9, (0.1, -0.1), (1.0, 2.0), (4, 3), 2),) * 2),
    ),
    (
        AssessTask("a", iteration=1, strategies={"red": {"red-1": 1.0}}),
        AssessResult(nash_conv=0.1, exploitability=0.05, values=(0.1, -0.1)),
    ),
    (SolveTask("s", iteration=2, responses={"red": ("red-1",)}, cfr_iterations=7, output_member="s"), SolveResult(12)),
]


def line(record: TaskRecord) -> dict[str, Any]:
    """The JSON line of a record, as in the file."""
    found: dict[str, Any] = json.loads(to_json_line(record.to_json()))
    return found


@pytest.mark.parametrize(("task", "result"), PAIRS)
def test_lines_have_all_fields_and_their_checksum(task: Task, result: Result) -> None:
    values = TaskRecord(7, task, FILES, result).to_json()
    bare = to_json_line(values)
    assert bare == to_json_line(values | {"task": asdict(task), "result": asdict(result)})
    sealed = to_checksummed_line(values)
    assert json.loads(sealed) == json.loads(bare) | {"checksum": hashlib.sha256(bare[:-1]).hexdigest()[:16]}
    assert parse_checksummed("here", 1, sealed[:-1]) == json.loads(bare)
    with pytest.raises(DamagedFile, match="here, line 1 is not as it was written"):
        parse_checksummed("here", 1, sealed[:-1].replace(b'"number": 7', b'"number": 8'))


@pytest.mark.parametrize(("task", "result"), PAIRS)
def test_task_records_survive_json(task: Task, result: Result) -> None:
    record = TaskRecord(7, task, FILES, result)
    assert task_record(line(record), "here") == record
    assert line(task_record(line(record), "here")) == line(record)  # 4 games won are 4, not 4.0
    assert through_json(result, task) == result


@settings(max_examples=30)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2, max_size=4), st.integers(0, 2**60))
def test_floats_survive_json_exactly(numbers: list[float], games: int) -> None:
    cell = PayoffCell(games, tuple(numbers), tuple(numbers), (0,) * len(numbers), exact=True)
    task = PlayTask("p", cells=(("a", "b"),), games_per_cell=1)
    assert task_record(line(TaskRecord(0, task, {}, PlayResult((cell,)))), "here").result == PlayResult((cell,))


def test_numpy_numbers_are_converted_and_nonfinite_ones_become_none() -> None:
    metrics: dict[str, Any] = {"loss": np.float32(0.5), "entropy": float("nan")}
    found = through_json(TrainResult(env_steps=1, mean_return=np.float64(0.25), metrics=metrics), TRAIN)
    assert found == TrainResult(env_steps=1, mean_return=0.25, metrics={"loss": 0.5, "entropy": None})


def changed(part: str, without: str = "", **values: Any) -> dict[str, Any]:
    """The line of a training task with a part of it changed."""
    tree = line(TaskRecord(0, TRAIN, FILES, TRAINED))
    tree[part] |= values
    tree[part].pop(without, None)
    return tree


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (changed("task", without="player"), "task.player: this key is missing"),
        (changed("task", without="self_play"), 'task: key "self_play" is missing'),
        (changed("task", order={}), "task.order: this key is unknown"),
        (changed("task", env_steps="many"), "task.env_steps: input should be a valid integer"),
        (changed("task", opponents={"mixes": {"blue": {"blue-1": None}}}), "task.opponents.mixes.blue.blue-1: input"),
        (changed("result", against={}), "result.against: this key is unknown"),
        (changed("result", opponents={"x": {"games": 1}}), "result.opponents.x.mean_return: this key is missing"),
        (changed("result", mean_return=[1]), "result.mean_return: input should be a valid number"),
        (changed("files", x=3), "files.x: input should be a valid dictionary"),
        ({"kind": "train"}, 'key "number" is missing'),
        (
            {"number": 0, "kind": "rate", "task": {}, "files": {}, "result": {}},
            '"rate" is not a kind of task; there are',
        ),
    ],
)
def test_invalid_records_are_named_with_file_and_line(tree: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(to_json_line(TaskRecord(0, TRAIN, FILES, TRAINED).to_json()) + to_json_line(tree))
    with pytest.raises(DamagedFile) as refusal:
        read_records(path)
    assert str(refusal.value).startswith(f"{path}, line 2: {words}") and "\n" not in str(refusal.value)


def test_missing_file_gives_no_records(tmp_path: Path) -> None:
    assert read_records(tmp_path / "tasks.jsonl") == []
