"""Texts of untrusted files: every format, with limits. What cannot be used becomes a `Skipped` with its reason.

HTML and PDF are parsed by native code, so `extract` runs in a process of its own (see `glm5.data.corpus.read`). The
other formats are bounded here.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import re
import string
import tarfile
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from glm5.config.corpus import Kind, LimitConfig
from glm5.data.corpus.kinds import FileType, file_type
from glm5.data.documents import ReadReport
from glm5.data.readers import limited_lines, read_parquet
from glm5.errors import DataError

REASONS = {
    "unreadable": "the file cannot be opened",
    "too_large": "more bytes than the limit",
    "bomb": "expands to more than the limit",
    "too_many_members": "an archive of more files than the limit",
    "nested": "an archive in an archive",
    "damaged": "not what its name says, or cut off",
    "binary": "contains NUL bytes",
    "encoding": "neither UTF-8 nor UTF-16 nor Latin text",
    "empty": "no text",
    "timeout": "extraction took too long",
    "crashed": "extraction died or ran out of memory",
    "malformed": "a record without text",
    "encrypted": "needs a password",
}
"""Why a file or a record is skipped."""

_MOST_STRAY = 0.3  # share of non-ASCII bytes in Latin text without declared encoding
_MEMORY_OF_XZ = 256 << 20
_MOST_DICTIONARY = 256 << 20
_BASE64 = {
    char: value for value, char in enumerate(string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/")
}
_CONTROLS = re.compile(r"[\x01-\x08\x0b\x0e-\x1f\x7f]")


@dataclass(frozen=True)
class Text:
    """A document of an input: its name in the corpus, its text, and what is known about it."""

    name: str
    text: str
    kind: Kind
    format: str
    code: str | None = None
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Skipped:
    """Something that was not used; `reason` is a key of REASONS."""

    name: str
    reason: str


Found = Text | Skipped
Extract = Callable[[str, bytes], "Extracted | str"]
"""Called with "html" or "pdf" and the content; returns the text, or a key of REASONS."""


@dataclass(frozen=True)
class Extracted:
    """Text of a page or a PDF, and its title."""

    text: str
    title: str = ""


class _Refused(Exception):
    """Carries a key of REASONS."""


def texts(path: Path, name: str, limits: LimitConfig, field: str, extract: Extract) -> Iterator[Found]:
    """The documents of one file, in a fixed order. Never raises for what a file contains."""
    kind = file_type(name)
    if kind is None:
        return
    try:
        if kind.format == "parquet":
            yield from _parquet(path, name, limits, field)
        elif kind.format == "warc":
            with _opened(path, limits.input_bytes) as file:
                yield from _warc(file, name, limits, extract)
        elif kind.format == "dictionary":
            with _opened(path, limits.input_bytes) as file:
                content = _Bounded(_decompressed(file, kind.compression), _room(file, limits), _MOST_DICTIONARY).rest()
            yield from _dictionary(path, content, name, limits)
        elif kind.format in ("jsonl", "archive"):
            with _opened(path, limits.input_bytes) as file:
                yield from _container(file, kind, name, limits, field, extract)
        else:
            most = limits.input_bytes if kind.format == "pdf" else limits.document_bytes
            with _opened(path, max(most, limits.document_bytes)) as file:
                raw = _Bounded(_decompressed(file, kind.compression), _room(file, limits), most).rest()
            yield _text(name, raw, kind, limits, extract)
    except _Refused as refusal:
        yield Skipped(name, str(refusal))
    except (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile):
        yield Skipped(name, "damaged")
    except MemoryError:
        yield Skipped(name, "bomb")


def _opened(path: Path, most: int) -> IO[bytes]:
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb")
    except OSError:
        raise _Refused("unreadable") from None
    if os.fstat(file.fileno()).st_size > most:
        file.close()
        raise _Refused("too_large")
    return file


def _room(file: IO[bytes], limits: LimitConfig) -> int:
    """Bytes that a file may expand to."""
    return limits.document_bytes + limits.expansion * os.fstat(file.fileno()).st_size


def _decompressed(file: IO[bytes], compression: str) -> IO[bytes]:
    if compression in (".gz", ".dz"):
        return cast(IO[bytes], gzip.GzipFile(fileobj=file))
    if compression == ".bz2":
        return cast(IO[bytes], bz2.BZ2File(file))
    return cast(IO[bytes], _Xz(file)) if compression == ".xz" else file


class _Xz(io.RawIOBase):
    """An xz stream whose dictionary is limited: its header may ask for 4 GiB."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._decoder = file, self._fresh()

    @staticmethod
    def _fresh() -> lzma.LZMADecompressor:
        return lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=_MEMORY_OF_XZ)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            raw = b""
            if self._decoder.eof:
                raw = self._decoder.unused_data or self._file.read(1 << 16)
                raw = raw.lstrip(b"\0")
                if not raw:
                    return 0
                self._decoder = self._fresh()
            elif self._decoder.needs_input and not (raw := self._file.read(1 << 16)):
                raise EOFError
            try:
                piece = self._decoder.decompress(raw, len(buffer))
            except lzma.LZMAError as error:
                raise (_Refused("bomb") if "Memory" in str(error) else error) from None
            if piece:
                buffer[: len(piece)] = piece
                return len(piece)


class _Bounded:
    """A stream that gives `room` bytes in all and `most` at once; more is a bomb or too large."""

    def __init__(self, file: IO[bytes], room: int, most: int) -> None:
        self._file, self._room, self._most, self._at = file, room, most, 0

    def read(self, size: int = -1) -> bytes:
        if size < 0:
            return self.rest()
        if size > max(self._most, 1 << 20):
            raise _Refused("bomb")
        piece = self._file.read(min(size, self._room + 1)) or b""
        self._at += len(piece)
        self._room -= len(piece)
        if self._room < 0:
            raise _Refused("bomb")
        return piece

    def readline(self, size: int) -> bytes:
        line = self._file.readline(min(size, self._room + 1))
        self._at += len(line)
        self._room -= len(line)
        if self._room < 0:
            raise _Refused("bomb")
        return line

    def rest(self) -> bytes:
        """All that is left. Raises _Refused for more than `most`."""
        parts, size = [], 0
        while piece := self.read(1 << 18):
            parts.append(piece)
            size += len(piece)
            if size > self._most:
                raise _Refused("too_large")
        return b"".join(parts)

    def tell(self) -> int:
        return self._at

    def seek(self, to: int) -> int:
        """Forward only, by reading."""
        if to < self._at:
            raise tarfile.ReadError("backward")
        while self._at < to and self.read(min(to - self._at, 1 << 18)):
            pass
        return self._at


# ---------------------------------------------------------------------------------------------------------------------
# Files with one document


def _text(name: str, raw: bytes, kind: FileType, limits: LimitConfig, extract: Extract) -> Found:
    if kind.format in ("html", "pdf"):
        return _extracted(name, raw, kind, limits, extract, {})
    try:
        text = tidy(decode(raw))
    except _Refused as refusal:
        return Skipped(name, str(refusal))
    return _document(Text(name, text, kind.kind or "prose", kind.format, kind.code), limits)


def _extracted(
    name: str, raw: bytes, kind: FileType, limits: LimitConfig, extract: Extract, more: dict[str, Any]
) -> Found:
    found = extract(kind.format, raw)
    if isinstance(found, str):
        return Skipped(name, found)
    more = more | ({"title": found.title[:200]} if found.title else {})
    return _document(Text(name, tidy(found.text), kind.kind or "prose", kind.format, None, more), limits)


def _document(text: Text, limits: LimitConfig) -> Found:
    if not text.text:
        return Skipped(text.name, "empty")
    if len(text.text) > limits.document_bytes or len(text.text.encode()) > limits.document_bytes:
        return Skipped(text.name, "too_large")
    return text


def decode(raw: bytes) -> str:
    """Text of bytes: UTF-16 with its mark, UTF-8, otherwise Windows-1252 for mostly ASCII text. Raises _Refused."""
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        try:
            return raw.decode("utf-16")
        except UnicodeDecodeError:
            raise _Refused("encoding") from None
    if b"\0" in raw:
        raise _Refused("binary")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        pass
    stray = sum(byte > 127 for byte in raw[: 1 << 16])
    if stray > _MOST_STRAY * min(len(raw), 1 << 16):
        raise _Refused("encoding")
    try:
        return raw.decode("cp1252")
    except UnicodeDecodeError:
        raise _Refused("encoding") from None


def tidy(text: str) -> str:
    """Composed Unicode without lone surrogates, control characters and trailing blanks; lines end with \\n."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\x0c", "\n").encode("utf-8", "replace").decode()
    text = unicodedata.normalize("NFC", _CONTROLS.sub("", text.replace("\0", "")))
    return "\n".join(line.rstrip() for line in text.split("\n")).strip("\n")


def extract_here(format: str, raw: bytes) -> Extracted | str:
    """Text of a page or a PDF by native parsers, in this process. See `Extract`."""
    return _pdf(raw) if format == "pdf" else _html(raw)


def _html(raw: bytes) -> Extracted | str:
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.encoding import bytes_to_str, detect_encoding
    from resiliparse.parse.html import HTMLTree

    page = bytes_to_str(raw, detect_encoding(raw))
    tree = HTMLTree.parse(page)
    text = extract_plain_text(tree, main_content=True, alt_texts=False, preserve_formatting=True)
    return Extracted(text, tree.title or "")


def _pdf(raw: bytes) -> Extracted | str:
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(raw)
    except pypdfium2.PdfiumError as error:
        return "encrypted" if "password" in str(error).lower() else "damaged"
    try:
        pages = [page.get_textpage().get_text_bounded() for page in document]
        title = document.get_metadata_value("Title")
    except pypdfium2.PdfiumError:
        return "damaged"
    finally:
        document.close()
    return Extracted("\n\n".join(pages), title)


# ---------------------------------------------------------------------------------------------------------------------
# Files with many documents


def _container(
    file: IO[bytes], kind: FileType, name: str, limits: LimitConfig, field: str, extract: Extract
) -> Iterator[Found]:
    room = _room(file, limits)
    if kind.format == "jsonl":
        yield from _jsonl(_Bounded(_decompressed(file, kind.compression), room, room), name, limits, field)
    elif name.lower().endswith((".zip", ".whl")):
        with zipfile.ZipFile(file) as archive:
            yield from _members(_zip(archive, limits, room), name, limits, extract)
    else:
        short = {"tgz": ".gz", "tbz2": ".bz2", "txz": ".xz"}.get(name.lower().rpartition(".")[2], "")
        stream = _Bounded(_decompressed(file, kind.compression or short), room, limits.document_bytes)
        with tarfile.open(fileobj=cast(IO[bytes], stream), mode="r:") as archive:
            yield from _members(_tar(archive, limits), name, limits, extract)


Member = tuple[str, "bytes | None"]
"""Name and content of a file in an archive; None for one that is too large."""


def _zip(archive: zipfile.ZipFile, limits: LimitConfig, room: int) -> Iterator[Member]:
    entries = archive.infolist()
    if len(entries) > limits.members:
        raise _Refused("too_many_members")
    for entry in sorted(entries, key=lambda entry: entry.filename):
        if entry.is_dir() or file_type(entry.filename) is None:
            continue
        if entry.flag_bits & 1:
            raise _Refused("encrypted")
        try:
            with archive.open(entry) as file:
                raw = file.read(limits.document_bytes + 1)
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError):
            raise _Refused("damaged") from None
        room -= len(raw)
        if room < 0:
            raise _Refused("bomb")
        yield entry.filename, raw if len(raw) <= limits.document_bytes else None


def _tar(archive: tarfile.TarFile, limits: LimitConfig) -> Iterator[Member]:
    for count, entry in enumerate(archive):
        if count >= limits.members:
            raise _Refused("too_many_members")
        archive.members.clear()  # type: ignore[attr-defined]  # it would remember every entry
        if not entry.isreg() or file_type(entry.name) is None:
            continue
        if entry.size > limits.document_bytes:
            yield entry.name, None
            continue
        file = archive.extractfile(entry)
        yield entry.name, file.read() if file is not None else b""


def _members(members: Iterator[Member], name: str, limits: LimitConfig, extract: Extract) -> Iterator[Found]:
    for inner, raw in members:
        plain = PurePosixPath(inner.encode("utf-8", "replace").decode()).as_posix()
        place, kind = f"{name}!{plain}", file_type(inner)
        if any(part.startswith(".") for part in plain.split("/")) or kind is None:
            continue
        if raw is None:
            yield Skipped(place, "too_large")
        elif kind.format in ("archive", "warc", "jsonl", "parquet", "dictionary"):
            yield Skipped(place, "nested")
        elif raw:
            stream = _decompressed(io.BytesIO(raw), kind.compression)
            room = limits.document_bytes + limits.expansion * len(raw)
            try:
                yield _text(place, _Bounded(stream, room, limits.document_bytes).rest(), kind, limits, extract)
            except _Refused as refusal:
                yield Skipped(place, str(refusal))
            except (OSError, EOFError, zlib.error, lzma.LZMAError):
                yield Skipped(place, "damaged")


def _jsonl(stream: _Bounded, name: str, limits: LimitConfig, field: str) -> Iterator[Found]:
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
        yield _document(Text(place, tidy(text), "prose", "jsonl", None, known), limits)


def _dictionary(path: Path, content: bytes, name: str, limits: LimitConfig) -> Iterator[Found]:
    """Entries of a dictionary in the format of dictd: the index beside it has headword, start and length per line."""
    try:
        with _opened(path.with_name(path.name.partition(".dict")[0] + ".index"), limits.input_bytes) as file:
            lines = file.read().decode("utf-8", "replace").splitlines()
    except _Refused:
        yield Skipped(name, "damaged")
        return
    spans = dict[tuple[int, int], str]()
    for line in lines:
        headword, *numbers = line.split("\t")
        if (
            len(numbers) == 2
            and not headword.startswith("00database")
            and all(set(n) <= _BASE64.keys() for n in numbers)
        ):
            spans.setdefault((_number(numbers[0]), _number(numbers[1])), headword)
    for (start, length), headword in sorted(spans.items()):
        place, raw = f"{name}:{headword[:100]}", content[start : start + length]
        try:
            yield _document(
                Text(place, tidy(decode(raw)), "prose", "dictionary", None, {"title": headword[:200]}), limits
            )
        except _Refused as refusal:
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
            yield _document(Text(f"{name}:{row}", tidy(document.text), "prose", "parquet", None, more), limits)
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
    room, number = _room(file, limits), 0
    records = ArchiveIterator(file, record_types=wanted, parse_http=True, auto_decode="all")
    for number, record in enumerate(records, 1):
        place = f"{name}:{number}"
        raw = record.reader.read(limits.document_bytes + 1)
        room -= len(raw)
        if room < 0:
            raise _Refused("bomb")
        kind = html if record.record_type == WarcRecordType.response else plain
        content = (record.http_content_type or "text/html") if kind is html else "text/plain"
        if content not in ("text/html", "application/xhtml+xml", "text/plain"):
            continue
        if len(raw) > limits.document_bytes:
            yield Skipped(place, "too_large")
            continue
        more = {"url": (record.headers.get("WARC-Target-URI") or "")[:500]}
        if kind is html and content != "text/plain":
            yield _extracted(place, raw, kind, limits, extract, more)
            continue
        try:
            yield _document(Text(place, tidy(decode(raw)), "web", "warc", None, more), limits)
        except _Refused as refusal:
            yield Skipped(place, str(refusal))
    if not number:
        yield Skipped(name, "empty")
