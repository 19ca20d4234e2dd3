"""Who a run trained: policies and members, where their weights are, and how they did in exams in other seats."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from palestra.dashboard.library import Absent, OpenRun, read_json
from palestra.files import read_lines, size
from palestra.runs import Checkpoint, checkpoints

STATE = ("optimizer.safetensors", "training.safetensors")  # of use to training only: not in a download
PIECE = 1 << 20


def agents(run: OpenRun) -> dict[str, Any]:
    """Policies with their checkpoints, members with their lineage, and the exams."""
    return {"policies": policies(run), "members": members(run), "exams": exams(run)}


def policies(run: OpenRun) -> list[dict[str, Any]]:
    """Each policy of the config, with the checkpoints that hold it."""
    kept = checkpoints(run.path) if run.file("checkpoints.jsonl").exists() else []
    configs = run.config.get("policies") or {}
    names = dict.fromkeys([*configs, *(name for checkpoint in kept for name in checkpoint.names)])
    seats = {str(seat): str(who) for seat, who in (run.config.get("seats") or {}).items()}
    return [
        {
            "name": name,
            "type": str((configs.get(name) or {}).get("type", "")),
            "base": str((configs.get(name) or {}).get("base") or ""),
            "seats": [seat for seat, who in seats.items() if who == name] or _unsaid(name, seats),
            "checkpoints": [
                {
                    "step": one.step,
                    "keep": bool(one.line.get("keep")),
                    "bytes": _bytes(_folder(run, one, name)),
                    "version": read_json(_member_json(run, one, name)).get("version"),
                }
                for one in reversed(kept)
                if name in one.names
            ],
        }
        for name in names
    ]


def members(run: OpenRun) -> list[dict[str, Any]]:
    """The frozen members of a population, oldest first: parents, what is known of them, and how large they are."""
    path = run.file("population.json")
    if not path.exists():
        return []
    listed = read_json_list(path)
    return [
        {
            **{key: one.get(key) for key in ("name", "player", "parent", "info")},
            "bytes": _bytes(run.file(str(one["weights"]))) if one.get("weights") else 0,
        }
        for one in listed
    ]


def exams(run: OpenRun) -> list[dict[str, Any]]:
    """The newest result of each exam, with whom it seats where: so members in other seats stand beside each other."""
    configs = run.config.get("exams") or {}
    lines: dict[str, list[dict[str, Any]]] = {}
    for line in read_lines(run.file("evals.jsonl")):
        lines.setdefault(str(line.get("name")), []).append(line)
    return [
        {
            "name": name,
            "seats": lines[name][-1].get("seats") or (configs.get(name) or {}).get("seats") or {},
            "first": lines[name][0],
            "last": lines[name][-1],
            "count": len(lines[name]),
        }
        for name in lines
    ]


def weights(run: OpenRun, step: int, policy: str) -> Path:
    """The folder of a policy in a checkpoint. Raises Absent where there is none."""
    for checkpoint in checkpoints(run.path):
        if checkpoint.step == step and policy in checkpoint.names:
            return _folder(run, checkpoint, policy)
    raise Absent(f"no checkpoint after step {step + 1} holds {policy}")


def _folder(run: OpenRun, checkpoint: Checkpoint, policy: str) -> Path:
    return run.file(str((checkpoint.path / checkpoint.names[policy]).relative_to(run.path)))


def _member_json(run: OpenRun, checkpoint: Checkpoint, policy: str) -> Path:
    return run.file(str((_folder(run, checkpoint, policy) / "member.json").relative_to(run.path)))


def member_weights(run: OpenRun, name: str) -> Path:
    """The folder of a member. Raises Absent for a name that is not of the population."""
    for one in read_json_list(run.file("population.json")):
        if one["name"] == name and one.get("weights"):
            return run.file(str(one["weights"]))
    raise Absent(f"there are no weights of a member {name}")


def zipped(folder: Path) -> Iterator[bytes]:
    """The files of a folder as a zip archive, piece by piece; what only training needs is left out."""
    pipe = _Pipe()
    with zipfile.ZipFile(pipe, "w", zipfile.ZIP_STORED) as archive:
        for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()):
            if path.name in STATE:
                continue
            with path.open("rb") as file, archive.open(_entry(path, folder), "w", force_zip64=True) as target:
                while piece := file.read(PIECE):
                    target.write(piece)
                    yield pipe.taken()
    yield pipe.taken()


def _entry(path: Path, folder: Path) -> zipfile.ZipInfo:
    return zipfile.ZipInfo(f"{folder.name}/{path.relative_to(folder)}")


class _Pipe(io.RawIOBase):
    """Where the archive writes to; it cannot seek, so nothing is written twice."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.pieces.append(bytes(data))
        return len(data)

    def taken(self) -> bytes:
        data = b"".join(self.pieces)
        self.pieces.clear()
        return data


def read_json_list(path: Path) -> list[Mapping[str, Any]]:
    """The objects in a file that holds a list of them."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [one for one in found if isinstance(one, dict) and "name" in one] if isinstance(found, list) else []


def _unsaid(name: str, seats: dict[str, str]) -> list[str]:
    """Where a policy sits that `seats` does not name: at the seat of its name, the default at all others."""
    if name == "default":
        return ["all others" if seats else "all"]
    return [] if seats else [name]


def _bytes(folder: Path) -> int:
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return sum(size(path) for path in files if path.name not in STATE)
