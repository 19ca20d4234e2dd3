"""Values as files store them: None, truth values, numbers, text, lists, and mappings with text keys (JSON)."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from typing import Any, NoReturn
from uuid import UUID

import numpy as np

TEXT_TYPES = (Decimal, Fraction, complex, UUID, PurePath, Enum)  # `str` loses nothing
TIME_TYPES = (datetime.date, datetime.time)  # `isoformat` loses nothing; a datetime is a date
MAX_DEPTH = 100  # nesting of containers
MAX_ITEM_BYTES = {"f": 8, "c": 16}  # of NumPy's numbers: wider ones lose digits
MAX_INTEGER_BITS = 14_000  # Python reads integers of up to 4300 digits


def plain_value(value: Any, depth: int = 0) -> Any:
    """Returns `value` as it is stored: tuples, sets (sorted) and arrays become lists, dataclasses mappings; dates,
    decimals, fractions, paths, UUIDs and members of an Enum become text, and so do keys, of numbers as JSON writes
    them, of tuples as Python does.

    Raises ValueError, "a bytes" or "a mapping with the key b'x'", for what cannot be stored without loss.
    """
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, str):
        return check_text(value)
    if isinstance(value, int):
        if value.bit_length() > MAX_INTEGER_BITS:
            raise ValueError(f"an integer of {value.bit_length():,} bits")
        return value
    if isinstance(value, np.ndarray | np.generic):
        return _plain_array(value, depth)
    if isinstance(value, TEXT_TYPES):
        return str(value)
    if isinstance(value, TIME_TYPES):
        return value.isoformat()
    return _plain_container(value, depth)


def _plain_container(value: Any, depth: int) -> Any:
    if depth == MAX_DEPTH:
        raise ValueError(f"containers that are nested more than {MAX_DEPTH} deep, or one that contains itself")
    if isinstance(value, Mapping):
        return _plain_mapping(value, depth)
    if isinstance(value, list | tuple):
        return [plain_value(item, depth + 1) for item in value]
    if isinstance(value, set | frozenset):
        return [plain_value(item, depth + 1) for item in _sort(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return {part.name: plain_value(getattr(value, part.name), depth + 1) for part in fields(value)}
    _refuse(value)


def _plain_array(value: np.ndarray | np.generic, depth: int) -> Any:
    if value.dtype.kind in "Vm" or value.dtype.itemsize > MAX_ITEM_BYTES.get(value.dtype.kind, value.dtype.itemsize):
        _refuse(value)
    if value.dtype.kind == "M":  # as text: those in nanoseconds would be integers
        return plain_value(np.datetime_as_string(np.asarray(value)).tolist(), depth)
    return plain_value(value.tolist(), depth)


def check_text(text: str) -> str:
    """Returns `text`. Raises ValueError if it has a lone surrogate, which UTF-8 cannot encode."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"text with a lone surrogate, {text[error.start]!a}") from error
    return text


def _plain_mapping(value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, item in value.items():
        if (text := _key(key)) in plain:
            raise ValueError(f"a mapping with two keys that are {text!r} as text")
        plain[text] = plain_value(item, depth + 1)
    return plain


def _key(key: Any) -> str:
    if isinstance(key, str):
        return check_text(key)
    try:
        plain = plain_value(key)
    except ValueError as error:
        raise ValueError(f"a mapping with the key {key!r}") from error
    if isinstance(key, tuple):
        return repr(tuple(plain))
    return plain if isinstance(plain, str) else json.dumps(plain)


def _sort(values: Iterable[Any]) -> list[Any]:
    """Returns the members of a set in an order that does not depend on the process."""
    try:
        return sorted(values)
    except TypeError:
        return sorted(values, key=lambda value: (type(value).__name__, repr(value)))


def _refuse(value: Any) -> NoReturn:
    raise ValueError(f"a {type(value).__module__}.{type(value).__qualname__}".replace(" builtins.", " "))


def short_repr(value: object) -> str:
    """Returns the start of `repr(value)`, at most 80 characters, for messages."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
