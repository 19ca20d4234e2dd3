"""Runs with hostile files: they never hide other runs, block the server or fill its memory."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.long_runs import write_long_run
from starlette.testclient import TestClient

from palestra.dashboard.app import MAX_STREAMS, build_dashboard
from palestra.runs.metric_log import MAX_LINE_BYTES, MetricLog

HERE = "http://127.0.0.1"
METRICS = '{"step": 0, "policy": "team", "success": 0.5}\n'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A valid run, and one that each test damages."""
    write_long_run(tmp_path / "runs", "good", steps=3, episodes=2)
    shutil.copytree(tmp_path / "runs" / "good", tmp_path / "runs" / "bad")
    return tmp_path / "runs"


@pytest.fixture
def client(root: Path) -> TestClient:
    return TestClient(build_dashboard(root), base_url=HERE)


def deep(opening: str, closing: str = "", depth: int = 50_000) -> str:
    return opening * depth + closing * depth


def edit(name: str, text: str) -> Callable[[Path], object]:
    return lambda run: (run / name).write_text(text)


def fifo(name: str) -> Callable[[Path], object]:
    def make(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return make


HOSTILE = {
    "env is a number": edit("config.yaml", "env: 5\nsteps: 3\n"),
    "steps are a word": edit("config.yaml", "env: {type: plan_path}\nsteps: abc\n"),
    "policies are a number": edit("config.yaml", "env: {type: plan_path}\npolicies: 3\n"),
    "a deep config": edit("config.yaml", deep("[", "]")),
    "a large config": edit("config.yaml", "x: " + "y" * 2**21),
    "aliases that multiply": edit(
        "config.yaml", "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
    ),
    "a config that is a list": edit("config.yaml", "- 1\n- 2\n"),
    "NaN steps": edit("metrics.jsonl", METRICS.replace("0,", "NaN,")),
    "infinite steps": edit("metrics.jsonl", METRICS.replace("0,", "1e999,")),
    "huge steps": edit("metrics.jsonl", METRICS.replace("0,", "1" + "0" * 400 + ",")),
    "a policy that is a list": edit("metrics.jsonl", '{"step": 0, "policy": [], "success": 1}\n'),
    "deep metrics": edit("metrics.jsonl", deep('{"a":') + "\n"),
    "a huge value": edit("metrics.jsonl", METRICS.replace("0.5", "1" + "0" * 400)),
    "bytes that are no text": lambda run: (run / "metrics.jsonl").write_bytes(bytes(range(256)) * 10),
    "half a surrogate pair": edit("metrics.jsonl", METRICS.replace("team", "\\ud800")),
    "meta that is a list": edit("meta.json", "[]"),
    "deep meta": edit("meta.json", deep("[")),
    "an evaluation without figures": edit("evals.jsonl", '{"step": 0, "name": "dev", "success": {"a": []}}\n'),
    "metrics that are a pipe": fifo("metrics.jsonl"),
    "meta that is a pipe": fifo("meta.json"),
    "evals that are a pipe": fifo("evals.jsonl"),
    "checkpoints that are a pipe": fifo("checkpoints.jsonl"),
    "metrics that are a folder": lambda run: ((run / "metrics.jsonl").unlink(), (run / "metrics.jsonl").mkdir()),
    "checkpoints of another kind": edit("checkpoints.jsonl", '{"step": "x", "path": 3, "names": 4}\n'),
}
PAGES = ("", "/config", "/alarms", "/system", "/episodes", "/agents", "/population")


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.few(8)
def test_hostile_run_does_not_break_the_list_or_pages(client: TestClient, root: Path, name: str) -> None:
    HOSTILE[name](root / "bad")
    listed = client.get("/api/runs")
    assert listed.status_code == 200
    assert "good" in [run["name"] for run in listed.json()["runs"]]
    for page in PAGES:
        assert client.get(f"/api/runs/bad{page}").status_code in (200, 400, 404, 422), page
        assert client.get(f"/api/runs/good{page}").status_code in (200, 400), page
    assert client.get("/api/curves", params={"run": ["good", "bad"], "metric": "metrics/success"}).status_code < 500
    assert client.get("/api/difference", params={"run": ["good", "bad"]}).status_code < 500


def test_unreadable_run_is_listed_with_the_reason(client: TestClient, root: Path) -> None:
    (root / "bad" / "config.yaml").write_text("env: 5\n")
    lines = {line["name"]: line for line in client.get("/api/runs").json()["runs"]}
    assert lines["bad"]["status"] == "unreadable" and "cannot be read" in lines["bad"]["env"]
    assert lines["bad"].keys() == lines["good"].keys()


def rewrite(path: Path, **columns: object) -> None:
    """Replaces whole columns of an episode file by one value each."""
    table = pq.read_table(path)
    for name, value in columns.items():
        at = table.schema.get_field_index(name)
        kind = table.schema.field(name).type
        table = table.set_column(at, name, pa.array([value] * len(table), kind))
    pq.write_table(table, path)


def test_cyclic_parents_terminate(client: TestClient, root: Path) -> None:
    rewrite(root / "bad" / "episodes" / "step-000000.parquet", node=0, parent=0)
    assert client.get("/api/runs/bad/episodes/1/0", params={"line": "0"}).status_code == 400
    assert "ancestors" in client.get("/api/runs/bad/episodes/1/0/words/0").json()["error"]


@pytest.mark.parametrize("columns", [{"depth": 2**31 - 1}, {"parent": 10**6}, {"node": 2**31 - 1}, {"episode": -1}])
def test_hostile_numbers_in_episodes_terminate(client: TestClient, root: Path, columns: dict[str, int]) -> None:
    for path in (root / "bad" / "episodes").glob("*.parquet"):
        rewrite(path, **columns)
    assert client.get("/api/runs/bad/episodes").status_code in (200, 400, 422)
    assert client.get("/api/runs/good/episodes").json()["of"] == 6


def test_log_without_newlines_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with open(path, "wb") as file:
        file.truncate(2**27)
    with open(path, "ab") as file:
        file.write(b"\n" + METRICS.encode())
    log = MetricLog(path, "policy")
    tracemalloc.start()
    log.refresh()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * MAX_LINE_BYTES and log.column("team", "success")[1].tolist() == [0.5]


def test_number_of_metric_keys_is_limited(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    line = {"step": 0, "policy": "team"}
    path.write_text("".join(json.dumps(line | {f"{i}-{j}": 1 for j in range(9_000)}) + "\n" for i in range(3)))
    log = MetricLog(path, "policy")
    log.refresh()
    assert len(log.metric_keys()["team"]) < 20_001


def start(root: Path) -> tuple[subprocess.Popen[str], str]:
    program = "from palestra.cli.main import app; app()"
    command = [sys.executable, "-c", program, "dashboard", "--root", str(root), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("dashboard: "), line
    return process, line.removeprefix("dashboard: ").strip()


def test_piped_server_answers_and_stops_on_request(root: Path) -> None:
    for name in ("meta.json", "metrics.jsonl"):
        fifo(name)(root / "bad")
    process, url = start(root)
    try:
        assert {run["name"] for run in httpx.get(f"{url}api/runs", timeout=60).json()["runs"]} == {"good", "bad"}
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


@pytest.mark.slow
def test_many_event_listeners_do_not_block_pages(root: Path) -> None:
    for number in range(1000):
        (root / f"run-{number}").mkdir()
        (root / f"run-{number}" / "config.yaml").write_text("env: {type: plan_path}\nsteps: 3\n")
    process, url = start(root)
    over, refused = threading.Event(), []

    def listen() -> None:
        with httpx.stream("GET", f"{url}api/events", timeout=None) as stream:
            if stream.status_code == 429:
                refused.append(1)
                return
            for _ in stream.iter_lines():
                if over.is_set():
                    return

    try:
        threads = [threading.Thread(target=listen, daemon=True) for _ in range(MAX_STREAMS + 50)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 120
        while len(refused) < 50 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(refused) == 50
        begin = time.monotonic()
        assert httpx.get(f"{url}api/runs/good", timeout=60).status_code == 200
        assert time.monotonic() - begin < 10
    finally:
        over.set()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
