"""Parses and checks the form that a call requires of its answer: JSON (`response_format`), a tool
call (`tool_choice`), or at most one call (`parallel_tool_calls`).

No model is forced into the form, and none is shown the schema: an algorithm needs what the policy
itself says. A reply in another form reaches the program as it is, with the field `warning`; in a
workflow it counts as an invalid answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from palestra.core.chat import Json


@dataclass(frozen=True)
class AnswerForm:
    """The form of an answer without calls (`keys`: a JSON object with these; None: any text), the
    tool that it must call ("": any of them; None: it need not), and whether two calls are too many.
    """

    keys: tuple[str, ...] | None = None
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
        keys = _parse_keys(body.get("response_format"))
        return cls(keys, _parse_tool(body.get("tool_choice"), names), is_parallel is False)

    def check(self, message: Json) -> str:
        """Returns what an answer breaks of its form; "" if nothing."""
        called = [call["function"]["name"] for call in message.get("tool_calls", ())]
        if self.is_single_call and len(called) > 1:
            return f"the answer has {len(called)} calls, and parallel_tool_calls is false"
        if self.tool is not None and not called:
            return "the answer calls no tool, and tool_choice asks for a call"
        if self.tool and set(called) != {self.tool}:
            return f"the answer calls {called[0]!r}, and tool_choice asks for {self.tool!r}"
        if self.keys is None or called:
            return ""
        if (value := _read_object(message["content"])) is None:
            return "the answer is no JSON object, and response_format asks for one"
        if missing := [key for key in self.keys if key not in value]:
            return f"the answer lacks the key {missing[0]!r} of response_format"
        return ""


def _parse_keys(response_format: Any) -> tuple[str, ...] | None:
    """Returns the keys that an answer in a `response_format` must have; None if it may be any."""
    if response_format in (None, {}, {"type": "text"}):
        return None
    kind = _field(response_format, "type")
    if kind == "json_object":
        return ()
    schema = _field(_field(response_format, "json_schema"), "schema")
    required = None
    if kind == "json_schema" and isinstance(schema, dict):
        required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
        known = "text, json_object, or json_schema with a json_schema.schema"
        raise ValueError(f"'response_format' is {str(response_format)[:64]!r}: send type {known}")
    return tuple(required)


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


def _read_object(text: str) -> Json | None:
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
        if isinstance(value, dict):
            return value
    return None
