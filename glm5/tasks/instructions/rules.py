"""Rules about the form of a text that a program can check exactly: length, words, case, format, ends (§3.4).

`glm5.tasks.instructions.text_units` defines words, sentences, paragraphs and items. Comparisons of words ignore case.
Forbidden words also match with added marks and in look-alike letters. Each kind of rule has a wording, a check, and a
list of rules that it excludes.
"""

from __future__ import annotations

import json
import random
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from glm5.tasks.instructions.text_units import (
    bullets_of,
    count_words,
    paragraphs_of,
    read,
    say_something,
    sentences_of,
    skeleton,
    words_of,
)

COMMA_ALIKE = "‚¸ˏ"  # look-alikes of the comma that NFKC and character names do not reveal
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


def json_of(text: str) -> object:
    """The JSON value of a text, bare or in one fenced block; None for anything else, and for a duplicate key."""
    fenced = re.fullmatch(r"\s*```(?:json)?\n(.*)\n```\s*", text, re.DOTALL)
    try:
        value: object = json.loads(fenced.group(1) if fenced else text, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        return None
    return value


def _once(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key stands twice")
    return dict(pairs)


def prose_of(text: str) -> str:
    """The values of a JSON object of texts, one per line; empty for any other text."""
    value = json_of(text)
    texts = [item for item in value.values() if isinstance(item, str)] if isinstance(value, dict) else []
    return "\n".join(texts) if isinstance(value, dict) and len(texts) == len(value) else ""


@dataclass(frozen=True)
class Rule:
    """One rule: its kind (a key of `KINDS`) and its values."""

    kind: str
    values: tuple[str | int, ...]

    @property
    def words(self) -> str:
        return KINDS[self.kind].words.format(*self.values)

    @property
    def content(self) -> str:
        """The content of the rule, equal for equivalent rules: several words (or keys) are compared in any order."""
        several = all(isinstance(value, str) for value in self.values)
        return KINDS[self.kind].words.format(*(sorted(map(str, self.values)) if several else self.values))

    def holds(self, text: str) -> bool:
        """Whether the text keeps the rule; False for one that cannot be read (`text_units.read`)."""
        seen = read(text)
        return seen is not None and KINDS[self.kind].check(text if self.kind == "json" else seen, *self.values)


@dataclass(frozen=True)
class Kind:
    """`words` is the wording, `check(text, *values)` the check, and `draw(rng)` gives values. Kinds of one `group`
    exclude each other; `never` names further groups that are incompatible with this kind."""

    group: str
    words: str
    check: Callable[..., bool]
    draw: Callable[[random.Random], tuple[str | int, ...]]
    never: tuple[str, ...] = ()


def _json_check(text: str, *keys: str) -> bool:
    value = json_of(text)
    if not isinstance(value, dict) or sorted(value) != sorted(keys):
        return False
    texts = [read(item) for item in value.values() if isinstance(item, str)]
    whole = [item for item in texts if item is not None]
    return len(whole) == len(keys) and say_something(whole, 1)


def _shows(text: str, word: str) -> bool:
    """Whether a word of the text looks like `word`."""
    return word in map(skeleton, words_of(text))


def _repeats(text: str, word: str, times: int) -> bool:
    words = words_of(text)
    return words.count(word) == times == [skeleton(other) for other in words].count(word)


def _no_capitals(text: str) -> bool:
    return any(map(str.isalpha, text)) and not any(letter.isupper() or letter.istitle() for letter in text)


def _all_capitals(text: str) -> bool:
    return any(map(str.isalpha, text)) and all(letter.isupper() for letter in text if letter.isalpha())


def _no_commas(text: str) -> bool:
    return not any("COMMA" in unicodedata.name(letter, "") or letter in COMMA_ALIKE for letter in text)


def _between(rng: random.Random) -> tuple[str | int, ...]:
    least = rng.randint(10, 30)
    return least, least + rng.randint(0, 8)


KINDS: Mapping[str, Kind] = {
    "between": Kind(
        "length",
        "Use at least {0} and at most {1} words.",
        lambda text, least, most: least <= count_words(text) <= most,
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
        lambda text, first, second: not _shows(text, first) and not _shows(text, second),
        lambda rng: tuple(rng.sample(COMMON, 2)),
    ),
    "repeat": Kind(
        "repeat",
        'Use the word "{0}" exactly {1} times.',
        _repeats,
        lambda rng: (rng.choice(SPECIAL[16:]), rng.randint(2, 4)),
    ),
    "letter": Kind(
        "letter",
        'Do not use the letter "{0}".',
        lambda text, letter: letter not in skeleton(text),
        lambda rng: (rng.choice("jqxz"),),
    ),
    "lower": Kind("case", "Use no capital letters.", _no_capitals, lambda rng: (), ("json",)),
    "upper": Kind("case", "Use capital letters only.", _all_capitals, lambda rng: (), ("json",)),
    "commas": Kind("commas", "Use no commas.", _no_commas, lambda rng: (), ("json",)),
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
        lambda text, count: len(sentences_of(text)) == count,
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
    """Whether a rule of `kind` is compatible with rules of the other kinds."""
    own = KINDS[kind]
    return all(
        own.group != KINDS[other].group and own.group not in KINDS[other].never and KINDS[other].group not in own.never
        for other in others
    )
