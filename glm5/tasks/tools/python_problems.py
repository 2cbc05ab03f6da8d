"""Questions that need a computation: too much by hand, a few lines of Python (§3.2, tool-integrated reasoning).

Every question has a program that prints its answer and a callable that computes it in another way. The tests of this
package run the program in the sandbox and compare both.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from glm5.tasks.mathematics.answer import Answer

LEVELS = (1, 2, 3)


@dataclass(frozen=True)
class Question:
    """`program` prints the answer in the requested form; `solve` computes it on demand."""

    text: str
    program: str
    solve: Callable[[], int | Fraction | list[int]]

    @property
    def answer(self) -> Answer:
        value = self.solve()
        if isinstance(value, list):
            return Answer(tuple(map(str, value)), kind="set", form="integer")
        return Answer((str(value),), form="integer" if isinstance(value, int) else "number")

    @property
    def printed(self) -> str:
        """The program's output."""
        value = self.solve()
        return ("{" + ", ".join(map(str, value)) + "}" if isinstance(value, list) else str(value)) + "\n"


def _digit_sum(rng: random.Random) -> Question:
    base, exponent = rng.randint(3, 60), rng.randint(20, 90)
    return Question(
        f"What is the sum of the decimal digits of {base}^{exponent}?",
        f"print(sum(int(d) for d in str({base}**{exponent})))",
        lambda: _digits_of(base**exponent),
    )


def _digits_of(number: int) -> int:
    total = 0
    while number:
        number, digit = divmod(number, 10)
        total += digit
    return total


def _multiples(rng: random.Random) -> Question:
    most = rng.randint(500, 5000)
    a, b, c = rng.sample(range(3, 20), 3)
    return Question(
        f"How many integers from 1 to {most} are divisible by {a} or by {b}, but not by {c}?",
        f"print(sum((n % {a} == 0 or n % {b} == 0) and n % {c} != 0 for n in range(1, {most} + 1)))",
        lambda: sum(
            sign * (most // divisor - most // math.lcm(divisor, c))
            for sign, divisor in ((1, a), (1, b), (-1, math.lcm(a, b)))
        ),
    )


def _digit_count(rng: random.Random) -> Question:
    digit, most = rng.randint(1, 9), rng.randint(500, 9000)
    return Question(
        f"How often is the digit {digit} written when all integers from 1 to {most} are written down?",
        f"print(sum(str(n).count('{digit}') for n in range(1, {most} + 1)))",
        lambda: sum(_places(most, digit, 10**place) for place in range(4)),
    )


def _places(most: int, digit: int, unit: int) -> int:
    """Number of integers from 1 to `most` with `digit` at the place of `unit`."""
    high, low = divmod(most, unit * 10)
    return high * unit + min(max(low - digit * unit + 1, 0), unit)


@functools.cache
def _primes(most: int) -> tuple[int, ...]:
    sieve = bytearray([1]) * (most + 1)
    for n in range(2, math.isqrt(most) + 1):
        if sieve[n]:
            sieve[n * n :: n] = bytes(len(range(n * n, most + 1, n)))
    return tuple(n for n in range(2, most + 1) if sieve[n])


IS_PRIME = "all(n % p for p in range(2, int(n**0.5) + 1))"


def _prime_sum(rng: random.Random) -> Question:
    low = rng.randint(10, 2000)
    high = low + rng.randint(50, 500)
    return Question(
        f"What is the sum of all primes between {low} and {high}?",
        f"print(sum(n for n in range({low}, {high} + 1) if {IS_PRIME}))",
        lambda: sum(p for p in _primes(3000) if low <= p <= high),
    )


def _recurrence(rng: random.Random) -> Question:
    start, factor, add = rng.randint(1, 20), rng.randint(2, 30), rng.randint(1, 30)
    modulus, count = rng.randint(50, 999), rng.randint(50, 2000)
    power = pow(factor, count, modulus * (factor - 1))  # for `solve`: closed form of the geometric sum
    return Question(
        f"Let x(0) = {start} and x(n+1) = {factor}*x(n) + {add} modulo {modulus}. What is x({count})?",
        f"x = {start}\nfor _ in range({count}):\n    x = ({factor} * x + {add}) % {modulus}\nprint(x)",
        lambda: (power * start + add * ((power - 1) // (factor - 1))) % modulus,
    )


def _harmonic(rng: random.Random) -> Question:
    low = rng.randint(1, 40)
    high = low + rng.randint(3, 9)
    return Question(
        f"What is the sum of 1/k for all integers k from {low} to {high}, as a fraction?",
        f"from fractions import Fraction\nprint(sum(Fraction(1, k) for k in range({low}, {high} + 1)))",
        lambda: Fraction(
            sum(math.prod(range(low, high + 1)) // k for k in range(low, high + 1)), math.prod(range(low, high + 1))
        ),
    )


def _change(rng: random.Random) -> Question:
    coins = sorted(rng.sample(range(1, 26), rng.randint(3, 5)))
    amount = rng.randint(40, 200)
    program = (
        f"ways = [1] + [0] * {amount}\nfor c in {coins}:\n    for n in range(c, {amount} + 1):\n"
        f"        ways[n] += ways[n - c]\nprint(ways[{amount}])"
    )
    return Question(
        f"In how many ways can {amount} be paid with any number of coins of the values {coins}, order aside?",
        program,
        lambda: _ways(amount, tuple(coins)),
    )


def _ways(amount: int, coins: tuple[int, ...]) -> int:
    @functools.cache
    def count(left: int, first: int) -> int:
        if first == len(coins) - 1:
            return int(left % coins[first] == 0)
        return sum(count(left - used, first + 1) for used in range(0, left + 1, coins[first]))

    return count(amount, 0)


def _squares(rng: random.Random) -> Question:
    modulus = rng.randint(40, 900)
    root = rng.randrange(1, modulus)
    square = root * root % modulus
    return Question(
        f"Give the set of all x with 0 <= x < {modulus} for which x^2 leaves remainder {square} when divided by "
        f"{modulus}.",
        f"xs = [x for x in range({modulus}) if x * x % {modulus} == {square}]\n"
        "print('{' + ', '.join(map(str, xs)) + '}')",
        lambda: [x for x in range(modulus) if pow(x, 2, modulus) == square],
    )


def _collatz(rng: random.Random) -> Question:
    low = rng.randint(2, 2000)
    high = low + rng.randint(50, 300)
    program = (
        f"def steps(n):\n    k = 0\n    while n != 1:\n        n, k = (n // 2 if n % 2 == 0 else 3 * n + 1), k + 1\n"
        f"    return k\nprint(max(steps(n) for n in range({low}, {high} + 1)))"
    )
    return Question(
        "Halve an even number; take an odd one times 3 plus 1; stop at 1. What is the greatest number of steps that "
        f"an integer from {low} to {high} needs?",
        program,
        lambda: max(_steps(n) for n in range(low, high + 1)),
    )


@functools.cache
def _steps(number: int) -> int:
    return 0 if number == 1 else 1 + _steps(number // 2 if number % 2 == 0 else 3 * number + 1)


QUESTIONS: Mapping[int, Mapping[str, Callable[[random.Random], Question]]] = {
    1: {"digit_sum": _digit_sum, "multiples": _multiples, "digit_count": _digit_count},
    2: {"prime_sum": _prime_sum, "recurrence": _recurrence, "harmonic": _harmonic},
    3: {"change": _change, "squares": _squares, "collatz": _collatz},
}
"""By level, then by topic."""
