"""Conversations as text: what a tokenizer's chat template makes of messages in OpenAI's format.

Templates differ in the messages that they take. What a template wants is found by rendering probes, once for each
tokenizer: whether it knows a system role and two messages of one role in a row, under which key it reads a thought,
and how it wants calls of tools. Messages are brought into that form; one that no form fits is refused.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import jinja2

from palestra.core.chat import (
    THOUGHT_KEYS,
    Json,
    part_thought,
    to_template_message,
    with_reasoning,
    with_thought,
)

TEMPLATE_ERRORS = (  # what a template raises, which runs any expression of its author
    *(jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError),
    *(ArithmeticError, RecursionError, SyntaxError),
)
ASKED: Json = {"role": "user", "content": "?"}
TEXT_MARK = "Zq7Answer"  # words that no template writes by itself: what surrounds them is the template's
THOUGHT_MARK = "Zq7Thought"
TOOL_NAME = "zq7_tool"
FIRST_KEY = "zq7_a"
FIRST_VALUE = "Zq7First"
LAST_KEY = "zq7_b"
LAST_VALUE = "Zq7Last"
RESULT_MARK = "Zq7Result"
INLINE = "content"  # a thought is part of the content, between <think> and </think>


class TemplateRefusal(ValueError):
    """The chat template does not take a conversation."""


def probe_tool(name: str = TOOL_NAME) -> Json:
    """Returns the description of a tool with two text parameters."""
    parameters = {"type": "object", "properties": {key: {"type": "string"} for key in (FIRST_KEY, LAST_KEY)}}
    function = {"name": name, "description": "", "parameters": parameters | {"required": [FIRST_KEY, LAST_KEY]}}
    return {"type": "function", "function": function}


def probe_call(*arguments: Json, thought: str = "", content: str = "") -> Json:
    """Returns an assistant message with one call of the probe's tool for each of `arguments`."""
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": TOOL_NAME, "arguments": given}}
        for i, given in enumerate(arguments)
    ]
    return {"role": "assistant", "content": content, "reasoning_content": thought, "tool_calls": calls}


def common_start(one: str, other: str) -> str:
    """Returns the text with which both texts begin."""
    length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]


def whole_tags(text: str) -> str:
    """Returns a text without a part of a tag at its end."""
    return re.sub(r"<[^<>]*\Z", "", text)


def with_chat_template(tokenizer: Any, choice: str | None) -> Any:
    """Returns the tokenizer with another chat template: "none" for none, the name of one of its own, or Jinja text.
    None keeps its template. Raises ValueError if it has no template of that name."""
    if choice is None:
        return tokenizer
    own = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    named = {**own, "none": None}
    if choice not in named and not is_jinja(choice):
        names = ", ".join(own) or "none by name"
        raise ValueError(f"chat_template: the base has no template {choice!r} (it has {names}): give a .jinja file")
    changed = copy.copy(tokenizer)
    changed.chat_template = named.get(choice, choice)
    return changed


def is_jinja(text: str) -> bool:
    """Returns whether a text is a template, not the name of one."""
    return "{{" in text or "{%" in text


@dataclass(frozen=True)
class MessageForm:
    """The form of messages that a chat template takes."""

    has_system: bool = True
    """A system role; if not, its text begins the first user message."""
    repeats_roles: bool = True
    """Two user messages in a row; if not, they are joined."""
    thought_key: str | None = None
    """Key of a message under which a thought is read; `INLINE`: in the content. None: thoughts are not known."""
    json_arguments: bool = False
    """Arguments of calls are JSON text instead of a mapping."""
    null_content: bool = False
    """An answer of calls alone has no content instead of an empty one."""
    short_ids: bool = False
    """Ids of calls have nine characters."""
    has_many_calls: bool = True
    """An answer may have several calls."""
    has_calls: bool = False
    """Calls are written at all."""
    has_parts: bool = False
    """Contents are lists of parts, as models of pictures and text take them."""


class Renderer:
    """Renders messages with a tokenizer's chat template (without one: their contents, line by line).

    In messages, text that spells a special token, such as `<|end|>`, is broken by a space: the output of one agent
    becomes part of another's prompt and must not begin a turn there.
    """

    def __init__(self, tokenizer: Any, options: dict[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.options = options or {}
        self.special = {number: str(t) for number, t in tokenizer.added_tokens_decoder.items() if t.special}
        spelled = sorted((t for t in self.special.values() if len(t) > 1), key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, spelled)) or r"(?!)")  # of none: nowhere
        self.special_texts = {*self.special.values(), str(tokenizer.eos_token or "")} - {""}
        ends = "|".join(map(re.escape, sorted({*spelled, str(tokenizer.eos_token)}, key=len, reverse=True)))
        self._trailing_specials = re.compile(rf"(?:(?:{ends})\s*)+\Z")

    @property
    def has_template(self) -> bool:
        return bool(self.tokenizer.chat_template)

    @cached_property
    def form(self) -> MessageForm:
        """The form of messages that the template takes."""
        if not self.has_template:
            return MessageForm(thought_key=None)
        return find_form(self)

    @cached_property
    def shows_tools(self) -> bool:
        """True if a prompt depends on the tools; False if the chat template ignores them."""
        return self.has_template and RESULT_MARK in (self.attempt([ASKED], [probe_tool(RESULT_MARK)]) or "")

    @cached_property
    def probe_tools(self) -> list[Json]:
        """The tools of conversations that are rendered as probes; none if the template ignores tools."""
        return [probe_tool()] if self.shows_tools else []

    def render(self, messages: Sequence[Json], tools: Sequence[Json] = (), *, generate: bool = True) -> str:
        """Returns the text of a conversation; with `generate`, up to where the next answer begins. Raises ValueError if
        the template does not take it, or does not show its tools."""
        messages = [self.harmless(to_template_message(message)) for message in messages]
        if self.form.thought_key is not None:
            messages = [_with_thought_apart(message) for message in messages]
        if tools and not self.shows_tools:
            raise ValueError(
                f"this conversation offers {len(tools)} tools, and the chat template of the base does not show tools "
                "to the model: take a base whose template does (such as Qwen/Qwen3-0.6B), or describe them in messages"
            )
        if self.form.thought_key is None and any("reasoning_content" in message for message in messages):
            raise TemplateRefusal(
                "a message has a thought (reasoning_content), and the base shows none: it has no chat template that "
                "does. Leave thoughts out, or write them into the content"
            )
        most = max((len(message.get("tool_calls", ())) for message in messages), default=0)
        if most and not self.form.has_calls:
            raise TemplateRefusal("a message has calls of tools, and the base has no chat template that writes them")
        if not self.has_template:
            return "\n".join(str(message["content"]) for message in messages)
        if most > 1 and not self.form.has_many_calls:
            raise TemplateRefusal(f"the chat template of the base takes one call an answer, and this one has {most}")
        try:
            return self.apply(self.in_form(messages, self.form), self.harmless(list(tools)), generate=generate)
        except TEMPLATE_ERRORS as error:
            roles = ", ".join(message["role"] for message in messages)
            raise TemplateRefusal(f"the chat template of the base does not take messages of {roles}: {error}") from None

    def without_specials(self, text: str) -> str:
        """Returns a text without the special tokens at its end, and the white space after each of them."""
        return self._trailing_specials.sub("", text)

    def attempt(self, messages: Sequence[Json], tools: Sequence[Json] = (), *, generate: bool = True) -> str | None:
        """Returns what the template makes of messages in its own form; None if it refuses them."""
        try:
            return self.apply(list(messages), list(tools), generate=generate)
        except TEMPLATE_ERRORS:
            return None

    def apply(self, messages: list[Json], tools: list[Json], *, generate: bool) -> str:
        """Returns what the template makes of messages in its own form. Raises one of `TEMPLATE_ERRORS`."""
        options = self.options | ({"tools": tools} if tools else {})
        text: str = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generate, **options
        )
        return text

    def in_form(self, messages: Sequence[Json], form: MessageForm) -> list[Json]:
        """Returns the messages in the template's form."""
        numbers: dict[str, str] = {}
        found = [_in_form(message, form, numbers) for message in messages]
        if not form.has_system and found and found[0]["role"] == "system":
            found = _merged_system(found)
        if form.repeats_roles:
            return found
        return _merge_neighbours(found)

    def harmless(self, value: Any) -> Any:
        """Returns a message, or a part of one, with the special tokens in its texts broken by a space."""
        if isinstance(value, str):
            return self._special_pattern.sub(lambda found: f"{found[0][0]} {found[0][1:]}", value)
        if isinstance(value, list):
            return [self.harmless(each) for each in value]
        if isinstance(value, dict):
            return {key: self.harmless(each) for key, each in value.items()}
        return value


def _with_thought_apart(message: Json) -> Json:
    """Returns a message with the thought with which an assistant's content begins as its `reasoning_content`. One with
    another `reasoning_content` stays as it is."""
    content = message["content"]
    if message["role"] != "assistant" or not content.lstrip().startswith("<think>") or "</think>" not in content:
        return message
    thought, text = part_thought(content)
    if message.get("reasoning_content", thought).strip() != thought:
        return message
    return with_reasoning(message | {"content": text}, thought)


def _in_form(message: Json, form: MessageForm, numbers: dict[str, str]) -> Json:
    """Returns one message in the template's form; `numbers` are the short ids of calls so far."""
    formed = {key: value for key, value in message.items() if key not in ("reasoning_content", "tool_calls")}
    thought = message.get("reasoning_content")
    calls = message.get("tool_calls")
    if thought and form.thought_key == INLINE:
        formed["content"] = with_thought(formed["content"], thought)
    elif thought and form.thought_key:
        formed[form.thought_key] = thought
    if calls:
        formed["tool_calls"] = [_formed_call(call, form, numbers) for call in calls]
        formed["content"] = formed["content"] or (None if form.null_content else "")
    if form.has_parts and formed["content"] is not None:
        formed["content"] = [{"type": "text", "text": formed["content"]}]
    if "tool_call_id" in formed:
        formed["tool_call_id"] = _id(formed["tool_call_id"], form, numbers)
    return formed


def _formed_call(call: Json, form: MessageForm, numbers: dict[str, str]) -> Json:
    function = call["function"]
    arguments = function["arguments"]
    if form.json_arguments and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    formed = {"type": "function", "function": {**function, "arguments": arguments}}
    if call.get("id") is None:
        return formed
    return {"id": _id(call["id"], form, numbers), **formed}


def _id(given: str, form: MessageForm, numbers: dict[str, str]) -> str:
    if not form.short_ids:
        return given
    return numbers.setdefault(given, f"{len(numbers):09d}")


def _merged_system(messages: list[Json]) -> list[Json]:
    """Returns the messages with the leading system message as the beginning of the first user message."""
    system, *rest = messages
    if rest and rest[0]["role"] == "user":
        return [rest[0] | {"content": f"{system['content']}\n\n{rest[0]['content']}"}, *rest[1:]]
    return [{"role": "user", "content": system["content"]}, *rest]


def _merge_neighbours(messages: list[Json]) -> list[Json]:
    """Returns the messages with neighbours of the same role, user or system, joined."""
    joined: list[Json] = []
    for message in messages:
        if joined and message["role"] in ("user", "system") and joined[-1]["role"] == message["role"]:
            joined[-1] = joined[-1] | {"content": f"{joined[-1]['content']}\n\n{message['content']}"}
        else:
            joined.append(message)
    return joined


def find_form(renderer: Renderer) -> MessageForm:
    """Returns the form of messages that the renderer's template takes, by rendering probes."""
    parts = [{"type": "text", "text": TEXT_MARK}]
    marked = {"role": "user", "content": TEXT_MARK}
    has_parts = not _shows(renderer, [marked]) and _shows(renderer, [marked | {"content": parts}])
    form = MessageForm(has_parts=has_parts)
    form = replace(form, has_system=_shows(renderer, renderer.in_form([marked | {"role": "system"}, ASKED], form)))
    form = replace(form, repeats_roles=_shows(renderer, renderer.in_form([ASKED, marked], form)))
    form = next(_call_forms(renderer, form), form)
    return replace(form, thought_key=_thought_key(renderer, form))


def _shows(renderer: Renderer, messages: Sequence[Json], tools: Sequence[Json] = (), mark: str = TEXT_MARK) -> bool:
    return mark in (renderer.attempt(messages, tools, generate=messages[-1]["role"] != "assistant") or "")


def _call_forms(renderer: Renderer, form: MessageForm) -> Iterator[MessageForm]:
    """Yields forms in which the template writes calls, with all of a call's parts."""
    arguments = {FIRST_KEY: FIRST_VALUE, LAST_KEY: LAST_VALUE}
    for short, null, as_json in product((False, True), repeat=3):
        tried = replace(form, json_arguments=as_json, null_content=null, short_ids=short, has_calls=True)
        text = _with_calls(renderer, tried, arguments) or ""
        if all(part in text for part in (TOOL_NAME, *arguments, *arguments.values())):
            both = _with_calls(renderer, tried, arguments, {FIRST_KEY: "1", LAST_KEY: RESULT_MARK})
            yield replace(tried, has_many_calls=RESULT_MARK in (both or ""))


def _with_calls(renderer: Renderer, form: MessageForm, *arguments: Json) -> str | None:
    """Returns a conversation with calls, rendered without their results; None if it is refused with or without
    them."""
    message = probe_call(*arguments)
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "1"} for call in message["tool_calls"]]
    answered = renderer.attempt(renderer.in_form([ASKED, message, *results], form), [probe_tool()])
    return answered and renderer.attempt(renderer.in_form([ASKED, message], form), [probe_tool()], generate=False)


def _thought_key(renderer: Renderer, form: MessageForm) -> str | None:
    """Returns the key under which the template reads the thought of an answer; None if it shows none."""
    text = {"role": "assistant", "content": "1"}
    called = probe_call({FIRST_KEY: "1", LAST_KEY: "2"})
    for key in THOUGHT_KEYS:
        for message, tools in ((text, []), (called, [probe_tool()])):
            asked = renderer.in_form([ASKED, message], form)
            thinking = [*asked[:-1], asked[-1] | {key: THOUGHT_MARK}]
            if (message is text or form.has_calls) and _shows(renderer, thinking, tools, THOUGHT_MARK):
                return key
    if "</think>" in str(renderer.tokenizer.chat_template):
        return INLINE
    return None
