"""Request bodies: those of official clients are parsed, dangerous ones are refused by name."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.service.wire import wire_pb2 as pb
from palestra.service.wire.schemas import requests, responses, weights
from palestra.service.wire.schemas.wire_model import BadRequest, WireModel, parse_body

FIXTURES = Path(__file__).parents[1] / "fixtures"
PROTO = Path(pb.__file__).with_name("wire.proto")
BODIES = {
    "create_session": requests.CreateSessionRequest,
    "session_heartbeat": requests.SessionHeartbeatRequest,
    "create_model": requests.CreateModelRequest,
    "get_info": requests.ModelRequest,
    "retrieve_future": requests.FutureRetrieveRequest,
    "optim_step": requests.OptimStepRequest,
    "save_weights": weights.SaveWeightsRequest,
    "save_weights_for_sampler": weights.SaveWeightsForSamplerRequest,
    "load_weights": weights.LoadWeightsRequest,
    "create_sampling_session": requests.CreateSamplingSessionRequest,
    "asample": requests.SampleRequest,
    "forward_backward": requests.ForwardBackwardRequest,
}
MODELS = [
    m for m in vars(requests).values() if isinstance(m, type) and issubclass(m, WireModel) and m.__name__ != "Wire"
]


def sent(generation: str) -> dict[str, Any]:
    return json.loads((FIXTURES / f"{generation}.json").read_text(encoding="utf-8"))


def read(model: type[WireModel], **fields: Any) -> Any:
    return parse_body(model, json.dumps(fields).encode())


@pytest.mark.parametrize("generation", ["a", "b", "c"])
def test_bodies_of_official_clients_parse_without_loss(generation: str) -> None:
    for name, body in sent(generation).items():
        understood = parse_body(BODIES[name], json.dumps(body).encode()).model_dump(mode="json")
        assert _within(_without_type(body), understood), name


def _without_type(tree: Any) -> Any:
    """Drops `type`, which only repeats the endpoint; with an optimizer it is kept."""
    if isinstance(tree, dict):
        return {k: _without_type(v) for k, v in tree.items() if k != "type" or v == "adamw"}
    return [_without_type(v) for v in tree] if isinstance(tree, list) else tree


def _within(small: Any, large: Any) -> bool:
    if isinstance(small, dict):
        return isinstance(large, dict) and all(k in large and _within(v, large[k]) for k, v in small.items())
    if isinstance(small, list):
        return len(small) == len(large) and all(map(_within, small, large))
    return bool(small == large)


def test_adam_params_of_the_oldest_client_get_defaults() -> None:
    adam = parse_body(requests.OptimStepRequest, json.dumps(sent("a")["optim_step"]).encode()).adam_params
    assert adam == requests.AdamParams(learning_rate=0.001, beta1=0.9, beta2=0.95, eps=1e-12)
    assert (adam.weight_decay, adam.grad_clip_norm) == (0.0, 0.0)


def test_unknown_fields_are_dropped_and_defaults_filled() -> None:
    request = read(
        requests.SampleRequest, prompt={"chunks": [{"tokens": [1]}]}, base_model="b", future_field={"x": [1]}
    )
    assert request.sampling_params == requests.SamplingParams()
    assert (request.num_samples, request.prompt_logprobs, request.topk_prompt_logprobs) == (1, None, 0)


@pytest.mark.parametrize("stop", [None, [], "end", ["a", "b"], [1, 2]])
def test_null_and_empty_stop_are_distinguished(stop: Any) -> None:
    """null and [] have different meanings."""
    assert read(requests.SamplingParams, stop=stop).stop == stop


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 1e9),
        ("temperature", "1"),
        ("temperature", 1e-45),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", 0),
        ("top_k", -2),
        ("max_tokens", 0),
        ("max_tokens", 2**40),
        ("max_tokens", True),
        ("max_tokens", 1.5),
        ("seed", 2**64),
        ("stop", [""]),
        ("stop", [-1]),
        ("stop", [1, "a"]),
        ("stop", ["x"] * 2000),
        ("stop", "x" * 2000),
    ],
)
def test_invalid_sampling_params_are_named(field: str, value: Any) -> None:
    with pytest.raises(BadRequest, match=field):
        read(requests.SamplingParams, **{field: value})


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"1" + b"0" * 400])
def test_nonfinite_settings_are_refused(number: bytes) -> None:
    with pytest.raises(BadRequest, match="learning_rate"):
        parse_body(requests.AdamParams, b'{"learning_rate": ' + number + b"}")
    with pytest.raises(BadRequest, match="temperature"):
        parse_body(requests.SamplingParams, b'{"temperature": ' + number + b"}")


@pytest.mark.parametrize("field", ["learning_rate", "eps", "weight_decay", "grad_clip_norm"])
def test_float32_overflow_of_settings_is_named(field: str) -> None:
    with pytest.raises(BadRequest, match=field):
        read(requests.AdamParams, **{field: 1e38})


def test_tiny_temperature_is_refused_with_the_fix() -> None:
    with pytest.raises(BadRequest, match=r"temperature: below 1e-05 logits overflow\. Say 0"):
        read(requests.SamplingParams, temperature=1e-45)
    assert read(requests.SamplingParams, temperature=0).temperature == 0


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        (requests.LoraConfig, {"rank": 0}, "rank"),
        (requests.LoraConfig, {"rank": 513}, "rank"),
        (requests.LoraConfig, {"rank": 8, "seed": 2**64}, "seed"),
        (requests.LoraConfig, {"rank": 8, "train_mlp": 1}, "train_mlp"),
        (requests.AdamParams, {"beta1": 1.0}, "beta1"),
        (requests.AdamParams, {"eps": 0}, "eps"),
        (requests.AdamParams, {"grad_clip_norm": -1}, "grad_clip_norm"),
        (requests.OptimStepRequest, {"model_id": "m", "optimizer_params": {"type": "dimuon"}}, "AdamW only"),
        (requests.OptimizerConfig, {"type": "dimuon"}, 'no optimizer "dimuon"'),
        (requests.SessionHeartbeatRequest, {"session_id": "a/b"}, "session_id"),
        (requests.SessionHeartbeatRequest, {"session_id": "s" * 129}, "session_id"),
        (requests.ModelRequest, {"model_id": "m\0"}, "model_id"),
        (weights.SaveWeightsRequest, {"model_id": "m", "path": "../up"}, "path"),
        (weights.SaveWeightsRequest, {"model_id": "m", "path": ".."}, "path"),
        (weights.SaveWeightsRequest, {"model_id": "m", "path": "x", "ttl_seconds": 0}, "ttl_seconds"),
        (weights.SaveWeightsForSamplerRequest, {"model_id": "m"}, "sampling_session_seq_id"),
        (
            weights.SaveWeightsForSamplerRequest,
            {"model_id": "m", "path": "x", "sampling_session_seq_id": 0},
            "either",
        ),
        (weights.LoadWeightsRequest, {"path": "tinker://r/weights/x", "optimizer": True}, "name the model to load"),
        (requests.CreateSamplingSessionRequest, {"session_id": "s", "sampling_session_seq_id": 0}, "base_model"),
        (requests.SampleRequest, {"prompt": {"chunks": []}}, "name the model to sample from"),
        (requests.SampleRequest, {"prompt": {"chunks": []}, "base_model": "b", "num_samples": 10**9}, "num_samples"),
        (requests.SampleRequest, {"prompt": {"chunks": []}, "base_model": "b", "seq_id": 2**63}, "seq_id"),
        (weights.InterpolateRequest, {"source_paths": ["a"], "coefficients": [1.0, 2.0]}, "coefficients"),
        (requests.Chunk, {"type": "image", "data": "x", "format": "png"}, "text only"),
        (requests.Chunk, {"data": "x", "format": "png"}, "text only"),
        (requests.Chunk, {"tokens": [1, -1]}, "tokens.1"),
        (requests.Chunk, {"tokens": [2**31]}, "tokens.0"),
    ],
)
def test_bodies_too_deep_or_large_are_refused(model: type[WireModel], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        read(model, **fields)
    assert caught.value.status == 400


def test_error_message_names_at_most_three_errors() -> None:
    with pytest.raises(BadRequest, match=r"; and \d+ more$") as caught:
        read(requests.SamplingParams, max_tokens=0, temperature=-1, top_p=2, top_k=0, seed="x")
    assert len(str(caught.value)) < 400


def test_one_of_a_million_invalid_numbers_is_reported() -> None:
    with pytest.raises(BadRequest) as caught:
        read(requests.TensorData, data=["x"] * 100_000, dtype="float32")
    assert len(str(caught.value)) < 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(model=st.sampled_from(MODELS), data=st.data())
def test_only_bad_request_escapes_the_parser(model: type[WireModel], data: st.DataObject) -> None:
    fields = data.draw(st.fixed_dictionaries({}, optional=dict.fromkeys(model.model_fields, JSON)))
    for body in (json.dumps(fields).encode(), data.draw(st.binary(max_size=30))):
        try:
            parse_body(model, body)
        except BadRequest as error:
            assert str(error)


def test_deeply_nested_body_is_refused() -> None:
    with pytest.raises(BadRequest):
        parse_body(requests.CreateSessionRequest, b'{"user_metadata":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001)


def test_responses_serialise_to_the_json_clients_expect() -> None:
    reply = responses.GetInfoResponse(model_data=responses.ModelData(model_name="org/base"), model_id="m", is_lora=True)
    assert json.loads(reply.model_dump_json())["optimizer_config"] == {"type": "adamw"}
    future = responses.UntypedAPIFuture(request_id="r")
    assert json.loads(future.model_dump_json()) == {"request_id": "r", "model_id": None, "sample_sequence_ids": None}


# The generated module agrees with wire.proto

SCALARS = ["double", "float", "int64", "uint64", "int32", "fixed64", "fixed32", "bool", "string"]
TYPES = dict(enumerate(SCALARS, 1)) | {12: "bytes", 13: "uint32"}
FIELD = re.compile(r"^(optional |repeated )?(map<\w+, \w+>|\w+) (\w+) = (\d+);$")


def declared() -> tuple[dict[str, set[tuple[str, ...]]], dict[str, set[tuple[str, int]]]]:
    """Messages and enums of wire.proto, parsed line by line; every line must be recognised."""
    messages: dict[str, set[tuple[str, ...]]] = {}
    enums: dict[str, set[tuple[str, int]]] = {}
    current, oneof = "", ""
    for line in PROTO.read_text(encoding="utf-8").splitlines():
        line = line.split("//")[0].strip()
        if opened := re.match(r"^(message|enum|oneof) (\w+) \{$", line):
            kind, name = opened.groups()
            current, oneof = (current, name) if kind == "oneof" else (name, "")
            if kind != "oneof":
                (messages if kind == "message" else enums)[name] = set()  # type: ignore[index]
        elif line == "}":
            oneof = ""
        elif current in enums and (value := re.match(r"^(\w+) = (\d+);$", line)):
            enums[current].add((value[1], int(value[2])))
        elif found := FIELD.match(line):
            label = (found[1] or ("map" if found[2].startswith("map") else "")).strip()
            messages[current].add((found[4], found[3], found[2], label, oneof))
        else:
            assert not line or line.startswith(("syntax", "package")), line
    return messages, enums


def generated(message: Any) -> set[tuple[str, ...]]:
    fields = set()
    for field in message.fields:
        kind, label = _kind(field), "repeated" if field.is_repeated else ""
        if field.message_type and field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields
            kind, label = f"map<{_kind(key)}, {_kind(value)}>", "map"
        oneof = field.containing_oneof.name if field.containing_oneof else ""
        if oneof.startswith("_"):  # protobuf's representation of `optional`
            oneof, label = "", "optional"
        fields.add((str(field.number), field.name, kind, label, oneof))
    return fields


def _kind(field: Any) -> str:
    named = field.message_type or field.enum_type
    return str(named.name) if named else TYPES[field.type]


def test_generated_protobuf_module_matches_the_proto_file() -> None:
    messages, enums = declared()
    module = pb.DESCRIPTOR
    assert module.package == "palestra.service"
    assert {name: generated(message) for name, message in module.message_types_by_name.items()} == messages
    assert {n: {(v.name, v.number) for v in e.values} for n, e in module.enum_types_by_name.items()} == enums
