"""JSON schemas of answers: what pydantic writes is checked, and no schema takes long."""

from enum import Enum
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from palestra.core.http.json_schema import MAX_STEPS, find_mismatch, parse_schema


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Part(BaseModel):
    colour: Colour
    size: float | None = None
    inner: "list[Part]" = Field(default=[], max_length=1)


class Plan(BaseModel, extra="forbid"):
    kind: Literal["plan"]
    pattern: str = ""
    parts: dict[str, Part]


@pytest.mark.parametrize(
    ("value", "mismatch"),
    [
        ({"kind": "plan", "parts": {}}, ""),
        ({"kind": "plan", "parts": {"a": {"colour": "red", "inner": [{"colour": "blue", "size": 1}]}}}, ""),
        (
            {"kind": "plan", "parts": {"a": {"colour": "red", "inner": [{"colour": "grey"}]}}},
            "$.parts.a.inner[0].colour",
        ),
        ({"kind": "plan", "parts": {"a": {"colour": "red", "inner": [{"colour": "red"}] * 2}}}, "$.parts.a.inner: "),
        ({"kind": "plan", "parts": {"a": {"colour": "red", "size": "1"}}}, "$.parts.a.size: '1' is not valid"),
        ({"kind": "plan", "parts": {"a": {"colour": "red", "size": True}}}, "$.parts.a.size: True is not valid"),
        ({"kind": "map", "parts": {}}, "$.kind: 'plan' was expected"),
        ({"kind": "plan"}, "$: 'parts' is a required property"),
        ({"kind": "plan", "parts": {}, "more": 1}, "$: Additional properties are not allowed ('more' was unexpected)"),
    ],
)
def test_schema_of_a_model_is_checked(value: Any, mismatch: str) -> None:
    found = find_mismatch(value, parse_schema(Plan.model_json_schema()))
    assert found.startswith(mismatch) and bool(found) == bool(mismatch)


class Price(BaseModel):
    price: str = Field(pattern="[0-9]+")


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "array"}, "its type is 'array': send one of type object"),
        ({"properties": {"n": {"type": "int"}}}, "$.properties.n.type: 'int' is not valid under any"),
        (Price.model_json_schema(), "'pattern' is not used here"),
        ({"patternProperties": {"^a": {}}}, "'patternProperties' is not used here"),
        ({"properties": {"n": {"$schema": "https://json-schema.org/draft/2020-12/schema"}}}, "'$schema' is not used"),
        ({"$ref": "http://127.0.0.1:1/schema"}, "$ref 'http://127.0.0.1:1/schema' is not used here"),
        ({"$ref": "#/$defs/gone"}, "$ref '#/$defs/gone' is not used here"),
        ({"properties": {}, "$ref": "#/properties"}, "$ref '#/properties' is not used here"),
        ({"description": "x" * 40_000}, "it has 40019 characters: send at most 32768"),
    ],
)
def test_schema_that_is_not_checked_is_refused(schema: Any, reason: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_schema(schema)
    assert str(refused.value).startswith(reason)


def test_schema_without_an_end_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"not": schema}
    with pytest.raises(ValueError, match="nested too deep"):
        parse_schema(schema)
    found = find_mismatch({}, parse_schema({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}))
    assert "recursion" in found


def doubled(depth: int) -> dict[str, Any]:
    """A schema whose check takes 2 ** `depth` steps."""
    defs = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{depth}": {}}}


def test_check_of_an_answer_is_bounded() -> None:
    assert find_mismatch({}, parse_schema(doubled(8))) == ""
    assert find_mismatch({}, parse_schema(doubled(40))) == f"the check takes more than {MAX_STEPS} steps"
    found = find_mismatch({"n": 10**400}, parse_schema({"properties": {"n": {"multipleOf": 0.5}}}))
    assert "too large" in found
