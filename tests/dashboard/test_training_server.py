"""A training server in the dashboard: a real server with the traffic of two keys, seen with the operator's."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.processes import Server
from starlette.testclient import TestClient

from palestra.dashboard.app import build_dashboard
from palestra.service.server.api_keys import add_key

HERE = "http://127.0.0.1"
BODY = {"lora_config": {"rank": 4}, "base_model": "tiny", "model_seq_id": 0}
PROMPT = {"chunks": [{"tokens": [5, 6, 7, 8]}]}


class Client(httpx.Client):
    """The client of one API key."""

    def call(self, verb: str, **body: Any) -> Any:
        return self.post(verb, json=body).json()

    def answer(self, request: str) -> Any:
        while (reply := self.post("retrieve_future", json={"request_id": request})).status_code == 408:
            pass
        return reply.json()

    def train(self, name: str) -> str:
        """Makes a model in a session of this name; returns the model's id."""
        session = self.call("create_session", tags=[], display_name=name, sdk_version="test")["session_id"]
        made = self.call("create_model", session_id=session, **BODY)
        self.answer(made["request_id"])
        return str(made["model_id"])

    def sample(self, answers: int, tokens: int) -> str:
        params = {"max_tokens": tokens, "stop": [], "seed": 1}
        made = self.call("asample", base_model="tiny", prompt=PROMPT, num_samples=answers, sampling_params=params)
        return str(made["request_id"])

    def fail(self, model: str) -> None:
        """Trains without targets."""
        data = {"data": [{"model_input": PROMPT, "loss_fn_inputs": {}}], "loss_fn": "cross_entropy"}
        assert self.post(
            "forward_backward", json={"model_id": model, "seq_id": 1, "forward_backward_input": data}
        ).is_error


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    return {name: add_key(tmp_path / "keys", name) for name in ("ada", "bob", "operator")}


@pytest.fixture
def server(tmp_path: Path, keys: dict[str, str]) -> Iterator[Server]:
    started = Server(tmp_path / "data", "--auth", str(tmp_path / "keys"))
    yield started
    started.kill()


@pytest.fixture
def clients(server: Server, keys: dict[str, str]) -> Iterator[dict[str, Client]]:
    made = {
        name: Client(base_url=f"{server.url}/api/v1/", headers={"X-API-Key": key}, timeout=120)
        for name, key in keys.items()
    }
    yield made
    for client in made.values():
        client.close()


def watch(tmp_path: Path, url: str) -> TestClient:
    (tmp_path / "runs").mkdir(exist_ok=True)
    return TestClient(build_dashboard(tmp_path / "runs", engine=url), base_url=HERE)


def test_operator_sees_sessions_queues_adapters_memory_shares_and_errors(
    tmp_path: Path,
    server: Server,
    clients: dict[str, Client],
    keys: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = {name: clients[name].train(f"{name}'s run") for name in ("ada", "bob")}
    clients["ada"].answer(clients["ada"].sample(2, 8))
    clients["bob"].fail(models["bob"])
    clients["bob"].sample(64, 1900)  # takes longer than this test looks
    monkeypatch.setenv("TINKER_API_KEY", keys["operator"])
    dashboard = watch(tmp_path, server.url)

    def progress() -> dict[str, Any]:
        shown = dashboard.get("/api/server")
        assert not [name for name, key in keys.items() if key in shown.text], "a key is shown"
        assert shown.json()["error"] == ""
        return dict(shown.json()["console"])

    until = time.monotonic() + 60
    while True:  # the worker reports every two seconds
        console = progress()
        worker = console["worker"]
        if worker and worker["work"].get("bob", {}).get("answers") == 64 and console["errors"]:
            break
        assert time.monotonic() < until, console
        time.sleep(0.2)
    assert {(one["owner"], one["name"]) for one in console["sessions"]} == {(n, f"{n}'s run") for n in ("ada", "bob")}
    assert [one["num_models"] for one in console["sessions"]] == [1, 1]
    (queue,) = console["queues"]
    assert (queue["owner"], queue["kind"], queue["queued"], queue["taken"]) == ("bob", "sample", 0, 1)
    assert queue["bytes"] > 0 and 0 <= console["at"] - queue["oldest"] < 60
    adapters = {one["id"]: one for one in console["adapters"]}
    assert adapters.keys() == set(models.values()) == set(worker["loaded_models"])
    assert all((one["rank"], one["state"], one["is_loaded"]) == (4, "live", True) for one in adapters.values())
    (base,) = worker["bases"]
    assert (base["name"], base["device"], base["answers"]) == ("tiny", "cpu", 64)
    assert 0 < base["cache_bytes"] < base["cache_limit"] and worker["memory"] > 100e6
    assert worker["work"]["ada"]["sampling"] > 0 and worker["work"]["ada"]["answers"] == 0
    recent = {one["owner"]: one for one in console["answers"]}
    assert recent["bob"]["num_answers"] == 2 and 0 <= recent["bob"]["mean_s"] <= recent["bob"]["max_s"] < 60
    (error,) = console["errors"]
    assert (error["owner"], error["model"], error["category"]) == ("bob", models["bob"], "user")
    assert "target_tokens" in error["message"]


def test_other_keys_are_refused_and_told_how_to_see_it(
    tmp_path: Path, server: Server, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dashboard = watch(tmp_path, server.url)
    for key, reason in ((keys["ada"], "palestra keys add operator"), ("tml-wrong", "set TINKER_API_KEY")):
        monkeypatch.setenv("TINKER_API_KEY", key)
        shown = dashboard.get("/api/server").json()
        assert shown["console"] is None and reason in shown["error"] and key not in json.dumps(shown)


def test_server_that_is_gone_is_said_in_one_line(tmp_path: Path) -> None:
    shown = watch(tmp_path, "http://127.0.0.1:9").get("/api/server").json()
    assert shown["console"] is None and "http://127.0.0.1:9 does not answer" in shown["error"]
    assert "\n" not in shown["error"]
    assert "palestra dashboard --engine" in watch(tmp_path, "").get("/api/server").json()["error"]


@pytest.mark.parametrize("address", ["127.0.0.1:8000", "ftp://server", "http://key@server"])
def test_address_that_is_none_is_refused(tmp_path: Path, address: str) -> None:
    with pytest.raises(ValueError, match="--engine"):
        watch(tmp_path, address)
