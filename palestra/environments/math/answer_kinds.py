r"""Answers that are not values: words, dates, ratios, times, numbers in a base; and the brackets of pairs.

math-verify reads `\text{Monday}` as a product of letters, `10:30` as a quotient, `101_2` as 101, and takes a pair, an
open interval and a set of two for one another.
"""

from __future__ import annotations

import re

from palestra.environments.math import final_form
from palestra.environments.math.plain_numbers import normalize_latex, numbers_equal, parse_plain_number

_STYLED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|rm|operatorname)\s*\{([^{}]*)\}")
_BASED = re.compile(r"\(?([0-9A-Za-z]+)\)?_\{?\(?([0-9]{1,2})\)?\}?")
_BASE_NAMES = {"two": "2", "three": "3", "five": "5", "eight": "8", "ten": "10", "sixteen": "16"}
_WORDS = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ,.'\u2019&-]*")
_NO_WORDS = frozenset({"and", "nor", "sqrt", "infty", "frac", "cdot", "times"}) | final_form.OPERATOR_FAMILIES.keys()
_ORDINAL = re.compile(r"(?<=[0-9])(?:st|nd|rd|th)\b")
_COLON = re.compile(r"([0-9][^:{}|<>=\\]*):([0-9][^:{}|<>=\\]*)(?::([0-9][^:{}|<>=\\]*))?")
_ASSIGNED = re.compile(r"(?<![A-Za-z])([A-Za-z])\s*=")
_PREFIX = re.compile(r"\(?[A-Za-z][\w, ]*\)?(?:=|\\in(?![A-Za-z]))")
_PAIRS = {"(": "()", "[": "[]", "\\{": "{}", "\\lbrace": "{}"}


def kinds_equal(answer: str, gold: str) -> bool | None:
    """Returns whether two answers of such a kind are equal; None if the right answer is of another."""
    answer = _plain(answer)
    gold = _plain(gold)
    if _BASED.fullmatch(gold):
        return _parse_based_number(answer) == _parse_based_number(gold)
    if _COLON.fullmatch(gold):
        return _colons_equal(answer, gold)
    if is_words(gold):
        return _words(answer) == _words(gold)
    if "=" not in answer and len(set(_ASSIGNED.findall(gold))) > 1:
        return _values_equal(answer, gold)
    said = outer_brackets(answer)
    wanted = "{}" if "\\pm" in gold else outer_brackets(gold)
    if said and wanted and said != wanted:
        return False
    return None


def is_words(text: str) -> bool:
    """True for an answer in words: one with three letters, no operator's name, no product (`xyz`)."""
    if not _WORDS.fullmatch(text):
        return False
    return text.lower() in ("no", "yes") or any(map(_is_word, re.findall(r"[A-Za-z]+", text)))


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


def _parse_based_number(text: str) -> tuple[str, str] | None:
    for name, number in _BASE_NAMES.items():
        text = text.replace(f"_{{{name}}}", f"_{number}")
    match = _BASED.fullmatch(text.replace(" ", ""))
    return (match[1].lower(), match[2]) if match else None


def _colons_equal(answer: str, gold: str) -> bool:
    said = _COLON.fullmatch(answer)
    wanted = _COLON.fullmatch(gold)
    if not said or not wanted:
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


def _words(text: str) -> list[str]:
    """Returns the words of each name in a list, sorted; of a date, each by itself."""
    plain = _ORDINAL.sub("", text.casefold().replace("'", ""))
    if re.search("[0-9]", plain):
        return sorted(re.findall(r"[a-z0-9.]+", plain))
    return sorted(" ".join(re.findall("[a-z]+", part)) for part in re.split(r",|\s+(?:and|or)\s+", plain))
