"""Values as JSON, between processes and in files; reading checks every value.

A missing or unknown key, or a value of the wrong type, is an error that names its place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from palestra.core.files import to_json_line
from palestra.parallel.tasks import Result, Task

T = TypeVar("T")


def through_json(result: Result, task: Task) -> Result:
    """Returns a worker's result as it will be read from tasks.jsonl: NumPy values become Python's, NaN becomes None.

    Raises ValueError if it is not a result of the task's type, TypeError if JSON cannot hold it.
    """
    if not isinstance(result, task.result_type):
        raise ValueError(f"the worker returned {type(result).__name__}, not {task.result_type.__name__}")
    return from_json(task.result_type, json.loads(to_json_line(result)), "result")


def from_json(kind: type[T], value: Any, where: str) -> T:
    """Returns JSON `value` as a `kind`. If that is a dataclass, every field must be present, also those with a default.

    Raises ValueError, which names the place below `where`, if the value does not fit.
    """
    try:
        found: T = _adapter(cast(Any, kind)).validate_python(value)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(map(str, [where, *fault["loc"]]))
        raise ValueError(f"{place}: {_reason(fault['type'], fault['msg'])}") from None
    if is_dataclass(kind):
        check_keys(value, [field.name for field in fields(kind)], f"{where}: ")
    return found


def check_keys(tree: Mapping[str, Any], keys: Sequence[str], where: str = "") -> None:
    """Raises ValueError, which begins with `where`, for a missing or unknown key of `tree`."""
    if missing := [key for key in keys if key not in tree]:
        raise ValueError(f'{where}key "{missing[0]}" is missing')
    if unknown := [key for key in tree if key not in keys]:
        raise ValueError(f'{where}key "{unknown[0]}" is unknown; there are {", ".join(keys)}')


def _reason(kind: str, message: str) -> str:
    known = {"missing": "this key is missing", "unexpected_keyword_argument": "this key is unknown"}
    return known.get(kind, message[:1].lower() + message[1:])


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
