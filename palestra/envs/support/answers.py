"""Reads the text of an answer: what follows its last "####" if there is one."""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_ANSWER_CHARS = 4000  # characters read from the end of an answer: bounds the cost of runaway answers
NEGATIONS = ("not", "never")


def answer_text(answer: object) -> str:
    """Returns the text of an answer after its last "####" if there is one, without surrounding spaces."""
    return str(answer)[-MAX_ANSWER_CHARS:].rpartition("####")[2].strip()


def mark_answer(answer: str, *, is_compact: bool) -> str:
    """Returns an answer as a seat writes it: after "####", except in the compact rendering."""
    if is_compact:
        return answer
    return f"#### {answer}"


def answer_words(answer: object) -> list[str]:
    """Returns the lower-case words of an answer, after its last "####" if there is one. Commas count as spaces."""
    return answer_text(answer).replace(",", " ").lower().split()


def read_choice(answer: object, choices: Sequence[str]) -> str | None:
    """Returns the one of `choices`, words in lower case, that the text after the last "####" names, or the whole answer
    without one; None unless it names exactly one, and not behind "not"."""
    words = re.findall(r"[^\W_]+", str(answer).rpartition("####")[2].lower())
    named = [choice for choice in choices if choice in words]
    if len(named) != 1 or words[words.index(named[0]) - 1] in NEGATIONS:
        return None
    return named[0]
