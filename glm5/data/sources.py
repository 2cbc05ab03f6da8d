"""Documents from sources. The source `stdlib` is built in: real text that every Python installation has.

A source is one of
- `stdlib`: the modules of the running Python without their tests,
- `git:PATH` or `git:PATH@REVISION`: committed text files of a local repository,
- `FILE.jsonl`, `FILE.ndjson`, `FILE.parquet`: one document per record, in the field or column `text`, or in FIELD with
  `FILE.jsonl#FIELD`,
- a folder: the text files below it; any other file: one document.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

from glm5.data.documents import Document, ReadReport, need_documents
from glm5.data.git import read_git
from glm5.data.readers import read_folder, read_jsonl, read_parquet, read_text_file
from glm5.errors import DataError

__all__ = ["MAX_RECORD_BYTES", "Document", "ReadReport", "iter_sources", "read_source", "read_sources"]

MAX_RECORD_BYTES = 64 << 20
"""Bytes of one file, line or row."""

_JSONL, _PARQUET = (".jsonl", ".ndjson"), (".parquet",)
_NO_MODULES = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib-dynload"}


def iter_sources(
    sources: Sequence[str], report: ReadReport | None = None, *, max_record_bytes: int = MAX_RECORD_BYTES
) -> Generator[Document]:
    """Documents of all sources one by one, in an order that depends only on their content.

    `report` counts what was read, left out and malformed. Raises DataError for a source that does not exist or cannot
    be read, and for more malformed records than the report tolerates.
    """
    report = report if report is not None else ReadReport()
    for source in sources:
        entry = report.begin(source)
        for document in _documents(source, report, max_record_bytes):
            entry.add(document)
            yield document


def read_source(source: str) -> Iterator[Document]:
    """Documents of one source (see the module's docstring) in a fixed order."""
    return iter_sources([source])


def read_sources(sources: Sequence[str]) -> list[Document]:
    """All documents of all sources in memory. Raises DataError for sources without a document."""
    report = ReadReport()
    documents = list(iter_sources(sources, report))
    need_documents(report, sources)
    return documents


def _documents(source: str, report: ReadReport, limit: int) -> Iterator[Document]:
    if source == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        return read_folder(root, report, limit, suffixes=(".py",), skip=_NO_MODULES.__contains__, follow=True)
    if source.startswith("git:"):
        return read_git(source.removeprefix("git:"), report, limit)
    name, field = _field(source)
    path = Path(name)
    if path.is_dir():
        return read_folder(path, report, limit)
    if not path.is_file():
        raise DataError(f'Source "{source}" is neither a file nor a folder nor "git:PATH" nor the built-in "stdlib".')
    if path.suffix in _JSONL:
        return read_jsonl(path, field, report, limit)
    if path.suffix in _PARQUET:
        return read_parquet(path, field, report, limit)
    return read_text_file(path, report, limit)


def _field(source: str) -> tuple[str, str]:
    """File and field of `FILE#FIELD`. A # in an existing file's name or another kind of source is no separator."""
    name, separator, field = source.rpartition("#")
    if separator and field and name.endswith((*_JSONL, *_PARQUET)) and not Path(source).exists():
        return name, field
    return source, "text"
