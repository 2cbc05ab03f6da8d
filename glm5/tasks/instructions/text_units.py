"""Words, sentences, paragraphs and list items of a text in any script, as a reader would count them (§3.4).

A text is normalised with NFKC: a fullwidth or mathematical letter becomes the plain letter. Deceptive texts are
unreadable: words that mix scripts, invisible characters, letters that imitate others. A unit counts only if it has
words with letters, one of them in no earlier unit.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Sequence

LONGEST_WORD = 30  # letters; anything longer is several words without spaces
FILLERS = frozenset("\u115f\u1160\u2800\u3164\uffa0")  # invisible letters and symbols
UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN")  # a character is a word
LATIN_ALONE = frozenset("æøœßðþđłıħŋŧ")  # Latin letters that are not ASCII letters with marks; all others imitate
LOOKS_LIKE = str.maketrans(
    "аеорсухіјѕкмтвнԁԛԝһӏ" + "αβεζηικμνορτυχωγϳ" + "øđłıħŧ", "aeopcyxijskmtbhdqwhl" + "abeznikuvoptuxwyj" + "odliht"
)
SPELLED = re.compile(r"[\U0001f1e6-\U0001f1ff]{3}")  # three or more flag letters; a flag has two
ABBREVIATIONS = frozenset(("mr", "mrs", "ms", "dr", "prof", "st", "mt", "no", "vs", "e.g", "i.e"))
CLOSING = """["'”’»)\\]」』]*"""
# A mark before a space; in scripts without spaces also before the next character. A run of marks is tried once.
SENTENCE_END = re.compile(
    rf"(?<![.!?؟])[.!?؟]+{CLOSING}(?=\s|$)|(?<![!?])[!?]+{CLOSING}(?=[\u3000-\u30ff\u3400-\u9fff])|[。।॥]+{CLOSING}"
)
# What may stand within a sentence: "p.m.", "U.S.", "etc.", or a quotation that ends in a mark.
_WITHIN = re.compile(rf"(?:\b(?:[a-z]\.[a-z]|etc|approx|inc|ltd|jr|sr|ca)\.|[.!?](?!$){CLOSING})$", re.IGNORECASE)
_BEFORE = 16  # characters that show whether an abbreviation is the last word before a dot
JOINT = re.compile(r"(?<=\d)[.,:/](?=\d)|(?<=[^\W_])[-\u2010](?=[^\W_])")  # inside 3.14, 10:30 and well-known
BLANK_LINES = re.compile(r"\n[ \t]*\n")


@functools.lru_cache(maxsize=256)
def read(text: str) -> str | None:
    """The text in NFKC form; None for one with invisible or deceptive characters or too long words."""
    shown = unicodedata.normalize("NFKC", text.replace("\r\n", "\n"))
    if len(shown) > 2 * len(text) + 100:  # some characters become whole phrases
        return None
    kept: list[str] = []
    for character in shown:
        category = unicodedata.category(character)
        joins = character in "\u200d\ufe0f" and kept and unicodedata.category(kept[-1]) in ("So", "Sk")  # of emoji
        if joins:
            continue
        if category in ("Cf", "Cs", "Co", "Cn", "Zl", "Zp") or (category == "Cc" and character not in "\n\t"):
            return None
        if character in FILLERS or (category[0] == "L" and _imitates(character)):
            return None
        if category == "So" and "LATIN CAPITAL" in unicodedata.name(character, ""):  # white letters on black
            return None
        kept.append(character)
    seen = "".join(kept)
    genuine = all(len(word) <= LONGEST_WORD and len(set(map(_script, word)) - {""}) <= 1 for word in words_of(seen))
    return seen if genuine and not SPELLED.search(seen) else None


def _script(character: str) -> str:
    """The script of a letter, such as `LATIN`; empty for marks, digits and apostrophes."""
    return unicodedata.name(character, "").split(" ")[0] if unicodedata.category(character)[0] == "L" else ""


def _imitates(character: str) -> bool:
    base = unicodedata.normalize("NFKD", character)[0].lower()
    return _script(character) == "LATIN" and not base.isascii() and base not in LATIN_ALONE


def words_of(text: str) -> list[str]:
    """The lower-case words of a text in order: runs of letters, marks and digits, with apostrophes inside. In scripts
    without spaces every character is a word."""
    words, current = [], ""
    for character in [*text.lower(), " "]:
        unspaced = _script(character) in UNSPACED
        inside = unicodedata.category(character)[0] in "LMN" or (current and character in "'’")
        if current and (unspaced or not inside):
            words.append(current.rstrip("'’"))
            current = ""
        if unspaced:
            words.append(character)
        elif inside:
            current += character.replace("’", "'")
    return words


def count_words(text: str) -> int:
    """How many words a reader counts: a number is one, and so are words that hyphens join, unless the chain is longer
    than a word can be. `words_of` separates them, so that a hyphen hides no word."""
    joined = words_of(JOINT.sub("", text))
    return len(joined if all(len(word) <= LONGEST_WORD for word in joined) else words_of(text))


def skeleton(word: str) -> str:
    """The plain letters of a word: without marks, and with Latin letters for Cyrillic or Greek look-alikes."""
    letters = (c for c in unicodedata.normalize("NFKD", word.lower()) if not unicodedata.category(c).startswith("M"))
    return "".join(letters).translate(LOOKS_LIKE)


def has_letters(text: str) -> bool:
    return any(map(str.isalpha, text))


def say_something(units: Sequence[str], least: int) -> bool:
    """Whether every unit has at least `least` words with letters, and one of them is new."""
    known: set[str] = set()
    for unit in units:
        words = [skeleton(word) for word in words_of(unit) if has_letters(word)]
        if len(words) < least or known.issuperset(words):
            return False
        known.update(words)
    return True


def bullets_of(text: str) -> list[str]:
    """Items of a list of lines that begin with `- `; empty for a text with any other line or an empty item
    (`say_something`)."""
    lines = [line for line in text.strip().split("\n") if line.strip()]
    items = [line[2:] for line in lines if line.startswith("- ")]
    return items if len(items) == len(lines) and say_something(items, 1) else []


def paragraphs_of(text: str) -> list[str]:
    """Pieces separated by empty lines; empty if one of them says nothing (`say_something`)."""
    pieces = [piece for piece in BLANK_LINES.split(text.strip()) if piece.strip()]
    return pieces if say_something(pieces, 2) else []


def sentences_of(text: str) -> list[str]:
    """Pieces that end in `.`, `!`, `?` or their equivalents in other scripts; empty if words follow the last piece or a
    piece says nothing. A number with its dot belongs to the next piece."""
    pieces, start, seen, letters = [], 0, 0, False
    for match in SENTENCE_END.finditer(text):
        letters = letters or has_letters(text[seen : match.end()])  # each character once: a text may be all marks
        seen = match.end()
        if letters and not _goes_on(text, max(start, match.start() - _BEFORE), match):
            pieces.append(text[start:seen])
            start, letters = seen, False
    rest = text[start:]
    return pieces if not words_of(rest) and not SENTENCE_END.search(rest) and say_something(pieces, 2) else []


def _goes_on(text: str, start: int, match: re.Match[str]) -> bool:
    """Whether the sentence goes on after a mark: after an abbreviation such as "Dr.", or before a lower-case word after
    what may stand within a sentence."""
    before = text[start : match.start()].lower().split()
    if match.group() == "." and before and before[-1].lstrip("(\"'") in ABBREVIATIONS:
        return True
    after = text[match.end() : match.end() + 2].lstrip()[:1]
    return after.islower() and _WITHIN.search(text, start, match.end()) is not None
