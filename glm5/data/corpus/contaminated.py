"""Documents that contain problems of evaluations: the runs of 13 words of `glm5.eval.contamination`, per document.

Words are compared without what a page adds to them or takes from them: tags, comments, marks of Markdown, entities,
compatibility forms of Unicode, invisible characters, hyphens, line breaks inside words. Comments are read after the
rest.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from glm5.data.dedup import ngram_hashes, plain_words
from glm5.data.documents import ReadReport
from glm5.data.readers import read_jsonl
from glm5.errors import DataError

RUN, SHORTEST = 13, 5
_MOST_PROBLEM = 1 << 20
_MOST_NESTED = 4  # links in links
_BREAKING = (
    "address|article|aside|blockquote|body|br|caption|cent(?:er|re)|d[dlt]|details|dialog|div|fieldset|figcaption|figure"
    "|footer|form|frame|h[1-6]|head|header|hgroup|hr|html|iframe|img|input|legend|li|main|menu|nav|ol|optgroup|option|p"
    "|pre|section|select|summary|t(?:able|body|d|extarea|foot|h|head|itle|r)|ul|!"
)
_TAG = re.compile(rf"</?({_BREAKING})(?![\w-])[^<>]{{0,500}}>", re.IGNORECASE)
_TAG_IN_WORDS = re.compile(r"</?[a-z][^<>]{0,500}>", re.IGNORECASE)
_LINK = re.compile(r"!?\[([^\[\]]{0,500})\](?:\([^()\s]{0,500}(?:\s\"[^\"]{0,200}\")?\)|\[[^\[\]]{0,100}\])")
_MARKS = re.compile(r"[*_`~\\]+")
_HYPHEN = re.compile(r"(?<=[^\W\d_])[-\u00ad\u2010\u2011]+(?:[ \t]{0,20}\r?\n[ \t>|#]{0,20})?(?=[^\W\d_])")
_INVISIBLE = re.compile(
    "[\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
"""Characters of format and those that fonts ignore (Cf and Default_Ignorable_Code_Point), without the soft hyphen."""


def compared_words(text: str) -> list[str]:
    """The words of a text that are compared with those of another: lower case, without punctuation, markup and hyphens,
    in one form of Unicode."""
    text = _comments_last(_INVISIBLE.sub("", html.unescape(text)))
    text = unicodedata.normalize("NFKC", _TAG_IN_WORDS.sub("", _TAG.sub(" ", text)))
    for _ in range(_MOST_NESTED):
        text = _LINK.sub(r"\1", text)
    return plain_words(_HYPHEN.sub("", _MARKS.sub("", text)).replace("\u00ad", ""))


def _comments_last(text: str) -> str:
    """The text without comments, then what they say."""
    shown, said, at = list[str](), list[str](), 0
    while (start := text.find("<!--", at)) >= 0 and (end := text.find("-->", start + 4)) >= 0:
        shown.append(text[at:start])
        said.append(text[start + 4 : end])
        at = end + 3
    return "\n".join(["".join([*shown, text[at:]]), *said])


class Problems:
    """Looks for problems (text by name) in documents. A problem of 5 to 12 words is looked for as a whole, a shorter
    one not at all."""

    def __init__(self, problems: Mapping[str, str]) -> None:
        self._lengths: dict[str, int] = {}
        runs: dict[int, list[tuple[int, str, int]]] = defaultdict(list)
        for name, text in problems.items():
            words = compared_words(text)
            size = min(RUN, len(words))
            if size >= SHORTEST:
                self._lengths[name] = len(words)
                runs[size] += [(value, name, at) for at, value in enumerate(ngram_hashes(words, size).tolist())]
        self._places: dict[int, dict[int, list[tuple[str, int]]]] = {}
        self._wanted: dict[int, np.ndarray] = {}
        for size, found in runs.items():
            places: dict[int, list[tuple[str, int]]] = defaultdict(list)
            for value, name, at in found:
                places[value].append((name, at))
            self._places[size] = places
            self._wanted[size] = np.array(sorted(places), dtype=np.uint64)

    def __len__(self) -> int:
        return len(self._lengths)

    def worst(self, text: str) -> tuple[str, float]:
        """The problem of which the text contains the largest share of words, and that share; ("", 0) if none."""
        words = compared_words(text)
        covered: dict[str, np.ndarray] = {}
        for size, wanted in self._wanted.items():
            for value in np.intersect1d(ngram_hashes(words, size), wanted).tolist():
                for name, at in self._places[size][value]:
                    mine = covered.setdefault(name, np.zeros(self._lengths[name], dtype=bool))
                    mine[at : at + size] = True
        shares = sorted(
            ((float(mine.mean()), name) for name, mine in covered.items()), key=lambda one: (-one[0], one[1])
        )
        return (shares[0][1], shares[0][0]) if shares else ("", 0.0)


def read_problems(files: Sequence[str]) -> Problems:
    """Problems of JSONL files, `FILE` (field `text`) or `FILE#FIELD`. Raises DataError for files without any."""
    found: dict[str, str] = {}
    for place in files:
        name, _, field = place.partition("#")
        report = ReadReport(max_bad=0)
        report.begin(name)
        for document in read_jsonl(Path(name), field or "text", report, _MOST_PROBLEM):
            found[f"{name}:{len(found)}"] = document.text
    problems = Problems(found)
    if not len(problems):
        raise DataError(f"The files {', '.join(files)} contain no problem of at least {SHORTEST} words.")
    return problems
