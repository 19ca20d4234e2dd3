"""JSON schemas of answers: what pydantic writes is checked, and no schema takes long."""

from enum import Enum
from typing import Any, Literal

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field

from palestra.core.http.json_schema import MAX_CALL_STEPS, MAX_STEPS, find_mismatch, parse_schema


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
        ({"unevaluatedProperties": False}, "'unevaluatedProperties' is not used here"),
        ({"properties": {"n": {"type": [{"a": i} for i in range(9)]}}}, "a type is a list of 9: name each of the 7"),
        ({"definitions": [1]}, "$.definitions: [1] is not of type 'object'"),
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
    assert found == "it is nested too deep"


def doubled(depth: int) -> dict[str, Any]:
    """A schema whose check takes 2 ** `depth` steps."""
    defs = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{depth}": {}}}


@pytest.mark.timeout(20)
def test_check_of_an_answer_is_bounded() -> None:
    assert find_mismatch({}, parse_schema(doubled(8))) == ""
    assert find_mismatch({}, parse_schema(doubled(40))) == f"the check takes more than {MAX_STEPS} steps"
    answers = 1000  # to one call: they share its steps
    assert find_mismatch({}, parse_schema(doubled(8)), answers) == ""
    shared = f"the check takes more than {MAX_CALL_STEPS // answers} steps"
    assert find_mismatch({}, parse_schema(doubled(12)), answers) == shared
    # more combinations than steps, of parts that are compared with each other or written into messages
    many: list[Any] = [{"a": i} for i in range(9000)]
    parts: list[Any] = [{"uniqueItems": True}, {"items": {"enum": many[2500:]}}]
    for part in parts:
        assert find_mismatch({"n": many[5000:]}, {"properties": {"n": part}}) == ""
    parts = [{"contains": {"enum": list(range(5000))}}, {"allOf": [{"contains": True}] * 999}]
    for part in parts:
        assert find_mismatch({"n": [-1] * 9000}, {"properties": {"n": part}}).startswith("the check takes more than")
    found = find_mismatch({"n": 10**400}, parse_schema({"properties": {"n": {"multipleOf": 0.5}}}))
    assert "too large" in found


@pytest.mark.parametrize(
    ("schema", "equal", "other"),
    [
        ({"enum": [1, "a", {"k": [1, True]}]}, [1.0, "a", {"k": [1.0, True]}], [True, "1", {"k": [1, 1]}, ["a"], []]),
        ({"const": [0, {}]}, [[0.0, {}]], [[False, {}], [0, []], 0, "[0, {}]"]),
        ({"uniqueItems": True}, [[1, True, "1", [1], {"1": 1}], []], [[1, 1.0], [{"a": 1, "b": 2}, {"b": 2, "a": 1}]]),
    ],
)
def test_values_are_compared_as_json_compares_them(schema: Any, equal: list[Any], other: list[Any]) -> None:
    """As jsonschema itself does, which takes longer."""
    parsed = parse_schema({"properties": {"n": schema}})
    for value in [*equal, *other]:
        assert (find_mismatch({"n": value}, parsed) == "") == Draft202012Validator(schema).is_valid(value)
        assert (find_mismatch({"n": value}, parsed) == "") == any(value is one for one in equal)
