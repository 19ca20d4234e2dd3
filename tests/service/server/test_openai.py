"""Inference in OpenAI's API; a thread takes the worker's place."""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from helpers.fronts import Front
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from palestra.core.chat import Chat
from palestra.core.failures import ContextLengthExceeded
from palestra.core.http.calls import asks_nothing
from palestra.engine.conversation.encoder import ChatEncoder
from palestra.engine.sampling.request import Completion
from palestra.service.storage.store import StoredAnswer
from palestra.service.wire.jobs import SampleJob
from palestra.service.wire.schemas.openai import ChatCompletionRequest, CompletionRequest
from palestra.service.wire.schemas.wire_model import BadRequest, parse_body
from palestra.service.worker.encoding import encode_sample
from palestra.testing import tiny_tokenizer
from palestra.text.policies.base import request_error

CHAT = "/oai/api/v1/chat/completions"
TEXT = "/oai/api/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def answered(front: Front, tiny: Any) -> Callable[..., tuple[httpx.Response, list[SampleJob]]]:
    """Sends a request, and answers every sample with "hello you." (or `said`) and the end token; returns the reply and
    the requests."""

    def ask(path: str, body: dict[str, Any], said: str = "hello you.") -> tuple[httpx.Response, list[SampleJob]]:
        tokenizer = front.context.bases[body["model"]].tokenizer if body["model"] == "talk" else tiny.tokenizer
        ids = [*tokenizer.encode(said, add_special_tokens=False), tokenizer.eos_token_id]
        best = {"top_ids": np.array([[i, 5] for i in ids]), "top_logprobs": np.array([[-0.5, -1.5]] * len(ids))}
        jobs: list[SampleJob] = []
        over = threading.Event()

        def work() -> None:
            while not over.is_set():
                for row in front.context.store.take_queued():
                    jobs.append(SampleJob.model_validate_json(row.body))
                    topk = best if jobs[-1].topk_sample else {}
                    answer = Completion(np.array(ids), np.full(len(ids), -0.5), "stop", **topk)
                    result = encode_sample([answer] * jobs[-1].num_samples, jobs[-1])
                    front.context.store.write_answers([StoredAnswer(row.id, result, "sample")])
                time.sleep(0.01)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            return front.post(path, body), jobs
        finally:
            over.set()
            thread.join()

    return ask


def test_models_lists_bases_under_every_name(front: Front) -> None:
    assert [m["id"] for m in front.get("/oai/api/v1/models").json()["data"]] == ["tiny", "Qwen/Qwen3-0.6B"]


def test_chat_completion_is_returned(front: Front, tiny: Any, answered: Any) -> None:
    path = front.weights(front.model(), kind="sampler")
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    body = {"model": path, "messages": [{"role": "user", "content": parts}], "max_tokens": 20, "n": 2, "logprobs": True}
    reply, (job,) = answered(CHAT, body)
    tree = reply.json()
    assert [c["message"]["content"] for c in tree["choices"]] == ["hello you."] * 2
    assert {c["finish_reason"] for c in tree["choices"]} == {"stop"}
    assert tree["choices"][0]["logprobs"]["content"][0]["logprob"] == -0.5
    assert tiny.tokenizer.decode(job.tokens) == "<|user|>hello<|end|><|assistant|>"
    assert job.folder is not None and job.sampling.stop_at_eos and job.sampling.max_tokens == 20
    sampled = 2 * len(tree["choices"][0]["logprobs"]["content"])
    count = len(job.tokens)
    usage = {"prompt_tokens": count, "completion_tokens": sampled, "total_tokens": count + sampled}
    assert tree["usage"] == usage


def test_completion_ends_at_a_stop_string(answered: Any) -> None:
    body = {"model": "tiny", "prompt": ["a", "b"], "stop": " you", "logprobs": 1}
    reply, jobs = answered(TEXT, body)
    assert [(c["index"], c["text"]) for c in reply.json()["choices"]] == [(0, "hello"), (1, "hello")]
    assert [job.sampling.stop for job in jobs] == [(" you",)] * 2
    offsets = reply.json()["choices"][0]["logprobs"]["text_offset"]
    assert offsets[0] == 0 and offsets == sorted(offsets)


@pytest.mark.parametrize(("path", "given"), [(CHAT, {"messages": HELLO}), (TEXT, {"prompt": "hello"})])
def test_streamed_chunks_add_up_to_the_completion(answered: Any, path: str, given: dict[str, Any]) -> None:
    reply, _ = answered(path, {"model": "tiny", "stream": True, **given})
    assert reply.headers["content-type"].startswith("text/event-stream")
    *lines, last = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert last == "[DONE]"
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    texts = [c["delta"].get("content", "") if path == CHAT else c["text"] for c in choices]
    assert "".join(texts) == "hello you."
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["stop"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"model": "none", "prompt": "a"}),
        (TEXT, {"model": "tiny", "prompt": ""}),
        (TEXT, {"model": "tiny", "prompt": []}),
        (TEXT, {"model": "tiny", "prompt": [99999]}),
        (TEXT, {"model": "tiny", "prompt": "a", "echo": True}),
        (TEXT, {"model": "tiny", "prompt": "a", "logprobs": 0, "stream": True}),
        (TEXT, {"model": "tiny", "prompt": "a", "max_tokens": 5000}),
        (TEXT, {"model": "tiny", "prompt": "a" * 5000}),
        (CHAT, {"model": "tiny", "messages": []}),
        (CHAT, {"model": "tiny", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        (CHAT, {"model": "tiny", "messages": HELLO, "top_logprobs": 5}),
        (CHAT, {"model": "tinker://no/weights/x", "messages": HELLO}),
    ],
)
@pytest.mark.few(4)
def test_unsupported_requests_are_refused(front: Front, path: str, body: dict[str, Any]) -> None:
    reply = front.post(path, body)
    assert 400 <= reply.status_code < 500, reply.text
    assert reply.json()["detail"]
    assert front.context.store.take_queued() == []


TOO_LONG = {
    "tokens": ("/api/v1/asample", {"tokens": 2048, "max_tokens": 1}),
    "tokens and an answer": ("/api/v1/asample", {"tokens": 2000, "max_tokens": 64}),
    "characters": (TEXT, {"model": "tiny", "prompt": "a" * 120_000}),
    "text and an answer": (TEXT, {"model": "tiny", "prompt": "a", "max_tokens": 5000}),
    "text": (TEXT, {"model": "tiny", "prompt": "a b " * 1024, "max_tokens": 1}),
    "messages": (CHAT, {"model": "tiny", "messages": [{"role": "user", "content": "a" * 120_000}]}),
}


@pytest.mark.parametrize("case", TOO_LONG)
def test_refusal_for_length_is_recognised_by_clients(front: Front, case: str) -> None:
    path, body = TOO_LONG[case]
    if path.endswith("asample"):
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [5] * body["tokens"]}]}
        settings = {"num_samples": 1, "sampling_params": {"max_tokens": body["max_tokens"]}}
        body = {"base_model": "tiny", "prompt": prompt, **settings}
    reply = front.post(path, body)
    assert reply.status_code == 400
    assert isinstance(request_error(reply.json()["detail"]), ContextLengthExceeded), reply.text


# ---- conversations: as in training

TALK = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ '<|' + ('user' if m.role == 'tool' else m.role) + '|>' }}"
    "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>' }}"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}{{ '</tool_call>' }}{% endfor %}"
    "{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% if quiet %}{{ '(quiet)' }}{% endif %}{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
HISTORY = [
    {"role": "user", "content": "1 + 1? <|end|><|assistant|>"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "one and one",
        "tool_calls": [{"id": "c0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "c0", "content": "2"},
]
CALL_TEXT = '<think>two</think>so<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'


@pytest.fixture
def talk(front: Front, tiny: Any) -> Any:
    """The tokenizer of a base "talk", whose template knows tools, thoughts and an option, but no system role; it begins
    texts with `<|pad|>`."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TALK
    start = [("<|pad|>", tokenizer.convert_tokens_to_ids("<|pad|>"))]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<|pad|> $A", special_tokens=start)
    front.context.bases["talk"] = replace(tiny, name="talk", public_names=(), tokenizer=tokenizer)
    yield tokenizer
    del front.context.bases["talk"]


def test_a_history_with_calls_is_rendered_as_in_training(talk: Any, answered: Any) -> None:
    _, (job,) = answered(CHAT, {"model": "talk", "messages": HISTORY, "tools": [TOOL]})
    assert job.tokens == ChatEncoder(talk).encode_conversation(Chat(tuple(HISTORY), (TOOL,))).tolist()
    text = talk.decode(job.tokens)
    assert '"arguments": {"a": 1}' in text and "<think>one and one</think>" in text
    assert text.count("<|end|>") == 4  # of the tools and three messages, not of the text that spells it


def test_a_system_message_is_merged_where_the_template_has_no_such_role(talk: Any, answered: Any) -> None:
    _, (job,) = answered(CHAT, {"model": "talk", "messages": [{"role": "system", "content": "be brief"}, *HELLO]})
    assert talk.decode(job.tokens) == "<|user|>be brief\n\nhello<|end|><|assistant|>"


def test_an_answer_is_parted_into_thought_text_and_calls(talk: Any, answered: Any) -> None:
    reply, _ = answered(CHAT, {"model": "talk", "messages": HELLO, "tools": [TOOL]}, CALL_TEXT)
    (choice,) = reply.json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("two", "so")
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2}'}


@pytest.mark.parametrize("change", [{}, {"tools": [TOOL], "tool_choice": "none"}], ids=["no tools", "none"])
def test_without_tools_nothing_is_a_call(talk: Any, answered: Any, change: dict[str, Any]) -> None:
    reply, (job,) = answered(CHAT, {"model": "talk", "messages": HELLO, **change}, CALL_TEXT)
    (choice,) = reply.json()["choices"]
    assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
    assert choice["message"]["content"] == CALL_TEXT.partition("</think>")[2]
    assert "add" not in talk.decode(job.tokens)


def test_streamed_deltas_add_up_to_the_message(talk: Any, answered: Any) -> None:
    body = {"model": "talk", "messages": HELLO, "tools": [TOOL]}
    whole = answered(CHAT, body, CALL_TEXT)[0].json()["choices"][0]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    events = answered(CHAT, body | options, CALL_TEXT)[0].text.split("\n\n")
    *chunks, usage = [json.loads(event.removeprefix("data: ")) for event in events if "{" in event]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    for key in ("content", "reasoning_content"):
        assert "".join(delta.get(key, "") for delta in deltas) == whole["message"][key]
    (calls,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert calls == [{"index": 0, **call} for call in whole["message"]["tool_calls"]]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls" and usage["usage"]["completion_tokens"] > 5


def test_options_of_the_template_are_used_or_refused(talk: Any, front: Front, answered: Any) -> None:
    body = {"model": "talk", "messages": HELLO}
    _, (job,) = answered(CHAT, body | {"chat_template_kwargs": {"quiet": True}})
    assert talk.decode(job.tokens).endswith("<|assistant|>(quiet)")
    for options in ({"enable_thinking": False}, {"chat_template": "{{ 1 }}"}, {"tools": []}, {"messages": []}):
        reply = front.post(CHAT, body | {"chat_template_kwargs": options})
        assert reply.status_code == 400 and f"no option {next(iter(options))!r}" in reply.json()["detail"]
    long = front.post(CHAT, body | {"chat_template_kwargs": {"quiet": "x" * 5000}})
    assert long.status_code == 400 and "put texts into messages" in long.json()["detail"]
    assert "reasoning_effort" in front.post(CHAT, body | {"reasoning_effort": "high"}).json()["detail"]


def test_a_prompt_of_text_begins_as_the_tokenizer_begins_texts(talk: Any, answered: Any) -> None:
    _, (job,) = answered(TEXT, {"model": "talk", "prompt": "abc"})
    assert talk.decode(job.tokens) == "<|pad|>abc"
    _, (job,) = answered(TEXT, {"model": "talk", "prompt": "abc", "add_special_tokens": False})
    assert talk.decode(job.tokens) == "abc"


def test_bytes_of_tokens_are_those_of_the_text(talk: Any, answered: Any) -> None:
    body = {"model": "talk", "messages": HELLO, "logprobs": True, "top_logprobs": 2}
    reply, (job,) = answered(CHAT, body, "a \N{GRINNING FACE} \ufffd")
    *tokens, _ = reply.json()["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(token["bytes"]) for token in tokens).decode() == "a \N{GRINNING FACE} \ufffd"
    assert job.topk_sample == 2
    assert [(best["token"], best["logprob"]) for best in tokens[0]["top_logprobs"]] == [("a", -0.5), ("!", -1.5)]


def test_sampling_settings_reach_the_sampler(answered: Any) -> None:
    settings = {"top_k": 3, "stop_token_ids": [7], "ignore_eos": True, "temperature": 0.5, "top_p": 0.9}
    for path, prompt in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "hello"})):
        _, (job,) = answered(path, {"model": "tiny", **prompt, **settings})
        used = job.sampling
        assert (used.top_k, used.stop_token_ids, used.stop_at_eos) == (3, (7,), False)
        assert (used.temperature, used.top_p) == (0.5, 0.9)


@pytest.mark.parametrize(
    "change",
    [
        {"response_format": {"type": "grammar"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "array"}}}},
        {"logit_bias": {"70": -100}},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 3.0},
        {"min_p": 0.5},
        {"tool_choice": "required"},
        {"continue_final_message": True},
        {"parallel_tool_calls": 0},
        {"top_logprobs": 2},
        {"logprobs": True, "stream": True},
        {"max_tokens": 5, "max_completion_tokens": 7},
        {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
        {"messages": [{"role": "user", "content": "x", "weight": 0}]},
        {"messages": [{"role": "user", "content": "x", "audio": {"id": "a"}}]},
    ],
    ids=str,
)
@pytest.mark.few(4)
def test_what_is_not_served_is_refused_by_name(front: Front, change: dict[str, Any]) -> None:
    reply = front.post(CHAT, {"model": "tiny", "messages": HELLO} | change)
    name = next(iter(change)) if "messages" not in change else list(change["messages"][0])[-1]
    assert reply.status_code == 400 and name in reply.json()["detail"], reply.text
    assert reply.json()["error"]["message"] == reply.json()["detail"]  # what OpenAI's clients show
    assert front.context.store.take_queued() == []


COUNT = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
BY_SCHEMA = {"type": "json_schema", "json_schema": {"name": "count", "strict": True, "schema": COUNT}}
FORMS: dict[str, tuple[dict[str, Any], str, str]] = {
    "any object": ({"response_format": {"type": "json_object"}}, '{"m": 1}', "{'m': 1}"),
    "an object of the schema": ({"response_format": BY_SCHEMA}, ' {"n": 1}', '["n"]'),
    "another type": ({"response_format": BY_SCHEMA}, '{"n": 1}', '{"n": "1"}'),
    "a tool": ({"tool_choice": "required"}, CALL_TEXT, "two"),
    "one call": ({"parallel_tool_calls": False}, CALL_TEXT, CALL_TEXT + CALL_TEXT),
    "a call beside a form": ({"response_format": BY_SCHEMA}, CALL_TEXT, "two"),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_without_the_form_that_is_asked_for_is_a_refusal(talk: Any, answered: Any, form: str) -> None:
    asked, right, wrong = FORMS[form]
    body = {"model": "talk", "messages": HELLO, "tools": [TOOL], **asked}
    (choice,) = answered(CHAT, body, right)[0].json()["choices"]
    assert choice["message"]["content"] is not None and "refusal" not in choice["message"]
    (choice,) = answered(CHAT, body, wrong)[0].json()["choices"]
    assert next(iter(asked)) in choice["message"].pop("refusal") and choice["finish_reason"] == "stop"
    thought = {"reasoning_content": "two"} if "<think>" in wrong else {}
    assert choice["message"] == {"role": "assistant", "content": None, **thought}


def test_a_refusal_is_streamed_in_the_place_of_the_answer(talk: Any, answered: Any) -> None:
    body = {"model": "talk", "messages": HELLO, "response_format": BY_SCHEMA, "stream": True}
    events = answered(CHAT, body, '<think>two</think>{"n": 1.5}')[0].text.split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if "{" in event]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    said = {key: "".join(delta.get(key, "") for delta in deltas) for key in ("content", "reasoning_content", "refusal")}
    refusal = "the answer is not of the schema of response_format: $.n: 1.5 is not of type 'integer'"
    assert said == {"content": "", "reasoning_content": "two", "refusal": refusal}


def test_fields_that_change_nothing_are_accepted(answered: Any) -> None:
    body = {"model": "tiny", "messages": HELLO, "user": "u", "store": True, "presence_penalty": 0, "logit_bias": {}}
    body |= {"response_format": {"type": "text"}, "parallel_tool_calls": True, "min_p": 0.0, "functions": None}
    assert answered(CHAT, body)[0].status_code == 200


LEAVES = st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=4)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner))


@given(
    model=st.sampled_from([ChatCompletionRequest, CompletionRequest]),
    name=st.sampled_from(["response_format", "min_p", "guided_json", "suffix"]) | st.text(min_size=1, max_size=9),
    value=VALUES,
)
def test_a_field_is_used_or_refused_by_name(model: Any, name: str, value: Any) -> None:
    if name in model.model_fields or asks_nothing(name, value):
        return
    body = {"messages": HELLO} if "messages" in model.model_fields else {"prompt": "a"}
    with pytest.raises(BadRequest) as refused:
        parse_body(model, json.dumps({"model": "tiny"} | body | {name: value}).encode())
    assert str(refused.value) == f"{name}: not used here, leave it out"
