"""Trained agents of a run: policies and members, where their weights are, and their evaluation results."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from palestra.core.files import DamagedFile, file_size, read_json, read_lines
from palestra.dashboard.catalog import CatalogRun, NotFound, read_object
from palestra.dashboard.run_status import eval_summary
from palestra.runs import Checkpoint, list_checkpoints
from palestra.runs.eval_files import EVAL_EPISODES_FOLDER, MAX_EVAL_EPISODES, list_eval_files
from palestra.runs.headline import headline_eval

STATE_FILES = ("optimizer.safetensors", "training.safetensors")  # training state: left out of downloads and sizes
CHUNK_BYTES = 1 << 20  # bytes
MAX_LINES = 50  # newest results sent of an evaluation
MAX_OUTCOMES = 10_000  # instances whose outcomes are sent


def agents_view(run: CatalogRun) -> dict[str, Any]:
    """Returns policies with their checkpoints, members with their lineage, and evaluations, ready for JSON."""
    evals = eval_rows(run)
    leading = headline_eval([row["name"] for row in evals])
    summaries = [eval_summary(line) for line in read_lines(run.file("evals.jsonl")) if line.get("name") == leading]
    results = {summary["step"]: summary for summary in summaries}
    return {
        "policies": [mark_best(row, results) for row in policy_rows(run)],
        "members": member_rows(run),
        "evals": evals,
        "leading": leading,
    }


def mark_best(policy: dict[str, Any], results: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the policy with two entries added to each checkpoint: `result`, of the leading evaluation after the same
    step (None if it was not played then), and `best`, true for the newest checkpoint with the highest result."""
    scores = {one["step"]: _score(results.get(one["step"]), policy["name"]) for one in policy["checkpoints"]}
    known = {step: score for step, score in scores.items() if score is not None}
    best = max((step for step, score in known.items() if score == max(known.values())), default=None)
    marked = [one | {"result": results.get(one["step"]), "best": one["step"] == best} for one in policy["checkpoints"]]
    return policy | {"checkpoints": marked}


def _score(line: Mapping[str, Any] | None, policy: str) -> float | None:
    """Returns the main metric of an evaluation's line for a policy as a number; None if it has none."""
    line = line or {}
    value = line.get("success", line.get("successes", {}).get(policy, line.get("return")))
    return float(value) if isinstance(value, int | float) else None


def policy_rows(run: CatalogRun) -> list[dict[str, Any]]:
    """Returns a dict per policy: type, base, seats, and its checkpoints, newest first."""
    checkpoints = list_checkpoints(run.path) if run.file("checkpoints.jsonl").exists() else []
    configs = run.config.get("policies") or {}
    names = dict.fromkeys([*configs, *chain.from_iterable(checkpoint.names for checkpoint in checkpoints)])
    seats = {str(seat): str(policy) for seat, policy in (run.config.get("seats") or {}).items()}
    return [
        {
            "name": name,
            "type": str((configs.get(name) or {}).get("type", "")),
            "base": str((configs.get(name) or {}).get("base") or ""),
            "seats": [seat for seat, policy in seats.items() if policy == name] or _implicit_seats(name, seats),
            "checkpoints": [_checkpoint_row(run, one, name) for one in reversed(checkpoints) if name in one.names],
        }
        for name in names
    ]


def _checkpoint_row(run: CatalogRun, checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    return {
        "step": checkpoint.step + 1,
        "keep": bool(checkpoint.entry.get("keep")),
        "bytes": _bytes(_file(run, checkpoint, name)),
        "version": read_object(_file(run, checkpoint, name, "member.json")).get("version"),
    }


def member_rows(run: CatalogRun) -> list[dict[str, Any]]:
    """Returns the frozen members of a population, oldest first: name, player, parent, info, and size in bytes."""
    path = run.file("population.json")
    if not path.exists():
        return []
    rows = []
    for one in read_json_list(path):
        row = {key: one.get(key) for key in ("name", "player", "parent", "info")} | {"bytes": 0}
        if one.get("weights"):
            row["bytes"] = _bytes(run.file(str(one["weights"])))
        rows.append(row)
    return rows


def eval_rows(run: CatalogRun) -> list[dict[str, Any]]:
    """Returns each evaluation: its seats, and results and outcomes of its first line and its newest
    `MAX_LINES`, with the number of instances whose episodes the run has."""
    configs = run.config.get("evals") or {}
    lines: dict[str, list[dict[str, Any]]] = {}
    for line in read_lines(run.file("evals.jsonl")):
        lines.setdefault(str(line.get("name")), []).append(line)
    recorded = list_eval_files(run.file(EVAL_EPISODES_FOLDER))
    return [
        {
            "name": name,
            "seats": lines[name][-1].get("seats") or (configs.get(name) or {}).get("seats") or {},
            "lines": _eval_lines(lines[name][:1] + lines[name][1:][-MAX_LINES:], recorded.get(name, [])),
            "count": len(lines[name]),
        }
        for name in lines
    ]


def _eval_lines(lines: Sequence[dict[str, Any]], recorded: Sequence[int]) -> list[dict[str, Any]]:
    rows = []
    for line in lines:
        row = eval_summary(line) | {"recorded": MAX_EVAL_EPISODES * (line.get("step") in recorded)}
        if isinstance(outcomes := line.get("outcomes"), str):
            row["outcomes"] = outcomes[:MAX_OUTCOMES]
        rows.append(row)
    return rows


def policy_folder(run: CatalogRun, step: int, policy: str) -> Path:
    """Returns the folder of a policy in the checkpoint after `step` steps. Raises NotFound if no checkpoint has it."""
    for checkpoint in list_checkpoints(run.path):
        if checkpoint.step + 1 == step and policy in checkpoint.names:
            return _file(run, checkpoint, policy)
    raise NotFound(f"no checkpoint after {step} steps holds {policy}")


def _file(run: CatalogRun, checkpoint: Checkpoint, policy: str, name: str = "") -> Path:
    """Returns the folder of a policy in a checkpoint, or the file `name` in it."""
    return run.file(str((checkpoint.path / checkpoint.names[policy] / name).relative_to(run.path)))


def member_weights_folder(run: CatalogRun, name: str) -> Path:
    """Returns the weight folder of a member. Raises NotFound if there is no such member or it has no weights."""
    for one in read_json_list(run.file("population.json")):
        if one["name"] == name and one.get("weights"):
            return run.file(str(one["weights"]))
    raise NotFound(f"there are no weights of a member {name}")


def stream_zip(folder: Path) -> Iterator[bytes]:
    """Yields a folder as a zip archive, stored, without training state and links."""
    pipe = _Pipe()
    with zipfile.ZipFile(pipe, "w", zipfile.ZIP_STORED) as archive:
        for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()):
            if path.name in STATE_FILES:
                continue
            entry = zipfile.ZipInfo(f"{folder.name}/{path.relative_to(folder)}")
            with path.open("rb") as file, archive.open(entry, "w", force_zip64=True) as target:
                while piece := file.read(CHUNK_BYTES):
                    target.write(piece)
                    yield pipe.take_bytes()
    yield pipe.take_bytes()


class _Pipe(io.RawIOBase):
    """The write end of the archive, which `stream_zip` empties; it cannot seek."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.pieces.append(bytes(data))
        return len(data)

    def take_bytes(self) -> bytes:
        """Returns the bytes written since the last call."""
        data = b"".join(self.pieces)
        self.pieces.clear()
        return data


def read_json_list(path: Path) -> list[Mapping[str, Any]]:
    """Returns the objects with a "name" in a file that holds a JSON list; [] if it cannot be read as one."""
    try:
        entries = read_json(path, list, [])
    except DamagedFile:
        return []
    return [one for one in entries if isinstance(one, dict) and "name" in one]


def _implicit_seats(name: str, seats: dict[str, str]) -> list[str]:
    """Returns the seats of a policy that `seats` does not name: its own, or all others."""
    if name == "default":
        return ["all others" if seats else "all"]
    return [] if seats else [name]


def _bytes(folder: Path) -> int:
    """Returns the bytes of a weight folder, without training state."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return sum(file_size(path) for path in files if path.name not in STATE_FILES)
