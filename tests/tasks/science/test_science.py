"""Science: exact units, balanced reactions, judges by source, and answers that look right."""

from __future__ import annotations

import random
import re
from fractions import Fraction
from itertools import pairwise, permutations
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5.errors import ConfigError, MissingExtraError
from glm5.records import Message
from glm5.tasks.mathematics.expression import Unreadable
from glm5.tasks.science import problems
from glm5.tasks.science.family import ScienceFamily, ScienceProblem
from glm5.tasks.science.problems import (
    BUILT_IN,
    CONVERSIONS,
    FORMULAS,
    LEVELS,
    REACTIONS,
    TOPICS,
    Exercise,
    atoms,
    balanced,
)
from glm5.tasks.science.units import Quantity, parse_quantity, parse_unit, written


def graded(exercise: Exercise, text: str) -> float:
    return ScienceProblem("x", "t", 1, exercise, False).grade(Message("assistant", text))


@pytest.mark.parametrize(
    ("text", "value", "base"),
    [  # NIST SP 811: definitions of the units
        ("1 N", "1", "kg m/s^2"),
        ("1 kPa", "1000", "N/m^2"),
        ("72 km/h", "20", "m/s"),
        ("1 kW h", "3600000", "J"),
        ("1 eV", "1602176634/10000000000000000000000000000", "J"),
        ("1 atm", "101325", "Pa"),
        ("1 mi", "1609344/1000", "m"),
        ("2.5e3 mL", "25/10000", "m^3"),
        ("1.6 × 10^-19 C", "16/100000000000000000000", "A s"),
        ("3\\times 10^{8}\\,\\text{m/s}", "300000000", "m/s"),
        ("1,250 g", "5/4", "kg"),
        ("10^-3 m^3", "1/1000", "m^3"),
        ("10⁻³ m³", "1/1000", "m^3"),
        ("2·10^3 kg·m⁻¹·s⁻²", "2000", "Pa"),
        ("≈ 90 km per hour", "25", "m/s"),
        ("\\approx 90 \\frac{\\text{km}}{\\text{h}}", "25", "m/s"),
        ("5~\\mathrm{N} \\cdot \\mathrm{m}", "5", "J"),
        ("5 \u03bcs", "5/1000000", "s"),
        ("5 m·s⁻¹", "5", "m/s"),
        ("4.18 kJ/(kg K)", "4180", "J/(kg K)"),
        ("−3 °".replace(" °", ""), "-3", ""),
        ("40 percent", "2/5", ""),
    ],
)
def test_quantities_are_exact(text: str, value: str, base: str) -> None:
    found = parse_quantity(text)
    assert found.value == Fraction(value)
    assert found.dimension == (parse_unit(base).dimension if base else (0,) * 7)


@pytest.mark.parametrize(
    "text",
    ["", "m", "three m", "1 furlong", "1 m//s", "1 m/", "1 (m", "1 m)", "1 m^99", "1e999 m", "5/0 m", "1 m^-0",
     "3/4 h", "650/290 N/cm^2", "\\frac{650}{290} N", "650 N/290 cm^2", "2*3 m",
     "1 " + "m " * 200, "1" * 300, "1 m^2^3^4", "nan m", "1 kkg", "1 m 2", "((((1 m))))"],
)  # fmt: skip
def test_what_is_no_quantity_is_unreadable(text: str) -> None:
    with pytest.raises(Unreadable):
        parse_quantity(text)


@given(st.text(alphabet="0123456789.eE+-*/^(){} kmgsNJ·×\\%", max_size=60))
def test_no_text_breaks_the_judge(text: str) -> None:
    exercise = TOPICS["formula"](random.Random(1), 2)
    assert graded(exercise, text) in (0.0, 1.0)


@pytest.mark.parametrize("topic", BUILT_IN)
@pytest.mark.parametrize("level", LEVELS)
def test_solutions_are_right_and_others_are_not(topic: str, level: int) -> None:
    exercises = [TOPICS[topic](random.Random(f"{topic} {level} {seed}"), level) for seed in range(30)]
    for exercise, other in pairwise(exercises):
        assert graded(exercise, exercise.solution) == graded(exercise, f"So \\boxed{{{exercise.solution}}}") == 1.0
        assert graded(exercise, "") == graded(exercise, exercise.text) == 0.0
        same = other.wanted == exercise.wanted
        assert same or graded(exercise, other.solution) == 0.0 or exercise.source in ("exact", "name", "base")


def test_a_question_is_not_its_answer() -> None:
    """Where the question contains the wanted quantity, the unit of the answer decides."""
    for seed in range(60):
        exercise = TOPICS["conversion"](random.Random(seed), 3)
        given_ = exercise.text.removeprefix("Convert ").partition(" to ")[0]
        assert graded(exercise, given_) == 0.0 and graded(exercise, exercise.solution) == 1.0
    exercise = TOPICS["dimensions"](random.Random(2), 2)
    assert graded(exercise, f"1 {exercise.text.split(' as a ')[0].removeprefix('Write ')}") == 0.0


@pytest.mark.parametrize("topic", ["formula", "conversion", "molar", "dimensions"])
def test_numbers_of_the_question_earn_nothing(topic: str) -> None:
    """Nobody is paid for writing the task as a fraction: a number is a literal."""
    for seed in range(60):
        exercise = TOPICS[topic](random.Random(seed), 1 + seed % 3)
        numbers = re.findall(r"\d+(?:\.\d+)?", exercise.text)
        for a, b in permutations(numbers[:3], 2):
            for unit in (exercise.solution.partition(" ")[2], "N/cm^2", "g/cm^3", "km/min"):
                assert graded(exercise, f"{a}/{b} {unit}") == graded(exercise, f"\\frac{{{a}}}{{{b}}} {unit}") == 0.0


def test_a_product_of_base_units_needs_its_factor_only_if_it_is_not_1() -> None:
    for seed in range(60):
        exercise = TOPICS["dimensions"](random.Random(seed), 1 + seed % 3)
        assert isinstance(exercise.wanted, Quantity)
        units = exercise.solution.split(" ", 1)[1] if exercise.solution[0].isdigit() else exercise.solution
        assert graded(exercise, units) == float(exercise.wanted.value == 1)
        assert graded(exercise, f"{float(exercise.wanted.value):g} {units}") == 1.0
        assert graded(exercise, f"2 {units}") == graded(exercise, "1") == graded(exercise, "kg^7") == 0.0


RENDERINGS = (
    "{n} {u}", "\\boxed{{{n}}}\\text{{ {u}}}", "\\boxed{{{n}}} {u}", "\\boxed{{{n}\\ \\mathrm{{{u}}}}}",
    "\\boxed{{{n}~\\text{{{u}}}}}", "\\boxed{{{n}\\,\\text{{{u}}}}}", "\\boxed{{{n}}}", "{n}",
    "≈ {n} {u}", "The answer is approximately {n} {u}.",
    "Answer: ${n}$ {u}", "So the result is **{n} {u}**.", "We compute.\n\nSo it is \\boxed{{{n}}} {u}. Done.",
)  # fmt: skip


@pytest.mark.parametrize("rendering", RENDERINGS)
def test_usual_renderings_of_the_answer(rendering: str) -> None:
    """A number alone is in the unit that the question names; another unit beside it counts."""
    for seed in range(20):
        for topic in ("formula", "conversion", "molar"):
            exercise = TOPICS[topic](random.Random(seed), 1 + seed % 3)
            number, _, unit = exercise.solution.partition(" ")
            assert graded(exercise, rendering.format(n=number, u=unit)) == 1.0, exercise.solution
            wrong = rendering.format(n=number, u="cd" if "{u}" in rendering else unit)
            assert graded(exercise, wrong) == float("{u}" not in rendering)
            assert graded(exercise, rendering.format(n=f"{float(number) * 1.1:.4g}", u=unit)) == 0.0


def test_any_unit_of_the_dimension_and_three_digits_do() -> None:
    exercise = Exercise("v?", "quantity", parse_quantity("72 km/h"), "72 km/h", "")
    for text in (
        "20 m/s",
        "v = 72 km/h",
        "20.1 m/s",
        "1.2 km/min",
        "The final answer is: 20 m/s.",
        "\\boxed{20\\,\\text{m/s}}",
    ):
        assert graded(exercise, text) == 1.0, text
    for text in ("20", "20 m", "20 km/h", "-20 m/s", "21 m/s", "20 m/s or 30 m/s", "20 m/s\nor 21 m/s"):
        assert graded(exercise, text) == 0.0, text


@pytest.mark.parametrize("reaction", [one for some in REACTIONS for one in some])
def test_reactions_have_one_balance(reaction: str) -> None:
    left, right = (side.split() for side in reaction.split(" > "))
    numbers = balanced(left, right)
    totals: list[dict[str, int]] = [{}, {}]
    for i, (name, number) in enumerate(zip([*left, *right], numbers)):
        for atom, count in atoms(name).items():
            side = totals[i >= len(left)]
            side[atom] = side.get(atom, 0) + number * count
    assert totals[0] == totals[1] and min(numbers) > 0


def test_known_balances() -> None:
    assert balanced(["CH4", "O2"], ["CO2", "H2O"]) == [1, 2, 1, 2]
    assert balanced(["C8H18", "O2"], ["CO2", "H2O"]) == [2, 25, 16, 18]
    with pytest.raises(ValueError, match="free coefficients"):
        balanced(["H2", "O2"], ["H2O", "H2O2"])


def test_formulas_agree_with_floating_point() -> None:
    """Against the same laws computed by hand in SI units."""
    q = dict.fromkeys(FORMULAS, parse_quantity)
    law = {name: one.law for name, one in FORMULAS.items()}
    assert float(law["kinetic"](Fraction(1200), q["kinetic"]("90 km/h").value)) == pytest.approx(0.5 * 1200 * 25**2)
    assert float(law["ideal_gas"](Fraction("0.0224"), Fraction(1), Fraction(273))) == pytest.approx(101325, rel=2e-3)
    assert float(law["braking"](Fraction(20), Fraction(5), Fraction(1))) == pytest.approx(60)
    assert float(law["parallel"](Fraction(10), Fraction(10), Fraction(5))) == pytest.approx(2.5)
    assert float(law["coulomb"](Fraction(1, 10**6), Fraction(1, 10**6), Fraction(1))) == pytest.approx(8.99e-3)
    for source, target in CONVERSIONS:
        assert parse_unit(source).dimension == parse_unit(target).dimension


@pytest.mark.parametrize(("value", "text"), [("1234567", "1.23e6"), ("0.000123", "0.000123"), ("45", "45"),
                                             ("0.5", "0.5"), ("99999", "100000"), ("-0.0421", "-0.0421")])  # fmt: skip
def test_numbers_as_written(value: str, text: str) -> None:
    found = written(Fraction(value))
    assert Fraction(found) == pytest.approx(Fraction(text), rel=5e-3) and "+" not in found


# ---------------------------------------------------------------------------------------------------- periodic table


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    names = "Hydrogen Helium Lithium Beryllium Boron Carbon Nitrogen Oxygen Fluorine Neon".split()
    symbols = "H He Li Be B C N O F Ne".split()
    years = (1766, 1895, 1817, 1798, 1808, None, 1772, 1774, 1886, 1898)
    rows: Any = tuple(
        {"name": name, "symbol": symbol, "atomic_number": i + 1, "discovery_year": year}
        for i, (name, symbol, year) in enumerate(zip(names, symbols, years))
    )
    monkeypatch.setattr(problems, "elements", lambda: rows)
    monkeypatch.setattr("glm5.tasks.science.family.elements", lambda: rows)


@pytest.mark.usefixtures("table")
def test_elements() -> None:
    for level in LEVELS:
        for seed in range(30):
            exercise = TOPICS["element"](random.Random(seed), level)
            assert graded(exercise, exercise.solution) == 1.0
            assert graded(exercise, f"It is {exercise.solution}.") == 1.0 and graded(exercise, "Iron") == 0.0
    symbol = Exercise("?", "name", ("He",), "He", "")
    assert graded(symbol, "He") == 1.0 and graded(symbol, "HE") == graded(symbol, "he") == 0.0
    sulphur = Exercise("?", "name", ("Sulfur", "S"), "Sulfur", "")
    assert [graded(sulphur, text) for text in ("sulphur", "Sulfur", "S", "Sulphide")] == [1.0, 1.0, 1.0, 0.0]
    texts = [TOPICS["element"](random.Random(seed), 2).text for seed in range(200)]
    assert not any(" 0 proton" in text for text in texts)
    assert "element" in ScienceFamily().topics


def test_without_the_package_the_topic_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise MissingExtraError("mendeleev", "science")

    monkeypatch.setattr("glm5.tasks.science.family.elements", missing)
    assert ScienceFamily().topics == BUILT_IN
    with pytest.raises(MissingExtraError, match="science"):
        ScienceFamily(topics=["element"])
    for options in ({"topics": ["alchemy"]}, {"levels": [9]}):
        with pytest.raises(ConfigError, match="use some of"):
            ScienceFamily(**options)  # type: ignore[arg-type]


def test_the_table_of_the_package() -> None:
    pytest.importorskip("mendeleev", reason="needs `pip install mendeleev`")
    problems.elements.cache_clear()
    found = problems.elements()
    assert SimpleNamespace(**found[25]).name == "Iron" and len(found) >= 118
