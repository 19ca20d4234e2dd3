"""A sample of all rows there ever were, each as likely to be in it as any other."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from palestra.envs.vector.base import Arrays


class Reservoir:
    """`capacity` rows of some columns, drawn without replacement from all that were added (Vitter, 1985, algorithm
    R)."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.seen = capacity, 0
        self.columns: Arrays = {}

    def __len__(self) -> int:
        return min(self.seen, self.capacity)

    def add(self, rows: Mapping[str, np.ndarray], rng: np.random.Generator) -> None:
        """Takes in rows [M, ...] of each column: the first `capacity` as they come; of the rest the i-th replaces a row
        drawn at random with probability capacity / i."""
        count = len(next(iter(rows.values())))
        numbers = self.seen + np.arange(count)
        places = np.where(numbers < self.capacity, numbers, rng.integers(0, numbers + 1))
        kept = places < self.capacity
        for name, values in rows.items():
            if name not in self.columns:
                self.columns[name] = np.zeros((self.capacity, *values.shape[1:]), values.dtype)
            self.columns[name][places[kept]] = values[kept]
        self.seen += count

    def draw(self, count: int, rng: np.random.Generator) -> Arrays:
        """Rows drawn with replacement, [count, ...] of each column."""
        places = rng.integers(0, len(self), count)
        return {name: column[places] for name, column in self.columns.items()}

    def arrays(self) -> Arrays:
        """Everything that `load` needs to go on exactly."""
        return {"seen": np.array([self.seen])} | {f"rows/{name}": column for name, column in self.columns.items()}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.seen = int(arrays["seen"][0])
        self.columns = {
            name.removeprefix("rows/"): column.copy() for name, column in arrays.items() if name.startswith("rows/")
        }
