"""What a sampler server answers that is no answer: it is refused by its name, or asked for again, never trained on."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from palestra.core.http.retry import RetryPolicy
from palestra.engine.sampling.request import Completion, Request
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.text.samplers import vllm
from palestra.text.samplers.adapter_store import AdapterStore
from palestra.text.samplers.vllm import RequestTimeouts, SamplerServer, VllmSampler

MODELS = {"data": [{"id": "tiny", "object": "model", "owned_by": "vllm", "root": "tiny", "parent": None}]}
REQUEST = Request(np.array([5, 6], np.int32), 2, SamplingConfig(max_tokens=3))
CHOICE = {"token_ids": [7, 8], "logprobs": {"token_logprobs": [-0.5, 0]}, "finish_reason": "stop", "stop_reason": None}


def completions(**changes: Any) -> dict[str, Any]:
    """Returns a usable reply whose second choice has `changes`."""
    return {"id": "x", "choices": [{**CHOICE, "index": 0}, {**CHOICE, "index": 1, **changes}], "usage": {}}


def logprobs(*values: Any) -> dict[str, Any]:
    return completions(logprobs={"token_logprobs": list(values), "tokens": ["a", "b"]})


class Front(ThreadingHTTPServer):
    """A server that lists `models` and answers requests with `replies` in turn, the last one for ever."""

    models: Any = MODELS
    replies: list[Any]


class Handler(BaseHTTPRequestHandler):
    server: Front

    def do_GET(self) -> None:
        self._answer(self.server.models)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        replies = self.server.replies
        self._answer(replies.pop(0) if len(replies) > 1 else replies[0])

    def _answer(self, reply: Any) -> None:
        body = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def front() -> Iterator[Front]:
    with Front(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def connect(front: Front, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], VllmSampler]]:
    monkeypatch.setattr(vllm, "PAUSES", RetryPolicy(0.01, 0.02))
    made = VllmSampler(
        [SamplerServer(f"http://127.0.0.1:{front.server_port}")], AdapterStore(None, "tiny"), RequestTimeouts(5.0, 0.3)
    )

    def connected() -> VllmSampler:
        made.connect()
        made.vocabulary = 512
        return made

    yield connected
    made.close()


def ask(sampler: VllmSampler) -> list[Completion]:
    return asyncio.run(sampler.sample(REQUEST))


def test_a_usable_reply_is_read_whatever_else_it_holds(front: Front, connect: Callable[[], VllmSampler]) -> None:
    front.replies = [completions(finish_reason="length")]
    first, second = ask(connect())
    assert first.token_ids.tolist() == [7, 8] and first.logprobs.tolist() == [-0.5, 0.0]
    assert (first.stop_reason, second.stop_reason) == ("stop", "length")


@pytest.mark.parametrize(
    ("reply", "fault"),
    [
        (logprobs(-1), "1 log-probabilities of 2 tokens"),
        (logprobs(-1, -2, -3), "3 log-probabilities of 2 tokens"),
        (logprobs(-1, None), r"choices.1.logprobs.token_logprobs.1: Input should be a valid number"),
        (logprobs(-1, "-2"), "Input should be a valid number"),
        (logprobs(-1, float("nan")), "Input should be a finite number"),
        (logprobs(-1, float("-inf")), "Input should be a finite number"),
        (logprobs(-1, 5.0), "less than or equal to 0.001"),
        (completions(logprobs=None), r"choices.1.logprobs: Input should be"),
        (completions(token_ids=None), r"choices.1.token_ids: Input should be a valid list"),
        (completions(token_ids=[]), "at least 1 item"),
        (completions(token_ids=[7, 512]), "token 512 of a base with 512 tokens"),
        (completions(token_ids=[7, -1]), "greater than or equal to 0"),
        (completions(token_ids=[7, 2**40]), "less than 2147483648"),
        (completions(token_ids=[7.0, 8.7]), "valid integer"),
        (completions(token_ids=[True, True]), "valid integer"),
        (completions(token_ids=[7] * 4, logprobs={"token_logprobs": [-1] * 4}), "4 tokens where max_tokens is 3"),
        (completions(finish_reason=None), "choices.1.finish_reason: Input should be 'stop', 'length' or 'abort'"),
        (completions(finish_reason="content_filter"), "Input should be 'stop', 'length' or 'abort'"),
        (completions(index=0), "2 choices for 2 answers, or two of one index"),
        ({"choices": completions()["choices"][:1]}, "1 choices for 2 answers"),
        ({"object": "error"}, "choices: Field required"),
    ],
)
def test_an_unusable_reply_is_refused(front: Front, connect: Callable[[], VllmSampler], reply: Any, fault: str) -> None:
    front.replies = [reply]
    with pytest.raises(ValueError, match=rf"sampler at http://127.0.0.1:\d+ cannot be used: .*{fault}"):
        ask(connect())


@pytest.mark.parametrize(
    "passing", [b"<html>busy", b'{"choices": [', b"", b"\xff\xfe", b"[" * 100_000, completions(finish_reason="abort")]
)
def test_what_may_pass_is_asked_for_again(front: Front, connect: Callable[[], VllmSampler], passing: Any) -> None:
    sampler = connect()
    front.replies = [passing, completions()]
    assert len(ask(sampler)) == 2
    front.replies = [passing]
    with pytest.raises(ValueError, match=r"no sampler answered for 0 seconds: the sampler at http://127.0.0.1:\d+ a"):
        ask(sampler)


@pytest.mark.parametrize("models", [{"data": []}, {"data": [None]}, {"data": [{}]}, b"<html>", b"[1", {"models": []}])
def test_a_server_that_lists_no_models_is_refused(
    front: Front, connect: Callable[[], VllmSampler], models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "CONNECT_TIMEOUT_S", 0.1)
    front.models = models
    with pytest.raises(ValueError, match=r"sampler at http://127.0.0.1:\d+ (cannot be used: |answered '.*no JSON)"):
        connect()
