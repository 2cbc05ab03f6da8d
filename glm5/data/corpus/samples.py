"""A few documents per reason, kept or dropped, for the report."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm5.files import read_rows

if TYPE_CHECKING:
    from datatrove.data import Document

_MOST_TEXT = 1500
_MOST_READ = 10_000
ADDED = "added"
"""The step of samples of documents that the second classifier lifts, by bucket."""
KEPT_BY = ("source", "kind", "format", "language", "code", "license", "length", "quality")
"""Properties by which kept documents are counted; `length` is the next power of ten of
characters, `quality` a tenth of the scores."""


class PartSamples:
    """The first documents of each reason in one part."""

    def __init__(self, most: int) -> None:
        self._most, self._seen, self.rows = most, Counter[str](), list[dict[str, Any]]()

    def add(self, reason: str, name: str, text: str, **more: Any) -> None:
        """Keep the document, if the part has not yet enough of this reason."""
        self._seen[reason] += 1
        if self._seen[reason] <= self._most:
            shown = {"length": len(text), "text": text[:_MOST_TEXT], **more}
            self.rows.append({"reason": reason, "name": name, **shown})


@dataclass(frozen=True)
class Samples:
    """Samples of all steps, in a folder: one file per step and part."""

    folder: Path
    most: int

    @contextmanager
    def part(self, step: str, part: int) -> Iterator[PartSamples]:
        """Collects samples of a step, and writes them at the end."""
        samples = PartSamples(self.most)
        yield samples
        self.write(step, part, samples)

    def write(self, step: str, part: int, samples: PartSamples) -> None:
        """Replace the samples of a step in a part."""
        path = self.folder / step / f"{part:05d}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in samples.rows), encoding="ascii")

    def steps(self) -> list[str]:
        """Names of the steps that have samples."""
        return sorted(path.name for path in self.folder.iterdir()) if self.folder.is_dir() else []

    def read(self, step: str) -> dict[str, list[dict[str, Any]]]:
        """Samples of a step by reason, over all parts in turn."""
        found: dict[str, list[dict[str, Any]]] = {}
        for path in sorted((self.folder / step).glob("*.jsonl")):
            for row in list(read_rows(path))[:_MOST_READ]:
                mine = found.setdefault(str(row["reason"]), [])
                if len(mine) < self.most:
                    mine.append(row)
        return found


class Keep:
    """Takes the documents that a deduplication filter drops, as its exclusion writer, and keeps samples of them."""

    def __init__(self, step: str, samples: Samples) -> None:
        self.step, self.samples, self._part = step, samples, PartSamples(0)

    def __enter__(self) -> Keep:
        self._part, self._rank = PartSamples(self.samples.most), 0
        return self

    def write(self, document: Document, rank: int = 0) -> None:
        self._rank = rank
        self._part.add("duplicate", document.id, document.text)

    def __exit__(self, *error: object) -> None:
        if self._part.rows:
            self.samples.write(self.step, self._rank, self._part)
