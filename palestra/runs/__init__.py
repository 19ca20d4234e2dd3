"""A run is a directory: what dashboards, reports and resume read, and the only thing they read.

    config.yaml             the resolved config
    meta.json               versions, seed, command line, time of creation, and the config that the run goes on with
    metrics.jsonl           what the seed determines: two runs of one seed are equal here, byte for byte
    timings.jsonl           what the machine determines: seconds, tokens per second
    workers.jsonl           who did what of the work elsewhere: tasks, sessions, losses; kept over a resume
    evals.jsonl             scores on held-out instances
    episodes/step-000012.parquet
    checkpoints/step-000012/
    checkpoints.jsonl       one line per complete checkpoint, with checksums of its files and of the logs up to then

A process may die at any moment. The line of a checkpoint is written once its bytes are on the disk, and its folder gets
its name by one rename after that; `resume` makes up for a rename that is missing, cuts the logs back to the newest
checkpoint whose checksums hold, and the deterministic re-run makes the rest again.
"""

from __future__ import annotations

from palestra.episodes import load_episodes, read_episodes
from palestra.files import read_lines
from palestra.runs.checkpoints import KEPT, Checkpoint, checkpoints
from palestra.runs.disk import explain_disk_errors
from palestra.runs.listing import RunSummary, list_runs
from palestra.runs.run import Run
from palestra.runs.settings import changed_settings, check_config

__all__ = [
    "KEPT",
    "Checkpoint",
    "Run",
    "RunSummary",
    "changed_settings",
    "check_config",
    "checkpoints",
    "explain_disk_errors",
    "list_runs",
    "load_episodes",
    "read_episodes",
    "read_lines",
]
