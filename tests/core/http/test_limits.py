"""Requests that HTTP servers refuse before a route runs, on a real server's sockets."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from helpers.raw import answer, ask, connected, endless, head, many

from palestra.core.http import server as bounds
from palestra.core.http.bodies import MAX_DEPTH, read_json
from palestra.core.http.calls import ChatCall
from palestra.core.http.chat_server import ChatSession
from palestra.core.http.completions import HTTP_LIMITS, ChatServer

COMPLETE = "/v1/chat/completions"
HELLO = json.dumps({"model": "a", "messages": [{"role": "user", "content": "hello"}]}).encode()
Serve = Callable[..., tuple[str, str]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers whose model answers "fine"; returns an address and its key."""
    servers = []

    def start(deliver: Callable[[ChatCall], None] = lambda asked: asked.answer.set_result("fine"), **limits) -> tuple:
        server = ChatServer(limits=replace(HTTP_LIMITS, **limits))
        servers.append(server)
        session = ChatSession(["a"], deliver, server=server)
        return server.url, f"Bearer {session.key}"

    yield start
    for server in servers:
        server.close()


def post(at: tuple[str, str], body: bytes = HELLO, **headers: str):
    url, key = at
    return ask(url, "POST", COMPLETE, body, **{"Authorization": key} | headers)


def test_non_browser_client_is_answered(serve: Serve) -> None:
    reply = post(serve())
    assert reply.status == 200 and reply.json()["choices"][0]["message"]["content"] == "fine"


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:3000"},  # a page of another program on this machine
        {"Origin": "http://evil.example", "Host": "evil.example"},  # DNS rebinding
        {"Host": "evil.example"},
        {"Host": ""},
        {"Sec_Fetch_Site": "cross-site"},  # an image or script in a page: no Origin
    ],
)
def test_browser_origin_is_refused_even_with_the_key(serve: Serve, headers: dict[str, str]) -> None:
    at = serve()
    assert post(at, Content_Type="text/plain", **headers).status == 403
    assert ask(at[0], "GET", "/v1/models", **{"Authorization": at[1]} | headers).status == 403


def test_key_is_checked_before_the_body_is_read(serve: Serve) -> None:
    url, _ = serve()
    with connected(url) as wire:
        wire.sendall(head(url, "POST", COMPLETE, Content_Length="1000", Authorization="Bearer wrong"))
        assert answer(wire).status == 401


def test_oversized_content_length_is_refused_unread(serve: Serve) -> None:
    url, key = serve()
    with connected(url) as wire:
        wire.sendall(head(url, "POST", COMPLETE, Content_Length=str(HTTP_LIMITS.max_body_bytes + 1), Authorization=key))
        reply = answer(wire)
    assert reply.status == 413 and "connection: close" in reply.head


def test_oversized_chunked_body_is_refused(serve: Serve) -> None:
    url, key = serve(max_body_bytes=2**20)
    reply, _ = endless(url, COMPLETE, 2, Authorization=key)
    assert reply.status == 413


def test_total_size_of_buffered_bodies_is_limited(serve: Serve) -> None:
    url, key = serve(max_buffered_bytes=2**20)
    large = {"Content_Length": str(2**20), "Authorization": key}
    with many(url, 3, head(url, "POST", COMPLETE, **large) + b" " * 2**19) as wires:
        assert answer(wires[-1]).status == 429
        for wire in wires[:2]:
            wire.close()
    deadline = time.monotonic() + 5
    while post((url, key)).status != 200:
        assert time.monotonic() < deadline


def test_slow_body_times_out(serve: Serve) -> None:
    url, key = serve(body_timeout_s=0.2)
    with connected(url) as wire:
        wire.sendall(head(url, "POST", COMPLETE, Content_Length="1000", Authorization=key) + b"{")
        assert answer(wire).status == 408


def test_concurrent_requests_are_limited_and_released(serve: Serve) -> None:
    asked: list[ChatCall] = []
    url, key = serve(asked.append, max_requests=4)
    with many(url, 4, head(url, "POST", COMPLETE, HELLO, Authorization=key) + HELLO):
        while len(asked) < 4:
            time.sleep(0.01)
        reply = post((url, key))
        assert reply.status == 429 and "retry-after: 1" in reply.head
    deadline = time.monotonic() + 5  # closed connections make room
    while not all(call.answer.cancelled() for call in asked[:4]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert ask(url, "GET", "/v1/models", Authorization=key).status == 200


def test_connections_are_limited(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MAX_CONNECTIONS", 8)
    url, key = serve()
    with many(url, 8), connected(url) as one_more:
        reply = answer(one_more)
        assert reply.status == 429 and "retry-after: 1" in reply.head
    deadline = time.monotonic() + 5
    while post((url, key)).status != 200:
        assert time.monotonic() < deadline


def test_headers_are_limited_in_size_and_time(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "HEADER_TIMEOUT_S", 0.3)
    url, key = serve()
    with connected(url) as wire:
        wire.sendall(b"GET /v1/models HTTP/1.1\r\nX: ")
        for _ in range(20):
            try:
                wire.sendall(b"x" * bounds.MAX_HEADER_BYTES)
            except ConnectionError:
                break
        assert answer(wire).status in (431, 0)  # 0: the refusal was lost while the request was still being sent
    with many(url, 3, b"GET /v1/models HTTP/1.1\r\nX: ") as slow:
        assert [answer(wire).status for wire in slow] == [0, 0, 0]
    with connected(url) as wire:  # and those of a later request
        wire.sendall(head(url, "GET", "/v1/models", Connection="keep-alive", Authorization=key))
        assert answer(wire).status == 200
        wire.sendall(b"GET /v1/mod")
        assert answer(wire).status == 0


# ---- bodies


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": [{"role": 5, "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": 5}]}, "tool_calls"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [5]}]}, "tool_calls.0"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "content"),
        ({"tools": 5}, "tools"),
        ({"tools": ["x"]}, "tools.0"),
        ({"model": ["a"]}, "there is no model"),
        ({"messages": {"role": "user"}}, "messages must be a list"),
    ],
)
def test_wrong_types_get_400(serve: Serve, change: dict, message: str) -> None:
    reply = post(serve(), json.dumps(json.loads(HELLO) | change).encode())
    assert reply.status == 400 and message in reply.json()["error"]["message"]


ODD = [
    b"",
    b"{",
    b"\xff\xfe{\x00}\x00",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1),
    b'{"x": NaN}',
    b'{"x": 1e999}',
    b'{"x": -Infinity}',
    b'{"x": "\\ud800"}',
    b'{"\\udfff": 1}',
    b'{"x": 1, "x": 2}',
    b'[{"x": {"y": 1, "y": 1}}]',
    b'{"x": ' + b"9" * 10_000 + b"}",
]


@pytest.mark.parametrize("body", ODD, ids=range(len(ODD)))
def test_invalid_json_is_refused(serve: Serve, body: bytes) -> None:
    with pytest.raises(ValueError):
        read_json(body)
    assert post(serve(), body).status == 400


def test_valid_json_is_parsed() -> None:
    value = {"a": [1, 2.5, None, True, "ü\n\U0001f600"], "b": {"c": -(2**70)}}
    assert read_json(json.dumps(value).encode()) == value
    assert read_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH) is not None


@pytest.mark.parametrize(
    "path", ["/", "/v1/../v1/models/", "/v1/%00", "/%2e%2e/%2e%2e/etc/passwd", "/v1/models%ff", "//x"]
)
def test_unknown_paths_and_methods_are_refused(serve: Serve, path: str) -> None:
    url, key = serve()
    for method in ("GET", "POST", "DELETE", "OPTIONS"):
        assert ask(url, method, path, Authorization=key).status in (404, 405)
