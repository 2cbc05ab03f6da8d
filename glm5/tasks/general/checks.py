"""Checks of answers that a program decides exactly (§3.4): what a text says, avoids, contains, and its form.

A check is data, a kind and its values, so a problem can be printed, stored and compared. Words are compared without
case; forbidden words also in look-alike letters. A text with invisible characters, or with words that mix scripts,
passes no check (`glm5.tasks.instructions.text_units.read`). Fullwidth and mathematical letters count as the plain ones
in prose, but not in a text that is compared as a whole (`AS_WRITTEN`).
"""

from __future__ import annotations

import functools
import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from glm5.tasks.general import meaning
from glm5.tasks.instructions.rules import KINDS, json_of
from glm5.tasks.instructions.text_units import count_words, read, sentences_of, skeleton, words_of

NUMBER = re.compile(r"\d+(?:[.,:/-]\d+)*")
EDGES = " \t\n.!\"'`*"
"""Characters around a short answer that do not change it."""
AS_WRITTEN = ("exact", "lines", "rows", "json_value")
"""Checks of the text as it is written, not in NFKC form: a program that reads JSON or a date reads no look-alikes."""


@dataclass(frozen=True)
class Check:
    """One check: its kind (a key of `CHECKS`, or of the instruction rules' `KINDS`) and its values."""

    kind: str
    values: tuple[str | int, ...] = ()

    def holds(self, text: str) -> bool:
        """Whether the text passes; False for a text that cannot be read."""
        seen = read(text)
        if seen is None:
            return False
        if self.kind in AS_WRITTEN:
            seen = unicodedata.normalize("NFC", text.replace("\r\n", "\n"))
        if self.kind in CHECKS:
            return CHECKS[self.kind](seen, *self.values)
        return KINDS[self.kind].check(seen, *self.values)


def plain(text: str) -> str:
    """A short answer for comparison: lower case, single spaces, no full stop or quotes around it."""
    return " ".join(text.lower().split()).strip(EDGES)


def contains(text: str, phrase: str) -> bool:
    """Whether the words of `phrase` stand in the text one after the other."""
    return _spaced(phrase) in _spaced(text)


def looks_like(text: str, phrase: str) -> bool:
    """The same for a forbidden phrase: added marks and look-alike letters do not hide it."""
    return _spaced(phrase, True) in _spaced(text, True)


@functools.lru_cache(maxsize=1024)
def _spaced(text: str, bare: bool = False) -> str:
    """The words of a text with a space around each; `bare` writes look-alikes in plain letters."""
    words = words_of(text)
    return f" {' '.join(map(skeleton, words) if bare else words)} "


def lines_of(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n") if line.strip()]


def _lines(text: str, *wanted: str) -> bool:
    return [plain(line) for line in lines_of(text)] == [plain(line) for line in wanted]


def _rows(text: str, *wanted: str) -> bool:
    """The lines exactly, capitals too, bare or in a fenced block: data, not prose."""
    fenced = re.fullmatch(r"\s*```\w*\n(.*)\n```\s*", text, re.DOTALL)
    return lines_of(fenced.group(1) if fenced else text) == list(wanted)


def _initials(text: str, word: str) -> bool:
    """An acrostic: one line per letter, each of two words or more, no line twice."""
    lines = lines_of(text)
    starts = [words_of(line)[0][:1] for line in lines if len(words_of(line)) > 1]
    return starts == list(word.lower()) and len(set(map(plain, lines))) == len(lines)


def _no_new_numbers(text: str, *known: str) -> bool:
    return set(NUMBER.findall(text)) <= set(known)


def _json(text: str, wanted: str) -> bool:
    found = json_of(text)
    return found is not None and json.dumps(found) == wanted


def _sides(text: str, count: int) -> bool:
    """`count` lines "Pro: ..." and as many "Con: ...", each saying something of its own, and nothing else."""
    lines = lines_of(text)
    bodies = {side: [line[4:] for line in lines if line.startswith(f"{side}:")] for side in ("Pro", "Con")}
    said = [" ".join(words_of(body)) for part in bodies.values() for body in part]
    whole = all(len(part) == count for part in bodies.values()) and len(lines) == 2 * count
    return whole and len(set(said)) == 2 * count and all(len(body.split()) > 1 for body in said)


CHECKS: Mapping[str, Callable[..., bool]] = {
    "exact": lambda text, *options: plain(text) in map(plain, options),
    "lines": _lines,
    "rows": _rows,
    "says": lambda text, *phrases: all(contains(text, phrase) for phrase in phrases),
    "says_one": lambda text, *phrases: any(contains(text, phrase) for phrase in phrases),
    "means_one": meaning.means_one,
    "affirms": meaning.affirms,
    "not_told": meaning.not_told,
    "told": lambda text: not meaning.not_told(text),
    "tells_nothing_of": meaning.tells_nothing_of,
    "refuses": meaning.refuses,
    "no_advice": lambda text: not meaning.advises(text),
    "no_date": lambda text: not meaning.promises_a_date(text),
    "avoids": lambda text, *phrases: not any(looks_like(text, phrase) for phrase in phrases),
    "words": lambda text, least, most: least <= count_words(text) <= most,
    "questions": lambda text, count: text.count("?") == count and (not count or text.rstrip().endswith("?")),
    "calm": lambda text: "!" not in text and not any(w.isupper() and len(w) > 3 for w in text.split()),
    "known_numbers": _no_new_numbers,
    "whole_sentences": lambda text, least, most: least <= len(sentences_of(text)) <= most,
    "initials": _initials,
    "json_value": _json,
    "sides": _sides,
}
"""`check(text, *values)` by kind."""


def broken(checks: Sequence[Check], text: str) -> list[str]:
    """The kinds of the checks that a text does not pass."""
    return [check.kind for check in checks if not check.holds(text)]
