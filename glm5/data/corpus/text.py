"""Documents of a corpus, and the formats that hold one each: text, HTML, PDF."""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from glm5.config.corpus import Kind, LimitConfig
from glm5.data.corpus.formulas import show_formulas
from glm5.data.corpus.kinds import FileType
from glm5.data.corpus.streams import Refused

REASONS = {
    "unreadable": "the file cannot be opened",
    "too_large": "more bytes than the limit",
    "bomb": "expands to more than the limit",
    "too_many_members": "an archive of more files than the limit",
    "nested": "an archive in an archive",
    "damaged": "not what its name says, or cut off",
    "binary": "contains NUL bytes",
    "encoding": "neither UTF-8 nor UTF-16 nor Latin text",
    "no_code": "neither name nor content says that it is code",
    "empty": "no text",
    "timeout": "extraction took too long",
    "crashed": "extraction died or ran out of memory",
    "malformed": "a record without text",
    "encrypted": "needs a password",
    "unsupported_compression": "in a zip file, neither stored nor deflated",
}
"""Why a file or a record is skipped."""

_MOST_STRAY = 0.3  # share of non-ASCII bytes in Latin text without declared encoding
_MOST_MARKS, _SHORT = 30, 1000
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
    """Text of a page or a PDF, its title, and how many formulas of a page became TeX."""

    text: str
    title: str = ""
    formulas: int = 0


def one_document(name: str, raw: bytes, kind: FileType, limits: LimitConfig, extract: Extract) -> Found:
    """The document in a text file, a page or a PDF."""
    if kind.format in ("html", "pdf"):
        return extracted_document(name, raw, kind, limits, extract, {})
    try:
        text = tidy(decode(raw))
    except Refused as refusal:
        return Skipped(name, str(refusal))
    return checked(Text(name, text, kind.kind or "prose", kind.format, kind.code), limits)


def extracted_document(
    name: str, raw: bytes, kind: FileType, limits: LimitConfig, extract: Extract, more: dict[str, Any]
) -> Found:
    """The document in a page or a PDF; `more` is what else is known about it."""
    found = extract(kind.format, raw)
    if isinstance(found, str):
        return Skipped(name, found)
    more = more | ({"title": found.title[:200]} if found.title else {})
    more = more | ({"formulas": found.formulas} if found.formulas else {})
    return checked(Text(name, tidy(found.text), kind.kind or "prose", kind.format, None, more), limits)


def checked(text: Text, limits: LimitConfig) -> Found:
    """The document, what is known about it tidied, unless it is empty or too large."""
    if not text.text:
        return Skipped(text.name, "empty")
    if len(text.text) > limits.document_bytes or len(text.text.encode()) > limits.document_bytes:
        return Skipped(text.name, "too_large")
    known = {key: tidy(value) if isinstance(value, str) else value for key, value in text.more.items()}
    return replace(text, more=known)


def decode(raw: bytes) -> str:
    """Text of bytes: UTF-16 with its mark, UTF-8, otherwise Windows-1252 for mostly ASCII text. Raises Refused."""
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        try:
            return raw.decode("utf-16")
        except UnicodeDecodeError:
            raise Refused("encoding") from None
    if b"\0" in raw:
        raise Refused("binary")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        pass
    stray = sum(byte > 127 for byte in raw[: 1 << 16])
    if stray > _MOST_STRAY * min(len(raw), 1 << 16):
        raise Refused("encoding")
    try:
        return raw.decode("cp1252")
    except UnicodeDecodeError:
        raise Refused("encoding") from None


def tidy(text: str) -> str:
    """Composed Unicode without lone surrogates, control characters and trailing blanks; lines end with \\n. Of
    combining marks in a row 30 stay."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\x0c", "\n").encode("utf-8", "replace").decode()
    text = unicodedata.normalize("NFC", _few_marks(_CONTROLS.sub("", text.replace("\0", ""))))
    return "\n".join(line.rstrip() for line in text.split("\n")).strip("\n")


def _few_marks(text: str) -> str:
    """The text in Unicode's stream-safe form (UAX #15): normal forms put the combining marks of a letter in order, in a
    time that grows with the square of their number."""
    if len(text) < _SHORT or text.isascii():
        return text
    codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
    marks = _combining()[codes]
    if np.count_nonzero(marks) <= _MOST_MARKS:
        return text
    places = np.arange(len(codes), dtype=np.int32)
    run = places - np.maximum.accumulate(np.where(marks, np.int32(-1), places))
    few = run <= _MOST_MARKS
    return text if few.all() else codes[few].tobytes().decode("utf-32-le")


@cache
def _combining() -> np.ndarray:
    """Whether each character of Unicode is a combining mark, [n] bool."""
    return np.fromiter((unicodedata.combining(chr(code)) > 0 for code in range(sys.maxunicode + 1)), bool)


def extract_here(format: str, raw: bytes) -> Extracted | str:
    """Text of a page or a PDF by native parsers, in this process. See `Extract`."""
    return _pdf(raw) if format == "pdf" else _html(raw)


def _html(raw: bytes) -> Extracted | str:
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.encoding import bytes_to_str, detect_encoding
    from resiliparse.parse.html import HTMLTree

    page = bytes_to_str(raw, detect_encoding(raw) or "utf-8")
    tree = HTMLTree.parse(page)
    formulas = show_formulas(tree)
    text = extract_plain_text(tree, main_content=True, alt_texts=False, preserve_formatting=True)
    return Extracted(text, tree.title or "", formulas)


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
