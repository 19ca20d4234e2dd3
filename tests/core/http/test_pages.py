"""Pages in a real browser can neither read from nor write to a server on this machine."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest
from helpers.browsers import launched

from palestra.core.http.calls import ANY_KEY, ChatCall
from palestra.core.http.chat_server import ChatSession
from palestra.core.http.completions import ChatServer

HELLO = '{"model": "a", "messages": [{"role": "user", "content": "hello"}]}'
SEND = """
async ([url, body]) => {
  const simple = {method: "POST", mode: "no-cors", headers: {"Content-Type": "text/plain"}, body};
  await fetch(url + "/chat/completions", simple);
  navigator.sendBeacon(url + "/chat/completions", body);
  try { return await (await fetch(url + "/models")).text() } catch (error) { return "" }
}
"""

pytestmark = pytest.mark.slow


class Blank(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>a page</title>")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def elsewhere() -> Iterator[int]:
    """The port of another server, whose pages have another origin."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Blank) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_web_page_can_neither_send_nor_read(elsewhere: int) -> None:
    server, asked = ChatServer(), list[ChatCall]()

    def deliver(call: ChatCall) -> None:
        asked.append(call)
        call.answer.set_result("fine")

    ChatSession(["a"], deliver, server=server, key=ANY_KEY)
    port = urlsplit(server.url).port
    with launched("--host-resolver-rules=MAP evil.example 127.0.0.1") as browser:
        page = browser.new_page()
        for site in (f"http://127.0.0.1:{elsewhere}/", f"http://evil.example:{elsewhere}/"):
            page.goto(site)
            assert page.evaluate(SEND, [server.url, HELLO]) == ""
        rebound = page.goto(f"http://evil.example:{port}/v1/models")  # its name now resolves to this machine
        assert rebound.status == 403
        said = page.evaluate(SEND, [f"http://evil.example:{port}/v1", HELLO])
        assert "not called" in said or "may not call" in said
        assert page.goto(f"{server.url}/models").status == 200  # typed by the user
    server.close()
    assert asked == []
