"""What several result pages share: tables, intervals over seeds, and the CPU seconds of a run."""

from __future__ import annotations

import posixpath
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from palestra.runs import read_lines

DOCS = "docs"  # folder of the pages
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)]+)\)")


def read_notes(file: Path) -> str:
    """Returns the notes of a page: Markdown whose relative links lead from docs/ instead of from the notes' folder."""
    folder = posixpath.join("results", file.parent.name)

    def lead(link: re.Match[str]) -> str:
        return f"]({posixpath.relpath(posixpath.join(folder, link[1]), DOCS)})"

    return LINK.sub(lead, file.read_text())


def wrapped(paragraph: str) -> list[str]:
    """A paragraph of Markdown in lines of at most 120 characters."""
    return textwrap.wrap(" ".join(paragraph.split()), 120, break_long_words=False, break_on_hyphens=False)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *(f"| {' | '.join(row)} |" for row in rows)]


def interval(values: Sequence[float], digits: int) -> str:
    """Mean and 95 % half-width over seeds, as text."""
    mean = f"{np.mean(values):.{digits}f}"
    return f"{mean} ± {half_interval(values):.{digits}f}" if len(values) > 1 else mean


def half_interval(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of a mean over seeds (Student's t)."""
    return float(stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5)


def moving_mean(values: np.ndarray, window: int = 9) -> np.ndarray:
    kernel = np.ones(min(window, len(values)))
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


def cpu_seconds(run: Path) -> float:
    """CPU seconds of a run's rollouts and updates."""
    lines = [line for line in read_lines(run / "timings.jsonl") if line["policy"] == "team"]
    return float(sum(value for line in lines for key, value in line.items() if key.endswith("cpu_s")))
