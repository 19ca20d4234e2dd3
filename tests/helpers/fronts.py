"""A service front end without an engine's worker: tests read the requests for the worker, and answer them."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from palestra.service.server.app import create_app
from palestra.service.server.state import ServiceContext
from palestra.service.storage.store import StoredAnswer
from palestra.service.storage.tables import checkpoints, requests, upsert_row
from palestra.service.storage.weight_store import TinkerPath


class Front:
    """A front end that is called in process, with the API key `key`."""

    def __init__(self, context: ServiceContext, root_path: str = "") -> None:
        self.context, self.app = context, create_app(context, root_path=root_path)
        self.keys: dict[str, str] = {}

    def ask(self, method: str, path: str, body: Any = None, *, of: str = "", **given: Any) -> httpx.Response:
        """The reply to a request; `body` is sent as JSON, or unchanged if it is bytes. `of` is the owner."""
        headers = {"X-API-Key": self.keys.get(of, "tml-any")} | given.pop("headers", {})
        if isinstance(body, bytes):
            given["content"] = body
        elif body is not None:
            given["content"] = json.dumps(body).encode()
        path = path if path.startswith(("/oai/", "/train/", "/api/", "/openapi", "http")) else f"/api/v1{path}"
        return asyncio.run(_send(self.app, method, path, headers, given))

    def post(self, path: str, body: Any = None, **given: Any) -> httpx.Response:
        return self.ask("POST", path, body, **given)

    def get(self, path: str, **given: Any) -> httpx.Response:
        return self.ask("GET", path, **given)

    def take(self) -> Any:
        """The only request that waits for the worker."""
        (row,) = self.context.store.take_queued()
        return row

    def row(self, request_id: str) -> Any:
        (row,) = self.context.store.find(requests, requests.c.id == request_id)
        return row

    def answer(self, row: Any, **values: Any) -> None:
        self.context.store.write_answers([StoredAnswer.json(row.id, **values)])

    def model(self, session: str = "mine", number: int = 0, of: str = "", **lora: Any) -> str:
        """The id of a new model, whose creation is answered."""
        body = {"session_id": session, "model_seq_id": number, "base_model": "tiny", "lora_config": {"rank": 4, **lora}}
        reply = self.post("/create_model", body, of=of)
        assert reply.status_code == 200, reply.text
        self.answer(self.take(), model_id=reply.json()["model_id"], type="create_model")
        return str(reply.json()["model_id"])

    def weights(self, model: str, name: str = "one", kind: str = "training", of: str = "anyone") -> str:
        """The path of a checkpoint of a model, with two small files."""

        def fill(folder: Path) -> None:
            (folder / "adapter_config.json").write_text('{"r": 4}')
            (folder / "adapter_model.safetensors").write_bytes(bytes(range(256)) * 10)

        folder, size = self.context.weight_store.write(fill)
        path = TinkerPath(model, kind, name)
        lora = {"rank": 4, "seed": None, "train_mlp": True, "train_attn": True, "train_unembed": True}
        values = {"path": str(path), "owner": of, "run": model, "kind": kind, "base": "tiny", "lora": lora}
        values |= {"folder": folder, "size": size, "created": 1.0, "expires": None, "public": False, "info": {}}
        self.context.store.execute(*upsert_row(checkpoints, values))
        return str(path)


async def _send(app: FastAPI, method: str, path: str, headers: dict[str, str], given: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://palestra.test") as client:
        return await client.request(method, path, headers=headers, **given)
