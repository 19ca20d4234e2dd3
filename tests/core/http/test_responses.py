"""The Responses API, with OpenAI's own client: what is sent is the conversation, and what is said comes back."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from palestra.core.chat import render_tool_call
from palestra.core.http.answer_form import AnswerForm
from palestra.core.http.calls import ChatCall, ChatReply, parse_call
from palestra.core.http.chat_server import ChatSession
from palestra.core.http.responses import to_chat_body

TOOL: Any = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": True}
TWO_CALLS = render_tool_call("add", {"a": 1}) + render_tool_call("add", {"a": 2})


class Endpoint:
    """A session whose calls get the next of `replies`; `asked` has the calls."""

    def __init__(self) -> None:
        self.asked: list[ChatCall] = []
        self.replies: list[ChatReply] = []
        self.session = ChatSession(["a"], self.deliver)
        self.client = openai.OpenAI(base_url=self.session.url, api_key=self.session.key, max_retries=0)

    def deliver(self, asked: ChatCall) -> None:
        self.asked.append(asked)
        asked.answer.set_result(self.replies.pop(0))

    def create(self, reply: str | ChatReply, given: Any = "hello", **options: Any) -> Any:
        self.replies.append(ChatReply(reply, token_counts=(7, 3)) if isinstance(reply, str) else reply)
        return self.client.responses.create(model="a", input=given, **options)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    opened = Endpoint()
    yield opened
    opened.session.close()
    opened.client.close()


def test_text_is_answered(endpoint: Endpoint) -> None:
    response = endpoint.create("hi", instructions="be short", max_output_tokens=9, store=False, metadata={"x": "y"})
    assert (response.output_text, response.status, response.model) == ("hi", "completed", "a")
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (7, 3, 10)
    (asked,) = endpoint.asked
    assert asked.sampling == {"max_completion_tokens": 9}
    assert asked.chat.messages == ({"role": "system", "content": "be short"}, {"role": "user", "content": "hello"})


def test_calls_and_their_results_are_one_turn_each(endpoint: Endpoint) -> None:
    """As in chat completions: an answer with a text and two calls is one message when it is sent back."""
    first = endpoint.create(f"well\n{TWO_CALLS}", tools=[TOOL])
    assert [item.type for item in first.output] == ["message", "function_call", "function_call"]
    calls = [item for item in first.output if item.type == "function_call"]
    assert [(call.call_id, json.loads(call.arguments)) for call in calls] == [
        ("call_0", {"a": 1}),
        ("call_1", {"a": 2}),
    ]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in calls]
    history = [{"role": "user", "content": "hello"}, *(item.model_dump() for item in first.output), *results]
    second = endpoint.create(TWO_CALLS, history, tools=[TOOL])
    assert [item.call_id for item in second.output] == ["call_2", "call_3"]
    messages = endpoint.asked[1].chat.messages
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    assert messages[1]["content"] == "well" and [call["id"] for call in messages[1]["tool_calls"]] == [
        "call_0",
        "call_1",
    ]
    assert endpoint.asked[1].chat.tools[0] == {
        "type": "function",
        "function": {k: TOOL[k] for k in TOOL if k != "type"},
    }


def test_a_thought_comes_back_with_its_answer(endpoint: Endpoint) -> None:
    first = endpoint.create(ChatReply("4", thought="2 and 2"))
    assert first.output_text == "4" and first.output[0].content[0].text == "2 and 2"
    items = [{"role": "user", "content": "2 + 2"}, *(item.model_dump() for item in first.output)]
    endpoint.create("fine", [*items, {"role": "user", "content": [{"type": "input_text", "text": "sure?"}]}])
    answer = {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}
    assert endpoint.asked[1].chat.messages[1:] == (answer, {"role": "user", "content": "sure?"})


class Verdict(BaseModel):
    people: int


def test_an_answer_in_a_schema_is_parsed_and_another_is_warned_of(endpoint: Endpoint) -> None:
    endpoint.replies = [ChatReply('{"people": 3}'), ChatReply('{"persons": 3}')]
    asked: Any = {"model": "a", "input": "how many?", "text_format": Verdict}
    parsed = endpoint.client.responses.parse(**asked)
    assert parsed.output_parsed == Verdict(people=3) and not (parsed.model_extra or {}).get("warning")
    with pytest.raises(ValueError, match="people"):
        endpoint.client.responses.parse(**asked)
    assert endpoint.asked[1].form.schema == Verdict.model_json_schema() | {"additionalProperties": False}
    body = endpoint.create("hm", tools=[TOOL], tool_choice={"type": "function", "name": "add"})
    assert body.model_extra["warning"] == "the answer calls no tool, and tool_choice asks for a call"


@pytest.mark.parametrize("api", ["responses", "chat"])
def test_a_long_check_of_a_form_holds_up_no_other_call(
    endpoint: Endpoint, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, over = Event(), Event()

    def check(form: AnswerForm, message: Any) -> str:
        begun.set()
        return "" if over.wait(10) else "never over"

    def ask() -> Any:
        if api == "responses":
            return endpoint.create("hi")
        endpoint.replies.append(ChatReply("hi"))
        return endpoint.client.chat.completions.create(model="a", messages=[{"role": "user", "content": "hello"}])

    monkeypatch.setattr(AnswerForm, "check", check)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(ask)
        assert begun.wait(10)
        assert endpoint.client.models.list(timeout=5).data[0].id == "a"
        over.set()
        assert "warning" not in (waiting.result().model_extra or {})


@pytest.mark.parametrize("said", ["hello to you", f"well\n{TWO_CALLS}"])
def test_a_stream_ends_with_the_same_response(endpoint: Endpoint, said: str) -> None:
    """The client builds the response from the events, too."""
    whole = endpoint.create(said, tools=[TOOL])
    endpoint.replies = [ChatReply(said, token_counts=(7, 3))]
    with endpoint.client.responses.stream(model="a", input="hello", tools=[TOOL]) as stream:
        events = list(stream)
        last = stream.get_final_response()
    assert endpoint.asked[1].stream and last.usage == whole.usage
    assert [event.sequence_number for event in events] == list(range(len(events)))

    def contents(response: Any) -> list[tuple[str, ...]]:
        return [
            (item.type, item.arguments if item.type == "function_call" else item.content[0].text)
            for item in response.output
        ]

    assert contents(last) == contents(whole)
    assert (
        last.output_text
        == whole.output_text
        == "".join(e.delta for e in events if e.type == "response.output_text.delta")
    )


def test_an_answer_that_was_cut_is_incomplete(endpoint: Endpoint) -> None:
    cut = ChatReply("hel", hit_length_limit=True)
    response = endpoint.create(cut)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    *_, last = endpoint.create(cut, stream=True)
    assert last.type == "response.incomplete"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"previous_response_id": "resp_1"}, "'previous_response_id' is not used here: no response is stored"),
        ({"conversation": "c"}, "'conversation' is not used here"),
        ({"messages": [{"role": "user", "content": "x"}]}, "'messages' is of /v1/chat/completions"),
        ({"reasoning": {"effort": "low"}}, "'reasoning' is not used here"),
        ({"include": ["reasoning.encrypted_content"]}, "'include' is not used here"),
        ({"truncation": "auto"}, "'truncation' is not used here"),
        ({"background": True}, "'background' is not used here"),
        ({"text": {"verbosity": "low"}}, "text: 'verbosity' is not used here"),
        ({"text": {"format": {"type": "grammar"}}}, "'response_format' is "),
        ({"tools": [{"type": "web_search"}]}, "'web_search' is not offered here"),
        ({"tool_choice": {"type": "function", "name": "gone"}}, "send auto, none, required or a function of tools"),
        ({"input": []}, "input must be a text or a list"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0: type 'item_reference' is not used here"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0: only texts are used here"),
        ({"input": [{"role": "user", "content": "x", "weight": 2}]}, "input.0: 'weight' is not used here"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x", "y": 1}]}, "input.0: 'y' is not"),
        ({"input": ["x"]}, "input.0: type 'x' is not used here"),
    ],
)
def test_what_is_not_done_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_call(to_chat_body({"model": "a", "input": "hello", **fields}), ["a"])
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_fields_that_change_nothing_pass() -> None:
    given = {"include": [], "truncation": "disabled", "background": False, "reasoning": None, "store": True}
    call = parse_call(
        to_chat_body({"model": "a", "input": "hello", "text": {"format": {"type": "text"}}, **given}), ["a"]
    )
    assert call.chat.messages == ({"role": "user", "content": "hello"},)


def test_another_path_is_refused_with_those_that_there_are(endpoint: Endpoint) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no /v1/embeddings here: POST to /v1/chat/completions or"):
        endpoint.client.embeddings.create(model="a", input="hello")
