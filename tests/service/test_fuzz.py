"""Any request gets a clear answer below 500, costs little, and changes nothing of other owners; the worker keeps
running. The front end has a real store and weight store, and a real worker takes the requests that pass validation.
"""

import contextlib
import copy
import json
import re
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import schemathesis
import zstandard
from fastapi.routing import APIRoute
from helpers.fronts import Front
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic.json_schema import models_json_schema

from palestra.core.types import Datum
from palestra.service.serve import load_base_info
from palestra.service.server.api_keys import ApiKeys, add_key
from palestra.service.server.app import ROUTERS
from palestra.service.server.state import ClientLimits, ServiceContext
from palestra.service.storage.store import Store
from palestra.service.storage.tables import checkpoints, models, requests, samplers, sessions, uploads
from palestra.service.storage.wakeup import WakeupSocket
from palestra.service.storage.weight_store import WeightStore
from palestra.service.wire import codec
from palestra.service.wire import wire_pb2 as pb
from palestra.service.wire.schemas import requests as wire
from palestra.service.wire.schemas import weights as wire_weights
from palestra.service.wire.validation import LOSS_SPECS
from palestra.service.worker.worker import Worker, WorkerSettings

TABLES = (sessions, models, samplers, checkpoints, uploads)
PROTOBUF = {"Content-Type": "application/x-protobuf"}
QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large, HealthCheck.large_base_example]
MODES = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
PROMPT = {"chunks": [{"tokens": [5, 6, 7]}]}


def routes() -> list[tuple[str, APIRoute]]:
    """All routes with their full paths."""
    return [(f"{prefix}{r.path}", r) for router, prefix in ROUTERS for r in router.routes if isinstance(r, APIRoute)]


class Target(Front):
    """A front end with a model, a sampler and checkpoints of ada, and a worker that takes queued requests."""

    def __init__(self, data: Path, base: Path) -> None:
        bells, url = WakeupSocket.pair(), f"sqlite:///{data / 'store.sqlite'}"
        limits = ClientLimits(body=2_000_000, upload=2_000_000, poll=0.0, models=10_000, queue=100_000)
        keys = {name: add_key(data / "keys", name) for name in ("ada", "bob")}
        described = load_base_info("small", str(base), {"tiny": "small"})
        store, vault = Store(url), WeightStore(data / "weights")
        context = ServiceContext(store, vault, ApiKeys(data / "keys"), {"small": described}, bells[0], limits)
        super().__init__(context)
        self.keys = keys
        bases = {"small": str(base)}
        self.worker = Worker(
            WorkerSettings(store=url, data=data, bases=bases, device="cpu", patience=0.0), store, bells[1]
        )
        self.tried = 0
        self.create_resources()

    def create_resources(self) -> None:
        """Makes ada's resources, which others must not see but may name."""
        lora = {"rank": 2, "seed": 1}
        body = {"session_id": "mine", "model_seq_id": 0, "base_model": "tiny", "lora_config": lora}
        self.model_id = str(self.result(self.post("/create_model", body, of="ada"))["model_id"])
        for verb, path in (("save_weights", "whole"), ("save_weights_for_sampler", "bare")):
            self.result(self.post(f"/{verb}", {"model_id": self.model_id, "path": path}, of="ada"))
        body = {"base_model": "tiny", "lora_config": lora}
        self.upload_id = self.post("/external_weights_upload_start", body, of="ada").json()["upload_id"]
        self.sampler_id = "mine:sample:0"
        body = {"session_id": "mine", "sampling_session_seq_id": 0, "model_path": self.path("bare")}
        assert self.post("/create_sampling_session", body, of="ada").status_code == 200
        asked = {"sampling_session_id": self.sampler_id, "prompt": PROMPT, "sampling_params": {"max_tokens": 2}}
        reply = self.post("/asample", asked, of="ada")
        self.request_id = str(reply.json()["request_id"])
        self.result(reply)

    def path(self, name: str) -> str:
        return f"tinker://{self.model_id}/{'weights' if name == 'whole' else 'sampler_weights'}/{name}"

    def work(self) -> None:
        """Runs the worker until the queue is empty; no error may leave it, since it would end the worker."""
        while self.worker.step():
            pass

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Runs the worker on a thread: some replies wait for it."""
        over, faults = threading.Event(), []

        def run() -> None:
            try:
                while not over.is_set():
                    if not self.worker.step():
                        time.sleep(0.002)
            except BaseException as fault:
                faults.append(fault)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield
        over.set()
        thread.join()
        assert not faults
        self.work()

    def result(self, reply: Any) -> Any:
        assert reply.status_code == 200, reply.text
        self.work()
        return self.answer_of(reply.json()["request_id"])

    def answer_of(self, request: str) -> Any:
        return self.post("/retrieve_future", {"request_id": request}, of="ada").json()

    def is_alive(self) -> bool:
        """True if a normal request still gets a normal answer."""
        asked = {"sampling_session_id": self.sampler_id, "prompt": PROMPT, "sampling_params": {"max_tokens": 2}}
        return bool(self.result(self.post("/asample", asked, of="ada"))["sequences"])

    def try_request(self, method: str, path: str, body: Any = None, **given: Any) -> Any:
        """The reply to an arbitrary request: its status is below 500, and errors have a message."""
        self.tried += 1
        reply = self.ask(method, path, body, **{"of": "ada", **given})
        assert reply.status_code < 500, (method, path, reply.text)
        if reply.status_code >= 400 and reply.status_code != 408:
            assert reply.json()["detail"], (method, path)
        return reply


@contextlib.contextmanager
def open_target(data: Path, base: Path) -> Iterator[Target]:
    made = Target(data, base)
    yield made
    made.context.store.close()
    for end in (made.context.wakeup.sock, made.worker.wakeup.sock):
        end.close()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Iterator[Target]:
    with open_target(tmp_path_factory.mktemp("fuzz"), base) as made:
        yield made


@pytest.fixture
def other(tmp_path: Path, base: Path) -> Iterator[Target]:
    """A target whose model and checkpoints a test may delete."""
    with open_target(tmp_path, base) as made:
        yield made


def fuzz(examples: int, *strategies: Any, **named: Any) -> Callable[[Callable[..., None]], None]:
    """Runs a property test with this many examples."""

    def run(test: Callable[..., None]) -> None:
        profile = settings(max_examples=examples, deadline=None, suppress_health_check=QUIET, database=None)
        profile(hypothesis.seed(0)(given(*strategies, **named)(test)))()

    return run


amounts = pytest.mark.parametrize(
    "amount",
    [pytest.param(1, id="few"), pytest.param(30, id="many", marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)


BY_HAND = {
    "forward": wire.ForwardRequest,
    "forward_backward": wire.ForwardBackwardRequest,
    "optim_step": wire.OptimStepRequest,
    "save_weights": wire_weights.SaveWeightsRequest,
    "save_weights_for_sampler": wire_weights.SaveWeightsForSamplerRequest,
    "save_weights_external": wire_weights.SaveWeightsExternalRequest,
    "load_weights": wire_weights.LoadWeightsRequest,
    "mint/forward_backward_reverse_kl": wire.ReverseKLRequest,
}


# -- JSON --------------------------------------------------------------------------------------------------------------


def real_ids(target: Target) -> dict[str, Any]:
    """Existing ids, with which a request gets further than "not found"."""
    return {
        "model_id": target.model_id,
        "session_id": "mine",
        "base_model": "tiny",
        "sampling_session_id": target.sampler_id,
        "model_path": target.path("bare"),
        "tinker_path": target.path("whole"),
        "source_path": target.path("whole"),
        "reference_model_path": target.path("bare"),
        "request_id": target.request_id,
        "model": "tiny",
        "loss_fn": "cross_entropy",
    }


def with_real_ids(tree: Any, names: dict[str, Any], room: list[bool]) -> Any:
    """A body with some existing ids, and a bounded number of samples."""
    if isinstance(tree, list):
        return [with_real_ids(branch, names, room) for branch in tree]
    if not isinstance(tree, dict):
        return tree
    small = {"num_samples": 3, "n": 3, "max_tokens": 4, "max_completion_tokens": 4, "rank": 8}
    tree = {key: with_real_ids(branch, names, room) for key, branch in tree.items()}
    if "sampling_params" in tree or "messages" in tree or "prompt" in tree:
        place = tree.get("sampling_params") if "messages" not in tree and "model" not in tree else tree
        if isinstance(place, dict) and place.get("max_tokens") is None:
            place["max_tokens"] = 4
    for key, value in tree.items():
        if key in names and room and room.pop():
            tree[key] = names[key]
        if key in small and isinstance(value, int) and value > small[key]:
            tree[key] = small[key]
    return tree


@pytest.mark.slow  # bad bodies by hand, here and in test_app.py, are fast tests
@amounts
def test_fuzzed_json_bodies_never_crash_the_server(other: Target, amount: int) -> None:
    """Schemathesis makes bodies that fit the server's OpenAPI page, and bodies that nearly fit."""
    schema = schemathesis.openapi.from_dict(whole_page(other))
    names = real_ids(other)
    with other.at_work():
        for found in schema.get_all_operations():
            operation = found.ok()
            # hypothesis would search long for a path that does not fit: any text does
            modes = MODES if operation.body or operation.query else MODES[:1]
            for mode in modes:
                cases = operation.as_strategy(generation_mode=mode)

                @fuzz(2 * amount, cases, st.lists(st.booleans(), min_size=6, max_size=6))
                def send(case: Any, room: list[bool]) -> None:
                    body = with_real_ids(copy.deepcopy(case.body), names, room)
                    packed = encoded(body)
                    path = case.formatted_path
                    given = {} if packed is None else {"headers": {"Content-Type": "application/json"}}
                    other.try_request(case.method, path, packed, params=plain(case.query), **given)

    assert other.is_alive()


def whole_page(target: Target) -> dict[str, Any]:
    """The server's OpenAPI page, with the bodies of routes that parse them by hand."""
    page: dict[str, Any] = target.get("/openapi.json").json()
    template = "#/components/schemas/{model}"
    _, found = models_json_schema([(body, "validation") for body in BY_HAND.values()], ref_template=template)
    page["components"]["schemas"] |= found["$defs"]
    for path, body in BY_HAND.items():
        content = {"application/json": {"schema": {"$ref": template.format(model=body.__name__)}}}
        page["paths"][f"/api/v1/{path}"]["post"]["requestBody"] = {"content": content, "required": True}
    return page


def encoded(body: Any) -> bytes | None:
    if body is None or isinstance(body, bytes):
        return body
    try:
        return json.dumps(body, default=str).encode()
    except (TypeError, ValueError):
        return None


def plain(query: Any) -> dict[str, str]:
    """The query without keys and values that an address cannot contain."""
    return {str(k): str(v).encode("ascii", "ignore").decode() for k, v in dict(query or {}).items()}


# -- protobuf ----------------------------------------------------------------------------------------------------------

INTEGERS = st.one_of(st.integers(-3, 300), st.sampled_from([-(2**63), 2**63 - 1, 2**31, 2**53]))
FLOATS = st.one_of(st.floats(width=32), st.sampled_from([0.0, -1.0, 1e38, 3e4]))


@st.composite
def tensors(draw: st.DrawFn, size: int) -> pb.Tensor:
    """A tensor of `size` numbers, or of any size."""
    kind = draw(st.sampled_from([1, 2, 3, 4, 1, 2, 0, 9]))
    length = size if draw(st.integers(0, 4)) else draw(st.integers(0, 40))
    many = draw(st.lists(INTEGERS if kind in (2, 3) else FLOATS, min_size=length, max_size=length))
    tensor = pb.Tensor(dtype=kind)  # type: ignore[arg-type]
    shape = draw(
        st.sampled_from([[], [length], [length, 1], [1, length], [2**31 - 1, 2**31 - 1], [-1, 4], [0], [2**62]])
    )
    tensor.shape.extend(shape)
    with np.errstate(all="ignore"):
        dtype = {1: "<f4", 2: "<i8", 3: "<i4", 4: "<u2"}.get(kind, "<f4")
        values = np.array([v % 2**31 if dtype == "<i4" else v for v in many] or [0])[:length]
        raw = (values.view(np.int64) if values.dtype.kind == "i" else np.nan_to_num(values)).astype(dtype).tobytes()
    if draw(st.integers(0, 3)):
        tensor.dense = raw
    else:
        tensor.sparse_csr.values = raw
        for name in ("crow_indices", "col_indices"):
            numbers = draw(st.lists(INTEGERS, max_size=length + 1))
            setattr(tensor.sparse_csr, name, np.array(numbers or [0], np.int64).tobytes())
    return tensor


@st.composite
def calls(draw: st.DrawFn, model: str) -> pb.ForwardBackwardRequest:
    """Messages, most of them nearly valid."""
    losses = st.one_of(
        st.just("cross_entropy"), st.sampled_from([*LOSS_SPECS]), st.sampled_from(["cross_entropy", "x", "\0"])
    )
    call = pb.ForwardBackwardRequest(model_id=draw(st.sampled_from([model] * 8 + ["", "x"])), loss_fn=draw(losses))
    call.seq_id, call.forward_only = draw(st.sampled_from([0] * 9 + [-1, 1])), draw(st.booleans())
    names = ["weights", "logprobs", "advantages", "mask", "clip_low_threshold", "sequence_ratio_mask", "x"]
    for _ in range(draw(st.integers(0, 3))):
        datum = call.data.add()
        ids = draw(st.lists(st.integers(0, 250), min_size=1, max_size=9))
        tokens = ids if draw(st.integers(0, 5)) else draw(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9))
        datum.model_input.add().encoded_text.tokens = np.array(tokens, np.int32).tobytes() + draw(
            st.sampled_from([b""] * 9 + [b"\0"])
        )
        given = {"target_tokens": np.array(ids, np.int64), "weights": np.ones(len(ids), np.float32)}
        whole = pb.ForwardBackwardRequest()
        codec.encode_data(whole, [Datum(np.array(ids), given.pop("target_tokens"), given)])
        for name, tensor in whole.data[0].loss_fn_inputs.items():
            datum.loss_fn_inputs[name].CopyFrom(tensor)
        for name in (
            draw(st.lists(st.sampled_from([*names, "target_tokens"]), max_size=3)) if draw(st.booleans()) else ()
        ):
            datum.loss_fn_inputs[name].CopyFrom(draw(tensors(len(ids))))
    options = st.sampled_from(["clip_low_threshold", "clip_high_threshold", "beta", "y"])
    for name in draw(st.lists(options, max_size=2)) if draw(st.integers(0, 3)) == 0 else ():
        call.loss_fn_config_v2[name].number = draw(st.floats())
    return call


@st.composite
def mutations(draw: st.DrawFn, model: str) -> bytes:
    """The bytes of a message with some changed, removed or inserted."""
    raw = bytearray(draw(calls(model)).SerializeToString())
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(raw)))
        raw[place : place + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(raw[: draw(st.integers(0, len(raw)))] if draw(st.booleans()) else raw)


@amounts
def test_fuzzed_protobuf_bodies_never_crash_the_server(target: Target, amount: int) -> None:
    @fuzz(60 * amount, calls(target.model_id))
    def valid(call: pb.ForwardBackwardRequest) -> None:
        target.try_request("POST", "/forward_backward", call.SerializeToString(), headers=PROTOBUF)

    target.work()

    @fuzz(60 * amount, mutations(target.model_id))
    def mutated(body: bytes) -> None:
        target.try_request("POST", "/forward_backward", body, headers=PROTOBUF)

    target.work()
    failed = target.context.store.find(requests, requests.c.state == "failed", limit=100_000)
    assert all(json.loads(row.result)["category"] == "user" for row in failed), [row.result for row in failed][:3]
    assert target.context.store.count(requests, requests.c.state == "done", requests.c.kind.like("forward%"))
    assert target.is_alive()


# -- headers and addresses ---------------------------------------------------------------------------------------------

LIES = {
    "Content-Encoding": ["zstd", "gzip", "br", "zstd, gzip", "identity", "\x7f", "deflate" * 50],
    "Content-Type": [
        "application/x-protobuf",
        "text/plain",
        "multipart/form-data",
        "multipart/form-data; boundary=",
        ";",
    ],
    "Content-Length": ["0", "1", "999999999999999999", "-1", "x"],
    "Accept": ["application/x-protobuf", "text/html;q=nonsense", ""],
    "X-Idempotency-Key": ["x" * 5000, "", "\t"],
    "Authorization": ["Bearer", "Bearer x.y.z", "Basic !!!"],
    "Range": ["bytes=0-", "bytes=9-1,x"],
    "Host": ["", "evil.example", "[::1"],
    "X-Forwarded-Prefix": ["//evil.example"],
}


@amounts
def test_false_headers_never_crash_the_server(target: Target, amount: int) -> None:
    posts = [path for path, route in routes() if "POST" in route.methods]
    lies = st.lists(st.sampled_from([(k, v) for k, values in LIES.items() for v in values]), min_size=1, max_size=3)
    bodies = st.one_of(st.binary(max_size=40), st.sampled_from([b"{}", b"[]", zstandard.compress(b"{}")]))

    @fuzz(50 * amount, st.sampled_from(posts), lies, bodies)
    def send(path: str, headers: list[tuple[str, str]], body: bytes) -> None:
        target.try_request("POST", re.sub(r"\{.*?\}", "x", path), body, headers=dict(headers))

    assert target.is_alive()


TRICKS = [
    "..",
    "%2e%2e",
    "%2e%2e%2fetc",
    "a%00b",
    "%ff",
    "x" * 5000,
    "tinker:",
    "%0d%0aX-A:%20b",
    "'%20or%201=1",
    "~",
    "%25",
    "é",
]


@amounts
def test_malicious_paths_never_crash_the_server(target: Target, amount: int) -> None:
    before = sorted(path.name for path in target.context.weight_store.root.iterdir())
    found = [(path, route) for path, route in routes() if "{" in path]
    parts = st.one_of(st.sampled_from(TRICKS), st.sampled_from([target.model_id, "weights", "whole", "archive"]))

    @fuzz(60 * amount, st.sampled_from(found), st.lists(parts, min_size=5, max_size=5))
    def send(route: tuple[str, APIRoute], values: list[str]) -> None:
        path = re.sub(r"\{.*?\}", lambda _: values.pop(), route[0])
        target.try_request(min(route[1].methods), path, b"{}", of="bob")

    assert sorted(path.name for path in target.context.weight_store.root.iterdir()) == before
    assert target.is_alive()


# -- bombs -------------------------------------------------------------------------------------------------------------


def sparse(rows: int, columns: int) -> bytes:
    call = pb.ForwardBackwardRequest(model_id="{model}", loss_fn="cross_entropy")
    for _ in range(50):
        datum = call.data.add()
        datum.model_input.add().encoded_text.tokens = np.zeros(4, np.int32).tobytes()
        tensor = pb.Tensor(dtype=pb.DTYPE_INT64, shape=[rows, columns])
        tensor.sparse_csr.crow_indices = np.zeros(min(rows, 9) + 1, np.int64).tobytes()
        datum.loss_fn_inputs["target_tokens"].CopyFrom(tensor)
    return call.SerializeToString()


# functions, since the bodies take a second and a gigabyte to make
BOMBS: dict[str, Callable[[], tuple[str, bytes, dict[str, str]]]] = {
    "zstd": lambda: ("create_session", zstandard.compress(b" " * 2**30), {"Content-Encoding": "zstd"}),
    "deep": lambda: ("create_session", b'{"user_metadata":' + b'{"a":' * 300_000, {}),
    "deep list": lambda: ("asample", b"[" * 1_000_000, {}),
    "tags": lambda: ("create_session", json.dumps({"tags": ["a"] * 10**5 * 3}).encode(), {}),
    "keys": lambda: ("create_session", json.dumps({"user_metadata": {f"{i}": 0 for i in range(10**5)}}).encode(), {}),
    "csr": lambda: ("forward_backward", sparse(4, 2**31 - 1), PROTOBUF),
    "csr rows": lambda: ("forward_backward", sparse(2**31 - 1, 2**31 - 1), PROTOBUF),
    "csr many": lambda: ("forward_backward", sparse(4, 2**21), PROTOBUF),
    "big number": lambda: ("optim_step", b'{"seq_id": ' + b"9" * 500_000 + b"}", {}),
    "long id": lambda: ("get_info", json.dumps({"model_id": "x" * 1_900_000}).encode(), {}),
    "wide vocabulary": lambda: (
        "asample",
        json.dumps({"prompt": {"chunks": [{"tokens": [0] * 600_000}]}}).encode(),
        {},
    ),
}


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.few(2)
def test_decompression_bombs_cost_little_time(target: Target, name: str) -> None:
    verb, body, headers = BOMBS[name]()
    began = time.monotonic()
    tracemalloc.start()
    reply = target.try_request("POST", f"/{verb}", body, headers=headers)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 400 <= reply.status_code < 500
    assert peak < 250 * 2**20
    assert time.monotonic() - began < 30


def absurd(**changes: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "base_model": "tiny", "sampling_params": {}, **changes}


@pytest.mark.parametrize(
    ("verb", "body"),
    [
        ("asample", absurd(num_samples=10**9)),
        ("asample", absurd(sampling_params={"max_tokens": 10**9})),
        ("asample", absurd(sampling_params={"max_tokens": 511})),
        ("asample", absurd(sampling_params={"temperature": -1})),
        ("asample", absurd(sampling_params={"stop": ["x" * 100_000]})),
        ("asample", absurd(prompt={"chunks": []})),
        ("asample", absurd(prompt={"chunks": [{"tokens": [272]}]})),
        ("asample", absurd(prompt={"chunks": [{"tokens": [-1]}]})),
        ("asample", absurd(topk_prompt_logprobs=10**6)),
        (
            "create_model",
            {"session_id": "mine", "model_seq_id": 5, "base_model": "tiny", "lora_config": {"rank": 10**6}},
        ),
        ("create_model", {"session_id": "mine", "model_seq_id": 5, "base_model": "tiny", "lora_config": {"rank": 0}}),
        ("create_model", {"session_id": "mine", "model_seq_id": 2**40, "base_model": "tiny"}),
        ("optim_step", {"model_id": "mine:train:0", "adam_params": {"learning_rate": -1}}),
        ("optim_step", {"model_id": "mine:train:0", "adam_params": {"beta1": 1}}),
        ("optim_step", {"model_id": "mine:train:0", "adam_params": {"eps": 0}}),
        ("save_weights", {"model_id": "mine:train:0", "path": "../x"}),
        ("save_weights", {"model_id": "mine:train:0", "path": "x", "ttl_seconds": 0}),
        ("load_weights", {"model_id": "mine:train:0", "path": "tinker://mine:train:0/weights/../x", "optimizer": True}),
    ],
)
def test_nonsensical_bodies_get_4xx(target: Target, verb: str, body: dict[str, Any]) -> None:
    assert 400 <= target.try_request("POST", f"/{verb}", body).status_code < 500


# -- resources of other owners -----------------------------------------------------------------------------------------


def bodies(target: Target) -> dict[str, dict[str, Any]]:
    """For every route that reads a body, one that is valid if ada sends it."""
    inputs = {"target_tokens": {"data": [6], "dtype": "int64"}, "weights": {"data": [1.0], "dtype": "float32"}}
    data = {
        "data": [{"model_input": {"chunks": [{"tokens": [5]}]}, "loss_fn_inputs": inputs}],
        "loss_fn": "cross_entropy",
    }
    model, whole, bare = {"model_id": target.model_id}, target.path("whole"), target.path("bare")
    prompts = {"student_input": PROMPT, "reference_input": PROMPT, **inputs}
    adam = {"learning_rate": 0.1}
    return {
        "session_heartbeat": {"session_id": "mine"},
        "sessions/{id}/finish": {},
        "retrieve_future": {"request_id": target.request_id},
        "cancel_future": {"request_id": target.request_id},
        "retrieve_futures": {"target": {"sampling_session_id": target.sampler_id}},
        "create_model": {
            "session_id": "mine",
            "model_seq_id": 0,
            "base_model": "tiny",
            "lora_config": {"rank": 2, "seed": 1},
        },
        "get_info": model,
        "unload_model": model,
        "forward": {**model, "forward_input": data},
        "forward_backward": {**model, "forward_backward_input": data},
        "train_step": {**model, "forward_backward_input": data, "adam_params": adam},
        "optim_step": {**model, "adam_params": adam},
        "save_weights": {**model, "path": "whole"},
        "save_weights_for_sampler": {**model, "sampling_session_seq_id": 1},
        "save_weights_external": {**model, "path": "out"},
        "external_weights_upload_finish": {"upload_id": target.upload_id},
        "load_weights": {**model, "path": whole, "optimizer": True},
        "weights_info": {"tinker_path": whole},
        "copy_weights": {"source_path": whole},
        "create_sampling_session": {"session_id": "mine", "sampling_session_seq_id": 0, "model_path": bare},
        "join_sampling_session": {"sampling_session_id": target.sampler_id},
        "asample": {"sampling_session_id": target.sampler_id, "prompt": PROMPT},
        "mint/forward_backward_reverse_kl": {**model, "reference_model_path": bare, "data": [prompts]},
        "mint/checkpoints/interpolate": {"source_paths": [bare], "coefficients": [1.0], "output_path": bare},
        "training_runs/{run}/checkpoints/{kind}/{name}/ttl": {"ttl_seconds": 1},
        "completions": {"model": bare, "prompt": "x", "max_tokens": 1},
        "chat/completions": {"model": bare, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    }


OPEN = {"healthz", "client/config", "client/dynamic_config", "auth/token", "telemetry", "get_server_capabilities"}
OWN = {  # the caller's own
    "checkpoints",
    "checkpoints/search",
    "checkpoints/upload",
    "create_session",
    "external_weights_upload_start",
    "models",
    "sessions",
    "training_runs",
}


def test_owners_cannot_read_or_change_others_resources(target: Target) -> None:
    """Every route, with ids of ada, called by bob and without a key."""
    ids = {"run": target.model_id, "kind": "weights", "name": "whole", "file": "adapter_model.safetensors"}
    given, before, asked = bodies(target), stored_state(target), 0
    for whole, route in routes():
        name = re.sub("^/(oai/)?api/v1/", "", whole)
        owned = {"samplers/{id}": target.sampler_id, "sessions/{id}": "mine", "sessions/{id}/finish": "mine"}
        owned["uploads/{id}/{file}"] = target.upload_id
        path = whole.format(**ids, id=owned.get(name, target.model_id))
        assert name in given or "POST" not in route.methods or name in OPEN | OWN or "{" in name, (
            f"{name}: say its body"
        )
        for method in route.methods:
            query = "?expires=99999999999&signature=x" if name.startswith(("downloads", "uploads")) else ""
            if name not in OPEN:
                keyless = target.try_request(method, path + query, given.get(name), of="nobody")
                assert keyless.status_code in (401, 403), (method, path, keyless.text)
            if name not in OPEN | OWN:
                reply = target.try_request(method, path + query, given.get(name), of="bob")
                if name == "cancel_future":
                    assert reply.json() == {"cancelled": False}
                    continue
                assert 400 <= reply.status_code < 500, (method, path, reply.text)
                assert "adapter" not in reply.text
                asked += 1
            elif method == "GET":
                assert "mine" not in target.try_request(method, path, None, of="bob").text
    target.work()
    assert stored_state(target) == before
    assert asked > 35


def stored_state(target: Target) -> list[Any]:
    store = target.context.store
    rows = [tuple(row) for table in TABLES for row in store.find(table, table.c.owner == "ada", limit=10_000)]
    weights = [w.tolist() for w in target.worker.live_models.get(target.model_id).trainer.parameters]
    return [sorted(rows, key=str), store.count(requests, requests.c.owner == "ada"), weights]


@pytest.mark.slow
def test_the_owner_may_send_the_same_requests(target: Target) -> None:
    """Otherwise the test above would prove nothing."""
    for name, body in bodies(target).items():
        if "{" in name or name in ("unload_model", "train_step", "external_weights_upload_finish"):
            continue
        prefix = "/oai/api/v1" if "completions" in name else ""
        if prefix:
            continue  # they wait for their answer
        reply = target.try_request("POST", f"{prefix}/{name}", body)
        assert reply.status_code == 200, (name, reply.text)
        target.work()
    assert target.is_alive()


def test_resources_of_an_unserved_base_get_an_answer(target: Target) -> None:
    known, target.context.bases = target.context.bases, {}
    try:
        for name, body in bodies(target).items():
            target.try_request("POST", f"{'/oai/api/v1' if 'completions' in name else ''}/{name}", body)
        for path in (
            "/training_runs",
            "/checkpoints",
            f"/training_runs/{target.model_id}",
            f"/samplers/{target.sampler_id}",
        ):
            target.try_request("GET", path)
    finally:
        target.context.bases = known
