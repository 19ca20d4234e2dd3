"""JSON schemas of answers, read as draft 2020-12 and checked by the package jsonschema, an optional extra.

A server gets schemas from its clients, so that the time of a check is bounded: by its steps, without regular
expressions, of which one step may take exponentially long, and without schemas from elsewhere.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from jsonschema import Draft202012Validator, SchemaError, validators
from referencing import Registry

from palestra.core.chat import Json

MAX_SCHEMA_CHARS = 32_768  # of a schema that is itself checked in half a second
MAX_STEPS = 100_000  # keywords that the check of one answer reads: some seconds
MAX_REASON_CHARS = 200
UNUSED_KEYWORDS = {"pattern", "patternProperties", "$schema", "$id", "$dynamicRef"}
PLAIN_NAME = re.compile(r"[\w.-]+")


def parse_schema(schema: Json) -> Json:
    """Returns the schema of an object, without its `$schema`. Raises ValueError if it is invalid, too long, of another
    type, or has a keyword or a reference that is not used here."""
    schema = {key: value for key, value in schema.items() if key != "$schema"}
    if schema.get("type", "object") != "object":
        raise ValueError(f"its type is {str(schema['type'])[:64]!r}: send one of type object")
    try:
        size = len(json.dumps(schema))
        if size > MAX_SCHEMA_CHARS:
            raise ValueError(f"it has {size} characters: send at most {MAX_SCHEMA_CHARS}")
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise ValueError(_reason(error)) from None
    except RecursionError:
        raise ValueError("it is nested too deep: send a flatter one") from None
    _check_keywords(schema)
    return schema


def _check_keywords(schema: Json) -> None:
    """Raises ValueError for a keyword or a reference that is not used here."""
    places = [(place, name) for place in ("$defs", "definitions") for name in schema.get(place, {})]
    targets = {"#", *(f"#/{place}/{name}" for place, name in places if PLAIN_NAME.fullmatch(name))}
    waiting: list[Any] = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        if not isinstance(part, dict):
            continue
        waiting += part.values()
        for key in UNUSED_KEYWORDS & part.keys():
            if key != "pattern" or isinstance(part[key], str):  # else a property of this name
                raise ValueError(f"{key!r} is not used here: leave it out")
        if isinstance(ref := part.get("$ref"), str) and ref not in targets:
            raise ValueError(f"$ref {ref[:64]!r} is not used here: define it in $defs of the root")


def find_mismatch(value: Any, schema: Json) -> str:
    """Returns where and how a value is not of a schema that `parse_schema` returned; "" if it is."""
    steps = itertools.count()

    def count_steps(check: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
        def check_one(*given: Any) -> Iterator[Any]:
            if next(steps) >= MAX_STEPS:
                raise ValueError(f"the check takes more than {MAX_STEPS} steps")
            yield from check(*given) or ()

        return check_one

    checks = {key: count_steps(check) for key, check in Draft202012Validator.VALIDATORS.items()}
    bounded = validators.extend(Draft202012Validator, checks)
    try:
        error = next(bounded(schema, registry=Registry()).iter_errors(value), None)
    except (ValueError, ArithmeticError, RecursionError) as problem:  # numbers may be too large to be divided
        return str(problem)[:MAX_REASON_CHARS]
    return _reason(error) if error else ""


def _reason(error: Any) -> str:
    return f"{error.json_path}: {error.message}"[:MAX_REASON_CHARS]
