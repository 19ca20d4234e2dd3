"""Two keys on a real server: a heavy queue does not delay a light key's requests, and its memory is released
afterwards."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.processes import Server

from palestra.service.server.api_keys import add_key


class Client(httpx.Client):
    """The client of one key, which samples from the base without an adapter."""

    def ask(self, samples: int, tokens: int, **fields: Any) -> str:
        prompt = {"chunks": [{"tokens": [5, 6, 7, 8]}]}
        given = {"base_model": "tiny", "prompt": prompt, "num_samples": samples, **fields}
        reply = self.post("asample", json={**given, "sampling_params": {"max_tokens": tokens, "stop": [], "seed": 1}})
        assert reply.status_code == 200, reply.text
        return str(reply.json()["request_id"])

    def answer(self, request: str) -> dict[str, Any]:
        while (reply := self.post("retrieve_future", json={"request_id": request})).status_code == 408:
            pass
        assert "error" not in reply.json(), reply.text[:500]
        return dict(reply.json())

    def pending(self, request: str) -> bool:
        return self.post("retrieve_future", json={"request_id": request}).status_code == 408


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Server, dict[str, Client]]]:
    keys = {name: add_key(tmp_path / "keys", name) for name in ("ada", "bob")}
    server = Server(tmp_path / "data", "--auth", str(tmp_path / "keys"), "--max-num-seqs", "64", "--poll", "0.2")
    clients = {
        name: Client(base_url=f"{server.url}/api/v1", headers={"X-API-Key": key}, timeout=120)
        for name, key in keys.items()
    }
    yield server, clients
    for client in clients.values():
        client.close()
    server.kill()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_light_key_is_served_while_a_heavy_key_has_a_full_queue(served: tuple[Server, dict[str, Client]]) -> None:
    _, clients = served
    ada, bob = clients["ada"], clients["bob"]
    expected = ada.answer(ada.ask(1, 5))["sequences"]
    queued = [bob.ask(256, 100) for _ in range(2)]
    time.sleep(1.0)
    for _ in range(5):
        assert ada.answer(ada.ask(1, 5))["sequences"][0]["tokens"] == expected[0]["tokens"]
    assert all(bob.pending(request) for request in queued)
    assert [len(bob.answer(request)["sequences"]) for request in queued] == [256] * 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_a_burst_is_released(served: tuple[Server, dict[str, Client]]) -> None:
    server, clients = served
    bob = clients["bob"]
    for request in [bob.ask(8, 16) for _ in range(8)]:
        bob.answer(request)
    (worker,) = server.workers()
    before = idle_memory(worker)
    bob.answer(bob.ask(64, 256))
    for request in [bob.ask(1, 8) for _ in range(120)]:
        bob.answer(request)
    for request in [bob.ask(64, 64), *(bob.ask(1, 8) for _ in range(100))]:
        bob.answer(request)
    assert idle_memory(worker) < 1.2 * before


def idle_memory(pid: int) -> int:
    """Resident kB once the server has been idle for some seconds."""
    time.sleep(4.0)
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
