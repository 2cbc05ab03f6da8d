"""Terms of computing with their cross references from the Free On-line Dictionary of Computing (Debian dict-foldoc)."""

from __future__ import annotations

import functools
import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from glm5.errors import DataError
from glm5.tasks.search.records import Record, Ref, Source, plain_name
from glm5.tasks.search.sources.locate import of_system

MOST_BYTES = 64 << 20
MOST_REFERENCES = 1_000
_DIGITS = {c: i for i, c in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")}
_REFERENCE = re.compile(r"\{([^{}]+)\}")
_YEAR = re.compile(r"\b(?:in|since|until|around|by|from|January|February|March|April|May|June|July|August|September|"
                   r"October|November|December)\s+(1[89]\d\d|20[0-2]\d)\b")  # fmt: skip
_UPDATED = re.compile(r"\((\d{4})-\d\d-\d\d\)\s*$")
_SUBJECT = re.compile(r"^\s*(?:\d+\.\s*)?<([a-z][a-z ,/-]{2,60})>")


def _read(paths: list[Path]) -> Iterator[Record]:
    try:
        with gzip.open(paths[0]) as file:
            data = file.read(MOST_BYTES)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{paths[0]} is not a dictd dictionary: {error}.") from error
    data_of = _entries(paths[1], data)
    subjects: set[str] = set()
    seen: set[str] = set()
    for name, others, entry in data_of:
        head, _, body = entry.decode("utf-8", "replace").partition("\n")
        name, body = head.strip() or name, body.strip("\n")
        key = f"name:{plain_name(name)}"
        if key in seen or name.startswith("00-database") or not body.strip():
            continue
        seen.add(key)
        record = Record("term", (f"foldoc:{name}", key), name, others)
        if found := _SUBJECT.match(body):
            for subject in filter(None, (part.strip() for part in found[1].split(","))):
                record.claim("subject", Ref("subject", f"name:{subject}"))
                if subject not in subjects:
                    subjects.add(subject)
                    yield Record("subject", (f"name:{subject}",), subject)
        for target in list(dict.fromkeys(_target(one) for one in _REFERENCE.findall(body)))[:MOST_REFERENCES]:
            if target and target != plain_name(name):
                record.claim("refers_to", Ref("term", f"name:{target}"))
        if year := _YEAR.search(" ".join(body.split())):
            record.claim("term_year", int(year[1]))
        if updated := _UPDATED.search(body):
            record.claim("term_updated", int(updated[1]))
        paragraphs = (" ".join(part.split()) for part in body.split("\n\n"))
        record.text = _REFERENCE.sub(_linked, "\n\n".join(paragraphs))
        yield record


def _entries(index: Path, data: bytes) -> list[tuple[str, tuple[str, ...], bytes]]:
    """(headword, further headwords, text) of each entry, in the order of the texts."""
    words: dict[tuple[int, int], list[str]] = {}
    for line in index.read_text(encoding="utf-8", errors="replace").splitlines():
        word, _, place = line.partition("\t")
        numbers = [
            functools.reduce(lambda total, c: total * 64 + _DIGITS.get(c, 0), part, 0) for part in place.split("\t")
        ]
        if len(numbers) == 2 and numbers[0] + numbers[1] <= len(data):
            words.setdefault((numbers[0], numbers[1]), []).append(word)
    entries = []
    for (start, size), heads in sorted(words.items()):
        entries.append((heads[0], tuple(heads[1:]), data[start : start + size]))
    return entries


def _base64(digits: str) -> int:
    return functools.reduce(lambda total, digit: total * 64 + _DIGITS.get(digit, 0), digits, 0)


def _target(reference: str) -> str:
    """The key of what braces refer to; "" for addresses outside."""
    return "" if re.search(r"\(\w+:|://|news:", reference) else plain_name(" ".join(reference.split()))


def _linked(match: re.Match[str]) -> str:
    shown = re.sub(r"\s*\(?(?:https?|ftp)://\S+", "", " ".join(match[1].split()))
    return f"[[{shown}|term|name:{_target(match[1])}]]" if _target(match[1]) else shown


FOLDOC = Source(
    "foldoc", "GFDL-1.1+ (FOLDOC)", "apt install dict-foldoc",
    lambda roots: of_system([f"usr/share/dictd/foldoc.{end}" for end in ("dict.dz", "index")], roots), _read,
    version=2,
    apt="dict-foldoc",
)  # fmt: skip
