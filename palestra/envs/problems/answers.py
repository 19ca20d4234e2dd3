"""An answer in a text: where it stands, and what it says where that takes no mathematics.

What counts as the same without asking anybody (`judging.py` asks `math-verify` about the rest):

- the same text, spaces aside;
- **plain numbers** of the same value (`plain_numbers`);
- **plain relations** between one letter and a plain number: `x > 7/2`, `3.5 < x`, `x \\le -1`.
"""

from __future__ import annotations

import re

from palestra.envs.problems.plain_numbers import Number, plain_number, same, tidied

LONGEST = 1000  # characters of an answer that are looked at

_ORDER = r"<=|>=|<|>|≤|≥|\\leq?|\\geq?"
_RELATION = re.compile(rf"([A-Za-z])\s*({_ORDER})\s*(.+)|(.+?)\s*({_ORDER})\s*([A-Za-z])")
_STRICT = {"<": "<", ">": ">", "≤": "<=", "≥": ">=", "<=": "<=", ">=": ">="}
_STRICT |= {"\\le": "<=", "\\leq": "<=", "\\ge": ">=", "\\geq": ">="}
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_WRAPPED = re.compile(r"\$\$(.+)\$\$|\$(.+)\$|\\\((.+)\\\)|\\\[(.+)\\\]|\*\*(.+)\*\*", re.DOTALL)


def final_answer(text: str, *, bare: bool = False) -> str | None:
    """The first line after the last #### of a text, or what its last \\boxed{} holds; None where neither is there, or
    nothing in it. With `bare` a text without either is an answer itself."""
    _, marked, tail = text.rpartition("####")
    answer = boxed(tail)
    if answer is None and (marked or bare):
        answer = next((line for line in tail.splitlines() if line.strip()), "")
    return cleaned(answer or "")[:LONGEST] or None


def whole_answer(text: str, *, bare: bool = False) -> str | None:
    """All that follows the last #### of a text, as it stands, for answers of several lines; else as `final_answer`."""
    _, marked, tail = text.rpartition("####")
    return tail.strip() or None if marked or bare else boxed(text)


def boxed(text: str) -> str | None:
    """What the last \\boxed{} of a text holds, braces within it balanced; None where there is none or it never ends."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begun = 0, start + len("\\boxed")
    for end in range(begun, len(text)):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return text[begun + 1 : end]
    return None


def cleaned(text: str) -> str:
    """An answer without what surrounds it: dollar signs, bold type, spaces, a full stop."""
    text = text.replace("\u2212", "-").strip().removesuffix(".").strip()
    while wrapped := _WRAPPED.fullmatch(text):
        text = next(inner for inner in wrapped.groups() if inner is not None).strip()
    return text


def number(text: str) -> Number | None:
    """The plain number that a text is; None for any other text."""
    return plain_number(cleaned(text))


def relation(text: str) -> tuple[str, str, Number] | None:
    """The plain relation that a text is, its letter on the left: ("x", "<=", 3); None for any other text."""
    found = _RELATION.fullmatch(tidied(cleaned(text)))
    if not found:
        return None
    letter, order, rest = (found[1], found[2], found[3]) if found[1] else (found[6], found[5], found[4])
    bound = number(rest)
    if bound is None or "=" in rest:
        return None
    order = _STRICT[order]
    return letter, order if found[1] else _FLIPPED[order], bound


def same_relation(one: tuple[str, str, Number], other: tuple[str, str, Number]) -> bool:
    """True if two plain relations are the same answer."""
    return one[:2] == other[:2] and same(one[2], other[2])


def same_text(one: str, other: str) -> bool:
    """True if two answers are written alike, spaces and what surrounds them aside."""
    return "".join(cleaned(one).split()) == "".join(cleaned(other).split())
