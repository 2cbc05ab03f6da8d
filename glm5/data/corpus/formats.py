"""Texts of untrusted files: every format, with limits. What cannot be used becomes a `Skipped` with its reason.

HTML and PDF are parsed by native code, so `extract` runs in a process of its own (see `glm5.data.corpus.read`). The
other formats are bounded here.
"""

from __future__ import annotations

import io
import json
import lzma
import string
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from glm5.config.corpus import LimitConfig
from glm5.data.corpus.kinds import UNNAMED, FileType, file_type
from glm5.data.corpus.streams import Bounded, Refused, decompressed, opened, room_of
from glm5.data.corpus.text import Extract, Found, Skipped, Text, checked, decode, extracted_document, one_document, tidy
from glm5.data.documents import ReadReport
from glm5.data.readers import limited_lines, read_parquet
from glm5.errors import DataError

_MOST_DICTIONARY = 256 << 20
_MOST_INDEX, _MOST_ENTRIES, _MOST_LINE = 64 << 20, 1 << 20, 1 << 12
_BASE64 = {
    char: value for value, char in enumerate(string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/")
}


def texts(path: Path, name: str, limits: LimitConfig, field: str, extract: Extract) -> Iterator[Found]:
    """The documents of one file, in a fixed order. A name that says nothing gives text in an unknown language. Never
    raises for what a file contains."""
    kind = file_type(name) or UNNAMED
    try:
        if kind.format == "parquet":
            yield from _parquet(path, name, limits, field)
        elif kind.format == "warc":
            with opened(path, limits.input_bytes) as file:
                yield from _warc(file, name, limits, extract)
        elif kind.format == "dictionary":
            with opened(path, limits.input_bytes) as file:
                room = room_of(file, limits)
                content = Bounded(decompressed(file, kind.compression), room, _MOST_DICTIONARY).rest()
            yield from _dictionary(path, content, name, limits, room)
        elif kind.format in ("jsonl", "archive"):
            with opened(path, limits.input_bytes) as file:
                yield from _container(file, kind, name, limits, field, extract)
        else:
            most = limits.input_bytes if kind.format == "pdf" else limits.document_bytes
            with opened(path, max(most, limits.document_bytes)) as file:
                raw = Bounded(decompressed(file, kind.compression), room_of(file, limits), most).rest()
            yield one_document(name, raw, kind, limits, extract)
    except Refused as refusal:
        yield Skipped(name, str(refusal))
    except MemoryError:
        yield Skipped(name, "bomb")
    except (ImportError, DataError):  # no fault of the file
        raise
    except Exception:  # parsers of hostile files raise almost anything
        yield Skipped(name, "damaged")


def _container(
    file: IO[bytes], kind: FileType, name: str, limits: LimitConfig, field: str, extract: Extract
) -> Iterator[Found]:
    room = room_of(file, limits)
    if kind.format == "jsonl":
        yield from _jsonl(Bounded(decompressed(file, kind.compression), room, room), name, limits, field)
    elif name.lower().endswith((".zip", ".whl")):
        with zipfile.ZipFile(file) as archive:
            yield from _members(_zip(archive, limits, room), name, limits, extract)
    else:
        short = {"tgz": ".gz", "tbz2": ".bz2", "txz": ".xz"}.get(name.lower().rpartition(".")[2], "")
        stream = Bounded(decompressed(file, kind.compression or short), room, limits.document_bytes)
        with tarfile.open(fileobj=cast(IO[bytes], stream), mode="r:") as archive:
            yield from _members(_tar(archive, limits), name, limits, extract)


Member = tuple[str, "bytes | str"]
"""Name of a file in an archive, and its content or a key of `REASONS`."""


def _zip(archive: zipfile.ZipFile, limits: LimitConfig, room: int) -> Iterator[Member]:
    entries = archive.infolist()
    if len(entries) > limits.members:
        raise Refused("too_many_members")
    for entry in sorted(entries, key=lambda entry: entry.filename):
        if entry.is_dir() or file_type(entry.filename) is None:
            continue
        if entry.flag_bits & 1:
            raise Refused("encrypted")
        if entry.file_size > limits.document_bytes:
            yield entry.filename, "too_large"
            continue
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            # zipfile decompresses the other methods without a bound, whatever size the entry claims
            yield entry.filename, "unsupported_compression"
            continue
        try:
            with archive.open(entry) as file:
                raw = file.read(limits.document_bytes + 1)
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError):
            raise Refused("damaged") from None
        room -= len(raw)
        if room < 0:
            raise Refused("bomb")
        yield entry.filename, raw if len(raw) <= limits.document_bytes else "too_large"


def _tar(archive: tarfile.TarFile, limits: LimitConfig) -> Iterator[Member]:
    for count, entry in enumerate(archive):
        if count >= limits.members:
            raise Refused("too_many_members")
        archive.members.clear()  # type: ignore[attr-defined]  # it would remember every entry
        if not entry.isreg() or file_type(entry.name) is None:
            continue
        if entry.size > limits.document_bytes:
            yield entry.name, "too_large"
            continue
        file = archive.extractfile(entry)
        yield entry.name, file.read() if file is not None else b""


def _members(members: Iterator[Member], name: str, limits: LimitConfig, extract: Extract) -> Iterator[Found]:
    for inner, raw in members:
        plain = PurePosixPath(inner.encode("utf-8", "replace").decode()).as_posix()
        place, kind = f"{name}!{plain}", file_type(inner)
        if any(part.startswith(".") for part in plain.split("/")) or kind is None:
            continue
        if isinstance(raw, str):
            yield Skipped(place, raw)
        elif kind.format in ("archive", "warc", "jsonl", "parquet", "dictionary"):
            yield Skipped(place, "nested")
        elif raw:
            stream = decompressed(io.BytesIO(raw), kind.compression)
            room = limits.document_bytes + limits.expansion * len(raw)
            try:
                yield one_document(place, Bounded(stream, room, limits.document_bytes).rest(), kind, limits, extract)
            except Refused as refusal:
                yield Skipped(place, str(refusal))
            except (OSError, EOFError, zlib.error, lzma.LZMAError):
                yield Skipped(place, "damaged")


def _jsonl(stream: Bounded, name: str, limits: LimitConfig, field: str) -> Iterator[Found]:
    for number, line in limited_lines(cast(Any, stream), limits.document_bytes * 2):
        place = f"{name}:{number}"
        if line is None:
            yield Skipped(place, "too_large")
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            yield Skipped(place, "malformed")
            continue
        text = record.get(field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            yield Skipped(place, "malformed")
            continue
        known = {key: record[key][:500] for key in ("url", "license", "path") if isinstance(record.get(key), str)}
        yield checked(Text(place, tidy(text), "prose", "jsonl", None, known), limits)


def _dictionary(path: Path, content: bytes, name: str, limits: LimitConfig, room: int) -> Iterator[Found]:
    """Entries of a dictionary in the format of dictd: the index beside it has headword, start and length per line.
    Entries may overlap; together they have at most `room` bytes."""
    spans = dict[tuple[int, int], str]()
    try:
        with opened(path.with_name(path.name.partition(".dict")[0] + ".index"), _MOST_INDEX) as file:
            for _, line in limited_lines(cast(Any, file), _MOST_LINE):
                headword, *numbers = (line or b"").decode("utf-8", "replace").rstrip("\r\n").split("\t")
                if (
                    len(numbers) == 2
                    and not headword.startswith("00database")
                    and all(set(n) <= _BASE64.keys() for n in numbers)
                ):
                    spans.setdefault((_number(numbers[0]), _number(numbers[1])), headword)
                if len(spans) > _MOST_ENTRIES:
                    raise Refused("too_many_members")
    except Refused as refusal:
        yield Skipped(name, "damaged" if str(refusal) == "unreadable" else str(refusal))
        return
    for (start, length), headword in sorted(spans.items()):
        place, raw = f"{name}:{headword[:100]}", content[start : start + length]
        room -= len(raw)
        if room < 0:
            raise Refused("bomb")
        try:
            yield checked(
                Text(place, tidy(decode(raw)), "prose", "dictionary", None, {"title": headword[:200]}), limits
            )
        except Refused as refusal:
            yield Skipped(place, str(refusal))


def _number(digits: str) -> int:
    value = 0
    for digit in digits[:10]:
        value = 64 * value + _BASE64[digit]
    return value


def _parquet(path: Path, name: str, limits: LimitConfig, field: str) -> Iterator[Found]:
    report = ReadReport(max_bad=1 << 62)
    report.begin(name)
    bad = empty = row = 0
    try:
        for row, document in enumerate(read_parquet(path, field, report, limits.document_bytes), 1):
            more = {"path": document.path}
            yield checked(Text(f"{name}:{row}", tidy(document.text), "prose", "parquet", None, more), limits)
    except DataError:
        yield Skipped(name, "damaged")
    bad, empty = report.sources[-1].bad, report.sources[-1].empty
    yield from (Skipped(f"{name}:malformed {n}", "malformed") for n in range(bad))
    yield from (Skipped(f"{name}:empty {n}", "empty") for n in range(empty))


def _warc(file: IO[bytes], name: str, limits: LimitConfig, extract: Extract) -> Iterator[Found]:
    """Responses and conversions of a WARC or WET file."""
    from fastwarc.warc import ArchiveIterator, WarcRecordType

    wanted = WarcRecordType.response | WarcRecordType.conversion
    html, plain = FileType("html", "web"), FileType("text", "web")
    room, number = room_of(file, limits), 0
    records = ArchiveIterator(file, record_types=wanted, parse_http=True, auto_decode="all")
    for number, record in enumerate(records, 1):
        place = f"{name}:{number}"
        raw = record.reader.read(limits.document_bytes + 1)
        room -= len(raw)
        if room < 0:
            raise Refused("bomb")
        kind = html if record.record_type == WarcRecordType.response else plain
        content = (record.http_content_type or "text/html") if kind is html else "text/plain"
        if content not in ("text/html", "application/xhtml+xml", "text/plain"):
            continue
        if len(raw) > limits.document_bytes:
            yield Skipped(place, "too_large")
            continue
        more = {"url": (record.headers.get("WARC-Target-URI") or "")[:500]}
        if kind is html and content != "text/plain":
            yield extracted_document(place, raw, kind, limits, extract, more)
            continue
        try:
            yield checked(Text(place, tidy(decode(raw)), "web", "warc", None, more), limits)
        except Refused as refusal:
            yield Skipped(place, str(refusal))
    if not number:
        yield Skipped(name, "empty")
