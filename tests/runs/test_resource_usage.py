"""CPU and memory use of the run's process, in timings.jsonl."""

from __future__ import annotations

import mmap
import time
from pathlib import Path

import numpy as np
import pytest

from palestra.core.process_memory import STATM
from palestra.runs import Run, read_lines
from palestra.runs.system_metrics import ResourceMeter

needs_proc = pytest.mark.skipif(not STATM.exists(), reason="this system has no /proc")


def test_cpu_use_is_since_the_last_call():
    meter = ResourceMeter()
    started, cpu = time.monotonic(), time.process_time()
    while time.process_time() - cpu < 0.2:
        pass
    busy, wall = meter.metrics()["cpu_percent"], time.monotonic() - started
    assert 100 * 0.2 / wall <= busy * 1.05 and busy <= 120
    time.sleep(0.3)
    assert meter.metrics()["cpu_percent"] < 20


@needs_proc
def test_memory_grows_by_allocated_pages():
    meter = ResourceMeter()
    before = meter.metrics()["rss_gib"]
    with mmap.mmap(-1, 2**25) as held:  # 1/32 GiB of new pages: an array may reuse memory of the process
        pages = np.frombuffer(held, np.uint8)
        pages.fill(1)
        assert meter.metrics()["rss_gib"] - before == pytest.approx(2**25 / 2**30, rel=0.3)
        del pages


@needs_proc
def test_run_logs_resource_usage_once_per_step(tmp_path: Path):
    with Run.create(tmp_path, "name: a\n", "a") as run:
        for step in range(2):
            run.log_timings(step, "walker", {"train_s": 1.0})
            run.log_timings(step, "team", {"rollout_s": 2.0})
    walker, team = read_lines(tmp_path / "a" / "timings.jsonl")[2:]
    assert walker == {"step": 1, "policy": "walker", "train_s": 1.0}
    assert team.keys() == {"step", "policy", "rollout_s", "cpu_percent", "rss_gib"} and team["rss_gib"] > 0.01
