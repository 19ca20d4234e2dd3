r"""Extracts the answer from a text and compares answers that need no symbolic mathematics.

Two answers are equal here (`grading.py` passes all others to `math-verify`) if they are

- the same text, apart from spaces beside operators;
- **plain numbers** of the same value (`plain_numbers`);
- equal **plain relations** between one letter and a plain number: `x > 7/2`, `3.5 < x`, `x \le -1`.
"""

from __future__ import annotations

import re

from palestra.environments.math.plain_numbers import PlainNumber, normalize_latex, parse_plain_number

MAX_ANSWER_CHARS = 1000  # characters of an answer; a longer one is unreadable

_ORDER = r"<=|>=|<|>|≤|≥|\\leq?|\\geq?"
_RELATION = re.compile(rf"([A-Za-z])\s*({_ORDER})\s*(.+)|(.+?)\s*({_ORDER})\s*([A-Za-z])")
_STRICT = {"<": "<", ">": ">", "≤": "<=", "≥": ">=", "<=": "<=", ">=": ">="}
_STRICT |= {"\\le": "<=", "\\leq": "<=", "\\ge": ">=", "\\geq": ">="}
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_AROUND_OPERATOR = re.compile(r" ?([-+*/^_=<>()\[\]{}|&:;!$%\\\u00b1\u00d7\u00b7]) ?")
_AROUND_COMMA = re.compile(r" ?, ?(?!\d{3}(?!\d))|(?<!\d) ?, ?")
_WRAPPED = re.compile(r"\$\$(.+)\$\$|\$(.+)\$|\\\((.+)\\\)|\\\[(.+)\\\]|\*\*(.+)\*\*", re.DOTALL)


def final_answer(text: str, *, allow_unmarked: bool = False) -> str | None:
    r"""Returns the first non-empty line after the last #### of a text, or the content of the last \boxed{} there.

    None if neither is present or it is empty. With `allow_unmarked`, a text without a marker is itself an answer.
    Surrounding markup is removed, and the result is cut off one character after `MAX_ANSWER_CHARS`: it
    is then too long.
    """
    _, marked, tail = text.rpartition("####")
    answer = boxed_content(tail)
    if answer is None and (marked or allow_unmarked):
        answer = next((line for line in tail.splitlines() if line.strip()), "")
    return strip_markup(answer or "")[: MAX_ANSWER_CHARS + 1] or None


def multiline_answer(text: str, *, allow_unmarked: bool = False) -> str | None:
    r"""Returns all text after the last #### of a text, for answers of several lines.

    Without ####: with `allow_unmarked` the whole text, otherwise the content of the last \boxed{}. None if there is no
    answer.
    """
    _, marked, tail = text.rpartition("####")
    if marked or allow_unmarked:
        return tail.strip() or None
    return boxed_content(text)


def boxed_content(text: str) -> str | None:
    r"""Returns the content of the last \boxed{} or \fbox{} of a text, with balanced braces, of `\boxed 2` the rest of
    the line or formula; None if there is none or it is not closed.
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    begun = boxes[-1].end()
    if text[begun : begun + 1] != "{":
        return re.split(r"[$\n]|\\[)\]]", text[begun:], maxsplit=1)[0].strip() or None
    depth = 0
    for end in range(begun, len(text)):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return text[begun + 1 : end]
    return None


def strip_markup(text: str) -> str:
    """Returns an answer without surrounding markup: dollar signs, bold markers, spaces, a final full stop."""
    text = text.replace("\u2212", "-").strip().strip("\u200b").removesuffix(".").strip()
    while wrapped := _WRAPPED.fullmatch(text):
        text = next(inner for inner in wrapped.groups() if inner is not None).strip()
    return text


def parse_number(text: str) -> PlainNumber | None:
    """Parses an answer that is a plain number; None for any other text."""
    return parse_plain_number(strip_markup(text))


def parse_relation(text: str) -> tuple[str, str, PlainNumber] | None:
    """Parses an answer that is a plain relation, the letter on the left: ("x", "<=", 3); None for any other text."""
    match = _RELATION.fullmatch(normalize_latex(strip_markup(text)))
    if not match:
        return None
    letter, order, rest = match.group(1, 2, 3)
    if not letter:
        rest, order, letter = match.group(4, 5, 6)
    bound = parse_number(rest)
    if bound is None or "=" in rest:
        return None
    order = _STRICT[order]
    if not match[1]:
        order = _FLIPPED[order]
    return letter, order, bound


def answers_equal_text(one: str, other: str) -> bool:
    """True if two answers are the same text, apart from surrounding markup and spaces beside operators."""
    return _normalise_spaces(one) == _normalise_spaces(other)


def _normalise_spaces(text: str) -> str:
    """Returns an answer with single spaces, and none where they separate nothing: `1 2` and `2 1/3` keep theirs, as
    does `1, 234`."""
    text = " ".join(strip_markup(text).split())
    return _AROUND_COMMA.sub(",", _AROUND_OPERATOR.sub(r"\1", text))
