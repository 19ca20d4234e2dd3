"""Calls of tools in a model's answers, read in the form in which the base's chat template writes them.

The form is found by rendering calls of a probe's tool: what surrounds the name and the arguments is the template's.
Three kinds cover nearly all templates: one JSON object (Hermes, Qwen, Llama 3, Mistral), a name with a JSON object of
arguments (DeepSeek, gpt-oss, Kimi), and a name with an element for each argument (Qwen3-Coder, GLM, MiniMax). Two
dialects are read by response templates of `transformers`, as is any base that ships one.
"""

from __future__ import annotations

import ast
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers.utils.chat_parsing import parse_response

from palestra.core.chat import TOOL_CALL_PATTERN, Json, ToolCall, parse_assistant_message, tool_calls_of
from palestra.engine.conversation.rendering import (
    FIRST_KEY,
    FIRST_VALUE,
    LAST_KEY,
    LAST_VALUE,
    TOOL_NAME,
    common_start,
    whole_tags,
)

NAME = r"""(?P<name>[^\s<>"'(){}\[\],:|]+)"""
DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class FoundCalls:
    """Parts of an answer's text: the content outside of calls, the calls, and the texts of calls that could not be
    read."""

    content: str
    calls: list[ToolCall]
    unreadable: list[str]


class CallReader(Protocol):
    """Reads the calls in an answer's text; `tools` are those of the conversation."""

    def read(self, text: str, tools: Sequence[Json]) -> FoundCalls:
        """Returns the content and the calls of an answer."""


@dataclass(frozen=True)
class CommonCalls:
    """Calls in the form in which envs get them, that of Hermes and Qwen (`palestra.core.chat`)."""

    def read(self, text: str, tools: Sequence[Json]) -> FoundCalls:
        message = parse_assistant_message(text)
        content = message["content"]
        return FoundCalls(content, tool_calls_of(message), TOOL_CALL_PATTERN.findall(content))


@dataclass(frozen=True)
class MarkedCalls(ABC):
    """Calls that begin with a mark: `wrapper` may stand before the first one; `start` is the mark with what must follow
    it, up to the arguments; `close` ends a call."""

    wrapper: str
    mark: re.Pattern[str]
    start: re.Pattern[str]
    close: re.Pattern[str]

    @abstractmethod
    def read_at(self, text: str, found: re.Match[str], tools: Sequence[Json]) -> tuple[list[ToolCall], int]:
        """Returns the calls whose start is `found`, and the index at which their arguments end. Raises ValueError if
        they cannot be read."""

    def read(self, text: str, tools: Sequence[Json]) -> FoundCalls:
        content = list[str]()
        calls = list[ToolCall]()
        unreadable = list[str]()
        at = 0
        while at < len(text) and (marked := self.mark.search(text, at)):
            content.append(text[at : marked.start()])
            begun = self.start.match(text, marked.start())
            try:
                if begun is None:
                    raise ValueError("a mark without a call")
                read, at = self.read_at(text, begun, tools)
                if closed := self.close.match(text, at):
                    at = closed.end()
                calls += read
            except ValueError:
                at = len(text)
                if (closed := self.close.search(text, marked.end())) and closed[0].strip():
                    at = closed.end()
                unreadable.append(text[marked.start() : at].strip())
        if not content:
            return FoundCalls(text, [], [])
        content[0] = content[0].rstrip().removesuffix(self.wrapper)
        return FoundCalls("".join([*content, text[at:]]).strip(), calls, unreadable)


@dataclass(frozen=True)
class JsonCalls(MarkedCalls):
    """Calls as JSON objects, or a list of them, with a name and arguments."""

    name_key: str
    arguments_key: str

    def read_at(self, text: str, found: re.Match[str], tools: Sequence[Json]) -> tuple[list[ToolCall], int]:
        value, end = _decode(text, found.end())
        values = value if isinstance(value, list) else [value]
        while following := re.compile(r"\s*[,;]?\s*(?=\{)").match(text, end):  # several objects after one mark
            value, end = _decode(text, following.end())
            values.append(value)
        return [self._call(each) for each in values], end

    def _call(self, value: Any) -> ToolCall:
        if not isinstance(value, dict) or not isinstance(value.get(self.name_key), str):
            raise ValueError("no object with the name of a tool")
        return ToolCall(value[self.name_key], _mapping(value.get(self.arguments_key, {})))


@dataclass(frozen=True)
class NamedCalls(MarkedCalls):
    """Calls as a name with a JSON object of arguments."""

    def read_at(self, text: str, found: re.Match[str], tools: Sequence[Json]) -> tuple[list[ToolCall], int]:
        value, end = _decode(text, found.end())
        return [ToolCall(found["name"], _mapping(value))], end


@dataclass(frozen=True)
class ElementCalls(MarkedCalls):
    """Calls as a name with an element for each argument. Elements hold text: the tool's schema says which values are
    numbers, truth values or JSON; without a type, a value that is valid JSON is taken as such."""

    element: re.Pattern[str]

    def read_at(self, text: str, found: re.Match[str], tools: Sequence[Json]) -> tuple[list[ToolCall], int]:
        types = _parameter_types(found["name"], tools)
        arguments: Json = {}
        end = found.end()
        while element := self.element.match(text, end):
            arguments[element["key"]] = _parse_value(element["value"], types.get(element["key"]))
            end = element.end()
        if not self.close.match(text, end):
            raise ValueError("the call does not end")
        return [ToolCall(found["name"], arguments)], end


@dataclass(frozen=True)
class PythonCalls(MarkedCalls):
    """Calls as a list of Python's with keyword arguments, whose values may be JSON's."""

    def read_at(self, text: str, found: re.Match[str], tools: Sequence[Json]) -> tuple[list[ToolCall], int]:
        """Returns the calls between the mark `found` and the close, and the index of the close."""
        if (closed := self.close.search(text, found.end())) is None:
            raise ValueError("the call does not end")
        body = text[found.end() : closed.start()].strip()
        try:
            calls = _JsonNames().visit(_parse_python(body)).elts
            return [_python_call(call) for call in calls], closed.start()
        except (SyntaxError, AttributeError, TypeError, KeyError, RecursionError, MemoryError) as error:
            raise ValueError("no list of calls in Python") from error


def _parse_python(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:  # templates that escape nothing write line breaks into texts
        return ast.parse(text.replace("\n", "\\n"), mode="eval").body


def _python_call(call: ast.Call) -> ToolCall:
    if call.args or not all(word.arg for word in call.keywords):
        raise ValueError("arguments without a name")
    arguments = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    return ToolCall(ast.unparse(call.func), json.loads(json.dumps(arguments)))


class _JsonNames(ast.NodeTransformer):
    """Replaces the names of values in JSON."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant({"true": True, "false": False, "null": None}[node.id])

    def visit_Call(self, node: ast.Call) -> ast.Call:
        node.keywords = [self.visit(word) for word in node.keywords]
        return node


@dataclass(frozen=True)
class ResponseTemplateCalls:
    """Calls read by a response template of `transformers` (its documentation, "Response parsing"). An answer with
    fewer texts `closed` than `opened` was cut, which the template would not notice."""

    template: Json
    opened: str = ""
    closed: str = ""

    def read(self, text: str, tools: Sequence[Json]) -> FoundCalls:
        if self.opened and text.count(self.opened) > text.count(self.closed):
            return FoundCalls(text.partition(self.opened)[0], [], [text.partition(self.opened)[2]])
        try:
            message = parse_response(text, self.template, prefix="", tools=list(tools))
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            read = [ToolCall(call["name"], _mapping(call["arguments"])) for call in calls]
        except (ValueError, KeyError, TypeError):
            return FoundCalls("", [], [text])
        if not read:
            return FoundCalls(text, [], [])
        return FoundCalls(str(message.get("content") or ""), read, [])


def _decode(text: str, start: int) -> tuple[Any, int]:
    try:
        return DECODER.raw_decode(text, start)
    except RecursionError as error:
        raise ValueError("JSON that is too deep") from error


def _mapping(value: Any) -> Json:
    """Returns arguments, which may be JSON text, as a mapping. Raises ValueError if they are none."""
    if isinstance(value, str):
        value = json.loads(value)
    if not isinstance(value, dict):
        raise ValueError("the arguments are not a mapping")
    return value


def _parameter_types(name: str, tools: Sequence[Json]) -> dict[str, set[str]]:
    """Returns the types of a tool's parameters, by JSON schema."""
    functions = [tool.get("function", tool) for tool in tools]
    function: Json = next((each for each in functions if each.get("name") == name), {})
    properties = (function.get("parameters") or {}).get("properties") or {}
    return {key: set(_types(schema)) for key, schema in properties.items()}


def _types(schema: Any) -> Iterator[str]:
    if not isinstance(schema, dict):
        return
    declared = schema.get("type")
    yield from [declared] if isinstance(declared, str) else declared or ()
    for choice in [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]:
        yield from _types(choice)


def _parse_value(text: str, types: set[str] | None) -> Any:
    """Returns an element's text as a value of one of `types`; text stays text where the schema allows it."""
    if types and "string" in types:
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        lowered = {"True": True, "False": False, "None": None}
        return lowered.get(text.strip(), text)


# ---- finding the form

Texts = Sequence[str]  # what the template writes: one call, and the same one twice (or only the first)


def call_readers(texts: Texts, tail: str, shipped: Json | None = None) -> Iterator[CallReader]:
    """Yields readers of the form in which a template writes calls. `texts` holds its text of an answer with one call of
    the probe's tool, and with two of them if it takes two; `tail` is what it writes after the content of an answer;
    `shipped` is the base's own response template."""
    yield CommonCalls()
    if shipped:
        yield ResponseTemplateCalls(shipped)
    bodies = [text.removesuffix(tail) for text in texts]
    for find in (_json_calls, _named_calls, _element_calls):
        if reader := find(*bodies):
            yield reader
    yield from DIALECTS


def _json_calls(one: str, two: str = "") -> CallReader | None:
    place = one.rindex(TOOL_NAME)
    for start in (found.start() for found in re.finditer(r"\{", one[:place])):
        try:
            value, end = _decode(one, start)
        except ValueError:
            continue
        names = [key for key, each in value.items() if each == TOOL_NAME]
        arguments = [key for key, each in value.items() if _is_probe(each)]
        if names and arguments:
            before = one[:start].rstrip()
            after = one[end:]
            if before.endswith("["):
                before = before[:-1].rstrip()
                after = after.removeprefix("]")
            mark = _flexible(before) if before else rf'\A\s*(?=\[?\s*\{{\s*"{re.escape(names[0])}")'
            close = re.compile(_flexible(after))
            return JsonCalls("", re.compile(mark), re.compile(mark + r"\s*"), close, names[0], arguments[0])
    return None


def _named_calls(one: str, two: str = "") -> CallReader | None:
    place = one.rindex(TOOL_NAME) + len(TOOL_NAME)
    start = one.find("{", place)
    try:
        value, end = _decode(one, start)
    except ValueError:  # also for a start of -1, of a text without an object
        return None
    if not _is_probe(value):
        return None
    parts = _parts(one, two, one[end:])
    if not parts.mark.strip():  # a name that nothing marks is a text like any other
        return None
    begin = _flexible(parts.mark) + NAME + _flexible(one[place:start])
    return NamedCalls(parts.wrapper, re.compile(_first_word(parts.mark)), re.compile(begin), parts.close)


def _element_calls(one: str, two: str = "") -> CallReader | None:
    words = (TOOL_NAME, FIRST_KEY, FIRST_VALUE, LAST_KEY, LAST_VALUE)
    places = [one.rfind(word) for word in words]
    if -1 in places or places != sorted(places):
        return None
    ends = [place + len(word) for place, word in zip(places, words, strict=True)]
    after_name = one[ends[0] : places[1]]
    after_key = one[ends[1] : places[2]]
    between = one[ends[2] : places[3]]
    after = one[ends[4] :]
    value_close = re.sub(r"\s*\[?$", "", whole_tags(common_start(between, after)))
    key_open = between[len(value_close) :].lstrip()
    if not value_close.strip() or not key_open or not after_name.endswith(key_open):
        return None
    first, last = (r"\n?" if edge == "\n" else "" for edge in (after_key[-1:], value_close[:1]))
    element = (
        rf"\s*{re.escape(key_open)}(?P<key>[^\s<>\"']+){_any_truth(after_key)}{first}(?P<value>.*?)"
        rf"{last}{_flexible(value_close, before=False)}"
    )
    parts = _parts(one, two, after[len(value_close) :])
    if not parts.mark.strip():
        return None
    begin = _flexible(parts.mark) + NAME + _flexible(after_name.removesuffix(key_open))
    marks = re.compile(_first_word(parts.mark)), re.compile(begin)
    return ElementCalls(parts.wrapper, *marks, parts.close, re.compile(element, re.DOTALL))


def _is_probe(value: Any) -> bool:
    wanted = {FIRST_KEY: FIRST_VALUE, LAST_KEY: LAST_VALUE}
    try:
        return bool(_mapping(value) == wanted)
    except ValueError:
        return False


@dataclass(frozen=True)
class _Parts:
    """Texts around calls: `wrapper` before the first one, `mark` before each name, and a pattern of the `close`."""

    wrapper: str
    mark: str
    close: re.Pattern[str]


def _parts(one: str, two: str, after: str) -> _Parts:
    """Returns the parts of calls; `after` is what follows the arguments in the text `one` of one call."""
    before = one[: one.rindex(TOOL_NAME)]
    body = len(one) - len(before) - len(after)
    if not two:
        return _Parts("", before, re.compile(_flexible(after)))
    places = [found.start() for found in re.finditer(TOOL_NAME, two)]  # the name may stand twice in each call
    gap = two[places[len(places) // 2 - 1] + body : places[-1]]
    mark = common_start(before[::-1], gap[::-1])[::-1]
    rest = before.removesuffix(mark)
    if rest.rfind("<") > rest.rfind(">"):  # it begins within a tag
        mark = mark.partition(">")[2]
    if not mark.strip():
        return _Parts("", before, re.compile(_flexible(after)))
    close = gap.removesuffix(mark).rstrip()
    same = whole_tags(common_start(close, after))
    further = [_flexible(text[len(same) :]) for text in (close, after) if text[len(same) :].strip()]
    ends = _flexible(same) + (f"(?:{'|'.join(further)})?" if further else "")
    return _Parts(before.removesuffix(mark).strip(), mark, re.compile(ends))


def _first_word(mark: str) -> str:
    return _flexible("".join(mark.split()[:1]))


def _flexible(text: str, *, before: bool = True, after: bool = True) -> str:
    """Returns a pattern of `text` in which white space may be left out or added, and numbers may be others."""
    parts = [_any_number(part).replace(TOOL_NAME, r"[\w.-]+") for part in text.split()]
    space = r"\s*"
    return space * before + space.join(parts) + space * bool(after and parts)


def _any_number(text: str) -> str:
    """Returns a pattern of `text` with any digits in place of its own, but for those of the probe's name."""
    parts = [re.sub(r"\d+", r"\\d+", re.escape(part)) for part in text.split(TOOL_NAME)]
    return TOOL_NAME.join(parts)


def _any_truth(text: str) -> str:
    """Returns a pattern of the text between an argument's name and its value, in which an attribute may say of the
    value that it is a string or not."""
    return re.sub('"(?:true|false)"', '"(?:true|false)"', _flexible(text, after=False))


GEMMA_CALLS: Json = {
    "open_pattern": r"<\|tool_call>call:(?P<name>[\w.-]+)",
    "close_pattern": r"<tool_call\|>\s*",
    "repeats": True,
    "content": "json",
    "content_args": {"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True},
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}
GEMMA_TEMPLATE: Json = {
    "defaults": {"role": "assistant"},
    "start_anchor": r"<turn\|>",
    "fields": {"tool_calls": GEMMA_CALLS, "content": {"close_pattern": r"(?:<turn\|>)\s*|$", "content": "text"}},
}
DIALECTS = (
    # Gemma 4: <|tool_call>call:f{a:<|"|>text<|"|>,b:7}<tool_call|>
    ResponseTemplateCalls(GEMMA_TEMPLATE, "<|tool_call>", "<tool_call|>"),
    # LFM2.5: <|tool_call_start|>[f(a='text', b=7)]<|tool_call_end|>
    PythonCalls(
        "",
        re.compile(r"<\|tool_call_start\|>"),
        re.compile(r"<\|tool_call_start\|>"),
        re.compile(r"<\|tool_call_end\|>\s*"),
    ),
)
