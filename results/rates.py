"""Scores on split dev by learning rate: a YAML file beside a results page, which chooses its rates by them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml

Rates = dict[str, dict[str, dict[float, dict[int, float]]]]  # success by task, method, rate and seed
Score = tuple[str, str, float, int, float]  # task, method, rate, seed, success


@dataclass(frozen=True)
class RatesFile:
    """The published scores of a page. `says` is the first line of the file: what was measured, by which command."""

    path: Path
    says: str

    def read(self) -> Rates:
        """Returns the published scores; an empty dict if there are none."""
        return (yaml.safe_load(self.path.read_text()) or {}) if self.path.exists() else {}

    def write(self, scores: Iterable[Score], target: Path) -> None:
        """Writes the published scores to `target`, with `scores` in their place."""
        rates = self.read()
        for task, method, rate, seed, success in scores:
            rates.setdefault(task, {}).setdefault(method, {}).setdefault(rate, {})[seed] = success
        target.write_text(f"# {self.says}\n{yaml.safe_dump(rates, sort_keys=True)}")
        print(f"{target} has the scores by learning rate")
