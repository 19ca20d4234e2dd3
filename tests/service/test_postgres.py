"""A server on PostgreSQL with a second front end: requests to one are answered at the other."""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.processes import Server
from helpers.warm_processes import run_palestra

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Wire:
    """A training client that may switch to another front end at any moment."""

    def __init__(self, url: str) -> None:
        self.seqs = itertools.count(1)
        self.turn_to(url)

    def turn_to(self, url: str) -> None:
        self.url = url

    def post(self, verb: str, **body: Any) -> dict[str, Any]:
        """The reply; the request is repeated while no server answers."""
        until = time.monotonic() + 300
        while True:
            reply = httpx.post(f"{self.url}/api/v1/{verb}", json=body, timeout=60)
            if reply.status_code not in (408, 503):
                assert reply.status_code == 200, (verb, reply.text)
                return dict(reply.json())
            assert time.monotonic() < until, f"no answer upon {verb}"

    def ask(self, verb: str, **body: Any) -> str:
        return str(self.post(verb, **body)["request_id"])

    def train(self, verb: str, **body: Any) -> str:
        return self.ask(verb, model_id=self.model, seq_id=next(self.seqs), **body)

    def answer(self, request: str) -> dict[str, Any]:
        return self.post("retrieve_future", request_id=request)

    def create(self, session: str) -> None:
        lora = {"rank": 4, "seed": 2**64 - 1}
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": lora}
        self.model = self.answer(self.ask("create_model", **body))["model_id"]

    def gradients(self) -> str:
        ids = list(range(20, 29))
        inputs = {
            "target_tokens": {"data": ids[1:], "dtype": "int64"},
            "weights": {"data": [1.0] * 8, "dtype": "float32"},
        }
        data = [{"model_input": {"chunks": [{"tokens": ids[:-1]}]}, "loss_fn_inputs": inputs}]
        return self.train("forward_backward", forward_backward_input={"data": data, "loss_fn": "cross_entropy"})

    def step(self) -> str:
        return self.train("optim_step", adam_params={"learning_rate": 0.02})

    def sample(self, path: str) -> str:
        params = {"max_tokens": 6, "seed": 2**64 - 1, "stop": []}
        prompt = {"chunks": [{"tokens": [20, 21, 22]}]}
        return self.ask("asample", model_path=path, prompt=prompt, num_samples=2, sampling_params=params)


def loss_of(answer: dict[str, Any]) -> float:
    return float(answer["metrics"]["loss:sum"])


@pytest.fixture
def servers(postgres: str, tmp_path: Path) -> Iterator[tuple[Server, Server]]:
    """A server with the engine, and a second front end without one."""
    whole = Server(tmp_path / "data", "--store", postgres)
    front = Server(tmp_path / "data", "--store", postgres, "--front-only")
    yield whole, front
    for server in (front, whole):
        if server.process.poll() is None:
            assert server.stop() == 0


def test_two_front_ends_share_one_engine_on_postgresql(servers: tuple[Server, Server]) -> None:
    whole, front = servers
    assert len(whole.workers()) == 1 and front.workers() == []
    client = Wire(whole.url)
    client.create("shared")
    losses = []
    for url in (whole.url, front.url) * 4:
        gradients, step = client.gradients(), client.step()
        client.turn_to(url)  # requests to one are answered at the other
        losses.append(loss_of(client.answer(gradients)))
        client.answer(step)
    assert losses[-1] < 0.5 * losses[0]
    state = client.answer(client.train("save_weights", path="state"))["path"]
    path = client.answer(client.train("save_weights_for_sampler", path="weights"))["path"]
    client.turn_to(front.url)
    said = client.answer(client.sample(path))["sequences"]
    client.turn_to(whole.url)
    assert client.answer(client.sample(path))["sequences"] == said
    archive = httpx.get(
        f"{front.url}/api/v1/training_runs/{client.model}/checkpoints/weights/state/archive", follow_redirects=True
    )
    assert archive.status_code == 200 and len(archive.content) > 10_000

    whole.kill()
    client.turn_to(front.url)
    waits = client.sample(path)  # no engine could run it
    assert httpx.post(f"{front.url}/api/v1/retrieve_future", json={"request_id": waits}, timeout=60).status_code == 408
    whole.start()
    assert client.answer(waits)["sequences"] == said
    client.answer(client.train("load_weights", path=state, optimizer=True))
    assert loss_of(client.answer(client.gradients())) < losses[-1]


def test_the_data_folder_and_the_database_belong_together(servers: tuple[Server, Server], tmp_path: Path) -> None:
    def refused(*options: str) -> str:
        done = run_palestra("serve", "--port", "0", *options)
        assert done.returncode == 2, done.stdout + done.stderr
        return " ".join(done.stderr.split())

    data, url = str(tmp_path / "data"), servers[0].words[servers[0].words.index("--store") + 1]
    assert "is writing the server's data" in refused("--data", data, "--store", url)
    assert "belongs to the server of another data folder" in refused("--data", str(tmp_path / "b"), "--store", url)
    assert "no server has been on" in refused("--data", str(tmp_path / "c"), "--store", url, "--front-only")
    assert "cannot open the database" in refused(
        "--data", str(tmp_path / "d"), "--store", "postgresql+psycopg://x@127.0.0.1:9/x"
    )
