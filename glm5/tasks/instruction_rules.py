"""Rules about the form of a text that a program can check exactly: length, words, case, format, ends (§3.4).

Words are runs of letters, digits and apostrophes; comparisons of words ignore case. Each rule knows how it is said, how
it is checked, and with which others it cannot stand.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

WORD = re.compile(r"[A-Za-z0-9']+")
TOPICS = (
    "rivers winter bread music trains gardens chess rain coffee maps birds markets bridges letters clocks kites "
    "islands bicycles forests museums candles tea snow lamps harbours stars stones windows shoes horses"
).split()
COMMON = ("the", "and", "is", "of", "to", "very", "good", "many", "they", "people")
SPECIAL = (
    "warm early bright simple north silver careful honest gentle modern distant famous narrow golden patient curious "
    "local steady wooden hidden clever broad humble lively"
).split()
OPENERS = ("Today", "Often", "Once", "Perhaps", "Maybe", "Surely")
CLOSERS = ("indeed", "always", "together", "again", "forever", "tomorrow")
KEYS = ("title", "story", "summary", "author", "mood", "place")


def words_of(text: str) -> list[str]:
    """The words of a text in small letters, in order."""
    return [word.lower() for word in WORD.findall(text)]


def bullets_of(text: str) -> list[str]:
    """What stands on the lines of a list that begin with `- `; empty where any other line stands between."""
    lines = [line for line in text.strip().split("\n") if line.strip()]
    if not all(line.startswith("- ") and line[2:].strip() for line in lines):
        return []
    return [line[2:] for line in lines]


def paragraphs_of(text: str) -> list[str]:
    """Pieces that empty lines separate."""
    return [piece for piece in re.split(r"\n[ \t]*\n", text.strip()) if piece.strip()]


def sentences_of(text: str) -> int:
    """How many runs of `.`, `!` or `?` end something, which must end the text too; 0 otherwise."""
    stripped = text.strip()
    return len(re.findall(r"[.!?]+(?=\s|$)", stripped)) if stripped[-1:] in (".", "!", "?") else 0


def json_of(text: str) -> object:
    """The JSON value of a text, bare or in one fenced block; None for anything else."""
    fenced = re.fullmatch(r"\s*```(?:json)?\n(.*)\n```\s*", text, re.DOTALL)
    try:
        value: object = json.loads(fenced.group(1) if fenced else text)
    except (ValueError, RecursionError):
        return None
    return value


@dataclass(frozen=True)
class Rule:
    """One rule: its kind, a key of `KINDS`, and its values."""

    kind: str
    values: tuple[str | int, ...]

    @property
    def words(self) -> str:
        return KINDS[self.kind].words.format(*self.values)

    def holds(self, text: str) -> bool:
        return KINDS[self.kind].check(text, *self.values)


@dataclass(frozen=True)
class Kind:
    """`words` say a rule, `check(text, *values)` decides it, `draw(rng)` gives its values. Kinds of one `group` exclude
    each other, and `never` names further groups that cannot be kept beside it."""

    group: str
    words: str
    check: Callable[..., bool]
    draw: Callable[[random.Random], tuple[str | int, ...]]
    never: tuple[str, ...] = ()


def _json_check(text: str, *keys: str) -> bool:
    value = json_of(text)
    texts = isinstance(value, dict) and all(isinstance(item, str) and item.strip() for item in value.values())
    return texts and isinstance(value, dict) and sorted(value) == sorted(keys)


def _no_capitals(text: str) -> bool:
    return text == text.lower() and any(letter.isalpha() for letter in text)


def _all_capitals(text: str) -> bool:
    return text == text.upper() and any(letter.isalpha() for letter in text)


def _between(rng: random.Random) -> tuple[str | int, ...]:
    least = rng.randint(10, 30)
    return least, least + rng.randint(0, 8)


KINDS: Mapping[str, Kind] = {
    "between": Kind(
        "length",
        "Use at least {0} and at most {1} words.",
        lambda text, least, most: least <= len(words_of(text)) <= most,
        _between,
        ("json",),
    ),
    "require": Kind(
        "require",
        'Use the words "{0}" and "{1}".',
        lambda text, first, second: {first, second} <= set(words_of(text)),
        lambda rng: tuple(rng.sample(SPECIAL[:16], 2)),
    ),
    "forbid": Kind(
        "forbid",
        'Do not use the words "{0}" and "{1}".',
        lambda text, first, second: not {first, second} & set(words_of(text)),
        lambda rng: tuple(rng.sample(COMMON, 2)),
    ),
    "repeat": Kind(
        "repeat",
        'Use the word "{0}" exactly {1} times.',
        lambda text, word, times: words_of(text).count(word) == times,
        lambda rng: (rng.choice(SPECIAL[16:]), rng.randint(2, 4)),
    ),
    "letter": Kind(
        "letter",
        'Do not use the letter "{0}".',
        lambda text, letter: letter not in text.lower(),
        lambda rng: (rng.choice("jqxz"),),
    ),
    "lower": Kind("case", "Use no capital letters.", _no_capitals, lambda rng: (), ("json",)),
    "upper": Kind("case", "Use capital letters only.", _all_capitals, lambda rng: (), ("json",)),
    "commas": Kind(
        "commas", "Use no commas.", lambda text: "," not in text and "，" not in text, lambda rng: (), ("json",)
    ),
    "begin": Kind(
        "begin",
        'Begin with the word "{0}".',
        lambda text, word: words_of(text)[:1] == [word.lower()],
        lambda rng: (rng.choice(OPENERS),),
        ("json",),
    ),
    "end": Kind(
        "end",
        'End with the word "{0}".',
        lambda text, word: words_of(text)[-1:] == [word],
        lambda rng: (rng.choice(CLOSERS),),
        ("json",),
    ),
    "bullets": Kind(
        "format",
        'Answer as a list of exactly {0} lines, each beginning with "- ".',
        lambda text, count: len(bullets_of(text)) == count,
        lambda rng: (rng.randint(2, 6),),
    ),
    "paragraphs": Kind(
        "format",
        "Write exactly {0} paragraphs with an empty line between them.",
        lambda text, count: len(paragraphs_of(text)) == count,
        lambda rng: (rng.randint(2, 4),),
    ),
    "sentences": Kind(
        "format",
        "Write exactly {0} sentences.",
        lambda text, count: sentences_of(text) == count,
        lambda rng: (rng.randint(2, 5),),
    ),
    "json": Kind(
        "json",
        'Answer as a JSON object with the keys "{0}" and "{1}" and texts as values, and nothing else.',
        _json_check,
        lambda rng: tuple(rng.sample(KEYS, 2)),
        ("format",),
    ),
}


def compatible(kind: str, others: Sequence[str]) -> bool:
    """Whether a rule of `kind` can stand beside rules of the other kinds."""
    own = KINDS[kind]
    return all(
        own.group != KINDS[other].group and own.group not in KINDS[other].never and KINDS[other].group not in own.never
        for other in others
    )
