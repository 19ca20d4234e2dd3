"""Requests for chat completions: every field is used, changes nothing, or is refused by its name."""

import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.core.chat import MESSAGE_KEYS, Chat, render_tool_call, to_template_message
from palestra.core.http.answer_form import AnswerForm
from palestra.core.http.calls import (
    BOOKKEEPING,
    CALL_KEYS,
    DEFAULTS,
    SAMPLING_KEYS,
    assistant_message,
    parse_call,
    parse_conversation,
)

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
CALL = {"id": "c0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
NOTHING: tuple[Any, ...] = (None, [], {}, "")

NAMES = st.sampled_from(["response_format", "min_p", "guided_json", "temprature", "user"]) | st.text(
    min_size=1, max_size=12
)
LEAVES = st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=4)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2)
)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "a", "messages": HELLO, **fields}


@given(name=NAMES, value=VALUES)
def test_a_field_of_a_request_is_used_or_refused_by_name(name: str, value: Any) -> None:
    if name in CALL_KEYS or name in BOOKKEEPING or value in NOTHING or value == DEFAULTS.get(name, ...):
        return
    with pytest.raises(ValueError) as refused:
        parse_call(body(**{name: value}), ["a"])
    assert repr(name) in str(refused.value) and "\n" not in str(refused.value)


@given(name=NAMES, value=VALUES, place=st.sampled_from(["message", "part", "call", "function"]))
def test_a_field_of_a_message_is_used_or_refused_by_name(name: str, value: Any, place: str) -> None:
    known = {"type", "text", "cache_control", "id", "index", "function", "name", "arguments", *MESSAGE_KEYS}
    if name in known or value in NOTHING:
        return
    message: dict[str, Any] = {"role": "assistant", "content": [{"type": "text", "text": "x"}], "tool_calls": [CALL]}
    message = json.loads(json.dumps(message))
    places = {"message": message, "part": message["content"][0], "call": message["tool_calls"][0]}
    places["function"] = places["call"]["function"]
    places[place][name] = value
    with pytest.raises(ValueError) as refused:
        parse_conversation([*HELLO, message])
    assert repr(name) in str(refused.value) and "messages.1" in str(refused.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "grammar"}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"required": [1]}}}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {}, "grammar": "x"}}),
        ("response_format", {"type": "json_object", "schema": {}}),
        ("response_format", "json"),
        ("logit_bias", {"70": -100}),
        ("presence_penalty", 1.5),
        ("frequency_penalty", 2.0),
        ("repetition_penalty", 3.0),
        ("min_p", 0.5),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "add"}}),
        ("tool_choice", "any"),
        ("parallel_tool_calls", 0),
        ("continue_final_message", True),
        ("add_generation_prompt", False),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("logprobs", True),
        ("functions", [{"name": "add"}]),
        ("stream_options", {"include_more": True}),
        ("stream", "false"),
        ("max_completion_tokens", 7),
    ],
)
def test_what_is_not_done_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        parse_call(body(**{"max_tokens": 5, field: value}), ["a"])


def test_schema_without_its_package_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    monkeypatch.delitem(sys.modules, "palestra.core.http.json_schema", raising=False)
    with pytest.raises(ValueError, match=r"needs jsonschema: pip install 'palestra\[workflow\]'"):
        parse_call(body(response_format=SCHEMA), ["a"])


def test_fields_that_change_nothing_pass() -> None:
    clients = dict.fromkeys(BOOKKEEPING, "x") | DEFAULTS | {"logit_bias": {}, "functions": None, "n": 1}
    assert parse_call(body(**clients, tool_choice="auto"), ["a"]).chat.messages == tuple(HELLO)


def test_used_fields_arrive() -> None:
    settings: dict[str, Any] = dict.fromkeys(SAMPLING_KEYS, 1)
    call = parse_call(body(**settings, stream=True, stream_options={"include_usage": True}, tools=[TOOL]), ["a"])
    assert call.sampling == settings and call.stream and call.stream_usage and call.chat.tools == (TOOL,)


def test_no_tool_is_offered_and_no_call_is_read_with_tool_choice_none() -> None:
    call = parse_call(body(tools=[TOOL], tool_choice="none"), ["a"])
    assert call.chat.tools == ()
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert assistant_message(text, "", call.chat)["content"] == text
    assert "tool_calls" in assistant_message(text, "", Chat(tuple(HELLO), (TOOL,)))


ADD, OTHER = render_tool_call("add", {}), render_tool_call("other", {})
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object", "required": ["people"]}}}


@pytest.mark.parametrize(
    ("asked", "answer", "broken"),
    [
        ({"response_format": {"type": "json_object"}}, "{}", ""),
        ({"response_format": {"type": "json_object"}}, "[1]", "no JSON object"),
        ({"response_format": {"type": "json_object"}}, ADD, ""),
        ({"response_format": SCHEMA}, '{"people": 3}', ""),
        ({"response_format": SCHEMA}, '{"persons": 3}', "$: 'people' is a required property"),
        ({"response_format": {"type": "json_object"}}, '{"people": NaN}', "no JSON object"),
        ({"response_format": SCHEMA}, "three", "no JSON object"),
        ({"tool_choice": "required"}, OTHER, ""),
        ({"tool_choice": "required"}, "three", "calls no tool"),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, ADD, ""),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, OTHER, "calls 'other'"),
        ({"parallel_tool_calls": False}, ADD, ""),
        ({"parallel_tool_calls": False}, ADD + ADD, "has 2 calls"),
        ({}, ADD + ADD, ""),
    ],
)
def test_an_answer_is_checked_against_the_form_that_is_asked_for(asked: Any, answer: str, broken: str) -> None:
    call = parse_call(body(tools=[TOOL], **asked), ["a"])
    assert call.chat.tools == (TOOL,)
    found = call.form.check(assistant_message(answer, "", call.chat))
    assert broken in found and bool(broken) == bool(found)
    assert (call.form == AnswerForm()) == (not asked)


def test_calls_are_numbered_through_a_conversation() -> None:
    """The Agents SDK drops a call whose id it has seen."""
    turn = {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}
    later = assistant_message(ADD + OTHER, "", Chat((*HELLO, turn), (TOOL,)))
    assert [call["id"] for call in later["tool_calls"]] == ["call_2", "call_3"]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "not of role 'user'"),
        ({"role": "user", "content": "x", "reasoning_content": "hm"}, "not of role 'user'"),
        ({"role": "assistant", "content": "x", "refusal": "no"}, "'refusal'"),
        ({"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "f"}}]}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [CALL | {"type": "custom"}]}, "type 'custom' is not used here"),
        ({"role": "user"}, r"messages\.1: the message has no content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "the message has no content"),
    ],
)
def test_parts_of_messages_that_no_template_shows_are_refused(message: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_conversation([*HELLO, message])


def test_an_answer_passes_as_clients_send_it_back() -> None:
    empty = {"refusal": None, "annotations": [], "audio": None, "function_call": None}
    answer = {"role": "assistant", "content": None, "tool_calls": [CALL | {"index": 0}], **empty}
    result = {"role": "tool", "tool_call_id": "c0", "content": "2"}
    assert len(parse_conversation([*HELLO, answer, result]).messages) == 3


def test_tools_of_a_provider_are_refused() -> None:
    with pytest.raises(ValueError, match="'web_search' is not offered here"):
        parse_conversation(HELLO, [{"type": "web_search"}])
    for nameless in ({}, {"type": "function"}, {"type": "function", "function": {"parameters": {}}}):
        with pytest.raises(ValueError, match=r"tools\.0: the tool has no name"):
            parse_conversation(HELLO, [nameless])


def test_arguments_with_a_key_twice_stay_as_they_were_written() -> None:
    for text, expected in (
        ('{"a": 1, "a": 2}', '{"a": 1, "a": 2}'),
        ('{"a": 1, "b": {"a": 2}}', {"a": 1, "b": {"a": 2}}),
    ):
        call = CALL | {"function": {"name": "add", "arguments": text}}
        (shown,) = to_template_message({"role": "assistant", "tool_calls": [call]})["tool_calls"]
        assert shown["function"]["arguments"] == expected
