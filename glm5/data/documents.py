"""Documents read from a source, and counts of what was read, left out and malformed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from glm5.errors import DataError

HELD_OUT_MODULUS = 50
NAMED_BAD_RECORDS = 100
"""How many malformed records a report names; all are counted."""
FREE_BAD_RECORDS = 10
BAD_RECORDS_ONE_IN = 1000


@dataclass(frozen=True)
class Document:
    """One text: its path (relative to its source, or as its record gives it) and its content, both valid Unicode."""

    path: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether it belongs to the held-out split: sha256(path) mod 50 = 0, independent of the rest of the corpus."""
        return int.from_bytes(hashlib.sha256(self.path.encode()).digest(), "big") % HELD_OUT_MODULUS == 0


@dataclass(frozen=True)
class BadRecord:
    """A record that could not be used: `where` is FILE:LINE for JSONL, FILE:row N for parquet, otherwise the file."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


@dataclass
class SourceReport:
    """Counts of one source. `empty` texts, `binary` files (with a NUL byte), `links` that lead out of the folder and
    `copies` of a file in a git source are left out without being errors; `bad` records are malformed. `bytes` is the
    UTF-8 length of the documents, and `revision` is the resolved commit of a git source."""

    source: str
    documents: int = 0
    bytes: int = 0
    empty: int = 0
    binary: int = 0
    links: int = 0
    copies: int = 0
    bad: int = 0
    revision: str | None = None
    _digest: Any = field(default_factory=hashlib.sha256, repr=False, compare=False)

    def add(self, document: Document) -> None:
        """Count a document and add it to the digest."""
        text = document.text.encode()
        self.documents += 1
        self.bytes += len(text)
        for part in (document.path.encode(), text):
            self._digest.update(hashlib.sha256(part).digest())

    @property
    def records(self) -> int:
        """All records seen, used or not."""
        return self.documents + self.empty + self.binary + self.bad

    def plain(self) -> dict[str, Any]:
        """The manifest entry. `sha256` covers only paths and texts of the documents, in their order."""
        values = {k: v for k, v in vars(self).items() if not k.startswith("_") and (k != "revision" or v)}
        return values | {"sha256": self._digest.hexdigest()}


@dataclass
class ReadReport:
    """Counts of all sources, and how many malformed records are tolerated.

    At most `max_bad` are tolerated. None means 0.1 % of the records read so far, or 10 if that is more. "So far" makes
    a source that is entirely malformed fail within its first records, not after hours.
    """

    max_bad: int | None = None
    sources: list[SourceReport] = field(default_factory=list)
    bad: list[BadRecord] = field(default_factory=list)
    """The first malformed records."""

    def begin(self, source: str) -> SourceReport:
        """Start counting the next source."""
        self.sources.append(SourceReport(source))
        return self.sources[-1]

    def add_bad(self, where: str, reason: str) -> None:
        """Count a malformed record of the current source. Raises DataError after too many."""
        self.sources[-1].bad += 1
        if len(self.bad) < NAMED_BAD_RECORDS:
            self.bad.append(BadRecord(where, reason))
        count, records = self.total("bad"), sum(source.records for source in self.sources)
        allowed = max(FREE_BAD_RECORDS, records // BAD_RECORDS_ONE_IN) if self.max_bad is None else self.max_bad
        if count > allowed:
            named = "; ".join(map(str, self.bad[:3])) + ("; …" if count > 3 else "")
            raise DataError(
                f"{count:,} of the first {records:,} records are malformed, more than the {allowed:,} that "
                f"--max-bad allows: {named}. Repair them, or raise the limit."
            )

    def total(self, name: str) -> int:
        """A count summed over the sources."""
        return sum(getattr(source, name) for source in self.sources)


def need_documents(report: ReadReport, sources: Sequence[str]) -> None:
    """Raise DataError for sources that gave no document."""
    if not report.total("documents"):
        left_out = ", ".join(f"{n:,} {name}" for name in ("empty", "binary", "bad") if (n := report.total(name)))
        found = f" ({left_out} left out)" if left_out else ""
        raise DataError(f"The sources {', '.join(sources)} contain no text file{found}.")
