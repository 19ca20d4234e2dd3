"""Runs: what is written is read back, and a process killed at any moment loses no recorded data."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from palestra.core.files import DamagedFile, JsonlWriter, atomic_write, checksum, filter_lines
from palestra.core.types import Answer, Episode, Node
from palestra.runs import Run, find_run, list_checkpoints, load_episodes, read_episodes, read_lines

ROOT = Path(__file__).parents[2]


def new_run(root: Path, name: str = "demo") -> Run:
    return Run.create(root, "steps: 3\n", name, {"seed": 7})


def save(text: str) -> object:
    return lambda folder: (folder / "weights.bin").write_text(text)


def train(run: Run, steps: int) -> None:
    """Trains steps whose every byte depends on the step alone, as in a seeded training."""
    for step in range(run.next_step, steps):
        for policy in ("planner", "coder"):
            run.log_metrics(step, policy, {"loss": 1 / (step + 1), "tokens": step * 3})
        run.log_timings(step, "planner", {"seconds": 0.5})
        run.write_episodes(step, [episode(step)])
        run.log_eval(step, "held-out", {"success": step / 100})
        run.checkpoint(step, lambda folder, step=step: write_weights(folder, step), {"coder": "a"})


def write_weights(folder: Path, step: int) -> None:
    (folder / "adapters").mkdir()
    for name in ("planner", "coder"):
        (folder / "adapters" / f"{name}.bin").write_bytes(f"{name} {step} ".encode() * 20_000)


def answer(text: str, count: int) -> Answer:
    ids = np.arange(count, dtype=np.int32)
    return Answer(text, "planner@3", ids, ids + 5, -np.linspace(0, 1, count, dtype=np.float32) / 3, "length", 0.7)


def episode(seed: int) -> Episode:
    nodes = [
        Node(
            0, None, 0, {"a": "see é\n", "b": {"grid": [1, 2]}}, {"a": answer("go", 3), "b": answer("", 0)}, {"a": 0.1}
        ),
        Node(
            1,
            None,
            0,
            {"a": "see é\n", "b": {"grid": [1, 2]}},
            {"a": answer("no", 2), "b": answer("x", 1)},
            chosen=False,
        ),
        Node(2, 0, 1, {"a": "[1]"}, {"a": answer("end", 4)}, {"a": 1.0, "b": -1.0}, 0.3, done=True, truncated=True),
    ]
    nodes[0].advantages = {"a": 0.25, "b": -0.5}
    nodes[2].info = {"success": True, "invalid": ["a"], "score": [1, 2.5, None]}
    return Episode("relay", seed, {"a": "planner", "b": "coder"}, nodes)


def is_equal(left: Episode, right: Episode) -> bool:
    """True if all fields are equal; arrays make == on dataclasses ambiguous."""
    return plain(left) == plain(right)


def plain(value: object) -> object:
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.tolist())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return plain(vars(value)) if hasattr(value, "__dict__") else value


def test_episodes_survive_a_write_and_read(tmp_path: Path) -> None:
    failed = Episode("relay", 2**40, {"a": "planner"}, error="the env said no")
    bare = Episode("relay", 1, {}, [Node(0, None, 0, {}, {}, info={"why": "nobody acts"}, done=True)])
    with new_run(tmp_path) as run:
        path = run.write_episodes(12, [episode(5), failed, bare])
    assert path == run.path / "episodes" / "step-000012.parquet"
    loaded = load_episodes(path)
    assert all(is_equal(a, b) for a, b in zip(loaded, [episode(5), failed, bare], strict=True))
    loaded[0].nodes[0].answers["a"].logprobs += 1  # the arrays are the caller's own


def test_episode_tables_can_be_queried(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        rows = read_episodes(run.write_episodes(1, [episode(5)])).to_pylist()
    assert [(row["node"], row["seat"], row["policy"]) for row in rows] == [
        (0, "a", "planner@3"),
        (0, "b", "planner@3"),
        (1, "a", "planner@3"),
        (1, "b", "planner@3"),
        (2, "a", "planner@3"),
        (2, "b", "coder"),  # rewarded without acting: no answer, and the policy assigned to the seat
    ]
    assert [row["reward"] for row in rows] == [0.1, None, None, None, 1.0, -1.0]
    assert [row["advantage"] for row in rows[:3]] == [0.25, -0.5, None]
    assert rows[4]["success"] is True and rows[4]["invalid"] is True and rows[5]["invalid"] is False
    assert rows[5]["answer"] is None and rows[4]["observation"] == "[1]" and not rows[4]["observation_json"]


def test_empty_and_foreign_episode_files_are_handled(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        assert load_episodes(run.write_episodes(0, [])) == []
    (tmp_path / "x.parquet").write_text("hello")
    with pytest.raises(ValueError, match=r"cannot read episodes from .*x\.parquet"):
        read_episodes(tmp_path / "x.parquet")


def test_joined_and_filtered_files_are_refused(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        run.write_episodes(0, [episode(1), episode(2)])
        (file,) = (run.path / "episodes").iterdir()
    table = read_episodes(file)
    path = tmp_path / "changed.parquet"
    numbers = pa.array(table.column("episode").to_numpy() + 2, pa.int32())
    later = table.set_column(table.column_names.index("episode"), "episode", numbers)
    pq.write_table(pa.concat_tables([table, later]), path)
    assert [found.seed for found in load_episodes(path)] == [1, 2, 1, 2]
    for changed, message in (
        (pa.concat_tables([table, table]), "has episode 0 twice: number the episodes of joined files"),
        (table.filter(pc.not_equal(table.column("node"), 0)), "rows of episode 0 are missing in .*keep or drop whole"),
    ):
        pq.write_table(changed, path)
        with pytest.raises(ValueError, match=message):
            load_episodes(path)


def test_unrecordable_observation_is_refused_with_the_reason(tmp_path: Path) -> None:
    odd = Episode("relay", 1, {"a": "p"}, [Node(0, None, 0, {"a": object()}, {"a": answer("x", 1)})])
    with new_run(tmp_path) as run, pytest.raises(ValueError, match="cannot store a object in an episode"):
        run.write_episodes(0, [odd])


def test_create_never_overwrites_a_run(tmp_path: Path) -> None:
    for expected in ("demo", "demo-2", "demo-3"):
        with new_run(tmp_path) as run:
            assert run.path.name == expected
            assert run.config == "steps: 3\n"
    meta = json.loads((tmp_path / "demo" / "meta.json").read_text())
    assert meta["seed"] == 7 and meta["torch"] and meta["python"].startswith("3.")
    for bad in ("a/b", ".."):
        with pytest.raises(ValueError, match="plain folder name"):
            Run.create(tmp_path, "", bad)
    with pytest.raises(ValueError, match="is not a run"):
        Run.open(tmp_path)


def test_a_run_of_other_versions_says_so(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        assert run.resume_notes() == []
        meta = json.loads((run.path / "meta.json").read_text())
        changes = {"palestra": "0.0.1", "processor": "AMD Old, AVX2"}
        (run.path / "meta.json").write_text(json.dumps(meta | changes))
        (note,) = run.resume_notes()
    assert f"began with palestra 0.0.1, now {meta['palestra']}; processor AMD Old, AVX2, now " in note


def test_metrics_accept_numpy_and_write_nan_as_null(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        run.log_metrics(
            0, "a", {"loss": np.float32(0.5), "kl": float("nan"), "counts": np.arange(2), "deep": {"x": [1e999]}}
        )
    line = (run.path / "metrics.jsonl").read_text()
    assert line == '{"step": 0, "policy": "a", "loss": 0.5, "kl": null, "counts": [0, 1], "deep": {"x": [null]}}\n'


def test_equal_seeds_give_equal_metrics_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with new_run(tmp_path, name) as run:
            train(run, 3)
    assert (tmp_path / "one/metrics.jsonl").read_bytes() == (tmp_path / "two/metrics.jsonl").read_bytes()


def test_pruning_keeps_the_newest_two_and_kept_checkpoints(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        for step in range(6):
            run.checkpoint(step, save(str(step)), keep=step == 1)  # type: ignore[arg-type]
        assert [c.step for c in list_checkpoints(run.path)] == [1, 4, 5]
    assert sorted(path.name for path in (run.path / "checkpoints").iterdir()) == [
        "step-000001",
        "step-000004",
        "step-000005",
    ]
    assert len(read_lines(run.path / "checkpoints.jsonl")) == 6


def test_resume_truncates_logs_to_the_checkpoint(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        train(run, 3)
        before = (run.path / "metrics.jsonl").read_bytes()
        run.log_metrics(3, "planner", {"loss": 1})
        run.log_eval(3, "held-out", {"success": 1})
        run.log_eval(2, "by hand", {"success": 1})
        run.write_episodes(3, [episode(3)])
    for name in ("metrics.jsonl", "evals.jsonl", "checkpoints.jsonl"):
        with open(run.path / name, "ab") as file:
            file.write(b'{"step": 3, "pol')  # torn by a full disk
    (run.path / "checkpoints" / "step-000003").mkdir()  # renamed, but the process died before it wrote the line
    (run.path / "checkpoints" / ".tmp-step-000004").mkdir()

    with Run.open(run.path) as run:
        assert run.next_step == 3
        resumed = run.resume()
        assert resumed and resumed.step == 2 and resumed.names == {"coder": "a"}
        assert (resumed.path / "adapters" / "coder.bin").read_bytes().startswith(b"coder 2 ")
        assert (run.path / "metrics.jsonl").read_bytes() == before
        assert [line["name"] for line in read_lines(run.path / "evals.jsonl")] == ["held-out"] * 3 + ["by hand"]
        assert sorted(path.name for path in (run.path / "checkpoints").iterdir()) == ["step-000001", "step-000002"]
        assert len(list((run.path / "episodes").iterdir())) == 3
        train(run, 4)
    assert [line["step"] for line in read_lines(run.path / "checkpoints.jsonl")] == [0, 1, 2, 3]


def test_a_damaged_line_after_the_checkpoint_is_truncated(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        train(run, 2)
    before = (run.path / "metrics.jsonl").read_bytes()
    (run.path / "metrics.jsonl").write_bytes(before + bytes(20) + b'\n{"loss": 1}\n')  # zeros, as after a power cut
    with Run.open(run.path) as run:
        assert run.resume() and run.next_step == 2
    assert (run.path / "metrics.jsonl").read_bytes() == before


def test_a_run_is_read_while_its_checkpoints_are_pruned(tmp_path: Path) -> None:
    stop = threading.Event()

    def prune() -> None:
        while not stop.is_set():
            folders = [run.path / "checkpoints" / str(number) / "planner" for number in range(20)]
            for folder in folders:
                folder.mkdir(parents=True)
            for folder in folders:
                shutil.rmtree(folder.parent)

    with new_run(tmp_path) as run:
        (run.path / "checkpoints").mkdir()
        thread = threading.Thread(target=prune)
        thread.start()
        try:
            for _ in range(1000):
                assert find_run(run.path) == run.path
        finally:
            stop.set()
            thread.join()


def test_resume_skips_a_damaged_checkpoint(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        train(run, 3)
        os.truncate(run.path / "checkpoints/step-000002/adapters/coder.bin", 10)
        resumed = run.resume()
        assert resumed and resumed.step == 1 and run.next_step == 2
        train(run, 3)
        assert run.next_step == 3 and list_checkpoints(run.path)[-1].step == 2
    with new_run(tmp_path, "whole") as whole:
        train(whole, 3)
    assert (run.path / "metrics.jsonl").read_bytes() == (whole.path / "metrics.jsonl").read_bytes()


def test_resume_without_a_checkpoint_starts_over(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        run.log_metrics(0, "planner", {"loss": 1})
        run.log_eval(-1, "held-out", {"success": 0})
        run.write_episodes(0, [episode(0)])
        assert run.resume() is None
        assert run.next_step == 0 and not list((run.path / "episodes").iterdir())
        assert read_lines(run.path / "metrics.jsonl") == read_lines(run.path / "evals.jsonl") == []


def test_resume_refuses_a_truncated_log(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        train(run, 2)
        (run.path / "metrics.jsonl").write_text("")
        with pytest.raises(ValueError, match=r"metrics\.jsonl has 0 bytes, and had \d+ then"):
            run.resume()


def contents(path: Path) -> dict[str, bytes | None]:
    """Every file and folder of a run (without its lock) with its bytes."""
    found = [file for file in sorted(path.rglob("*")) if file.name != ".lock"]
    return {str(file.relative_to(path)): file.read_bytes() if file.is_file() else None for file in found}


def lose_a_log(run: Path) -> None:
    (run / "metrics.jsonl").write_text("")


def edit_an_evaluation(run: Path) -> None:
    with open(run / "evals.jsonl", "ab") as file:
        file.write(b'{"step": "two", "name": "dev"}\n')


def edit_the_config(run: Path) -> None:
    (run / "config.yaml").write_text("steps: 4\n")


@pytest.mark.parametrize("damage", [lose_a_log, edit_an_evaluation, edit_the_config])
def test_a_refused_resume_changes_nothing(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """Also what a resume would complete or remove: a checkpoint that waits for its rename, and unfinished files."""
    with new_run(tmp_path) as run:
        train(run, 3)
    folder = run.path / "checkpoints"
    (folder / "step-000002").rename(folder / ".tmp-step-000002")
    (run.path / "episodes" / ".tmp-step-000003.parquet").write_bytes(b"torn")
    damage(run.path)
    before = contents(run.path)
    with Run.open(run.path) as run, pytest.raises(ValueError):
        run.resume()
    assert contents(run.path) == before


def test_resume_finishes_the_rename_of_the_newest_checkpoint(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        train(run, 3)
    folder = run.path / "checkpoints"
    (folder / "step-000002").rename(folder / ".tmp-step-000002")
    with Run.open(run.path) as run:
        resumed = run.resume()
        assert resumed and resumed.path == folder / "step-000002" and not resumed.damage
    assert sorted(path.name for path in folder.iterdir()) == ["step-000001", "step-000002"]


def test_torn_last_line_is_dropped_and_edited_lines_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    assert read_lines(path) == []
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n{"a":')
    assert read_lines(path) == [{"a": 1}, {"a": 2}]
    log = JsonlWriter(path)
    log.write(b'{"a": 3}\n')
    assert log.checksum == checksum(path)
    log.close()
    filter_lines(path, lambda line: line["a"] != 2)
    assert path.read_bytes() == b'{"a": 1}\n{"a": 3}\n'
    path.write_bytes(b'{"a": 1}\nnonsense\n{"a": 2}\n')
    with pytest.raises(ValueError, match=r"x\.jsonl, line 2 is not a JSON object"):
        read_lines(path)


def test_atomic_write_replaces_and_leaves_nothing_behind(tmp_path: Path) -> None:
    for data in (b"old", b"new"):
        atomic_write(tmp_path / "file", data)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"new"


def test_custom_log_is_checkpointed_and_truncated(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        run.rewrite_log("tasks.jsonl", [])
        assert not (run.path / "tasks.jsonl").exists()
        run.append_line("tasks.jsonl", {"a": 1})
        with open(run.path / "tasks.jsonl", "ab") as file:
            file.write(b'{"a": 2')  # torn
        run.rewrite_log("tasks.jsonl", [{"a": 1}])
        run.append_line("tasks.jsonl", {"a": 3})
        assert (run.path / "tasks.jsonl").read_bytes() == b'{"a": 1}\n{"a": 3}\n'
        inode = (run.path / "tasks.jsonl").stat().st_ino
        run.rewrite_log("tasks.jsonl", [{"a": 1}, {"a": 3}])
        assert (run.path / "tasks.jsonl").stat().st_ino == inode
        run.rewrite_log("tasks.jsonl", [])
        assert (run.path / "tasks.jsonl").read_bytes() == b""


def test_second_writer_process_is_refused(tmp_path: Path) -> None:
    code = "import sys; from palestra.runs import Run; Run.open(sys.argv[1])"
    with new_run(tmp_path) as run:
        other = subprocess.run([sys.executable, "-c", code, str(run.path)], capture_output=True, text=True)
        assert f"process {os.getpid()} on {socket.gethostname()} is writing the run" in other.stderr
        with pytest.raises(ValueError, match="is writing the run"):
            Run.open(run.path)
    assert subprocess.run([sys.executable, "-c", code, str(run.path)]).returncode == 0


def train_in_another_process(path: Path, steps: int, deadly: int = -1) -> subprocess.Popen[bytes]:
    """Resumes and trains the run at `path`; the process kills itself (-9) before its file operation number `deadly`."""
    return subprocess.Popen([sys.executable, "-m", "tests.runs.test_run", str(path), str(steps), str(deadly)], cwd=ROOT)


def train_until_killed(path: str, steps: str, deadly: str) -> None:
    count = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal count
        if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"):
            if count == int(deadly):
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1

    with Run.open(path) as run:
        sys.addaudithook(hook)
        run.resume()
        train(run, int(steps))


def assert_as_if_never_killed(path: Path, steps: int) -> None:
    with new_run(path.parent, "whole") as whole:
        train(whole, steps)
    for name in ("metrics.jsonl", "timings.jsonl", "evals.jsonl"):
        assert (path / name).read_bytes() == (whole.path / name).read_bytes(), name
    assert sorted(names(path)) == sorted(names(whole.path))
    shutil.rmtree(whole.path)


def names(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.rglob("*")}


def kill_at(root: Path, deadly: int) -> bool:
    """Trains three steps after one in a process that dies at one file operation, then to the end; returns False if
    training ended before that."""
    with new_run(root, "killed") as run:
        train(run, 1)
    process = train_in_another_process(run.path, 4, deadly)
    died = process.wait() == -signal.SIGKILL
    for checkpoint in list_checkpoints(run.path):
        assert len(list(checkpoint.path.rglob("*.bin"))) == 2
    with Run.open(run.path) as again:
        assert again.resume()  # at least the first checkpoint
        train(again, 4)
    assert_as_if_never_killed(run.path, 4)
    shutil.rmtree(run.path)
    return died


@pytest.mark.parametrize("deadly", range(3, 70, 11))
def test_kill_at_a_file_operation_loses_no_data(tmp_path: Path, deadly: int) -> None:
    assert kill_at(tmp_path, deadly)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_kill_at_every_file_operation_loses_no_data(tmp_path: Path) -> None:
    deadly = 0
    while kill_at(tmp_path, deadly):
        deadly += 1
    assert deadly > 60  # at least as many as three steps make, otherwise the test proves nothing


@pytest.mark.slow
def test_resume_after_repeated_kills_is_bit_identical(tmp_path: Path) -> None:
    steps, chance, kills = 150, random.Random(0), 0
    new_run(tmp_path, "killed").close()
    path = tmp_path / "killed"
    while not (list_checkpoints(path) and list_checkpoints(path)[-1].step == steps - 1):
        process = train_in_another_process(path, steps)
        # longer and longer, so that the run also ends on a slow machine
        time.sleep(chance.uniform(0.2, 0.6) + kills / 50)
        process.kill()
        kills += process.wait() != 0
    with Run.open(path) as run:
        run.resume()
    assert kills >= 3
    assert_as_if_never_killed(path, steps)


if __name__ == "__main__":
    train_until_killed(*sys.argv[1:])


def test_a_run_of_an_older_version_is_refused_with_the_remedy(tmp_path: Path) -> None:
    """Its lines have no checksums, and its meta.json no config."""
    with Run.create(tmp_path, "{}\n", "old") as run:
        path = run.path
    (path / "checkpoints.jsonl").write_text('{"step": 4, "path": "checkpoints/step-000004", "keep": false}\n')
    with pytest.raises(DamagedFile, match="older version of palestra wrote the run, use that version"):
        Run.open(path)
    (path / "checkpoints.jsonl").write_text("")
    (path / "meta.json").write_text('{"created": "2026-11-20", "seed": 0}')
    with Run.open(path) as run, pytest.raises(DamagedFile, match="older version of palestra wrote the run"):
        run.resume()


def test_a_run_that_was_moved_is_not_made_anew_at_its_old_path(tmp_path: Path) -> None:
    with Run.create(tmp_path, "{}\n", "here") as run:
        run.path.rename(tmp_path / "there")
        with pytest.raises(DamagedFile, match="was moved or removed during training"):
            run.checkpoint(0, lambda folder: None)
    assert not run.path.exists() and list_checkpoints(tmp_path / "there") == []
