"""The documents of planned inputs: of files, and of commits of git repositories."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from glm5.config.corpus import LimitConfig, SourceConfig
from glm5.data.corpus.code_language import identify_by_magika, named_by_content
from glm5.data.corpus.formats import texts
from glm5.data.corpus.kinds import UNNAMED, file_type
from glm5.data.corpus.plan import GIT, Input
from glm5.data.corpus.text import Extract, Found, Skipped, Text, checked, tidy
from glm5.data.documents import ReadReport
from glm5.data.git import read_git


def documents(one: Input, source: SourceConfig, limits: LimitConfig, extract: Extract) -> Iterator[Found]:
    """The documents of an input without members, with the source's kind."""
    if one.path.startswith(GIT):
        found_texts = _committed(one, source, limits)
    else:
        found_texts = texts(Path(one.path), one.name, limits, source.field, extract)
    for found in found_texts:
        if source.by_content:
            found = named_by_content(found, identify_by_magika())
        yield found if isinstance(found, Skipped) or source.kind is None else replace(found, kind=source.kind)


def _committed(one: Input, source: SourceConfig, limits: LimitConfig) -> Iterator[Found]:
    """Text files of a commit."""
    report = ReadReport(max_bad=1 << 62)
    report.begin(one.path)
    for document in read_git(one.path.removeprefix(GIT), report, limits.document_bytes):
        kind = file_type(document.path) or (UNNAMED if source.by_content else None)
        if kind is not None and kind.format == "text":
            text = Text(f"{one.name}/{document.path}", tidy(document.text), kind.kind or "prose", "git", kind.code)
            yield checked(text, limits)
    for reason, count in (("too_large", report.sources[-1].bad), ("binary", report.sources[-1].binary)):
        yield from (Skipped(one.name, reason) for _ in range(count))
