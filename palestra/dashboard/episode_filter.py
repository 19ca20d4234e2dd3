"""Episode filters: selects episodes by their summaries and by text search."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field

from palestra.core.config import StrictModel
from palestra.dashboard.episode_columns import EpisodeColumns
from palestra.dashboard.episode_summary import RETURN_PREFIX
from palestra.dashboard.index import VERSION_COLUMN

SEARCH_TIMEOUT_S = 0.7  # seconds of a text search before it returns what it found


class EpisodeFilter(StrictModel):
    """The query of /api/runs/RUN/episodes; filters that are left out match every episode."""

    outcome: Literal["", "success", "failure", "error"] = ""
    """Outcome of the episodes: success, failure or error; any if empty."""
    env: str = ""
    """Name of the env."""
    seat: str = ""
    """A seat: `least` and `most` then bound its own return instead of the total."""
    policy: str = ""
    """Prefix of a policy's name: it plays at `seat`, or at any seat if `seat` is empty."""
    least: float | None = None
    """Lower bound of the return."""
    most: float | None = None
    """Upper bound of the return."""
    turns_from: int | None = None
    """Lower bound of the joint steps of the longest trajectory."""
    turns_to: int | None = None
    """Upper bound of the joint steps of the longest trajectory."""
    step_from: int | None = None
    """First training step: 1 is the first of the run."""
    step_to: int | None = None
    """Last training step."""
    invalid: bool = False
    """Only episodes with an invalid answer."""
    text: str = Field("", max_length=200)
    """Text to find in observations and answers, ignoring case."""
    sort: Literal["step", "total", "turns", "nodes", "success", "invalid"] = "step"
    """Column to sort by."""
    ascending: bool = False
    """Sort in ascending order."""
    first: int = Field(0, ge=0)
    """Index of the first match to return."""
    count: int = Field(50, ge=1, le=200)
    """Number of matches to return."""
    before: int = Field(0, ge=0)
    """For a text search: the number of candidates already searched by earlier requests."""


def matching_rows(columns: EpisodeColumns, query: EpisodeFilter) -> np.ndarray:
    """Returns the sorted rows [K] int32 of the episodes that match all filters but `text`."""
    if not len(columns):
        return np.zeros(0, np.int32)
    order = columns.sorted_rows(query.sort, query.ascending)
    masks = [
        *_outcome(columns, query.outcome),
        *_bounds(columns.seat_return(query.seat), query.least, query.most),
        *_bounds(columns.numeric("turns"), query.turns_from, query.turns_to),
        *_bounds(columns.numeric("step") + 1, query.step_from, query.step_to),
    ]
    if query.env:
        masks.append(columns.text_equals("env", query.env))
    if query.invalid:
        masks.append(columns.numeric("invalid") > 0)
    if query.seat or query.policy:
        masks.append(columns.seats_contain(_seat_substring(query)))
    return order[np.logical_and.reduce(masks)[order]] if masks else order


def _outcome(columns: EpisodeColumns, outcome: str) -> list[np.ndarray]:
    success = columns.numeric("success")
    kinds = {"success": success >= 0.5, "failure": success < 0.5}  # both false if the env reports no success
    if outcome in kinds:
        return [~columns.has_error & kinds[outcome]]
    if outcome == "error":
        return [columns.has_error]
    return []


def _bounds(values: np.ndarray, low: float | None, high: float | None) -> list[np.ndarray]:
    masks = []
    if low is not None:
        masks.append(values >= low)
    if high is not None:
        masks.append(values <= high)
    return masks


def _seat_substring(query: EpisodeFilter) -> str:
    """Returns the substring of the `seats` JSON that assigns `query.policy` to `query.seat`, or to any seat."""
    text = f"{json.dumps(query.seat, ensure_ascii=False)}: " if query.seat else ": "
    if query.policy:
        text += f'"{query.policy}'
    return text


def page_rows(columns: EpisodeColumns, rows: Sequence[int] | np.ndarray) -> list[dict[str, Any]]:
    """Returns rows of the table as JSON-ready dicts."""
    if not len(rows):
        return []
    shown: list[dict[str, Any]] = (
        columns.table.take(pa.array(rows, pa.int64())).drop_columns([VERSION_COLUMN]).to_pylist()
    )
    return [_row(row) for row in shown]


def _row(row: dict[str, Any]) -> dict[str, Any]:
    returns = {key.removeprefix(RETURN_PREFIX): value for key, value in row.items() if key.startswith(RETURN_PREFIX)}
    rest = {key: value for key, value in row.items() if not key.startswith(RETURN_PREFIX)}
    paid = {seat: value for seat, value in returns.items() if value is not None}
    return rest | {"step": row["step"] + 1, "seats": json.loads(row["seats"]), "returns": paid}


def return_histogram(columns: EpisodeColumns, rows: np.ndarray, bins: int = 24) -> dict[str, Any]:
    """Returns a histogram of the total returns: `edges` and `counts` of equal bins."""
    if not len(rows):
        return {"edges": [], "counts": []}
    counts, edges = np.histogram(columns.numeric("total")[rows], bins=bins)
    return {"edges": edges.tolist(), "counts": counts.tolist()}


def search_text(
    folder: Path,
    columns: EpisodeColumns,
    candidates: np.ndarray,
    query: EpisodeFilter,
    timeout_s: float = SEARCH_TIMEOUT_S,
) -> tuple[list[int], int]:
    """Returns the candidates from `query.before` on that contain the text, and where the search
    ended: after `query.count` matches or `timeout_s` seconds, but at least one file."""
    steps = columns.numeric("step")
    episodes = columns.numeric("episode")
    matches: list[int] = []
    matching: dict[int, set[int]] = {}
    end = time.monotonic() + timeout_s
    at = query.before
    while at < len(candidates) and len(matches) < query.count:
        row = int(candidates[at])
        step = int(steps[row])
        if step not in matching:
            if matching and time.monotonic() > end:
                break
            matching[step] = episodes_containing(folder / f"step-{step:06d}.parquet", query.text)
        if int(episodes[row]) in matching[step]:
            matches.append(row)
        at += 1
    return matches, at


def episodes_containing(path: Path, text: str) -> set[int]:
    """Returns the numbers of the episodes in a file whose observations or answers contain `text`, ignoring case; an
    empty set if the file cannot be read."""
    try:
        with pq.ParquetFile(path) as file:
            table = file.read(columns=["episode", "observation", "answer"])
    except (OSError, pa.ArrowInvalid):
        return set()
    masks = [pc.match_substring(table[name], text, ignore_case=True) for name in ("observation", "answer")]
    matches = pc.or_(pc.fill_null(masks[0], False), pc.fill_null(masks[1], False))
    return set(table["episode"].filter(matches).to_pylist())
