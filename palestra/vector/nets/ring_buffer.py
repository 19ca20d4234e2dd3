"""Ring buffer of rows, sampled uniformly or by priority."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from palestra.envs.vector_base import Arrays

MIN_PRIORITY = 1e-6  # added to every error, so that every row can be sampled


class RingBuffer:
    """Ring buffer of the last `capacity` rows of some columns. Rows are numbered from 0; row i is stored at i %
    capacity.

    With `alpha` above 0 rows are sampled in proportion to |error| ** alpha (Schaul et al., 2016, section 3.3): a row
    gets the largest priority so far with `set_max_priority`, and its own with `update_priorities`. Raises ValueError
    for `capacity` below 1 or a negative `alpha`.
    """

    def __init__(self, capacity: int, alpha: float = 0.0) -> None:
        if capacity < 1:
            raise ValueError(f"capacity: {capacity} rows cannot store anything: use 1 or more")
        if alpha < 0:
            raise ValueError(f"priority: {alpha} would sample rows with small errors most: use 0 (uniform) or more")
        self.capacity = capacity
        self.alpha = alpha
        self.total = 0
        self.columns: Arrays = {}
        self.tree = SumTree(capacity) if alpha else None
        self.highest = 1.0

    def __len__(self) -> int:
        return min(self.total, self.capacity)

    @property
    def can_sample(self) -> bool:
        """True if a row can be sampled."""
        return len(self) > 0 and (self.tree is None or self.tree.total > 0)

    def write(self, numbers: np.ndarray, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """Writes the newest rows, numbered `numbers` [M] int64; returns the positions of the rows
        written. Rows that later rows of the same call would overwrite are left out."""
        self.total = max(self.total, int(numbers.max(initial=-1)) + 1)
        newest = numbers >= self.total - self.capacity
        places = numbers[newest] % self.capacity
        all_fit = bool(newest.all())
        for name, value in values.items():
            if name not in self.columns:
                self.columns[name] = np.zeros((self.capacity, *value.shape[1:]), value.dtype)
            if not all_fit:
                value = value[newest]
            self.columns[name][places] = value
        if self.tree is not None:
            self.tree.set_values(places, np.zeros(len(places)))
        return places

    def set_max_priority(self, places: np.ndarray) -> None:
        """Gives rows without an error yet the largest priority so far, which makes them available for sampling."""
        if self.tree is not None:
            self.tree.set_values(places, np.full(len(places), self.highest**self.alpha))

    def sample(self, count: int, rng: np.random.Generator, beta: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
        """Returns positions [M] int64 of sampled rows and their importance weights [M] float64, at most 1.

        With priorities, one row is sampled from each of `count` equal parts of the total priority. Its weight is (1 /
        probability) ** beta, divided by the largest weight of the sample (Schaul et al., 2016, section 3.4). Raises
        ValueError if no row can be sampled.
        """
        if not len(self):
            raise ValueError("the replay buffer is empty: add a batch before you sample")
        if self.tree is None:
            return rng.integers(len(self), size=count), np.ones(count)
        places = self.tree.sample(count, rng)
        rarity = self.tree.of(places).min() / self.tree.of(places)  # the total cancels out
        return places, rarity**beta

    def update_priorities(self, places: np.ndarray, errors: np.ndarray) -> None:
        """Sets the priorities of rows from their errors [M], of any sign."""
        if self.tree is not None:
            size = np.abs(np.asarray(errors, np.float64)) + MIN_PRIORITY
            self.highest = max(self.highest, float(size.max(initial=0.0)))
            self.tree.set_values(np.asarray(places), size**self.alpha)

    def arrays(self) -> Arrays:
        """Returns everything that `load` needs to continue exactly. The arrays are views that
        change with the buffer: copy them to keep them."""
        count = len(self)
        saved = {f"column.{name}": column[:count] for name, column in self.columns.items()}
        saved["ring"] = np.array([self.total, self.capacity])
        if self.tree is not None:
            saved["priorities"] = self.tree.of(np.arange(count))
            saved["highest"] = np.array([self.highest])
        return saved

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restores what `arrays` returned. Raises ValueError if the capacity differs."""
        total, capacity = (int(number) for number in arrays["ring"])
        if capacity != self.capacity:
            raise ValueError(
                f"the saved buffer has a capacity of {capacity} rows and this one of {self.capacity}: use the same "
                "capacity"
            )
        self.total = total
        self.columns = {}
        for name, saved in arrays.items():
            if name.startswith("column."):
                column = np.zeros((self.capacity, *saved.shape[1:]), saved.dtype)
                column[: len(saved)] = saved
                self.columns[name.removeprefix("column.")] = column
        if self.tree is not None:
            self.tree = SumTree(self.capacity)
            self.tree.set_values(np.arange(len(self)), arrays["priorities"])
            self.highest = float(arrays["highest"][0])


class SumTree:
    """Sum tree: nonnegative float64 values at positions, with search by prefix sum."""

    def __init__(self, places: int) -> None:
        self.leaves = 1 << max(0, (places - 1).bit_length())
        self.depth = self.leaves.bit_length() - 1
        self.sums = np.zeros(2 * self.leaves)  # node i has children 2i and 2i+1; leaves are the second half

    @property
    def total(self) -> float:
        """Sum of all values."""
        return float(self.sums[1])

    def of(self, places: np.ndarray) -> np.ndarray:
        """Returns a copy of the values at `places` [M]."""
        values: np.ndarray = self.sums[self.leaves + places]
        return values

    def set_values(self, places: np.ndarray, numbers: np.ndarray) -> None:
        """Sets values [M]. If a position is given twice, its last value counts."""
        node = self.leaves + places
        self.sums[node] = numbers
        for _ in range(self.depth):
            node = np.unique(node >> 1)
            self.sums[node] = self.sums[2 * node] + self.sums[2 * node + 1]  # recomputed: no drift by rounding

    def find_prefix_sums(self, upto: np.ndarray) -> np.ndarray:
        """Returns the positions [M] int64 where prefix sums exceed `upto` [M], each from 0 to below the total."""
        node = np.ones(len(upto), np.int64)
        rest = upto.astype(np.float64)
        for _ in range(self.depth):
            left = self.sums[2 * node]
            right = (rest >= left) & (self.sums[2 * node + 1] > 0)  # rounding must not select an empty position
            rest = np.where(right, rest - left, rest)
            node = 2 * node + right
        return node - self.leaves

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Returns positions sampled in proportion to their values, one from each of `count` equal
        parts of the total. Raises ValueError if all values are 0."""
        if not self.total > 0:
            raise ValueError("no row can be sampled yet, because none is complete: add more steps before you sample")
        return self.find_prefix_sums((np.arange(count) + rng.random(count)) * (self.total / count))
