"""Replays of a run for display: which there are, and the games of one evaluation with their pictures."""

from __future__ import annotations

import base64
import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa

from palestra.core.files import file_size
from palestra.dashboard.catalog import CatalogRun, NotFound
from palestra.runs.eval_files import REPLAYS_FOLDER, eval_file, list_eval_files
from palestra.runs.replays import GameReplay, read_replays

MAX_FILE_BYTES = 2**25  # of a file that is read; palestra writes some 0.1 to 2 MB
PNG_START = b"\x89PNG\r\n\x1a\n"


def replay_list(run: CatalogRun) -> list[dict[str, Any]]:
    """Returns the evaluations that have replays, each with the numbers of steps after which it was played."""
    files = list_eval_files(run.file(REPLAYS_FOLDER))
    return [{"name": name, "steps": (np.array(steps) + 1).tolist()} for name, steps in files.items()]


def replay_view(run: CatalogRun, evaluation: str, step: int) -> dict[str, Any]:
    """Returns the games of an evaluation after `step` steps. Raises NotFound, or ValueError."""
    name = eval_file(REPLAYS_FOLDER, evaluation, step - 1)
    path = run.file(name)
    if not path.is_file():
        raise NotFound(f"{run.name} has no replays of {evaluation} after {step} steps")
    if file_size(path) > MAX_FILE_BYTES:
        raise ValueError(f"{name} is larger than {MAX_FILE_BYTES // 2**20} MiB")
    try:
        header, replays = read_replays(path)
    except (pa.ArrowException, json.JSONDecodeError) as error:
        raise ValueError(f"{name} is not a file of replays: {error}") from error
    return asdict(header) | {"episodes": [_episode(replay) for replay in replays]}


def _episode(replay: GameReplay) -> dict[str, Any]:
    frames = [vars(frame) | {"picture": _data_url(frame.picture)} for frame in replay.frames]
    return vars(replay) | {"frames": frames}


def _data_url(picture: bytes | None) -> str | None:
    if picture is None or not picture.startswith(PNG_START):
        return None
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"
