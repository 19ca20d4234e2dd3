"""Templates of prompts, a text with places for values such as "Solve {question}", or messages of
such texts, and the turns that show them."""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from palestra.core.chat import Chat
from palestra.core.config.key_hints import nearest
from palestra.core.http.calls import parse_conversation
from palestra.core.types import Seat
from palestra.envs.step_values import number

Template = str | Sequence[Mapping[str, str]]
Turn = tuple[Seat, Template]
TRANSCRIPT = "transcript"  # the name of all answers so far


class _WholeNames(string.Formatter):
    """Fills in values by their whole name: "{a.b}" is the value called "a.b", and no attribute of one."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        return kwargs[field_name], field_name


_FORMATTER = _WholeNames()


def fill_template(template: Template, values: Mapping[str, Any]) -> str | Chat:
    """Returns the prompt of a template. A value that is a list of messages is the prompt if the template is its name
    alone. Messages without names, at the beginning of a template, are marked as shared by all its prompts."""
    if isinstance(template, str):
        whole = values.get(template[1:-1]) if is_name_alone(template) else None
        if isinstance(whole, list | tuple):
            return Chat(tuple(map(dict, whole)))
        return _FORMATTER.vformat(template, (), values)
    filled = tuple({**message, "content": _FORMATTER.vformat(message["content"], (), values)} for message in template)
    constant = itertools.takewhile(lambda message: not any(_names(message["content"])), template[:-1])
    return Chat(filled, num_shared=len(list(constant)))


def template_names(template: Template) -> list[str]:
    """Returns the names of the values that a template shows, each once. Raises ValueError if it is no template."""
    if isinstance(template, str):
        return list(dict.fromkeys(_names(template)))
    check_messages(template)
    if not all(isinstance(message.get("content"), str) for message in template):
        raise ValueError(f"{template!r:.60} has a message without a text as content, in which names are filled in")
    return list(dict.fromkeys(chain.from_iterable(_names(message["content"]) for message in template)))


def is_name_alone(template: Template) -> bool:
    """Returns whether a template is one name: "{prompt}"."""
    return isinstance(template, str) and template_names(template) == [template[1:-1]]


def _names(text: str) -> Iterator[str]:
    try:
        for _, name, format_spec, _ in _FORMATTER.parse(text):
            if name is not None:
                yield name
                yield from _names(format_spec or "")
    except ValueError as error:
        raise ValueError(f"{text[:60]!r} is no template ({error}): write {{{{ and }}}} for braces") from None


def check_messages(messages: Any) -> None:
    """Raises ValueError for messages that are no prompt: those that no conversation has, or that end with an answer."""
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"{messages!r:.60} is neither a text nor a list of messages")
    parse_conversation([dict(one) if isinstance(one, Mapping) else one for one in messages])
    if messages[-1]["role"] == "assistant":
        raise ValueError("messages end with an answer: the last message must be one that is answered, such as user's")


def check_value(value: Any, *, may_be_messages: bool) -> None:
    """Raises ValueError for a value that no prompt shows: only texts, numbers, and messages as a whole prompt are."""
    if isinstance(value, str):
        check_messages([{"role": "user", "content": value}])
    elif number(value) is None:
        if not may_be_messages:
            raise ValueError(f"{value!r:.60} is a {type(value).__name__}: write a text or a number")
        check_messages(value)


def content_key(values: Sequence[Any]) -> str:
    """Returns a text that is the same for equal values: of one text, the text itself."""
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json.dumps(values[0] if len(values) == 1 else list(values), sort_keys=True, default=str)


def read_turns(order: list[Seat], prompts: Mapping[Seat, Any]) -> list[Turn]:
    """Returns the seat and the template of each turn. Raises ValueError if seats and prompts do not fit together."""
    if unlike := [seat for seat in [*order, *prompts] if seat not in prompts or seat not in order]:
        raise ValueError(
            f"prompts are of {', '.join(prompts) or 'none'}, and seats are {', '.join(order) or 'none'}: "
            f"{unlike[0]} is only in one of them"
        )
    if not order:
        raise ValueError('prompts: there are none; write {"writer": "...", "editor": "... {writer}"}')
    turns: list[Turn] = []
    for seat in order:
        earlier = sum(own == seat for own, _ in turns)
        turns.append((seat, _template_of_turn(seat, prompts[seat], earlier, order.count(seat))))
    return turns


def _template_of_turn(seat: Seat, prompt: Any, turn: int, count: int) -> Template:
    is_by_turn = isinstance(prompt, list | tuple) and not all(isinstance(part, Mapping) for part in prompt)
    if is_by_turn and len(prompt) != count:
        raise ValueError(f"prompts: {seat} has {len(prompt)} prompts and {count} turns: give one for each turn, or one")
    if is_by_turn:
        return prompt[turn]
    return prompt


def shown_columns(turns: Sequence[Turn], columns: Sequence[str]) -> dict[str, bool]:
    """Returns the columns that the prompts show, and whether each may hold messages, since it is
    always a whole prompt. Raises ValueError for names of anything that is not known at the turn."""
    seats = [seat for seat, _ in turns]
    if shadowed := [seat for seat in seats[:-1] if seat in columns]:
        raise ValueError(f"{shadowed[0]} is a seat and a column of the rows: rename one of them")
    shown: dict[str, bool] = {}
    for i, (seat, template) in enumerate(turns):
        try:
            names = template_names(template)
        except ValueError as error:
            raise ValueError(f"prompts: {seat}: {error}") from None
        if template in columns:
            raise ValueError(f'the prompt of {seat} is the word "{template}": for the column, write "{{{template}}}"')
        known = [*columns, *seats[:i], TRANSCRIPT]
        for name in names:
            if name not in known:
                raise ValueError(_unknown_name(seat, name, seats, known))
            if name in columns:
                shown[name] = shown.get(name, True) and is_name_alone(template)
    if TRANSCRIPT in shown and len(turns) > 1:
        raise ValueError(f"{TRANSCRIPT} is a column of the rows, and in prompts all answers so far: rename the column")
    return shown


def _unknown_name(seat: Seat, name: str, seats: Sequence[Seat], known: Sequence[str]) -> str:
    if name in seats:
        return (
            f"the prompt of {seat} shows {{{name}}}, who has not answered then (turns: {', '.join(seats)}): write "
            f"a list of prompts for {seat}, one for each turn, or show {{transcript}}"
        )
    return f"row 0 has no {name}, which the prompt of {seat} shows{nearest(name, known)}; there are {', '.join(known)}"
