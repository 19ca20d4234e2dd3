"""System status of a run: processes, workers, queues, failures and disk use."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow.compute as pc

from palestra.core.config import hide_credentials
from palestra.core.types import TEAM
from palestra.dashboard.catalog import CatalogRun
from palestra.dashboard.run_status import disk_usage, phase_keys
from palestra.runs.system_metrics import descendant_pids, machine_info, process_table, worker_rows, writing_process

MAX_ERRORS = 20  # distinct errors that are listed, the most frequent first


def system_status(run: CatalogRun) -> dict[str, Any]:
    """Returns local processes, this machine's load, workers, queues, newest timings, failures, disk use in bytes, and
    meta.json."""
    pid = writing_process(run.file(".lock"))
    table, missing = run.episodes.table()
    return {
        "process": pid,
        "processes": process_table([pid, *descendant_pids(pid)]) if pid else [],
        "machine": machine_info(),
        "workers": worker_rows(run.workers),
        "queues": queue_metrics(run),
        "timings": {name: _seconds(line) for name, line in run.timings.last_by_name().items()},
        "phases": phase_keys(run.timings),
        "failures": failure_counts(table),
        "unread": missing,
        "broken": {str(step): why for step, why in run.episodes.unreadable.items()},
        "torn": {
            log.path.name: log.num_unparsed
            for log in (run.metrics, run.timings, run.evals, run.workers)
            if log.num_unparsed
        },
        "disk": disk_usage(run.path),
        "meta": {key: value for key, value in run.meta.items() if key not in ("command", "config", "changed")},
        "command": [hide_credentials(str(word)) for word in run.meta.get("command") or []],
    }


def _seconds(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key != "policy"}


def queue_metrics(run: CatalogRun) -> dict[str, float]:
    """Returns the number of buffered episodes, their staleness, and the seconds that training waited."""
    found: dict[str, float] = {}
    buffer = run.path / "buffer"
    if buffer.is_dir():
        found["episodes played ahead"] = float(sum(1 for path in buffer.rglob("*") if path.is_file()))
    for line in run.metrics.last_by_name().values():
        for key in ("staleness", "staleness_max"):
            if key in line:
                found[key] = max(found.get(key, 0.0), float(line[key]))
    waited = run.timings.last_by_name().get(TEAM, {}).get("wait_s")
    return found | ({"wait_s": float(waited)} if waited is not None else {})


def failure_counts(table: Any) -> list[dict[str, Any]]:
    """Returns the most frequent errors of failed episodes, with count and the latest occurrence."""
    if "error" not in table.column_names:
        return []
    failed = table.select(["step", "episode", "error"]).filter(pc.is_valid(table["error"])).to_pylist()
    counts = Counter(row["error"] for row in failed)
    newest = {row["error"]: row for row in failed}
    return [
        {"error": error[:2000], "count": count, "step": newest[error]["step"], "episode": newest[error]["episode"]}
        for error, count in counts.most_common(MAX_ERRORS)
    ]
