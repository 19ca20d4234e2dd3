"""Inference in OpenAI's API; a thread takes the worker's place."""

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
from helpers.fronts import Front

from palestra.core.failures import ContextLengthExceeded
from palestra.service.storage.store import StoredAnswer
from palestra.service.wire import codec
from palestra.service.wire.jobs import SampleJob
from palestra.text.policies.base import request_error

CHAT = "/oai/api/v1/chat/completions"
TEXT = "/oai/api/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def answered(front: Front, tiny: Any) -> Callable[..., tuple[httpx.Response, list[SampleJob]]]:
    """Sends a request, and answers every sample with "hello you." and the end token; returns the reply and the
    requests."""
    ids = [*tiny.tokenizer.encode("hello you.", add_special_tokens=False), tiny.tokenizer.eos_token_id]
    answer = codec.SampledSequence(np.array(ids), np.full(len(ids), -0.5), "stop")

    def ask(path: str, body: dict[str, Any]) -> tuple[httpx.Response, list[SampleJob]]:
        jobs: list[SampleJob] = []
        over = threading.Event()

        def work() -> None:
            while not over.is_set():
                for row in front.context.store.take_queued():
                    jobs.append(SampleJob.model_validate_json(row.body))
                    result = codec.encode_sample([answer] * jobs[-1].num_samples)
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
        (TEXT, {"model": "tiny", "prompt": "a", "max_tokens": 5000}),
        (TEXT, {"model": "tiny", "prompt": "a" * 5000}),
        (CHAT, {"model": "tiny", "messages": []}),
        (CHAT, {"model": "tiny", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        (CHAT, {"model": "tiny", "messages": HELLO, "top_logprobs": 5}),
        (CHAT, {"model": "tinker://no/weights/x", "messages": HELLO}),
    ],
)
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
