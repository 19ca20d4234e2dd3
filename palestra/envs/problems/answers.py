"""An answer in a text: where it stands, and what it says where that takes no mathematics.

What counts as the same without asking anybody (`judging.py` asks `math-verify` about the rest):

- the same text, spaces aside;
- **plain numbers** of the same value: integers (`26`, `+26`, `-4`, `1,234`), decimals (`0.5`, `.5`, `26.0`), fractions
  of two integers (`7/2`, `\\frac{7}{2}`), with `x =` or a currency sign before them if need be. Where one is written
  with a decimal point, they may differ by 1e-6;
- **plain relations** between one letter and a plain number: `x > 7/2`, `3.5 < x`, `x \\le -1`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

LONGEST = 1000  # characters of an answer that are looked at
TOLERANCE = Fraction(1, 10**6)

_INTEGER = r"\d{1,3}(?:,\d{3})+|\d{1,30}"
_DECIMAL = rf"(?:{_INTEGER})?\.\d{{1,30}}|(?:{_INTEGER})\.?"
_NUMBER = (
    rf"[+-]?\s*(?:(?P<decimal>{_DECIMAL})|(?P<over>\d{{1,30}})\s*/\s*(?P<under>\d{{1,30}})"
    r"|\\d?frac\{(?P<top>\d{1,30})\}\{(?P<bottom>\d{1,30})\})"
)
_PLAIN = re.compile(rf"(?:[A-Za-z]\s*=\s*)?(?:\\?\$|[€£])?\s*(?P<number>{_NUMBER})", re.ASCII)
_ORDER = r"<=|>=|<|>|≤|≥|\\leq?|\\geq?"
_RELATION = re.compile(rf"([A-Za-z])\s*({_ORDER})\s*(.+)|(.+?)\s*({_ORDER})\s*([A-Za-z])")
_STRICT = {"<": "<", ">": ">", "≤": "<=", "≥": ">=", "<=": "<=", ">=": ">="}
_STRICT |= {"\\le": "<=", "\\leq": "<=", "\\ge": ">=", "\\geq": ">="}
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_OPERATION = re.compile(r"[+*^×÷·!%/]|\\(?:cdot|times|div|sqrt|d?frac|binom|sum|prod)|[\w)}]\s*-|\d\s*\(|=.*=")
_WRAPPED = re.compile(r"\$\$(.+)\$\$|\$(.+)\$|\\\((.+)\\\)|\\\[(.+)\\\]|\*\*(.+)\*\*", re.DOTALL)


@dataclass(frozen=True)
class Number:
    """A plain number's value, and how it was written: with a decimal point, and in lowest terms."""

    value: Fraction
    rounded: bool
    lowest: bool


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
    """The plain number that a text is, see above; None for any other text."""
    found = _PLAIN.fullmatch(cleaned(text))
    if not found:
        return None
    sign = -1 if found["number"].startswith("-") else 1
    if found["decimal"]:
        return Number(sign * Fraction(found["decimal"].replace(",", "")), "." in found["decimal"], True)
    over, under = int(found["over"] or found["top"]), int(found["under"] or found["bottom"])
    if under == 0:
        return None
    return Number(sign * Fraction(over, under), False, math.gcd(over, under) == 1 < under)


def relation(text: str) -> tuple[str, str, Number] | None:
    """The plain relation that a text is, its letter on the left: ("x", "<=", 3); None for any other text."""
    found = _RELATION.fullmatch(cleaned(text))
    if not found:
        return None
    letter, order, rest = (found[1], found[2], found[3]) if found[1] else (found[6], found[5], found[4])
    bound = number(rest)
    if bound is None or "=" in rest:
        return None
    order = _STRICT[order]
    return letter, order if found[1] else _FLIPPED[order], bound


def same(one: Number, other: Number) -> bool:
    """Whether two plain numbers are the same answer."""
    return abs(one.value - other.value) <= (TOLERANCE if one.rounded or other.rounded else 0)


def holds_operation(text: str) -> bool:
    """Whether something is still to be worked out in it: an operation other than one fraction of two integers."""
    return bool(_OPERATION.search(cleaned(text))) and number(text) is None and relation(text) is None
