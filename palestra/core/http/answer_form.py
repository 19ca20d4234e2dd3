"""Parses and checks the form that a call requires of its answer: JSON (`response_format`), a tool
call (`tool_choice`), or at most one call (`parallel_tool_calls`).

No model is forced into the form, and none is shown the schema: an algorithm needs what the policy
itself says. An answer in another form reaches a workflow's program as it is, with the field
`warning`, and counts as invalid; the training service answers with a `refusal` in its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from palestra.core.chat import Json
from palestra.core.http.bodies import read_json

SCHEMA_FIELDS = ("schema", "name", "description", "strict")  # the last three change no check


@dataclass(frozen=True)
class AnswerForm:
    """The form of an answer without calls (`schema`: a JSON object of it; None: any text), the
    tool that it must call ("": any of them; None: it need not), and whether two calls are too many.
    """

    schema: Json | None = None
    tool: str | None = None
    is_single_call: bool = False

    @classmethod
    def parse(cls, body: Json) -> AnswerForm:
        """Returns the form that a request asks for. Raises ValueError if it is not a form."""
        is_parallel = body.get("parallel_tool_calls")
        if not isinstance(is_parallel, bool | None):
            given = str(is_parallel)[:64]
            raise ValueError(f"'parallel_tool_calls' is {given!r}: send true or false")
        names = [(tool.get("function") or tool).get("name") for tool in body.get("tools") or ()]
        schema = _parse_format(body.get("response_format"))
        return cls(schema, _parse_tool(body.get("tool_choice"), names), is_parallel is False)

    def check(self, message: Json, answers: int = 1) -> str:
        """Returns what an answer, one of the `answers` to a call, breaks of its form; "" if nothing."""
        called = [call["function"]["name"] for call in message.get("tool_calls", ())]
        if self.is_single_call and len(called) > 1:
            return f"the answer has {len(called)} calls, and parallel_tool_calls is false"
        if self.tool is not None and not called:
            return "the answer calls no tool, and tool_choice asks for a call"
        if self.tool and set(called) != {self.tool}:
            return f"the answer calls {called[0]!r}, and tool_choice asks for {self.tool!r}"
        if self.schema is None or called:
            return ""
        try:
            value = read_json(message["content"].encode())
        except ValueError:
            value = None
        if not isinstance(value, dict):
            return "the answer is no JSON object, and response_format asks for one"
        if not self.schema:
            return ""
        from palestra.core.http.json_schema import find_mismatch

        mismatch = find_mismatch(value, self.schema, answers)
        return f"the answer is not of the schema of response_format: {mismatch}" if mismatch else ""


def _parse_format(response_format: Any) -> Json | None:
    """Returns the schema of a `response_format`, {} for any object; None if an answer may be any text."""
    if response_format in (None, {}, {"type": "text"}):
        return None
    if response_format == {"type": "json_object"}:
        return {}
    described = _field(response_format, "json_schema")
    schema = _field(described, "schema")
    is_schema = response_format == {"type": "json_schema", "json_schema": described}
    if not is_schema or not isinstance(schema, dict) or described.keys() - {*SCHEMA_FIELDS}:
        known = f"text, json_object, or json_schema with a json_schema of {', '.join(SCHEMA_FIELDS)}"
        raise ValueError(f"'response_format' is {str(response_format)[:64]!r}: send type {known}")
    try:
        from palestra.core.http.json_schema import parse_schema
    except ImportError as error:
        needed = f"{error.name}: pip install 'palestra[workflow]'"
        raise ValueError(f"'response_format' of type json_schema needs {needed}") from error
    try:
        return parse_schema(schema)
    except ValueError as error:
        raise ValueError(f"'response_format' has a schema that is not used here: {error}") from None


def _parse_tool(choice: Any, names: Sequence[str]) -> str | None:
    """Returns the tool that a `tool_choice` asks for: "" is any, None is none."""
    if choice in (None, "auto", "none"):
        return None
    name = _field(_field(choice, "function"), "name")
    if choice != "required" and name not in names:
        known = "auto, none, required or a function of tools"
        raise ValueError(f"tool_choice is {str(choice)[:64]!r}: send {known}")
    if not names:
        raise ValueError("tool_choice asks for a call, and there are no tools: send tools, or auto")
    return name or ""


def _field(value: Any, key: str) -> Any:
    """Returns a field of a mapping; None of anything else."""
    if isinstance(value, Mapping):
        return value.get(key)
    return None
