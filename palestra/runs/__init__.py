"""Run directories: the files that training writes, and that the dashboard, reports and resume read.

    config.yaml             the resolved config
    meta.json               versions, seed, command line, time of creation, and the config that a resume uses
    metrics.jsonl           results that the seed determines: byte-identical in two runs with the same seed
    timings.jsonl           results that the machine determines: seconds, tokens per second, CPU and memory use
    workers.jsonl           counters per worker outside the run's process: tasks, sessions, losses; kept on resume
    evals.jsonl             scores on held-out instances
    episodes/step-000012.parquet
    eval_episodes/dev/step-000012.parquet   episodes of evaluations of language agents, the first of each instance
    replays/held_out/step-000012.parquet    games of evaluations in vectorised envs
    checkpoints/step-000012/
    checkpoints.jsonl       one line per complete checkpoint, with checksums of its files and of the logs up to then

A process may die at any moment. The line of a checkpoint is written once its files are on disk, and its folder is
renamed to its final name after that. `resume` completes a missing rename, truncates the logs to the newest checkpoint
whose checksums match, and deterministic training reproduces the rest.
"""

from __future__ import annotations

from palestra.core.files import read_lines
from palestra.runs.checkpoints import NUM_KEPT, Checkpoint, list_checkpoints
from palestra.runs.disk import explain_disk_errors
from palestra.runs.episodes import load_episodes, read_episodes
from palestra.runs.run import Run
from palestra.runs.settings import check_config, diff_settings, find_run

__all__ = [
    "NUM_KEPT",
    "Checkpoint",
    "Run",
    "check_config",
    "diff_settings",
    "explain_disk_errors",
    "find_run",
    "list_checkpoints",
    "load_episodes",
    "read_episodes",
    "read_lines",
]
