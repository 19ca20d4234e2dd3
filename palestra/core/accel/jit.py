"""Numba decorators for functions on arrays: compiled at the first call and cached on disk. Only this module imports
numba. Without it the functions are defined all the same, so that configs can be read, and each call raises
ValueError."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

try:
    import numba
except ImportError as error:
    IMPORT_ERROR = str(error)
else:
    IMPORT_ERROR = ""


def require_compiler() -> None:
    """Raises ValueError, with the extra to install, if numba cannot be imported."""
    if IMPORT_ERROR:
        raise ValueError(f"vector envs need a compiler ({IMPORT_ERROR}): pip install 'palestra[games]'")


def _without_compiler(function: Callable[P, R]) -> Callable[P, R]:
    """Returns a function that raises ValueError when it is called."""

    @wraps(function)
    def refuse(*args: P.args, **options: P.kwargs) -> R:
        require_compiler()
        return function(*args, **options)

    return refuse


jit: Callable[[Callable[P, R]], Callable[P, R]]
jit_inline: Callable[[Callable[P, R]], Callable[P, R]]
if IMPORT_ERROR:
    jit = jit_inline = _without_compiler
else:
    # IEEE 754 division without exceptions and sums in source order: bit-identical results on machines of one
    # architecture.
    jit = numba.njit(cache=True, nogil=True, error_model="numpy")
    jit_inline = numba.njit(cache=True, nogil=True, error_model="numpy", inline="always")
