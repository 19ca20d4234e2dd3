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


def matching(table: pa.Table, query: Query) -> pa.Table:
    """The episodes that fit, in the order asked for; the words are not looked at."""
    if not len(table):
        return table
    reward = table[f"{RETURN}{query.seat}"] if f"{RETURN}{query.seat}" in table.column_names else table["total"]
    masks = [
        *_outcome(table, query.outcome),
        *_bounds(reward, query.least, query.most),
        *_bounds(table["turns"], query.turns_from, query.turns_to),
        *_bounds(table["step"], query.step_from, query.step_to),
        *([pc.equal(table["env"], query.env)] if query.env else []),
        *([pc.greater(table["invalid"], 0)] if query.invalid else []),
        *([pc.match_substring(table["seats"], _seated(query))] if query.seat or query.who else []),
    ]
    kept = _all(masks)
    return _sorted(table.filter(kept) if kept is not None else table, query)


def _all(masks: Sequence[Any]) -> Any:
    whole = None
    for mask in masks:
        whole = mask if whole is None else pc.and_(whole, mask)
    return None if whole is None else pc.fill_null(whole, False)


def _outcome(table: pa.Table, outcome: str) -> list[Any]:
    fine = pc.is_null(table["error"])
    if outcome == "error":
        return [pc.invert(fine)]
    if outcome == "success":
        return [fine, pc.greater_equal(table["success"], 0.5)]
    return [fine, pc.less(table["success"], 0.5)] if outcome == "failure" else []


def _bounds(column: Any, low: float | None, high: float | None) -> list[Any]:
    least = [pc.greater_equal(column, low)] if low is not None else []
    return least + ([pc.less_equal(column, high)] if high is not None else [])


def _seated(query: Query) -> str:
    """The piece of the JSON of seats that names a seat, a member at it, or a member anywhere."""
    seat = f"{json.dumps(query.seat, ensure_ascii=False)}: " if query.seat else ": "
    return seat + (f'"{query.who}' if query.who else "")


def _sorted(table: pa.Table, query: Query) -> pa.Table:
    """The newest first, whatever is sorted by: of equals the newer."""
    way = "ascending" if query.ascending else "descending"
    newest = [("step", "descending"), ("episode", "ascending")]
    keys = [("step", way), ("episode", "ascending")] if query.sort not in SORTS[1:] else [(query.sort, way), *newest]
    return table.take(pc.sort_indices(table, keys))


def page(table: pa.Table, first: int, count: int) -> list[dict[str, Any]]:
    """Some rows for the screen, from the `first` on."""
    rows: list[dict[str, Any]] = table.slice(first, count).drop_columns([STAMP]).to_pylist() if len(table) else []
    return [_row(row) for row in rows]


def _row(row: dict[str, Any]) -> dict[str, Any]:
    returns = {key.removeprefix(RETURN): value for key, value in row.items() if key.startswith(RETURN)}
    rest = {key: value for key, value in row.items() if not key.startswith(RETURN)}
    own = {seat: value for seat, value in returns.items() if value is not None}
    return rest | {"seats": json.loads(row["seats"]), "returns": own}


def spread(table: pa.Table, bins: int = 24) -> dict[str, Any]:
    """How the totals of the episodes lie: edges and counts of equal bins."""
    if not len(table):
        return {"edges": [], "counts": []}
    counts, edges = np.histogram(table["total"].to_numpy(), bins=bins)
    return {"edges": edges.tolist(), "counts": counts.tolist()}


def search(folder: Path, candidates: pa.Table, text: str, before: int, count: int) -> tuple[list[int], int]:
    """The candidates (by row) that hold the words, from the row `before` on, and the row where the search ended: it
    stops when it has `count`, and when its time is over. Case does not matter."""
    steps, episodes = candidates["step"].to_pylist(), candidates["episode"].to_pylist()
    found: list[int] = []
    held: dict[int, set[int]] = {}
    end, at = time.monotonic() + BUDGET, before
    while at < len(steps) and len(found) < count:
        if steps[at] not in held:
            if held and time.monotonic() > end:
                break
            held[steps[at]] = holding(folder / f"step-{steps[at]:06d}.parquet", text)
        if episodes[at] in held[steps[at]]:
            found.append(at)
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
