"""Arrays in requests: every form that clients send is decoded exactly, and no bytes crash the decoder."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from palestra.core.types import Datum
from palestra.service.wire import codec, tensors
from palestra.service.wire import wire_pb2 as pb
from palestra.service.wire.codec import TrainCall
from palestra.service.wire.jobs import TrainJob
from palestra.service.wire.schemas import requests
from palestra.service.wire.schemas.wire_model import BadRequest, parse_body
from palestra.service.wire.validation import LOSS_SPECS, check_train_call

FIXTURES = Path(__file__).parents[1] / "fixtures"
NAN = float("nan")


def fixture(name: str) -> bytes:
    return (FIXTURES / name).read_bytes()


def sent(generation: str) -> bytes:
    return json.dumps(json.loads(fixture(f"{generation}.json"))["forward_backward"]).encode()


def calls() -> list[TrainCall]:
    """The same data from the three generations of official clients."""
    old = [codec.train_call_from_json(sent(generation), forward_only=False) for generation in "ab"]
    new = [codec.train_call_from_proto(fixture(name)) for name in ("c.bin", "c_options.bin")]
    return [*old, *map(codec.decode_call, new)]


def body(data: list[dict[str, Any]], **more: Any) -> bytes:
    inner = {"data": data, "loss_fn": "cross_entropy", **more}
    return json.dumps({"forward_backward_input": inner, "model_id": "m"}).encode()


def row(tokens: list[int], **inputs: dict[str, Any]) -> dict[str, Any]:
    return {"model_input": {"chunks": [{"tokens": tokens}]}, "loss_fn_inputs": inputs}


def ints(*values: int) -> dict[str, Any]:
    return {"data": list(values), "dtype": "int64"}


def read(data: list[dict[str, Any]]) -> list[Datum]:
    return codec.train_call_from_json(body(data), forward_only=False).data


def tensor(**fields: Any) -> pb.ForwardBackwardRequest:
    """A call with one target tensor."""
    inputs = {"target_tokens": pb.Tensor(**fields)}
    return pb.ForwardBackwardRequest(model_id="m", data=[pb.Datum(loss_fn_inputs=inputs)])


def same(a: Datum, b: Datum) -> bool:
    return (
        np.array_equal(a.tokens, b.tokens)
        and np.array_equal(a.targets, b.targets)
        and a.inputs.keys() == b.inputs.keys()
        and all(np.array_equal(a.inputs[name], b.inputs[name]) for name in a.inputs)
    )


# What official clients send (make_fixtures.py)


@pytest.mark.parametrize("call", calls(), ids=["0.15", "0.22", "0.38", "0.38 with options"])
def test_data_of_official_clients_is_decoded(call: TrainCall) -> None:
    supervised, reinforced, *wide = call.data
    assert (call.model_id, call.seq_id, call.loss) == ("s0123456789abcdef:train:0", 1, "cross_entropy")
    assert same(supervised, Datum(np.array([5, 6, 7]), np.array([6, 7, 8]), {"weights": np.array([0.0, 1.0, -2.5])}))
    inputs = {"logprobs": np.array([-0.5, -1.25]), "advantages": np.array([1.5]), "mask": np.array([0.0, 1.0])}
    assert same(reinforced, Datum(np.array([9, 10]), np.array([10, 11]), inputs))
    for datum in wide:  # sent sparse
        targets, weights = np.zeros((9, 4), np.int64), np.zeros((9, 4))
        targets[2], weights[2] = [3, 1, 4, 1], [0.5, 0.25, 0.125, 0.125]
        assert same(datum, Datum(np.arange(9), targets, {"weights": weights}))
    for datum in call.data:
        assert (datum.tokens.dtype, datum.targets.dtype) == (np.int64, np.int64)
        assert {array.dtype for array in datum.inputs.values()} == {np.dtype(np.float32)}


def test_loss_options_of_official_clients_are_decoded() -> None:
    none, old, plain, new = calls()
    assert none.options == plain.options == {}
    assert old.options == {"clip_low_threshold": 0.9}
    assert new.options == {"clip_low_threshold": 0.9, "mode": "x"}
    assert new.forward_only and not plain.forward_only


def test_loss_options_in_the_legacy_map_are_decoded() -> None:
    assert codec.decode_call(pb.ForwardBackwardRequest(loss_fn_config={"beta": 0.5})).options == {"beta": 0.5}


def test_forward_endpoint_body_decodes_to_the_same_data() -> None:
    inner = {"data": [row([1], target_tokens=ints(2))], "loss_fn": "cross_entropy"}
    call = codec.train_call_from_json(json.dumps({"forward_input": inner, "model_id": "m"}).encode(), forward_only=True)
    assert call.forward_only
    assert same(call.data[0], Datum(np.array([1]), np.array([2]), {}))


# Round trips

sizes = hnp.array_shapes(min_dims=1, max_dims=2, min_side=1, max_side=5)
numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def data(draw: st.DrawFn) -> Datum:
    shape = draw(sizes)
    ids = st.integers(0, 2**31 - 1)
    tokens = draw(hnp.arrays(np.int64, shape[0], elements=ids))
    names = draw(st.sets(st.sampled_from(["weights", "logprobs", "advantages", "other"])))
    inputs = {name: draw(hnp.arrays(np.float32, shape, elements=numbers)) for name in names}
    return Datum(tokens, draw(hnp.arrays(np.int64, shape, elements=ids)), inputs)


def as_json(datum: Datum, sparse: bool) -> dict[str, Any]:
    arrays = {"target_tokens": datum.targets, **datum.inputs}
    inputs = {name: (csr if sparse and array.ndim == 2 else dense)(array) for name, array in arrays.items()}
    return row(datum.tokens.tolist(), **inputs)


def dense(array: np.ndarray) -> dict[str, Any]:
    dtype = "int64" if array.dtype.kind == "i" else "float32"
    return {"data": array.reshape(-1).tolist(), "dtype": dtype, "shape": list(array.shape)}


def csr(array: np.ndarray) -> dict[str, Any]:
    rows, columns = np.nonzero(array)
    starts = [int((rows < i).sum()) for i in range(len(array) + 1)]
    cells = {"data": array[rows, columns].tolist(), "sparse_crow_indices": starts}
    return {**dense(array), **cells, "sparse_col_indices": columns.tolist()}


@given(st.lists(data(), max_size=3), st.booleans())
def test_json_and_protobuf_decode_to_equal_data(wanted: list[Datum], sparse: bool) -> None:
    call = codec.train_call_from_json(body([as_json(datum, sparse) for datum in wanted]), forward_only=False)
    assert len(call.data) == len(wanted) and all(map(same, call.data, wanted))
    again = codec.train_call_from_proto(codec.encode_data(pb.ForwardBackwardRequest(model_id="m"), wanted))
    found = codec.decode_call(again).data
    assert len(found) == len(wanted) and all(map(same, found, wanted))


@given(st.lists(data(), min_size=1, max_size=3), st.dictionaries(st.text(max_size=3), st.floats(0, 1)))
def test_a_validated_call_is_queued_as_it_is(wanted: list[Datum], options: dict[str, float]) -> None:
    for datum in wanted:
        inputs = {"weights": np.ones(datum.targets.shape, np.float32)}
        datum.inputs.clear()
        datum.inputs.update(inputs)
    job = TrainJob("ppo", options, wanted)
    found = TrainJob.from_bytes(job.to_bytes())
    assert (found.loss, found.options) == ("ppo", options)
    assert len(found.data) == len(wanted) and all(map(same, found.data, wanted))
    dtypes = {(datum.tokens.dtype, datum.targets.dtype, datum.inputs["weights"].dtype) for datum in found.data}
    assert dtypes == {(np.dtype(np.int64), np.dtype(np.int64), np.dtype(np.float32))}


def test_a_call_queued_by_another_version_is_refused() -> None:
    for other in (b"", b"\xff\xff", fixture("c.bin")):
        with pytest.raises(ValueError, match="queued by another version of palestra: send it again"):
            TrainJob.from_bytes(other)


def test_prompt_chunks_are_joined() -> None:
    request = json.dumps({"chunks": [{"tokens": [1, 2]}, {"tokens": []}, {"tokens": [3], "type": "encoded_text"}]})
    assert codec.prompt_tokens(parse_body(requests.ModelInput, request.encode())).tolist() == [1, 2, 3]


def test_every_protobuf_dtype_is_decoded() -> None:
    for kind, array in [(pb.DTYPE_INT32, np.int32([1, -2])), (pb.DTYPE_INT64, np.int64([1, 2**40]))]:
        assert codec.decode_call(tensor(dense=array.tobytes(), dtype=kind)).data[0].targets.tolist() == array.tolist()
    half = (np.float32([1.5, -0.25, math.inf]).view(np.uint32) >> 16).astype("<u2").tobytes()
    call = tensor(dense=np.int64([1]).tobytes(), dtype=pb.DTYPE_INT64)
    call.data[0].loss_fn_inputs["weights"].CopyFrom(pb.Tensor(dense=half, dtype=pb.DTYPE_BFLOAT16))
    assert codec.decode_call(call).data[0].inputs["weights"].tolist() == [1.5, -0.25, math.inf]


def test_sparse_tensor_of_a_sampling_request_is_padded() -> None:
    given = {**csr(np.array([[7, 0], [0, 8]])), "shape": [2, 2]}
    found = codec.decode_array(parse_body(requests.TensorData, json.dumps(given).encode()), pad=-1)
    assert found.tolist() == [[7, -1], [-1, 8]]


# Refusals


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (tensor(dense=b"123", dtype=pb.DTYPE_INT64), "3 bytes"),
        (tensor(dense=b"12345678"), "dtype 0"),
        (tensor(dense=b"1234", dtype=pb.DTYPE_FLOAT32), "Send token ids as int64"),
        (tensor(dense=bytes(8), dtype=pb.DTYPE_INT64, shape=[2**40]), "shape"),
        (tensor(dense=bytes(8), dtype=pb.DTYPE_INT64, shape=[2**30, 2**30]), "does not hold 1 values"),
        (tensor(dense=b"", dtype=pb.DTYPE_INT64, shape=[-1, 0]), "shape"),
        (tensor(dense=bytes(8), dtype=pb.DTYPE_INT64, shape=[1, 1, 1]), "one or two dimensions"),
        (tensor(dense=bytes(8), dtype=pb.DTYPE_INT64, shape=[1] * 10**6), "one or two dimensions"),
        (pb.ForwardBackwardRequest(data=[pb.Datum()]), "no target_tokens"),
        (pb.ForwardBackwardRequest(data=[pb.Datum(model_input=[pb.Chunk()])]), '"empty"'),
        (pb.ForwardBackwardRequest(data=[pb.Datum(model_input=[pb.Chunk(image=pb.ImageChunk())])]), '"image"'),
    ],
)
def test_invalid_dense_tensors_are_refused(call: pb.ForwardBackwardRequest, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        codec.decode_call(call)
    assert len(str(caught.value)) < 300


def sparse(
    shape: list[int], starts: list[int], columns: list[int], values: int | None = None
) -> pb.ForwardBackwardRequest:
    count = len(columns) if values is None else values
    parts = [np.array(part, np.int64).tobytes() for part in ([1] * count, starts, columns)]
    cells = pb.SparseCsr(values=parts[0], crow_indices=parts[1], col_indices=parts[2])
    return tensor(sparse_csr=cells, dtype=pb.DTYPE_INT64, shape=shape)


@pytest.mark.parametrize(
    "call",
    [
        sparse([2, 3], [0, 1], [0]),  # one row too few
        sparse([2, 3], [0, 1, 2], [0]),  # more cells than columns
        sparse([2, 3], [0, 1, 1], [0], values=2),
        sparse([2, 3], [1, 1, 1], [0]),
        sparse([2, 3], [0, 2, 1], [0]),
        sparse([2, 3], [0, 2**63 - 1, 1], [0]),
        sparse([3, 3], [0, 2**63 - 1, -(2**63), 1], [0]),  # differences that overflow
        sparse([2, 3], [0, 1, 1], [3]),
        sparse([2, 3], [0, 1, 1], [-1]),
        sparse([2, 3], [0, 1, 1], [-(2**63)]),
        sparse([2, 3], [0, 2, 2], [1, 1]),  # one cell twice
        sparse([2, 3], [0, 2, 2], [1, 0]),
        sparse([6], [0, 1, 1], [0]),
        sparse([], [0], []),
        sparse([], [], []),
        sparse([0, 0], [], []),
        sparse([2**40, 1], [0, 0], []),
        sparse([1, 2**31 - 1], [0, 0], []),
        sparse([-1, 2**31 - 1], [0, 0], []),
    ],
)
def test_invalid_sparse_tensors_are_refused(call: pb.ForwardBackwardRequest) -> None:
    with pytest.raises(BadRequest):
        codec.decode_call(call)


def test_total_size_of_sparse_tensors_is_limited() -> None:
    side = math.isqrt(tensors.MAX_SPARSE_CELLS) // 2
    one = sparse([side, side], [0] * (side + 1), []).data[0]
    assert codec.decode_call(pb.ForwardBackwardRequest(data=[one])).data[0].targets.shape == (side, side)
    huge = sparse([-(2**62), 1], [], []).data[0]  # adds nothing to the size, but would enlarge the limit
    with pytest.raises(BadRequest, match="Send less data"):
        codec.decode_call(pb.ForwardBackwardRequest(data=[*[one] * 5, huge]))


@pytest.mark.parametrize(
    ("datum", "message"),
    [
        (row([1], target_tokens={"data": [1.5], "dtype": "int64"}), "whole numbers"),
        (row([1], target_tokens={"data": [2**60], "dtype": "int64"}), "whole numbers"),
        (row([1], target_tokens={"data": [NAN], "dtype": "int64"}), "whole numbers"),
        (row([1], target_tokens={"data": ["1"], "dtype": "int64"}), "target_tokens.data"),
        (row([1], target_tokens={"data": [[1]], "dtype": "int64"}), "target_tokens.data"),
        (row([1], target_tokens={"data": [1], "dtype": "float64"}), "dtype"),
        (row([1], target_tokens={**ints(1), "shape": [-1]}), "shape"),
        (row([1], target_tokens={**ints(1), "shape": [2**70]}), "shape"),
        (row([1], target_tokens={**ints(1), "sparse_crow_indices": [0, 1]}), "col_indices"),
        (row([2**31], target_tokens=ints(1)), "tokens"),
    ],
)
def test_invalid_json_arrays_are_refused(datum: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        read([row([1], target_tokens=ints(1)), datum])


def test_errors_name_the_datum_and_input() -> None:
    with pytest.raises(BadRequest, match=r"^data\[1\].loss_fn_inputs.target_tokens: shape"):
        read([row([1], target_tokens=ints(1)), row([1], target_tokens={**ints(1), "shape": [2]})])


@pytest.mark.parametrize(
    "wrong", [b"\xff", b"\x0a\x02\xff\xfe", pb.ForwardBackwardRequest(model_id="m", seq_id=-1).SerializeToString(), b""]
)
def test_invalid_protobuf_is_refused(wrong: bytes) -> None:
    with pytest.raises(BadRequest):
        codec.train_call_from_proto(wrong)


# Any input raises BadRequest or is decoded


def digest(call: TrainCall) -> None:
    for loss in [call.loss, *LOSS_SPECS]:
        try:
            cleaned = check_train_call(call.data, loss, call.options, vocab_size=64, max_length=64, max_tokens=256)
        except BadRequest:
            continue
        assert all(np.isfinite(array).all() for datum in cleaned for array in datum.inputs.values())


def survives(body: bytes, as_proto: bool) -> None:
    try:
        if as_proto:
            digest(codec.decode_call(codec.train_call_from_proto(body)))
        else:
            digest(codec.train_call_from_json(body, forward_only=False))
    except BadRequest as error:
        assert str(error)


@given(st.binary(max_size=60), st.booleans())
def test_arbitrary_bytes_raise_only_bad_request(body: bytes, as_proto: bool) -> None:
    survives(body, as_proto)


edits = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(max_size=3)), min_size=1, max_size=6)


def edited(body: bytes, changes: list[tuple[float, bytes]]) -> bytes:
    raw = bytearray(body)
    for place, new in changes:  # an empty edit truncates the rest
        at = int(place * len(raw))
        raw = raw[:at] if not new else raw[:at] + new + raw[at + len(new) :]
    return bytes(raw)


@given(edits, st.sampled_from(["c.bin", "c_options.bin"]))
def test_damaged_protobuf_raises_only_bad_request(changes: list[tuple[float, bytes]], name: str) -> None:
    survives(edited(fixture(name), changes), as_proto=True)


@given(edits, st.sampled_from("ab"))
def test_damaged_json_raises_only_bad_request(changes: list[tuple[float, bytes]], generation: str) -> None:
    survives(edited(sent(generation), changes), as_proto=False)


wild = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 6)
raw = st.binary(max_size=24) | st.lists(wild, max_size=4).map(lambda values: np.array(values, np.int64).tobytes())


@st.composite
def wild_tensors(draw: st.DrawFn) -> pb.Tensor:
    message = pb.Tensor(dtype=draw(st.integers(0, 6)), shape=draw(st.lists(wild, max_size=3)))
    if draw(st.booleans()):
        message.dense = draw(raw)
    else:
        message.sparse_csr.CopyFrom(pb.SparseCsr(values=draw(raw), crow_indices=draw(raw), col_indices=draw(raw)))
    return message


@given(st.dictionaries(st.sampled_from(["target_tokens", "weights", "logprobs", "advantages"]), wild_tensors()))
def test_arbitrary_tensors_raise_only_bad_request(inputs: dict[str, pb.Tensor]) -> None:
    text = pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=np.int32([1, 2]).tobytes()))
    call = pb.ForwardBackwardRequest(model_id="m", data=[pb.Datum(model_input=[text], loss_fn_inputs=inputs)])
    survives(call.SerializeToString(), as_proto=True)


# Results


def test_forward_backward_results_are_encoded() -> None:
    """Decoded like 0.38: each sequence of datums with equal trailing shapes is one record, with offsets in bytes."""
    shapes = [(2,), (1,), (2, 2), (3,)]
    outputs = [{"logprobs": -np.arange(1, 1 + math.prod(shape), dtype=np.float32).reshape(shape)} for shape in shapes]
    result = codec.encode_forward_backward(outputs, {"loss:sum": 1.25})
    message = pb.ForwardBackwardOutput.FromString(result)
    assert [record.num_datums for record in message.loss_fn_outputs] == [2, 1, 1]
    first = message.loss_fn_outputs[0].fields["logprobs"]
    assert np.frombuffer(first.offsets, np.int64).tolist() == [0, 8, 12]
    assert message.loss_fn_outputs[1].fields["logprobs"].trailing_shape == [2]
    tree = json.loads(codec.forward_backward_to_json(result))
    assert tree["metrics"] == {"loss:sum": 1.25}
    assert [out["logprobs"]["shape"] for out in tree["loss_fn_outputs"]] == [list(shape) for shape in shapes]
    assert tree["loss_fn_outputs"][2]["logprobs"] == {"data": [-1, -2, -3, -4], "dtype": "float32", "shape": [2, 2]}


def test_empty_and_nonfinite_results_are_encoded() -> None:
    tree = json.loads(codec.forward_backward_to_json(codec.encode_forward_backward([], {"loss:sum": NAN})))
    assert tree["loss_fn_outputs"] == [] and math.isnan(tree["metrics"]["loss:sum"])


def test_metric_without_reduction_suffix_is_rejected() -> None:
    with pytest.raises(AssertionError, match="colon"):
        codec.encode_forward_backward([], {"loss": 1.0})
