"""Generators of science questions: typed formulas, units, chemistry, and the periodic table if `mendeleev` is there.

Every question says what it takes from nature (g = 9.81 m/s^2), so the answer is a function of its text. Answers of
formulas are quantities: value and unit count. Each generator names the `source` whose judge grades it.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from glm5.errors import MissingExtraError
from glm5.tasks.mathematics.answer import Answer
from glm5.tasks.science.units import BASE, Quantity, parse_quantity, written

LEVELS = (1, 2, 3)


@dataclass(frozen=True)
class Exercise:
    """A question, its answer in the form of its source's judge, the working, and the content that decides the split."""

    text: str
    source: str
    wanted: Quantity | Answer | tuple[str, ...]
    solution: str
    working: str
    unit: str = ""
    """The unit that the question asks for: a bare number is in it, and a "conversion" must have it."""

    @property
    def key(self) -> str:
        return f"science {self.text}"


@dataclass(frozen=True)
class Formula:
    """`text` with the variables' names in braces; a variable has a unit and values to draw from. `law` computes the
    answer from them, in SI units."""

    text: str
    variables: Mapping[str, tuple[str, Sequence[float]]]
    answer: str
    law: Callable[..., Fraction]
    shown: str
    level: int = 1


def _range(low: int, high: int, step: float = 1) -> list[float]:
    return [low + step * i for i in range(int((high - low) / step) + 1)]


FORMULAS: Mapping[str, Formula] = {
    "speed": Formula("A train covers {d} in {t}. What is its mean speed in km/h?",
                     {"d": ("km", _range(12, 480, 12)), "t": ("min", _range(10, 240, 5))}, "km/h",
                     lambda d, t: d / t, "v = d / t"),
    "density": Formula("A block has a mass of {m} and a volume of {V}. What is its density in g/cm^3?",
                       {"m": ("g", _range(20, 900, 7)), "V": ("cm^3", _range(5, 300, 5))}, "g/cm^3",
                       lambda m, V: m / V, "rho = m / V"),
    "force": Formula("What net force gives a body of {m} an acceleration of {a}? Answer in N.",
                     {"m": ("kg", _range(2, 90)), "a": ("m/s^2", _range(1, 20, 0.5))}, "N",
                     lambda m, a: m * a, "F = m a"),
    "ohm": Formula("A current of {I} flows through a resistor of {R}. What is the voltage across it, in V?",
                   {"I": ("mA", _range(5, 900, 5)), "R": ("ohm", _range(10, 990, 10))}, "V",
                   lambda I, R: I * R, "U = R I"),
    "pressure": Formula("A force of {F} acts evenly on an area of {A}. What is the pressure in kPa?",
                        {"F": ("N", _range(50, 5000, 50)), "A": ("cm^2", _range(10, 900, 10))}, "kPa",
                        lambda F, A: F / A, "p = F / A"),
    "energy_bill": Formula("A device of {P} runs for {t}. How much energy does it take, in MJ?",
                           {"P": ("W", _range(20, 3000, 20)), "t": ("h", _range(1, 48))}, "MJ",
                           lambda P, t: P * t, "E = P t"),
    "kinetic": Formula("A car of {m} moves at {v}. What is its kinetic energy in kJ?",
                       {"m": ("kg", _range(600, 3000, 50)), "v": ("km/h", _range(18, 180, 9))}, "kJ",
                       lambda m, v: m * v * v / 2, "E = m v^2 / 2", 2),
    "lifting": Formula("A crane lifts {m} by {h} in {t}. What is its mean power in kW? Use g = 9.81 m/s^2.",
                       {"m": ("kg", _range(100, 4000, 50)), "h": ("m", _range(2, 60)), "t": ("s", _range(5, 120, 5))},
                       "kW", lambda m, h, t: m * Fraction(981, 100) * h / t, "P = m g h / t", 2),
    "heating": Formula("How much heat warms {m} of water by {dT}, in kJ? Use c = 4.18 kJ/(kg K).",
                       {"m": ("g", _range(50, 3000, 50)), "dT": ("K", _range(5, 75, 5))}, "kJ",
                       lambda m, dT: 4180 * m * dT, "Q = c m dT", 2),
    "ideal_gas": Formula("A vessel of {V} has {n} of an ideal gas at {T}. What is its pressure in kPa? "
                         "Use R = 8.314 J/(mol K).",
                         {"V": ("L", _range(2, 80)), "n": ("mol", _range(1, 12, 0.5)), "T": ("K", _range(250, 450, 5))},
                         "kPa", lambda V, n, T: n * Fraction(8314, 1000) * T / V, "p = n R T / V", 2),
    "wave": Formula("A wave of {f} travels at {v}. What is its wavelength in cm?",
                    {"f": ("kHz", _range(1, 60)), "v": ("m/s", _range(300, 1600, 20))}, "cm",
                    lambda f, v: v / f, "lambda = v / f", 2),
    "coulomb": Formula("Two charges of {a} and {b} are {r} apart. What force acts between them, in mN? "
                       "Use k = 8.99e9 N m^2/C^2.",
                       {"a": ("nC", _range(10, 900, 10)), "b": ("nC", _range(10, 900, 10)), "r": ("cm", _range(2, 60))},
                       "mN", lambda a, b, r: 8990000000 * a * b / r**2, "F = k a b / r^2", 3),
    "parallel": Formula("Resistors of {a}, {b} and {c} are in parallel. What is their resistance together, in ohm?",
                        {name: ("ohm", _range(10, 900, 10)) for name in "abc"}, "ohm",
                        lambda a, b, c: 1 / (1 / a + 1 / b + 1 / c), "1/R = 1/a + 1/b + 1/c", 3),
    "braking": Formula("A car at {v} brakes with {a} after a reaction time of {t}. After which distance does it stand, "
                       "in m?",
                       {"v": ("km/h", _range(18, 180, 9)), "a": ("m/s^2", _range(3, 9, 0.5)),
                        "t": ("s", _range(1, 2, 0.1))}, "m",
                       lambda v, a, t: v * t + v * v / (2 * a), "s = v t + v^2 / (2 a)", 3),
    "mixing": Formula("{m} of water is mixed with {n} of water that is {T} warmer. By how many K does the first "
                      "warm up?",
                      {"m": ("g", _range(100, 900, 50)), "n": ("g", _range(100, 900, 50)), "T": ("K", _range(10, 70))},
                      "K", lambda m, n, T: n * T / (m + n), "dT = n T / (m + n)", 3),
}  # fmt: skip
"""At least one of each level."""
CONVERSIONS = (
    ("km/h", "m/s"), ("m/s", "km/h"), ("g/cm^3", "kg/m^3"), ("L", "cm^3"), ("bar", "kPa"), ("h", "s"), ("ha", "km^2"),
    ("kJ", "cal"), ("mi", "km"), ("mA h", "C"), ("L/min", "cm^3/s"), ("N/mm^2", "kPa"), ("g/(kW h)", "kg/MJ"),
    ("kW h", "MJ"), ("ft", "cm"), ("cm^2", "m^2"), ("mol/L", "mol/m^3"), ("eV", "J"),
)  # fmt: skip


def decimal(value: float) -> Fraction:
    """The fraction that a decimal shows, not that of its binary form."""
    return Fraction(f"{value:g}")


def formula(rng: random.Random, level: int) -> Exercise:
    """A law with drawn values; the answer is wanted in a given unit and may be given in any of its dimension."""
    name = rng.choice([name for name, one in FORMULAS.items() if one.level == level])
    one = FORMULAS[name]
    drawn = {key: (rng.choice(values), unit_) for key, (unit_, values) in one.variables.items()}
    shown = {key: f"{value:g} {unit_}" for key, (value, unit_) in drawn.items()}
    given = {key: parse_quantity(text) for key, text in shown.items()}
    target = parse_unit_of(one.answer)
    wanted = Quantity(one.law(**{key: q.value for key, q in given.items()}), target.dimension)
    solution = f"{written(wanted.value / target.value, 4)} {one.answer}"
    working = f"{one.shown}, so {solution}"
    return Exercise(one.text.format(**shown), "quantity", wanted, solution, working, one.answer)


def parse_unit_of(text: str) -> Quantity:
    """The unit that an answer is asked in."""
    return parse_quantity(f"1 {text}")


def conversion(rng: random.Random, level: int) -> Exercise:
    """1: simple units. 2 and 3: compound ones with awkward numbers."""
    source, target = rng.choice(CONVERSIONS[: (6, 12, len(CONVERSIONS))[level - 1]])
    number = decimal(rng.randint(2, 990) / (1, 10, 100)[level - 1])
    value = parse_quantity(f"{float(number):g} {source}")
    factor = parse_unit_of(target)
    solution = f"{written(value.value / factor.value, 5)} {target}"
    text = f"Convert {float(number):g} {source} to {target}."
    working = f"1 {source} is {written(value.value / number / factor.value, 5)} {target}"
    return Exercise(text, "conversion", value, solution, working, target)


def dimensions(rng: random.Random, level: int) -> Exercise:
    """Which SI base units a unit has, as a product."""
    names = (("N", "Pa", "J", "W", "Hz", "C"), ("V", "ohm", "F", "T", "kPa", "L"), ("N/C", "J/(kg K)", "W/m^2", "V/m",
             "Pa s", "N m^2/kg^2"))[level - 1]  # fmt: skip
    name = rng.choice(names)
    other = rng.choice([n for n in names if n != name])
    first = rng.random() < 0.5
    asked = name if first or "/" in name + other else f"{name} {other}"
    found = parse_unit_of(asked)
    base = _base_units(found)
    return Exercise(
        f"Write {asked} as a product of powers of SI base units (m, kg, s, A, K, mol), with its factor if it is not 1.",
        "base", found, base, f"{asked} = {base}",
    )  # fmt: skip


def _base_units(found: Quantity) -> str:
    powers = [(name, power) for name, power in zip(BASE, found.dimension, strict=True) if power]
    words = [name if power == 1 else f"{name}^{power}" for name, power in sorted(powers, key=lambda one: -one[1])]
    return " ".join([*([written(found.value, 6)] if found.value != 1 else []), *words])


REACTIONS: Sequence[tuple[str, ...]] = (
    ("H2 O2 > H2O", "N2 H2 > NH3", "Na Cl2 > NaCl", "Mg O2 > MgO", "C O2 > CO", "H2 Cl2 > HCl", "Ca O2 > CaO"),
    ("CH4 O2 > CO2 H2O", "Fe O2 > Fe2O3", "Al O2 > Al2O3", "KClO3 > KCl O2", "Na H2O > NaOH H2", "P O2 > P2O5",
     "C2H6 O2 > CO2 H2O", "Fe2O3 C > Fe CO2", "NH3 O2 > NO H2O"),
    ("C6H12O6 O2 > CO2 H2O", "Al HCl > AlCl3 H2", "C8H18 O2 > CO2 H2O", "Ca3P2O8 SiO2 C > CaSiO3 CO P",
     "FeS2 O2 > Fe2O3 SO2", "KMnO4 HCl > KCl MnCl2 H2O Cl2", "Cu HNO3 > CuN2O6 NO H2O", "C3H8O O2 > CO2 H2O"),
)  # fmt: skip
"""Unbalanced reactions by level: substances on the left, ">", and those on the right. Their balance is unique."""


def balance(rng: random.Random, level: int) -> Exercise:
    """The smallest whole coefficients of a reaction."""
    reaction = rng.choice(REACTIONS[level - 1])
    left, right = (side.split() for side in reaction.split(" > "))
    order = rng.sample(left, len(left)), rng.sample(right, len(right))
    numbers = balanced(order[0], order[1])
    sides = [" + ".join(f"? {name}" for name in side) for side in order]
    text = (
        f"Balance {sides[0]} -> {sides[1]} with the smallest whole numbers. Answer with them in order, as (a, b, ...)."
    )
    solution = f"({', '.join(map(str, numbers))})"
    whole = [f"{n if n > 1 else ''}{name}" for n, name in zip(numbers, [*order[0], *order[1]], strict=True)]
    at = len(order[0])
    working = f"{' + '.join(whole[:at])} -> {' + '.join(whole[at:])}"
    return Exercise(text, "exact", Answer(tuple(map(str, numbers)), kind="tuple", form="integer"), solution, working)


def atoms(substance: str) -> dict[str, int]:
    """Counts of atoms in a formula without brackets, as in "C6H12O6"."""
    found: dict[str, int] = {}
    for name, count in re.findall(r"([A-Z][a-z]?)(\d*)", substance):
        found[name] = found.get(name, 0) + int(count or 1)
    return found


def balanced(left: Sequence[str], right: Sequence[str]) -> list[int]:
    """The smallest positive whole coefficients, from the null space of the matrix of atoms. Raises ValueError for a
    reaction that has none, or several."""
    sides = [atoms(name) for name in left] + [{k: -v for k, v in atoms(name).items()} for name in right]
    names = sorted({name for side in sides for name in side})
    rows = [[Fraction(side.get(name, 0)) for side in sides] for name in names]
    pivots: list[int] = []
    at = 0
    for column in range(len(sides)):
        pivot = next((r for r in range(at, len(rows)) if rows[r][column]), None)
        if pivot is None:
            continue
        rows[at], rows[pivot] = rows[pivot], rows[at]
        rows[at] = [x / rows[at][column] for x in rows[at]]
        for r in range(len(rows)):
            if r != at and rows[r][column]:
                rows[r] = [x - rows[r][column] * y for x, y in zip(rows[r], rows[at], strict=True)]
        pivots.append(column)
        at += 1
    free = [column for column in range(len(sides)) if column not in pivots]
    if len(free) != 1:
        raise ValueError(f"{left} > {right} has {len(free)} free coefficients, not one")
    values = [Fraction(0)] * len(sides)
    values[free[0]] = Fraction(1)
    for r, column in enumerate(pivots):
        values[column] = -rows[r][free[0]]
    scale = math.lcm(*(value.denominator for value in values))
    whole = [int(value * scale) for value in values]
    common = math.gcd(*whole)
    if min(whole) <= 0:
        raise ValueError(f"{left} > {right} cannot be balanced")
    return [number // common for number in whole]


WEIGHTS = {"H": "1.008", "C": "12.011", "N": "14.007", "O": "15.999", "Na": "22.990", "S": "32.06", "Cl": "35.45",
           "Ca": "40.078", "Fe": "55.845"}  # fmt: skip
"""Abridged standard atomic weights (IUPAC), in g/mol. The question states those that it needs."""
SUBSTANCES = (
    ("H2O", "CO2", "NaCl", "CH4", "NH3", "HCl", "CaO"),
    ("CaCO3", "Fe2O3", "H2SO4", "C2H6O", "HNO3", "CaCl2", "Na2SO4"),
    ("C6H12O6", "C12H22O11", "C8H10N4O2", "C9H8O4", "C3H8O3", "C6H8O7"),
)


def molar(rng: random.Random, level: int) -> Exercise:
    """1: a molar mass. 2: the mass of an amount. 3: the amount in a mass."""
    substance = rng.choice(SUBSTANCES[level - 1])
    counts = atoms(substance)
    mass = sum((Fraction(WEIGHTS[name]) * count for name, count in counts.items()), Fraction(0))
    told = ", ".join(f"{name} {WEIGHTS[name]}" for name in counts)
    tail = f"Use the atomic weights {told} (g/mol)."
    if level == 1:
        wanted = Quantity(mass / 1000, parse_unit_of("g/mol").dimension)
        text, solution = f"What is the molar mass of {substance} in g/mol? {tail}", f"{written(mass, 5)} g/mol"
    elif level == 2:
        amount = decimal(rng.randint(2, 95) / 10)
        wanted = Quantity(amount * mass / 1000, parse_unit_of("g").dimension)
        text = f"What is the mass of {float(amount):g} mol of {substance} in g? {tail}"
        solution = f"{written(amount * mass, 4)} g"
    else:
        grams = Fraction(rng.randint(5, 400))
        wanted = Quantity(grams / mass, parse_unit_of("mol").dimension)
        text = f"What amount, in mol, is {grams} g of {substance}? {tail}"
        solution = f"{written(grams / mass, 4)} mol"
    unit = ("g/mol", "g", "mol")[level - 1]
    return Exercise(text, "quantity", wanted, solution, f"M = {written(mass, 6)} g/mol, so {solution}", unit)


# ------------------------------------------------------------------------------------------------ periodic table


@functools.cache
def elements() -> tuple[Mapping[str, Any], ...]:
    """The elements of the package `mendeleev`, by atomic number. Raises MissingExtraError without it."""
    if importlib.util.find_spec("mendeleev") is None:
        raise MissingExtraError("mendeleev", "science")
    from mendeleev import get_all_elements

    names = ("name", "symbol", "atomic_number", "period", "group_id", "melting_point", "discovery_year")
    found = [{name: getattr(one, name, None) for name in names} for one in get_all_elements()]
    return tuple(sorted(found, key=lambda one: int(one["atomic_number"])))


def element(rng: random.Random, level: int) -> Exercise:
    """1: names, symbols, numbers. 2: neighbours in the table. 3: of several, by a property."""
    table = elements()[:103]
    one = rng.choice(table)
    name, symbol, number = str(one["name"]), str(one["symbol"]), int(one["atomic_number"])
    if level == 1:
        asked, answer = rng.choice((
            (f"What is the chemical symbol of {name}?", (symbol,)),
            (f"Which element has the symbol {symbol}? Answer with its name.", (name,)),
            (f"Which element has the atomic number {number}? Answer with its name.", (name,)),
        ))  # fmt: skip
        return Exercise(asked, "name", answer, answer[0], f"{name}, {symbol}, {number}")
    if level == 2:
        step = rng.choice([step for step in (-2, -1, 1, 2) if 1 <= number + step <= len(table)])
        other = table[number - 1 + step]
        protons = int(other["atomic_number"])
        more = "more" if protons > number else "fewer"
        text = f"Which element has {abs(protons - number)} proton(s) {more} than {name}? Answer with its name."
        names = (str(other["name"]), str(other["symbol"]))
        return Exercise(text, "name", names, names[0], f"{number}, {protons}")
    known = [e for e in table if isinstance(e["discovery_year"], int) and e["discovery_year"] > 1600]
    some = rng.sample(known, 3)
    years = [int(e["discovery_year"]) for e in some]
    while len(set(years)) < 3:
        some = rng.sample(known, 3)
        years = [int(e["discovery_year"]) for e in some]
    first = some[years.index(min(years))]
    text = f"Which of {', '.join(str(e['name']) for e in some)} was discovered first? Answer with its name."
    working = ", ".join(f"{e['name']} {e['discovery_year']}" for e in some)
    return Exercise(text, "name", (str(first["name"]), str(first["symbol"])), str(first["name"]), working)


TOPICS: Mapping[str, Callable[[random.Random, int], Exercise]] = {
    "formula": formula,
    "conversion": conversion,
    "dimensions": dimensions,
    "balance": balance,
    "molar": molar,
    "element": element,
}
BUILT_IN = tuple(name for name in TOPICS if name != "element")
"""Topics that need no package."""
