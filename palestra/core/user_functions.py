"""Checks of what a user wrote in Python, before a run loads anything: a function or a method takes what it will be
called with."""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

OURS = "palestra"  # the package whose methods a user's class overrides


def check_function(function: Any, what: str, *arguments: str) -> None:
    """Raises ValueError unless `function`, called `what` in the message, can be called with these arguments."""
    called = f"({', '.join(arguments)})"
    if not callable(function):
        raise ValueError(f"{what} must be a function of {called}, and is {function!r:.60}")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions that are built in have none
        return
    if not _can_be_called(signature, arguments, {}):
        raise ValueError(f"{what} takes {_parameter_names(signature)}, and is called with {called}")


def check_overrides(cls: type, what: str, *, may_be_coroutines: bool = False) -> None:
    """Raises ValueError if a public method of a user's class cannot be called as the one of palestra that it overrides.
    `what` is the class in messages; `may_be_coroutines` allows coroutine functions for plain ones."""
    for name in [name for name in dir(cls) if not name.startswith("_")]:
        owners = [base for base in cls.__mro__ if name in vars(base)]
        theirs = next(filter(_is_ours, owners), None)
        if theirs and not _is_ours(owners[0]):
            _check_override(vars(owners[0])[name], vars(theirs)[name], f"{what}.{name}", may_be_coroutines)


def _is_ours(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == OURS


def _check_override(own: Any, theirs: Any, where: str, may_be_coroutines: bool) -> None:
    if isinstance(theirs, property) and isinstance(own, FunctionType):
        raise ValueError(f"{where} is a method, and is read as a value: write @property above it")
    if not isinstance(theirs, FunctionType):
        return
    if isinstance(own, property):
        raise ValueError(f"{where} is a property, and is called as a method: leave out @property")
    if not isinstance(own, FunctionType):
        return
    may_be_coroutines |= inspect.iscoroutinefunction(theirs)
    if inspect.iscoroutinefunction(own) and not may_be_coroutines:
        raise ValueError(f"{where} is not awaited: write it without async")
    signature = inspect.signature(own)
    parameters = inspect.signature(theirs).parameters.values()
    by_position = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_name = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
    if not _can_be_called(signature, by_position, by_name):
        called = ", ".join([*by_position, *by_name])
        raise ValueError(f"{where} takes {_parameter_names(signature)}, and is called with ({called})")


def _can_be_called(signature: inspect.Signature, by_position: Any, by_name: dict[str, None]) -> bool:
    try:
        signature.bind(*by_position, **by_name)
    except TypeError:
        return False
    return True


def _parameter_names(signature: inspect.Signature) -> str:
    """Returns the names of the parameters, without their types."""
    marks: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return f"({', '.join(marks.get(p.kind, '') + p.name for p in signature.parameters.values())})"
