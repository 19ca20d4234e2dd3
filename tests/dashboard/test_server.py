"""`palestra dashboard` as a process, as a person starts it."""

import hashlib
import os
import re
import signal
import socket
import subprocess
from contextlib import closing
from functools import partial
from pathlib import Path

import httpx
import pytest
from helpers.long_runs import write_long_run
from helpers.toy_tasks import Adder, Sums
from helpers.warm_processes import start_palestra
from typer.testing import CliRunner

from palestra.cli.main import app as palestra
from palestra.core.config import validate
from palestra.parallel.local import LocalBackend
from palestra.parallel.worker_stats import COUNTERS
from palestra.populations.scheduler import run_plan
from palestra.runs import Run
from palestra.runs.sinks.base import SinksConfig
from palestra.runs.sinks.log_tailer import SinkCursor


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return write_long_run(tmp_path_factory.mktemp("runs"), "one", steps=2).parent


@pytest.fixture
def start():
    """Starts servers that are stopped after the test; returns the process and its address."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments):
        process = start_palestra("dashboard", "--root", *arguments, "--port", "0", with_stderr=False)
        started.append(process)
        said = []
        for line in process.stdout:
            said.append(line)
            if found := re.match(r"dashboard: (\S+)", line):
                return process, found[1], "".join(said)
        raise AssertionError("".join(said))

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_server_serves_events_and_exits(runs, start):
    process, address, _ = start(runs)
    with httpx.Client(base_url=address, timeout=30) as client:
        assert "<title>palestra</title>" in client.get("/").text
        assert client.get("/api/runs").json()["runs"][0]["name"] == "one"
        with client.stream("GET", "/api/events?run=one") as answer:
            lines = answer.iter_lines()
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            assert [next(lines) for _ in range(3)] == ["event: change", "data: []", ""]
            with Run.open(runs / "one") as run:
                run.log_metrics(2, "planner", {"entropy": 1.0})
            assert [next(lines) for _ in range(2)] == ["event: change", 'data: ["one"]']
            process.send_signal(signal.SIGINT)
            assert list(lines)[1:] == []  # open event streams are closed
    process.wait(timeout=20)
    assert process.stdout.read() == ""  # no traceback


def test_non_local_host_warns_and_needs_the_token(runs, start):
    _, _, said = start(runs, "--host", "0.0.0.0")
    assert "anyone who reaches 0.0.0.0 can read these runs; protect them: --token" in said
    _, address, said = start(runs, "--token", "sesame")
    assert "warning" not in said and address.endswith("/?token=sesame")
    here = address.removesuffix("/?token=sesame")
    assert httpx.get(f"{here}/api/runs").status_code == 401
    assert httpx.get(f"{here}/api/runs", headers={"Authorization": "Bearer sesame"}).status_code == 200
    away = httpx.get(f"{here}//evil.example/?token=sesame")
    assert away.status_code == 303 and away.headers["Location"] == "/evil.example/"


@pytest.mark.parametrize(("folder", "says"), [("none", "is not a folder"), ("one", "is a run; the dashboard needs")])
def test_invalid_root_folder_is_refused(runs, folder, says):
    done = CliRunner().invoke(palestra, ["dashboard", "--root", str(runs / folder)])
    assert done.exit_code == 2 and says in done.output


def test_page_is_built_from_its_sources():
    """`make dashboard` builds it; the stamp is computed as in frontend/stamp.mjs."""
    here = Path(__file__).parent.parent.parent
    sources = here / "frontend"
    files = ["index.html", "package-lock.json", "vite.config.ts"]
    files += [f"src/{path.name}" for path in sorted((sources / "src").iterdir(), key=lambda path: path.name)]
    found = hashlib.sha256()
    for name in files:
        found.update(f"{name}\0".encode() + (sources / name).read_bytes() + b"\0")
    stamp = here / "palestra" / "dashboard" / "static" / "sources.sha256"
    assert stamp.read_text().strip() == found.hexdigest(), "the page is older than its sources: make dashboard"


def test_system_page_and_prometheus_agree(tmp_path, start):
    """A population on two worker processes, one of which dies: the system page, and a Prometheus scrape."""
    parser = pytest.importorskip("prometheus_client.parser", reason="pip install 'palestra[prometheus]'")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = validate(SinksConfig, {"sinks": [{"type": "prometheus", "port": port}]}).sinks
    backend = LocalBackend(partial(Adder, fatal={"train/sum-0-1": 1}, bodies=str(tmp_path)), 2)
    with Run.create(tmp_path / "runs", "name: sums\npopulation: {type: toy}\n", "sums") as run:
        assert run_plan(Sums(4), backend, run)
        run.log_workers(14, 0.0)
        _, address, _ = start(tmp_path / "runs")
        with closing(SinkCursor(run.path, config[0])) as cursor, httpx.Client(base_url=address, timeout=60) as client:
            cursor.send()
            page = client.get("/api/runs/sums/system").json()
            text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60).text
            later = {one["pid"]: one["memory"] for one in client.get("/api/runs/sums/system").json()["processes"]}
        families = list(parser.text_string_to_metric_families(text))
    backend.close()
    found = {
        (sample.name.removeprefix("palestra_"), *(v for k, v in sample.labels.items() if k != "run")): sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith(("palestra_worker", "palestra_process", "palestra_machine"))
    }
    keys = [(one["kind"], one["where"]) for one in page["workers"]]
    assert {key[1:] for key in found if key[0] == "worker_done_total"} == set(keys) and len(keys) >= 2
    for one, key in zip(page["workers"], keys, strict=True):
        for name in COUNTERS:
            assert found[f"worker_{name}_total", *key] == one[name]
        assert found.get(("worker_seen_timestamp_seconds", *key)) == one["seen"]
    assert sum(found["worker_done_total", *key] for key in keys) == 14
    assert sum(found["worker_lost_total", *key] for key in keys) == 1
    assert page["process"] == os.getpid() and len(page["processes"]) >= 3  # and the two workers
    for one in page["processes"]:
        key = (one["name"], str(one["pid"]))
        assert found["process_threads", *key] == pytest.approx(one["threads"], abs=4)
        least, most = sorted((one["memory"], later[one["pid"]]))  # a new worker is loading
        assert 0.8 * least <= found["process_memory_bytes", *key] <= 1.2 * most
        assert found["process_cpu_seconds_total", *key] >= 0  # a fork has used none so far
    assert found["machine_cores",] == page["machine"]["cores"]
    assert found["machine_memory_bytes",] == page["machine"]["memory"]
    assert found["machine_available_bytes",] == pytest.approx(page["machine"]["available"], rel=0.5)
