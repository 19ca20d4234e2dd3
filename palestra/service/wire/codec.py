"""Decoding of training data, and encoding of gradient results, as protobuf and JSON.

Protobuf is the form in which results are stored; JSON is translated from it. `worker/encoding.py` encodes samples.
Malformed bytes raise BadRequest only. Memory use is proportional to the size of the input, except for
sparse tensors: those of one call may have `tensors.MAX_SPARSE_CELLS` cells in total.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, groupby, pairwise
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from pydantic_core import to_json

from palestra.core.types import Datum
from palestra.service.wire import tensors
from palestra.service.wire import wire_pb2 as pb
from palestra.service.wire.schemas import requests
from palestra.service.wire.schemas.wire_model import BadRequest, parse_body

EMPTY_LOGPROB = -99999.0  # log-probability of an empty cell of a top-k matrix; its token is 0
T = TypeVar("T")
STOPS = {"stop": pb.STOP_REASON_STOP, "length": pb.STOP_REASON_LENGTH}
_STOP_NAMES = {number: name for name, number in STOPS.items()}


@dataclass(frozen=True)
class TrainCall:
    """A call for gradients, or for a forward pass only: the sequences `data`, the name of the loss, and its options.
    `tokens` are int64 [N], `targets` int64 [N] or [N, K], other inputs float32, all dense."""

    model_id: str
    seq_id: int
    loss: str
    options: Mapping[str, float | str]
    data: list[Datum]
    forward_only: bool


# Training data


def train_call_from_proto(body: bytes) -> pb.ForwardBackwardRequest:
    """Parses a ForwardBackwardRequest; its arrays stay encoded. Raises BadRequest if the bytes are no such message,
    have a field that is not used here, or `model_id`, `seq_id` or the number of sequences is out of bounds."""
    call = pb.ForwardBackwardRequest()
    try:
        call.ParseFromString(body)
    except DecodeError as error:
        raise BadRequest(f"the body is not a ForwardBackwardRequest in protobuf: {error}") from None
    for message in (call, *call.data):
        for unknown in UnknownFieldSet(message):
            name = f"field {unknown.field_number} of {message.DESCRIPTOR.name}"
            raise BadRequest(f"{name} is not used here: it is of a newer client than this server knows")
    if (
        not 0 < len(call.model_id) <= requests.MAX_ID_CHARS
        or call.seq_id < 0
        or len(call.data) > requests.MAX_SEQUENCES
    ):
        raise BadRequest(
            f"model_id has {len(call.model_id)} characters (1 to {requests.MAX_ID_CHARS}), seq_id is {call.seq_id} (at "
            "least 0), "
            f"data has {len(call.data)} sequences (up to {requests.MAX_SEQUENCES}): one of them is out of bounds"
        )
    return call


def train_call_from_json(body: bytes, *, forward_only: bool) -> TrainCall:
    """Parses the JSON body of forward (`forward_only`) or forward_backward. A missing `seq_id` becomes 0. Raises
    BadRequest if the body is invalid."""
    request: requests.ForwardRequest | requests.ForwardBackwardRequest
    if forward_only:
        request = parse_body(requests.ForwardRequest, body)
        given = request.forward_input
    else:
        request = parse_body(requests.ForwardBackwardRequest, body)
        given = request.forward_backward_input
    tensors.check_sparse_size(
        tensor.shape for datum in given.data for tensor in datum.loss_fn_inputs.values() if tensor.is_sparse
    )
    data = [
        _datum(index, prompt_tokens(datum.model_input), datum.loss_fn_inputs, tensors.from_json)
        for index, datum in enumerate(given.data)
    ]
    options = given.loss_fn_config or {}
    return TrainCall(request.model_id, request.seq_id or 0, given.loss_fn, options, data, forward_only)


def decode_call(call: pb.ForwardBackwardRequest) -> TrainCall:
    """Decodes the arrays of a call; text chunks are concatenated.

    Raises BadRequest if a tensor has more than two dimensions, a chunk is not text, or `target_tokens` are missing or
    not int64.
    """
    tensors.check_sparse_size(
        tensor.shape[:2]
        for datum in call.data
        for tensor in datum.loss_fn_inputs.values()
        if tensor.HasField("sparse_csr")
    )
    data = []
    for index, datum in enumerate(call.data):
        with _at(f"data[{index}].model_input"):
            tokens = [_text(chunk) for chunk in datum.model_input]
        joined = np.concatenate([np.zeros(0, np.int64), *tokens])
        data.append(_datum(index, joined, datum.loss_fn_inputs, tensors.to_array))
    return TrainCall(call.model_id, call.seq_id, call.loss_fn, _loss_options(call), data, call.forward_only)


def encode_data(call: pb.ForwardBackwardRequest, data: Sequence[Datum]) -> bytes:
    """Returns the call with `data`, encoded dense, as a client sends it."""
    for datum in data:
        message = call.data.add()
        message.model_input.add().encoded_text.tokens = tensors.encode_values(datum.tokens, pb.DTYPE_INT32)
        for name, array in {"target_tokens": datum.targets, **datum.inputs}.items():
            message.loss_fn_inputs[name].CopyFrom(tensors.from_array(array))
    return call.SerializeToString()


def _loss_options(call: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    """Returns the loss's options. Clients that send `loss_fn_config_v2` repeat its numbers in `loss_fn_config`."""
    if not call.loss_fn_config_v2:
        return dict(call.loss_fn_config)
    values = call.loss_fn_config_v2.items()
    return {name: value.number if value.WhichOneof("value") == "number" else value.text for name, value in values}


def prompt_tokens(given: requests.ModelInput) -> np.ndarray:
    """Returns the token ids of a prompt, int64 [N]."""
    return np.array(list(chain.from_iterable(chunk.tokens for chunk in given.chunks)), np.int64)


def decode_array(tensor: requests.TensorData, *, pad: float = 0) -> np.ndarray:
    """Decodes a JSON tensor to an int64 or float32 array; `pad` fills the cells that a sparse tensor does not list.
    Raises BadRequest if it is inconsistent or too large."""
    tensors.check_sparse_size([tensor.shape] if tensor.is_sparse else [])
    return tensors.from_json(tensor, pad)


@contextmanager
def _at(place: str) -> Iterator[None]:
    """Prefixes the message of a BadRequest raised inside with its place in the body."""
    try:
        yield
    except BadRequest as error:
        raise BadRequest(f"{place}: {error}", error.status) from None


def _datum(index: int, tokens: np.ndarray, inputs: Mapping[str, T], decode: Callable[[T], np.ndarray]) -> Datum:
    arrays = {}
    for name, tensor in inputs.items():
        with _at(f"data[{index}].loss_fn_inputs.{name[: requests.MAX_ID_CHARS]}"):
            arrays[name] = decode(tensor)
    targets = arrays.pop("target_tokens", None)
    if targets is None:
        raise BadRequest(f"data[{index}] has no target_tokens. Send the token that each position should predict.")
    if targets.dtype != np.int64:
        raise BadRequest(f"data[{index}].loss_fn_inputs.target_tokens are floats. Send token ids as int64.")
    return Datum(tokens, targets, {name: array.astype(np.float32) for name, array in arrays.items()})


def _text(chunk: pb.Chunk) -> np.ndarray:
    kind = chunk.WhichOneof("chunk")
    if kind != "encoded_text":
        raise BadRequest(f'a chunk is "{kind or "empty"}". This server reads text only: send encoded_text.')
    return tensors.decode_values(chunk.encoded_text.tokens, pb.DTYPE_INT32)


# Gradient results


def encode_forward_backward(outputs: Sequence[Mapping[str, np.ndarray]], metrics: Mapping[str, float]) -> bytes:
    """Encodes a ForwardBackwardOutput.

    `outputs` holds, for each datum, arrays of one or two dimensions by name (the same names for all data); integer
    arrays are sent as int64, others as float32. Keys of `metrics` have the form "name:reduction".
    """
    assert all(name.count(":") == 1 for name in metrics), "clients split the name of a metric at its colon"
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=dict(metrics))
    for _, alike in groupby(outputs, _layout):
        message.loss_fn_outputs.append(_record(list(alike)))
    return message.SerializeToString()


def _layout(output: Mapping[str, np.ndarray]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(name, array.dtype.kind, array.shape[1:]) for name, array in output.items()]


def _record(outputs: list[Mapping[str, np.ndarray]]) -> pb.ArrayRecord:
    record = pb.ArrayRecord(type_tag="ArrayRecord", num_datums=len(outputs))
    for name in outputs[0]:
        parts = [tensors.from_array(output[name]) for output in outputs]
        ends = np.cumsum([0, *(len(part.dense) for part in parts)])
        batched = pb.BatchedTensor(
            data=b"".join(part.dense for part in parts),
            offsets=tensors.encode_values(ends, pb.DTYPE_INT64),
            dtype=parts[0].dtype,
            trailing_shape=outputs[0][name].shape[1:],
        )
        record.fields[name].CopyFrom(batched)
    return record


def forward_backward_to_json(result: bytes) -> bytes:
    """Translates an encoded ForwardBackwardOutput to the JSON of the oldest clients. Values that are not finite are
    written as NaN or Infinity, which their parser accepts; it rejects the whole answer for a null."""
    message = pb.ForwardBackwardOutput.FromString(result)
    outputs = list(chain.from_iterable(_split_record(record) for record in message.loss_fn_outputs))
    kind = message.loss_fn_output_type
    return _json({"loss_fn_output_type": kind, "loss_fn_outputs": outputs, "metrics": dict(message.metrics)})


def _split_record(record: pb.ArrayRecord) -> list[dict[str, Any]]:
    datums: list[dict[str, Any]] = [{} for _ in range(record.num_datums)]
    for name, batched in record.fields.items():
        for datum, values in zip(datums, split_tensor(batched), strict=True):
            rows = values.size // (math.prod(batched.trailing_shape) or 1)
            datum[name] = _tensor_json(values.reshape(rows, *batched.trailing_shape))
    return datums


def split_tensor(batched: pb.BatchedTensor) -> list[np.ndarray]:
    """Returns the values of each datum, one-dimensional."""
    ends = tensors.decode_values(batched.offsets, pb.DTYPE_INT64)
    return [tensors.decode_values(batched.data[start:end], batched.dtype) for start, end in pairwise(ends)]


def _tensor_json(array: np.ndarray) -> dict[str, Any]:
    dtype = "int64" if array.dtype.kind == "i" else "float32"
    return {"data": array.reshape(-1).tolist(), "dtype": dtype, "shape": list(array.shape)}


def _json(tree: Any) -> bytes:
    return to_json(tree, inf_nan_mode="constants")


def sample_to_json(result: bytes) -> bytes:
    """Translates an encoded SampleResponse to the JSON of older clients. Keys that only newer clients read are present
    only if they were requested."""
    message = pb.SampleResponse.FromString(result)
    tree: dict[str, Any] = {
        "type": "sample",
        "sequences": [_sequence_json(sequence) for sequence in message.sequences],
        "prompt_logprobs": None,
        "topk_prompt_logprobs": None,
        "prompt_cache_hit_tokens": message.prompt_cache_hit_tokens,
    }
    if message.HasField("prompt_logprobs"):
        logps = tensors.decode_values(message.prompt_logprobs, pb.DTYPE_FLOAT32).tolist()
        tree["prompt_logprobs"] = [None if math.isnan(logp) else logp for logp in logps]
    if message.HasField("topk_prompt_logprobs"):
        tree["topk_prompt_logprobs"] = _topk_json(message.topk_prompt_logprobs)
    if message.HasField("target_prompt_logprobs"):
        tree["target_prompt_logprobs"] = _tensor_json(tensors.to_array(message.target_prompt_logprobs))
    if message.HasField("prompt_alt_tokens"):
        drawn = message.prompt_alt_tokens
        tree["prompt_alt_tokens"] = {
            n: _tensor_json(tensors.to_array(getattr(drawn, n))) for n in ("tokens", "logprobs")
        }
    return _json(tree)


def _sequence_json(sequence: pb.SampledSequence) -> dict[str, Any]:
    tree = {
        "stop_reason": _STOP_NAMES[sequence.stop_reason],
        "tokens": tensors.decode_values(sequence.tokens, pb.DTYPE_INT32).tolist(),
        "logprobs": tensors.decode_values(sequence.logprobs, pb.DTYPE_FLOAT32).tolist(),
    }
    if sequence.HasField("topk_sampled_logprobs"):
        tree["topk_logprobs"] = _topk_json(sequence.topk_sampled_logprobs)
    return tree


def _topk_json(topk: pb.TopkLogprobs) -> list[list[tuple[int, float]] | None]:
    """Returns the (token, log-probability) pairs of each position, or None for a position without any."""
    shape = (topk.length, topk.k)
    ids = tensors.decode_values(topk.token_ids, pb.DTYPE_INT32).reshape(shape)
    logps = tensors.decode_values(topk.logprobs, pb.DTYPE_FLOAT32).reshape(shape)
    there = (logps != np.float32(EMPTY_LOGPROB)) | (ids != 0)
    rows = zip(ids.tolist(), logps.tolist(), there.tolist(), strict=True)
    return [[(token, logp) for token, logp, some in zip(*row, strict=True) if some] or None for row in rows]
