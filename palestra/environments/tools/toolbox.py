"""Tools for agents: Python functions with type hints and docstrings, shown to models as OpenAI function schemas.

    def convert(kilometres: float) -> float:
        \"\"\"Converts kilometres to miles.

        kilometres: the length to convert
        \"\"\"
        return kilometres / 1.609344

    Toolbox([convert])

Every call returns a readable text result, whatever its arguments.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_json

from palestra.core.chat import Json, ToolCall
from palestra.core.config import load_object
from palestra.environments.tools.timeouts import ToolCallFailed, call_with_timeout
from palestra.environments.tools.tool_state import ToolState

NAME_PATTERN = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # the names that OpenAI's API accepts


@dataclass(frozen=True)
class Tool:
    """A function that a model can call.

    `parameters` is a pydantic model of the visible arguments: fields p0, p1, ... with the argument names as aliases.
    `state_parameter` is the name of the parameter that receives the episode's `ToolState`, if any. `is_built_in` marks
    built-in tools: they return immediately or keep their own time limit, and any exception except ValueError is a bug
    in palestra.
    """

    function: Callable[..., Any]
    name: str
    description: str
    parameters: type[BaseModel]
    state_parameter: str | None = None
    is_built_in: bool = False

    @cached_property
    def openai_schema(self) -> Json:
        """The function schema in OpenAI's format."""
        schema = self.parameters.model_json_schema(schema_generator=_Untitled)
        del schema["title"]
        function = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": function}

    def validate_arguments(self, arguments: Json) -> Json:
        """Validates and converts the arguments of a call. Raises ValueError, with the reasons, if they are invalid."""
        try:
            valid = self.parameters.model_validate(arguments)
        except ValidationError as error:
            known = [str(field.alias) for field in self.parameters.model_fields.values()]
            wrong = "; ".join(_complaint(detail) for detail in error.errors(include_url=False))
            raise ValueError(f"{self.name} takes {', '.join(known) or 'no arguments'}: {wrong}") from None
        return {str(field.alias): getattr(valid, p) for p, field in self.parameters.model_fields.items()}


@dataclass(frozen=True)
class ToolResult:
    """Result of a call: the text for the agent, `is_valid` if the call was valid, and the scratch afterwards.

    `failure`: the error if it was not the agent's mistake, else None.
    """

    text: str
    is_valid: bool
    scratch: ToolState
    failure: str | None = None


class Toolbox:
    """Tools by name. A call is limited to `time_limit` seconds, a result to `max_result_chars` characters.

    User functions run on separate threads, or as coroutines; one that hangs is abandoned and does not block others.
    Raises ValueError if a function is not a valid tool, or a name is used twice.
    """

    def __init__(
        self, tools: Iterable[Tool | Callable[..., Any]], time_limit: float = 10.0, max_result_chars: int = 4000
    ) -> None:
        self.time_limit = time_limit
        self.max_result_chars = max_result_chars
        self.tools: dict[str, Tool] = {}
        for each in tools:
            tool = each if isinstance(each, Tool) else make_tool(each)
            if tool.name in self.tools:
                raise ValueError(f'there are two tools called "{tool.name}": rename one, or leave one out')
            self.tools[tool.name] = tool

    def openai_schemas(self) -> tuple[Json, ...]:
        """Returns the function schemas of all tools, in OpenAI's format."""
        return tuple(tool.openai_schema for tool in self.tools.values())

    async def call_all(self, calls: Sequence[ToolCall], scratch: ToolState) -> list[ToolResult]:
        """Runs the calls of one answer; the last result holds the scratch after all of them.

        Calls that use the scratch run in order, the others concurrently.
        """
        apart = {i: asyncio.create_task(self.call(call, scratch)) for i, call in enumerate(calls) if self._apart(call)}
        results: list[ToolResult] = []
        try:
            for i, call in enumerate(calls):
                if i in apart:
                    result = await apart[i]
                else:
                    result = await self.call(call, scratch)
                    scratch = result.scratch
                results.append(ToolResult(result.text, result.is_valid, scratch, result.failure))
        finally:
            for task in apart.values():
                task.cancel()
        return results

    async def call(self, call: ToolCall, scratch: ToolState) -> ToolResult:
        """Runs a call. An unknown tool, invalid arguments or a failing tool give an error text as the result."""
        state = scratch.fork()
        try:
            tool, arguments = self._prepare(call, state)
            return self._result(_in_words(await self._call_tool(tool, arguments)), state)
        except ValueError as error:
            return self._result(f"Error: {error}", scratch, good=False)
        except ToolCallFailed as error:
            failure = f"{call.name} {error}"
        return self._result(f"Error: {failure}", scratch, failure=failure)

    def call_now(self, call: ToolCall, scratch: ToolState) -> ToolResult:
        """Runs a call as `call` does, for toolboxes of built-in tools that return at once, such as the calculator."""
        state = scratch.fork()
        try:
            tool, arguments = self._prepare(call, state)
            return self._result(_in_words(tool.function(**arguments)), state)
        except ValueError as error:
            return self._result(f"Error: {error}", scratch, good=False)

    def _prepare(self, call: ToolCall, state: ToolState) -> tuple[Tool, Json]:
        """Returns the tool of a call and all its arguments. Raises ValueError if there is none, or they are invalid."""
        if call.name not in self.tools:
            raise ValueError(f'there is no tool "{call.name}"; there is: {", ".join(self.tools) or "none"}')
        try:
            json.dumps(call.arguments, ensure_ascii=False).encode()
        except (UnicodeEncodeError, RecursionError):
            raise ValueError(f"the arguments of {call.name} hold half a character, or are nested too deep") from None
        tool = self.tools[call.name]
        arguments = tool.validate_arguments(call.arguments)
        if tool.state_parameter:
            arguments = arguments | {tool.state_parameter: state}
        return tool, arguments

    async def _call_tool(self, tool: Tool, arguments: Json) -> Any:
        if not tool.is_built_in:
            return await call_with_timeout(tool.function, arguments, self.time_limit)
        value = tool.function(**arguments)
        if inspect.isawaitable(value):
            value = await value
        return value

    def _result(self, text: str, scratch: ToolState, *, good: bool = True, failure: str | None = None) -> ToolResult:
        text = text.encode(errors="replace").decode()  # replaces lone surrogates, which cannot be encoded later
        if len(text) > self.max_result_chars:
            text = f"{text[: self.max_result_chars]}\n[cut off: {len(text)} characters in all]"
        return ToolResult(text, good, scratch, failure)

    def _apart(self, call: ToolCall) -> bool:
        return call.name in self.tools and self.tools[call.name].state_parameter is None


def make_tool(function: Callable[..., Any], *, is_built_in: bool = False) -> Tool:
    """Makes a tool of a function.

    The docstring's first line is the tool's description; a line `name: text`, or `Annotated[int, "text"]`, describes a
    parameter. A parameter annotated `ToolState` is not part of the schema: it receives the episode's state.

    Raises ValueError if the name is not valid for OpenAI's API, the docstring is missing, or a parameter has no type
    that JSON can represent.
    """
    name = getattr(function, "__name__", "")
    if not NAME_PATTERN.fullmatch(name):
        raise ValueError(
            f"{function!r} is not a tool: give a function whose name has letters, digits, '_' and '-' only"
        )
    lines = [line.strip() for line in (inspect.getdoc(function) or "").splitlines()]
    if not lines or not lines[0]:
        raise ValueError(f'tool "{name}" has no docstring: its first line tells a model what the tool does')
    hints = _hints(function)
    shown = {p.name: p for p in inspect.signature(function).parameters.values() if hints.get(p.name) is not ToolState}
    hidden = [p for p in inspect.signature(function).parameters if p not in shown]
    descriptions = {key: text.strip() for key, mark, text in (line.partition(":") for line in lines[1:]) if mark}
    fields: dict[str, Any] = {}
    for i, (key, parameter) in enumerate(shown.items()):
        if key not in hints or parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f'parameter "{key}" of tool "{name}" needs a type hint, and must not be * or positional')
        fields[f"p{i}"] = _field(key, hints[key], parameter, descriptions.get(key))
    try:
        model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        model.model_json_schema(schema_generator=_Untitled)
    except PydanticUserError as error:
        raise ValueError(f'tool "{name}" takes arguments that JSON cannot represent: {error.message}') from error
    return Tool(function, name, lines[0], model, next(iter(hidden), None), is_built_in)


def load_tool(path: str) -> Tool:
    """Loads the tool at "module:function". Raises ValueError if there is none."""
    function = load_object(path, "tool")
    if isinstance(function, Tool):
        return function
    return _make_tool_once(function)


@lru_cache(maxsize=256)  # an env is made for each episode, and building a schema is slow
def _make_tool_once(function: Callable[..., Any]) -> Tool:
    return make_tool(function)


class _Untitled(GenerateJsonSchema):
    """JSON schema without titles, which only repeat the names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ValueError(f"the type hints of {function.__name__} cannot be read: {error}") from error


def _field(name: str, hint: Any, parameter: inspect.Parameter, description: str | None) -> tuple[Any, Any]:
    notes = [text for text in getattr(hint, "__metadata__", ()) if isinstance(text, str)]
    if text := next(iter(notes), description):
        hint = Annotated[hint, Field(description=text)]
    default = ... if parameter.default is parameter.empty else parameter.default
    return hint, Field(default, alias=name)


def _complaint(detail: Any) -> str:
    where = ".".join(map(str, detail["loc"]))
    if detail["type"] == "missing":
        return f"{where} is missing"
    if detail["type"] == "extra_forbidden":
        return f"there is no {where}"
    return f"{where}: {detail['msg'][0].lower()}{detail['msg'][1:]}"


def _in_words(value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return "done"
    return to_json(value, fallback=str).decode()
