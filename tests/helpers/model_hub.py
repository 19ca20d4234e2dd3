"""A hub of models at this machine, which speaks as much of the Hugging Face Hub's API as its client's uploads need."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

TOKEN = "hf_" + "a" * 34


class ModelHub(ThreadingHTTPServer):
    """Keeps what was uploaded: the `files` of each model, and which models are `private`. Refuses other tokens."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.address = f"http://127.0.0.1:{self.server_port}"


class _Requests(BaseHTTPRequestHandler):
    server: ModelHub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        path = self.path.partition("?")[0].removeprefix("/api/")
        if not self._is_known():
            return None
        if path == "repos/create":
            return self._create(json.loads(body))
        if path == "validate-yaml":
            return self._answer(200, {"warnings": [], "errors": []})
        repo, _, verb = path.removeprefix("models/").rpartition("/main")[0].rpartition("/")
        if verb == "preupload":
            asked = json.loads(body)["files"]
            modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in asked]
            return self._answer(200, {"files": modes})
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.server.files[repo][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return self._answer(200, {"commitUrl": f"{self.server.address}/{repo}/commit/1", "commitOid": "1"})

    def do_GET(self) -> None:
        if self._is_known():
            self._answer(200, {"id": "model", "sha": "0" * 40, "siblings": []})

    def log_message(self, *_: Any) -> None:
        """Says nothing."""

    def _is_known(self) -> bool:
        """True if the request has the token; else it is refused."""
        if self.headers["Authorization"] == f"Bearer {TOKEN}":
            return True
        self._answer(401, {"error": "Invalid credentials in Authorization header"})
        return False

    def _create(self, asked: dict[str, Any]) -> None:
        repo = f"{asked.get('organization') or 'me'}/{asked['name']}"
        self.server.files.setdefault(repo, {})
        if asked.get("private") or asked.get("visibility") == "private":
            self.server.private.add(repo)
        self._answer(200, {"url": f"{self.server.address}/{repo}"})

    def _answer(self, status: int, tree: Any) -> None:
        body = json.dumps(tree).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def model_hub() -> Iterator[ModelHub]:
    """Context with a hub that serves."""
    with ModelHub() as hub:
        thread = Thread(target=hub.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
