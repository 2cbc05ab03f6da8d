"""What answers count as right: exactly the name or an alias, in the text itself or on its line for the answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from glm5.tasks.search.records import words

MOST_ANSWER = 400
"""Characters of an answer that are read."""
_EXACT = re.compile(
    r"^[ \t*#>-]*(?:exact answer|final answer|answer)[ \t*]*:[ \t*]*(.+)$", re.IGNORECASE | re.MULTILINE
)
_CONFIDENCE = re.compile(
    r"^[ \t*#>-]*confidence[ \t*]*:[ \t*]*(\d{1,3}(?:\.\d+)?)[ \t]*%", re.IGNORECASE | re.MULTILINE
)
_CITED = re.compile(r"\[([^\[\]\s]+/[^\[\]\s]+)\]|<([^<>\s]+/[^<>\s]+)>")


@dataclass(frozen=True)
class Reply:
    """The parts of a final answer: the answer itself, the confidence from 0 to 1 if it is given, cited addresses."""

    answer: str
    confidence: float | None = None
    cited: tuple[str, ...] = ()


def read_reply(text: str) -> Reply:
    """Read a final answer: BrowseComp's form ("Exact Answer: ...", "Confidence: 90%", sources in brackets), or the
    answer alone. Of several lines for the answer none counts, for one could name everything."""
    exact = _EXACT.findall(text)
    answer = exact[0] if len(exact) == 1 else text if not exact else ""
    confidence = _CONFIDENCE.findall(text)
    cited = tuple(dict.fromkeys(a or b for a, b in _CITED.findall(text)))
    answer = _CITED.sub(" ", answer).strip()
    return Reply(answer[:MOST_ANSWER], min(float(confidence[-1]), 100.0) / 100 if confidence else None, cited)


def right(answer: str, names: Sequence[str]) -> bool:
    """Whether an answer is one of the names: the same words, or if names have no words the same characters."""
    return any(_same(answer, name) for name in names)


def bare(answer: str) -> str:
    """An answer without spaces, quotes and marks around it."""
    return answer.strip().strip("\"'`*.").strip()


def _same(answer: str, name: str) -> bool:
    found, wanted = bare(answer), name.strip()
    if _marks(found) == _marks(wanted):
        return True
    return bool(words(wanted)) and words(found) == words(wanted) and _signs(found) == _signs(wanted)


def _marks(text: str) -> str:
    return " ".join(text.casefold().split())


def _signs(text: str) -> str:
    """The signs that tell names like C, C++ and C# apart."""
    return "".join(c for c in text if c in "+#*!@$%&")
