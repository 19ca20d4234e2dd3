"""Which episodes a person asks for: by what came of them, and by words that they hold."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field

from palestra.config import Strict
from palestra.dashboard.columns import Columns
from palestra.dashboard.digest import RETURN
from palestra.dashboard.index import STAMP

SORTS = ("step", "total", "turns", "nodes", "success", "invalid")
BUDGET = 0.7  # seconds that a search for words takes before it shows what it has


class Query(Strict):
    """What the list of episodes is asked, as its address has it; what is left out holds for all.

    `outcome` is success, failure or error; `seat` with `who` asks for a member there, and makes `least` and `most`
    bounds of that seat's own return instead of the total; `text` is looked for in what was seen and said.
    """

    outcome: str = ""
    env: str = ""
    seat: str = ""
    who: str = ""
    least: float | None = None
    most: float | None = None
    turns_from: int | None = None
    turns_to: int | None = None
    step_from: int | None = None
    step_to: int | None = None
    invalid: bool = False
    text: str = Field("", max_length=200)
    sort: str = "step"
    ascending: bool = False
    first: int = Field(0, ge=0)
    count: int = Field(50, ge=1, le=200)
    before: int = Field(0, ge=0)  # of a search for words: how many candidates were looked through before


def matching(columns: Columns, query: Query) -> np.ndarray:
    """The rows of the episodes that fit, in the order asked for; the words are not looked at."""
    if not len(columns):
        return np.zeros(0, np.int32)
    order = columns.order(query.sort if query.sort in SORTS else "step", query.ascending)
    masks = [
        *_outcome(columns, query.outcome),
        *_bounds(columns.reward(query.seat), query.least, query.most),
        *_bounds(columns.numbers("turns"), query.turns_from, query.turns_to),
        *_bounds(columns.numbers("step"), query.step_from, query.step_to),
        *([columns.equal("env", query.env)] if query.env else []),
        *([columns.numbers("invalid") > 0] if query.invalid else []),
        *([columns.seated(_seated(query))] if query.seat or query.who else []),
    ]
    return order[np.logical_and.reduce(masks)[order]] if masks else order


def _outcome(columns: Columns, outcome: str) -> list[np.ndarray]:
    success = columns.numbers("success")
    kinds = {"success": success >= 0.5, "failure": success < 0.5}  # neither, where the env knows none
    if outcome in kinds:
        return [~columns.failed & kinds[outcome]]
    return [columns.failed] if outcome == "error" else []


def _bounds(values: np.ndarray, low: float | None, high: float | None) -> list[np.ndarray]:
    least = [values >= low] if low is not None else []
    return least + ([values <= high] if high is not None else [])


def _seated(query: Query) -> str:
    """The piece of the JSON of seats that names a seat, a member at it, or a member anywhere."""
    seat = f"{json.dumps(query.seat, ensure_ascii=False)}: " if query.seat else ": "
    return seat + (f'"{query.who}' if query.who else "")


def page(columns: Columns, rows: Sequence[int] | np.ndarray) -> list[dict[str, Any]]:
    """Some episodes for the screen."""
    if not len(rows):
        return []
    shown: list[dict[str, Any]] = columns.table.take(pa.array(rows, pa.int64())).drop_columns([STAMP]).to_pylist()
    return [_row(row) for row in shown]


def _row(row: dict[str, Any]) -> dict[str, Any]:
    returns = {key.removeprefix(RETURN): value for key, value in row.items() if key.startswith(RETURN)}
    rest = {key: value for key, value in row.items() if not key.startswith(RETURN)}
    own = {seat: value for seat, value in returns.items() if value is not None}
    return rest | {"seats": json.loads(row["seats"]), "returns": own}


def spread(columns: Columns, rows: np.ndarray, bins: int = 24) -> dict[str, Any]:
    """How the totals of some episodes lie: edges and counts of equal bins."""
    if not len(rows):
        return {"edges": [], "counts": []}
    counts, edges = np.histogram(columns.numbers("total")[rows], bins=bins)
    return {"edges": edges.tolist(), "counts": counts.tolist()}


def search(
    folder: Path, columns: Columns, candidates: np.ndarray, query: Query, budget: float = BUDGET
) -> tuple[list[int], int]:
    """The candidates (rows) that hold the words, from the place `query.before` among them on, and the place where the
    search ended: it stops when it has `query.count`, and when its `budget` (seconds) is spent. Case does not matter."""
    steps, episodes = columns.numbers("step"), columns.numbers("episode")
    found: list[int] = []
    held: dict[int, set[int]] = {}
    end, at = time.monotonic() + budget, query.before
    while at < len(candidates) and len(found) < query.count:
        row = int(candidates[at])
        step = int(steps[row])
        if step not in held:
            if held and time.monotonic() > end:
                break
            held[step] = holding(folder / f"step-{step:06d}.parquet", query.text)
        if int(episodes[row]) in held[step]:
            found.append(row)
        at += 1
    return found, at


def holding(path: Path, text: str) -> set[int]:
    """The episodes of a file in which somebody saw or said these words."""
    try:
        with pq.ParquetFile(path) as file:
            table = file.read(columns=["episode", "observation", "answer"])
    except (OSError, pa.ArrowInvalid):
        return set()
    masks = [pc.match_substring(table[name], text, ignore_case=True) for name in ("observation", "answer")]
    there = pc.or_(pc.fill_null(masks[0], False), pc.fill_null(masks[1], False))
    return set(table["episode"].filter(there).to_pylist())
