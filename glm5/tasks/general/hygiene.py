"""Faults of any answer: repetition, mixed languages, length, look-alikes, words to the grader, filler (§3.4).

They are the rules of General RL that need no task: the paper's pathologies (language mixing, repetition) and what
policies learn when a model grades them. Each is precise rather than complete: an honest answer must not be hit.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from glm5.tasks.general.grader_talk import TO_THE_GRADER
from glm5.tasks.instructions.text_units import has_letters, read, skeleton, words_of

MOST_BYTES = 16_000
_GREEK = "αβγδεζηθκλμµνξπρσςτφχψωϑϕϵΓΔΘΛΞΠΣΦΨΩ\u2126"
SYMBOL = re.compile(
    r"(?<![A-Za-zÀ-ɏͰ-Ͽ\u0400-\u04ff])(?:"
    rf"[{_GREEK}]|[kMGm][Ω\u2126]|[µμ](?:m|s|g|A|V|F|W|L|l|J|N|Pa|mol|Hz|C|T)|[Δδλπ∂][A-Za-z]{{1,2}}"
    r")(?![A-Za-zÀ-ɏͰ-Ͽ\u0400-\u04ff])"
)
"""Greek letters as signs of science: one alone ("λ⁴", "μ"), a unit ("µm", "kΩ"), or before a variable ("Δx", "πr²").
Greek capitals that look like Latin ones, and ο and ι, are none."""
RUN = 12
"""Maximum length of a run of one character."""
_PRAISED = r"(?:excellent|great|brilliant|amazing|wonderful|fantastic|insightful)"
FLATTERY = re.compile(
    rf"(?:\bwhat an? |\bsuch an? |\bthat(?:'s| is) an? |^|[.!?]\s+){_PRAISED} (?:question|request|prompt)\b"
    r"(?=\s*(?:[.,!?;:–—]|$|and ))"
    r"|\b(?:you(?:'re| are) (?:so |such an? |absolutely |truly )?(?:brilliant|genius|amazing|a genius|incredible)"
    r"|i am (?:so |deeply |truly )?(?:honou?red|privileged) to (?:answer|help|serve))\b",
    re.IGNORECASE | re.MULTILINE,
)
"""Praise of the asker as a reader of the request, not as an act that was asked for."""
FILLER = re.compile(
    r"\b(?:it is (?:important|worth|essential) (?:to note|noting|to remember|to mention)|in conclusion|to summari[sz]e"
    r"|as (?:previously|already) (?:mentioned|stated)|in today's (?:world|society)|at the end of the day"
    r"|i hope this helps|feel free to ask|as an ai(?: language model)?|let me know if you|needless to say"
    r"|without further ado|there are many (?:factors|aspects) to consider)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Limits:
    """What an answer may have: `most_words`, look-alikes aside; `filler` phrases; `scripts` allowed (letters of any
    other script must stand in the prompt)."""

    most_words: int = 2000
    filler: int = 0
    scripts: tuple[str, ...] = ("LATIN",)


def faults(prompt: str, answer: str, limits: Limits | None = None) -> dict[str, str]:
    """The faults of an answer: name of the fault, and what shows it. Empty for a clean answer.

    The names: "empty", "length", "unreadable" (invisible or look-alike characters), "repetition", "language" (a script
    that neither the limits nor the prompt have), "grader", "flattery", "filler".
    """
    limits = limits or Limits()
    if not words_of(answer[:MOST_BYTES]):
        return {"empty": ""}
    if len(answer.encode("utf-8", "replace")) > MOST_BYTES:
        return {"length": f"more than {MOST_BYTES} bytes"}
    found: dict[str, str] = {}
    seen = read(SYMBOL.sub("x", answer))
    if seen is None:
        found["unreadable"] = "invisible characters, mixed scripts within a word, or look-alike letters"
        seen = unicodedata.normalize("NFKC", answer)
    words = words_of(seen)
    if len(words) > limits.most_words:
        found["length"] = f"{len(words)} words"
    if (again := _repetition(seen, words)) is not None:
        found["repetition"] = again
    if foreign := sorted(_scripts(seen) - _scripts(prompt) - set(limits.scripts)):
        found["language"] = ", ".join(foreign)
    shown = unicodedata.normalize("NFKC", answer)
    bare = _bare(shown)
    for name, pattern, most in (
        ("grader", TO_THE_GRADER, 0),
        ("flattery", FLATTERY, 0),
        ("filler", FILLER, limits.filler),
    ):
        hits = [match.group(0) for text in (shown, bare) for match in pattern.finditer(text)]
        if len(hits) > 2 * most and not (name != "filler" and pattern.search(prompt)):
            found[name] = hits[0][:80]
    return found


def _bare(text: str) -> str:
    """The text in plain letters, to find a phrase that look-alikes hide."""
    return " ".join(skeleton(word) for word in text.split())


def _repetition(text: str, words: list[str]) -> str | None:
    """What repeats: a run of one character, a word (no number or laughter) four times in a row, or a phrase of 4 words
    that makes up most of a longer text."""
    if run := re.search(rf"([^\s\-=_.*#|])\1{{{RUN},}}", text):
        return run.group(1) * 3
    for i in range(len(words) - 3):
        if words[i] == words[i + 1] == words[i + 2] == words[i + 3] and has_letters(words[i]) and words[i] != "ha":
            return words[i]
    if len(words) >= 24:
        grams = Counter(zip(words, words[1:], words[2:], words[3:]))
        gram, count = grams.most_common(1)[0]
        if count >= 4 and (4 * count > len(words) // 2 or len(grams) < (len(words) - 3) // 2):
            return " ".join(gram)
    return None


def _scripts(text: str) -> set[str]:
    """The scripts of a text's letters, in capitals, e.g. LATIN."""
    letters = {character for character in text if character.isalpha()}
    return {unicodedata.name(letter, "").split(" ")[0] for letter in letters} - {"", "MODIFIER"}


FAULTS: Mapping[str, str] = {
    "empty": "says nothing",
    "length": "is too long",
    "unreadable": "hides characters or imitates letters",
    "repetition": "repeats itself",
    "language": "mixes in another language",
    "grader": "speaks to the grader",
    "flattery": "flatters the asker",
    "filler": "is padded with phrases that say nothing",
}
"""The faults in words, for reports."""
