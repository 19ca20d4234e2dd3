"""The chat client: retries, timeouts, and no key in error messages."""

import asyncio
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from palestra.core.http import chat_client
from palestra.core.http.chat_client import Endpoint, EndpointError, complete
from palestra.text.policies.base import Query
from palestra.text.policies.endpoint import EndpointConfig, EndpointPolicy

KEY = "sk-very-secret"
FINE = {"choices": [{"message": {"role": "assistant", "content": "fine"}}]}


class Script(ThreadingHTTPServer):
    """Sends its replies in order, the last one forever: (status, body, headers), or seconds of silence."""

    daemon_threads = True

    def __init__(self, *replies):
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies, self.heard = list(replies), []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1/"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.heard.append((self.path, body, self.headers.get("Authorization")))
        replies = self.server.replies
        reply = replies.pop(0) if len(replies) > 1 else replies[0]
        if isinstance(reply, float):
            time.sleep(reply)
            reply = (200, FINE)
        status, body, *headers = reply
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

    def log_message(self, *_):
        pass


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("TEST_KEY", KEY)


def ask(server, **options):
    endpoint = Endpoint(url=server.url, model="m", key_env="TEST_KEY", backoff=0.01, **options)
    return asyncio.run(complete(endpoint, [{"role": "user", "content": "?"}], seed=3))


def test_request_has_the_expected_body():
    with Script((200, FINE)) as server:
        assert ask(server)["content"] == "fine"
    ((path, body, key),) = server.heard
    assert path == "/v1/chat/completions" and key == f"Bearer {KEY}"
    assert body == {"model": "m", "messages": [{"role": "user", "content": "?"}], "seed": 3}


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_transient_errors_are_retried(status):
    with Script((status, {}), (status, {}), (200, FINE)) as server:
        assert ask(server)["content"] == "fine" and len(server.heard) == 3


def test_retry_after_is_respected():
    with Script((429, {}, ("Retry-After", "0.4")), (200, FINE)) as server:
        start = time.monotonic()
        ask(server)
        assert time.monotonic() - start >= 0.4


@pytest.mark.parametrize("status", [400, 401, 404])
def test_refusals_are_not_retried(status):
    with (
        Script((status, {"error": KEY})) as server,
        pytest.raises(EndpointError, match=f"answered HTTP {status}") as error,
    ):
        ask(server)
    assert len(server.heard) == 1 and KEY not in str(error.value)


def test_gives_up_after_the_maximum_attempts():
    with (
        Script((500, {"error": KEY})) as server,
        pytest.raises(EndpointError, match=r"failed 3 times.*HTTP 500") as error,
    ):
        ask(server, retries=2)
    assert len(server.heard) == 3 and KEY not in repr(error.value)


def test_gives_up_at_the_timeout():
    with Script(5.0) as server, pytest.raises(EndpointError, match=r"within limit: 0\.3 seconds"):
        start = time.monotonic()
        ask(server, limit=0.3)
    assert time.monotonic() - start < 3


def test_endless_response_is_given_up(monkeypatch):
    monkeypatch.setattr(chat_client, "MAX_ANSWER_BYTES", 2**20)
    with Script((200, {"choices": "x" * 2**21})) as server, pytest.raises(EndpointError, match="more than 1,048,576"):
        ask(server)
    assert len(server.heard) == 1


def test_unreachable_endpoint_is_reported():
    with Script((200, FINE)) as server:
        pass
    with pytest.raises(EndpointError, match=r"failed 2 times \(last: ConnectError"):
        ask(server, retries=1)


def said(finish_reason="stop", **message):
    return {
        "choices": [{"message": {"role": "assistant", "content": "fine", **message}, "finish_reason": finish_reason}]
    }


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"choices": []},
        {"choices": [{"message": "hi"}]},
        [],
        "no",
        b"[" * 100_000,
        said("content_filter"),
        said("error"),
        said(refusal="I cannot"),
        said(content={"a": 1}, tool_calls=[{"type": "function", "function": {"name": "f", "arguments": "{}"}}]),
        said() | {"error": {"message": "the provider failed", "code": 502}},
        {"choices": [said()["choices"][0] | {"error": {"code": 502}}]},
        *(said(tool_calls=calls) for calls in ("rubbish", 7, {"a": 1}, ["a"], [{"id": "1"}], [{"function": "f"}])),
        said(tool_calls=[{"type": "function", "function": {"arguments": "{}"}}]),
    ],
)
def test_invalid_completion_is_reported(body):
    with Script((200, body)) as server, pytest.raises(EndpointError, match="without a completion"):
        ask(server, retries=0)


@pytest.mark.parametrize(
    ("status", "body", "header"),
    [
        *((400, b"zz\xff", ("Content-Type", f"text/plain; charset={name}")) for name in ("hex", "idna", "undefined")),
        (429, {}, ("Retry-After", "\u00b2")),
        (429, {}, ("Retry-After", "soon")),
        (400, b"[" * 100_000, ("X", "y")),
    ],
)
def test_headers_and_bodies_that_cannot_be_read_are_reported(status, body, header):
    with Script((status, body, header)) as server, pytest.raises(EndpointError, match=f"HTTP {status}"):
        ask(server, retries=0)


def test_missing_key_is_refused_before_any_request(monkeypatch):
    monkeypatch.delenv("TEST_KEY")
    with Script((200, FINE)) as server, pytest.raises(ValueError, match="set the environment variable TEST_KEY"):
        ask(server)
    assert server.heard == []


def test_policy_requests_siblings_concurrently():
    with Script((200, FINE)) as server:
        policy = EndpointPolicy("far", EndpointConfig(url=server.url, model="m", system="be brief", max_tokens=5))
        answers = asyncio.run(policy.act(Query("ignored", "2 + 2?", n=3, seed=11)))
    assert [answer.text for answer in answers] == ["fine"] * 3 and answers[0].policy == "far"
    bodies = sorted((body for _, body, _ in server.heard), key=lambda body: body["seed"])
    assert [body["seed"] for body in bodies] == [11, 12, 13]
    assert bodies[0]["max_tokens"] == 5 and server.heard[0][2] is None
    assert bodies[0]["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2 + 2?"}]
