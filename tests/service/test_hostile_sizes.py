"""Bodies that are as large or as tangled as may be: refused at once, or read while others are still answered."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fronts import Front
from processes import serving

from palestra.service.api.schemas import requests
from palestra.service.api.schemas.wire_model import (
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
