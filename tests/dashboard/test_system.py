"""The page of the system says who did the work, from the run's folder alone."""

import time
from functools import partial

from starlette.testclient import TestClient
from toy_tasks import Adder, Sums

from palestra.backends.local import Local
from palestra.dashboard.app import dashboard
from palestra.populations.scheduler import follow
from palestra.roll import Roll
from palestra.runs import Run, read_lines


def test_who_did_what_and_what_was_lost(tmp_path):
    began = time.time()
    backend = Local(partial(Adder, fatal={"train/sum-0-1": 1}, bodies=str(tmp_path)), 2)
    with Run.create(tmp_path / "runs", "name: sums\npopulation: {type: toy}\n", "sums") as run:
        assert follow(Sums(4), backend, run)
    backend.close()
    client = TestClient(dashboard(tmp_path / "runs"), base_url="http://127.0.0.1")
    told = client.get("/api/runs/sums/system").json()["roll"]
    assert {one["kind"] for one in told} == {"local worker"} and len({one["where"] for one in told}) >= 2
    assert sum(one["done"] for one in told) == len(read_lines(run.path / "tasks.jsonl")) == 14
    dead = [one for one in told if one["lost"]]
    assert len(dead) == 1 and dead[0]["lost"] == 1 and "exit code -9" in dead[0]["why"]
    seen = [one["seen"] for one in told if one["done"]]
    assert all(began - 1 <= moment <= time.time() + 1 for moment in seen)


def test_nothing_is_told_of_a_run_in_one_process(client):
    assert client.get("/api/runs/seed-0/system").json()["roll"] == []


def test_a_roll_adds_up_and_is_told_now_and_then():
    roll, other = Roll(), Roll()
    roll.note("sampler", "http://a", done=1, seconds=2.0)
    (line,) = roll.lines(60)
    assert (line["worker"], line["done"], line["seconds"]) == ("sampler http://a", 1, 2.0) and line["seen"] > 0
    roll.note("sampler", "http://a", done=1)
    assert roll.lines(60) == []
    other.note("sampler", "http://a", done=2)
    roll.add(other.lines(0))
    assert [line["done"] for line in roll.lines(0)] == [3]
    roll.note("sampler", "http://a", "gone", lost=1)
    (lost,) = roll.lines(60)  # told at once
    assert (lost["lost"], lost["why"], "seen" in lost) == (1, "gone", False)
