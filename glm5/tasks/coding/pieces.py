"""Building blocks of the functions of `glm5.tasks.coding.generation`: an argument, steps over a list, and a result.

Every piece has a description in words, Python code for the model solution, and a callable for the expected values. The
tests of this package run the code in the sandbox and compare it with the callables.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Source:
    """An argument and the list that a function begins with. `kind` is the type of its elements: numbers or texts."""

    parameter: str
    words: str
    code: str
    kind: str
    begin: Callable[[Any], list[Any]]
    example: Callable[[random.Random, int], Any]
    """Makes an argument of about the given size; size 0 is empty."""


@dataclass(frozen=True)
class Piece:
    """A step (list to list) or a result (list to value). `{k}` is replaced by a whole number from `numbers`."""

    words: str
    code: str
    compute: Callable[[list[Any], int], Any]
    numbers: Sequence[int] = (0,)
    gives: str = ""
    """New type of the elements after a step that changes it, such as numbers after taking lengths."""


def _numbers(rng: random.Random, size: int) -> list[int]:
    return [rng.randint(-20, 40) for _ in range(size)]


def _word(rng: random.Random) -> str:
    return "".join(rng.choices(LETTERS[:9], k=rng.randint(1, 7)))


def _table(rng: random.Random, size: int) -> dict[str, int]:
    return {_word(rng): rng.randint(-20, 40) for _ in range(size)}


SOURCES: Mapping[str, Source] = {
    "list": Source("xs", "xs is a list of integers; start with it", "list(xs)", "numbers", list, _numbers),
    "digits": Source(
        "n",
        "n is an integer >= 0; start with the list of its decimal digits",
        "[int(d) for d in str(n)]",
        "numbers",
        lambda n: [int(d) for d in str(n)],
        lambda rng, size: rng.randrange(10**size),
    ),
    "words": Source(
        "s",
        "s is a text; start with the list of its words (split at spaces)",
        "s.split()",
        "texts",
        str.split,
        lambda rng, size: " ".join(_word(rng) for _ in range(size)),
    ),
    "values": Source(
        "d",
        "d is a dictionary from texts to integers; start with the list of its values",
        "list(d.values())",
        "numbers",
        lambda d: list(d.values()),
        _table,
    ),
    "keys": Source(
        "d",
        "d is a dictionary from texts to integers; start with its keys in alphabetical order",
        "sorted(d)",
        "texts",
        sorted,
        _table,
    ),
}


def _unique(xs: list[Any], k: int) -> list[Any]:
    return list(dict.fromkeys(xs))


def _sums(xs: list[int], k: int) -> list[int]:
    total, sums = 0, []
    for x in xs:
        total += x
        sums.append(total)
    return sums


SMALL = range(2, 10)
STEPS: Mapping[str, Sequence[Piece]] = {
    "numbers": (
        Piece("keep the even numbers", "[x for x in out if x % 2 == 0]", lambda xs, k: [x for x in xs if not x % 2]),
        Piece("keep the odd numbers", "[x for x in out if x % 2 == 1]", lambda xs, k: [x for x in xs if x & 1]),
        Piece(
            "keep the numbers greater than {k}",
            "[x for x in out if x > {k}]",
            lambda xs, k: [x for x in xs if k < x],
            range(8),
        ),
        Piece(
            "drop the multiples of {k}", "[x for x in out if x % {k}]", lambda xs, k: [x for x in xs if x % k], SMALL
        ),
        Piece("multiply each by {k}", "[x * {k} for x in out]", lambda xs, k: [k * x for x in xs], SMALL),
        Piece("add {k} to each", "[x + {k} for x in out]", lambda xs, k: [k + x for x in xs], SMALL),
        Piece("square each", "[x * x for x in out]", lambda xs, k: [x**2 for x in xs]),
        Piece("subtract each from {k}", "[{k} - x for x in out]", lambda xs, k: [k - x for x in xs], SMALL),
        Piece(
            "replace each by its remainder modulo {k}",
            "[x % {k} for x in out]",
            lambda xs, k: [x % k for x in xs],
            range(3, 10),
        ),
        Piece("replace each by the sum of it and all before it", "[sum(out[:i + 1]) for i in range(len(out))]", _sums),
        Piece(
            "replace each but the first by its difference from the one before it, and drop the first",
            "[b - a for a, b in zip(out, out[1:])]",
            lambda xs, k: [xs[i] - xs[i - 1] for i in range(1, len(xs))],
        ),
    ),
    "texts": (
        Piece(
            "keep the texts longer than {k}",
            "[t for t in out if len(t) > {k}]",
            lambda ts, k: [t for t in ts if t[k:]],
            range(1, 6),
        ),
        Piece(
            "keep the texts that contain a vowel (a, e, i, o, u)",
            "[t for t in out if any(c in 'aeiou' for c in t)]",
            lambda ts, k: [t for t in ts if set(t) & set("aeiou")],
        ),
        Piece("reverse each text", "[t[::-1] for t in out]", lambda ts, k: ["".join(reversed(t)) for t in ts]),
        Piece("write each in capitals", "[t.upper() for t in out]", lambda ts, k: [t.upper() for t in ts]),
        Piece(
            "cut each to its first {k} letters",
            "[t[:{k}] for t in out]",
            lambda ts, k: [t[:k] for t in ts],
            range(1, 5),
        ),
        Piece(
            "repeat each {k} times", "[t * {k} for t in out]", lambda ts, k: ["".join([t] * k) for t in ts], range(2, 5)
        ),
        Piece(
            "replace each by its length", "[len(t) for t in out]", lambda ts, k: [len(t) for t in ts], (0,), "numbers"
        ),
    ),
    "any": (
        Piece("remove repetitions, keeping the first of each", "list(dict.fromkeys(out))", _unique),
        Piece("reverse the order", "out[::-1]", lambda xs, k: list(reversed(xs))),
        Piece("sort in ascending order", "sorted(out)", lambda xs, k: sorted(xs)),
        Piece("drop the first {k}", "out[{k}:]", lambda xs, k: xs[k:], (1, 2)),
        Piece(
            "keep every second one, beginning with the first",
            "out[::2]",
            lambda xs, k: [x for i, x in enumerate(xs) if not i % 2],
        ),
    ),
}
RESULTS: Mapping[str, Sequence[Piece]] = {
    "numbers": (
        Piece("the sum", "sum(out)", lambda xs, k: sum(xs)),
        Piece("the greatest, or 0 if there is none", "max(out, default=0)", lambda xs, k: max([*xs]) if xs else 0),
        Piece("the least, or 0 if there is none", "min(out, default=0)", lambda xs, k: min([*xs]) if xs else 0),
        Piece(
            "how many are greater than {k}",
            "sum(x > {k} for x in out)",
            lambda xs, k: len([x for x in xs if k < x]),
            range(8),
        ),
        Piece(
            "the greatest minus the least, or 0 if there is none",
            "max(out) - min(out) if out else 0",
            lambda xs, k: sorted(xs)[-1] - sorted(xs)[0] if xs else 0,
        ),
        Piece("the sum modulo {k}", "sum(out) % {k}", lambda xs, k: sum(xs) % k, range(3, 20)),
    ),
    "texts": (
        Piece('all of them joined by "-"', '"-".join(out)', lambda ts, k: "-".join(ts)),
        Piece("the total number of letters", "sum(len(t) for t in out)", lambda ts, k: len("".join(ts))),
        Piece(
            'the first in alphabetical order, or "" if there is none',
            'min(out, default="")',
            lambda ts, k: min(ts or [""]),
        ),
        Piece(
            "how many have at least {k} letters",
            "sum(len(t) >= {k} for t in out)",
            lambda ts, k: len([t for t in ts if len(t) >= k]),
            range(2, 7),
        ),
    ),
    "any": (
        Piece("the list", "out", lambda xs, k: xs),
        Piece("how many different ones there are", "len(set(out))", lambda xs, k: len(_unique(xs, k))),
        Piece(
            "a list of pairs [x, number of times that x occurs], sorted",
            "sorted([x, out.count(x)] for x in set(out))",
            lambda xs, k: [[x, sum(x == y for y in xs)] for x in sorted(set(xs))],
        ),
    ),
}
