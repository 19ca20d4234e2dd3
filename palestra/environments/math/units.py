"""Units behind numbers, compared where both sides have a known one: 5 km is 5000 m, and neither 5 m nor 5 kg."""

from __future__ import annotations

import re
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
_STYLE = re.compile(r"\\[A-Za-z]+")
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
    size, sign, power, last = Fraction(1), 1, 1, None
    for part in _PART.findall(_expanded(text)):
        if part in ("/", "per"):
            sign = -1
        elif part in _POWERS:
            power = _POWERS[part]
        elif part[0] == "^":
            if last is None:
                return None
            more = sign * (int(part.strip("^{}")) - 1)
            kinds[last[0]] += more
            size *= last[1] ** more
        else:
            last = _known(part)
            if last is None:
                return None
            kinds[last[0]] = kinds.get(last[0], 0) + sign * power
            size *= last[1] ** (sign * power)
            power = 1
    return Unit(tuple(sorted(kinds.items())), size) if kinds else None


def measure_the_same(one: Unit, other: Unit) -> bool:
    """True if two units are of the same kind; a degree may be one of temperature."""
    return one.kinds == other.kinds or {kind for kind, _ in one.kinds + other.kinds} in _IN_DEGREES


def _expanded(text: str) -> str:
    """Returns a unit without LaTeX, its first word spelled out where it stands for a quotient."""
    plain = _DEGREES_OF.sub("", _STYLE.sub(" ", text).replace(".", "").strip())
    return _SHORT_RATES.get(plain.lower(), plain)


def _known(word: str) -> tuple[str, Fraction] | None:
    name = word.lower()
    return UNITS.get(name) or UNITS.get(name.removesuffix("s") if len(name) > 2 else name)
