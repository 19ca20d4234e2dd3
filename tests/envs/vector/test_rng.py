"""Our kernels draw NumPy's own numbers."""

from __future__ import annotations

import numpy as np
import pytest

from palestra.envs.vector.rng import below, next64, seeded, uniform


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**40])
def test_a_stream_is_that_of_default_rng(seed: int) -> None:
    row, theirs = seeded(np.array([seed]))[0], np.random.default_rng(seed)
    for i in range(500):
        n = i % 7 + 1
        assert uniform(row, -1.0, 2.0) == theirs.uniform(-1, 2)
        assert below(row, n) == theirs.integers(n)
        assert below(row, 3_000_000_000) == theirs.integers(3_000_000_000)
        assert next64(row) == theirs.bit_generator.random_raw()


def test_streams_of_different_seeds_differ() -> None:
    rows = seeded(np.array([1, 2]))
    assert [uniform(rows[0], 0, 1) for _ in range(4)] != [uniform(rows[1], 0, 1) for _ in range(4)]
