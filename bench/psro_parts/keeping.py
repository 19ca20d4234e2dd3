"""Stores results of long measurements in the repository, so that an interrupted one continues where it ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

KEPT = Path(__file__).parents[1] / "measured" / "psro"
Found = TypeVar("Found")  # of JSON


def kept(name: str, measure: Callable[[], Found]) -> Found:
    """Returns the stored result of that name; measures and stores it if there is none."""
    path = KEPT / f"{name}.json"
    if not path.exists():
        found = measure()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found) + "\n")
    return json.loads(path.read_text())
