"""Protobuf serialization of plain data. Types are preserved exactly: `1` stays int, `1.0` float, tuples stay tuples.

Supported: None, bool, int, float, str, bytes, list, tuple, set, dict (order is kept), numpy arrays and scalars of plain
dtypes, and `Chat`. Any other type raises a ValueError that names it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from typing import Any

import numpy as np

from palestra.core.chat import Chat
from palestra.core.plain_values import short_repr
from palestra.core.types import Step
from palestra.envs.remote import envs_pb2 as pb

MAX_DEPTH = 40  # nesting of containers: protobuf's limit is 100 message levels, and each container takes two
MAX_INTEGER_BYTES = 1024  # bytes of an integer: arithmetic on longer ones is slow enough for a denial of service
MAX_KEYS = 16_384  # of a set, or of a mapping with non-text keys: colliding hashes cost quadratic time
PLAIN_DTYPE_KINDS = "?biufcSUmM"  # numpy dtype kinds without references to other objects
MAPPING_FIELDS = ("observations", "rewards", "info")  # fields of Step that are mappings
FIELD_DEFAULTS: dict[str, Any] = {"team_reward": 0.0, "legal_actions": None, "state": None, "truncated": False}


def write_value(into: pb.Value, value: Any, depth: int = 0) -> None:
    """Writes `value` into the empty message `into`.

    Raises ValueError if it is too large, too deep or of another type.
    """
    if write := WRITERS.get(type(value)):
        write(into, value, depth)
    elif isinstance(value, np.generic):
        _array(into.scalar, np.asarray(value))
    else:
        raise ValueError(
            f"a {type(value).__module__}.{type(value).__qualname__} cannot be sent to or from an env on another "
            f"machine: {short_repr(value)}. Use None, bool, int, float, str, bytes, list, tuple, set, dict, numpy "
            "arrays or a palestra.core.chat.Chat"
        )


def write_mapping(into: pb.Pairs, mapping: Mapping[Any, Any], depth: int = 0) -> None:
    """Writes `mapping` into the empty message `into`. Raises ValueError as `write_value`."""
    for key, value in mapping.items():
        pair = into.pairs.add()
        if type(key) is not str:
            write_value(pair.other, key, depth)
        else:
            try:
                pair.name = key
            except UnicodeEncodeError:
                write_value(pair.other, key, depth)
        write_value(pair.value, value, depth)


def read_value(message: pb.Value) -> Any:
    """Reads the value in a message. Raises ValueError if the message is empty, malformed or over a size limit."""
    kind = message.WhichOneof("kind")
    if kind is None:
        raise ValueError("a value on the wire is of an unknown kind: is the other side newer?")
    found = getattr(message, kind)
    read = READERS.get(kind)
    return read(found) if read else found


def read_mapping(message: pb.Pairs) -> dict[Any, Any]:
    """Reads the dict in a message. Raises ValueError if it is malformed or over a size limit."""
    found = {}
    if len(message.pairs) > MAX_KEYS and any(pair.WhichOneof("key") == "other" for pair in message.pairs):
        raise _too_many(len(message.pairs))
    for pair in message.pairs:
        value = pair.value
        found[pair.name or _key(pair)] = value.text or read_value(value)  # fast path for text
    if len(found) < len(message.pairs):
        raise ValueError("a mapping has one key twice")
    return found


def encode_value(value: Any) -> pb.Value:
    """Returns `value` as a new message. Raises ValueError as `write_value`."""
    message = pb.Value()
    write_value(message, value)
    return message


def encode_mapping(mapping: Mapping[Any, Any]) -> pb.Pairs:
    """Returns `mapping` as a new message. Raises ValueError as `write_value`."""
    message = pb.Pairs()
    write_mapping(message, mapping)
    return message


# ---- steps


def write_step(into: pb.Step, step: Step) -> None:
    """Writes a step into an empty message. Raises ValueError that names the field which cannot be serialized."""
    part = ""
    try:
        for part in MAPPING_FIELDS:
            if mapping := getattr(step, part):
                write_mapping(getattr(into, part), mapping)
        for part, default in FIELD_DEFAULTS.items():
            value = getattr(step, part)
            if type(value) is not type(default) or value != default:
                write_value(getattr(into, part), value)
    except ValueError as error:
        raise ValueError(f"in a step's {part}: {error}") from error


def read_step(message: pb.Step) -> Step:
    """Reads the step in a message. Raises ValueError if it is malformed."""
    fields = {part: read_value(getattr(message, part)) for part in FIELD_DEFAULTS if message.HasField(part)}
    mappings = [read_mapping(getattr(message, part)) for part in MAPPING_FIELDS]
    return Step(mappings[0], mappings[1], info=mappings[2], **fields)


def step_digest(message: pb.Step) -> bytes:
    """Returns a 16-byte BLAKE2b digest of a serialized step, for comparing replayed steps."""
    return blake2b(message.SerializeToString(deterministic=True), digest_size=16).digest()


# ---- random states


def encode_rng_state(rng: random.Random) -> bytes:
    """Serializes the state of `rng`: 625 little-endian uint32. The value cached by `gauss` is left out."""
    return np.array(rng.getstate()[1], "<u4").tobytes()


def restore_rng_state(rng: random.Random, state: bytes) -> None:
    """Sets the state of `rng` to one serialized by `encode_rng_state`."""
    rng.setstate((rng.VERSION, tuple(np.frombuffer(state, "<u4").tolist()), None))


# ---- writers and readers by type


def _integer(into: pb.Value, value: int, _: int) -> None:
    if -(2**63) <= value < 2**63:
        into.integer = value
    else:
        if value.bit_length() >= 8 * MAX_INTEGER_BYTES:
            raise _too_long(value.bit_length() // 8 + 1)
        into.long = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _text(into: pb.Value, value: str, _: int) -> None:
    try:
        into.text = value
    except UnicodeEncodeError:
        into.surrogates = value.encode("utf-8", "surrogatepass")


def _plain(name: str) -> Callable[[pb.Value, Any, int], None]:
    def write(into: pb.Value, value: Any, _: int) -> None:
        setattr(into, name, value)

    return write


def _items(name: str) -> Callable[[pb.Value, Any, int], None]:
    def write(into: pb.Value, value: Iterable[Any], depth: int) -> None:
        items = getattr(into, name)
        items.SetInParent()  # marks the field as set if there are no items
        add = items.items.add
        for item in value:
            write_value(add(), item, _deeper(depth))

    return write


def _set(into: pb.Value, value: set[Any], depth: int) -> None:
    """Writes a set in sorted order: iteration order differs between processes."""
    if len(value) > MAX_KEYS:
        raise _too_many(len(value))
    items = [pb.Value() for _ in value]
    for message, item in zip(items, value, strict=True):
        write_value(message, item, _deeper(depth))
    into.set.SetInParent()
    into.set.items.extend(sorted(items, key=lambda message: message.SerializeToString(deterministic=True)))


def _mapping(into: pb.Value, value: dict[Any, Any], depth: int) -> None:
    into.mapping.SetInParent()
    write_mapping(into.mapping, value, _deeper(depth))


def _array(into: pb.Array, value: np.ndarray) -> None:
    if value.dtype.kind not in PLAIN_DTYPE_KINDS:
        raise ValueError(
            f"an array of dtype {value.dtype} cannot be sent to or from an env on another machine: give it one of "
            "numbers, truth values, dates or text"
        )
    into.dtype = value.dtype.str
    into.data = value.tobytes()
    into.shape.extend(value.shape)


def _chat(into: pb.Value, value: Chat, depth: int) -> None:
    into.chat.SetInParent()
    for items, source in ((into.chat.messages, value.messages), (into.chat.tools, value.tools)):
        for one in source:
            write_value(items.items.add(), one, _deeper(depth))


def _deeper(depth: int) -> int:
    if depth == MAX_DEPTH:
        raise ValueError(f"containers are nested more than {MAX_DEPTH} deep, or one contains itself: flatten them")
    return depth + 1


def _array_of(message: pb.Array) -> np.ndarray:
    dtype = np.dtype(message.dtype[:64])
    shape = tuple(message.shape[:64])
    if (
        dtype.kind not in PLAIN_DTYPE_KINDS
        or not dtype.itemsize
        or len(message.data) != dtype.itemsize * math.prod(shape)
    ):
        raise ValueError(f"{len(message.data)} bytes on the wire are not an array {shape} of {dtype}")
    if not message.data:
        return np.zeros(shape, dtype)
    return np.frombuffer(message.data, dtype).reshape(shape).copy()


def _key(pair: pb.Pair) -> Any:
    """Reads a key that is not text, or is the empty text."""
    return read_value(pair.other) if pair.WhichOneof("key") == "other" else ""


def _long(data: bytes) -> int:
    if len(data) > MAX_INTEGER_BYTES:
        raise _too_long(len(data))
    return int.from_bytes(data, "little", signed=True)


def _set_of(message: pb.Items) -> set[Any]:
    if len(message.items) > MAX_KEYS:
        raise _too_many(len(message.items))
    return {read_value(item) for item in message.items}


def _too_long(size: int) -> ValueError:
    return ValueError(
        f"an integer of {size:,} bytes cannot be sent: the limit is {MAX_INTEGER_BYTES:,}. Send it as text."
    )


def _too_many(size: int) -> ValueError:
    return ValueError(f"a set, or a mapping with keys other than text, of {size:,}: {MAX_KEYS:,} are the most")


WRITERS: dict[type, Callable[[pb.Value, Any, int], None]] = {
    type(None): lambda into, _value, _depth: setattr(into, "none", True),
    bool: _plain("truth"),
    int: _integer,
    float: _plain("real"),
    str: _text,
    bytes: _plain("data"),
    list: _items("list"),
    tuple: _items("tuple"),
    set: _set,
    dict: _mapping,
    np.ndarray: lambda into, value, _depth: _array(into.array, value),
    Chat: _chat,
}
READERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda _: None,
    "long": _long,
    "surrogates": lambda data: data.decode("utf-8", "surrogatepass"),
    "list": lambda message: [read_value(item) for item in message.items],
    "tuple": lambda message: tuple(read_value(item) for item in message.items),
    "set": _set_of,
    "mapping": read_mapping,
    "array": _array_of,
    "scalar": lambda message: _array_of(message)[()],
    "chat": lambda message: Chat(
        tuple(read_value(item) for item in message.messages.items),
        tuple(read_value(item) for item in message.tools.items),
    ),
}
