"""Reservoir sampling: a uniform sample of all rows ever added."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from palestra.envs.vector_base import Arrays


class Reservoir:
    """Reservoir of `capacity` rows of some columns, a uniform sample without replacement of all rows added (Vitter,
    1985, algorithm R)."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.seen = capacity, 0
        self.columns: Arrays = {}

    def __len__(self) -> int:
        return min(self.seen, self.capacity)

    def add(self, rows: Mapping[str, np.ndarray], rng: np.random.Generator) -> None:
        """Adds rows [M, ...] of each column. The first `capacity` rows fill the reservoir; after that the i-th row
        replaces a random one with probability capacity / i."""
        count = len(next(iter(rows.values())))
        numbers = self.seen + np.arange(count)
        places = np.where(numbers < self.capacity, numbers, rng.integers(0, numbers + 1))
        kept = places < self.capacity
        for name, values in rows.items():
            if name not in self.columns:
                self.columns[name] = np.zeros((self.capacity, *values.shape[1:]), values.dtype)
            self.columns[name][places[kept]] = values[kept]
        self.seen += count

    def sample(self, count: int, rng: np.random.Generator) -> Arrays:
        """Returns rows sampled with replacement, [count, ...] of each column."""
        places = rng.integers(0, len(self), count)
        return {name: column[places] for name, column in self.columns.items()}

    def arrays(self) -> Arrays:
        """Returns everything that `load` needs to continue exactly."""
        return {"seen": np.array([self.seen])} | {f"rows/{name}": column for name, column in self.columns.items()}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restores what `arrays` returned."""
        self.seen = int(arrays["seen"][0])
        self.columns = {
            name.removeprefix("rows/"): column.copy() for name, column in arrays.items() if name.startswith("rows/")
        }
