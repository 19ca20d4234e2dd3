"""Values as they are stored: lossless as JSON, or refused."""

import ast
import dataclasses
import datetime
import decimal
import enum
import fractions
import json
import pathlib
import uuid

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.core.plain_values import plain_value


@dataclasses.dataclass
class Point:
    x: int
    y: tuple


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        ((1, [2.5, None], True), [1, [2.5, None], True]),
        ({3, 1}, [1, 3]),
        ({1, "a", (2,)}, [1, "a", [2]]),
        (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.datetime64("2026-01-02"), "2026-01-02"),
        (np.array(["2026-01-02T03"], "datetime64[ns]"), ["2026-01-02T03:00:00.000000000"]),
        (np.datetime64("2026-01-02T03:04:05"), "2026-01-02T03:04:05"),
        (datetime.datetime(2026, 1, 2, 3), "2026-01-02T03:00:00"),
        (datetime.time(3, 4), "03:04:00"),
        (decimal.Decimal("0.10"), "0.10"),
        (fractions.Fraction(1, 3), "1/3"),
        (pathlib.PurePosixPath("a/b"), "a/b"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (Colour.RED, "Colour.RED"),
        (Point(1, (2, 3)), {"x": 1, "y": [2, 3]}),
        ({2: "a", None: "b", True: "c", 0.5: "d"}, {"2": "a", "true": "c", "null": "b", "0.5": "d"}),
        ({(0, 1): "x", ("a", (2,)): "y"}, {"(0, 1)": "x", "('a', [2])": "y"}),
        ({datetime.date(2026, 1, 2): 1, np.int64(3): 2}, {"2026-01-02": 1, "3": 2}),
    ],
)
def test_stored_forms(value, stored):
    assert plain_value(value) == stored and json.loads(json.dumps(plain_value(value))) == stored


def test_tuple_keys_are_read_back_as_they_were():
    (text,) = plain_value({(0, "a", 1.5): None})
    assert ast.literal_eval(text) == (0, "a", 1.5)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"x", "a bytes"),
        (object(), "a object"),
        ({"a": [lambda: 0]}, "a function"),
        ({b"x": 1}, "a mapping with the key b'x'"),
        ({1: "a", "1": "b"}, "two keys that are '1' as text"),
        ("a\ud83d", "lone surrogate"),
        ({"a\ud83d": 1}, "lone surrogate"),
        pytest.param(10**5000, "an integer of", id="integer"),
        (Point, "a type"),
        (np.longdouble(1) / 3, "a numpy.longdouble"),
        (np.array([np.longdouble(1)]), "a numpy.ndarray"),
        (np.timedelta64(5, "ns"), "a numpy.timedelta64"),
    ],
)
def test_what_cannot_be_stored_is_refused(value, message):
    with pytest.raises(ValueError, match=message):
        plain_value(value)


def test_a_value_that_contains_itself_is_refused():
    value = []
    value.append(value)
    with pytest.raises(ValueError, match="contains itself"):
        plain_value(value)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8"))


@given(st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner)))
def test_json_values_stay_as_they_are(value):
    try:
        assert plain_value(value) == value
    except ValueError as error:
        assert "surrogate" in str(error)


ODD = st.binary() | st.dates() | st.decimals() | st.complex_numbers() | st.sets(st.integers() | st.text()) | st.uuids()


@given(st.recursive(SCALARS | ODD, lambda inner: st.lists(inner) | st.dictionaries(SCALARS | st.dates(), inner)))
def test_any_value_is_storable_or_refused(value):
    try:
        plain = plain_value(value)
    except ValueError:
        return
    json.dumps(plain, ensure_ascii=False).encode()
    assert plain_value(plain) == plain or "nan" in str(plain)
