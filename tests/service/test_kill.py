"""SIGKILL at any moment, under load: acknowledged writes are kept, and lost state is reported.

Clients in threads train, save and sample, and check that a model that lost state reports this before it answers
anything else, that weights loaded again give the log-probabilities seen when they were saved, that a seeded sample is
always the same, and that every request gets an answer.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from helpers.processes import Server, left, signal_all

from palestra.core.files import acquire_lock
from palestra.service.storage.store import Store
from palestra.service.storage.tables import checkpoints, models, requests
from palestra.service.storage.weight_store import WeightStore

SILENCE = 150.0  # seconds without an answer that count as a fault on a busy machine


class Refused(Exception):
    """A typed failure."""


class Client(threading.Thread):
    """A client that trains, saves and samples until `over`; `fault` is the violated invariant, if any."""

    def __init__(self, server: Server, number: int, over: threading.Event) -> None:
        super().__init__(daemon=True)
        self.server, self.over, self.dice = server, over, random.Random(number)
        self.session, self.number = f"client-{number}", number
        self.models, self.seqs, self.names = itertools.count(), itertools.count(1), itertools.count()
        self.http = httpx.Client(base_url=f"{server.url}/api/v1", timeout=60.0)
        self.fault: BaseException | None = None
        self.model = ""
        self.saved: list[tuple[str, list[float], str]] = []  # path, log-probabilities, checksum
        self.answered: list[tuple[str, Any]] = []
        self.count, self.losses, self.wanted = 0, 0, None

    def run(self) -> None:
        try:
            self.create()
            while not self.over.is_set():
                self.turn()
        except BaseException as fault:
            self.fault = fault

    def turn(self) -> None:
        try:
            for _ in range(self.dice.randint(1, 3)):
                self.step()
            self.save()
        except Refused as refusal:
            assert "the server restarted" in str(refusal), refusal
            self.losses += 1
            self.recover()
        self.sample()
        self.check_one()

    # -- requests ------------------------------------------------------------------------------------------------------

    def post(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        """The reply; the request is repeated while no server answers."""
        until = time.monotonic() + SILENCE
        while True:
            try:
                reply = self.http.post(verb, json=body)
                if reply.status_code not in (408, 503):
                    assert reply.status_code == 200, (verb, reply.status_code, reply.text)
                    return dict(reply.json())
            except httpx.TransportError:
                pass
            assert time.monotonic() < until, f"nothing but silence upon {verb} {body}"
            time.sleep(0.02)

    def ask(self, verb: str, **fields: Any) -> str:
        return str(self.post(verb, fields)["request_id"])

    def answer(self, request: str) -> dict[str, Any]:
        said = self.post("retrieve_future", {"request_id": request})
        self.count += 1
        if "error" in said:
            assert said["category"] == "user", said
            raise Refused(said["error"])
        return said

    def train(self, verb: str, **fields: Any) -> str:
        return self.ask(verb, model_id=self.model, seq_id=next(self.seqs), **fields)

    # -- operations ----------------------------------------------------------------------------------------------------

    def create(self) -> None:
        self.seqs = itertools.count(1)
        fields = {"session_id": self.session, "model_seq_id": next(self.models), "base_model": "tiny"}
        self.model = self.answer(self.ask("create_model", **fields, lora_config={"rank": 4, "seed": 1}))["model_id"]

    def step(self) -> None:
        """Requests gradients and a step before the gradients are answered."""
        data = [self.datum(self.dice.randrange(1000)) for _ in range(2)]
        given = {"data": data, "loss_fn": "cross_entropy"}
        asked = [self.train("forward_backward", forward_backward_input=given)]
        asked.append(self.train("optim_step", adam_params={"learning_rate": 0.02}))
        self.all_or_none([*asked])

    def all_or_none(self, asked: list[str]) -> None:
        """The answers. After a refused request all later ones must be refused: nothing runs on a model that has lost
        state."""
        refused: list[Refused] = []
        for request in asked:
            try:
                self.answer(request)
                assert not refused, "a request ran on a model that had lost what came before it"
            except Refused as refusal:
                refused.append(refusal)
        if refused:
            raise refused[0]

    def datum(self, seed: int, length: int = 8) -> dict[str, Any]:
        ids = np.random.default_rng(seed).integers(5, 200, length + 1).tolist()
        inputs = {
            "target_tokens": {"data": ids[1:], "dtype": "int64"},
            "weights": {"data": [1.0] * length, "dtype": "float32"},
        }
        return {"model_input": {"chunks": [{"tokens": ids[:-1]}]}, "loss_fn_inputs": inputs}

    def probe(self) -> list[float]:
        given = {"data": [self.datum(12345)], "loss_fn": "cross_entropy"}
        said = self.answer(self.train("forward", forward_input=given))
        return list(said["loss_fn_outputs"][0]["logprobs"]["data"])

    def save(self) -> None:
        logps = self.probe()
        path = self.answer(self.train("save_weights", path=f"step-{next(self.names)}"))["path"]
        self.saved.append((path, logps, checksum(self.server.data, path)))

    def recover(self) -> None:
        """Recovers as clients do: loads the last saved weights, or makes a new model."""
        if not self.saved:
            self.create()
            return
        path, logps, _ = self.saved[-1]
        while True:
            try:
                self.answer(self.train("load_weights", path=path, optimizer=True))
                np.testing.assert_allclose(self.probe(), logps, atol=1e-4)
                return
            except Refused as refusal:  # killed again
                assert "the server restarted" in str(refusal), refusal

    def sample(self) -> None:
        fields = {"base_model": "tiny", "prompt": {"chunks": [{"tokens": [5, 6, 7]}]}, "num_samples": 2}
        request = self.ask("asample", **fields, sampling_params={"max_tokens": 24, "seed": 3, "stop": []})
        said = self.answer(request)
        tokens = [sequence["tokens"] for sequence in said["sequences"]]
        assert tokens == (self.wanted or tokens)
        self.wanted = tokens
        self.answered.append((request, said))

    def check_one(self) -> None:
        request, said = self.dice.choice(self.answered)
        assert self.post("retrieve_future", {"request_id": request}) == said

    def check_all(self) -> None:
        """Checks that every acknowledged checkpoint exists unchanged, and loads some of them."""
        for path, _, wanted in self.saved:
            assert checksum(self.server.data, path) == wanted
        for path, logps, _ in self.dice.sample(self.saved, min(4, len(self.saved))):
            self.answer(self.train("load_weights", path=path, optimizer=True))
            np.testing.assert_allclose(self.probe(), logps, atol=1e-4)
        for request, said in self.dice.sample(self.answered, min(5, len(self.answered))):
            assert self.post("retrieve_future", {"request_id": request}) == said


def checksum(data: Path, path: str) -> str:
    """The checksum of the weights at a path, which must be complete."""
    store = Store(f"sqlite:///{data / 'store.sqlite'}")
    row = store.get(checkpoints, path)
    store.close()
    assert row is not None, f"{path} was acknowledged and is gone"
    folder = WeightStore(data / "weights").read(row.folder)
    files = ("adapter_model.safetensors", "optimizer.safetensors")
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in files)).hexdigest()


class Load:
    """Clients at work, while processes are killed."""

    def __init__(self, server: Server, clients: int, seed: int) -> None:
        self.server, self.dice, self.over = server, random.Random(seed), threading.Event()
        self.clients = [Client(server, number, self.over) for number in range(clients)]
        for client in self.clients:
            client.start()

    def wait_for_answers(self, answers: int = 4) -> None:
        """Returns once every client has got some more answers."""
        before, until = [client.count for client in self.clients], time.monotonic() + SILENCE
        while any(client.count < count + answers for client, count in zip(self.clients, before, strict=True)):
            self.check()
            assert time.monotonic() < until, "the clients do not get on"
            time.sleep(0.01)

    def kill(self, what: str) -> None:
        """Kills the "front" end, its "worker" or "all" at a random moment; or all during a "save", or the worker while
        a model has "unsaved" steps."""
        moments = {"save": partial(half_saved, self.server.data), "unsaved": partial(unsaved, self.server.data)}
        at_random = partial(time.sleep, self.dice.uniform(0.0, 0.5))
        self.server.kill({"save": "all", "unsaved": "worker"}.get(what, what), moments.get(what, at_random))
        if what not in ("worker", "unsaved"):
            self.server.start()

    def check(self) -> None:
        for client in self.clients:
            if client.fault is not None:
                raise AssertionError(f"client {client.number}: {client.fault!r}") from client.fault

    def end(self) -> None:
        self.over.set()
        for client in self.clients:
            client.join(2 * SILENCE)
            assert not client.is_alive()
        self.check()
        for client in self.clients:
            client.check_all()
            client.http.close()


def unsaved(data: Path) -> None:
    """Returns while a model has steps that were not saved."""
    store, until = Store(f"sqlite:///{data / 'store.sqlite'}"), time.monotonic() + SILENCE
    while not store.count(models, models.c.changed > models.c.kept, models.c.state == "live"):
        assert time.monotonic() < until
    store.close()


def half_saved(data: Path) -> None:
    """Returns while a checkpoint is being written, if that is seen within some seconds."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if any(path.name.startswith(".tmp-") for path in (data / "weights").iterdir()):
            return


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    started = Server(tmp_path / "data")
    yield started
    started.kill()


def survive(server: Server, kills: list[str], clients: int) -> Load:
    load = Load(server, clients, seed=len(kills))
    for what in kills:
        load.wait_for_answers()
        load.kill(what)
    load.wait_for_answers()
    load.end()
    assert all(client.saved for client in load.clients)
    return load


@pytest.mark.timeout(400)
def test_two_kills_lose_no_acknowledged_write(server: Server) -> None:
    load = survive(server, ["unsaved", "front"], clients=2)
    assert sum(client.losses for client in load.clients) > 0  # otherwise the test would prove nothing


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_kills_lose_no_acknowledged_write(server: Server) -> None:
    load = survive(server, ["save", "all", "worker", "front", "unsaved"] * 10, clients=4)
    assert sum(client.losses for client in load.clients) > 20
    assert sum(len(client.saved) for client in load.clients) > 50


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_eight_clients_survive_kills_of_front_end_and_worker(server: Server) -> None:
    load = survive(server, ["front", "unsaved", "all", "worker", "front", "all"], clients=8)
    assert sum(client.losses for client in load.clients) > 0


@pytest.mark.slow
def test_resume_after_server_restart_is_bit_identical(server: Server) -> None:
    """No weights are loaded: accumulated gradients, the optimizer and the order of requests survive the restart."""
    probes = []
    for number in range(2):
        client = Client(server, number, threading.Event())
        client.dice = random.Random(0)
        client.create()
        for _ in range(3):
            client.step()
        given = {"data": [client.datum(1)], "loss_fn": "cross_entropy"}
        client.answer(client.train("forward_backward", forward_backward_input=given))
        if number == 0:
            assert server.stop() == 0
            server.start()
        client.answer(client.train("optim_step", adam_params={"learning_rate": 0.02}))
        probes.append(client.probe())
        client.http.close()
    assert probes[0] == probes[1]


class Waiting(threading.Thread):
    """Calls a function and keeps what it returns, or its error."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.call, self.result = call, None
        self.start()

    def run(self) -> None:
        try:
            self.result = self.call()
        except BaseException as fault:
            self.result = fault


def complete(server: Server) -> str:
    """The text of a completion, requested again while the server refuses or is gone."""
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 400, "temperature": 0}
    until = time.monotonic() + SILENCE
    while time.monotonic() < until:
        try:
            reply = httpx.post(f"{server.url}/oai/api/v1/completions", json=body, timeout=60)
        except httpx.TransportError:
            time.sleep(0.1)
            continue
        if reply.status_code == 200:
            return str(reply.json()["choices"][0]["text"])
        assert reply.status_code == 503 and "send the request again" in reply.text, reply.text
    raise AssertionError("no answer")


def in_flight(data: Path, ids: list[str]) -> bool:
    store = Store(f"sqlite:///{data / 'store.sqlite'}")
    rows = store.find(requests, requests.c.id.in_(ids))
    store.close()
    assert all(row.finished is None for row in rows), "answered before the signal"
    return all(row.state == "taken" for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["front", "all"])
def test_sigterm_with_requests_in_flight_loses_nothing(server: Server, whom: str) -> None:
    """The clients' polls and requests are repeated, and what was asked before the signal ends as without it."""
    results = []
    for number, is_stopped in enumerate((False, True)):
        client = Client(server, number, threading.Event())
        client.dice = random.Random(0)
        client.create()
        client.step()
        given = {"data": [client.datum(seed, 900) for seed in range(20)], "loss_fn": "cross_entropy"}
        fields = {"base_model": "tiny", "prompt": {"chunks": [{"tokens": [5, 6, 7]}]}, "num_samples": 2}
        asked = [
            client.train("forward_backward", forward_backward_input=given),
            client.ask("asample", **fields, sampling_params={"max_tokens": 400, "seed": 3, "stop": []}),
        ]
        waiting = [Waiting(partial(client.answer, request)) for request in asked]
        waiting.append(Waiting(partial(complete, server)))
        if is_stopped:
            while not in_flight(server.data, asked):
                time.sleep(0.01)
            children = psutil.Process(server.process.pid).children(recursive=True)
            began = time.monotonic()
            if whom == "all":
                signal_all(server.process.pid, signal.SIGTERM)
            else:
                server.process.terminate()
            out, _ = server.process.communicate(timeout=90)
            print(f"stopped after {time.monotonic() - began:.1f} s")
            assert server.process.returncode == 0 and out == "", out
            assert time.monotonic() - began < 90 and not left(children)
            server.start()
        for thread in waiting:
            thread.join(SILENCE)
        results.append([thread.result for thread in waiting])
        client.answer(client.train("optim_step", adam_params={"learning_rate": 0.02}))
        results[-1].append(client.probe())
        client.http.close()
    assert not any(isinstance(result, BaseException) for result in results[1]), results[1]
    answered, sampled = zip(*((result[0], result[1]["sequences"]) for result in results), strict=True)
    assert answered[0] == answered[1] and results[0][2:] == results[1][2:]
    for expected, sequence in zip(*sampled, strict=True):  # batches differ, and with them the rounding
        assert sequence["tokens"] == expected["tokens"] and len(sequence["tokens"]) == 400
        np.testing.assert_allclose(sequence["logprobs"], expected["logprobs"], atol=1e-3)


@pytest.mark.slow
def test_a_server_that_still_loads_its_models_ends_at_once(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with acquire_lock(tmp_path / "data/worker.lock", "the data"):  # its worker waits, as while it loads
        server = Server(tmp_path / "data")
        children = psutil.Process(server.process.pid).children(recursive=True)
        began = time.monotonic()
        assert server.stop() == 0 and not left(children)
        assert time.monotonic() - began < 20
