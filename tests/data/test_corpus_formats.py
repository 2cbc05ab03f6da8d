"""Untrusted files: every format is read within its limits, and what cannot be used is skipped for the right reason."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import subprocess
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest

from glm5.config.corpus import CorpusRecipe, LimitConfig, SourceConfig
from glm5.data.corpus import formats, plan
from glm5.data.corpus.formats import texts
from glm5.data.corpus.kinds import FileType, file_type
from glm5.data.corpus.plan import list_inputs, make_plan, planned, source_counts
from glm5.data.corpus.text import REASONS, Extracted, Skipped, Text, decode, tidy
from glm5.errors import DataError

LIMITS = LimitConfig(document_bytes=100_000, input_bytes=1 << 20, members=50)
TEXT = "Plain words, über alles.\n"


def extracted(format: str, raw: bytes) -> Extracted | str:
    return Extracted(f"{format} of {len(raw)} bytes", "A title")


def read(path: Path, limits: LimitConfig = LIMITS) -> list[Text | Skipped]:
    return list(texts(path, path.name, limits, "text", extracted))


def reasons(path: Path, limits: LimitConfig = LIMITS) -> list[str]:
    found = read(path, limits)
    assert all(isinstance(one, Skipped) and one.reason in REASONS for one in found), found
    return [one.reason for one in found if isinstance(one, Skipped)]


def tar(members: dict[str, bytes], mode: str = "w:gz") -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return raw.getvalue()


def zipped(members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return raw.getvalue()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a/README", FileType("text", "prose")),
        ("changelog.Debian.gz", FileType("text", "prose", ".gz")),
        ("index.HTML", FileType("html", "web")),
        ("main.rs", FileType("text", "code", "", "Rust")),
        ("CMakeLists.txt", FileType("text", "code", "", "CMake")),
        ("x.tar.xz", FileType("archive", None, ".xz")),
        ("x.warc.gz", FileType("warc", "web", ".gz")),
        ("x.parquet", FileType("parquet", "prose")),
        ("picture.png", None),
        ("x.parquet.gz", None),
        ("data.json", None),
    ],
)
def test_files_are_known_by_their_names(name: str, expected: FileType | None) -> None:
    assert file_type(name) == expected


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("a.txt", lambda raw: raw),
        ("a.txt.gz", gzip.compress),
        ("a.txt.gz", lambda raw: gzip.compress(raw[:9]) + gzip.compress(raw[9:])),
        ("a.txt.bz2", bz2.compress),
        ("a.txt.xz", lzma.compress),
        ("a.txt.xz", lambda raw: lzma.compress(raw[:9]) + b"\0" * 8 + lzma.compress(raw[9:])),
        ("a.txt", lambda raw: raw.decode().encode("utf-16")),
        ("a.txt", lambda raw: b"\xef\xbb\xbf" + raw),
        ("a.txt", lambda raw: raw.decode().encode("cp1252")),
    ],
)
def test_text_is_read_from_every_compression_and_encoding(
    name: str, pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(pack(TEXT.encode()))
    assert read(path) == [Text(name, TEXT.strip(), "prose", "text")]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.tar.gz", tar({"x/b.md": b"b", "x/a.py": b"a", "pic.png": b"\0"})),
        ("a.tar", tar({"x/b.md": b"b", "x/a.py": b"a", ".hidden/x.md": b"x"}, "w")),
        ("a.tgz", tar({"x/b.md": b"b", "x/a.py": b"a"})),
        ("a.tar.xz", tar({"x/b.md": b"b", "x/a.py": b"a"}, "w:xz")),
    ],
)
def test_archives_give_their_files(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    assert read(tmp_path / name) == [
        Text(f"{name}!x/b.md", "b", "prose", "text"),
        Text(f"{name}!x/a.py", "a", "code", "text", "Python"),
    ]


def test_zip_files_html_and_records(tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_bytes(zipped({"p/z.py": b"z = 1", "p/a.html": b"<p>x"}))
    lines = [{"text": "one", "url": "u", "license": "MIT"}, {"text": 5}, ["x"], {"text": " "}]
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode() + b"\n{bad\n"))
    assert read(tmp_path / "a.whl") == [
        Text("a.whl!p/a.html", "html of 4 bytes", "web", "html", None, {"title": "A title"}),
        Text("a.whl!p/z.py", "z = 1", "code", "text", "Python"),
    ]
    assert read(tmp_path / "b.jsonl.gz") == [
        Text("b.jsonl.gz:1", "one", "prose", "jsonl", None, {"url": "u", "license": "MIT"}),
        Skipped("b.jsonl.gz:2", "malformed"),
        Skipped("b.jsonl.gz:3", "malformed"),
        Skipped("b.jsonl.gz:4", "empty"),
        Skipped("b.jsonl.gz:5", "malformed"),
    ]


def test_what_is_known_of_a_document_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"text": "x", "url": "u\ud800", "license": "\udfff", "path": "\udc00"})
    )
    (found,) = read(tmp_path / "a.jsonl")
    assert isinstance(found, Text) and found.more == {"url": "u?", "license": "?", "path": "?"}


def _pax_bomb() -> bytes:
    """A tar whose extended header claims, and has, 8 MB."""
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 8 << 20
    return gzip.compress(info.tobuf() + b"\0" * (8 << 20))


def _encrypted() -> bytes:
    raw = bytearray(zipped({"a.txt": b"secret"}))
    for sign, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        raw[raw.index(sign) + at] |= 1
    return bytes(raw)


def _patched(offset: int, value: bytes) -> bytes:
    """A zip with other bytes in its central directory."""
    raw = bytearray(zipped({"a.txt": b"hello"}))
    at = raw.rfind(b"PK\x01\x02") + offset
    raw[at : at + len(value)] = value
    return bytes(raw)


def _bzip2_bomb() -> bytes:
    raw = bytearray(zipped({"b.txt": b"a" * (24 << 20)}, zipfile.ZIP_BZIP2))
    for sign, at in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        at += raw.rindex(sign)
        raw[at : at + 4] = (100).to_bytes(4, "little")
    return bytes(raw)


def _sparse(**headers: str) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as archive:
        entry = tarfile.TarInfo("a.txt")
        entry.pax_headers = {f"GNU.sparse.{name}": value for name, value in headers.items()}
        archive.addfile(entry)
    return raw.getvalue()


WIDE = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 30}]
HOSTILE: dict[str, tuple[str, bytes, list[str]]] = {
    "gzip bomb": ("a.txt.gz", gzip.compress(b"a" * (24 << 20)), ["too_large"]),
    "gzip bomb in a PDF": ("a.pdf.gz", gzip.compress(b"a" * (24 << 20)), ["too_large"]),
    "bzip2 bomb": ("a.md.bz2", bz2.compress(b"a" * (24 << 20)), ["bomb"]),
    "xz that asks for a gigabyte": ("a.md.xz", lzma.compress(b"a", filters=WIDE), ["bomb"]),
    "tar bomb": ("a.tar.gz", tar({f"{n}.txt": b"a" * 90_000 for n in range(40)}), ["bomb"]),
    "tar with a huge header": ("a.tar.gz", _pax_bomb(), ["bomb"]),
    "zip bomb": ("a.zip", zipped({f"{n}.txt": b"a" * 99_000 for n in range(49)}), ["bomb"]),
    "zip of a bomb": ("a.zip", zipped({"b.txt": b"a" * (24 << 20)}), ["too_large"]),
    "zip of a gzip bomb": ("a.zip", zipped({"b.txt.gz": gzip.compress(b"a" * (24 << 20))}), ["too_large"]),
    "zip of a bzip2 bomb": ("a.zip", zipped({"b.txt": b"a" * (24 << 20)}, zipfile.ZIP_BZIP2), ["too_large"]),
    "zip of a bzip2 bomb that claims to be small": ("a.zip", _bzip2_bomb(), ["unsupported_compression"]),
    "many members": ("a.zip", zipped({f"{n}.txt": b"a" for n in range(51)}), ["too_many_members"]),
    "many members in a tar": ("a.tar.gz", tar({f"{n}.png": b"" for n in range(51)}), ["too_many_members"]),
    "nested archive": ("a.zip", zipped({"b.zip": zipped({"c.txt": b"c"})}), ["nested"]),
    "encrypted zip": ("a.zip", _encrypted(), ["encrypted"]),
    "cut off gzip": ("a.txt.gz", gzip.compress(os.urandom(5000))[:-2000], ["damaged"]),
    "cut off tar": ("a.tar.gz", tar({"a.txt": os.urandom(5000)})[:-2000], ["damaged"]),
    "cut off xz": ("a.txt.xz", lzma.compress(os.urandom(5000))[:-2000], ["damaged"]),
    "zip with a name that is not UTF-8": (
        "a.zip",
        zipped({"é.txt": b"hello"}).replace("é".encode(), b"\xff\xfe"),
        ["damaged"],
    ),
    "zip of a later version": ("a.zip", _patched(6, b"\x63"), ["damaged"]),
    "tar with a bad sparse map": ("a.tar", _sparse(map="0,x", size="5"), ["damaged"]),
    "tar with a bad sparse size": ("a.tar", _sparse(size="q"), ["damaged"]),
    "no zip": ("a.zip", b"PK\x03\x04 nothing", ["damaged"]),
    "binary": ("a.txt", b"text\0more", ["binary"]),
    "broken encoding": ("a.txt", bytes(range(128, 256)) * 9, ["encoding"]),
    "half of UTF-16": ("a.txt", b"\xff\xfea\xd8", ["encoding"]),
    "blank": ("a.txt", b" \n\t\r\n", ["empty"]),
    "too large": ("a.txt", b"a" * 100_001, ["too_large"]),
    "deep JSON": ("a.jsonl", b"[" * 90_000, ["malformed"]),
    "long line": ("a.jsonl", b'"' + b"a" * 300_000 + b'"', ["too_large"]),
    "endless line": ("a.jsonl.gz", gzip.compress(b"a" * (24 << 20)), ["bomb"]),
    "parquet": ("a.parquet", b"PAR1 nothing", ["damaged"]),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_skipped_for_their_reason_in_little_memory(case: str, tmp_path: Path) -> None:
    name, content, expected = HOSTILE[case]
    (tmp_path / name).write_bytes(content)
    tracemalloc.start()
    try:
        found = [one.reason for one in read(tmp_path / name) if isinstance(one, Skipped)]
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    finally:
        tracemalloc.stop()
    assert found == expected


def test_entries_of_a_dictionary_may_overlap_only_within_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.dict").write_bytes(b"one two " * 100)
    index = tmp_path / "a.index"
    index.write_text("00database\tA\tD\none\tA\tD\ntwo\tE\tD\nuno\tA\tD\n" + "x" * 5000 + "\tE\tD\n")
    assert [(one.name, one.text) for one in read(tmp_path / "a.dict") if isinstance(one, Text)] == [
        ("a.dict:one", "one"),
        ("a.dict:two", "two"),
    ]
    index.write_text("".join(f"w\tA\t{a}{b}\n" for a in "FGHIJKLM" for b in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
    found = read(tmp_path / "a.dict", limits := LimitConfig(document_bytes=1000, expansion=5))
    assert found[-1] == Skipped("a.dict", "bomb")
    assert sum(len(one.text) for one in found if isinstance(one, Text)) < 5000
    monkeypatch.setattr(formats, "_MOST_ENTRIES", 100)
    assert reasons(tmp_path / "a.dict", limits) == ["too_many_members"]
    with index.open("w") as file:
        file.truncate(100 << 20)
    assert reasons(tmp_path / "a.dict", limits) == ["too_large"]
    index.unlink()
    assert reasons(tmp_path / "a.dict") == ["damaged"]


@hypothesis.given(
    st.sampled_from(["a.txt", "a.zip", "a.tar", "a.tar.gz", "a.tgz", "a.txt.xz", "a.jsonl", "a.md.bz2", "a.parquet"]),
    st.binary(max_size=300),
    st.sampled_from(
        [b"", b"PK\x03\x04", b"\x1f\x8b\x08", b"\xfd7zXZ\x00", b"BZh9", b"PAR1", b'{"text": "', b"\xff\xfe"]
    ),
)
@hypothesis.settings(max_examples=150, deadline=None)
def test_no_content_raises(tmp_path_factory: pytest.TempPathFactory, name: str, tail: bytes, head: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(head + tail)
    for one in read(path):
        assert isinstance(one, Text) or one.reason in REASONS
        if isinstance(one, Text):
            one.text.encode()


def test_text_is_tidied() -> None:
    assert tidy("a \r\nb\rc\x07\0\x0cd\ud800\n\n") == "a\nb\nc\nd?"
    assert tidy("e\u0301") == "é"
    assert decode("naïve".encode("cp1252")) == "naïve"


def recipe(tmp_path: Path, **sources: Path) -> CorpusRecipe:
    return CorpusRecipe(
        name="c", tasks=3, sources=[{"name": name, "path": str(path)} for name, path in sources.items()]
    )


def test_the_plan_lists_every_file_once_and_follows_no_link(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "sub" / ".git").mkdir(parents=True)
    for name, size in (
        ("a.txt", 50),
        ("b.py", 30),
        ("sub/c.html", 20),
        ("sub/.git/d.txt", 9),
        ("e.png", 5),
        ("f.md", 0),
    ):
        (root / name).write_bytes(b"x" * size)
    (root / "loop").symlink_to(root)
    (root / "out.txt").symlink_to("/etc/passwd")
    os.mkfifo(root / "pipe.txt")
    (root / os.fsdecode(b"bad\xff.txt")).write_bytes(b"x" * 7)
    out = tmp_path / "out"
    make_plan(recipe(tmp_path, s=root), out)
    parts = [[one.name for one in planned(out, part)] for part in range(3)]
    assert parts == [["s/a.txt"], ["s/b.py"], ["s/bad\ufffd.txt", "s/sub/c.html"]]
    skipped = {"empty": 1, "link": 2, "special": 1, "unsupported": 1}
    assert source_counts(out) == {"s": {"files": 4, "bytes": 107, "skipped": skipped}}
    (root / "b.py").write_bytes(b"changed")
    with pytest.raises(DataError, match="has changed"):
        planned(out, 1)[0].check()


def test_the_plan_is_the_same_for_any_order_of_the_file_system(tmp_path: Path) -> None:
    plans = []
    for names in (range(40), reversed(range(40))):
        root = tmp_path / f"root{len(plans)}"
        root.mkdir()
        for n in names:
            (root / f"{n}.txt").write_bytes(b"x" * (n % 7 + 1))
        make_plan(recipe(tmp_path, s=root), out := tmp_path / f"out{len(plans)}")
        plans.append([[one.name for one in planned(out, part)] for part in range(3)])
    assert plans[0] == plans[1]
    assert len({name for part in plans[0] for name in part}) == 40


@pytest.mark.parametrize(
    ("path", "where"), [("git:click", "."), ("git:click@HEAD", "."), ("git:.", "click"), ("git:.git", "click")]
)
def test_a_clone_has_its_own_name_however_it_is_given(
    path: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = tmp_path / "click"
    clone.mkdir()
    (clone / "a.py").write_text("x = 1\n")
    run = ["git", "-C", str(clone), "-c", "user.name=x", "-c", "user.email=x"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*run, *command], check=True)
    monkeypatch.chdir(tmp_path / where)
    assert [one.repository for one in list_inputs(SourceConfig(name="s", path=path))[0]] == ["click"]


def test_repositories_are_one_input_each_and_large_ones_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_MOST_REPOSITORY", 100)
    for name in ("a/x.py", "a/sub/y.py", "a+b/z.py", "top.py"):
        (tmp_path / "s" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "s" / name).write_bytes(b"x" * 60)
    source = {"name": "s", "path": str(tmp_path / "s"), "repositories": True}
    make_plan(CorpusRecipe.model_validate({"name": "c", "tasks": 1, "sources": [source]}), tmp_path / "out")
    found = {one.name: [member.name for member in one.members] for one in planned(tmp_path / "out", 0)}
    assert found == {"s/a": ["s/a/sub/y.py"], "s/a+1": ["s/a/x.py"], "s/a+b": ["s/a+b/z.py"], "s/top.py": []}


@pytest.mark.parametrize("missing", ["nothing", "empty"])
def test_a_source_without_files_is_an_error(missing: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="source"):
        make_plan(recipe(tmp_path, s=tmp_path / missing), tmp_path / "out")
