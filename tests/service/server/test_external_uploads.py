"""Uploads of external weights: start, a PUT of each file to its signed URL, and finish, as the documentation of
Tinker's SDK 0.39 describes them."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from helpers.fronts import Front
from helpers.processes import Server
from pydantic import BaseModel, ConfigDict
from safetensors.torch import save

from palestra.service.server.state import ServiceContext
from palestra.service.storage.archives import layer_shapes, lora_targets
from palestra.service.storage.store import UPLOAD_GRACE_S, Store
from palestra.service.storage.tables import checkpoints, uploads
from palestra.service.storage.weight_store import WeightStore
from palestra.service.wire.schemas.requests import LoraConfig
from palestra.service.wire.schemas.weights import (
    ExternalWeightsUploadFinishRequest,
    ExternalWeightsUploadStartRequest,
)

LORA: dict[str, Any] = {"rank": 2, "train_unembed": False, "train_mlp": False}
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class DocumentedLora(Strict):
    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class DocumentedStart(Strict):
    """The fields of ExternalWeightsUploadStartRequest in the public documentation."""

    base_model: str
    lora_config: DocumentedLora
    destination_project_id: str | None = None


class DocumentedFinish(Strict):
    upload_id: str


class DocumentedUpload(BaseModel):
    upload_id: str
    urls: dict[str, str]
    expires: datetime


def adapter(base: str, *, rank: int = 2, alpha: float = 32, **switches: bool) -> dict[str, bytes]:
    """The files of an adapter as `save_weights_external` writes them for these settings."""
    shapes = layer_shapes(base)
    lora = LoraConfig.model_validate(LORA | {"rank": rank} | switches)
    tensors = {}
    for name in lora_targets(shapes, lora):
        out, into = shapes[name]
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.ones(rank, into)
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.ones(out, rank)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "base_model_name_or_path": "tiny"}
    return {CONFIG: json.dumps(config).encode(), WEIGHTS: save(tensors)}


@pytest.fixture
def files(tiny: Any) -> dict[str, bytes]:
    return adapter(tiny.path)


def start(front: Front, *, of: str = "", project: str | None = None, **lora: Any) -> DocumentedUpload:
    config = DocumentedLora(**LORA | lora)
    request = DocumentedStart(base_model="Qwen/Qwen3-0.6B", lora_config=config, destination_project_id=project)
    body = request.model_dump(mode="json", exclude_none=True)
    reply = front.post("/external_weights_upload_start", body, of=of)
    assert reply.status_code == 200, reply.text
    return DocumentedUpload.model_validate(reply.json())


def put(front: Front, url: str, data: Any) -> httpx.Response:
    """Sends a file without an API key, as a client does."""
    return front.ask("PUT", url, data, headers={"X-API-Key": ""})


def send(front: Front, upload: DocumentedUpload, files: dict[str, bytes]) -> None:
    assert upload.urls.keys() == {CONFIG, WEIGHTS}
    for name, data in files.items():
        assert put(front, upload.urls[name], data).status_code == 200


def finish(front: Front, upload: DocumentedUpload, of: str = "") -> httpx.Response:
    body = DocumentedFinish(upload_id=upload.upload_id).model_dump(mode="json")
    return front.post("/external_weights_upload_finish", body, of=of)


def refusal(reply: httpx.Response, status: int = 400) -> str:
    assert reply.status_code == status, reply.text
    reason: str = reply.json()["detail"]
    assert "\n" not in reason
    return reason


def weight_folders(front: Front) -> list[Path]:
    return sorted(front.context.weight_store.root.iterdir())


def test_bodies_of_the_documented_fields_are_read_as_they_are() -> None:
    sent = DocumentedStart(base_model="b", lora_config=DocumentedLora(rank=4, seed=1), destination_project_id="p")
    for body in (sent, DocumentedStart(base_model="b", lora_config=DocumentedLora(rank=4))):
        for left_out in (False, True):
            read = ExternalWeightsUploadStartRequest.model_validate_json(body.model_dump_json(exclude_none=left_out))
            assert read.model_dump(exclude={"lora_config": {"alpha"}}) == body.model_dump()
    finishing = DocumentedFinish(upload_id="u")
    finished = ExternalWeightsUploadFinishRequest.model_validate_json(finishing.model_dump_json())
    assert finished.model_dump() == finishing.model_dump()


def test_uploaded_weights_are_a_checkpoint_with_the_same_bytes(front: Front, files: dict[str, bytes]) -> None:
    upload = start(front, project="p", seed=3)
    assert 3500 < upload.expires.timestamp() - time.time() <= 3600
    send(front, upload, {WEIGHTS: b"sent again below"})
    send(front, upload, files)
    path = finish(front, upload).json()["tinker_path"]
    run, kind, name = path.removeprefix("tinker://").split("/")
    assert kind == "external_weights"
    urls = front.get(f"/training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls").json()["urls"]
    assert {file: front.get(url).content for file, url in urls.items()} == files
    info = front.post("/weights_info", {"tinker_path": path}).json()
    assert (info["base_model"], info["lora_rank"]) == ("Qwen/Qwen3-0.6B", 2)
    assert (info["train_attn"], info["train_mlp"], info["train_unembed"]) == (True, False, False)
    found = front.post("/checkpoints/search", {"project_ids": ["p"], "checkpoint_type": "external"}).json()
    assert [row["tinker_path"] for row in found["checkpoints"]] == [path]
    sampled = {"prompt": {"chunks": [{"tokens": [5]}]}, "model_path": path}
    assert front.post("/asample", sampled).status_code == 200
    (row,) = front.context.store.find(checkpoints)
    assert json.loads(front.take().body)["folder"] == row.folder
    model = front.model(**LORA)
    load = {"model_id": model, "path": path, "optimizer": False, "seq_id": 1}
    assert front.post("/load_weights", load).status_code == 200


def test_an_upload_survives_a_restart_between_its_steps(
    front: Front, files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("palestra.service.storage.weight_store.MIN_SWEEP_AGE_S", -1.0)
    before = front.context
    upload = start(front)

    def restart() -> Front:
        """Another process: only the database, the data folder and the secret are the same."""
        store = Store(f"sqlite:///{tmp_path / 'store.sqlite'}")
        store.expire(time.time())
        vault = WeightStore(tmp_path / "weights")
        vault.sweep(store.referenced_folders())
        return Front(ServiceContext(store, vault, before.keys, before.bases, before.wakeup, before.limits))

    for name, data in files.items():
        again = restart()
        assert put(again, upload.urls[name], data).status_code == 200
        again.context.store.close()
    again = restart()
    path = finish(again, upload).json()["tinker_path"]
    again.context.store.close()
    assert front.post("/weights_info", {"tinker_path": path}).status_code == 200


def test_finish_can_be_repeated_and_ends_the_upload(front: Front, files: dict[str, bytes]) -> None:
    upload = start(front)
    send(front, upload, files)
    replies = [finish(front, upload).json() for _ in range(2)]
    assert replies[0] == replies[1]
    assert len(front.context.store.find(checkpoints)) == 1 and front.context.store.count(uploads) == 0
    assert "request a new one" in refusal(put(front, upload.urls[CONFIG], b"{}"), 403)
    run = replies[0]["tinker_path"].split("/")[2]
    where = f"/training_runs/{run}/checkpoints/external_weights/uploaded"
    assert front.ask("DELETE", where).status_code == 204
    assert "there is no upload" in refusal(finish(front, upload), 404)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"base_model": "other"}, 'this server has no base "other"'),
        ({"lora_config": {"rank": 0}}, "lora_config.rank"),
        ({"lora_config": {"rank": 513}}, "lora_config.rank"),
        ({"lora_config": None}, "lora_config"),
        ({"lora_config": LORA | {"train_attn": False}}, "trains nothing"),
        ({"files": ["a"]}, "files: not used here"),
    ],
)
def test_impossible_starts_are_refused(front: Front, body: dict[str, Any], reason: str) -> None:
    reply = front.post("/external_weights_upload_start", {"base_model": "tiny", "lora_config": LORA, **body})
    assert reason in refusal(reply)
    assert front.context.store.count(uploads) == 0


def test_files_that_do_not_fit_are_refused_and_can_be_replaced(
    front: Front, files: dict[str, bytes], tiny: Any
) -> None:
    upload = start(front)
    assert f"{CONFIG} has not arrived" in refusal(finish(front, upload))
    send(front, upload, {CONFIG: files[CONFIG]})
    assert f"{WEIGHTS} has not arrived" in refusal(finish(front, upload))
    layer = "model.layers.0.self_attn.q_proj"
    wrong = save({f"base_model.model.{layer}.lora_{key}.weight": torch.ones(2, 2) for key in "AB"})
    tries = [
        (adapter(tiny.path, rank=3), "have rank 3, lora_alpha 32 and"),
        (adapter(tiny.path, alpha=8), "lora_alpha 8"),
        (adapter(tiny.path, train_mlp=True), "mlp"),
        (adapter(tiny.path, train_unembed=True), "see lm_head"),
        (files | {CONFIG: adapter(tiny.path, rank=3)[CONFIG]}, "does not fit the base"),
        (files | {WEIGHTS: wrong}, "does not fit the base"),
        (files | {WEIGHTS: b"no"}, "the adapter cannot be read"),
        (files | {CONFIG: b"no"}, "is not JSON"),
        (files | {CONFIG: json.dumps(json.loads(files[CONFIG]) | {"use_dora": True}).encode()}, "not plain LoRA"),
    ]
    for given, reason in tries:
        send(front, upload, given)
        assert reason in refusal(finish(front, upload)), reason
    assert front.context.store.find(checkpoints) == []
    send(front, upload, files)
    assert finish(front, upload).status_code == 200


def test_urls_are_for_one_file_of_one_upload(front: Front, files: dict[str, bytes], tmp_path: Path) -> None:
    upload, other = start(front), start(front)
    url = upload.urls[CONFIG]
    expires = url.partition("expires=")[2].partition("&")[0]
    before = sorted(tmp_path.rglob("*"))
    for old, new in (
        (CONFIG, WEIGHTS),
        (CONFIG, "manifest.json"),
        (CONFIG, "..%2f..%2fsecret"),
        (upload.upload_id, other.upload_id),
        (upload.upload_id, "..%2f.."),
        (expires, str(int(expires) + 1)),
        ("signature=", "signature=0"),
        ("signature=", "signature=é"),
    ):
        assert old in url
        assert put(front, url.replace(old, new), b"{}").status_code in (403, 404)
    assert put(front, url.partition("?")[0], b"{}").status_code == 422
    assert front.get(url).status_code == 405
    assert sorted(tmp_path.rglob("*")) == before


def test_a_download_url_is_no_upload_url(front: Front, files: dict[str, bytes]) -> None:
    upload = start(front)
    send(front, upload, files)
    run = finish(front, upload).json()["tinker_path"].split("/")[2]
    where = f"/training_runs/{run}/checkpoints/external_weights/uploaded/external_weights_urls"
    url = front.get(where).json()["urls"][CONFIG]
    assert put(front, url, b"{}").status_code == 405


def test_urls_expire_and_abandoned_files_are_removed(
    front: Front, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = start(front)
    send(front, upload, files)
    store, vault = front.context.store, front.context.weight_store
    later = upload.expires.timestamp() + 1
    monkeypatch.setattr("palestra.service.server.routes.archives.time.time", lambda: later)
    assert "has expired" in refusal(put(front, upload.urls[CONFIG], b"{}"), 403)
    store.expire(later)
    assert vault.sweep(store.referenced_folders()) == 0  # a file may be under way
    store.expire(later + UPLOAD_GRACE_S)
    assert vault.sweep(store.referenced_folders()) == 1
    assert weight_folders(front) == []
    assert "there is no upload" in refusal(finish(front, upload), 404)


def test_files_of_an_expired_upload_can_be_finished_while_they_are_there(front: Front, files: dict[str, bytes]) -> None:
    upload = start(front)
    send(front, upload, files)
    front.context.store.expire(upload.expires.timestamp() + 1)
    assert finish(front, upload).status_code == 200


def test_a_file_that_arrives_after_its_upload_was_removed_is_refused(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("palestra.service.storage.weight_store.MIN_SWEEP_AGE_S", -1.0)
    upload = start(front)

    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        front.context.store.expire(upload.expires.timestamp() + UPLOAD_GRACE_S + 1)
        assert front.context.weight_store.sweep(front.context.store.referenced_folders()) == 1
        yield b"}"

    reply = put_pieces(front, upload.urls[CONFIG], slow())
    assert "expired while this file was under way" in refusal(reply, 403)
    assert weight_folders(front) == []


def put_pieces(front: Front, url: str, pieces: AsyncIterator[bytes]) -> httpx.Response:
    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(front.app)) as client:
            return await client.put(url, content=pieces)

    return asyncio.run(send())


def test_bodies_over_the_limit_are_refused_and_leave_nothing(front: Front, files: dict[str, bytes]) -> None:
    upload = start(front)
    front.context.limits.upload = len(files[WEIGHTS])
    send(front, upload, files)
    assert put(front, upload.urls[WEIGHTS], files[WEIGHTS] + b"x").status_code == 413
    assert put(front, upload.urls[CONFIG], bytes(2**20 + 1)).status_code == 413
    (folder,) = weight_folders(front)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    assert finish(front, upload).status_code == 200


def test_a_file_that_breaks_off_leaves_the_earlier_one(front: Front, files: dict[str, bytes]) -> None:
    """Without a traceback in the server's log."""
    upload = start(front)
    send(front, upload, files)
    url = httpx.URL(upload.urls[CONFIG])
    messages = [{"type": "http.disconnect"}, {"type": "http.request", "body": b"{", "more_body": True}]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop()

    async def answer(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "PUT", "path": url.path, "query_string": url.query, "headers": []}
    asyncio.run(
        front.app({**scope, "http_version": "1.1", "client": None, "server": None, "scheme": "http"}, receive, answer)
    )
    assert sent[0]["status"] == 499
    (folder,) = weight_folders(front)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


def test_an_upload_belongs_to_its_key(shared: Front, files: dict[str, bytes]) -> None:
    upload = start(shared, of="ada")
    send(shared, upload, files)
    assert "or it is not yours" in refusal(finish(shared, upload, of="bob"), 404)
    path = finish(shared, upload, of="ada").json()["tinker_path"]
    assert "or it is not yours" in refusal(finish(shared, upload, of="bob"), 404)
    assert shared.post("/weights_info", {"tinker_path": path}, of="bob").status_code == 404
    assert shared.post("/external_weights_upload_start", {}, of="nobody").status_code == 401


class Client:
    """What a client sends to a running server."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=f"{url}/api/v1/", headers={"X-API-Key": "tml-any"}, timeout=60)

    def post(self, verb: str, **body: Any) -> dict[str, Any]:
        reply = self.http.post(verb, json=body)
        assert reply.status_code == 200, (verb, reply.text)
        return dict(reply.json())

    def answer(self, verb: str, **body: Any) -> dict[str, Any]:
        request = self.post(verb, **body)["request_id"]
        for _ in range(100):
            reply = self.http.post("retrieve_future", json={"request_id": request})
            if reply.status_code != 408:
                assert "error" not in reply.json(), reply.text
                return dict(reply.json())
        raise AssertionError(f"no answer to {verb}")

    def train_and_export(self, **lora: bool) -> str:
        made = {"session_id": "s", "model_seq_id": 0, "base_model": "tiny", "lora_config": LORA | lora}
        model = {"model_id": self.answer("create_model", **made)["model_id"]}
        inputs = {"target_tokens": {"data": [6, 7], "dtype": "int64"}}
        data = {"model_input": {"chunks": [{"tokens": [5, 6]}]}, "loss_fn_inputs": inputs}
        call = {"data": [data], "loss_fn": "cross_entropy"}
        for seq in (1, 3):  # the gradient of A is zero while B is
            self.answer("forward_backward", **model, seq_id=seq, forward_backward_input=call)
            self.answer("optim_step", **model, seq_id=seq + 1, adam_params={"learning_rate": 0.1})
        return str(self.answer("save_weights_external", **model, seq_id=5, path="out")["path"])

    def download(self, path: str) -> dict[str, bytes]:
        run, kind, name = path.removeprefix("tinker://").split("/")
        urls = self.http.get(f"training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls").json()["urls"]
        return {file: httpx.get(url).content for file, url in urls.items()}

    def logprobs(self, **weights: str) -> list[float]:
        asked = {"prompt": {"chunks": [{"tokens": [5, 6, 7]}]}, "prompt_logprobs": True, **weights}
        found = self.answer("asample", **asked, sampling_params={"max_tokens": 1})["prompt_logprobs"]
        return [value for value in found if value is not None]


@pytest.mark.slow
@pytest.mark.parametrize("switches", [{}, {"train_mlp": True, "train_unembed": True}])
def test_exported_weights_come_back_through_servers_that_are_killed(tmp_path: Path, switches: dict[str, bool]) -> None:
    server = Server(tmp_path)
    first = server.url
    client = Client(first)
    exported = client.train_and_export(**switches)
    files = client.download(exported)
    expected = client.logprobs(model_path=exported)
    upload = client.post("external_weights_upload_start", base_model="tiny", lora_config=LORA | switches)
    client.http.close()
    for name, url in upload["urls"].items():
        server.kill()
        server = Server(tmp_path)
        assert httpx.put(url.replace(first, server.url), content=files[name]).status_code == 200
    server.kill()
    server = Server(tmp_path)
    client = Client(server.url)
    path = client.post("external_weights_upload_finish", upload_id=upload["upload_id"])["tinker_path"]
    assert client.download(path) == files
    assert client.logprobs(model_path=path) == expected != client.logprobs(base_model="tiny")
    client.http.close()
    assert server.stop() == 0
