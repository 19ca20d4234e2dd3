"""`palestra dashboard` as a process of its own, as a person starts it."""

import hashlib
import re
import signal
import subprocess
from pathlib import Path

import httpx
import pytest
from long_runs import write_long_run
from processes import PALESTRA
from typer.testing import CliRunner

from palestra.cli.main import app as palestra
from palestra.runs import Run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return write_long_run(tmp_path_factory.mktemp("runs"), "one", steps=2).parent


@pytest.fixture
def start():
    """Starts servers that are ended with the test; returns the process and its address."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments):
        command = [*PALESTRA, "dashboard", "--root", *map(str, arguments), "--port", "0"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
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
            assert list(lines)[1:] == []  # whoever listens is let go
    process.wait(timeout=20)
    assert process.stdout.read() == ""  # no traceback


def test_non_local_host_warns_and_needs_the_token(runs, start):
    _, _, said = start(runs, "--host", "0.0.0.0")
    assert "anybody who reaches 0.0.0.0 can read these runs; --token" in said
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


def test_the_page_is_built_from_its_sources():
    """`make dashboard` builds it anew; the stamp is made as dashboard/stamp.mjs says."""
    here = Path(__file__).parent.parent.parent
    sources = here / "dashboard"
    files = ["index.html", "package-lock.json", "vite.config.ts"]
    files += [f"src/{path.name}" for path in sorted((sources / "src").iterdir(), key=lambda path: path.name)]
    found = hashlib.sha256()
    for name in files:
        found.update(f"{name}\0".encode() + (sources / name).read_bytes() + b"\0")
    stamp = here / "palestra" / "dashboard" / "static" / "sources.sha256"
    assert stamp.read_text().strip() == found.hexdigest(), "the page is older than its sources: make dashboard"
