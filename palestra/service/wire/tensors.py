"""Conversion of single tensors between wire JSON, protobuf and numpy arrays. Malformed bytes raise BadRequest only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from palestra.service.wire import wire_pb2 as pb
from palestra.service.wire.schemas import requests
from palestra.service.wire.schemas.wire_model import BadRequest

MAX_SPARSE_CELLS = 2**23
_NUMPY_DTYPES: dict[int, np.dtype[Any]] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
    pb.DTYPE_BFLOAT16: np.dtype("<u2"),  # the upper half of a float32
}


def check_sparse_size(shapes: Iterable[Sequence[int] | None]) -> None:
    """Raises BadRequest if the sparse tensors of one call, of these shapes, have more than `MAX_SPARSE_CELLS` cells in
    total once dense."""
    cells = sum(math.prod(max(0, size) for size in shape or ()) for shape in shapes)
    if cells > MAX_SPARSE_CELLS:
        raise BadRequest(
            f"the sparse tensors have {cells} cells, more than {MAX_SPARSE_CELLS}. Send less data in one call."
        )


def from_json(tensor: requests.TensorData, pad: float = 0) -> np.ndarray:
    """Returns the JSON tensor as an array, int64 for integer dtypes and float32 otherwise; `pad` fills the cells that a
    sparse tensor does not list. Raises BadRequest if an integer dtype holds values that are not whole numbers below
    2^53, or the shape does not match the values."""
    values = np.array(tensor.data, np.float64)
    if tensor.dtype.startswith("int"):
        if not (np.abs(values) < requests.MAX_EXACT_INT).all() & (values == np.trunc(values)).all():
            raise BadRequest(f"dtype is {tensor.dtype}, but not all data are whole numbers below 2^53")
        values = values.astype(np.int64)
    else:
        with np.errstate(over="ignore"):
            values = values.astype(np.float32)
    shape = _shape(tensor.shape or ())
    if not tensor.is_sparse:
        return _reshape(values, shape)
    starts = np.array(tensor.sparse_crow_indices or (), np.int64)
    return _spread(values, starts, np.array(tensor.sparse_col_indices or (), np.int64), shape, pad)


def to_array(tensor: pb.Tensor) -> np.ndarray:
    """Returns a tensor as an int64 or float32 array of its `shape` (1-D if it has none, at most 2-D), with 0 in the
    cells that a sparse tensor does not list. Raises BadRequest if the shape does not match the values."""
    shape = _shape(tensor.shape)
    if not tensor.HasField("sparse_csr"):
        return _reshape(decode_values(tensor.dense, tensor.dtype), shape)
    csr = tensor.sparse_csr
    starts = decode_values(csr.crow_indices, pb.DTYPE_INT64)
    columns = decode_values(csr.col_indices, pb.DTYPE_INT64)
    return _spread(decode_values(csr.values, tensor.dtype), starts, columns, shape, 0)


def _reshape(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if shape and math.prod(shape) != values.size:
        raise BadRequest(f"shape {list(shape)} does not hold {values.size} values")
    return values.reshape(shape) if shape else values


def _shape(sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape, or () if the message has none: the values are then one row. Raises BadRequest if it has more
    than two dimensions or a size outside 0 to 2^31 - 1."""
    if len(sizes) > 2 or any(not 0 <= size <= requests.MAX_INT32 for size in sizes):
        raise BadRequest(f"shape {list(sizes[:8])} is not that of an array of one or two dimensions")
    return tuple(sizes)


def _spread(
    values: np.ndarray, starts: np.ndarray, columns: np.ndarray, shape: tuple[int, ...], pad: float
) -> np.ndarray:
    """Returns the CSR tensor as a dense matrix of `shape`, with `pad` in the cells that it does not list. Raises
    BadRequest if the indices are inconsistent."""
    if len(shape) != 2 or len(starts) != shape[0] + 1 or len(columns) != len(values):
        raise BadRequest(
            f"a sparse tensor of shape {list(shape)} has {len(values)} values, {len(columns)} col_indices and "
            f"{len(starts)} crow_indices. Send shape [rows, columns], rows + 1 crow_indices, a column for each value."
        )
    # compared, not subtracted: int64 differences may overflow
    if starts[0] != 0 or starts[-1] != len(values) or (starts[1:] < starts[:-1]).any():
        raise BadRequest("crow_indices do not rise from 0 to the number of values")
    if ((columns < 0) | (columns >= shape[1])).any():
        raise BadRequest(f"col_indices are not all from 0 to {shape[1] - 1}")
    cells = np.repeat(np.arange(shape[0]), np.diff(starts)) * shape[1] + columns
    if (cells[1:] <= cells[:-1]).any():
        raise BadRequest("col_indices do not rise within each row")
    dense = np.full(shape, pad, values.dtype)
    dense.reshape(-1)[cells] = values
    return dense


def decode_values(raw: bytes, dtype: pb.DType) -> np.ndarray:
    """Decodes little-endian bytes of wire dtype `dtype` to a 1-D int64 or float32 array. Raises BadRequest if the dtype
    is unknown or the length is not a multiple of its item size."""
    if dtype not in _NUMPY_DTYPES:
        raise BadRequest(f"dtype {dtype} is none of float32 (1), int64 (2), int32 (3), bfloat16 (4)")
    if len(raw) % _NUMPY_DTYPES[dtype].itemsize:
        raise BadRequest(f"{len(raw)} bytes are no whole number of values of {_NUMPY_DTYPES[dtype].itemsize} bytes")
    values = np.frombuffer(raw, _NUMPY_DTYPES[dtype])
    if dtype == pb.DTYPE_BFLOAT16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype("<f4" if values.dtype.kind == "f" else "<i8")


def encode_values(values: Iterable[float] | np.ndarray, dtype: pb.DType) -> bytes:
    """Encodes values as little-endian bytes of wire dtype `dtype`."""
    with np.errstate(over="ignore"):  # float32 overflow gives inf, which `validation.py` rejects
        return np.asarray(values).astype(_NUMPY_DTYPES[dtype]).tobytes()


def from_array(array: np.ndarray) -> pb.Tensor:
    """Returns the array as a dense protobuf tensor of the same shape: int64 for integer arrays, float32 otherwise."""
    kind = pb.DTYPE_INT64 if array.dtype.kind == "i" else pb.DTYPE_FLOAT32
    return pb.Tensor(dense=encode_values(array, kind), dtype=kind, shape=array.shape)
