"""Bodies as large or as nested as allowed: refused at once, or read while other clients are still answered."""

import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from helpers.fronts import Front
from helpers.processes import serving
from helpers.raw import Reply, answer, connected, head

from palestra.core.http import limits
from palestra.core.http.listen import open_listener
from palestra.core.http.server import HttpServer, run_in_thread
from palestra.service.server import app
from palestra.service.wire.schemas import requests
from palestra.service.wire.schemas.wire_model import (
    MAX_JSON_BYTES,
    MAX_JSON_CONTAINERS,
    BadRequest,
    WireModel,
    parse_body,
)

DATUM = {"model_input": {"chunks": [{"tokens": [1]}]}, "loss_fn_inputs": {}}
HOSTILE = {
    "long text": {"model": "tiny", "prompt": ["ab " * 600_000] * 8},
    "long chat": {"model": "tiny", "messages": [{"role": "user", "content": "ab " * 1_300_000}]},
    "numbers": {"model": "tiny", "prompt": [1] * 5_000_000},
    "lists": {"model": "tiny", "prompt": [[1]] * 3_000_000},
    "texts": {"model": "tiny", "prompt": ["a"] * 3_000_000},
    "junk": {"model": "tiny", "prompt": "a", "junk": [[]] * 4_000_000},
}


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (
            requests.SampleRequest,
            {"prompt": {"chunks": [{"tokens": [1] * (MAX_JSON_BYTES // 3)}]}, "base_model": "tiny"},
        ),
        (requests.SampleRequest, {"prompt": {"chunks": [{"tokens": [1] * 3_000_000}]}, "base_model": "tiny"}),
        (requests.CreateSessionRequest, {"user_metadata": {"deep": [[]] * MAX_JSON_CONTAINERS}}),
        (requests.ForwardRequest, {"model_id": "m", "forward_input": {"loss_fn": "ppo", "data": [DATUM] * 20_000}}),
    ],
)
def test_expensive_json_is_refused_before_parsing(model: type[WireModel], body: dict[str, Any]) -> None:
    packed = json.dumps(body).encode()
    with pytest.raises(BadRequest, match="send several requests") as caught:
        parse_body(model, packed)
    assert caught.value.status == 413


def test_one_of_many_invalid_chunks_is_named() -> None:
    body = json.dumps({"prompt": {"chunks": [{}] * 60_000}, "base_model": "tiny"}).encode()
    with pytest.raises(BadRequest, match=r"prompt\.chunks\.0: .*has no tokens") as caught:
        parse_body(requests.SampleRequest, body)
    assert "more" not in str(caught.value)


@pytest.mark.parametrize(
    "body", [{"prompt": "ab " * 60_000}, {"messages": [{"role": "user", "content": "x" * 180_000}]}]
)
def test_text_over_the_context_is_refused_before_tokenisation(front: Front, body: dict[str, Any]) -> None:
    path = "/oai/api/v1/chat/completions" if "messages" in body else "/oai/api/v1/completions"
    reply = front.post(path, {"model": "tiny", **body})
    assert reply.status_code == 400 and "characters" in reply.json()["detail"]


@pytest.fixture
def impatient(front: Front, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a front end that waits 0.5 s for a body, and 1 s more for each 1,000 bytes of it."""
    monkeypatch.setattr(app, "HTTP_LIMITS", replace(app.HTTP_LIMITS, body_timeout_s=0.5))
    monkeypatch.setattr(limits, "MIN_BODY_BYTES_PER_S", 1000)
    listener = open_listener("127.0.0.1", 0)
    server = HttpServer(app.create_app(front.context), drain=1, keep_alive=5)
    thread = threading.Thread(target=run_in_thread, args=(server, listener))
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.stop()
    thread.join()


def drip(url: str, path: str, pieces: list[bytes], **headers: str) -> Reply:
    """The reply to a body sent in pieces, 0.1 s apart."""
    fields = {"X-API-Key": "tml-any", "Content_Length": str(sum(map(len, pieces)))} | headers
    with connected(url) as wire:
        wire.sendall(head(url, "POST", path, **fields))
        for piece in pieces:
            time.sleep(0.1)
            if select.select([wire], [], [], 0)[0]:
                break
            wire.sendall(piece)
        return answer(wire)


@pytest.mark.parametrize("path", ["/api/v1/create_session", "/oai/api/v1/completions", "/api/v1/checkpoints/upload"])
def test_slow_bodies_are_refused_and_the_connection_closed(impatient: str, path: str) -> None:
    kind = "multipart/form-data; boundary=b" if "upload" in path else "application/json"
    first = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    begin = time.monotonic()
    reply = drip(impatient, path, [first, *[b"x"] * 200], Content_Type=kind)
    assert reply.status == 408 and "too slowly" in reply.json()["detail"] and "connection: close" in reply.head
    assert time.monotonic() - begin < 10


def test_steady_slow_bodies_are_read(impatient: str) -> None:
    pieces = [b" " * 300] * 10 + [b'{"tags": [], "sdk_version": "0.15.0"}']
    reply = drip(impatient, "/api/v1/create_session", pieces, Content_Type="application/json")
    assert reply.status == 200 and "session_id" in reply.json()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("data")) as address:
        yield address


@pytest.mark.slow
def test_oversized_content_length_is_refused_before_the_body(url: str) -> None:
    where = httpx.URL(url)
    with socket.create_connection((where.host, where.port), timeout=60) as door:
        door.sendall(
            b"POST /api/v1/create_session HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000000000000\r\n\r\n"
        )
        assert b" 413 " in door.recv(4096)


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_body_does_not_block_other_clients(url: str, name: str) -> None:
    path = "chat/completions" if "messages" in HOSTILE[name] else "completions"
    body, replies = json.dumps(HOSTILE[name]).encode(), []

    def attack() -> None:
        replies.append(httpx.post(f"{url}/oai/api/v1/{path}", content=body, timeout=120))

    attacker = threading.Thread(target=attack)
    attacker.start()
    worst = 0.0
    while attacker.is_alive():
        start = time.monotonic()
        assert httpx.get(f"{url}/api/v1/healthz", timeout=60).status_code == 200
        worst = max(worst, time.monotonic() - start)
    assert replies[0].status_code in (400, 413), replies[0].text[:300]
    assert worst < 5.0, f"another request waited {worst:.1f} s"
