"""Functions over arrays, compiled on first use and kept on the disk. The only place that knows the compiler."""

from __future__ import annotations

try:
    import numba
except ImportError as error:
    raise ValueError(f"vectorised games need a compiler ({error}): pip install 'palestra[games]'") from error

# Divisions are those of IEEE 754 (no exception), sums keep their order: the same bits on every machine of a kind.
kernel = numba.njit(cache=True, nogil=True, error_model="numpy")
inline = numba.njit(cache=True, nogil=True, error_model="numpy", inline="always")
