"""The episode table as arrays, built once per version of the table, so that filters and sorts need only array
operations.

`E` is the number of episodes; a row is an integer from 0 to E - 1, an episode's position in the table.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from palestra.dashboard.episode_summary import RETURN_PREFIX


class EpisodeColumns:
    """Lazily built, cached arrays over `table`, whose columns episode_summary.py documents."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self._numbers: dict[str, np.ndarray] = {}
        self._orders: dict[tuple[str, bool], np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.table)

    def numeric(self, name: str) -> np.ndarray:
        """Returns a numeric column [E], NaN for null."""
        if name not in self._numbers:
            self._numbers[name] = np.asarray(self.table[name].to_numpy())
        return self._numbers[name]

    def seat_return(self, seat: str) -> np.ndarray:
        """Returns a seat's own return [E]; the total over all seats if there is no such seat."""
        name = f"{RETURN_PREFIX}{seat}"
        if name not in self.table.column_names:
            name = "total"
        return self.numeric(name)

    @cached_property
    def has_error(self) -> np.ndarray:
        """Mask [E] bool of the episodes that ended with an error."""
        return np.asarray(pc.is_valid(self.table["error"]).to_numpy())

    def seats_contain(self, substring: str) -> np.ndarray:
        """Returns the mask [E] bool of rows whose `seats` JSON contains a text."""
        codes, texts = self._seats
        contains = pc.match_substring(texts, substring).to_numpy(zero_copy_only=False)
        return np.asarray(contains[codes], bool)

    def text_equals(self, name: str, text: str) -> np.ndarray:
        """Returns the mask [E] bool of rows where a text column equals `text`."""
        return np.asarray(pc.fill_null(pc.equal(self.table[name], text), False).to_numpy())

    @cached_property
    def _seats(self) -> tuple[np.ndarray, Any]:
        """Dictionary encoding of the `seats` column: codes [E], and the distinct texts."""
        encoded = self.table["seats"].combine_chunks().dictionary_encode()
        return encoded.indices.to_numpy(), encoded.dictionary

    def sorted_rows(self, name: str, ascending: bool) -> np.ndarray:
        """Returns all rows [E] int32 sorted by a numeric column, nulls last; ties put the newer step first."""
        key = (name, ascending)
        if key not in self._orders:
            self._orders[key] = self._sort_rows(name, ascending).astype(np.int32)
        return self._orders[key]

    def _sort_rows(self, name: str, ascending: bool) -> np.ndarray:
        values = self.numeric(name)
        if not ascending:
            values = -values
        if name == "step":
            return np.lexsort((self.numeric("episode"), values))
        newest = self.sorted_rows("step", ascending=False)
        return newest[np.argsort(values[newest], kind="stable")]
