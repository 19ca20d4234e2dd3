"""Serialised values keep their exact types; values that cannot be serialised are named."""

import math
import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from palestra.core.chat import Chat
from palestra.core.types import Step
from palestra.envs.base import _same
from palestra.envs.remote import envs_pb2 as pb
from palestra.envs.remote.serialization import (
    encode_mapping,
    encode_rng_state,
    encode_value,
    read_mapping,
    read_step,
    read_value,
    restore_rng_state,
    step_digest,
    write_step,
)

TEXTS = st.text(st.characters(codec=None)) | st.text(st.characters(categories=["Cs", "Ll"]))  # also lone surrogates
NUMBERS = st.integers() | st.integers(-(2**200), 2**200) | st.floats(allow_nan=True)
LEAVES = st.none() | st.booleans() | NUMBERS | TEXTS | st.binary()
DTYPES = arrays.scalar_dtypes() | arrays.unicode_string_dtypes() | arrays.byte_string_dtypes()
ARRAYS = arrays.arrays(DTYPES, arrays.array_shapes(min_dims=0, min_side=0, max_side=3))
KEYS = LEAVES | st.tuples(TEXTS, st.integers())


def containers(inner):
    return (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.sets(LEAVES, max_size=4)
    )


VALUES = st.recursive(LEAVES | ARRAYS, containers, max_leaves=12)


def there_and_back(value):
    return read_value(pb.Value.FromString(encode_value(value).SerializeToString()))


def is_equal(one, other):
    """As in the env check; sets by their members, one of which may be nan."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, set):
        return type(one) is type(other) and sorted(map(repr, one)) == sorted(map(repr, other))
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(is_equal, one, other))
    if isinstance(one, dict):
        keys = zip(one, other, strict=True)  # in the same order
        return (
            all(map(is_equal, *zip(*keys, strict=True))) and all(map(is_equal, one.values(), other.values()))
            if one
            else True
        )
    return _same(one, other)


@settings(max_examples=50)
@given(VALUES)
def test_values_survive_serialization(value):
    assert is_equal(there_and_back(value), value)


@settings(max_examples=30)
@given(st.dictionaries(TEXTS, VALUES, max_size=3), st.dictionaries(TEXTS, NUMBERS), VALUES, st.booleans())
def test_steps_survive_serialization(observations, rewards, state, truncated):
    step = Step(observations, rewards, 0.5, {"a": ["x"]}, state, truncated, {"success": True})
    message = pb.Step()
    write_step(message, step)
    back = read_step(pb.Step.FromString(message.SerializeToString()))
    for part in ("observations", "rewards", "team_reward", "legal_actions", "state", "truncated", "info"):
        assert is_equal(getattr(back, part), getattr(step, part)), part


def test_int_float_and_nan_are_preserved():
    back = there_and_back([1, 1.0, True, float("nan"), -0.0, 2**63, np.float32(1), np.bool_(True)])
    assert list(map(type, back)) == [int, float, bool, float, float, int, np.float32, np.bool_]
    assert math.isnan(back[3]) and math.copysign(1, back[4]) == -1 and back[5] == 2**63


def test_arrays_are_writable_and_keep_their_byte_order():
    back = there_and_back(np.arange(6, dtype=">i4").reshape(2, 3).T)
    back[0, 0] = 7
    assert back.dtype.str == ">i4" and back.tolist() == [[7, 3], [1, 4], [2, 5]]


def test_conversations_survive_serialization():
    chat = Chat(({"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": None}), ({"name": "add"},))
    assert there_and_back({"seat": chat}) == {"seat": chat}


def test_empty_step_is_zero_bytes():
    message = pb.Step()
    write_step(message, Step({}))
    assert message.ByteSize() == 0 and read_step(message) == Step({})


@dataclass
class Board:
    size: int


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Board(3), r"test_serialization.Board cannot be sent.*Board\(size=3\).*Use None, bool"),
        (np.array([object()]), "an array of dtype object cannot be sent"),
        (1j, "builtins.complex cannot be sent"),
        ({"a": [lambda: 0]}, "builtins.function cannot be sent"),
    ],
)
def test_unserializable_values_are_named(value, message):
    with pytest.raises(ValueError, match=message):
        encode_value(value)
    with pytest.raises(ValueError, match=f"in a step's info: .*{message}"):
        write_step(pb.Step(), Step({}, info={"board": value}))


def test_recursive_list_is_refused():
    endless = []
    endless.append(endless)
    with pytest.raises(ValueError, match="one contains itself"):
        encode_value(endless)
    deep = 1
    for _ in range(40):
        deep = [deep]
    assert there_and_back(deep) == deep


def test_invalid_array_bytes_are_refused():
    for dtype, shape, data in [("<f4", [2], b"\x00"), ("|O", [0], b""), ("<f4", [10**12], b"")]:
        with pytest.raises(ValueError, match="are not an array"):
            read_value(pb.Value(array=pb.Array(dtype=dtype, shape=shape, data=data)))
    with pytest.raises(ValueError, match="of an unknown kind"):
        read_value(pb.Value())


def test_digests_are_equal_exactly_for_equal_steps():
    def of(step):
        message = pb.Step()
        write_step(message, step)
        return step_digest(message)

    names = [f"seat {i}" for i in range(20)]
    one = Step({"a": "x"}, info={"invalid": set(names)})
    assert of(one) == of(Step({"a": "x"}, info={"invalid": set(reversed(names))}))
    assert len({of(one), of(Step({"a": "x"})), of(Step({"a": "x"}, {"a": 0.0})), of(Step({"a": "x"}, {"a": 0}))}) == 4


def test_mappings_keep_their_order():
    seats = {"walker": "1", "guide": "2", "": "3"}
    assert list(read_mapping(encode_mapping(seats)).items()) == list(seats.items())


def test_random_generators_survive_serialization():
    rng, other = random.Random(3), random.Random()
    rng.random()
    restore_rng_state(other, encode_rng_state(rng))
    assert [other.random() for _ in range(700)] == [rng.random() for _ in range(700)]
