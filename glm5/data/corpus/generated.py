"""Text that no person wrote (§2.2 leaves it out of mathematics and science): phrases of language models, texts that
compress too well, and pages that differ from those of their site in names and numbers only."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import numpy as np

_SURE = re.compile(
    r"\bas an? (?:AI|artificial intelligence|large)(?: language)? (?:model|assistant)\b"
    r"|\b(?:I'm sorry|I apologi[sz]e|unfortunately),? but (?:as an AI|I (?:cannot|can't|am unable to) (?:fulfil|assist|"
    r"generate|provide))"
    r"|\b(?:my|the) (?:knowledge cut-?off|last (?:knowledge )?update)\b|^[^\S\n]*regenerate response[^\S\n]*$"
    r"|\bI don't have (?:personal (?:feelings|opinions|experiences)|access to real-time)",
    re.IGNORECASE | re.MULTILINE,
)
_OPENING = re.compile(r"\A\W*(?:certainly|sure|of course|absolutely|great question)[!,.] ", re.IGNORECASE)
_CLOSING = re.compile(
    r"(?:I hope this helps|let me know if you (?:need|have|would like)|feel free to (?:ask|reach out)).{0,120}\Z",
    re.IGNORECASE | re.DOTALL,
)
_WEAK = re.compile(
    r"\b(?:delv(?:e|ing) into|it(?:'s| is) (?:important|worth) (?:to note|noting) that|in the realm of|ever-evolving|"
    r"rich tapestry|plays? a (?:crucial|pivotal|vital) role|in today's (?:fast-paced|digital) world|unlock(?:ing)? the "
    r"(?:power|potential)|in conclusion,|not only .{1,60} but also|navigat(?:e|ing) the complexities)\b",
    re.IGNORECASE,
)
SHORTEST = 1000
"""Characters of a text whose compression says something."""
_NAME = re.compile(r"\b[^\W\dA-Z_]*+[\dA-Z_]\w*+(?:\W++[^\W\dA-Z_]*+[\dA-Z_]\w*+)*+")


def phrases(text: str, weak_per_1000: float) -> str:
    """Whether a language model wrote a text, by its phrases: "ai_phrase" for one that nobody else uses, "ai_style" for
    an opening and a closing of a chat, or for many fashionable ones; "" otherwise."""
    if _SURE.search(text):
        return "ai_phrase"
    if _OPENING.search(text) and _CLOSING.search(text):
        return "ai_style"
    found = len(_WEAK.findall(text))
    return "ai_style" if found >= 3 and 1000 * found > weak_per_1000 * len(text.split()) else ""


def compression(text: str) -> float:
    """Bytes of the text after zlib per byte before."""
    raw = text.encode()
    return len(zlib.compress(raw, 6)) / max(1, len(raw))


@dataclass(frozen=True)
class Skeleton:
    """The lines of a document without names and numbers, as hashes uint64 [lines], with their characters int64 [lines].
    Documents of one `group` (site or package) are compared; those with the same hash `text` are copies."""

    group: int
    text: int
    lines: np.ndarray
    sizes: np.ndarray


def skeleton(name: str, text: str, url: str = "") -> Skeleton:
    """The skeleton of a document: every run of words with capitals, digits or _ becomes one sign."""
    host = urlsplit(url).netloc if "://" in url else ""
    shown = [line.strip() for line in text.split("\n") if line.strip()]
    lines = [_hash(_NAME.sub("#", line)) for line in shown]
    sizes = [len(line) for line in shown]
    group = _hash(host or "/".join(name.split("!")[0].split("/")[:2]))
    return Skeleton(group, _hash(text), np.array(lines, dtype=np.uint64), np.array(sizes, dtype=np.int64))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def from_templates(documents: Sequence[Skeleton], copies: int, share: float) -> list[int]:
    """Places of the documents of which this share of the characters is in lines that at least `copies` different
    texts of their group have."""
    groups: dict[int, list[int]] = {}
    for place, document in enumerate(documents):
        groups.setdefault(document.group, []).append(place)
    found: list[int] = []
    for places in groups.values():
        texts = {documents[place].text: documents[place].lines for place in places}
        if len(texts) >= copies:
            common = _common(texts.values(), copies)
            for place in places:
                document = documents[place]
                alike = document.sizes[np.isin(document.lines, common)].sum()
                if len(document.lines) and alike >= share * document.sizes.sum():
                    found.append(place)
    return sorted(found)


def _common(documents: Iterable[np.ndarray], copies: int) -> np.ndarray:
    lines, counts = np.unique(np.concatenate([np.unique(lines) for lines in documents]), return_counts=True)
    return lines[counts >= copies]
