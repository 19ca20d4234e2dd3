"""Reward functions of users: `reward(row, answer)`, or TRL's `reward(completions, **columns)`, plain or async."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass
from typing import Any

from palestra.core.config import load_object
from palestra.core.failures import exit_as_error
from palestra.core.types import Seat
from palestra.core.user_functions import check_function
from palestra.envs.step_values import number

Row = Mapping[str, Any]
COMPLETIONS = "completions"  # the parameter by which TRL's form is recognised
WANTED = "a finite number, True or False, or None for no reward"


@dataclass(frozen=True)
class Played:
    """A row and the answers to it, as reward functions get them. `number` is the row's in messages;
    `batch` is the same in TRL's form, a list of one value for each name."""

    row: Row
    number: int
    answers: Any
    batch: Mapping[str, list[Any]]


@dataclass(frozen=True)
class RewardFunction:
    """A user's function, and its name in logs and messages. `what` is the thing in messages; `asked` are the names that
    a function in TRL's form asks for (None: it is in palestra's form)."""

    name: str
    function: Callable[..., Any]
    what: str
    asked: Collection[str] | None

    async def value(self, played: Played) -> Any:
        """Returns the function's value. Raises ValueError with the row and the function if it raises."""
        try:
            with exit_as_error():
                value = self._call(played)
                if inspect.isawaitable(value):
                    value = await value
        except Exception as error:
            raise ValueError(
                f'the {self.what} function "{self.name}" failed for row {played.number} with '
                f"{type(error).__name__}: {error}"
            ) from error
        if self.asked is None:
            return value
        if isinstance(value, str | Mapping | Set) or not hasattr(value, "__len__") or len(value) != 1:
            raise self._refusal(value, played, "a list with a number for each completion")
        return value[0]

    def _call(self, played: Played) -> Any:
        """Calls the function with containers of its own, which it may change."""
        if self.asked is None:
            return self.function(_copy_containers(played.row), played.answers)
        return self.function(
            **{name: _copy_containers(values) for name, values in played.batch.items() if name in self.asked}
        )

    def by_payee(self, value: Any, played: Played, seats: Collection[Seat]) -> dict[Seat | None, float | bool]:
        """Returns the reward of each seat, or, under None, that of the team. Raises ValueError if it is none."""
        by_seat = value if isinstance(value, Mapping) and value else {None: value}
        paid: dict[Seat | None, float | bool] = {}
        for seat, reward in by_seat.items():
            amount = number(reward)
            if (seat is not None and seat not in seats) or amount is None or not math.isfinite(amount):
                by_seat_too = "" if len(seats) == 1 else f", or such by seat ({', '.join(seats)})"
                raise self._refusal(value, played, WANTED + by_seat_too)
            paid[seat] = bool(amount) if _is_flag(reward) else amount
        return paid

    def _refusal(self, value: Any, played: Played, wanted: str) -> ValueError:
        return ValueError(
            f'the {self.what} function "{self.name}" returned {repr(value)[:80]} ({type(value).__name__}) for row '
            f"{played.number}: return {wanted}"
        )


def _copy_containers(value: Any) -> Any:
    """Returns a value with its mappings, lists and sets copied at any depth; what is in them, a model for example, is
    the same."""
    if isinstance(value, Mapping):
        return {key: _copy_containers(own) for key, own in value.items()}
    if isinstance(value, list):
        return [_copy_containers(own) for own in value]
    return set(value) if isinstance(value, set) else value


def _is_flag(value: Any) -> bool:
    """Returns whether a value is True or False, of Python, NumPy or torch."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


def read_functions(given: Any, argument: str, names: Collection[str], what: str = "reward") -> list[RewardFunction]:
    """Returns the functions of a function, a "module:function", a list of them, or a mapping of names to them.

    `argument` is the second one of palestra's form, `names` are what TRL's form may ask for beside prompts and
    completions. Raises ValueError for what is no function, or takes other arguments.
    """
    named = [("", given)]
    if isinstance(given, Mapping):
        named = list(given.items())
    elif isinstance(given, list | tuple):
        named = [("", one) for one in given]
    functions = [_read_function(name, one, argument, {"prompts", COMPLETIONS, *names}, what) for name, one in named]
    if not functions:
        raise ValueError(f"{what}: there is no function: write def {what}(row, {argument})")
    for function in functions:
        if twice := [name for name in ("prompts", COMPLETIONS) if name in names and name in (function.asked or ())]:
            raise ValueError(
                f'the {what} function "{function.name}" asks for {twice[0]}, which is also a column of the rows: '
                "rename the column"
            )
    if len({function.name for function in functions}) < len(functions):
        raise ValueError(f"{what}: two functions have one name: name them, {{'correct': f, 'short': g}}")
    return functions


def _read_function(name: str, given: Any, argument: str, known: Collection[str], what: str) -> RewardFunction:
    function = given
    if isinstance(given, str):
        function = load_object(given, what)
    name = name or getattr(function, "__name__", type(function).__name__)
    if callable(function):
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # some functions of C have none
            return RewardFunction(name, function, what, None)
        if COMPLETIONS in signature.parameters:
            return RewardFunction(name, function, what, _asked_names(name, signature, known, what))
        names = list(signature.parameters)
        if names[1:2] == ["row"] and names[0] in ("answer", "answers"):
            raise ValueError(
                f'the {what} function "{name}" takes ({names[0]}, row), and is called with (row, {argument}): swap them'
            )
    check_function(function, f'the {what} function "{name}"', "row", argument)
    return RewardFunction(name, function, what, None)


def _asked_names(name: str, signature: inspect.Signature, known: Collection[str], what: str) -> Collection[str]:
    """Returns which of the `known` names a function in TRL's form asks for. Raises ValueError if it needs others."""
    parameters = signature.parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        asked = set(known)
    else:
        asked = {p.name for p in parameters}
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if lacking := [p.name for p in named if p.default is p.empty and p.name not in known]:
        raise ValueError(
            f'the {what} function "{name}" asks for {lacking[0]}, and there are {", ".join(sorted(known))}: '
            "correct the name, or give it a default"
        )
    return asked
