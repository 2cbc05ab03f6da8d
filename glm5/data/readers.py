"""Readers of folders, text files, JSONL and parquet: lazy, in a fixed order, safe for untrusted files.

Every reader takes the report, which counts what is left out, and `limit`, the maximum bytes of one record. Nothing
larger is ever in memory, except in parquet: see `read_parquet`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from glm5.data.documents import Document, ReadReport
from glm5.errors import DataError, MissingExtraError

TEXT_SUFFIXES = (
    ".py",
    ".txt",
    ".md",
    ".rst",
    ".toml",
    ".json",
    ".c",
    ".h",
    ".cpp",
    ".rs",
    ".go",
    ".js",
    ".ts",
    ".java",
)
_PARQUET_ROWS = 1  # decoded at a time: a dictionary may make many long rows of few bytes, whatever the metadata says
_MOST_TEXT, _MOST_RATIO = 64 << 20, 256
"""Bytes that a parquet file's rows may have: so many, and so many times those of the file. A dictionary repeats a long
text in any number of rows at no cost."""
_SKIPPED_BYTES = 1 << 20
_STRINGS = ("string", "large_string")
_NAMES = (*_STRINGS, *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))


def is_hidden(name: str) -> bool:
    """Whether a file or a folder is left out of a folder source."""
    return name.startswith(".")


def read_folder(
    root: Path,
    report: ReadReport,
    limit: int,
    *,
    suffixes: Sequence[str] = TEXT_SUFFIXES,
    skip: Callable[[str], bool] = is_hidden,
    follow: bool = False,
) -> Iterator[Document]:
    """Text files below `root`, sorted by the parts of their paths; names for which `skip` is true are passed over.

    Links to folders are not entered. Links to files outside `root` are read only with `follow`.
    """
    inside = root.resolve()
    for path, parts in _walk(root, skip):
        if path.suffix not in suffixes or not path.is_file():
            continue
        if path.is_symlink() and not follow and not path.resolve().is_relative_to(inside):
            report.sources[-1].links += 1
            continue
        raw = _content(path, limit)
        if raw is None:
            report.add_bad(str(path), f"it has more than {limit:,} bytes")
            continue
        document = text_document("/".join(parts), raw, report)
        if document is not None:
            yield document


def _walk(root: Path, skip: Callable[[str], bool]) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Everything below `root` except folders, with its path's parts. No recursion: folders may nest deeply."""
    stack: list[tuple[str, ...]] = [()]
    while stack:
        parts = stack.pop()
        path = root.joinpath(*parts)
        if not parts or (path.is_dir() and not path.is_symlink()):
            try:
                names = sorted(os.listdir(path), reverse=True)
            except OSError as error:
                raise DataError(f"Cannot read {path}: {error.strerror}.") from None
            stack += [(*parts, name) for name in names if not skip(name)]
        else:
            yield path, parts


def read_text_file(path: Path, report: ReadReport, limit: int) -> Iterator[Document]:
    """The file as one document. Raises DataError for a file that is too large for one."""
    raw = _content(path, limit)
    if raw is None:
        raise DataError(
            f"{path} has more than the {limit:,} bytes that one document may have; split it into several files, or "
            "make it a JSONL file with one document per line."
        )
    document = text_document(path.name, raw, report)
    if document is not None:
        yield document


def _content(path: Path, limit: int) -> bytes | None:
    """The bytes of a file; None for more than `limit`."""
    try:
        with path.open("rb") as file:
            raw = file.read(limit + 1)
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}.") from None
    return raw if len(raw) <= limit else None


def text_document(path: str, raw: bytes, report: ReadReport) -> Document | None:
    """A file's content as a document. Bytes that are not UTF-8 become U+FFFD, and all line ends become \\n, as if
    Python read it as text. Blank files and binary ones (with a NUL byte) are counted and left out."""
    if b"\0" in raw:
        report.sources[-1].binary += 1
        return None
    text = raw.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        report.sources[-1].empty += 1
        return None
    # A file name may contain bytes that are not UTF-8; the document's path must be valid text to be hashed and stored.
    return Document(os.fsencode(path).decode("utf-8", "replace"), text)


def read_jsonl(path: Path, field: str, report: ReadReport, limit: int) -> Iterator[Document]:
    """One document per line: the string at `field`, named by `path`, else by `id`, else FILE:LINE.

    A line is malformed if it is longer than `limit`, not UTF-8, not a JSON object, or has no such string. Blank lines
    are not records.
    """
    try:
        with path.open("rb") as file:
            for number, line in limited_lines(file, limit):
                where = f"{path}:{number}"
                if line is None:
                    report.add_bad(where, f"the line has more than {limit:,} bytes")
                    continue
                try:
                    document = _record(json.loads(line.decode("utf-8")), field, f"{path.name}:{number}")
                except (ValueError, RecursionError) as error:
                    report.add_bad(where, bad_json(error))
                else:
                    yield from _unless_empty(document, report)
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}.") from None


def limited_lines(file: BinaryIO, limit: int) -> Iterator[tuple[int, bytes | None]]:
    """Lines that are not blank, with their numbers from 1; a byte order mark at the start is removed. None replaces a
    line of more than `limit` bytes, which is skipped in pieces."""
    number = 0
    while line := file.readline(limit + 1):
        number += 1
        if len(line.removesuffix(b"\n")) <= limit:
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if line.strip():
                yield number, line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(_SKIPPED_BYTES)
        yield number, None


def bad_json(error: ValueError | RecursionError) -> str:
    """Why a line could not be decoded or `json.loads` refused it, in a few words."""
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8"
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON ({error.msg}, column {error.colno})"
    return "not JSON (nested too deeply)" if isinstance(error, RecursionError) else str(error)


def _record(record: Any, field: str, name: str) -> Document:
    """The document of one record. Raises ValueError, with the reason, for a malformed record."""
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    text = record.get(field)
    if not isinstance(text, str):
        raise ValueError(f'no text in the field "{field:.80}"')
    for key in ("path", "id"):
        value = record.get(key)
        if value is None or value == "":
            continue
        if not isinstance(value, str | int):
            raise ValueError(f'the field "{key}" is neither text nor a whole number')
        name = str(value)
        break
    if not (_is_unicode(text) and _is_unicode(name)):
        raise ValueError("not Unicode (half of a surrogate pair)")
    return Document(name, text)


def _is_unicode(text: str) -> bool:
    """False for lone surrogates, which JSON can contain and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _unless_empty(document: Document, report: ReadReport) -> Iterator[Document]:
    if document.text.strip():
        yield document
    else:
        report.sources[-1].empty += 1


def read_parquet(path: Path, column: str, report: ReadReport, limit: int) -> Iterator[Document]:
    """One document per row: the string in `column`, named as for JSONL; without `path` and `id`, FILE:row N from 1.

    Row groups are read one after the other, row by row. But a page of the file, with its dictionary, is decompressed as
    a whole, and a row must be decoded before its size is known: one row larger than `limit` is in memory until it is
    reported. Raises MissingExtraError without pyarrow.
    """
    try:
        import pyarrow  # type: ignore[import-untyped]
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError:
        raise MissingExtraError("pyarrow", "data") from None
    strings = (pyarrow.StringScalar, pyarrow.LargeStringScalar)
    number, left = 0, 0
    try:
        left = _MOST_TEXT + _MOST_RATIO * path.stat().st_size
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
            columns = _columns(path, file.schema_arrow, column)
            _check_sizes(path, file.metadata, columns)
            for row in _rows(file, columns):
                number += 1
                where = f"{path}:row {number}"
                left -= sum(v.as_buffer().size for v in row.values() if isinstance(v, strings) and v.is_valid)
                if left < 0:
                    many = f"more than {_MOST_RATIO} times its size in text by row {number:,}"
                    raise DataError(f"{path} has {many}; write it as JSONL.")
                if any(v.as_buffer().size > limit for v in row.values() if isinstance(v, strings) and v.is_valid):
                    report.add_bad(where, f"it has more than {limit:,} bytes")
                    continue
                try:
                    record = {name: value.as_py() for name, value in row.items()}
                    document = _record(record, column, f"{path.name}:row {number}")
                except UnicodeDecodeError:
                    report.add_bad(where, "not UTF-8")
                except ValueError as error:
                    report.add_bad(where, str(error))
                else:
                    yield from _unless_empty(document, report)
    except MemoryError:  # pyarrow's error is one
        raise DataError(f"{path}: not enough memory for the page or row after row {number}.") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{path} is not a parquet file, or is damaged after row {number}: {_first_line(error)}"
        ) from None


def _check_sizes(path: Path, metadata: Any, columns: list[str]) -> None:
    """Raise DataError for columns that say themselves that they unpack to far more bytes than they have."""
    for group in (metadata.row_group(number) for number in range(metadata.num_row_groups)):
        for chunk in (group.column(number) for number in range(group.num_columns)):
            most = _MOST_TEXT + _MOST_RATIO * chunk.total_compressed_size
            if chunk.path_in_schema in columns and chunk.total_uncompressed_size > most:
                raise DataError(f"{path} unpacks to more than {_MOST_RATIO} times its size; write it as JSONL.")


def _rows(file: Any, columns: list[str]) -> Iterator[dict[str, Any]]:
    """The named scalars of each row."""
    for group in range(file.num_row_groups):
        for batch in file.iter_batches(batch_size=_PARQUET_ROWS, row_groups=[group], columns=columns):
            for row in range(batch.num_rows):
                yield {name: batch.column(name)[row] for name in columns}


def _columns(path: Path, schema: Any, column: str) -> list[str]:
    """The columns to read: the text, and those that may name the document."""
    types = {field.name: str(field.type) for field in schema}
    if len(types) != len(schema):
        raise DataError(f"{path} has several columns of the same name.")
    if types.get(column) not in _STRINGS:
        texts = ", ".join(name for name, kind in types.items() if kind in _STRINGS) or "none"
        raise DataError(
            f'{path} has no column "{column}" of strings (columns of strings: {texts}); '
            "name one as FILE.parquet#COLUMN."
        )
    return list(dict.fromkeys([column, *(name for name in ("path", "id") if types.get(name) in _NAMES)]))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
