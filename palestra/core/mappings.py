"""Functions of mappings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def key_by_value(groups: Mapping[K, Iterable[V]]) -> dict[V, K]:
    """Returns the key of the group that each value is in; of several, the last."""
    keys: dict[V, K] = {}
    for key, values in groups.items():
        keys.update(dict.fromkeys(values, key))
    return keys
