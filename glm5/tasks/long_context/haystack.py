"""What hides the needles: sentences of Python's language reference, which comes with Python, or one sentence repeated;
and how much of it makes a prompt of a certain length."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Sequence

from glm5.errors import ConfigError, DataError

NOISE = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
_PROSE = re.compile(r"[A-Z“\"][^*|=\n]{38,398}\.")


@functools.cache
def sentences() -> tuple[str, ...]:
    """Distinct sentences of prose, in the order of the reference. They differ between versions of Python. Raises
    DataError for a Python without its documentation."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "This Python comes without pydoc_data, whose text hides the needles; install it whole."
        ) from error
    found: dict[str, None] = {}
    for topic in sorted(topics):
        for paragraph in re.split(r"\n[ \t]*\n", topics[topic]):
            if not paragraph.startswith((" ", "\t")):  # indented: a listing
                text = " ".join(paragraph.split())
                found |= dict.fromkeys(filter(_PROSE.fullmatch, re.split(r"(?<=[.?!])\s+(?=[A-Z“\"])", text)))
    return tuple(found)


def filler(rng: random.Random, noise: bool) -> Callable[[int], list[str]]:
    """A function that gives `n` sentences; more of them begin with the same ones."""
    source = NOISE if noise else sentences()
    start = 0 if noise else rng.randrange(len(source))
    return lambda n: [source[(start + i) % len(source)] for i in range(n)]


def insert(sentences: Sequence[str], needles: Sequence[str], depths: Sequence[float]) -> list[str]:
    """`needles[i]` after the share `depths[i]` of the sentences, rounded down as in RULER; depths rise."""
    found, begin = [], 0
    for needle, depth in zip(needles, depths, strict=True):
        end = int(depth * len(sentences))
        found += [*sentences[begin:end], needle]
        begin = end
    return [*found, *sentences[begin:]]


def fitting_size(tokens: Callable[[int], int], length: int, what: str) -> int:
    """The largest size whose prompt has at most `length` tokens; `tokens(size)` grows with the size, nearly in
    proportion. Raises ConfigError if not even size 0 fits."""
    low, fewest = 0, tokens(0)
    if fewest > length:
        raise ConfigError(f"{what} takes at least {fewest:,} tokens; a length of {length:,} is too short for it.")
    high, most = 16, tokens(16)
    while most <= length:
        low, fewest, high = high, most, max(high + high // 8, round(high * 1.02 * length / most))
        most = tokens(high)
    halve = False
    while high - low > 1:
        # On the straight line between the ends; every other time in the middle, in case it is not straight.
        share = 0.5 if halve else (length - fewest) / (most - fewest)
        size = min(high - 1, max(low + 1, low + round(share * (high - low))))
        now = tokens(size)
        if now <= length:
            low, fewest = size, now
        else:
            high, most = size, now
        halve = not halve
    return low
