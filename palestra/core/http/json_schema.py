"""JSON schemas of answers, read as draft 2020-12 and checked by the package jsonschema, an optional extra.

A server gets schemas from its clients, so that the time of a check is bounded: by its steps, without regular
expressions, of which one step may take exponentially long, and without schemas from elsewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from jsonschema import Draft202012Validator, SchemaError, ValidationError, validators
from referencing import Registry

from palestra.core.chat import Json

MAX_SCHEMA_CHARS = 32_768  # of a schema that is itself checked in half a second
MAX_STEPS = 100_000  # keywords and compared values of the check of one answer: some seconds
MAX_CALL_STEPS = 1_000_000  # of all answers of a call, each an equal part
VALUES_OF_STEP = 8  # of an array or object
CHARS_OF_VALUE = 64
MAX_REASON_CHARS = 200
UNUSED_KEYWORDS = {"pattern", "patternProperties", "$schema", "$id", "$dynamicRef"}
UNUSED_KEYWORDS |= {"unevaluatedItems", "unevaluatedProperties"}  # what jsonschema reads for them is not counted
NUM_TYPES = 7
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
        _check_keywords(schema)
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise ValueError(_reason(error)) from None
    except RecursionError:
        raise ValueError("it is nested too deep: send a flatter one") from None
    return schema


def _check_keywords(schema: Json) -> None:
    """Raises ValueError for a keyword or a reference that is not used here."""
    defined = {place: schema.get(place) for place in ("$defs", "definitions")}
    places = [(place, name) for place, parts in defined.items() if isinstance(parts, dict) for name in parts]
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
        if isinstance(types := part.get("type"), list) and len(types) > NUM_TYPES:
            raise ValueError(f"a type is a list of {len(types)}: name each of the {NUM_TYPES} types once")
        if isinstance(ref := part.get("$ref"), str) and ref not in targets:
            raise ValueError(f"$ref {ref[:64]!r} is not used here: define it in $defs of the root")


class _Steps:
    """The steps that the check of one answer has left, and the checks of values that are compared with each other: by
    hashed keys, since jsonschema compares each with each. Raises ValueError if there are no steps left."""

    def __init__(self, limit: int) -> None:
        self.left = self.limit = limit
        self.keys: dict[int, set[Hashable]] = {}  # of the values of an enum, by the list's id
        self.sizes: dict[int, int] = {}  # by the id of an array or object
        own = {"enum": self.check_enum, "const": self.check_const, "uniqueItems": self.check_unique}
        checks = {**Draft202012Validator.VALIDATORS, **own}
        self.checks = {key: self._count_steps(check) for key, check in checks.items()}

    def _count_steps(self, check: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
        def check_one(validator: Any, given: Any, instance: Any, schema: Any) -> Iterator[Any]:
            self.take(1 + self.size_of(instance) // VALUES_OF_STEP)
            yield from check(validator, given, instance, schema) or ()

        return check_one

    def take(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise ValueError(f"the check takes more than {self.limit} steps")

    def size_of(self, value: Any) -> int:
        """Returns how long it takes to go through a value, or to write it into a message."""
        if isinstance(value, str):
            return 1 + len(value) // CHARS_OF_VALUE
        if not isinstance(value, list | dict):
            return 1
        if id(value) not in self.sizes:
            self.sizes[id(value)] = sum(map(self.size_of, value.values() if isinstance(value, dict) else value))
        return self.sizes[id(value)]

    def key_of(self, value: Any) -> Hashable:
        """Returns a key that only equal values share; 1 is not True."""
        self.take(1)
        if isinstance(value, dict):
            return frozenset((name, self.key_of(each)) for name, each in value.items())
        return tuple(map(self.key_of, value)) if isinstance(value, list) else (isinstance(value, bool), value)

    def check_enum(self, _: Any, enum: Any, instance: Any, __: Any) -> Iterator[ValidationError]:
        if id(enum) not in self.keys:
            self.keys[id(enum)] = set(map(self.key_of, enum))
        if self.key_of(instance) not in self.keys[id(enum)]:
            self.take(self.size_of(enum) // VALUES_OF_STEP)
            yield ValidationError(f"{instance!r} is not one of {enum!r}")

    def check_const(self, _: Any, const: Any, instance: Any, __: Any) -> Iterator[ValidationError]:
        if self.key_of(instance) != self.key_of(const):
            yield ValidationError(f"{const!r} was expected")

    def check_unique(self, _: Any, is_unique: Any, instance: Any, __: Any) -> Iterator[ValidationError]:
        if is_unique and isinstance(instance, list) and len(set(map(self.key_of, instance))) < len(instance):
            yield ValidationError(f"{instance!r} has non-unique elements")


def find_mismatch(value: Any, schema: Json, answers: int = 1) -> str:
    """Returns where and how a value, of one of the `answers` to a call, is not of a schema that `parse_schema`
    returned; "" if it is."""
    limit = min(MAX_STEPS, MAX_CALL_STEPS // answers)
    bounded = validators.extend(Draft202012Validator, _Steps(limit).checks)
    try:
        error = next(bounded(schema, registry=Registry()).iter_errors(value), None)
    except RecursionError:
        return "it is nested too deep"
    except (ValueError, ArithmeticError) as problem:  # numbers may be too large to be divided
        return str(problem)[:MAX_REASON_CHARS]
    return _reason(error) if error else ""


def _reason(error: Any) -> str:
    return f"{error.json_path}: {error.message}"[:MAX_REASON_CHARS]
