"""Routes: queued requests, answers, and refusals. The tests take the worker's place."""

import asyncio
import gzip
import json
import time
from typing import Any

import pytest
import zstandard
from helpers.fronts import Front

from palestra.service.server.deps import decompress_body
from palestra.service.server.owner import Owner, QueueCounts
from palestra.service.server.state import ServiceContext
from palestra.service.storage.store import StoredAnswer
from palestra.service.storage.tables import models, samplers
from palestra.service.wire import codec
from palestra.service.wire import wire_pb2 as pb
from palestra.service.wire.jobs import LoadJob, SampleJob, SaveJob, TrainJob
from palestra.service.wire.schemas.requests import LoraConfig
from palestra.service.wire.schemas.wire_model import BadRequest

PROMPT = {"chunks": [{"tokens": [5, 6]}, {"tokens": [7]}]}


def gradients(model: str, seq: int | None = 1, **changes: Any) -> dict[str, Any]:
    inputs = {"target_tokens": {"data": [6, 7], "dtype": "int64"}, "weights": {"data": [1, 1], "dtype": "float32"}}
    data = [{"model_input": {"chunks": [{"tokens": [5, 6]}]}, "loss_fn_inputs": inputs}]
    given = {"data": data, "loss_fn": "cross_entropy", **changes}
    return {"forward_backward_input": given, "model_id": model, "seq_id": seq}


def sampler(front: Front, **given: Any) -> str:
    body = {"session_id": "mine", "sampling_session_seq_id": 0, "base_model": "tiny", **given}
    return str(front.post("/create_sampling_session", body).json()["sampling_session_id"])


# -- bodies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[1]",
        b"null",
        b'{"session_id": 1}',
        b'{"session_id": "a/b"}',
        b'{"session_id": "\\ud800"}',
        b'{"session_id": "x", "model_seq_id": %d}' % 10**40,
        b'{"a":' * 20_000,
        b"[" * 100_000,
        b'{"model_id": "x", "seq_id": 1e400}',
    ],
)
@pytest.mark.parametrize("path", ["create_model", "forward_backward", "optim_step", "load_weights", "asample"])
@pytest.mark.few(20)
def test_malformed_bodies_get_an_explained_4xx(front: Front, path: str, body: bytes) -> None:
    reply = front.post(f"/{path}", body)
    assert 400 <= reply.status_code < 500
    assert reply.json()["detail"]


def test_refusals_name_the_field(front: Front) -> None:
    reply = front.post("/create_model", {"session_id": "s", "model_seq_id": 0, "base_model": "tiny", "lora_config": 3})
    assert reply.status_code == 400
    assert "lora_config" in reply.json()["detail"]
    assert "limit" in front.get("/sessions?limit=-1").json()["detail"]


def test_an_input_that_no_loss_reads_is_refused_where_it_would_be_learned(front: Front) -> None:
    """Inputs of another loss pass, and a forward pass has any, for a loss of the client's own."""
    body = gradients(front.model())
    inputs = body["forward_backward_input"]["data"][0]["loss_fn_inputs"]
    inputs["advantages"] = {"data": [1, 1], "dtype": "float32"}
    assert front.post("/forward_backward", body).status_code == 200
    inputs["weigths"] = {"data": [0, 1], "dtype": "float32"}
    reply = front.post("/forward_backward", body | {"seq_id": 2})
    assert reply.status_code == 400 and "loss_fn_inputs.weigths is read by no loss" in reply.json()["detail"]
    given = body["forward_backward_input"]
    assert (
        front.post("/forward", {"model_id": body["model_id"], "seq_id": 3, "forward_input": given}).status_code == 200
    )


@pytest.mark.parametrize("pack", [zstandard.compress, gzip.compress])
def test_compressed_bodies_are_decompressed_up_to_the_limit(front: Front, pack: Any) -> None:
    headers = {"Content-Encoding": "zstd" if pack is zstandard.compress else "gzip"}
    assert front.post("/create_session", pack(b'{"tags": []}'), headers=headers).status_code == 200
    bomb = pack(b'{"tags": ["' + b"a" * 10_000_000 + b'"]}')
    assert len(bomb) < front.context.limits.body
    assert front.post("/create_session", bomb, headers=headers).status_code == 413
    assert front.post("/create_session", b"not packed", headers=headers).status_code == 400


def test_bodies_over_the_limit_are_refused(front: Front) -> None:
    assert front.post("/create_session", b" " * 200_001).status_code == 413


def test_unknown_content_encoding_is_refused() -> None:
    with pytest.raises(BadRequest, match="zstd, gzip or none"):
        decompress_body(b"", "br", 10)


def test_unknown_paths_are_named_in_the_404(front: Front) -> None:
    reply = front.get("/billing/usage/events")
    assert reply.status_code == 404
    assert "/billing/usage/events" in reply.json()["detail"]


def test_root_path_works_with_and_without_a_stripping_proxy(context: ServiceContext) -> None:
    front = Front(context, root_path="/train/")
    for path in ("/train/api/v1/healthz", "/api/v1/healthz"):
        assert front.get(path).json() == {"status": "ok"}
    model = front.model()
    front.weights(model)
    where = front.get(f"/api/v1/training_runs/{model}/checkpoints/weights/one/archive").headers["location"]
    assert where.startswith("http://palestra.test/train/api/v1/downloads/")
    assert front.get(where).status_code == 200


def test_openapi_lists_the_request_bodies(front: Front) -> None:
    schema = front.get("/openapi.json").json()
    body = schema["paths"]["/api/v1/create_model"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/CreateModelRequest"}
    assert "LoraConfig" in schema["components"]["schemas"]


# -- access control ----------------------------------------------------------------------------------------------------


def test_every_route_but_health_and_version_needs_a_key(shared: Front) -> None:
    free = {"/healthz", "/client/config", "/client/dynamic_config"}
    free |= {"/downloads/{run}/{kind}/{name}/{file}", "/uploads/{id}/{file}"}  # with a signature
    for path, methods in shared.get("/openapi.json").json()["paths"].items():
        for method in methods:
            if path.removeprefix("/api/v1") not in free:
                assert shared.ask(method.upper(), path.replace("{", "").replace("}", "")).status_code == 401, path


def test_client_config_selects_a_transport_without_redirects(front: Front) -> None:
    """0.22 reads an archive's address from a redirect, which its default transport would follow."""
    for version, pyqwest in (("0.22.0", False), ("0.38.0", True), ("", True)):
        config = front.post("/client/config", {}, headers={"X-Stainless-Package-Version": version}).json()
        assert config["use_pyqwest_transport"] is pyqwest


def test_unserved_routes_are_named_in_the_refusal(front: Front) -> None:
    for path in ("/sessions/lost", "/nowhere"):
        reply = front.post(path, {})
        assert reply.status_code in (404, 405)
        assert f"this server has no POST /api/v1{path}" in reply.json()["detail"]


def test_mint_key_is_exchanged_for_a_token(shared: Front) -> None:
    assert shared.post("/client/config", {}, headers={"X-API-Key": "sk-1"}).json()["pjwt_auth_enabled"] is True
    assert shared.post("/client/config", {}, of="ada").json()["pjwt_auth_enabled"] is False
    shared.keys["token"] = shared.post("/auth/token", {}, of="ada").json()["jwt"]
    session = shared.post("/create_session", {}, of="token").json()["session_id"]
    assert shared.get("/sessions", of="ada").json()["sessions"] == [session]


def test_resources_of_other_owners_are_not_found(shared: Front) -> None:
    model = shared.model("hers", of="ada")
    path = shared.weights(model, of="ada")
    sampler = {"session_id": "hers", "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampled = shared.post("/create_sampling_session", sampler, of="ada").json()["sampling_session_id"]
    one = f"/training_runs/{model}/checkpoints/weights/one"
    sample = {"prompt": PROMPT, "sampling_session_id": sampled}
    load = {"model_id": model, "path": path, "optimizer": True}
    tries: list[tuple[str, str, Any]] = [
        ("POST", "/session_heartbeat", {"session_id": "hers"}),
        ("POST", "/create_model", {"session_id": "hers", "model_seq_id": 1, "base_model": "tiny"}),
        ("POST", "/create_sampling_session", {**sampler, "sampling_session_seq_id": 1}),
        ("POST", "/create_sampling_session", {**sampler, "session_id": "his", "base_model": None, "model_path": path}),
        ("POST", "/get_info", {"model_id": model}),
        ("POST", "/unload_model", {"model_id": model}),
        ("POST", "/forward_backward", gradients(model)),
        ("POST", "/optim_step", {"model_id": model, "adam_params": {}, "seq_id": 1}),
        ("POST", "/save_weights", {"model_id": model, "path": "x", "seq_id": 1}),
        ("POST", "/save_weights_for_sampler", {"model_id": model, "path": "x", "seq_id": 1}),
        ("POST", "/load_weights", load),
        ("POST", "/load_weights", {**load, "model_id": None, "session_id": "his", "model_seq_id": 0}),
        ("POST", "/asample", sample),
        ("POST", "/weights_info", {"tinker_path": path}),
        ("POST", "/copy_weights", {"source_path": path}),
        ("POST", "/mint/checkpoints/interpolate", {"source_paths": [path], "coefficients": [1.0]}),
        ("GET", f"/samplers/{sampled}", None),
        ("GET", f"/training_runs/{model}", None),
        ("GET", f"/training_runs/{model}/checkpoints", None),
        ("GET", f"{one}/archive", None),
        ("GET", f"{one}/external_weights_urls", None),
        ("DELETE", one, None),
        ("POST", f"{one}/publish", None),
        ("DELETE", f"{one}/publish", None),
        ("PUT", f"{one}/ttl", {"ttl_seconds": 10}),
        ("DELETE", f"/models/{model}", None),
        ("GET", "/sessions/hers", None),
        ("POST", "/sessions/hers/finish", {"reason": {"type": "success"}, "detail": ""}),
    ]
    for method, where, body in tries:
        reply = shared.ask(method, where, body, of="bob")
        assert reply.status_code == 404, (method, where, reply.text)
    assert shared.context.store.take_queued() == []
    for where, found in (
        ("/sessions", "sessions"),
        ("/training_runs", "training_runs"),
        ("/checkpoints", "checkpoints"),
    ):
        assert [x for x in shared.get(where, of="bob").json()[found] if x != "his"] == []


def test_requests_of_other_owners_get_no_result(shared: Front) -> None:
    model = shared.model(of="ada")
    id = shared.post("/forward_backward", gradients(model), of="ada").json()["request_id"]
    assert shared.post("/retrieve_future", {"request_id": id}, of="bob").status_code == 410
    assert shared.post("/retrieve_future", {"request_id": id}, of="ada").status_code == 408


def test_refused_requests_for_other_owners_models_use_no_sequence_number(shared: Front) -> None:
    model = shared.model(of="ada")
    assert shared.post("/forward_backward", gradients(model, loss_fn="no"), of="bob").status_code == 404
    assert shared.post("/forward_backward", {"model_id": model, "seq_id": 1}, of="bob").status_code == 400
    assert shared.context.store.take_queued() == []


def test_published_weights_are_readable_by_all_and_writable_by_the_owner(shared: Front) -> None:
    model = shared.model(of="ada")
    path = shared.weights(model, of="ada")
    one = f"/training_runs/{model}/checkpoints/weights/one"
    assert shared.post(f"{one}/publish", of="ada").status_code == 204
    assert shared.post("/weights_info", {"tinker_path": path}, of="bob").json()["lora_rank"] == 4
    assert shared.ask("DELETE", one, of="bob").status_code == 404
    copied = shared.post("/copy_weights", {"source_path": path}, of="bob").json()["tinker_path"]
    assert shared.ask("DELETE", f"{one}/publish", of="ada").status_code == 204
    assert shared.post("/weights_info", {"tinker_path": path}, of="bob").status_code == 404
    assert shared.post("/weights_info", {"tinker_path": copied}, of="bob").status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "tinker://../../etc/weights/x",
        "tinker://m/weights/..",
        "tinker://m/weights/a/b",
        "tinker://m/secrets/x",
        "file:///etc/passwd",
        "tinker://m/weights/%2e%2e",
        "tinker://m//weights/x",
    ],
)
def test_path_traversal_is_refused(front: Front, path: str) -> None:
    for where, body in (("/weights_info", {"tinker_path": path}), ("/copy_weights", {"source_path": path})):
        assert front.post(where, body).status_code == 400
    model = front.model()
    save = {"model_id": model, "path": path, "seq_id": 1}
    assert front.post("/save_weights", save).status_code == 400
    mix = {"source_paths": [front.weights(model)], "coefficients": [1], "output_path": path}
    assert front.post("/mint/checkpoints/interpolate", mix).status_code in (400, 404)


# -- models ------------------------------------------------------------------------------------------------------------


def test_model_is_created_with_the_requested_config(front: Front) -> None:
    body = {"session_id": "a.b-c", "model_seq_id": 2, "base_model": "Qwen/Qwen3-0.6B", "user_metadata": {"n": 1}}
    body["lora_config"] = {"rank": 3, "seed": 7, "train_mlp": False}
    first, again = front.post("/create_model", body).json(), front.post("/create_model", body).json()
    assert first == again
    row = front.context.store.get(models, "a.b-c:train:2")
    assert row is not None
    assert row.base == "tiny"
    assert LoraConfig.model_validate(row.lora) == LoraConfig(rank=3, seed=7, train_mlp=False)
    request = front.take()
    assert (request.kind, request.model, request.seq) == ("create_model", "a.b-c:train:2", 0)
    info = front.post("/get_info", {"model_id": row.id}).json()
    assert info["model_data"]["model_name"] == "Qwen/Qwen3-0.6B"
    assert info["model_data"]["tokenizer_id"].startswith("/")
    assert front.get(f"/training_runs/{row.id}").json()["user_metadata"] == {"n": "1"}
    body["lora_config"]["rank"] = 4
    assert front.post("/create_model", body).status_code == 400


def test_models_per_key_are_limited(front: Front) -> None:
    made = [front.model("mine", number) for number in range(3)]
    body = {"session_id": "mine", "model_seq_id": 3, "base_model": "tiny"}
    assert "unload" in front.post("/create_model", body).json()["detail"]
    front.context.store.update(models, made[0], state="gone")
    assert front.post("/create_model", body).status_code == 200
    assert front.post("/get_info", {"model_id": made[0]}).status_code == 404


def test_model_can_start_from_a_checkpoint(front: Front) -> None:
    path = front.weights(front.model())
    body = {"session_id": "mine", "model_seq_id": 5, "path": path, "optimizer": True}
    reply = front.post("/load_weights", body).json()
    assert reply["model_id"] == "mine:train:5"
    request = front.take()
    assert (request.kind, request.seq) == ("load", 0)
    assert LoadJob.model_validate_json(request.body).optimizer is True
    row = front.context.store.get(models, "mine:train:5")
    assert row is not None and row.lora["rank"] == 4
    assert front.post("/load_weights", {**body, "model_seq_id": 6, "base_model": "other"}).status_code == 400


def test_weights_of_another_shape_are_refused(front: Front) -> None:
    path = front.weights(front.model())
    other = front.model(number=1, rank=8)
    reply = front.post("/load_weights", {"model_id": other, "seq_id": 1, "path": path, "optimizer": False})
    assert reply.status_code == 400
    assert "rank 4, not 8" in reply.json()["detail"]


def test_forward_backward_is_queued_alike_from_any_encoding(front: Front) -> None:
    model = front.model()
    front.post("/forward_backward", gradients(model))
    row = front.take()
    assert (row.kind, row.model, row.seq, row.key) == ("forward_backward", model, 1, f"model:{model}:1")
    job = TrainJob.from_bytes(row.body)
    assert job.data[0].targets.tolist() == [6, 7]
    call = pb.ForwardBackwardRequest(model_id=model, loss_fn=job.loss, seq_id=2, forward_only=True)
    headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": "zstd"}
    reply = front.post("/forward_backward", zstandard.compress(codec.encode_data(call, job.data)), headers=headers)
    assert reply.status_code == 200, reply.text
    row = front.take()
    assert (row.kind, row.seq) == ("forward", 2)
    assert TrainJob.from_bytes(row.body).data[0].targets.tolist() == [6, 7]
    body = gradients(model, 3)
    body["forward_input"] = body.pop("forward_backward_input")
    assert front.post("/forward", body).status_code == 200
    assert front.take().kind == "forward"


def test_repeated_sequence_number_is_the_same_request(front: Front) -> None:
    model = front.model()
    first, again = (front.post("/forward_backward", gradients(model)).json() for _ in range(2))
    assert first["request_id"] == again["request_id"]
    assert front.post("/forward_backward", gradients(model, 2)).json() != first
    unnumbered = [front.post("/forward_backward", gradients(model, seq)).json()["request_id"] for seq in (None, 0, 0)]
    assert len(set(unnumbered)) == 3


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("forward_backward", {"forward_backward_input": {"data": [], "loss_fn": "cross_entropy"}}),
        ("forward_backward", {"forward_backward_input": "nonsense"}),
        ("optim_step", {"adam_params": {"learning_rate": -1}}),
        ("save_weights", {"path": "../x"}),
        ("save_weights_for_sampler", {"sampling_session_seq_id": 0, "kind": "inflight"}),
        ("load_weights", {"path": "tinker://no/weights/x", "optimizer": True}),
        ("mint/forward_backward_reverse_kl", {}),
    ],
)
def test_refused_sequence_number_is_recorded_as_failed(front: Front, path: str, body: dict[str, Any]) -> None:
    model = front.model()
    reply = front.post(f"/{path}", {**body, "model_id": model, "seq_id": 1})
    assert reply.status_code in (400, 404)
    row = front.take()
    assert (row.model, row.seq) == (model, 1)
    assert json.loads(row.result)["error"] == reply.json()["detail"]


def test_refused_protobuf_body_is_recorded_as_failed(front: Front) -> None:
    model = front.model()
    call = pb.ForwardBackwardRequest(model_id=model, seq_id=4, loss_fn="nonsense")
    headers = {"Content-Type": "application/x-protobuf"}
    assert front.post("/forward_backward", call.SerializeToString(), headers=headers).status_code == 400
    assert front.take().seq == 4
    assert front.post("/forward_backward", b"\xff\xff", headers=headers).status_code == 400


def test_full_queue_sends_retry_after_and_uses_no_sequence_number(front: Front) -> None:
    model = front.model()
    front.context.limits.queue = 3  # one is the model's creation, which is counted for another second
    replies = [front.post("/forward_backward", gradients(model, seq)) for seq in (1, 2, 3)]
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    assert replies[2].headers["Retry-After"]
    assert [row.seq for row in front.context.store.take_queued()] == [1, 2]


def test_queue_is_limited_in_bytes(front: Front) -> None:
    model = front.model()
    front.context.limits.queue_bytes = 1
    assert front.post("/forward_backward", gradients(model, 1)).status_code == 429  # the creation is still counted
    front.app.state.queue = QueueCounts(front.context)
    # a single request may be of any size
    assert front.post("/forward_backward", gradients(model, 1)).status_code == 200
    reply = front.post("/forward_backward", gradients(model, 2))
    assert reply.status_code == 429 and reply.headers["Retry-After"]
    assert "1 of your requests (0.0 MiB) wait" in reply.json()["detail"]
    assert [row.seq for row in front.context.store.take_queued()] == [1]


def test_queue_depth_is_recounted_after_a_second(context: ServiceContext, monkeypatch: pytest.MonkeyPatch) -> None:
    ada, now = Owner("ada", context, QueueCounts(context)), [100.0]
    monkeypatch.setattr("palestra.service.server.owner.time.monotonic", lambda: now[0])
    id = ada.submit("sample", b"{}")
    context.store.write_answers([StoredAnswer.json(id)])
    assert ada.depth().num_requests == 1
    now[0] += 2
    assert ada.depth().num_requests == 0


# -- weights -----------------------------------------------------------------------------------------------------------


def test_save_requests_are_queued_with_path_and_kind(front: Front) -> None:
    model = front.model()
    saves: list[tuple[str, dict[str, Any]]] = [
        ("save_weights", {"path": "a", "ttl_seconds": 60, "overwrite": False, "user_metadata": {"x": "y"}}),
        ("save_weights", {"path": "a"}),
        ("save_weights_for_sampler", {"path": "b"}),
        ("save_weights_for_sampler", {"sampling_session_seq_id": 9}),
        ("save_weights_external", {"path": "c"}),
    ]
    for seq, (path, body) in enumerate(saves, start=1):
        reply = front.post(f"/{path}", {"model_id": model, "seq_id": seq, **body})
        assert reply.status_code == 200, reply.text
    jobs = [SaveJob.model_validate_json(row.body) for row in front.context.store.take_queued()]
    assert [job.path and job.path.removeprefix(f"tinker://{model}/") for job in jobs] == [
        "weights/a",
        "weights/a",
        "sampler_weights/b",
        None,
        "external_weights/c",
    ]
    assert [job.overwrite for job in jobs[:2]] == [False, None]
    assert (jobs[0].ttl_seconds, jobs[0].info["user_metadata"]) == (60, {"x": "y"})
    assert jobs[3].sampler == "mine:sample:9"


def test_checkpoints_are_listed_expired_and_deleted(front: Front) -> None:
    model = front.model()
    front.weights(model)
    front.weights(model, "two", "sampler")
    run = front.get(f"/training_runs/{model}").json()
    assert run["last_checkpoint"]["checkpoint_id"] == "weights/one"
    assert run["last_sampler_checkpoint"]["checkpoint_type"] == "sampler"
    assert front.get("/checkpoints?limit=1").json()["cursor"] == {"offset": 0, "limit": 1, "total_count": 2}
    one = f"/training_runs/{model}/checkpoints/weights/one"
    assert front.ask("PUT", f"{one}/ttl", {"ttl_seconds": 3600}).status_code == 204
    shown = {c["checkpoint_id"]: c for c in front.get(f"/training_runs/{model}/checkpoints").json()["checkpoints"]}
    assert shown["weights/one"]["expires_at"] and shown["sampler_weights/two"]["expires_at"] is None
    assert front.ask("DELETE", one).status_code == 204
    assert front.ask("DELETE", one).status_code == 404


BARE = [("DELETE", ""), ("GET", "/archive"), ("POST", "/publish"), ("PUT", "/ttl")]


@pytest.mark.parametrize(("method", "verb"), BARE)
def test_checkpoint_id_without_kind_is_refused_with_the_fix(front: Front, method: str, verb: str) -> None:
    model = front.model()
    front.weights(model)
    reply = front.ask(method, f"/training_runs/{model}/checkpoints/one{verb}")
    assert reply.status_code == 400 and 'say "weights/one" or "sampler_weights/one"' in reply.json()["detail"]


def test_repeated_copy_request_makes_one_copy(front: Front) -> None:
    path = front.weights(front.model())
    headers = {"X-Idempotency-Key": "k"}
    paths = {front.post("/copy_weights", {"source_path": path}, headers=headers).json()["tinker_path"] for _ in "ab"}
    assert len(paths) == 1
    assert front.post("/copy_weights", {"source_path": path}).json()["tinker_path"] not in paths


# -- samples -----------------------------------------------------------------------------------------------------------


def test_sampling_request_is_queued_with_resolved_names(front: Front) -> None:
    model = front.model()
    path = front.weights(model, kind="sampler")
    id = sampler(front, model_path=path)
    params = {"max_tokens": 5, "seed": 3, "stop": [4], "temperature": 0.5, "top_k": -1, "top_p": 0.9}
    body = {"prompt": PROMPT, "num_samples": 2, "sampling_params": params, "sampling_session_id": id, "seq_id": 10**15}
    first, again = front.post("/asample", body).json(), front.post("/asample", body).json()
    assert first == again
    assert len(first["sample_sequence_ids"]) == 2
    row = front.take()
    job = SampleJob.model_validate_json(row.body)
    assert (row.key, job.base, job.tokens, job.num_samples, job.seed) == (
        f"sampler:{id}:{10**15}",
        "tiny",
        [5, 6, 7],
        2,
        3,
    )
    assert job.folder is not None
    assert job.sampling.model_dump(include={"max_tokens", "temperature", "top_k", "top_p"}) == {
        "max_tokens": 5,
        "temperature": 0.5,
        "top_k": 0,
        "top_p": 0.9,
    }
    assert front.get(f"/samplers/{id}").json()["model_path"] == path


@pytest.mark.parametrize(
    ("seed", "drawn"), [(2**63, 2**63), (2**64 - 1, 2**64 - 1), (-1, 2**64 - 1), (-(2**63), 2**63)]
)
def test_seeds_of_64_bits_are_accepted_exactly(front: Front, seed: int, drawn: int) -> None:
    """As in the sampler, which takes them modulo 2**64."""
    body = {"prompt": PROMPT, "num_samples": 1, "base_model": "tiny"}
    assert front.post("/asample", {**body, "sampling_params": {"seed": seed}}).status_code == 200
    assert SampleJob.model_validate_json(front.take().body).seed == drawn
    reply = front.post("/asample", {**body, "sampling_params": {"seed": 2**64}})
    assert reply.status_code == 400 and "seed" in reply.json()["detail"]


def test_topk_prompt_logprobs_include_prompt_logprobs(front: Front) -> None:
    front.post("/asample", {"prompt": PROMPT, "base_model": "tiny", "topk_prompt_logprobs": 2})
    assert SampleJob.model_validate_json(front.take().body).prompt_logprobs


@pytest.mark.parametrize(
    "given",
    [
        {"num_samples": 4096, "sampling_params": {"max_tokens": 2000}},
        {"num_samples": 4096, "sampling_params": {}},  # as many tokens as fit
        {"num_samples": 20, "sampling_params": {"max_tokens": 500}, "topk_sample_logprobs": 256},
        {"num_samples": 3900, "topk_prompt_logprobs": 256, "prompt": {"chunks": [{"tokens": [5] * 1500}]}},
    ],
)
def test_answers_over_the_token_limit_are_refused(front: Front, given: dict[str, Any]) -> None:
    """Each token counts together with its alternatives; the message names the limit and the fix."""
    reply = front.post("/asample", {"prompt": PROMPT, "base_model": "tiny", **given})
    assert reply.status_code == 400
    assert "more than 2097152: lower max_tokens" in reply.json()["detail"]
    front.context.limits.answer_tokens = 2**31
    assert front.post("/asample", {"prompt": PROMPT, "base_model": "tiny", **given}).status_code == 200


def test_answers_at_the_token_limit_are_served(front: Front) -> None:
    body = {"prompt": PROMPT, "base_model": "tiny", "num_samples": 1024, "sampling_params": {"max_tokens": 2040}}
    assert front.post("/asample", body).status_code == 200
    two = {"model": "tiny", "prompt": [[5, 6, 7]] * 2, "n": 1024, "max_tokens": 1025}
    reply = front.post("/oai/api/v1/completions", two)
    assert reply.status_code == 400 and "more than 2097152" in reply.text


@pytest.mark.parametrize(
    ("stop", "strings", "ids", "end"),
    [
        (None, (), (), True),
        ([], (), (), False),
        ("\n\nUser:", ("\n\nUser:",), (), True),
        (["a", "b"], ("a", "b"), (), True),
        ([4, 7], (), (4, 7), True),
    ],
)
def test_stop_values_are_interpreted_as_documented(
    front: Front, stop: Any, strings: tuple[str, ...], ids: tuple[int, ...], end: bool
) -> None:
    front.post("/asample", {"prompt": PROMPT, "base_model": "tiny", "sampling_params": {"stop": stop}})
    sampling = SampleJob.model_validate_json(front.take().body).sampling
    assert (sampling.stop, sampling.stop_token_ids, sampling.stop_at_eos) == (strings, ids, end)
    assert sampling.max_tokens == 2048 - 3


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": {"chunks": []}},
        {"prompt": {"chunks": [{"tokens": [512]}]}},
        {"prompt": {"chunks": [{"tokens": [5] * 2048}]}},
        {"sampling_params": {"max_tokens": 2046}},
        {"base_model": "none"},
        {"record_stability_info": True},
        {"target_prompt_logprobs": {"data": [1, 2, 3], "dtype": "int64", "shape": [3, 1]}},
        {"target_prompt_logprobs": {"data": [1, 512], "dtype": "int64", "shape": [2, 1]}},
    ],
)
def test_impossible_sampling_requests_are_refused(front: Front, changes: dict[str, Any]) -> None:
    reply = front.post("/asample", {"prompt": PROMPT, "base_model": "tiny", **changes})
    assert reply.status_code == 400
    assert front.context.store.take_queued() == []


def test_stable_reinforce_is_refused_in_terms_of_what_the_user_sets(front: Front) -> None:
    """Recipes of the cookbook 0.6.1 have it as their default; none of their users has typed `record_stability_info`."""
    sampled = front.post("/asample", {"prompt": PROMPT, "base_model": "tiny", "record_stability_info": True})
    call = gradients(front.model())
    call["forward_backward_input"]["loss_fn"] = "stable_reinforce"
    trained = front.post("/forward_backward", call)
    for reply in (sampled, trained):
        assert reply.status_code == 400
        assert "loss_fn=importance_sampling" in reply.json()["detail"]


def test_sampler_keeps_its_weights_when_its_path_is_overwritten(front: Front) -> None:
    model = front.model()
    path = front.weights(model, kind="sampler")
    id = sampler(front, model_path=path)
    before = front.context.store.get(samplers, id)
    front.weights(model, kind="sampler")
    assert before == front.context.store.get(samplers, id)
    assert sampler(front, model_path=path) == id
    other = {"session_id": "mine", "sampling_session_seq_id": 0, "base_model": "tiny"}
    assert front.post("/create_sampling_session", other).status_code == 400


# -- results -----------------------------------------------------------------------------------------------------------


def test_result_follows_the_accept_header_and_stays_available(front: Front) -> None:
    model = front.model()
    id = front.post("/forward_backward", gradients(model)).json()["request_id"]
    pending = front.post("/retrieve_future", {"request_id": id})
    assert pending.status_code == 408
    assert (pending.json()["type"], pending.json()["queue_state"]) == ("try_again", "active")
    assert pending.headers["X-Queue-Position"] == "0"
    result = codec.encode_forward_backward([], {"loss:sum": 1.5})
    front.context.store.write_answers([StoredAnswer(id, result, "forward_backward")])
    for accept in ("application/x-protobuf", "application/x-protobuf, application/json"):
        reply = front.post("/retrieve_future", {"request_id": id}, headers={"Accept": accept})
        assert (reply.headers["content-type"], reply.content) == ("application/x-protobuf", result)
    assert front.post("/retrieve_future", {"request_id": id}).json()["metrics"] == {"loss:sum": 1.5}


def test_failed_request_is_returned_as_an_error_result(front: Front) -> None:
    model = front.model()
    id = front.post("/forward_backward", gradients(model)).json()["request_id"]
    front.context.store.write_answers([StoredAnswer.failure(id, "no")])
    reply = front.post("/retrieve_future", {"request_id": id}, headers={"Accept": "application/x-protobuf"})
    assert (reply.status_code, reply.json()) == (200, {"error": "no", "category": "user"})


def test_unknown_request_id_is_gone(front: Front) -> None:
    assert front.post("/retrieve_future", {"request_id": "0" * 32}).status_code == 410


def test_poll_returns_when_the_result_arrives(front: Front) -> None:
    front.context.limits.poll = 20.0
    id = front.context.store.submit("anyone", "sample", b"{}")

    async def poll() -> bool:
        waiting = asyncio.create_task(front.app.state.waiter.wait([id], 20.0))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        front.context.store.write_answers([StoredAnswer.json(id)])
        return await asyncio.wait_for(waiting, 2)

    assert asyncio.run(poll())


def test_polls_return_when_the_server_stops(front: Front) -> None:
    async def poll() -> bool:
        waiting = asyncio.create_task(front.app.state.waiter.wait(["x"], 20.0))
        await asyncio.sleep(0.05)
        front.app.state.waiter.close()
        return await asyncio.wait_for(waiting, 2)

    assert not asyncio.run(poll())


def test_batch_poll_returns_new_results(front: Front) -> None:
    id = sampler(front)
    bodies = [{"prompt": PROMPT, "sampling_session_id": id, "seq_id": seq} for seq in (0, 1, 10**9)]
    ids = [front.post("/asample", body).json()["request_id"] for body in bodies]
    front.context.store.write_answers([StoredAnswer.json(ids[0]), StoredAnswer.failure(ids[2], "no")])
    target = {"type": "sampling_session", "sampling_session_id": id}
    found = front.post("/retrieve_futures", {"target": target}).json()
    assert [(c["request_id"], c["state"]) for c in found["completions"]] == [(ids[0], "finished")]
    again = front.post("/retrieve_futures", {"target": target, "prev_cursor": found["cursor"], "timeout": 0}).json()
    assert again == {"completions": [], "cursor": found["cursor"]}
    copy = front.post("/retrieve_futures", {"target": {**target, "cloned_sampler_id": 1}}).json()
    assert [c["state"] for c in copy["completions"]] == ["failed"]
    assert front.post("/retrieve_futures", {"target": {**target, "cloned_sampler_id": 10**18}}).status_code == 400


def test_batch_poll_returns_results_of_a_clock_behind(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a worker whose answer waited for the database while another was committed."""
    id = sampler(front)
    bodies = [{"prompt": PROMPT, "sampling_session_id": id, "seq_id": seq} for seq in (0, 1)]
    ids = [front.post("/asample", body).json()["request_id"] for body in bodies]
    poll: dict[str, Any] = {"target": {"type": "sampling_session", "sampling_session_id": id}, "timeout": 0}
    now = time.time()
    for clock, request in zip((now, now - 1), ids, strict=True):
        monkeypatch.setattr("palestra.service.storage.store.time.time", lambda clock=clock: clock)
        front.context.store.write_answers([StoredAnswer.json(request)])
        found = front.post("/retrieve_futures", poll).json()
        assert [c["request_id"] for c in found["completions"]] == [request]
        poll["prev_cursor"] = found["cursor"]


def test_queued_sampling_request_can_be_cancelled(front: Front) -> None:
    id = front.post("/asample", {"prompt": PROMPT, "base_model": "tiny"}).json()["request_id"]
    assert front.post("/cancel_future", {"request_id": id}).json() == {"cancelled": True}
    assert front.post("/cancel_future", {"request_id": id}).json() == {"cancelled": False}
    assert "cancelled" in front.post("/retrieve_future", {"request_id": id}).json()["error"]


# -- sessions ----------------------------------------------------------------------------------------------------------


def test_finished_session_stops_the_heartbeat(front: Front) -> None:
    id = front.post("/create_session", {"display_name": "x", "type": "create_session"}).json()["session_id"]
    assert front.post("/session_heartbeat", {"session_id": id}).status_code == 200
    assert front.post(f"/sessions/{id}/finish", {"reason": {"type": "success"}, "detail": None}).status_code == 200
    assert front.post("/session_heartbeat", {"session_id": id}).status_code == 410
    assert front.get(f"/sessions/{id}").json()["display_name"] == "x"
