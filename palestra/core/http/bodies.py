"""Parsing of untrusted JSON with limits on depth, text and numbers."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from palestra.core.files import unique_keys

MAX_DEPTH = 64  # nested containers


def read_json(body: bytes) -> Any:
    """Parses `body`. Raises ValueError if it is not UTF-8 JSON, or contains a key twice, NaN, an infinity, a lone
    surrogate, or containers nested more than `MAX_DEPTH` levels deep."""
    try:
        value = json.loads(body.decode(), parse_constant=_no_number, object_pairs_hook=unique_keys)
    except RecursionError:
        raise _too_deep() from None
    _check(value)
    return value


def _check(value: Any) -> None:
    """Raises ValueError if the value violates a limit. Iterative, since the depth is not bounded yet."""
    waiting = [(value, 1)]
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"a text has half a character (a lone surrogate) at {error.start}: send all of it"
                ) from None
        elif isinstance(value, float):
            if not math.isfinite(value):
                _no_number(str(value))
        elif isinstance(value, (dict, list)):
            if depth > MAX_DEPTH:
                raise _too_deep()
            inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
            waiting.extend((each, depth + 1) for each in inner)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON: send a finite one")


def _too_deep() -> ValueError:
    return ValueError(f"the JSON is nested more than {MAX_DEPTH} deep: send a flatter one")
