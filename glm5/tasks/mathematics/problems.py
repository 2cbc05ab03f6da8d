"""Generators of mathematical exercises, one function per topic: from a random generator and a level to an exercise.

Each writes its working, a few correct steps, for demonstrations with thinking. `key` is the content of an exercise
without names in a word problem and without the order of sums, products or equations. Equal keys share a split.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from glm5.tasks.mathematics.answer import Answer
from glm5.tasks.mathematics.expression import prime_factors

LEVELS = (1, 2, 3)


@dataclass(frozen=True)
class Exercise:
    """A question, its exact answer, the working, and the `key` that decides the split."""

    text: str
    answer: Answer
    working: str
    key: str


def _number(value: Fraction | int | str, **options: object) -> Answer:
    return Answer((str(value),), **options)  # type: ignore[arg-type]


def _fraction(rng: random.Random, most: int) -> Fraction:
    """A proper fraction in lowest terms, above zero."""
    bottom = rng.randint(2, most)
    top = rng.choice([n for n in range(1, bottom) if math.gcd(n, bottom) == 1])
    return Fraction(top, bottom)


def fractions(rng: random.Random, level: int) -> Exercise:
    """1: sum or difference. 2: product or quotient. 3: a bracket of three."""
    a, b = _fraction(rng, (9, 15, 9)[level - 1]), _fraction(rng, (9, 15, 9)[level - 1])
    if level == 1:
        sign = rng.choice("+-")
        a, b = max(a, b), min(a, b)
        value = a + b if sign == "+" else a - b
        bottom = math.lcm(a.denominator, b.denominator)
        working = f"{a}={a * bottom}/{bottom}, {b}={b * bottom}/{bottom}, so {value}"
        text = f"{a} {sign} {b}"
    elif level == 2:
        sign = rng.choice("*/")
        value = a * b if sign == "*" else a / b
        turned = b if sign == "*" else 1 / b
        top, bottom = a.numerator * turned.numerator, a.denominator * turned.denominator
        working = f"{top}/{bottom}={value}"
        text = f"({a}) {sign} ({b})"
    else:
        c = _fraction(rng, 9)
        value = (a + b) * c
        working = f"{a}+{b}={a + b}, times {c} is {value}"
        text = f"({a} + {b}) * {c}" if a <= b else f"({b} + {a}) * {c}"
    known = " * ".join(sorted(text.split(" * ")))  # a product has no order
    return Exercise(f"Compute {text} as a fraction.", _number(value), working, f"fractions {known}")


def linear(rng: random.Random, level: int) -> Exercise:
    """1: ax + b = c over the integers. 2: unknowns on both sides, a rational solution. 3: two equations."""
    if level == 1:
        a, x, b = rng.randint(2, 12), rng.randint(-12, 12), rng.randint(1, 30)
        text = f"{a}x + {b} = {a * x + b}"
        working = f"{a}x={a * x + b}-{b}={a * x}, x={x}"
        return Exercise(f"Solve {text} for x.", _number(x, name="x"), working, f"linear {text}")
    if level == 2:
        a, c = rng.sample(range(2, 13), 2)
        b, d = rng.randint(1, 30), rng.randint(1, 30)
        value = Fraction(d - b, a - c)
        text = f"{a}x + {b} = {c}x + {d}"
        known = " = ".join(sorted(text.split(" = ")))
        working = f"({a}-{c})x={d}-{b}, {a - c}x={d - b}, x={value}"
        return Exercise(f"Solve {text} for x.", _number(value, name="x"), working, f"linear {known}")
    x, y = rng.randint(-9, 9), rng.randint(-9, 9)
    while True:
        a, b, c, d = (rng.randint(1, 9) for _ in range(4))
        if a * d != b * c:
            break
    left = [" + ".join((f"{m}x", f"{n}y")).replace("1x", "x").replace("1y", "y") for m, n in ((a, b), (c, d))]
    text = f"{left[0]} = {a * x + b * y} and {left[1]} = {c * x + d * y}"
    det = a * d - b * c
    working = f"({a}*{d}-{b}*{c})x={det * x}, so x={x}; ({a}*{d}-{b}*{c})y={det * y}, so y={y}"
    answer = Answer((str(x), str(y)), kind="tuple")
    known = " and ".join(sorted(text.split(" and ")))
    return Exercise(f"Solve {text}. Answer as (x, y).", answer, working, f"linear {known}")


def numbers(rng: random.Random, level: int) -> Exercise:
    """1: greatest common divisor or least common multiple. 2: a power modulo m. 3: a linear congruence, a divisor
    count, or the prime factors as a set."""
    if level == 1:
        shared = rng.randint(2, 12)
        a, b = sorted(shared * n for n in rng.sample(range(2, 25), 2))
        if rng.random() < 0.5:
            working, x, y = "", a, b
            while y:
                working += f"{x}={x // y}*{y}+{x % y}, "
                x, y = y, x % y
            text, value, working = f"greatest common divisor of {a} and {b}", x, f"{working}so {x}"
        else:
            value = math.lcm(a, b)
            text, working = f"least common multiple of {a} and {b}", f"{a}*{b}/{a * b // value}={value}"
        return Exercise(f"Find the {text}.", _number(value, form="integer"), working, f"numbers {text}")
    if level == 2:
        base, exponent, modulus = rng.randint(2, 20), rng.randint(3, 30), rng.randint(5, 40)
        text = f"{base}^{exponent} is divided by {modulus}"
        steps, used, power = [], [], base % modulus
        for place, bit in enumerate(reversed(f"{exponent:b}")):
            steps.append(f"{base}^{2**place}={power}")
            used += [power] if bit == "1" else []
            power = power * power % modulus
        value = pow(base, exponent, modulus)
        working = f"mod {modulus}: {', '.join(steps)}; {'*'.join(map(str, used))}={math.prod(used)}, so {value}"
        question = f"What is the remainder when {text}?"
        return Exercise(question, _number(value, form="integer"), working, f"numbers {text}")
    return rng.choice((_congruence, _divisors, _primes))(rng)


def _congruence(rng: random.Random) -> Exercise:
    modulus = rng.randint(7, 60)
    a = rng.choice([n for n in range(2, modulus) if math.gcd(n, modulus) == 1])
    x = rng.randrange(modulus)
    text = f"{a}x leaves remainder {a * x % modulus} when divided by {modulus}"
    inverse = pow(a, -1, modulus)
    working = f"{a}*{inverse}={a * inverse} leaves 1, so x={inverse}*{a * x % modulus} mod {modulus}={x}"
    answer = _number(x, form="integer", name="x")
    return Exercise(f"Find the smallest x >= 0 such that {text}.", answer, working, f"numbers {text}")


def _divisors(rng: random.Random) -> Exercise:
    number = rng.randint(24, 2000)
    factors = prime_factors(number)
    value = math.prod(count + 1 for count in factors.values())
    written = "*".join(f"{prime}^{count}" for prime, count in factors.items())
    working = f"{number}={written}, so {'*'.join(f'({count}+1)' for count in factors.values())}={value}"
    question = f"How many positive divisors does {number} have?"
    return Exercise(question, _number(value, form="integer"), working, f"numbers divisors {number}")


def _primes(rng: random.Random) -> Exercise:
    number = math.prod(rng.choice((2, 3, 5, 7, 11, 13, 17)) for _ in range(4))
    factors = prime_factors(number)
    working = f"{number}=" + "*".join(f"{prime}^{count}" for prime, count in factors.items())
    answer = Answer(tuple(map(str, factors)), kind="set", form="integer")
    question = f"Give the set of prime divisors of {number}."
    return Exercise(question, answer, working, f"numbers primes {number}")


def polynomial(coefficients: list[int]) -> str:
    """`3x^2 - x + 5` from [3, -1, 5], highest degree first."""
    text = ""
    for degree, number in zip(range(len(coefficients) - 1, -1, -1), coefficients, strict=True):
        if number:
            size = "" if abs(number) == 1 and degree else str(abs(number))
            power = "" if degree == 0 else "x" if degree == 1 else f"x^{degree}"
            sign = ("-" if number < 0 else "") if not text else (" - " if number < 0 else " + ")
            text += f"{sign}{size}{power}"
    return text or "0"


def _nonzero(rng: random.Random, most: int) -> int:
    return rng.choice((-1, 1)) * rng.randint(1, most)


def algebra(rng: random.Random, level: int) -> Exercise:
    """1: expand and collect. 2: a product of binomials. 3: factor, find both roots, or simplify a root."""
    if level == 1:
        k, a, b, m, c = rng.randint(2, 9), rng.randint(1, 9), _nonzero(rng, 9), rng.randint(1, 9), _nonzero(rng, 9)
        text = f"{k}({polynomial([a, b])}) + {polynomial([m, c])}"
        done = polynomial([k * a + m, k * b + c])
        working = f"{polynomial([k * a, k * b])} + {polynomial([m, c])} = {done}"
        return Exercise(f"Expand and simplify {text}.", Answer((done,), form="expanded"), working, f"algebra {text}")
    if level == 2:
        a, b, c, d = rng.randint(1, 6), _nonzero(rng, 9), rng.randint(1, 6), _nonzero(rng, 9)
        (a, b), (c, d) = sorted(((a, b), (c, d)))
        text = f"({polynomial([a, b])})({polynomial([c, d])})"
        done = polynomial([a * c, a * d + b * c, b * d])
        working = f"{a * c}x^2, {a * d}x, {b * c}x, {b * d}, so {done}"
        return Exercise(f"Expand {text}.", Answer((done,), form="expanded"), working, f"algebra {text}")
    return rng.choice((_factoring, _roots, _radical))(rng)


def _factoring(rng: random.Random) -> Exercise:
    p, q = _nonzero(rng, 9), _nonzero(rng, 9)
    a = rng.choice([n for n in (1, 2, 3) if math.gcd(n, p) == 1])
    text = polynomial([a, a * q + p, p * q])
    done = f"({polynomial([a, p])})({polynomial([1, q])})"
    working = f"{a * q}+{p}={a * q + p} and {p}*{q}={p * q}, so {done}"
    return Exercise(f"Factor {text}.", Answer((done,), form="factored"), working, f"algebra factor {text}")


def _roots(rng: random.Random) -> Exercise:
    first, second = sorted(rng.sample(range(-12, 13), 2))
    text = polynomial([1, -first - second, first * second])
    working = f"{first}+{second}={first + second} and {first}*{second}={first * second}"
    answer = Answer((str(first), str(second)), kind="set", name="x")
    return Exercise(f"Give the set of solutions of {text} = 0.", answer, working, f"algebra factor {text}")


def _radical(rng: random.Random) -> Exercise:
    inside, a, b = rng.choice((2, 3, 5, 6, 7, 10, 11, 13)), *rng.sample(range(2, 13), 2)
    text = f"sqrt({a * a * inside}) + sqrt({b * b * inside})"
    done = f"{a + b}*sqrt({inside})"
    working = f"{a}*sqrt({inside}) + {b}*sqrt({inside}) = {done}"
    pair = sorted((a * a * inside, b * b * inside))
    return Exercise(f"Simplify {text}.", Answer((done,), form="radical"), working, f"algebra radical {pair}")


def percents(rng: random.Random, level: int) -> Exercise:
    """1: a share of a number. 2: a change in percent. 3: two changes, one after the other. Decimals throughout."""
    if level == 1:
        share, whole = rng.randint(1, 99), rng.randint(2, 90) * 10
        value = decimal(Fraction(share * whole, 100))
        text = f"{share}% of {whole}"
        working = f"{whole}/100*{share}={value}"
        return Exercise(f"What is {text}?", _number(value), working, f"percents {text}")
    if level == 2:
        before, share = rng.choice((20, 25, 40, 50, 80, 125, 160, 200, 250, 400)), _nonzero(rng, 90)
        after = before * Fraction(100 + share, 100)
        shown = decimal(after)
        text = f"from {before} to {shown}"
        question = f"A price {'rises' if share > 0 else 'falls'} {text}. By how many percent?"
        working = f"{abs(after - before)}/{before}={Fraction(abs(share), 100)}, which is {abs(share)}%"
        return Exercise(question, _number(abs(share), units=("percent", "%")), working, f"percents {text}")
    start, up, down = rng.randint(2, 60) * 10, rng.randint(1, 60), rng.randint(1, 60)
    value = decimal(start * Fraction(100 + up, 100) * Fraction(100 - down, 100))
    text = f"{start} dollars, then {up}% more, then {down}% less"
    question = f"A price is {start} dollars. It rises by {up}%, then falls by {down}%. What is it now?"
    working = f"{start}*{100 + up}*{100 - down}/10000={value}"
    return Exercise(question, _number(value, units=("dollars", "$")), working, f"percents {text}")


def decimal(value: Fraction) -> str:
    """A fraction as a decimal; its denominator must have no primes other than 2 and 5."""
    digits = 0
    while (value * 10**digits).denominator != 1:
        digits += 1
    whole = str(abs(int(value * 10**digits))).rjust(digits + 1, "0")
    sign = "-" if value < 0 else ""
    return sign + (f"{whole[:-digits]}.{whole[-digits:]}" if digits else whole)


PEOPLE = ("Ada", "Ben", "Cleo", "Dina", "Emil", "Finn", "Gwen", "Hugo", "Iris", "Jonas", "Kira", "Lena")
THINGS = ("apples", "books", "coins", "stamps", "shells", "cards", "pens", "beads")


def words(rng: random.Random, level: int) -> Exercise:
    """1: give and take. 2: rates. 3: working together, or a mixture."""
    who, other = rng.sample(PEOPLE, 2)
    if level == 1:
        thing = rng.choice(THINGS)
        boxes, each, given = rng.randint(3, 15), rng.randint(3, 20), rng.randint(1, 8)
        value = Fraction(boxes * each - given)
        working = f"{boxes}*{each}={boxes * each}, {boxes * each}-{given}={value}"
        question = (
            f"{who} has {boxes} boxes with {each} {thing} each and gives {given} of them to {other}. "
            f"How many {thing} are left?"
        )
        return Exercise(question, _number(value, units=(thing,)), working, f"words boxes {boxes} {each} {given}")
    if level == 2:
        speed, minutes, pause = rng.randint(3, 40), rng.randint(1, 30) * 5, rng.randint(1, 20)
        value = Fraction(speed * minutes, 60)
        working = f"{minutes} minutes are {Fraction(minutes, 60)} hours, {speed}*{Fraction(minutes, 60)}={value}"
        question = (
            f"{who} cycles {minutes} minutes at {speed} km per hour, after a rest of {pause} minutes. "
            "How many km is that? Give a fraction or an integer."
        )
        return Exercise(question, _number(value, units=("km",)), working, f"words ride {speed} {minutes}")
    if rng.random() < 0.5:
        a, b = sorted(rng.sample(range(2, 31), 2))
        value = Fraction(a * b, a + b)
        working = f"1/{a}+1/{b}={Fraction(a + b, a * b)} of the wall per hour, so {value} hours"
        question = f"{who} paints a wall in {a} hours, {other} in {b} hours. How many hours do they take together?"
        return Exercise(question, _number(value, units=("hours", "hour", "h")), working, f"words together {a} {b}")
    first, second = rng.randint(1, 20), rng.randint(1, 20)
    low, high = sorted(rng.sample(range(5, 96, 5), 2))
    value = Fraction(first * low + second * high, first + second)
    working = f"({first}*{low}+{second}*{high})/({first}+{second})={value}"
    question = (
        f"{who} mixes {first} litres of {low}% juice with {second} litres of {high}% juice. What percentage is it?"
    )
    key = f"words mixture {first} {low} {second} {high}"
    return Exercise(question, _number(value, units=("percent", "%")), working, key)


TOPICS: Mapping[str, Callable[[random.Random, int], Exercise]] = {
    "fractions": fractions,
    "linear": linear,
    "numbers": numbers,
    "algebra": algebra,
    "percents": percents,
    "words": words,
}
