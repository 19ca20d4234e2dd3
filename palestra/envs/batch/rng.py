"""NumPy's random numbers inside compiled kernels: the stream of `numpy.random.default_rng(seed)`, one per game.

PCG64 (O'Neill, 2014; 128-bit state, XSL-RR output). A game that draws in the same order as another library's env gets
the same numbers from the same seed. A row, uint64 [RNG_WORDS], holds state and increment (high word, low word each),
the unused half of the last 64-bit word, and a flag for it.
"""

from __future__ import annotations

import numpy as np

from palestra.core.accel.jit import jit

RNG_WORDS = 6
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ONE = np.uint64(1)
_MULTIPLIER_HIGH = np.uint64(0x2360ED051FC65DA4)
_MULTIPLIER_LOW = np.uint64(0x4385DF649FCCF645)
_MASK64 = (1 << 64) - 1


def seed_streams(seeds: np.ndarray) -> np.ndarray:
    """Returns the streams of `default_rng(seed)` for all `seeds` [B], uint64 [B, RNG_WORDS]."""
    rows = np.zeros((len(seeds), RNG_WORDS), np.uint64)
    for row, seed in zip(rows, seeds, strict=True):
        state = np.random.PCG64(int(seed)).state["state"]
        row[:4] = [state["state"] >> 64, state["state"] & _MASK64, state["inc"] >> 64, state["inc"] & _MASK64]
    return rows


@jit
def _multiply(a: np.uint64, b: np.uint64) -> tuple[np.uint64, np.uint64]:
    """Returns the 128-bit product a * b as (high word, low word)."""
    a_low = a & _LOW
    a_high = a >> _HALF
    b_low = b & _LOW
    b_high = b >> _HALF
    low = a_low * b_low
    middle = a_high * b_low + (low >> _HALF)
    cross = a_low * b_high + (middle & _LOW)
    return a_high * b_high + (middle >> _HALF) + (cross >> _HALF), (cross << _HALF) | (low & _LOW)


@jit
def next_uint64(row: np.ndarray) -> np.uint64:
    """Returns the next 64 random bits of a stream and advances it."""
    high, low = _multiply(row[1], _MULTIPLIER_LOW)
    high = high + row[0] * _MULTIPLIER_LOW + row[1] * _MULTIPLIER_HIGH
    sum_low = low + row[3]
    carry = np.uint64(sum_low < low)
    row[0], row[1] = high + row[2] + carry, sum_low
    word = row[0] ^ row[1]
    turn = row[0] >> np.uint64(58)
    return (word >> turn) | (word << ((np.uint64(64) - turn) & np.uint64(63)))


@jit
def next_uint32(row: np.ndarray) -> np.uint64:
    """Returns the next 32 random bits: first the lower half of a 64-bit word, then its upper half."""
    if row[5] != np.uint64(0):
        row[5] = np.uint64(0)
        return row[4]
    word = next_uint64(row)
    row[4], row[5] = word >> _HALF, _ONE
    return word & _LOW


@jit
def uniform(row: np.ndarray, low: float, high: float) -> float:
    """Returns the next number of `Generator.uniform(low, high)`, float64."""
    return low + (high - low) * (float(next_uint64(row) >> np.uint64(11)) * (1.0 / 9007199254740992.0))


@jit
def random_below(row: np.ndarray, n: int) -> int:
    """Returns the next number of `Generator.integers(n)`: an integer from 0 to n-1, for n up to
    2**32 - 1 (Lemire, 2019)."""
    if n <= 1:
        return 0
    size = np.uint64(n)
    product = next_uint32(row) * size
    if (product & _LOW) < size:
        threshold = (_LOW - (size - _ONE)) % size
        while (product & _LOW) < threshold:
            product = next_uint32(row) * size
    return np.int64(product >> _HALF)  # type: ignore[return-value] # a plain int of a uint64 would become a float
