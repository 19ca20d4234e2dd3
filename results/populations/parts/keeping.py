"""Keeps results of single long runs of a part, so that an interrupted part continues where it ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from results.ledger import Ledger, Line

Found = TypeVar("Found")  # of JSON


def figure(line: Line) -> str:
    """Returns the figures of a part; of a single run only that it is there."""
    figures = line.get("figures")
    return ", ".join(f"{name} {value:g}" for name, value in figures.items()) if figures else "a run"


def kept(name: str, measure: Callable[[], Found]) -> Found:
    """Returns the result of that name that was measured here; measures and stores it if there is none."""
    ledger = Ledger("populations", figure)
    if name not in ledger.here:
        ledger.add(name, {"result": measure()})
    return Ledger("populations", figure).here[name]["result"]
