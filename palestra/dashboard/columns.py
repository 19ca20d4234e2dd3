"""The table of episodes as arrays: made once for each version of the table, so that a filter is a few comparisons and
a sort is there already the second time.

`E` is the number of episodes; a row is a number from 0 to E - 1, the place of an episode in the table.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from palestra.dashboard.digest import RETURN


class Columns:
    """The columns of `table`, which has what `digest` says. Each is made when it is first asked for."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self._numbers: dict[str, np.ndarray] = {}
        self._orders: dict[tuple[str, bool], np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.table)

    def numbers(self, name: str) -> np.ndarray:
        """A column of numbers [E], NaN where there is none."""
        if name not in self._numbers:
            self._numbers[name] = np.asarray(self.table[name].to_numpy())
        return self._numbers[name]

    def reward(self, seat: str) -> np.ndarray:
        """A seat's own return [E]; the total of all where there is no such seat."""
        name = f"{RETURN}{seat}"
        return self.numbers(name if name in self.table.column_names else "total")

    @cached_property
    def failed(self) -> np.ndarray:
        """Which episodes ended with an error [E]."""
        return np.asarray(pc.is_valid(self.table["error"]).to_numpy())

    def seated(self, piece: str) -> np.ndarray:
        """Where the JSON of who sits where has this piece [E]; each different one is looked at once."""
        codes, texts = self._seats
        found = pc.match_substring(texts, piece).to_numpy(zero_copy_only=False)
        return np.asarray(found[codes], bool)

    def equal(self, name: str, text: str) -> np.ndarray:
        """Where a column of texts is this one [E]."""
        return np.asarray(pc.fill_null(pc.equal(self.table[name], text), False).to_numpy())

    @cached_property
    def _seats(self) -> tuple[np.ndarray, Any]:
        """Numbers [E] of the different texts of that column, and those texts."""
        found = self.table["seats"].combine_chunks().dictionary_encode()
        return found.indices.to_numpy(), found.dictionary

    def order(self, name: str, ascending: bool) -> np.ndarray:
        """All rows by a column of numbers, those without one last; of equals the newer step first [E]."""
        key = (name, ascending)
        if key not in self._orders:
            self._orders[key] = self._sorted(name, ascending).astype(np.int32)
        return self._orders[key]

    def _sorted(self, name: str, ascending: bool) -> np.ndarray:
        if name == "step":
            step = self.numbers("step")
            return np.lexsort((self.numbers("episode"), step if ascending else -step))
        newest = self.order("step", ascending=False)
        values = self.numbers(name)[newest]
        return newest[np.argsort(values if ascending else -values, kind="stable")]
