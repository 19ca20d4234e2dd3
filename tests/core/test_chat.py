"""Conversations and tool calls: answers are parsed, and messages of a program are recognised."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.core.chat import (
    Chat,
    ToolCall,
    messages_after,
    parse_assistant_message,
    parse_tool_call,
    render_message,
    render_tool_call,
    same_message,
    to_template_message,
    tool_calls_of,
    with_system,
)

ASK = {"role": "user", "content": "2 + 3?"}
ADD = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'


def test_tool_call_parses_to_openai_format():
    message = parse_assistant_message(f"let me see {ADD}")
    assert message["content"] == "let me see"
    (call,) = message["tool_calls"]
    assert call["type"] == "function" and call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"]) == {"a": 2, "b": 3}
    assert tool_calls_of(message) == [ToolCall("add", {"a": 2, "b": 3})]


def test_tool_calls_have_the_letters_of_any_language():
    """As in chat templates; only a lone surrogate, which has no UTF-8, is escaped."""
    arguments = {"city": "München", "odd": "\ud800"}
    rendered = render_tool_call("find", arguments)
    assert '"München"' in rendered and '"\\ud800"' in rendered and rendered.encode()
    assert tool_calls_of(parse_assistant_message(rendered)) == [ToolCall("find", arguments)]


@pytest.mark.parametrize("text", ["plain", "<tool_call>", "<tool_call>{</tool_call>", "<tool_call>[1]</tool_call>"])
def test_text_that_is_not_a_tool_call_stays_text(text):
    assert parse_assistant_message(text) == {"role": "assistant", "content": text}


def test_tool_call_without_closing_tag_is_parsed():
    """If sampling stops at the closing tag, the tag is missing."""
    assert tool_calls_of(parse_assistant_message(ADD.removesuffix("</tool_call>"))) == [
        ToolCall("add", {"a": 2, "b": 3})
    ]


@pytest.mark.parametrize("text", ['{"arguments": {}}', '{"name": 3}', '{"name": "x", "arguments": 3}', "[" * 10_000])
def test_invalid_tool_calls_parse_to_none(text):
    assert parse_tool_call(text) is None


NAMES = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1)
VALUES = st.dictionaries(NAMES, st.one_of(st.integers(), st.text(), st.booleans(), st.none(), st.lists(st.integers())))


@given(st.lists(st.tuples(NAMES, VALUES), max_size=3))
def test_render_and_parse_are_inverse(calls):
    message = parse_assistant_message("\n".join(render_tool_call(*call) for call in calls))
    assert tool_calls_of(message) == [ToolCall(*call) for call in calls]
    assert same_message(parse_assistant_message(render_message(message)), message)


def test_equivalent_messages_compare_equal():
    ours = parse_assistant_message(ADD)
    theirs = ours | {"content": None, "refusal": None, "tool_calls": [{**ours["tool_calls"][0], "id": "call_abc"}]}
    assert same_message(ours, theirs)
    assert not same_message(ours, parse_assistant_message(ADD.replace("3", "4")))
    assert not same_message(ASK, {"role": "system", "content": "2 + 3?"})
    assert same_message(ASK, {"role": "user", "content": [{"type": "text", "text": "2 + 3?"}]})


def test_conversation_continues_from_an_answer():
    first, result = Chat((ASK,)), {"role": "tool", "tool_call_id": "call_0", "content": "5"}
    later = Chat((ASK, parse_assistant_message(ADD), result))
    assert messages_after(later, first, ADD) == (result,)
    assert messages_after(later, first, "5") is None
    assert messages_after(Chat((ASK, parse_assistant_message(ADD))), first, ADD) is None
    assert messages_after(Chat(later.messages, ({"type": "function"},)), first, ADD) is None
    assert messages_after(Chat(({"role": "user", "content": "?"}, *later.messages[1:])), first, ADD) is None


def test_templates_read_arguments_as_mappings():
    shown = to_template_message(parse_assistant_message(ADD) | {"content": None, "refusal": None})
    assert shown["content"] == "" and "refusal" not in shown
    assert shown["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2, "b": 3}}


def test_with_system_replaces_the_first_system_message():
    old, new = {"role": "system", "content": "be kind"}, {"role": "system", "content": "be short"}
    assert with_system((ASK,), "be short") == with_system((old, ASK), "be short") == [new, ASK]
    assert with_system((old, ASK, old), "be short") == [new, ASK, old]


def test_chat_converts_to_text():
    assert str(Chat((ASK, {"role": "assistant", "content": "5"}))) == "user: 2 + 3?\nassistant: 5"
