"""The worker on a real store and weight store, in process: answers, order, and state after a crash."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tolerances import LOGPROB_ATOL
from sqlalchemy.exc import OperationalError

from palestra.core.types import Datum
from palestra.service.storage.store import MAX_TAKES, Store
from palestra.service.storage.tables import checkpoints, models, requests, samplers, sessions
from palestra.service.storage.wakeup import WakeupSocket
from palestra.service.wire import codec
from palestra.service.wire.jobs import LoadJob, SampleJob, SaveJob, TrainJob
from palestra.service.wire.schemas.requests import AdamParams, LoraConfig
from palestra.service.worker.worker import Worker, WorkerSettings, load_base
from palestra.service.worker.worker_process import DatabaseRetry


class WorkerBench:
    """A store with requests, and a worker that takes them when `run` is called."""

    def __init__(self, data: Path, base: Path, **settings: Any) -> None:
        data.mkdir(exist_ok=True)
        url = f"sqlite:///{data / 'store.sqlite'}"
        self.settings = WorkerSettings(store=url, data=data, bases={"small": str(base)}, device="cpu", **settings)
        self.store = Store(url)
        self.bells = WakeupSocket.pair()
        self.owners: dict[str, str] = {}
        self.start()

    def start(self) -> None:
        """A new worker; an old one, if any, counts as crashed: only its data remain."""
        self.worker = Worker(self.settings, self.store, self.bells[0])
        self.worker.recover()

    def run(self) -> None:
        while self.worker.step():
            pass

    def end(self) -> None:
        self.store.close()
        for bell in self.bells:
            bell.sock.close()

    def model(self, number: int = 1, session: str = "s", owner: str = "ada", **lora: Any) -> str:
        id, now = f"{session}:train:{number}", time.time()
        row = {
            "id": id,
            "session": session,
            "owner": owner,
            "base": "small",
            "info": {},
            "state": "live",
            "saved": None,
        }
        lora = LoraConfig(**{"rank": 4, "train_unembed": False, **lora}).model_dump()
        self.store.insert(models, **row, lora=lora, created=now, used=now, changed=0, kept=0)
        self.owners[id] = owner
        self.ask(id, "create_model", b"{}", 0)
        return id

    def ask(self, model: str, kind: str, body: bytes | Any, seq: int | None) -> str:
        body = body if isinstance(body, bytes) else body.model_dump_json().encode()
        key = f"model:{model}:{seq}" if seq else None
        return self.store.submit(self.owners.get(model, "ada"), kind, body, key=key, model=model, seq=seq)

    def learn(self, model: str, seq: int | None, seed: int = 0, *, kind: str = "forward_backward", **call: Any) -> str:
        return self.ask(model, kind, gradients(seed, **call), seq)

    def step(self, model: str, seq: int | None, lr: float = 0.01) -> str:
        return self.ask(model, "optim_step", AdamParams(learning_rate=lr), seq)

    def save(self, model: str, seq: int, name: str, kind: str = "weights", **job: Any) -> str:
        return self.ask(model, "save", SaveJob(path=f"tinker://{model}/{kind}/{name}", **job), seq)

    def load(self, model: str, seq: int, path: str, *, optimizer: bool = True) -> str:
        folder = self.store.get(checkpoints, path).folder
        return self.ask(model, "load", LoadJob(folder=folder, path=path, optimizer=optimizer), seq)

    def sample(self, folder: str | None, seed: int = 1, owner: str = "ada", **changes: Any) -> str:
        sampling = {"max_tokens": 6, **changes.pop("sampling", {})}
        given = {"base": "small", "folder": folder, "tokens": [5, 6, 7], "num_samples": 2, "seed": seed, **changes}
        job = SampleJob(sampling=sampling, **given)
        return self.store.submit(owner, "sample", job.model_dump_json().encode())

    def row(self, request: str) -> Any:
        (row,) = self.store.find(requests, requests.c.id == request)
        return row

    def answer(self, request: str) -> dict[str, Any]:
        """The answer to a request. Raises AssertionError if there is none, or an error."""
        row = self.row(request)
        assert row.state == "done", (row.state, row.result)
        readers: dict[str, Callable[[bytes], Any]] = {
            "json": bytes,
            "forward_backward": codec.forward_backward_to_json,
            "sample": codec.sample_to_json,
        }
        return dict(json.loads(readers[row.result_kind](row.result)))

    def error(self, request: str) -> str:
        row = self.row(request)
        assert row.state == "failed", (row.state, row.result)
        said = json.loads(row.result)
        assert said["category"] == "user", said
        return str(said["error"])

    def weights(self, model: str) -> list[torch.Tensor]:
        return [w.detach().clone() for w in self.worker.live_models.get(model).trainer.parameters]


def gradients(
    seed: int = 0,
    *,
    loss: str = "cross_entropy",
    count: int = 2,
    **inputs: Any,
) -> bytes:
    rng = np.random.default_rng(seed)
    data = []
    for _ in range(count):
        ids = rng.integers(5, 250, 9).astype(np.int64)
        given = {"weights": np.ones(8, np.float32), **{k: np.full(8, v, np.float32) for k, v in inputs.items()}}
        data.append(Datum(ids[:-1], ids[1:], given))
    return TrainJob(loss, {}, data).to_bytes()


def logps(answer: dict[str, Any]) -> list[list[float]]:
    return [output["logprobs"]["data"] for output in answer["loss_fn_outputs"]]


@pytest.fixture
def open_desk(tmp_path: Path, base: Path) -> Iterator[Callable[..., WorkerBench]]:
    desks: list[WorkerBench] = []

    def open_one(name: str = "one", **settings: Any) -> WorkerBench:
        desks.append(WorkerBench(tmp_path / name, base, **{"patience": 0.05, **settings}))
        return desks[-1]

    yield open_one
    for desk in desks:
        desk.end()


@pytest.fixture
def desk(open_desk: Callable[..., WorkerBench]) -> WorkerBench:
    return open_desk()


def trained(desk: WorkerBench, model: str, first: int, seeds: range) -> int:
    """Trains steps on data of each of `seeds`; returns the next sequence number."""
    for seed in seeds:
        desk.learn(model, first, seed)
        desk.step(model, first + 1)
        first += 2
    desk.run()
    return first


# -- order -------------------------------------------------------------------------------------------------------------


def test_kv_cache_has_the_budget_of_the_settings(desk: WorkerBench) -> None:
    settings = desk.settings.model_copy(update={"kv_cache_gib": 0.25})
    batch: Any = load_base("small", settings.bases["small"], settings).sampler.batch
    assert batch.memory.limit == 2**28


def test_requests_run_in_sequence_order_not_arrival_order(desk: WorkerBench) -> None:
    model = desk.model()
    late = [desk.step(model, 4), desk.learn(model, 3, 1), desk.learn(model, 2, 0)]
    desk.run()
    assert [desk.row(id).state for id in late] == ["taken"] * 3
    first = desk.learn(model, 1, kind="forward")
    desk.run()
    fresh = logps(desk.answer(first))
    assert fresh == logps(desk.answer(late[2]))  # the step, which arrived first, had not been made
    assert desk.answer(late[0])["metrics"]["grad_norm:mean"] > 0
    after = desk.learn(model, 5, kind="forward")
    desk.run()
    assert logps(desk.answer(after)) != fresh


def test_missing_sequence_number_is_skipped_after_a_wait(open_desk: Callable[..., WorkerBench]) -> None:
    desk = open_desk(patience=2)
    model = desk.model()
    second = desk.learn(model, 2)
    desk.run()
    assert desk.row(second).state == "taken"
    time.sleep(2.1)
    desk.run()
    assert desk.answer(second)
    late = desk.learn(model, 1)
    desk.run()
    assert "came after request 2 had run" in desk.error(late)
    third = desk.learn(model, 3)
    desk.run()
    assert desk.answer(third)


def test_missing_number_among_forward_backwards_is_awaited(open_desk: Callable[..., WorkerBench]) -> None:
    desk = open_desk(patience=1000.0)
    model = desk.model()
    first, third = desk.learn(model, 1), desk.learn(model, 3)
    desk.run()
    assert desk.answer(first) and desk.row(third).state == "taken"
    second = desk.learn(model, 2)
    desk.run()
    assert desk.answer(second) and desk.answer(third)


def test_repeated_request_runs_once(desk: WorkerBench) -> None:
    model, other = desk.model(), desk.model(2, seed=3)
    twice = [desk.learn(model, 1), desk.learn(model, 1)]
    desk.run()
    assert twice[0] == twice[1] == desk.learn(model, 1)
    desk.learn(other, 1)
    desk.run()
    grads = [desk.worker.live_models.get(model).trainer.parameters[1].grad for model in (model, other)]
    assert 0.5 < float(grads[0].norm() / grads[1].norm()) < 1.5  # not doubled
    assert desk.store.count(requests) == 4


def test_refused_sequence_number_is_not_awaited(open_desk: Callable[..., WorkerBench]) -> None:
    desk = open_desk(patience=1000.0)
    model = desk.model()
    for kind, seq in (("forward_backward", 1), ("save", 3)):
        desk.store.reject("ada", kind, "no such thing", key=f"model:{model}:{seq}", model=model, seq=seq)
    second, fourth = desk.learn(model, 2), desk.step(model, 4)
    desk.run()
    assert desk.answer(second) and desk.answer(fourth)
    (refused,) = desk.store.find(requests, requests.c.seq == 3)
    assert desk.error(refused.id) == "no such thing"


def test_unnumbered_requests_run_in_arrival_order(open_desk: Callable[..., WorkerBench]) -> None:
    desk = open_desk(patience=1000.0)
    model = desk.model()
    ids = [desk.learn(model, None), desk.step(model, None), desk.learn(model, 1), desk.step(model, None)]
    ids.append(desk.step(model, 2))
    desk.run()
    assert all(desk.answer(id) for id in ids)
    assert desk.worker.live_models.get(model).changed_seq > desk.worker.live_models.get(model).saved_seq


# -- several models ----------------------------------------------------------------------------------------------------


def test_models_in_a_shared_pass_learn_as_if_alone(open_desk: Callable[..., WorkerBench]) -> None:
    together, apart = open_desk("together"), open_desk("apart")
    shapes: list[dict[str, Any]] = [
        {"rank": 2, "seed": 1},
        {"rank": 5, "seed": 2, "train_mlp": False},
        {"rank": 3, "seed": 3, "train_unembed": True},
    ]
    for desk in (together, apart):
        for number, shape in enumerate(shapes):
            model = desk.model(number, **shape)
            for step in range(3):
                desk.learn(model, 2 * step + 1, seed=10 * number + step)
                desk.step(model, 2 * step + 2)
            if desk is apart:
                desk.run()
        desk.run()
    for number in range(3):
        model = f"s:train:{number}"
        for ours, theirs in zip(together.weights(model), apart.weights(model), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def answered(desk: WorkerBench, ids: list[str]) -> int:
    return sum(desk.row(id).state == "done" for id in ids)


def test_queued_gradients_of_one_key_do_not_block_another(open_desk: Callable[..., WorkerBench]) -> None:
    """Bob's requests for three models came first; ada's request is answered after a few turns."""
    desk = open_desk(pack_tokens=40, patience=1000.0)  # two requests in a micro-batch
    bobs = [desk.model(number, session="b", owner="bob") for number in range(3)]
    adas = desk.model(1)
    desk.run()
    queued = [desk.learn(model, seq) for seq in range(1, 11) for model in bobs]
    for _ in range(2):
        desk.worker.step()
    late = desk.learn(adas, 1)
    for _ in range(3):
        desk.worker.step()
    assert desk.answer(late) and answered(desk, queued) < 15
    desk.run()
    assert answered(desk, queued) == 30


def test_long_request_is_interleaved_with_other_keys_requests(open_desk: Callable[..., WorkerBench]) -> None:
    """The worker pauses after each datum of bob's request; his final weights equal those without ada's requests."""
    desk, alone = open_desk("shared", pack_tokens=8), open_desk("alone", pack_tokens=8)
    weights = []
    for one in (desk, alone):
        bobs, adas = one.model(1, session="b", owner="bob", seed=1), one.model(1, seed=2)
        one.run()
        long, step = one.ask(bobs, "forward_backward", gradients(1, count=40), 1), one.step(bobs, 2)
        for seq in range(1, 9 if one is desk else 1):
            one.worker.step()
            short = one.ask(adas, "forward_backward", gradients(seq, count=1), seq)
            for _ in range(4):
                one.worker.step()
            assert one.answer(short) and one.row(long).state == "taken"
        one.run()
        assert one.answer(long) and one.answer(step)
        weights.append(one.weights(bobs))
    assert all(map(torch.equal, *weights))


def test_stopping_worker_finishes_a_long_request(open_desk: Callable[..., WorkerBench]) -> None:
    desk = open_desk(pack_tokens=8)
    model = desk.model()
    desk.run()
    long = desk.ask(model, "forward_backward", gradients(1, count=20), 1)
    desk.worker.step()
    assert desk.row(long).state == "taken"
    desk.worker.shut_down()
    assert desk.answer(long)


class SlowTraining(Worker):
    """A worker whose micro-batches of training take a second each, as with many models."""

    def _train(self) -> bool:
        time.sleep(1.0)
        return super()._train()


def test_tokens_of_an_answer_do_not_wait_for_micro_batches(open_desk: Callable[..., WorkerBench]) -> None:
    """Sampling gets as much time as training: all tokens of an answer follow one micro-batch."""
    desk = open_desk()
    desk.worker = SlowTraining(desk.settings, desk.store, desk.bells[0])
    asked = desk.sample(None, sampling={"max_tokens": 6, "stop_at_eos": False})
    desk.worker.step()
    desk.worker.step()
    assert all(len(each["tokens"]) == 6 for each in desk.answer(asked)["sequences"])


def test_many_samples_of_one_key_do_not_block_another(open_desk: Callable[..., WorkerBench]) -> None:
    """Bob fills all rows with many tokens each; ada's request is answered a few turns later."""
    desk = open_desk(max_num_seqs=16)
    heavy = [
        desk.sample(None, i, "bob", num_samples=32, sampling={"max_tokens": 60, "stop_at_eos": False}) for i in range(4)
    ]
    for _ in range(5):
        desk.worker.step()
    small = desk.sample(None, num_samples=1, sampling={"max_tokens": 5})
    scored = desk.sample(None, num_samples=1, prompt_logprobs=True, sampling={"max_tokens": 5})
    for _ in range(8):
        desk.worker.step()
    assert len(desk.answer(small)["sequences"]) == 1 and desk.answer(scored)["prompt_logprobs"]
    assert answered(desk, heavy) == 0
    desk.run()
    assert answered(desk, heavy) == 4


def test_failed_request_does_not_affect_others(desk: WorkerBench) -> None:
    bad, good = desk.model(1), desk.model(2)
    wrong = desk.learn(bad, 1, loss="importance_sampling", logprobs=-1e5, advantages=1.0)  # its exp is infinite
    right = desk.learn(good, 1)
    garbage = desk.ask(bad, "forward_backward", b"\xff\xff", 2)
    desk.run()
    assert "look for extreme log-probabilities" in desk.error(wrong)
    assert "queued by another version of palestra" in desk.error(garbage)
    assert desk.answer(right)
    assert all(w.grad is None for w in desk.worker.live_models.get(bad).trainer.parameters)
    assert all(torch.isfinite(w.grad).all() for w in desk.worker.live_models.get(good).trainer.parameters)


def test_diverged_model_fails_alone(desk: WorkerBench) -> None:
    """NaN in its weights must not reach models in the same passes: masks do not stop it."""
    wild, tame = desk.model(1), desk.model(2)
    desk.learn(wild, 1)
    desk.step(wild, 2, lr=1e4)
    desk.run()
    with torch.no_grad():  # a step of this size may or may not do it, depending on the weights
        for weight in desk.worker.live_models.get(wild).trainer.parameters:
            weight.fill_(torch.nan)
    desk.step(wild, 3, lr=0.0)
    desk.save(wild, 4, "wild", "sampler_weights")
    alone = desk.learn(tame, 1, 7, kind="forward")
    plain = desk.sample(None, sampling={"max_tokens": 20})
    desk.run()
    folder = desk.store.get(checkpoints, f"tinker://{wild}/sampler_weights/wild").folder
    failing, beside = desk.learn(wild, 5, 3), desk.learn(tame, 2, 7)
    samples = [desk.sample(folder, tokens=list(range(5, 25))), desk.sample(None, sampling={"max_tokens": 20})]
    asked = desk.sample(folder, prompt_logprobs=True)
    desk.run()
    assert "the loss is nan" in desk.error(failing)
    assert "NaN" in desk.error(samples[0]) and "NaN" in desk.error(asked)
    np.testing.assert_allclose(logps(desk.answer(beside)), logps(desk.answer(alone)), atol=LOGPROB_ATOL)
    assert all(torch.isfinite(w.grad).all() for w in desk.worker.live_models.get(tame).trainer.parameters)
    after = desk.sample(None, sampling={"max_tokens": 20})  # in the slots of the diverged model
    desk.run()
    for id in (samples[1], after):
        assert desk.answer(id)["sequences"][0]["tokens"] == desk.answer(plain)["sequences"][0]["tokens"]


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"idle": 0.0}, {"resident": 0}])
def test_evicted_model_resumes_bit_identically(
    open_desk: Callable[..., WorkerBench], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    steady, moved = open_desk("steady"), open_desk("moved", **settings)
    for desk in (steady, moved):
        if desk is moved:
            monkeypatch.setattr("palestra.service.worker.worker.SWEEP_INTERVAL_S", 0.0)
        model, seq = desk.model(seed=4), 1
        for seed in range(4):
            desk.learn(model, seq, seed)
            desk.run()  # accumulated gradients leave memory too
            assert (model in desk.worker.live_models.live) == (desk is steady)
            desk.step(model, seq + 1)
            desk.run()
            seq += 2
    assert all(map(torch.equal, steady.weights(model), moved.weights(model)))
    states = [desk.worker.live_models.get(model).trainer for desk in (steady, moved)]
    assert states[0].steps == states[1].steps == 4


def test_model_with_pending_requests_is_not_evicted(
    open_desk: Callable[..., WorkerBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("palestra.service.worker.worker.SWEEP_INTERVAL_S", 0.0)
    desk = open_desk(idle=0.0, patience=1000.0)
    model = desk.model()
    desk.learn(model, 2)
    desk.run()
    assert model in desk.worker.live_models.live
    first = desk.learn(model, 1)
    desk.run()
    assert desk.answer(first)
    assert model not in desk.worker.live_models.live


def test_eviction_waits_for_the_end_of_a_pass(
    open_desk: Callable[..., WorkerBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a model would leave memory before all its gradients are computed."""
    monkeypatch.setattr("palestra.service.worker.worker.SWEEP_INTERVAL_S", 0.0)
    desk = open_desk(idle=0.0, pack_tokens=8)  # a pause after each datum
    model = desk.model()
    desk.learn(model, 1)
    desk.run()
    step = desk.step(model, 2)
    desk.run()
    assert desk.answer(step)["metrics"]["grad_norm:mean"] > 0


# -- weights -----------------------------------------------------------------------------------------------------------


def test_load_restores_the_saved_state(desk: WorkerBench) -> None:
    model = desk.model()
    seq = trained(desk, model, 1, range(2))
    desk.save(model, seq, "half")
    path = f"tinker://{model}/weights/half"
    trained(desk, model, seq + 1, range(2, 4))
    wanted = desk.weights(model)
    desk.load(model, seq + 5, path)
    trained(desk, model, seq + 6, range(2, 4))
    assert all(map(torch.equal, desk.weights(model), wanted))
    desk.load(model, seq + 10, path, optimizer=False)
    desk.run()
    # optimizer moments of other weights are useless
    assert not desk.worker.live_models.get(model).trainer.optimizer.state
    trained(desk, model, seq + 11, range(2, 4))
    assert not all(map(torch.equal, desk.weights(model), wanted))


def test_failed_load_leaves_weights_unchanged(desk: WorkerBench) -> None:
    model = desk.model()
    seq = trained(desk, model, 1, range(1))
    desk.save(model, seq, "good")
    desk.save(model, seq + 1, "bare", "sampler_weights")
    trained(desk, model, seq + 2, range(1, 2))
    before = desk.weights(model)
    bare, good = (
        desk.store.get(checkpoints, f"tinker://{model}/{p}") for p in ("sampler_weights/bare", "weights/good")
    )
    half = desk.load(model, seq + 4, bare.path)  # the checkpoint has no optimizer
    damage(desk.worker.weight_store.root / good.folder / "adapter_model.safetensors")
    torn = desk.load(model, seq + 5, good.path)
    desk.run()
    assert "holds no optimizer" in desk.error(half)
    assert "damaged" in desk.error(torn)
    assert all(map(torch.equal, desk.weights(model), before))
    trained(desk, model, seq + 6, range(1))


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_damaged_weights_are_refused_for_sampling(desk: WorkerBench) -> None:
    model = desk.model()
    desk.save(model, 1, "x", "sampler_weights")
    desk.run()
    folder = desk.store.get(checkpoints, f"tinker://{model}/sampler_weights/x").folder
    damage(desk.worker.weight_store.root / folder / "adapter_model.safetensors")
    sample, bare = desk.sample(folder), desk.sample(None)
    desk.run()
    assert "damaged" in desk.error(sample)
    assert desk.answer(bare)


def test_checkpoint_names_are_overwritten_only_on_request(desk: WorkerBench) -> None:
    model = desk.model()
    first = desk.save(model, 1, "x", overwrite=False)
    desk.run()
    folder = desk.store.get(checkpoints, f"tinker://{model}/weights/x").folder
    again, over = desk.save(model, 2, "x", overwrite=False), desk.save(model, 3, "x")
    desk.run()
    assert desk.answer(first) and "exists already" in desk.error(again) and desk.answer(over)
    assert desk.store.get(checkpoints, f"tinker://{model}/weights/x").folder != folder


def test_samplers_are_frozen_during_training(desk: WorkerBench) -> None:
    model = desk.model(train_unembed=True)
    seq = trained(desk, model, 1, range(1))
    desk.ask(model, "save", SaveJob(sampler="s:sample:0"), seq)
    desk.run()
    folder = desk.store.get(samplers, "s:sample:0").folder
    before = desk.sample(folder, prompt_logprobs=True)
    desk.run()
    trained(desk, model, seq + 1, range(1, 5))
    after = desk.sample(folder, prompt_logprobs=True)
    desk.run()
    bare = desk.sample(None, prompt_logprobs=True)
    desk.run()
    assert desk.answer(before) == desk.answer(after) != desk.answer(bare)
    desk.start()  # the snapshot is now loaded from disk
    again = desk.sample(folder, prompt_logprobs=True)
    desk.run()
    assert desk.answer(again) == desk.answer(before)


def test_expired_weights_are_swept(desk: WorkerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("palestra.service.worker.worker.SWEEP_INTERVAL_S", 0.0)
    monkeypatch.setattr("palestra.service.storage.weight_store.MIN_SWEEP_AGE_S", -1.0)
    model = desk.model()
    desk.learn(model, 1)
    desk.step(model, 2)
    desk.save(model, 3, "short", ttl_seconds=0.001)
    desk.save(model, 4, "long", ttl_seconds=1000)
    desk.save(model, 5, "for-ever", "sampler_weights")
    (desk.worker.weight_store.root / ".tmp-half").mkdir()
    desk.run()
    time.sleep(0.01)
    old = desk.sample(None)
    desk.run()
    desk.store.update(requests, int(desk.row(old).serial), finished=1.0)
    desk.sample(None)
    desk.run()
    assert [row.path.rsplit("/", 1)[1] for row in desk.store.find(checkpoints)] == ["for-ever", "long"]
    assert desk.store.count(requests, requests.c.id == old) == 0
    assert {path.name for path in desk.worker.weight_store.root.iterdir()} == desk.store.referenced_folders()
    desk.ask(model, "unload", b"{}", None)
    desk.run()
    kept = {row.folder for row in desk.store.find(checkpoints)}
    # nothing of the model itself is left
    assert {path.name for path in desk.worker.weight_store.root.iterdir()} == kept


def test_unloaded_model_is_removed(desk: WorkerBench) -> None:
    model = desk.model()
    ids = [desk.learn(model, 1), desk.ask(model, "unload", b"{}", 2), desk.learn(model, 3), desk.learn(model, 4)]
    desk.run()
    assert desk.answer(ids[0]) and desk.answer(ids[1])
    assert "was unloaded before" in desk.error(ids[2]) and "was unloaded before" in desk.error(ids[3])
    late = desk.learn(model, 5)
    desk.run()
    assert "Create a new one" in desk.error(late)
    assert not desk.worker.live_models.live


# -- crashes -----------------------------------------------------------------------------------------------------------


def test_unsaved_state_lost_in_a_crash_is_reported_until_load(desk: WorkerBench) -> None:
    model, fresh = desk.model(1), desk.model(2)
    seq = trained(desk, model, 1, range(2))
    desk.save(model, seq, "x")
    path = f"tinker://{model}/weights/x"
    check = desk.learn(model, seq + 1, 9, kind="forward")
    trained(desk, model, seq + 2, range(2, 3))
    unread = desk.learn(model, seq + 4)
    desk.start()
    after = desk.step(model, seq + 5)
    untouched = desk.learn(fresh, 1)
    desk.run()
    for id in (unread, after):
        assert "the server restarted" in desk.error(id) and path in desk.error(id)
    assert desk.answer(untouched)
    assert desk.store.get(models, model).state == "lost"
    spoiled = desk.ask(model, "load", LoadJob(folder="none", path=path, optimizer=True), seq + 6)
    still = desk.step(model, seq + 7)
    load, then = desk.load(model, seq + 8, path), desk.learn(model, seq + 9, 9, kind="forward")
    desk.run()
    assert "cannot be read" in desk.error(spoiled)
    assert "the server restarted" in desk.error(still)  # not a step on weights that differ from the client's
    assert desk.answer(load)["path"] == path
    np.testing.assert_allclose(logps(desk.answer(then)), logps(desk.answer(check)), atol=LOGPROB_ATOL)
    assert desk.store.get(models, model).state == "live"


def test_model_unchanged_since_its_save_survives_a_crash(desk: WorkerBench) -> None:
    model = desk.model()
    seq = trained(desk, model, 1, range(2))
    desk.save(model, seq, "x")
    desk.run()
    wanted = desk.weights(model)
    desk.start()
    queued = desk.learn(model, seq + 1)
    desk.run()
    assert desk.answer(queued)
    assert all(map(torch.equal, desk.weights(model), wanted))


def test_accumulated_gradients_do_not_count_as_saved(desk: WorkerBench) -> None:
    model = desk.model()
    desk.learn(model, 1)
    desk.save(model, 2, "x")
    desk.run()
    desk.start()
    step = desk.step(model, 3)
    desk.run()
    assert "the server restarted" in desk.error(step)


def test_lost_model_can_be_unloaded_and_is_never_recreated(desk: WorkerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    model = desk.model()
    trained(desk, model, 1, range(1))
    desk.start()
    first = desk.learn(model, 3)
    desk.run()
    monkeypatch.setattr("palestra.service.worker.worker.SWEEP_INTERVAL_S", 0.0)
    desk.worker.settings.idle = 0.0
    desk.run()  # evicted from memory, and loaded again
    second, unload = desk.learn(model, 4), desk.ask(model, "unload", b"{}", None)
    desk.run()
    assert "lost all it had learned" in desk.error(first) and "lost all it had learned" in desk.error(second)
    assert desk.answer(unload) and desk.store.get(models, model).state == "gone"


def test_interrupted_requests_run_again(open_desk: Callable[..., WorkerBench]) -> None:
    desk = open_desk(patience=60.0)
    model = desk.model()
    desk.run()
    sample, forward, waits = (
        desk.sample(None),
        desk.learn(model, 1, kind="forward"),
        desk.step(model, 3),
    )
    desk.worker.step()
    desk.start()
    desk.run()
    assert desk.answer(sample) and desk.answer(forward)
    assert desk.row(waits).state == "taken"
    same = desk.sample(None)
    desk.run()
    assert desk.answer(same) == desk.answer(sample)


@pytest.fixture
def locked(
    open_desk: Callable[..., WorkerBench], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[WorkerBench, sqlite3.Connection]]:
    """A worker with a long patience, and a connection that can lock its database."""
    monkeypatch.setattr("palestra.service.storage.database.BUSY_TIMEOUT_MS", 50)
    desk = open_desk()
    desk.store.close()
    desk.store = Store(desk.settings.store, DatabaseRetry(desk.bells[0]))
    desk.start()
    other = sqlite3.connect(desk.settings.data / "store.sqlite", isolation_level=None, check_same_thread=False)
    yield desk, other
    other.close()


def test_locked_database_is_retried(
    locked: tuple[WorkerBench, sqlite3.Connection], capfd: pytest.CaptureFixture[str]
) -> None:
    desk, other = locked
    model = desk.model()
    desk.run()
    learned, stepped = desk.learn(model, 1), desk.step(model, 2)
    desk.worker._take_requests()
    other.execute("BEGIN IMMEDIATE")
    release = threading.Timer(1.5, lambda: other.execute("ROLLBACK"))
    release.start()
    desk.run()
    release.join()
    assert desk.answer(learned) and desk.answer(stepped)
    assert desk.store.get(models, model).changed == 2
    said = capfd.readouterr().err
    assert "the database does not answer (database is locked), for 0 s now: trying again in 0.5 s" in said
    assert "trying again in 1.0 s" in said


def test_stopping_worker_gives_up_on_a_locked_database(
    locked: tuple[WorkerBench, sqlite3.Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, other = locked
    monkeypatch.setattr("palestra.service.worker.worker_process.MIN_STOP_ATTEMPTS", 1)
    waits = desk.sample(None)
    desk.worker._take_requests()
    other.execute("BEGIN IMMEDIATE")
    desk.bells[1].ask_to_end()
    with pytest.raises(OperationalError, match="database is locked"):
        desk.run()
    other.execute("ROLLBACK")
    desk.start()
    desk.run()
    assert desk.answer(waits)


def test_requests_taken_in_a_broken_transaction_are_taken_again(locked: tuple[WorkerBench, sqlite3.Connection]) -> None:
    """The connection broke while the database returned the taken requests."""
    desk, _ = locked
    waits = desk.sample(None)
    desk.store.take_queued()
    desk.run()
    assert desk.row(waits).state == "taken"
    desk.store.database.had_outage = True
    desk.worker._reclaim()
    desk.run()
    assert desk.answer(waits) and not desk.store.database.had_outage


def test_request_that_kills_its_worker_is_failed(desk: WorkerBench) -> None:
    model = desk.model()
    desk.run()
    killer = desk.step(model, 3)  # in this test number 2 never arrives
    for _ in range(MAX_TAKES):
        desk.worker.step()
        desk.start()
    row = desk.row(killer)
    assert row.state == "failed" and json.loads(row.result)["category"] == "server"


def test_stopping_worker_leaves_queued_requests_to_the_next(open_desk: Callable[..., WorkerBench]) -> None:
    steady, stopped = open_desk("steady", patience=1000.0), open_desk("stopped", patience=1000.0)
    for desk in (steady, stopped):
        model = desk.model(seed=1)
        seq = trained(desk, model, 1, range(2))
        desk.learn(model, seq, 5)
        desk.run()
        waits, sample = desk.step(model, seq + 2), desk.sample(None, sampling={"max_tokens": 40})
        desk.worker.step()
        if desk is stopped:
            desk.worker.shut_down()
            assert desk.answer(sample) and desk.row(waits).state == "queued"
            desk.start()
        desk.learn(model, seq + 1, 6)
        desk.run()
        assert desk.answer(waits)
    assert all(map(torch.equal, steady.weights(model), stopped.weights(model)))


def test_full_disk_fails_the_request_and_keeps_models(desk: WorkerBench) -> None:
    model = desk.model()
    trained(desk, model, 1, range(1))
    root = desk.worker.weight_store.root
    desk.worker.weight_store.root = root / "not" / "there"
    (root / "not").write_text("a file where a folder should be")
    save = desk.save(model, 3, "x")
    desk.run()
    assert json.loads(desk.row(save).result)["category"] == "server"
    desk.worker.weight_store.root = root
    again = desk.save(model, 4, "x")
    desk.run()
    assert desk.answer(again)


def test_samplers_of_expired_sessions_are_removed(desk: WorkerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("palestra.service.worker.worker.SWEEP_INTERVAL_S", 0.0)
    for id, seen in (("old", 1.0), ("new", time.time())):
        desk.store.insert(sessions, id=id, owner="ada", created=1.0, seen=seen, finished=None, info={})
        row = {"id": f"{id}:sample:0", "session": id, "owner": "ada", "base": "small", "created": 1.0}
        desk.store.insert(samplers, **row, path=None, folder=None)
    desk.run()
    assert [row.session for row in desk.store.find(samplers)] == ["new"]
