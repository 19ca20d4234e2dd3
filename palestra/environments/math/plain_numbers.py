r"""Plain numbers in answers: a number written by people or in LaTeX that leaves nothing to compute.

- integers and decimals: `26`, `-4`, `.5`, `26.0`, `1,234`, `1{,}234`, `12\,345`, `0.\overline{3}`;
- fractions of two integers: `7/2`, `\frac{7}{2}`, `\dfrac72`, `-\frac{1}{3}`; mixed numbers: `2\frac{1}{3}`, `2 1/3`;
- powers of ten: `1.5 \times 10^{-3}`, `1.5e-3`;
- around any of them: `x =`, `f(2) =`, a currency sign, a percent or degree sign, a unit (`26 cm`, `26\text{ cm}^2`,
  `26 apples`). Units are compared if both numbers have a known one (`units`). Two letters, or three directly behind the
  digits, are a unit only if they are a common one (`26cm`), else variables (`3xy`).
"""

from __future__ import annotations

import math
import re
import unicodedata
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

# A pound is one of money or of mass: both are the same entry, so that "5 pounds" answers either.
_TABLE = """
    length: mm millimeter millimetre 1/1000, cm centimeter centimetre 1/100, dm 1/10, m meter metre 1
    length: km kilometer kilometre 1000, in inch inche 127/5000, ft foot feet 381/1250, yd yard 1143/1250
    length: mi mile 1609344/1000
    mass: mg milligram 1/1000000, g gram 1/1000, kg kilogram kilo 1, t tonne 1000, oz ounce 45359237/1600000000
    mass: lb lbs pound gbp 45359237/100000000
    time: ms millisecond 1/1000, s sec second 1, min minute 60, h hr hour 3600, day 86400, week 604800
    month: month 1, year yr 12
    volume: ml milliliter millilitre 1/1000, cl 1/100, dl 1/10, l liter litre 1, gallon gal 473176473/125000000
    dollar: dollar usd 1, cent 1/100
    euro: euro eur 1
    degree: degree deg 1
    radian: radian rad 1
    celsius: c celsius 1
    fahrenheit: f fahrenheit 1
    kelvin: k kelvin 1
    energy: j joule 1, kj 1000
    force: n newton 1
    power: w watt 1, kw 1000
    voltage: v volt 1
    morning: am 1
    afternoon: pm 1
"""
CURRENCIES = {"$": "dollar", "\u20ac": "euro", "\u00a3": "gbp"}
_SHORT_RATES = {"kph": "km/h", "kmh": "km/h", "mph": "mi/h"}
_COMMAND = re.compile(r"\\[A-Za-z]+")
_PART = re.compile(r"/|per(?![A-Za-z])|square|sq|cubic|[A-Za-z]+|\^\{?-?[0-9]\}?")
_POWERS = {"square": 2, "sq": 2, "cubic": 3}
_DEGREES_OF = re.compile(r"\bdeg(?:ree)?s?\s+(?=(?:c|f|k|celsius|fahrenheit|kelvin)\b)", re.IGNORECASE)
_IN_DEGREES = ({"degree", "celsius"}, {"degree", "fahrenheit"})


class Unit(NamedTuple):
    """A product of powers of kinds, ((kind, power), ...) sorted, and its size in that kind's first unit."""

    kinds: tuple[tuple[str, int], ...]
    size: Fraction


def _known_units() -> dict[str, tuple[str, Fraction]]:
    known: dict[str, tuple[str, Fraction]] = {}
    for line in _TABLE.strip().splitlines():
        kind, _, entries = line.strip().partition(": ")
        for entry in entries.split(", "):
            *names, size = entry.split()
            known |= dict.fromkeys(names, (kind, Fraction(size)))
    return known


UNITS = _known_units()


def parse_unit(text: str) -> Unit | None:
    r"""Parses the unit behind a number: "km", "\text{ km/h}", "square feet"; None if a word of it is not a unit."""
    kinds: dict[str, int] = {}
    size = Fraction(1)
    sign = 1
    power = 1
    last = None
    for token in _PART.findall(_expand_unit(text)):
        if token in ("/", "per"):
            sign = -1
        elif token in _POWERS:
            power = _POWERS[token]
        elif token[0] == "^":
            if last is None:
                return None
            more = sign * (int(token.strip("^{}")) - 1)
            kinds[last[0]] += more
            size *= last[1] ** more
        else:
            last = _find_unit(token)
            if last is None:
                return None
            kinds[last[0]] = kinds.get(last[0], 0) + sign * power
            size *= last[1] ** (sign * power)
            power = 1
    if not kinds:
        return None
    return Unit(tuple(sorted(kinds.items())), size)


def measure_the_same(one: Unit, other: Unit) -> bool:
    """True if two units are of the same kind; a degree may be one of temperature."""
    return one.kinds == other.kinds or {kind for kind, _ in one.kinds + other.kinds} in _IN_DEGREES


def _expand_unit(text: str) -> str:
    """Returns a unit without LaTeX, its first word spelled out where it stands for a quotient."""
    plain = _DEGREES_OF.sub("", _COMMAND.sub(" ", text).replace(".", "").strip())
    return _SHORT_RATES.get(plain.lower(), plain)


def _find_unit(word: str) -> tuple[str, Fraction] | None:
    name = word.lower()
    return UNITS.get(name) or UNITS.get(name.removesuffix("s") if len(name) > 2 else name)


ABSOLUTE_TOLERANCE = Fraction(1, 10**6)  # absolute difference, for decimals
RELATIVE_TOLERANCE = Fraction(1, 10**5)  # difference relative to the larger value, for decimals
MAX_TEN_EXPONENT = 300  # of ten

_SPACING = re.compile(r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|[,;:!])(?![A-Za-z])|\\q?quad(?![A-Za-z])|(?<!\\)~")
_SHORT_FRACTION = re.compile(r"\\frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))")
_SIGNS = {"\u2212": "-", "\u00d7": "\\times ", "\u00b7": "\\cdot ", "\u00b0": "^\\circ ", "\u03c0": "\\pi "}
_SIGNS |= {"\u221e": "\\infty ", "\u2264": "\\le ", "\u2265": "\\ge ", "\u2260": "\\ne ", "\u00b1": "\\pm "}
_SIGNS |= {"\u00b2": "^{2}", "\u00b3": "^{3}", "\u222a": "\\cup ", "\u2229": "\\cap ", "\u2205": "\\emptyset "}
_SIGNS |= {"\\varnothing": "\\emptyset "}
_SIGNS |= {"\u00a0": " ", "\u2009": " ", "\u202f": " ", "\\ ": " ", "\u2013": "-", "\u00ba": "^\\circ "}
_SIGNS |= {"\\bar": "\\overline", "\\dot{": "\\overline{"}

_VULGAR = re.compile("([\u00bc-\u00be\u2150-\u215e])")
_RADICAL = re.compile(r"\u221a\s*(?:\(([^()]*)\)|(\d+|[A-Za-z]))", re.ASCII)

_INTEGER = r"\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d{1,40}"
_DIGITS = rf"(?:(?:{_INTEGER})?\.\d{{1,40}}|(?:{_INTEGER})\.?)"
_TEN = r"(?:\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*(?:\{\s*[+-]?\d{1,3}\s*\}|[+-]?\d{1,3})|[eE][+-]?\d{1,3})"
_VALUE = (
    rf"(?:(?P<whole>\d{{1,30}})\s*(?:\\frac\{{(?P<part>\d{{1,30}})\}}\{{(?P<parts>\d{{1,30}})\}}"
    rf"| (?P<over2>\d{{1,30}})/(?P<under2>\d{{1,30}}))"
    rf"|(?P<over>\d{{1,30}})\s*/\s*(?P<under>\d{{1,30}})"
    rf"|\\frac\{{(?P<inner>-?)(?P<top>\d{{1,30}})\}}\{{(?P<bottom>\d{{1,30}})\}}"
    rf"|(?P<start>\d{{0,30}})\.(?P<fixed>\d{{0,30}})\\overline\{{(?P<again>\d{{1,12}})\}}"
    rf"|(?P<decimal>{_DIGITS})(?P<power>{_TEN})?)"
)
_NAME = r"(?:[A-Za-z](?:_\{?\w{1,3}\}?)?|\\[a-z]+)(?:\([\w,. -]{0,20}\))?"
_BEFORE = rf"(?:(?P<name>{_NAME})\s*(?:=|\\approx)\s*)?"
_STYLE = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|rm|operatorname)"
_WORDS = rf"{_STYLE}\s*\{{[^{{}}\\0-9]*(?:\^?[23])?\}}|[A-Za-z]++\.?"
_UNIT = rf"(?:(?:{_WORDS})(?:\^\{{?-?[23]\}}?)?|/|\\cdot(?![A-Za-z])|\s)*"
_MARK = r"(?:\\?(?P<percent>%)|(?P<degree>\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree))?"
_PLAIN = re.compile(
    rf"{_BEFORE}(?P<sign>[+-]?)\s*(?:\\?(?P<currency>[$\u20ac\u00a3]))?\s*{_VALUE}\s*{_MARK}\s*(?P<unit>{_UNIT})",
    re.ASCII,
)
_CLOCK = re.compile(r"\b([ap])\.\s?m\b\.?")
_POWER_WORD = re.compile(r"(?<=[A-Za-z]) (squared|cubed)\b")
_POWER_WORDS = {"squared": "^2", "cubed": "^3"}
_MIXED = re.compile(r"(?<![\w.^}])(\d{1,30})\s*\\frac\{(\d{1,30})\}\{(\d{1,30})\}")
_WORD = re.compile(r"[A-Za-z]+")
_SINGLE = frozenset("mgshlLNJWVACFK")  # single letters that are units; any other is a variable
_SHORT_UNIT = """
    mm cm dm km mg kg ml cl dl in ft yd mi oz lb lbs hr hrs min sec ms mph kph kmh rad deg hz khz kw kwh kj pa am pm day
"""
_SHORT_UNITS = frozenset(_SHORT_UNIT.split())
_NO_UNIT = """
    or and not to than plus minus times over mod choose pi sqrt sin cos tan cot log ln exp gcd lcm max lim sum
    hundred thousand million billion trillion dozen half third quarter more less between squared cubed hundreds
    thousands millions billions trillions dozens halves thirds quarters fourth fourths fifth fifths sixth sixths seventh
    sevenths eighth eighths ninth ninths tenth tenths twelfth twelfths hundredth hundredths thousandth thousandths
    january february march april may june july august september october november december
    quadrillion quintillion myriad lakh crore grand gross score millionth millionths billionth billionths trillionth
    trillionths permille basis factorial doubled tripled squares negative inverse reciprocal
"""
_NO_UNITS = frozenset(_NO_UNIT.split())


@dataclass(frozen=True)
class PlainNumber:
    """A plain number's value, and how it is written: with a decimal point, in lowest terms, with a percent sign, a unit
    and the letter that it is the value of ("" if there is none)."""

    value: Fraction
    is_decimal: bool
    is_lowest_terms: bool
    is_percent: bool = False
    unit: Unit | None = None
    name: str = ""


def normalize_latex(text: str) -> str:
    r"""Returns LaTeX without spacing commands, with `\frac` for its variants, ASCII for common signs, and one space
    for several: the expressions here would take time cubic in their number."""
    for sign, ascii_form in _SIGNS.items():
        text = text.replace(sign, ascii_form)
    text = _VULGAR.sub(_spell_vulgar, text)
    text = _RADICAL.sub(r"\\sqrt{\1\2}", text.replace("\\,", " ").replace("{,}", ","))
    text = re.sub(r"\\[dtc]frac", r"\\frac", _SPACING.sub(" ", text))
    return " ".join(_SHORT_FRACTION.sub(_spell_fraction, text).split())


def parse_plain_number(text: str) -> PlainNumber | None:
    """Parses a plain number with the markup and unit around it; None for any other text."""
    text = _POWER_WORD.sub(lambda word: _POWER_WORDS[word[1]], _CLOCK.sub(r"\1m", normalize_latex(text)))
    match = _PLAIN.fullmatch(text)
    if not match or not _is_unit(match["unit"]) or _is_product(match):
        return None
    number = _read(match)
    if number is None:
        return None
    return replace(number, unit=_unit(match), name=match["name"] or "")


def join_mixed_numbers(text: str) -> str:
    r"""Returns normalised LaTeX with mixed numbers as fractions: `3\frac{1}{2}\pi` is `\frac{7}{2}\pi`, no product."""
    return _MIXED.sub(_improper, text)


def numbers_equal(one: PlainNumber, other: PlainNumber, *, asks_percent: bool = True) -> bool:
    """True if the plain number `one` is the answer `other`.

    They must be equal; if one has a decimal point, they may differ by `ABSOLUTE_TOLERANCE` and by `RELATIVE_TOLERANCE`
    of the larger. If both have a known unit, or a letter, it must be the same, or the value be converted. A percentage
    equals its number if the question `asks_percent`; a hundredth of it if that is at most 1, or a fraction where no
    percent are asked for.
    """
    if len(one.name) == len(other.name) == 1 and one.name != other.name:
        return False
    factor = Fraction(1)
    if one.unit and other.unit:
        if not measure_the_same(one.unit, other.unit):
            return False
        factor = one.unit.size / other.unit.size
    value = one.value * factor
    rounded = one.is_decimal or other.is_decimal
    values = [value]
    if one.is_percent and not other.is_percent:
        is_share = abs(other.value) <= 1 or (other.value.denominator > 1 and not asks_percent)
        values = [value] * asks_percent + [value / 100] * is_share
    elif other.is_percent and not one.is_percent:
        values.append(value * 100)
    return any(got == other.value or (rounded and within_tolerance(got, other.value)) for got in values)


def within_tolerance(one: Fraction, other: Fraction) -> bool:
    """True if two values differ by no more than a rounded decimal may."""
    return abs(one - other) <= min(ABSOLUTE_TOLERANCE, RELATIVE_TOLERANCE * max(abs(one), abs(other)))


def _unit(match: re.Match[str]) -> Unit | None:
    """Returns the unit of a plain number, from its currency sign, degree sign or the words behind it."""
    if match["degree"] and not _WORD.search(match["unit"]):
        return parse_unit("degree")
    return parse_unit(CURRENCIES.get(match["currency"] or "", "") or match["unit"])


def _improper(match: re.Match[str]) -> str:
    whole = int(match[1])
    over = int(match[2])
    under = int(match[3])
    if not 0 < over < under:
        return match[0]
    return f"\\frac{{{whole * under + over}}}{{{under}}}"


def _spell_vulgar(match: re.Match[str]) -> str:
    """Returns the fraction that is one character, with a space behind a whole number."""
    over, under = unicodedata.normalize("NFKC", match[1]).split("\u2044")
    space = " " if match.start() and match.string[match.start() - 1].isdigit() else ""
    return f"{space}{over}/{under}"


def _spell_fraction(match: re.Match[str]) -> str:
    return f"\\frac{{{match[1] or match[2]}}}{{{match[3] or match[4]}}}"


def _is_unit(text: str) -> bool:
    words = _WORD.findall(re.sub(_STYLE, " ", text))
    is_styled = bool(re.search(_STYLE, text))
    return all(word.lower() not in _NO_UNITS and (is_styled or len(word) > 1 or word in _SINGLE) for word in words)


def _is_product(match: re.Match[str]) -> bool:
    """True for variables after a number: two letters, or three behind the digits, but no common unit."""
    letters = _WORD.match(match["unit"])
    if letters is None:
        return False
    is_behind = match.string[match.start("unit") - 1].isalnum()
    return 1 < len(letters[0]) < 3 + is_behind and letters[0].lower() not in _SHORT_UNITS


def _read(match: re.Match[str]) -> PlainNumber | None:
    sign = -1 if match["sign"] == "-" else 1
    percent = bool(match["percent"]) or _WORD.findall(match["unit"])[-1:] == ["percent"]
    if match["decimal"]:
        power = _power(match["power"])
        if abs(power) > MAX_TEN_EXPONENT:
            return None
        digits = match["decimal"].replace(",", "").replace(" ", "")
        return PlainNumber(sign * Fraction(digits) * Fraction(10) ** power, "." in digits, True, percent)
    if match["again"]:
        return PlainNumber(sign * _repeating(match["start"], match["fixed"], match["again"]), False, True, percent)
    if match["whole"]:
        over = int(match["part"] or match["over2"])
        under = int(match["parts"] or match["under2"])
        if not 0 < over < under:
            return None
        lowest = math.gcd(over, under) == 1
        return PlainNumber(sign * (int(match["whole"]) + Fraction(over, under)), False, lowest, percent)
    over = int(match["over"] or match["top"])
    under = int(match["under"] or match["bottom"])
    if under == 0:
        return None
    if match["inner"]:
        sign = -sign
    return PlainNumber(sign * Fraction(over, under), False, math.gcd(over, under) == 1 < under, percent)


def _power(text: str | None) -> int:
    r"""Returns the exponent in `\times 10^{-3}` or `e-3`; 0 if there is none."""
    match = re.search(r"([+-]?\d+)\s*\}?$", text or "")
    if match is None:
        return 0
    return int(match[1])


def _repeating(start: str, fixed: str, again: str) -> Fraction:
    """Returns the value of 1.2343434... from "1", "2" and "34"."""
    head = Fraction(int((start or "0") + fixed), 10 ** len(fixed))
    return head + Fraction(int(again), (10 ** len(again) - 1) * 10 ** len(fixed))
