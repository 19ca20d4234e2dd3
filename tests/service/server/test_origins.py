"""Pages of other origins in a browser are refused; programs, which send no Origin, are not."""

import pytest
from helpers.fronts import Front
from starlette.datastructures import Headers

from palestra.core.http.origin_middleware import OriginPolicy
from palestra.service.server.app import create_app
from palestra.service.server.state import ServiceContext

HERE = "127.0.0.1:8000"
CHAT = "https://chat.example.org"


@pytest.mark.parametrize(
    ("host", "allowed", "headers", "refused"),
    [
        ("127.0.0.1", (), {"host": HERE}, False),  # a program
        ("127.0.0.1", (), {"host": "localhost:8000"}, False),
        ("127.0.0.1", (), {"host": "[::1]:8000"}, False),
        ("127.0.0.1", (), {"host": HERE, "origin": f"http://{HERE}"}, False),  # a page of its own
        ("127.0.0.1", (), {"host": HERE, "origin": "https://evil.example"}, True),
        ("127.0.0.1", (), {"host": HERE, "origin": "http://127.0.0.1:3000"}, True),  # another program's page
        ("127.0.0.1", (), {"host": HERE, "origin": "null"}, True),  # a file, a sandboxed frame
        ("127.0.0.1", (), {"host": "evil.example:8000", "origin": "http://evil.example:8000"}, True),  # DNS rebinding
        ("127.0.0.1", (), {"host": "evil.example:8000"}, True),  # the same with GET, which has no Origin
        ("127.0.0.1", (), {"host": "[::1"}, True),
        ("127.0.0.1", (CHAT,), {"host": HERE, "origin": CHAT}, False),
        ("127.0.0.1", (CHAT,), {"host": HERE, "origin": "http://chat.example.org"}, True),
        ("127.0.0.1", (CHAT,), {"host": "chat.example.org", "origin": CHAT}, False),  # behind a proxy
        ("127.0.0.2", (), {"host": "evil.example:8000"}, True),
        ("0.0.0.0", (), {"host": "box:8000"}, False),
        ("0.0.0.0", (), {"host": "box:8000", "origin": "http://box:8000"}, False),
        ("0.0.0.0", (), {"host": "box:8000", "origin": "https://evil.example"}, True),
    ],
)
def test_origin_policy_allows_and_rejects_headers(
    host: str, allowed: tuple[str, ...], headers: dict[str, str], refused: bool
) -> None:
    assert (OriginPolicy.for_host(host, allowed).rejection_reason(Headers(headers)) is not None) == refused


@pytest.mark.parametrize("origin", ["*", "chat.example.org", "https://chat.example.org/", "file://x", "https://"])
def test_invalid_origins_are_refused_with_the_fix(origin: str) -> None:
    with pytest.raises(ValueError, match=r"is not an origin of a web page: write https://chat\.example\.org"):
        OriginPolicy.for_host("127.0.0.1", (origin,))


def test_foreign_origins_are_rejected(front: Front) -> None:
    body = {"session_id": "mine", "model_seq_id": 0, "base_model": "tiny"}
    reply = front.post("/create_model", body, headers={"Origin": "https://evil.example"})
    assert reply.status_code == 403
    assert reply.json()["detail"].endswith("`palestra serve` has --allow-origin for them")
    assert front.context.store.queue_depth() == (0, 0)
    assert front.post("/create_model", body).status_code == 200


def test_allowed_origins_get_cors_headers(context: ServiceContext) -> None:
    front = Front(context)
    front.app = create_app(context, origins=OriginPolicy.for_host("0.0.0.0", (CHAT,)))
    asks = {"Origin": CHAT, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-api-key"}
    before = front.ask("OPTIONS", "/oai/api/v1/completions", headers=asks)
    assert before.status_code == 200 and before.headers["access-control-allow-origin"] == CHAT
    reply = front.get("/healthz", headers={"Origin": CHAT})
    assert reply.status_code == 200 and reply.headers["access-control-allow-origin"] == CHAT
    assert front.ask("OPTIONS", "/oai/api/v1/completions", headers=asks | {"Origin": f"{CHAT}:444"}).status_code == 403
