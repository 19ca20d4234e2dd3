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

from palestra.chat import Chat
from palestra.remote import envs_pb2 as pb
from palestra.types import Step

DEEPEST = 40  # nesting of containers: protobuf's limit is 100 message levels, and each container takes two
LONGEST = 1024  # bytes of an integer: arithmetic on longer ones is slow enough for a denial of service
MOST_KEYS = 16_384  # of a set, or of a mapping with non-text keys: colliding hashes cost quadratic time
PLAIN = "?biufcSUmM"  # numpy dtype kinds without references to other objects
SEATED = ("observations", "rewards", "info")  # fields of Step that are mappings
DEFAULTS: dict[str, Any] = {"team_reward": 0.0, "legal": None, "state": None, "truncated": False}


def fill(into: pb.Value, value: Any, depth: int = 0) -> None:
    """Writes `value` into the empty message `into`.

    Raises ValueError if it is too large, too deep or of another type.
    """
    write = WRITERS.get(type(value))
    if write:
        write(into, value, depth)
    elif isinstance(value, np.generic):
        _array(into.scalar, np.asarray(value))
    else:
        raise ValueError(
            f"a {type(value).__module__}.{type(value).__qualname__} cannot be sent to or from an env on another "
            f"machine: {_short(value)}. Say it in None, bool, int, float, str, bytes, list, tuple, set, dict, numpy "
            "arrays or a palestra.chat.Chat"
        )


def fill_pairs(into: pb.Pairs, mapping: Mapping[Any, Any], depth: int = 0) -> None:
    """Writes `mapping` into the empty message `into`. Raises ValueError as `fill`."""
    for key, value in mapping.items():
        pair = into.pairs.add()
        if type(key) is not str:
            fill(pair.other, key, depth)
        else:
            try:
                pair.name = key
            except UnicodeEncodeError:
                fill(pair.other, key, depth)
        fill(pair.value, value, depth)


def value_of(message: pb.Value) -> Any:
    """Reads the value in a message. Raises ValueError if the message is empty, malformed or over a size limit."""
    kind = message.WhichOneof("kind")
    if kind is None:
        raise ValueError("a value on the wire is of no kind that is known here: is the other side newer?")
    found = getattr(message, kind)
    read = READERS.get(kind)
    return read(found) if read else found


def mapping_of(message: pb.Pairs) -> dict[Any, Any]:
    """Reads the dict in a message. Raises ValueError if it is malformed or over a size limit."""
    found = {}
    if len(message.pairs) > MOST_KEYS and any(pair.WhichOneof("key") == "other" for pair in message.pairs):
        raise _too_many(len(message.pairs))
    for pair in message.pairs:
        value = pair.value
        found[pair.name or _key(pair)] = value.text or value_of(value)  # fast path for text
    return found


def encoded(value: Any) -> pb.Value:
    """Returns `value` as a new message. Raises ValueError as `fill`."""
    message = pb.Value()
    fill(message, value)
    return message


def pairs(mapping: Mapping[Any, Any]) -> pb.Pairs:
    """Returns `mapping` as a new message. Raises ValueError as `fill`."""
    message = pb.Pairs()
    fill_pairs(message, mapping)
    return message


# ---- steps


def fill_step(into: pb.Step, step: Step) -> None:
    """Writes a step into an empty message. Raises ValueError that names the field which cannot be serialized."""
    part = ""
    try:
        for part in SEATED:
            mapping = getattr(step, part)
            if mapping:
                fill_pairs(getattr(into, part), mapping)
        for part, default in DEFAULTS.items():
            value = getattr(step, part)
            if value != default if type(value) is type(default) and value is not None else value is not default:
                fill(getattr(into, part), value)
    except ValueError as error:
        raise ValueError(f"in a step's {part}: {error}") from error


def step_of(message: pb.Step) -> Step:
    """Reads the step in a message. Raises ValueError if it is malformed."""
    said = {part: value_of(getattr(message, part)) for part in DEFAULTS if message.HasField(part)}
    mappings = [mapping_of(getattr(message, part)) for part in SEATED]
    return Step(mappings[0], mappings[1], info=mappings[2], **said)


def digest(message: pb.Step) -> bytes:
    """Returns a 16-byte BLAKE2b digest of a serialized step, for comparing replayed steps."""
    return blake2b(message.SerializeToString(deterministic=True), digest_size=16).digest()


# ---- random states


def random_bytes(rng: random.Random) -> bytes:
    """Serializes the state of `rng`: 625 little-endian uint32. The value cached by `gauss` is left out."""
    return np.array(rng.getstate()[1], "<u4").tobytes()


def set_random(rng: random.Random, state: bytes) -> None:
    """Sets the state of `rng` to one serialized by `random_bytes`."""
    rng.setstate((rng.VERSION, tuple(np.frombuffer(state, "<u4").tolist()), None))


# ---- writers and readers by type


def _integer(into: pb.Value, value: int, _: int) -> None:
    if -(2**63) <= value < 2**63:
        into.integer = value
    else:
        if value.bit_length() >= 8 * LONGEST:
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
            fill(add(), item, _deeper(depth))

    return write


def _set(into: pb.Value, value: set[Any], depth: int) -> None:
    """Writes a set in sorted order: iteration order differs between processes."""
    if len(value) > MOST_KEYS:
        raise _too_many(len(value))
    items = [pb.Value() for _ in value]
    for message, item in zip(items, value, strict=True):
        fill(message, item, _deeper(depth))
    into.set.SetInParent()
    into.set.items.extend(sorted(items, key=lambda message: message.SerializeToString(deterministic=True)))


def _mapping(into: pb.Value, value: dict[Any, Any], depth: int) -> None:
    into.mapping.SetInParent()
    fill_pairs(into.mapping, value, _deeper(depth))


def _array(into: pb.Array, value: np.ndarray) -> None:
    if value.dtype.kind not in PLAIN:
        raise ValueError(
            f"an array of dtype {value.dtype} cannot be sent to or from an env on another machine: give it one of "
            "numbers, truth values, dates or text"
        )
    into.dtype, into.data = value.dtype.str, value.tobytes()
    into.shape.extend(value.shape)


def _chat(into: pb.Value, value: Chat, depth: int) -> None:
    into.chat.SetInParent()
    for items, said in ((into.chat.messages, value.messages), (into.chat.tools, value.tools)):
        for one in said:
            fill(items.items.add(), one, _deeper(depth))


def _deeper(depth: int) -> int:
    if depth == DEEPEST:
        raise ValueError(f"containers stand in each other more than {DEEPEST} deep, or one in itself: flatten them")
    return depth + 1


def _array_of(message: pb.Array) -> np.ndarray:
    dtype, shape = np.dtype(message.dtype[:64]), tuple(message.shape[:64])
    if dtype.kind not in PLAIN or not dtype.itemsize or len(message.data) != dtype.itemsize * math.prod(shape):
        raise ValueError(f"{len(message.data)} bytes on the wire are no array {shape} of {dtype}")
    if not message.data:
        return np.zeros(shape, dtype)
    return np.frombuffer(message.data, dtype).reshape(shape).copy()


def _key(pair: pb.Pair) -> Any:
    """Reads a key that is not text, or is the empty text."""
    return value_of(pair.other) if pair.WhichOneof("key") == "other" else ""


def _long(data: bytes) -> int:
    if len(data) > LONGEST:
        raise _too_long(len(data))
    return int.from_bytes(data, "little", signed=True)


def _set_of(message: pb.Items) -> set[Any]:
    if len(message.items) > MOST_KEYS:
        raise _too_many(len(message.items))
    return {value_of(item) for item in message.items}


def _too_long(size: int) -> ValueError:
    return ValueError(f"an integer of {size:,} bytes cannot be sent: {LONGEST:,} are the most. Send it as text.")


def _too_many(size: int) -> ValueError:
    return ValueError(f"a set, or a mapping with keys other than text, of {size:,}: {MOST_KEYS:,} are the most")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


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
    "list": lambda message: [value_of(item) for item in message.items],
    "tuple": lambda message: tuple(value_of(item) for item in message.items),
    "set": _set_of,
    "mapping": mapping_of,
    "array": _array_of,
    "scalar": lambda message: _array_of(message)[()],
    "chat": lambda message: Chat(
        tuple(value_of(item) for item in message.messages.items), tuple(value_of(item) for item in message.tools.items)
    ),
}
