"""The system page shows worker statistics from the run's folder alone."""

import time
from functools import partial

from helpers.toy_tasks import Adder, Sums
from starlette.testclient import TestClient

from palestra.dashboard.app import build_dashboard
from palestra.parallel.local import LocalBackend
from palestra.parallel.worker_stats import WorkerStats
from palestra.populations.scheduler import run_plan
from palestra.runs import Run, read_lines


def test_worker_stats_show_tasks_and_losses(tmp_path):
    began = time.time()
    backend = LocalBackend(partial(Adder, fatal={"train/sum-0-1": 1}, bodies=str(tmp_path)), 2)
    with Run.create(tmp_path / "runs", "name: sums\npopulation: {type: toy}\n", "sums") as run:
        assert run_plan(Sums(4), backend, run)
    backend.close()
    client = TestClient(build_dashboard(tmp_path / "runs"), base_url="http://127.0.0.1")
    workers = client.get("/api/runs/sums/system").json()["workers"]
    assert {one["kind"] for one in workers} == {"local worker"} and len({one["where"] for one in workers}) >= 2
    assert sum(one["done"] for one in workers) == len(read_lines(run.path / "tasks.jsonl")) == 14
    dead = [one for one in workers if one["lost"]]
    assert len(dead) == 1 and dead[0]["lost"] == 1 and "exit code -9" in dead[0]["why"]
    seen = [one["seen"] for one in workers if one["done"]]
    assert all(began - 1 <= moment <= time.time() + 1 for moment in seen)


def test_single_process_run_has_no_worker_stats(client):
    assert client.get("/api/runs/seed-0/system").json()["workers"] == []


def test_worker_stats_accumulate_and_are_reported_at_an_interval():
    roll, other = WorkerStats(), WorkerStats()
    roll.count("sampler", "http://a", done=1, seconds=2.0)
    (line,) = roll.take_report(60)
    assert (line["worker"], line["done"], line["seconds"]) == ("sampler http://a", 1, 2.0) and line["seen"] > 0
    roll.count("sampler", "http://a", done=1)
    assert roll.take_report(60) == []
    other.count("sampler", "http://a", done=2)
    roll.merge(other.take_report(0))
    assert [line["done"] for line in roll.take_report(0)] == [3]
    roll.count("sampler", "http://a", "gone", lost=1)
    (lost,) = roll.take_report(60)  # reported at once
    assert (lost["lost"], lost["why"], "seen" in lost) == (1, "gone", False)
