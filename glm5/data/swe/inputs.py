"""The rows of planned inputs: batches of changes of a git repository, and Debian source packages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from glm5.config.corpus import LimitConfig
from glm5.data.corpus.plan import GIT, Input
from glm5.data.corpus.streams import Refused
from glm5.data.corpus.text import Found, Skipped
from glm5.data.swe.change import Change
from glm5.data.swe.debian import package_changes
from glm5.data.swe.history import History
from glm5.data.swe.related import Retriever
from glm5.data.swe.rows import Rows
from glm5.errors import DataError

_UNFORESEEN = (ValueError, LookupError, RecursionError, OSError)
"""What parsers of hostile changes may raise: one of them must not end the run."""


def rows(one: Input, maker: Rows, limits: LimitConfig) -> Iterator[Found]:
    """The rows of an input, and why other changes give none."""
    retriever: Retriever | None = None
    try:
        for found in _git(one, maker, limits) if one.path.startswith(GIT) else _package(one, maker, limits):
            if isinstance(found, tuple):
                yield Skipped(*found)
                continue
            retriever = retriever or Retriever(found.tree.text)
            try:
                row = maker.row(found, retriever)
            except (DataError, *_UNFORESEEN):
                row = Skipped(found.name, "damaged")
            yield row
    except Refused as refusal:
        yield Skipped(one.name, str(refusal))
    except _UNFORESEEN:
        yield Skipped(one.name, "damaged")


def _package(one: Input, maker: Rows, limits: LimitConfig) -> Iterator[Change | tuple[str, str]]:
    return package_changes(Path(one.path), one.name, limits, maker.issues)


def _git(one: Input, maker: Rows, limits: LimitConfig) -> Iterator[Change | tuple[str, str]]:
    place = one.path.removeprefix(GIT)
    with History(place, limits.document_bytes) as history:
        for member in one.members:
            sha = member.path.rpartition("@")[2]
            repository = one.name.split("/")[1].partition("+")[0]
            try:
                found = history.change(sha, member.name, repository, maker.issues, maker.config)
            except (DataError, *_UNFORESEEN):
                found = "damaged"
            yield (member.name, found) if isinstance(found, str) else found
