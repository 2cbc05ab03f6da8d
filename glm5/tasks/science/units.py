"""Quantities with units: an exact number times powers of the seven SI base units, and a parser of written ones.

Factors are exact fractions, so a conversion has no rounding. Text is untrusted: parsing is bounded and raises
`Unreadable` for anything that is not a quantity.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from glm5.tasks.mathematics.expression import Unreadable

BASE = ("m", "kg", "s", "A", "K", "mol", "cd")
Dimension = tuple[int, int, int, int, int, int, int]
NONE: Dimension = (0,) * 7
MOST_CHARS, MOST_POWER, MOST_EXPONENT = 120, 12, 60

PREFIXES: Mapping[str, int] = {
    "G": 9,
    "M": 6,
    "k": 3,
    "h": 2,
    "d": -1,
    "c": -2,
    "m": -3,
    "u": -6,
    "µ": -6,
    "n": -9,
    "p": -12,
}
_NAMED: Mapping[str, tuple[str, Dimension]] = {
    "m": ("1", (1, 0, 0, 0, 0, 0, 0)),
    "g": ("1/1000", (0, 1, 0, 0, 0, 0, 0)),
    "s": ("1", (0, 0, 1, 0, 0, 0, 0)),
    "A": ("1", (0, 0, 0, 1, 0, 0, 0)),
    "K": ("1", (0, 0, 0, 0, 1, 0, 0)),
    "mol": ("1", (0, 0, 0, 0, 0, 1, 0)),
    "cd": ("1", (0, 0, 0, 0, 0, 0, 1)),
    "Hz": ("1", (0, 0, -1, 0, 0, 0, 0)),
    "N": ("1", (1, 1, -2, 0, 0, 0, 0)),
    "Pa": ("1", (-1, 1, -2, 0, 0, 0, 0)),
    "J": ("1", (2, 1, -2, 0, 0, 0, 0)),
    "W": ("1", (2, 1, -3, 0, 0, 0, 0)),
    "C": ("1", (0, 0, 1, 1, 0, 0, 0)),
    "V": ("1", (2, 1, -3, -1, 0, 0, 0)),
    "F": ("1", (-2, -1, 4, 2, 0, 0, 0)),
    "ohm": ("1", (2, 1, -3, -2, 0, 0, 0)),
    "T": ("1", (0, 1, -2, -1, 0, 0, 0)),
    "L": ("1/1000", (3, 0, 0, 0, 0, 0, 0)),
    "bar": ("100000", (-1, 1, -2, 0, 0, 0, 0)),
    "eV": ("1602176634/10000000000000000000000000000", (2, 1, -2, 0, 0, 0, 0)),
}
"""Units that take prefixes: factor to SI, and dimension."""
_ALONE: Mapping[str, tuple[str, Dimension]] = {
    "min": ("60", (0, 0, 1, 0, 0, 0, 0)),
    "h": ("3600", (0, 0, 1, 0, 0, 0, 0)),
    "day": ("86400", (0, 0, 1, 0, 0, 0, 0)),
    "t": ("1000", (0, 1, 0, 0, 0, 0, 0)),
    "%": ("1/100", NONE),
    "atm": ("101325", (-1, 1, -2, 0, 0, 0, 0)),
    "cal": ("4184/1000", (2, 1, -2, 0, 0, 0, 0)),
    "inch": ("254/10000", (1, 0, 0, 0, 0, 0, 0)),
    "ft": ("3048/10000", (1, 0, 0, 0, 0, 0, 0)),
    "mi": ("1609344/1000", (1, 0, 0, 0, 0, 0, 0)),
    "ha": ("10000", (2, 0, 0, 0, 0, 0, 0)),
}
_WORDS: Mapping[str, str] = {
    "metre": "m", "meter": "m", "metres": "m", "meters": "m", "second": "s", "seconds": "s", "sec": "s", "hour": "h",
    "hours": "h", "hr": "h", "minute": "min", "minutes": "min", "days": "day", "d": "day", "gram": "g", "grams": "g",
    "kilogram": "kg", "kilograms": "kg", "kilometre": "km", "kilometer": "km", "kilometres": "km", "kilometers": "km",
    "newton": "N", "newtons": "N", "joule": "J", "joules": "J", "watt": "W", "watts": "W", "volt": "V", "volts": "V",
    "ampere": "A", "amperes": "A", "amp": "A", "amps": "A", "kelvin": "K", "pascal": "Pa", "pascals": "Pa",
    "hertz": "Hz", "coulomb": "C", "coulombs": "C", "mole": "mol", "moles": "mol", "litre": "L", "litres": "L",
    "liter": "L", "liters": "L", "l": "L", "ohms": "ohm", "Ω": "ohm", "\u2126": "ohm", "percent": "%", "tonne": "t",
    "tonnes": "t", "mph": "mi/h", "kmh": "km/h", "kph": "km/h",
}  # fmt: skip
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SPACES = re.compile(r"\\(?:text|mathrm|rm|quad|[,;!: ])\s*|[~\u2009\u00a0\u202f]")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{((?:[^{}]|\{[^{}]*\})*)\}\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_ABOUT = re.compile(r"^(?:[≈~]|\\approx|\\sim|about|approximately|approx\.?|roughly|around|ca\.)\s*", re.IGNORECASE)
_NUMBER = re.compile(
    r"(?P<sign>[-+]?)(?P<whole>\d{1,3}(?:,\d{3})+|\d+)?(?P<part>\.\d+)?"
    r"(?:[eE](?P<e>[-+]?\d+)|\s*(?:\*|x|×|·)\s*10\s*\^?\s*(?:\{\s*)?(?P<ten>[-+]?\d+)(?:\s*\})?)?"
)
_TOKEN = re.compile(
    r"\s*(?:(?P<name>[A-Za-zµΩΩ%]+)|(?P<power>\^\s*\{?\s*-?\d+\s*\}?|(?<=[A-Za-zµΩ])-?\d+)|(?P<mark>[*·/().]))"
)


@dataclass(frozen=True)
class Quantity:
    """A number in SI base units, and the powers of these."""

    value: Fraction
    dimension: Dimension


@cache
def unit(name: str) -> Quantity:
    """The unit of a name, with or without a prefix, as in "kPa". Raises Unreadable for an unknown one."""
    name = _WORDS.get(name, name)
    if "/" in name or "^" in name:
        return parse_unit(name)
    for table in (_NAMED, _ALONE):
        if name in table:
            factor, dimension = table[name]
            return Quantity(Fraction(factor), dimension)
    prefix, rest = name[:1], name[1:]
    if prefix in PREFIXES and rest in _NAMED:
        factor, dimension = _NAMED[rest]
        return Quantity(Fraction(factor) * Fraction(10) ** PREFIXES[prefix], dimension)
    raise Unreadable(f"unknown unit {name!r:.20}")


def parse_unit(text: str) -> Quantity:
    """A product of units, as in "kg m/s^2", "J/(kg K)" or "m·s⁻¹". A slash divides by the next factor or bracket."""
    if len(text) > MOST_CHARS:
        raise Unreadable("too long")
    text = text.translate(_SUPERSCRIPTS).replace("**", "^")
    tokens: list[tuple[str, str]] = []
    at = 0
    while text[at:].strip():
        match = _TOKEN.match(text, at)
        if match is None:
            raise Unreadable("not a unit")
        tokens.append((str(match.lastgroup), match.group(match.lastgroup or 0)))
        at = match.end()
    found, rest = _product(tokens, 0, 0)
    if rest != len(tokens):
        raise Unreadable("not a unit")
    return found


def _product(tokens: list[tuple[str, str]], at: int, depth: int) -> tuple[Quantity, int]:
    """Factors up to a closing bracket or the end."""
    whole, below, seen = Quantity(Fraction(1), NONE), False, False
    while at < len(tokens):
        kind, text = tokens[at]
        if kind == "mark" and text in "*·.":
            if not seen:
                raise Unreadable("not a unit")
            at += 1
            continue
        if kind == "mark" and text == "/":
            if below:
                raise Unreadable("two slashes")
            below, at = True, at + 1
            continue
        if kind == "mark" and text == "(" and depth < 3:
            factor, at = _product(tokens, at + 1, depth + 1)
            if at >= len(tokens) or tokens[at] != ("mark", ")"):
                raise Unreadable("an open bracket")
            at += 1
        elif kind == "name":
            factor, at = unit(text), at + 1
        else:
            break
        power = 1
        if at < len(tokens) and tokens[at][0] == "power":
            power, at = int(re.sub(r"[^\d-]", "", tokens[at][1])), at + 1
        if not 0 < abs(power) <= MOST_POWER:
            raise Unreadable("a power out of range")
        whole = times(whole, factor, -power if below else power)
        below, seen = False, True
    if below or not seen:
        raise Unreadable("not a unit")
    return whole, at


def times(a: Quantity, b: Quantity, power: int = 1) -> Quantity:
    """a * b^power."""
    powers = [x + power * y for x, y in zip(a.dimension, b.dimension, strict=True)]
    if max(map(abs, powers)) > MOST_EXPONENT:
        raise Unreadable("a power out of range")
    return Quantity(a.value * b.value**power, tuple(powers))  # type: ignore[arg-type]


def parse_quantity(text: str) -> Quantity:
    """A number with a unit, or without one: "12.5 m/s", "3.0e8", "1.6 × 10^-19 C", "10^-3 m^3". The number is a
    literal: nothing is evaluated, "650/290 kg" neither. Raises Unreadable."""
    value, found, _ = parse_parts(text)
    return Quantity(value * found.value, found.dimension)


def parse_parts(text: str, bare_unit: bool = False) -> tuple[Fraction, Quantity, str]:
    """The number of a quantity, its unit, and the unit as written. With `bare_unit` a unit without a number has the
    number 1. Raises Unreadable."""
    text = _plain(text)
    if len(text) > MOST_CHARS:
        raise Unreadable("too long")
    match = _NUMBER.match(text)
    if match is None or not (match["whole"] or match["part"]):
        if not bare_unit or not text:
            raise Unreadable("no number")
        return Fraction(1), parse_unit(text), text
    value = Fraction((match["whole"] or "0").replace(",", "") + (match["part"] or ""))
    exponent = int(match["e"] or match["ten"] or 0)
    if abs(exponent) > MOST_EXPONENT:
        raise Unreadable("an exponent out of range")
    value *= Fraction(10) ** exponent * (-1 if match["sign"] == "-" else 1)
    rest = re.sub(r"^[*×·]\s*(?=[A-Za-zµΩ])", "", text[match.end() :].strip())
    return value, parse_unit(rest) if rest else Quantity(Fraction(1), NONE), rest


def _plain(text: str) -> str:
    """A written quantity without the marks of LaTeX: "\\frac{km}{h}" is "km/(h)", "10⁻³" is "10^-3", "per" a slash."""
    if len(text) > 4 * MOST_CHARS:
        raise Unreadable("too long")
    text = _SPACES.sub(" ", text.replace("$", "").replace("−", "-").replace("\u03bc", "µ"))
    text = _FRACTION.sub(r"\1/(\2)", text).replace("\\times", "×").replace("\\cdot", "·")
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda found: "^" + found.group().translate(_SUPERSCRIPTS), text)
    text = _ABOUT.sub("", text.replace("{", " ").replace("}", " ").strip())
    text = re.sub(r"^([-+]?)10\s*\^", r"\g<1>1×10^", text)
    return re.sub(r"\bper\b", "/", text).strip()


def written(value: Fraction, digits: int = 3) -> str:
    """A number to so many significant digits, without an exponent from 0.001 to 999,999."""
    text = f"{float(value):.{digits}g}"
    if "e" not in text:
        return text
    if 1e-3 <= abs(float(value)) < 1e6:
        return str(int(float(text))) if abs(float(value)) >= 1 else f"{float(text):f}".rstrip("0")
    mantissa, _, power = text.partition("e")
    return f"{mantissa}e{int(power)}"
