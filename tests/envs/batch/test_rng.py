"""The random numbers of compiled kernels equal NumPy's."""

import numpy as np
import pytest

from palestra.envs.batch.rng import next_uint64, random_below, seed_streams, uniform


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**40])
def test_stream_equals_numpy_default_rng(seed: int) -> None:
    row, theirs = seed_streams(np.array([seed]))[0], np.random.default_rng(seed)
    for i in range(500):
        n = i % 7 + 1
        assert uniform(row, -1.0, 2.0) == theirs.uniform(-1, 2)
        assert random_below(row, n) == theirs.integers(n)
        assert random_below(row, 3_000_000_000) == theirs.integers(3_000_000_000)
        assert next_uint64(row) == theirs.bit_generator.random_raw()


def test_streams_of_different_seeds_differ() -> None:
    rows = seed_streams(np.array([1, 2]))
    assert [uniform(rows[0], 0, 1) for _ in range(4)] != [uniform(rows[1], 0, 1) for _ in range(4)]
