"""What long measurements found, kept in the repository, so that they go on where they were broken off."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

KEPT = Path(__file__).parents[1] / "measured" / "psro"
Found = TypeVar("Found")  # of JSON


def kept(name: str, measure: Callable[[], Found]) -> Found:
    """What was measured under that name before, or is now."""
    path = KEPT / f"{name}.json"
    if not path.exists():
        found = measure()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found) + "\n")
    return json.loads(path.read_text())
