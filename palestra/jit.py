"""Numba decorators for functions on arrays: compiled at the first call and cached on disk. Only this module imports
numba."""

from __future__ import annotations

try:
    import numba
except ImportError as error:
    raise ValueError(f"vectorised games need a compiler ({error}): pip install 'palestra[games]'") from error

# IEEE 754 division without exceptions and sums in source order: bit-identical results on machines of one architecture.
jit = numba.njit(cache=True, nogil=True, error_model="numpy")
jit_inline = numba.njit(cache=True, nogil=True, error_model="numpy", inline="always")
