"""Hostile files for the readers of a corpus, made here: what each is called, what is in it, and what may become of it.

Outcomes are the reasons of `glm5.data.corpus.text.REASONS`, "text" for a document that is read, and nothing for a file
that has no text files in it.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from glm5.config.corpus import LimitConfig

LIMITS = LimitConfig(document_bytes=1 << 20, input_bytes=8 << 20, members=50, seconds=10.0, memory=512 << 20)
WORDS = b"A few plain words, which any reader can read. " * 8
NOISE = random.Random(5).randbytes(8000)
MANY = 24 << 20
ZEROS = b"a" * MANY
"""More bytes than a document may have."""
NOTHING = frozenset[str]()
TEXT_OR_NOTHING = frozenset({"text", ""})


@dataclass(frozen=True)
class Hostile:
    """A file and the outcomes that it may have."""

    name: str
    content: bytes
    outcomes: frozenset[str]


Cases = Iterator[tuple[str, str, "bytes | str", "str | frozenset[str]"]]
"""What it is, file name, content, outcomes (alternatives by |)."""


def hostile_files(make: Callable[[], Cases]) -> dict[str, Hostile]:
    """The files of one of MAKERS, by what they are."""
    found: dict[str, Hostile] = {}
    for what, name, content, outcomes in make():
        assert what not in found, what
        raw = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
        found[what] = Hostile(name, raw, frozenset(outcomes.split("|")) if isinstance(outcomes, str) else outcomes)
    return found


def encodings() -> Cases:
    plain, japanese = WORDS.decode(), "これは日本語の文章です。" * 40
    yield "NUL bytes", "a.txt", b"\0" * 5000, "binary"
    yield "a NUL byte in text", "a.txt", WORDS + b"\0" + WORDS, "binary"
    yield "half a character of UTF-16", "a.txt", b"\xff\xfea\0b", "encoding"
    yield "half a surrogate pair of UTF-16", "a.txt", b"\xff\xfea\0\x00\xd8b\0", "encoding"
    yield "big-endian UTF-16", "a.txt", b"\xfe\xff" + plain.encode("utf-16-be"), "text"
    yield "UTF-16 without its mark", "a.txt", plain.encode("utf-16-le"), "binary"
    yield "UTF-32", "a.txt", plain.encode("utf-32"), "text|encoding|binary"
    yield "UTF-7", "a.txt", b"+AGE-+2Ezc-x " * 90, "text"
    yield "overlong UTF-8", "a.txt", WORDS + b"\xc0\xaf\xe0\x80\xaf" + WORDS, "text|encoding"
    yield "surrogates in UTF-8", "a.txt", WORDS + b"\xed\xa0\x80" + WORDS, "text|encoding"
    yield "UTF-8 beyond Unicode", "a.txt", WORDS + b"\xf5\x90\x80\x80" + WORDS, "encoding|text"
    yield "a byte that no encoding has", "a.txt", WORDS + b"\x81\x8d" + WORDS, "encoding"
    yield "cut off UTF-8", "a.txt", japanese.encode()[:-1], "encoding"
    yield "cut off UTF-8 in ASCII", "a.txt", WORDS + b"\xe3\x81", "text|encoding"
    yield "all bytes", "a.txt", bytes(range(1, 256)) * 40, "encoding"
    yield "random bytes", "a.md", NOISE, "binary|encoding"
    for name in ("shift_jis", "euc_jp", "iso2022_jp"):
        yield f"Japanese in {name}", "a.txt", japanese.encode(name), "text" if name == "iso2022_jp" else "encoding"
    for name, text in (
        ("gb18030", "这是中文。" * 90),
        ("euc_kr", "한국어 글. " * 90),
        ("koi8_r", "Это по-русски. " * 90),
    ):
        yield f"text in {name}", "a.txt", text.encode(name), "encoding"
    yield "EBCDIC", "a.txt", plain.encode("cp037"), "encoding"
    yield "Latin text declared as nothing", "a.txt", ("Élève à l'école. " * 40).encode("latin-1"), "text"


def texts() -> Cases:
    yield "endless word", "a.txt", "x" * 1_000_000, "text"
    yield "endless line", "a.md", "word " * 200_000, "text"
    yield "endless line of code", "a.py", "x=1;" * 250_000, "text"
    yield "line ends only", "a.txt", "\n\r\r\n" * 200_000, "empty"
    yield "control characters only", "a.txt", bytes(range(1, 32)) * 900, "empty"
    yield "a character per line", "a.txt", "x\n" * 500_000, "text"
    yield "marks of marks", "a.txt", "e" + "\u0301\u0316" * 250_000, "text"
    yield "marks without a letter", "a.txt", "\u0316\u0301\u0327" * 150_000, "text"
    yield "marks of one sort", "a.txt", "e" + "\u0301" * 500_000, "text"
    yield "letters to compose", "a.txt", "\u1100\u1161\u11a8" * 100_000, "text"
    yield "letters that grow", "a.txt", "\ufdfa\u1f82\u0390" * 100_000, "text"
    yield "bidi controls", "a.py", "x = 1 # \u202e\u2066 if admin \u2069\u2066 begin\n" * 900, "text"
    yield "unclosed bidi embeddings", "a.txt", "\u202a\u202b\u2067" * 100_000 + "x", "text"
    yield "invisible characters", "a.txt", "a\u200b\u2060\ufeff\u00ad\U000e0041" * 30_000, "text"
    yield "no characters", "a.txt", "a\uffff\ufdd0\U0010ffff\ue000" * 20_000, "text"
    yield "terminal sequences", "a.txt", "\x1b[2J\x1b]0;title\x07text\x9b31m" * 9000, "text"
    yield "separators of lines", "a.txt", "a\u2028b\u2029c\x85d\x0be\x0cf" * 20_000, "text"
    yield "larger than a document", "a.txt", b"a" * ((1 << 20) + 1), "too_large"
    yield "larger once it is UTF-8", "a.txt", "é".encode("latin-1") + b"a" * ((1 << 20) - 1), "too_large|encoding"
    yield "code of brackets", "a.c", "{" * 500_000, "text"


def compressed() -> Cases:
    squeezed = gzip.compress(NOISE)
    yield "gzip bomb", "a.txt.gz", gzip.compress(ZEROS), "too_large"
    yield "gzip bomb of many members", "a.txt.gz", gzip.compress(b"a" * (1 << 20)) * 60, "too_large"
    yield "gzip of gzip bomb", "a.txt.gz", gzip.compress(gzip.compress(ZEROS)), "binary|encoding"
    yield "empty gzip members", "a.txt.gz", gzip.compress(b"") * 40_000, "empty"
    yield "cut off gzip", "a.txt.gz", squeezed[:-2000], "damaged"
    yield "gzip without its end", "a.txt.gz", gzip.compress(WORDS)[:-8], "damaged"
    yield "gzip of another length", "a.txt.gz", gzip.compress(WORDS)[:-4] + b"\xff\xff\xff\x7f", "damaged"
    yield "gzip of another sum", "a.txt.gz", gzip.compress(WORDS)[:-8] + b"abcd" + gzip.compress(WORDS)[-4:], "damaged"
    yield "gzip with rubbish behind", "a.txt.gz", gzip.compress(WORDS) + NOISE, "damaged"
    yield "gzip with an endless name", "a.txt.gz", b"\x1f\x8b\x08\x08" + bytes(6) + b"n" * 900_000, "damaged"
    yield (
        "gzip with a huge extra field",
        "a.txt.gz",
        b"\x1f\x8b\x08\x04" + bytes(6) + b"\xff\xff" + b"x" * 99,
        "damaged",
    )
    yield "only the mark of gzip", "a.txt.gz", b"\x1f\x8b", "damaged"
    yield "no gzip", "a.txt.gz", WORDS, "damaged"
    yield "bzip2 bomb", "a.txt.bz2", bz2.compress(ZEROS), "bomb|too_large"
    yield "cut off bzip2", "a.txt.bz2", bz2.compress(NOISE)[:-2000], "damaged"
    yield "no bzip2", "a.txt.bz2", b"BZh9" + NOISE, "damaged"
    yield "xz bomb", "a.txt.xz", lzma.compress(ZEROS), "bomb|too_large"
    wide = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 30}]
    yield "xz that asks for a gigabyte", "a.txt.xz", lzma.compress(b"a", filters=wide), "bomb"
    yield "cut off xz", "a.txt.xz", lzma.compress(NOISE)[:-2000], "damaged"
    yield "xz of another sum", "a.txt.xz", lzma.compress(WORDS)[:-30] + NOISE[:30], "damaged"
    yield "no xz", "a.txt.xz", b"\xfd7zXZ\0" + NOISE, "damaged"


def _zip(members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytearray:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return bytearray(raw.getvalue())


def _with_sizes(raw: bytearray, size: int, method: int | None = None) -> bytes:
    """The last entry of a zip with another size and method in both of its headers."""
    for sign, at in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        start = raw.rindex(sign) + at
        if method is not None:
            raw[start : start + 2] = struct.pack("<H", method)
        raw[start + 14 : start + 18] = struct.pack("<I", size)
    return bytes(raw)


def _overlapping(entries: int) -> bytes:
    """A zip whose entries all name the same compressed bytes."""
    raw = _zip({"a.txt": b"a" * 900_000})
    directory = raw.rindex(b"PK\x01\x02")
    entry, rest = bytes(raw[directory:-22]), bytes(raw[:directory])
    named = b"".join(entry.replace(b"a.txt", f"{n:05d}".encode()[:1] + b".txt") for n in range(entries))
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, entries, entries, len(named), directory, 0)
    return rest + named + end


def zips() -> Cases:
    yield "zip bomb", "a.zip", bytes(_zip({f"{n}.txt": b"a" * 1_000_000 for n in range(49)})), "text|bomb"
    yield "zip of a bomb", "a.zip", bytes(_zip({"b.txt": ZEROS})), "too_large"
    yield "zip of a gzip bomb", "a.zip", bytes(_zip({"b.txt.gz": gzip.compress(ZEROS)})), "too_large"
    yield "zip of entries that overlap", "a.zip", _overlapping(40), "bomb|damaged|text"
    yield "zip that claims to be small", "a.zip", _with_sizes(_zip({"b.txt": ZEROS}), 100), "damaged"
    yield "zip that claims to be huge", "a.zip", _with_sizes(_zip({"b.txt": WORDS}), 0xFFFFFFF0), "too_large|damaged"
    for method, what in ((12, "bzip2"), (14, "lzma")):
        found = _with_sizes(_zip({"b.txt": ZEROS}, method), 100)
        yield f"zip of a bomb of {what} that claims to be small", "a.zip", found, "unsupported_compression"
    for method, what in ((93, "zstd"), (95, "xz"), (98, "PPMd"), (99, "AES"), (7, "nothing known")):
        raw = _with_sizes(_zip({"b.txt": WORDS}), len(WORDS), method)
        yield f"zip with {what}", "a.zip", raw, "unsupported_compression|damaged"
    yield "zip of many files", "a.zip", bytes(_zip({f"{n}.png": b"" for n in range(60_000 // 30)})), "too_many_members"
    yield "zip in a zip", "a.zip", bytes(_zip({"b.zip": bytes(_zip({"c.txt": WORDS}))})), "nested"
    above = {"../../b.txt": WORDS, "/etc/c.txt": WORDS, "C:\\d.txt": WORDS, "..\\e.txt": WORDS}
    yield "zip with paths that lead out", "a.zip", bytes(_zip(above)), TEXT_OR_NOTHING
    yield (
        "zip with odd names",
        "a.zip",
        bytes(_zip({"a\nb.txt": WORDS, "\u202egpj.txt": WORDS, "x" * 255: b""})),
        "text",
    )
    yield "zip with a name of 60,000 bytes", "a.zip", bytes(_zip({"x" * 60_000 + ".txt": WORDS})), "text"
    raw = _zip({"é.txt": WORDS})
    yield "zip with a name that is not UTF-8", "a.zip", bytes(raw.replace("é".encode(), b"\xff\xfe")), "damaged"
    yield "cut off zip", "a.zip", bytes(_zip({"b.txt": NOISE}))[:-900], "damaged"
    yield "zip without a directory", "a.zip", bytes(_zip({"b.txt": WORDS}))[:60], "damaged"
    yield (
        "zip with rubbish inside",
        "a.zip",
        bytes(_zip({"b.txt": NOISE}).replace(NOISE[40:80], NOISE[:40])),
        "damaged|binary|encoding",
    )
    yield "only the mark of zip", "a.zip", b"PK\x03\x04", "damaged"
    yield "an encrypted zip", "a.zip", _encrypted(), "encrypted"
    yield "wheel of nothing", "a.whl", bytes(_zip({})), NOTHING


def _encrypted() -> bytes:
    raw = _zip({"a.txt": b"secret"})
    for sign, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        raw[raw.index(sign) + at] |= 1
    return bytes(raw)


def _tar(*entries: tarfile.TarInfo | tuple[str, bytes], format: int = tarfile.GNU_FORMAT) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=format) as archive:
        for one in entries:
            entry, content = (tarfile.TarInfo(one[0]), one[1]) if isinstance(one, tuple) else (one, b"")
            entry.size = len(content) or entry.size
            archive.addfile(entry, io.BytesIO(content) if content else None)
    return raw.getvalue()


def _entry(name: str, type: bytes, link: str = "", size: int = 0) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname, entry.size = type, link, size
    return entry


def _pax(name: str = "a.txt", **headers: str) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.pax_headers = {key.replace("_", "."): value for key, value in headers.items()}
    return _tar(entry, format=tarfile.PAX_FORMAT)


def tars() -> Cases:
    plain = _tar(("b.txt", WORDS))
    yield "tar bomb", "a.tar.gz", gzip.compress(_tar(*((f"{n}.txt", b"a" * 900_000) for n in range(40)))), "text|bomb"
    yield "tar of a large file", "a.tar.gz", gzip.compress(_tar(("b.txt", ZEROS))), "too_large|bomb"
    yield "tar of many files", "a.tar", _tar(*((f"{n}.png", b"") for n in range(60))), "too_many_members"
    out = [("../../b.txt", WORDS), ("/etc/c.txt", WORDS), ("x/../../d.txt", WORDS)]
    yield "tar with paths that lead out", "a.tar", _tar(*out), TEXT_OR_NOTHING
    links = [_entry("a.txt", kind, "/etc/passwd") for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE)]
    yield "tar of links", "a.tar", _tar(*links), NOTHING
    circle = [_entry("a.txt", tarfile.LNKTYPE, "b.txt"), _entry("b.txt", tarfile.LNKTYPE, "a.txt")]
    yield "tar of links in a circle", "a.tar", _tar(*circle), NOTHING
    kinds = (tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE)
    yield "tar of devices", "a.tar", _tar(*(_entry(f"{n}.txt", kind) for n, kind in enumerate(kinds))), NOTHING
    for kind, what in (
        (tarfile.XHDTYPE, "header"),
        (tarfile.XGLTYPE, "global header"),
        (tarfile.GNUTYPE_LONGNAME, "name"),
    ):
        bomb = _entry("x", kind, size=MANY).tobuf(tarfile.GNU_FORMAT) + ZEROS
        yield f"tar with a huge {what}", "a.tar.gz", gzip.compress(bomb), "bomb|damaged"
    yield "tar with a sparse map of nothing", "a.tar", _pax(GNU_sparse_map="0,x", GNU_sparse_size="5"), "damaged"
    yield "tar with a sparse size of nothing", "a.tar", _pax(GNU_sparse_size="q"), "damaged"
    yield (
        "tar with a sparse file of a terabyte",
        "a.tar",
        _pax(GNU_sparse_map="0,0", GNU_sparse_size=str(1 << 40)),
        "too_large|damaged",
    )
    yield "tar with a size of nothing", "a.tar", _pax(size="x"), NOTHING
    yield "tar with a size below nothing", "a.tar", _pax(size="-5"), NOTHING
    yield "cut off tar", "a.tar", _tar(("b.txt", NOISE))[:4000], "damaged"
    yield "tar of another sum", "a.tar", plain.replace(b"b.txt", b"c.txt", 1), "damaged"
    yield "no tar", "a.tar", NOISE, "damaged"
    yield "tar that is packed in secret", "a.tar", gzip.compress(plain), "damaged"
    yield "tar in a tar", "a.tar", _tar(("b.tar", plain)), "nested"
    yield "tar with names that are no text", "a.tar", plain.replace(b"b.txt", b"\xff\n.txt"[:5], 1), "damaged"


def pages() -> Cases:
    def page(inner: str) -> str:
        return f"<html><head><title>T</title></head><body><main><p>{WORDS.decode()}</p>{inner}</main></body></html>"

    # What the native parser cannot do in time or memory is counted, whatever it is.
    some = "text|timeout|crashed|damaged|empty"
    for tag in (
        "div",
        "b",
        "table",
        "svg",
        "ul><li",
        "template",
        "select",
        "math",
        "math><mrow",
        "sub",
        "span class=katex",
    ):
        yield f"page of nested <{tag}>", "a.html", page(f"<{tag}>" * (900_000 // (len(tag) + 2) // 4)), some
    yield "page of tags that must be rebuilt", "a.html", page("<b><i><a href=x><div>" * 3000), some
    yield "page of unclosed formatting", "a.html", page("<font size=1><p>" * 20_000), some
    yield "page of formulas", "a.html", page("<math><mi>x</mi></math><sub>1</sub>" * 9000), "text"
    yield "page of annotations", "a.html", page("<math>" + "<annotation>x" * 30_000), some
    yield "page of attributes", "a.html", page("<p " + " ".join(f"a{n}=1" for n in range(90_000)) + ">x"), some
    yield "page with an endless attribute", "a.html", page('<p title="' + "x" * 900_000), some
    yield "page with an endless comment", "a.html", page("<!--" + "-" * 900_000), some
    yield "page of character references", "a.html", page("&#x;&#xD800;&#1114112;&amp&notanentity;&" * 20_000), some
    yield "page of plain text", "a.html", page("<plaintext>" + "<p>" * 200_000), some
    yield "page of titles", "a.html", "<title>" * 100_000, some
    yield "page of scripts", "a.html", page("<script>" + "<!--<script>" * 60_000), some
    yield "page without an end", "a.html", page("")[:-40] + "<", "text"
    yield "page with NUL bytes", "a.html", page("\0" * 9000), some
    yield "page of a lying encoding", "a.html", b'<meta charset="utf-16">' + page("").encode(), some
    yield "page in UTF-7", "a.html", b'<meta charset="utf-7">' + page("+ADw-script+AD4-").encode(), some
    yield "page of random bytes", "a.html", NOISE, some
    yield "page of frames", "a.html", "<frameset>" * 50_000, some
    yield "page of nothing", "a.html", "<html></html>", "empty"
    yield "page bomb", "a.html.gz", gzip.compress(b"<p>a" * (8 << 20)), "too_large"
    yield (
        "page of pictures in its text",
        "a.html",
        page('<img src="data:image/png;base64,' + "A" * 900_000 + '">'),
        "text",
    )


def pdf(*objects: bytes, trailer: bytes = b"/Root 1 0 R") -> bytes:
    """A PDF of these objects, with the table of their places."""
    out, places = b"%PDF-1.7\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    size = len(objects) + 1
    table = b"xref\n0 %d\n0000000000 65535 f \n%s" % (size, table)
    return out + table + b"trailer\n<</Size %d%s>>\nstartxref\n%d\n%%%%EOF\n" % (size, trailer, len(out))


def _stream(content: bytes, more: bytes = b"") -> bytes:
    return b"<</Length %d%s>>\nstream\n%s\nendstream" % (len(content), more, content)


CATALOG, PAGES = b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Kids[3 0 R]/Count 1>>"
PAGE = (
    b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 900 800]/Contents 4 0 R"
    b"/Resources<</Font<</F1 5 0 R>>/XObject<</X 4 0 R>>>>>>"
)
FONT = b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"
DRAWN = b"BT /F1 10 Tf 12 TL 40 780 Td (Plain words of a page.) Tj ET"


def pdfs() -> Cases:
    some = "text|timeout|crashed|damaged|empty|encrypted"
    whole = pdf(CATALOG, PAGES, PAGE, _stream(DRAWN), FONT)
    yield "PDF of one page", "a.pdf", whole, "text"
    yield "only the mark of PDF", "a.pdf", b"%PDF-1.7\n", "damaged"
    yield "no PDF", "a.pdf", NOISE, "damaged"
    yield "cut off PDF", "a.pdf", whole[: len(whole) // 2], some
    yield "PDF without its table", "a.pdf", whole[: whole.index(b"xref")] + b"trailer<</Root 1 0 R>>", some
    yield "PDF with places of nothing", "a.pdf", whole.replace(b"0000000", b"9999999"), some
    yield (
        "PDF whose start is its end",
        "a.pdf",
        whole[: whole.rindex(b"startxref")] + b"startxref\n99999999999\n%%EOF",
        some,
    )
    yield "PDF of pages in a circle", "a.pdf", pdf(CATALOG, b"<</Type/Pages/Kids[2 0 R 2 0 R]/Count 1000000>>"), some
    kids = b" ".join([b"3 0 R"] * 3000)
    yield (
        "PDF of one page 3,000 times",
        "a.pdf",
        pdf(CATALOG, b"<</Type/Pages/Kids[%s]/Count 3000>>" % kids, PAGE, _stream(DRAWN), FONT),
        some,
    )
    yield (
        "PDF of a billion pages",
        "a.pdf",
        pdf(CATALOG, b"<</Type/Pages/Kids[3 0 R]/Count 1000000000>>", PAGE, _stream(DRAWN), FONT),
        some,
    )
    yield (
        "PDF of fewer pages than none",
        "a.pdf",
        pdf(CATALOG, b"<</Type/Pages/Kids[3 0 R]/Count -7>>", PAGE, _stream(DRAWN), FONT),
        some,
    )
    form = _stream(b"/X Do", b"/Type/XObject/Subtype/Form/BBox[0 0 1 1]/Resources<</XObject<</X 4 0 R>>>>")
    yield "PDF that draws itself", "a.pdf", pdf(CATALOG, PAGES, PAGE, form, FONT), some
    yield (
        "PDF whose length is a circle",
        "a.pdf",
        pdf(CATALOG, PAGES, PAGE, b"<</Length 4 0 R>>\nstream\nq\nendstream", FONT),
        some,
    )
    yield (
        "PDF of a huge length",
        "a.pdf",
        pdf(CATALOG, PAGES, PAGE, _stream(DRAWN).replace(b"Length ", b"Length 99999999"), FONT),
        some,
    )
    bomb = zlib.compress(b" " * (256 << 20), 9)
    yield "PDF bomb", "a.pdf", pdf(CATALOG, PAGES, PAGE, _stream(bomb, b"/Filter/FlateDecode"), FONT), some
    twice = zlib.compress(bomb)
    yield (
        "PDF bomb in a bomb",
        "a.pdf",
        pdf(CATALOG, PAGES, PAGE, _stream(twice, b"/Filter[/FlateDecode/FlateDecode]"), FONT),
        some,
    )
    filters = b"/Filter[" + b"/ASCIIHexDecode" * 5000 + b"]"
    yield (
        "PDF of 5,000 filters",
        "a.pdf",
        pdf(CATALOG, PAGES, PAGE, _stream(DRAWN.hex().encode() + b">", filters), FONT),
        some,
    )
    yield "PDF of nested lists", "a.pdf", pdf(CATALOG, PAGES, b"[" * 200_000, _stream(DRAWN), FONT), some
    yield "PDF of nested states", "a.pdf", pdf(CATALOG, PAGES, PAGE, _stream(b"q " * 300_000 + DRAWN), FONT), some
    letters = b"BT /F1 1 Tf " + b"(aaaaaaaaaaaaaaaaaaaa) Tj " * 30_000 + b"ET"
    yield "PDF of one endless line", "a.pdf", pdf(CATALOG, PAGES, PAGE, _stream(letters), FONT), some
    locked = b"/Root 1 0 R/Encrypt<</Filter/Standard/V 1/R 2/O(%s)/U(%s)/P -1>>/ID[(a)(b)]" % (b"o" * 32, b"u" * 32)
    yield "PDF that needs a password", "a.pdf", pdf(CATALOG, PAGES, PAGE, _stream(DRAWN), FONT, trailer=locked), some
    yield (
        "PDF of a page without a size",
        "a.pdf",
        pdf(CATALOG, PAGES, PAGE.replace(b"900 800", b"1e999 -1e999"), _stream(DRAWN), FONT),
        some,
    )
    yield "PDF bomb in gzip", "a.pdf.gz", gzip.compress(ZEROS), "too_large|bomb"


def warc(head: str, body: bytes, type: str = "response") -> bytes:
    """A record; `head` may say anything about its length."""
    fixed = f"WARC/1.0\r\nWARC-Type: {type}\r\nWARC-Target-URI: http://a.example/\r\n"
    return f"{fixed}Content-Type: application/http; msgtype=response\r\n{head}\r\n\r\n".encode() + body


def _sized(body: bytes, type: str = "response") -> bytes:
    return warc(f"Content-Length: {len(body)}", body + b"\r\n\r\n", type)


def web_archives() -> Cases:
    html = b"Content-Type: text/html\r\n"
    ok, page = b"HTTP/1.1 200 OK\r\n", b"<p>" + WORDS
    good = _sized(ok + html + b"\r\n" + page)
    some = "text|empty|damaged|malformed|too_large|bomb|encoding|binary"
    yield "WARC of one page", "a.warc", good, "text"
    for said in ("99999999999", "-5", "1e9", "", "0x10", "9" * 400, "5"):
        body = ok + html + b"\r\n" + page
        yield f"WARC of a length {said[:12]!r}", "a.warc", warc(f"Content-Length: {said}", body) + good, some
    yield "WARC without a length", "a.warc", warc("X: y", ok + page) + good, some
    yield "cut off WARC", "a.warc", good[:-200], some
    yield "cut off WARC in gzip", "a.warc.gz", gzip.compress(good + NOISE)[:-3000], some
    yield "WARC bomb in gzip", "a.warc.gz", gzip.compress(_sized(ok + html + b"\r\n" + ZEROS)), "bomb|too_large"
    yield (
        "WARC of a bomb",
        "a.warc",
        _sized(ok + html + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(ZEROS)),
        "bomb|too_large",
    )
    for coding in ("br", "deflate", "zstd", "gzip, gzip", "x"):
        body = ok + html + f"Content-Encoding: {coding}\r\n\r\n".encode() + NOISE
        yield f"WARC with rubbish in {coding}", "a.warc", _sized(body), some
    for chunk in (b"FFFFFFFF\r\n", b"-1\r\n", b"zz\r\n", b"5" * 9000):
        body = ok + html + b"Transfer-Encoding: chunked\r\n\r\n" + chunk + page
        yield f"WARC of a chunk {chunk[:9]!r}", "a.warc", _sized(body), some
    yield "WARC with an endless header", "a.warc", b"WARC/1.0\r\n" + b"X-a: b\r\n" * 90_000, some
    yield "WARC with an endless header line", "a.warc", b"WARC/1.0\r\nX: " + b"a" * 900_000, some
    yield "WARC with an endless HTTP header", "a.warc", _sized(ok + b"X: " + b"a" * 900_000), some
    yield "WARC of nothing", "a.warc", b"", "empty"
    yield "WARC of empty records", "a.warc", _sized(b"") * 900, some
    yield "no WARC", "a.warc", NOISE, some
    yield "no WARC in gzip", "a.warc.gz", gzip.compress(NOISE), some
    yield "WARC with a URI that is no text", "a.warc", good.replace(b"a.example", b"\xff\xfe\x00"), some
    yield "WARC of text that is no text", "a.warc", _sized(NOISE, "conversion"), some
    yield "WARC of a picture", "a.warc", _sized(ok + b"Content-Type: image/png\r\n\r\n" + NOISE), NOTHING


def records() -> Cases:
    def line(value: object) -> str:
        return json.dumps({"text": value}) + "\n"

    yield "deep JSON lists", "a.jsonl", "[" * 900_000, "malformed"
    yield "deep JSON objects", "a.jsonl", '{"text":' * 100_000, "malformed"
    yield "JSON without an end", "a.jsonl", '{"text": "' + "a" * 900_000, "malformed"
    yield "a line of JSON that is too long", "a.jsonl", line("a" * (3 << 20)), "too_large"
    yield "endless line of JSON", "a.jsonl.gz", gzip.compress(ZEROS), "bomb|too_large"
    yield "a record larger than a document", "a.jsonl", line("a" * ((1 << 20) + 1)), "too_large"
    yield "numbers without an end", "a.jsonl", '{"text": ' + "9" * 900_000 + "}", "malformed"
    yield "numbers that are none", "a.jsonl", '{"text": NaN}\n{"text": -Infinity}\n{"text": 1e999}', "malformed"
    yield "JSON of other types", "a.jsonl", "".join(map(line, (None, 5, [], {}, True))) + '"x"\n[]\nnull', "malformed"
    yield "halves of surrogate pairs", "a.jsonl", '{"text": "\\ud800 words \\udfff", "url": "\\udc00"}', "text"
    yield "NUL characters in JSON", "a.jsonl", '{"text": "a\\u0000b\\u0007c"}', "text"
    yield "JSON with one key many times", "a.jsonl", "{" + '"text": "a",' * 50_000 + '"text": "b"}', "text"
    yield "JSON of many keys", "a.jsonl", "{" + ",".join(f'"k{n}": 1' for n in range(60_000)) + "}", "malformed"
    yield "JSON in UTF-16", "a.jsonl", line("words").encode("utf-16"), "malformed|text"
    yield "JSON that is not UTF-8", "a.jsonl", b'{"text": "\xff\xfe"}', "malformed"
    yield "JSON after a mark", "a.jsonl", b"\xef\xbb\xbf" + line("words").encode(), "text"
    yield "marks of marks in JSON", "a.jsonl", line("\u0301\u0316" * 60_000), "text"
    yield "lines of nothing", "a.jsonl", "\n" * 1_000_000, NOTHING
    yield "cut off JSON in gzip", "a.jsonl.gz", gzip.compress(line(NOISE.hex()).encode())[:-900], "damaged"
    yield "random JSON", "a.jsonl", NOISE, "malformed"


def tables() -> Cases:
    yield "only the marks of parquet", "a.parquet", b"PAR1" + NOISE + b"PAR1", "damaged"
    yield "no parquet", "a.parquet", NOISE, "damaged"
    yield "parquet of a huge footer", "a.parquet", b"PAR1" + NOISE + b"\xff\xff\xff\x7fPAR1", "damaged"
    yield "parquet of nothing", "a.parquet", b"", "damaged"
    if (write := _parquet()) is not None:
        whole = write({"text": ["words"] * 5})
        yield "cut off parquet", "a.parquet", whole[: len(whole) // 2], "damaged"
        yield (
            "parquet with rubbish inside",
            "a.parquet",
            whole[:4] + NOISE[: len(whole) // 3] + whole[4 + len(whole) // 3 :],
            "damaged|malformed",
        )
        yield "parquet without the column", "a.parquet", write({"other": ["words"]}), "damaged"
        yield "parquet of numbers", "a.parquet", write({"text": [1, 2]}), "damaged"
        yield "parquet of lists", "a.parquet", write({"text": [["a"]]}), "damaged"
        yield "parquet of nothing but gaps", "a.parquet", write({"text": ["words", None, ""]}), "text|malformed|empty"
        yield "parquet of bytes as text", "a.parquet", write({"text": [b"\xff\xfe"]}), "damaged"
        for packing in ("zstd", "gzip", "brotli", "snappy"):
            yield (
                f"parquet bomb of {packing}",
                "a.parquet",
                write({"text": [ZEROS.decode()] * 4}, compression=packing, use_dictionary=False),
                "too_large|damaged|malformed|bomb",
            )
        yield "parquet that repeats a text", "a.parquet", write({"text": ["a" * 900_000] * 200}), "text|damaged|bomb"


def _parquet() -> Callable[..., bytes] | None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return None

    def write(columns: dict[str, list[object]], **options: object) -> bytes:
        sink = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(pyarrow.table(columns), sink, **options)
        return bytes(sink.getvalue())

    return write


def dictionaries() -> Cases:
    yield "dictionary without an index", "a.dict", WORDS, "damaged"
    yield "dictionary bomb", "a.dict.dz", gzip.compress(ZEROS), "bomb|too_large|damaged"


MAKERS = (encodings, texts, compressed, zips, tars, pages, pdfs, web_archives, records, tables, dictionaries)
