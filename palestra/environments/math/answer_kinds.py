r"""Answers that are not values: words, dates, measures, ratios, times, numbers in a base; and the brackets of pairs.

math-verify reads `\text{Monday}` and `5 ft 3 in` as products, `10:30` as a quotient, `2021-03-05` as a difference and
`101_2` as 101, and takes a pair, an open interval and a set of two for one another.
"""

from __future__ import annotations

import re
from fractions import Fraction

from palestra.environments.math import final_form
from palestra.environments.math.plain_numbers import normalize_latex, numbers_equal, parse_plain_number, parse_unit

_STYLED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|rm|operatorname)\s*\{([^{}]*)\}")
_BASED = re.compile(r"\(?([0-9A-Za-z]+)\)?_\{?\(?([0-9]{1,2})\)?\}?")
_BASE_NAMES = {"two": "2", "three": "3", "five": "5", "eight": "8", "ten": "10", "sixteen": "16"}
_WORDS = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ,.'\u2019&-]*")
_MONTHS = frozenset(
    "january february march april may june july august september october november december".split()  # noqa: SIM905
)
_TOKEN = re.compile(r"(?<![A-Za-z0-9.])-(?=[0-9.])|[0-9]+(?:[.,:][0-9]+)*|[A-Za-z]+")
_PART = re.compile(r",(?![0-9]{3})|\s+(?:and|or)\s+")
_HYPHENED = re.compile(r"[0-9]+(?:-[0-9]+)+")
_LETTERED = re.compile(r"[0-9]+ ?(?!(?:and|or|over|to|times|plus|minus|choose)\b)[A-Za-z]+ ?[0-9]+")
_MEASURE = re.compile(r"[\s,]*(?:and\s+)?(-?[0-9][0-9,.]*(?:/[0-9]+)?)\s*([A-Za-z]+\.?(?: (?!and\b|to\b)[A-Za-z]+)*)")
_ARC = (("''", " arcsecond "), ('"', " arcsecond "), ("'", " arcminute "))
_DEGREE = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree")
_DAYTIME = re.compile(r"[0-9] ?[ap]m\b", re.IGNORECASE)
_CHOICE = re.compile(r"\(?[A-E]\)?")
_ANGLE = re.compile(r"\\angle\s*\{?([A-Z]{3})\}?")
_NO_WORDS = frozenset({"and", "nor", "sqrt", "infty", "frac", "cdot", "times"}) | final_form.OPERATOR_FAMILIES.keys()
_ORDINAL = re.compile(r"(?<=[0-9])(?:st|nd|rd|th)\b")
_COLON = re.compile(r"([0-9][^:{}|<>=\\]*):([0-9][^:{}|<>=\\]*)(?::([0-9][^:{}|<>=\\]*))?")
_ASSIGNED = re.compile(r"(?<![A-Za-z])([A-Za-z])\s*=")
_PREFIX = re.compile(r"\(?[A-Za-z][\w, ]*\)?(?:=|\\in(?![A-Za-z]))")
_PAIRS = {"(": "()", "[": "[]", "\\{": "{}", "\\lbrace": "{}"}


def kinds_equal(answer: str, gold: str, *, in_order: bool = False) -> bool | None:
    """Returns whether two answers of such a kind are equal; None if the right answer is of another. Names in a list are
    compared `in_order` if the question asks for one."""
    answer = _plain(answer)
    gold = _plain(gold)
    is_same = _texts_equal(answer, gold, in_order)
    return _structures_equal(answer, gold, in_order) if is_same is None else is_same


def _texts_equal(answer: str, gold: str, in_order: bool) -> bool | None:
    """Returns whether two answers that are read as text are equal; None if the right one is none."""
    if _is_based(gold):
        return _parse_based_number(answer) == _parse_based_number(gold)
    if _COLON.fullmatch(gold):
        return _colons_equal(answer, gold)
    if _HYPHENED.fullmatch(gold):
        return answer == gold
    if measures := _measures(gold):
        return _measures(answer) == measures
    if _LETTERED.fullmatch(gold):
        return _tokens(answer) == _tokens(gold)
    if is_words(gold):
        return bool(_WORDS.fullmatch(answer.rstrip("!"))) and _words(answer, in_order) == _words(gold, in_order)
    if angle := _ANGLE.fullmatch(gold):
        said = _ANGLE.fullmatch(answer)
        return said is not None and said[1] in (angle[1], angle[1][::-1])
    return None


def _structures_equal(answer: str, gold: str, in_order: bool) -> bool | None:
    """Returns whether equations, lists and brackets are equal; None if the values inside decide."""
    if _equates_more(answer, gold) or (re.search(r"\d, \d", gold) and parse_plain_number(answer)):
        return False
    if "=" not in answer and len(set(_ASSIGNED.findall(gold))) > 1:
        return _values_equal(answer, gold)
    if in_order and (is_same := _lists_equal(answer, gold)) is not None:
        return is_same
    said_brackets = outer_brackets(answer)
    wanted = "{}" if "\\pm" in gold else outer_brackets(gold)
    if said_brackets and wanted and said_brackets != wanted:
        return False
    return None


def is_words(text: str) -> bool:
    """True for an answer in words: one with three letters, no operator's name, no product (`xyz`); and for one with
    times of the day."""
    if not _WORDS.fullmatch(text):
        return False
    if text.lower() in ("no", "yes") or _DAYTIME.search(text):
        return True
    return any(map(_is_word, re.findall(r"[A-Za-z]+", text)))


def outer_brackets(text: str) -> str | None:
    r"""Returns the brackets around an answer with a comma in it: "()", "[)", "{}"; None if it has none."""
    if prefix := _PREFIX.match(text):
        text = text[prefix.end() :]
    tokens = final_form.tokenize_answer(text) or []
    if not tokens or tokens[0] not in _PAIRS or "," not in tokens:
        return None
    depth = 0
    for place, token in enumerate(tokens):
        depth += (token in ("(", "[", "\\{", "\\lbrace")) - (token in (")", "]", "\\}", "\\rbrace"))
        if depth == 0:
            return _PAIRS[tokens[0]][0] + token[-1] if place == len(tokens) - 1 else None
    return None


def _plain(text: str) -> str:
    return " ".join(normalize_latex(_STYLED.sub(r"\1", text)).strip(" .").split())


def _is_based(text: str) -> bool:
    """True for a number in a base, `101_2`, whose letters are digits of that base, `1A_{16}`: `F_5` is a name."""
    parsed = _parse_based_number(text)
    if parsed is None:
        return False
    digits, base = parsed
    return all(digit.isdecimal() or ord(digit) - ord("a") + 10 < int(base) for digit in digits)


def _parse_based_number(text: str) -> tuple[str, str] | None:
    for name, number in _BASE_NAMES.items():
        text = text.replace(f"_{{{name}}}", f"_{number}")
    match = _BASED.fullmatch(text.replace(" ", ""))
    return (match[1].lower(), match[2]) if match else None


def _colons_equal(answer: str, gold: str) -> bool:
    said = _COLON.fullmatch(answer)
    wanted = _COLON.fullmatch(gold)
    if not said or not wanted or (re.search(":0[0-9]", gold) and not re.search(":0[0-9]", answer)):
        return False
    return all(map(_parts_equal, said.groups(""), wanted.groups("")))


def _parts_equal(said: str, wanted: str) -> bool:
    one = parse_plain_number(said.strip())
    other = parse_plain_number(wanted.strip())
    if one is None or other is None:
        return said.split() == wanted.split()
    return numbers_equal(one, other)


def _values_equal(answer: str, gold: str) -> bool:
    """True if plain numbers without letters stand in the order of the letters: `2, 3` for `x=2, y=3`."""
    said = re.split(r",|\sand\s", answer.strip("()"))
    wanted = re.split(r",|\sand\s", _ASSIGNED.sub("", gold))
    return len(said) == len(wanted) and all(map(_parts_equal, said, wanted))


def _is_word(word: str) -> bool:
    name = word.lower()
    if len(name) < 3 or name in _NO_WORDS:
        return False
    return bool(re.search("[aeiou]", name)) and "".join(sorted(name)) != name


def _words(text: str, in_order: bool) -> list[tuple[str, ...]]:
    """Returns the words and numbers of each part of a list, sorted unless `in_order`; of a single date, each by
    itself, sorted."""
    plain = _ORDINAL.sub("", text.casefold().replace("'", ""))
    tokens = _tokens(plain)
    numbers = [token for token in tokens if token[0].isdigit()]
    if len(_MONTHS.intersection(tokens)) == 1 and len(numbers) <= 2 and len(numbers) + 1 == len(tokens):
        return sorted((token,) for token in tokens)
    parts = [tuple(_tokens(part)) for part in _PART.split(plain)]
    return parts if in_order else sorted(parts)


def _tokens(text: str) -> list[str]:
    """Returns the words, numbers and signs of numbers in a text, in order."""
    said = [token.casefold() for token in _TOKEN.findall(text)]
    return ["r" if token == "remainder" else token for token in said]


def _measures(text: str) -> list[tuple[Fraction, object]] | None:
    """Returns the numbers of `5 ft 3 in` or `2 hours and 30 minutes`, each with its unit or word, sorted; None for
    other texts, and for a single one."""
    text = _DEGREE.sub(" degree ", text)
    for sign, word in _ARC:
        text = text.replace(sign, word)
    found: list[tuple[Fraction, object]] = []
    place = 0
    text = text.strip()
    while place < len(text):
        match = _MEASURE.match(text, place)
        number = parse_plain_number(match[1].rstrip(",.")) if match else None
        if match is None or number is None:
            return None
        label = match[2].rstrip(".").casefold()
        found.append((number.value, parse_unit(label) or label.removesuffix("s")))
        place = match.end()
    return sorted(found, key=str) if len(found) > 1 else None


def _equates_more(answer: str, gold: str) -> bool:
    """True for `3=2\\pi` where no equation is asked for, and for `A=B` as the choice of an option."""
    left, equals, _ = answer.partition("=")
    if not equals or "=" in gold:
        return False
    return parse_plain_number(left.strip()) is not None or bool(
        _CHOICE.fullmatch(gold) and _CHOICE.fullmatch(left.strip())
    )


def _lists_equal(answer: str, gold: str) -> bool | None:
    """Returns whether two lists of plain numbers are equal, place by place; None if the right one is no such list."""
    wanted = [parse_plain_number(part) for part in re.split(r",\s*", gold)]
    if len(wanted) < 2 or None in wanted:
        return None
    said = re.split(r",\s*|\s+and\s+", answer)
    return len(said) == len(wanted) and all(map(_parts_equal, said, re.split(r",\s*", gold)))
