"""Status of a run: its entry in the list of runs, its progress, and the estimated time left."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from palestra.core.config import Tree, hide_credentials
from palestra.core.failures import ERROR_FILE, MAX_MESSAGE_CHARS
from palestra.core.files import file_size
from palestra.core.types import TEAM
from palestra.dashboard.alarms import Alarm, find_alarms, mirror_alarms
from palestra.dashboard.catalog import CatalogRun
from palestra.dashboard.run_table import experiment_id, main_score
from palestra.runs.headline import (
    algorithm_label,
    eval_interval,
    format_eval,
    headline_eval,
    paid_seats,
    return_keys,
    success_by_name,
    training_success_label,
)
from palestra.runs.metric_log import MetricLog, last_lines
from palestra.runs.mirror.copy import STATUS_FILE, mirror_status
from palestra.runs.settings import flatten_tree
from palestra.runs.system_metrics import descendant_pids, machine_info, process_table, worker_rows, writing_process

RECENT_S = 30.0  # seconds since the last write in which a run counts as running, where the system does not list locks
PACE_STEPS = 20  # newest steps whose mean duration predicts the time left
SEED_KEYS = ("name", "seed", "tags")  # last parts of the config keys in which runs of one experiment may differ
LOGS = ("metrics.jsonl", "timings.jsonl", "evals.jsonl", "tasks.jsonl", "workers.jsonl")
STAMPED_FILES = (*LOGS, "config.yaml", ERROR_FILE)


def run_kind(config: Tree) -> str:
    """Returns "population", "networks" or "language"."""
    if "population" in config:
        return "population"
    if "env_steps" in config:
        return "networks"
    return "language"


def file_stamp(path: Path) -> tuple[int, ...]:
    """Returns modification times (ns) and sizes of the run's logs, config and error: it changes when one does."""
    return tuple(chain.from_iterable(_stat(path / name) for name in STAMPED_FILES))


def _stat(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError:
        return 0, 0
    return stat.st_mtime_ns, stat.st_size


def list_entry(run: CatalogRun, locks: Mapping[int, int]) -> Tree:
    """Returns a run's entry in the list of runs. `locks` is `held_locks()`."""
    config = run.config
    meta = run.meta
    metrics = last_lines(run.file("metrics.jsonl"), "policy")
    team = metrics.get(TEAM, {})
    evals = last_lines(run.file("evals.jsonl"), "name")
    done, total = progress(config, metrics)
    env = config.get("env") or {}
    population = config.get("population") or {}
    return {
        "name": run.name,
        "created": str(meta.get("created", "")),
        "kind": run_kind(config),
        "env": str(env.get("type", "")) or ", ".join(map(str, config.get("envs") or {})),
        "algorithm": str(population.get("type") or algorithm_label(config)),
        "policies": [str(name) for name in (config.get("policies") or {})],
        "seed": config.get("seed"),
        "tags": [str(tag) for tag in config.get("tags") or []],
        "steps": int(max((row.get("step", -1) for row in metrics.values()), default=-1)) + 1,
        "done": done,
        "total": total,
        "status": status(run, done, total, locks),
        "error": error_line(run),
        "success": team.get("success"),
        "return": _main_return(team),
        "nash_conv": team.get("nash_conv"),
        "success_label": training_success_label(config),
        "headline": headline(evals, team),
        "score": main_score(evals, team),
        "experiment": experiment_id(experiment_config(config)) if config else "",
        "evals": {name: eval_summary(line) for name, line in evals.items()},
        "changed": max(file_stamp(run.path)[::2]) / 1e9,
    }


def _main_return(line: Mapping[str, Any]) -> float | None:
    """Returns the return of all seats; None without one, and of opponents, of whom it says nothing."""
    if not set(return_keys(line)) <= {"return"}:
        return None
    return line.get("return", line.get("team_return"))


def unreadable_entry(name: str, error: Exception) -> Tree:
    """Returns the list entry of a run whose files are not as palestra writes them, with the reason under `env`."""
    why = f"cannot be read: {error!r}"[:200]
    texts = dict.fromkeys(("created", "algorithm", "error", "headline", "experiment"), "")
    counts = dict.fromkeys(("steps", "done", "total", "changed"), 0.0)
    unknown = dict.fromkeys(("seed", "success", "return", "nash_conv", "score"))
    known = {"name": name, "kind": "language", "env": why, "status": "unreadable", "success_label": "training success"}
    return {**texts, **counts, **unknown, **known, "policies": [], "tags": [], "evals": {}}


def headline(evals: Mapping[str, Mapping[str, Any]], team: Mapping[str, Any]) -> str:
    """Returns the main result of a run as text: its NashConv, or its leading evaluation: "test 85.0%"; "" if none."""
    if team.get("nash_conv") is not None:
        return f"NashConv {team['nash_conv']:.3f}"
    name = headline_eval(list(evals))
    return f"{name} {format_eval(evals[name])}" if name else ""


def run_alarms(run: CatalogRun) -> list[Alarm]:
    """Returns the alarms of an open run whose metrics and evals are refreshed: its mirror's alarm, then those of its
    metrics, but for a population's, which is judged by its games."""
    run.file(STATUS_FILE)
    alarms = mirror_alarms(mirror_status(run.path))
    if run.file("tasks.jsonl").exists():
        return alarms
    begin = stage_begin(run.config, run.metrics)
    policies = {name: metric_columns(run.metrics, name, begin) for name in run.metrics.names() if name != TEAM}
    evals = {name: metric_columns(run.evals, name) for name in run.evals.names()}
    return alarms + find_alarms(policies, metric_columns(run.metrics, TEAM, begin), evals)


def stage_begin(config: Tree, log: MetricLog) -> int:
    """Returns the first step of the newest stage that has logged, counted from 0; 0 in a run without stages."""
    newest = max((line["step"] for line in log.last_by_name().values()), default=0)
    lengths = [int(stage.get("steps") or config.get("steps") or 0) for stage in config.get("stages") or []]
    begins = [sum(lengths[:number]) for number in range(len(lengths))]
    return max((begin for begin in begins if begin <= newest), default=0)


def metric_columns(log: MetricLog, name: str, begin: int = 0) -> dict[str, Any]:
    """Returns every metric of `name` in a log from step `begin` on, counted from 0: key -> values [T] float64."""
    columns = {key: log.column(name, key) for key in log.metric_keys().get(name, [])}
    return {key: values[steps >= begin] for key, (steps, values) in columns.items()}


def eval_summary(result: Mapping[str, Any]) -> Tree:
    """Returns an evaluation's main metrics and the steps done, with the 95 % interval of the leading one."""
    keys = ("success", "return", "returns", "episodes", "instances")
    summary = {key: result[key] for key in keys if key in result} | {"step": result.get("step", -1) + 1}
    if "returns" in summary:
        summary["returns"] = {seat: summary["returns"][seat] for seat in paid_seats(result)}
    rates = success_by_name(result)
    if "return" not in return_keys(result):
        summary.pop("return", None)
    if rates and "success" not in rates:
        summary = leave_out(summary, "return", "returns") | {"successes": rates}
    return summary | {"interval": eval_interval(result)}


def progress(config: Tree, metrics: Mapping[str, Mapping[str, Any]]) -> tuple[float, float]:
    """Returns (done, total) in training steps, env steps, or a plan's iterations."""
    team = metrics.get(TEAM, {})
    if "population" in config:
        total = team.get("iterations") or (config["population"] or {}).get("iterations") or 0
        return float(team.get("iteration") or 0), float(total)
    if "env_steps" in config:
        return float(team.get("env_steps") or 0), float(config["env_steps"])
    return float(team.get("step", -1)) + 1, float(config.get("steps") or 0)


def status(run: CatalogRun, done: float, total: float, locks: Mapping[int, int]) -> str:
    """Returns "running", "done", "failed" or "stopped". A plan that ended early on its stop criterion reads as
    "stopped" too. A run that is resumed is no longer "failed"."""
    lock = run.file(".lock")
    if lock.exists() and lock.stat().st_ino in locks:
        return "running"
    if run.file(ERROR_FILE).exists():
        return "failed"
    recent = time.time() - max(file_stamp(run.path)[::2]) / 1e9 < RECENT_S
    if total and done >= total:
        return "done"
    if recent and not locks and not Path("/proc/locks").exists():
        return "running"
    return "stopped"


def error_line(run: CatalogRun) -> str:
    """Returns the first line of the error that ended a run; "" if none did."""
    path = run.file(ERROR_FILE)
    if not path.is_file():
        return ""
    with path.open(encoding="utf-8", errors="replace") as file:
        return hide_credentials(file.readline(MAX_MESSAGE_CHARS).strip())


def time_left(run: CatalogRun, done: float, total: float) -> float | None:
    """Returns the estimated seconds left at the speed of the newest steps; None if unknown."""
    last = run.timings.last_by_name().get(TEAM, {})
    if not total or not done or done >= total:
        return None
    if "elapsed_s" in last:
        return float(last["elapsed_s"] / done * (total - done))
    steps, seconds = step_seconds(run.timings)
    if len(steps) < 2:
        return None
    _, counts = run.metrics.column(TEAM, "env_steps")
    newest = seconds[-PACE_STEPS:]
    if len(counts) > 1 and "env_steps" in run.config:
        per_line = (counts[-1] - counts[0]) / (len(counts) - 1)
        return float(newest.mean() / per_line * (total - done)) if per_line else None
    return float(newest.mean() * (total - done))


def step_seconds(timings: MetricLog) -> tuple[np.ndarray, np.ndarray]:
    """Returns the logged steps [T] and the seconds [T] that all phases of each took, both float64."""
    columns = [timings.column(TEAM, key) for key in phase_keys(timings)]
    columns = [column for column in columns if len(column[0])]
    if not columns:
        return np.zeros(0), np.zeros(0)
    steps = np.unique(np.concatenate([steps for steps, _ in columns]))
    total = np.zeros(len(steps))
    for at, values in columns:
        np.add.at(total, np.searchsorted(steps, at), values)
    return steps, total


def phase_keys(timings: MetricLog) -> list[str]:
    """Returns the timing metrics that are wall-clock seconds: rollout_s, train_s, ..."""
    keys = timings.metric_keys().get(TEAM, [])
    return [key for key in keys if key.endswith("_s") and not key.endswith(("_cpu_s", "_per_s", "elapsed_s"))]


def experiment_config(config: Tree) -> dict[str, Any]:
    """Returns the flattened config without the keys in which seeds of one experiment may differ."""
    return {k: v for k, v in flatten_tree(config).items() if k.split(".")[-1] not in SEED_KEYS}


def config_differences(trees: Sequence[Tree], at: str = "") -> list[tuple[str, list[Any]]]:
    """Returns the settings in which configs differ, each with its value in every config: None if absent, "null" if
    null. A group that a config lacks, or that has another `type` in it, is one setting, whose values are trees."""
    rows = []
    for name in dict.fromkeys(chain.from_iterable(trees)):
        values: list[Any] = ["null" if tree.get(name, "") is None else tree.get(name) for tree in trees]
        path = f"{at}.{name}" if at else str(name)
        if all(isinstance(value, dict) and value.get("type") == values[0].get("type") for value in values):
            rows += config_differences(values, path)
        elif any(value != values[0] for value in values):
            rows.append((path, values))
    return rows


def disk_usage(path: Path) -> dict[str, int]:
    """Returns the bytes of each file and folder directly in a run."""
    return {entry.name: _bytes(entry) for entry in sorted(path.iterdir()) if not entry.is_symlink()}


def _bytes(path: Path) -> int:
    if path.is_file():
        return file_size(path)
    return sum(file_size(Path(folder) / name) for folder, _, names in os.walk(path) for name in names)


MAX_ERRORS = 20  # distinct errors that are listed, the most frequent first


def system_status(run: CatalogRun) -> dict[str, Any]:
    """Returns all that the page System shows: processes, workers, failures, disk use, versions."""
    pid = writing_process(run.file(".lock"))
    table, missing = run.episodes.table()
    logs = [*run.charted_logs.values(), run.workers]
    return {
        "process": pid,
        "processes": process_table([pid, *descendant_pids(pid)]) if pid else [],
        "machine": machine_info(),
        "workers": worker_rows(run.workers),
        "queues": queue_metrics(run),
        "timings": {name: leave_out(line, "policy") for name, line in run.timings.last_by_name().items()},
        "phases": phase_keys(run.timings),
        "failures": failure_counts(table),
        "unread": missing,
        "broken": {str(step + 1): why for step, why in run.episodes.unreadable.items()},
        "torn": {log.path.name: log.num_unparsed for log in logs if log.num_unparsed},
        "disk": disk_usage(run.path),
        "meta": leave_out(run.meta, "command", "config", "changed"),
        "command": [hide_credentials(str(word)) for word in run.meta.get("command") or []],
    }


def leave_out(line: Mapping[str, Any], *keys: str) -> Tree:
    """Returns a line without these keys."""
    return {key: value for key, value in line.items() if key not in keys}


def queue_metrics(run: CatalogRun) -> dict[str, float]:
    """Returns the number of buffered episodes, their staleness, and the seconds that training waited."""
    metrics: dict[str, float] = {}
    buffer = run.path / "buffer"
    if buffer.is_dir():
        metrics["episodes played ahead"] = float(sum(1 for path in buffer.rglob("*") if path.is_file()))
    for line in run.metrics.last_by_name().values():
        for key in ("staleness", "staleness_max"):
            if key in line:
                metrics[key] = max(metrics.get(key, 0.0), float(line[key]))
    waited = run.timings.last_by_name().get(TEAM, {}).get("wait_s")
    if waited is not None:
        metrics["wait_s"] = float(waited)
    return metrics


def failure_counts(table: Any) -> list[dict[str, Any]]:
    """Returns the most frequent errors of failed episodes, with count and the latest occurrence."""
    if "error" not in table.column_names:
        return []
    failed = table.select(["step", "episode", "error"]).filter(pc.is_valid(table["error"])).to_pylist()
    counts = Counter(row["error"] for row in failed)
    newest = {row["error"]: row for row in failed}
    return [
        {"error": error[:2000], "count": count, "step": newest[error]["step"] + 1, "episode": newest[error]["episode"]}
        for error, count in counts.most_common(MAX_ERRORS)
    ]
