"""Documents from files: which are read, in which order, which are held out, and what hostile files can do (nothing)."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from glm5.data import readers
from glm5.data.sources import Document, ReadReport, iter_sources, read_source, read_sources
from glm5.errors import DataError, MissingExtraError


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


def test_stdlib_is_real_text_without_tests_and_installed_packages(monkeypatch, tmp_path: Path) -> None:
    found = {document.path: document.text for document in read_source("stdlib")}
    root = Path(sysconfig.get_paths()["stdlib"])
    for name in ("argparse.py", "json/decoder.py"):
        assert found[name] == (root / name).read_text(encoding="utf-8")
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    assert not [path for path in found if skipped.intersection(path.split("/"))]
    assert len(found) > 400
    assert list(found) == sorted(found, key=lambda path: path.split("/"))

    # The same rules on a folder where we know that each of the skipped parts exists.
    kept = {"a.py": "a", "pkg/b.py": "b", "pkg/testing.py": "c"}
    lost = {f"{part}/x.py": "x" for part in skipped} | {f"pkg/{part}/x.py": "x" for part in skipped}
    write(tmp_path, kept | lost | {"notes.txt": "not Python", "blank.py": " \n"})
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert {document.path: document.text for document in read_source("stdlib")} == kept


def test_a_folder_gives_its_text_files_in_a_fixed_order(tmp_path: Path) -> None:
    kept = {"b.txt": "two", "a/z.md": "one", "c.rs": "three"}
    write(tmp_path, kept | {".git/config.txt": "x", "a/.hidden.py": "x", "image.png": "x", "blank.md": "\n \n"})
    assert [(d.path, d.text) for d in read_source(str(tmp_path))] == [
        ("a/z.md", "one"), ("b.txt", "two"), ("c.rs", "three"),
    ]  # fmt: skip


def test_a_file_is_one_document_and_bad_bytes_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "odd.unknown"
    path.write_bytes(b"caf\xe9 ok")
    assert list(read_source(str(path))) == [Document("odd.unknown", "caf\ufffd ok")]


def test_missing_and_empty_sources_are_data_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="neither a file nor a folder"):
        list(read_source(str(tmp_path / "absent")))
    with pytest.raises(DataError, match="contain no text file"):
        read_sources([str(tmp_path)])
    write(tmp_path, {"a.txt": "x"})
    both = read_sources([str(tmp_path), str(tmp_path / "a.txt")])
    assert [document.path for document in both] == ["a.txt", "a.txt"]


def test_the_held_out_split_is_a_function_of_the_path_alone() -> None:
    paths = [f"pkg{i}/module_{i % 7}.py" for i in range(3000)]
    held_out = [path for path in paths if Document(path, "any text").held_out]
    assert held_out == [p for p in paths if int(hashlib.sha256(p.encode()).hexdigest(), 16) % 50 == 0]
    assert 30 <= len(held_out) <= 90  # 60 expected, standard deviation 7.7
    assert all(Document(path, "other text").held_out for path in held_out)


def test_folders_do_not_lead_out_of_themselves(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write(root, {"a/real.txt": "inside", "z.txt": "last"})
    write(tmp_path, {"secret.txt": "outside", "more/b.txt": "outside too"})
    (root / "a" / "inner.txt").symlink_to(root / "z.txt")
    (root / "out.txt").symlink_to(tmp_path / "secret.txt")
    (root / "up.txt").symlink_to("../secret.txt")
    (root / "more").symlink_to(tmp_path / "more")
    (root / "a" / "loop").symlink_to(root)
    (root / "dangling.txt").symlink_to("nowhere")
    os.mkfifo(root / "pipe.txt")
    report = ReadReport()
    found = list(iter_sources([str(root)], report))
    assert [(d.path, d.text) for d in found] == [("a/inner.txt", "last"), ("a/real.txt", "inside"), ("z.txt", "last")]
    assert (report.sources[0].links, report.sources[0].documents) == (2, 3)
    # The folder itself may be a link.
    (tmp_path / "alias").symlink_to(root)
    assert list(read_source(str(tmp_path / "alias"))) == found


def test_files_that_are_no_text(tmp_path: Path) -> None:
    write(tmp_path, {"ok.txt": "a", "dos.md": "a\r\nb\rc\n", "big.py": "x" * 11, "blank.txt": " \n"})
    (tmp_path / "binary.txt").write_bytes(b"PK\0\1")
    with open(os.fsencode(tmp_path) + b"/caf\xe9.txt", "wb") as file:
        file.write(b"n\xe9e")
    report = ReadReport()
    found = list(iter_sources([str(tmp_path)], report, max_record_bytes=10))
    assert [(d.path, d.text) for d in found] == [
        ("caf\ufffd.txt", "n\ufffde"),
        ("dos.md", "a\nb\nc\n"),
        ("ok.txt", "a"),
    ]
    assert isinstance(found[0].held_out, bool)
    entry = report.sources[0]
    assert (entry.documents, entry.empty, entry.binary, entry.bad, entry.records) == (3, 1, 1, 1, 6)
    assert [str(bad) for bad in report.bad] == [f"{tmp_path / 'big.py'}: it has more than 10 bytes"]
    with pytest.raises(DataError, match="split it into several files"):
        list(iter_sources([str(tmp_path / "big.py")], max_record_bytes=10))
    with pytest.raises(DataError, match=r"contain no text file \(1 binary left out\)"):
        read_sources([str(tmp_path / "binary.txt")])


def test_deeply_nested_folders(tmp_path: Path) -> None:
    deep = tmp_path
    for _ in range(400):
        deep = deep / "d"
    deep.mkdir(parents=True)
    (deep / "x.txt").write_text("bottom", encoding="utf-8")
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(300)
    try:
        assert [d.text for d in read_source(str(tmp_path))] == ["bottom"]
    finally:
        sys.setrecursionlimit(limit)


def test_reports_say_what_was_read(tmp_path: Path) -> None:
    write(tmp_path, {"one/a.txt": "first", "one/b.txt": "zwölf", "two/a.txt": "first"})
    report = ReadReport()
    found = list(iter_sources([str(tmp_path / "one"), str(tmp_path / "two")], report))
    one, two = (source.plain() for source in report.sources)
    assert (one["documents"], one["bytes"], two["documents"]) == (2, 5 + 6, 1)
    digest = hashlib.sha256()
    for document in found[:2]:
        digest.update(hashlib.sha256(document.path.encode()).digest() + hashlib.sha256(document.text.encode()).digest())
    assert one["sha256"] == digest.hexdigest() != two["sha256"]
    assert "revision" not in one


GOOD: list[tuple[Callable[[int], bytes], Callable[[int], tuple[str, str]]]] = [
    (lambda n: b'{"text": "t%d"}' % n, lambda n: (f"x.jsonl:{n}", f"t{n}")),
    (lambda n: b'  {"text": "t%d", "id": %d}\r' % (n, n), lambda n: (str(n), f"t{n}")),
    (lambda n: b'{"id": "i", "path": "p/%d", "text": "\xc3\xa9\\ud83d\\ude00"}' % n, lambda n: (f"p/{n}", "é😀")),
    (lambda n: b'{"id": "", "path": null, "text": "a\\u2028b"}', lambda n: (f"x.jsonl:{n}", "a\u2028b")),
]
BAD = [
    (b"{", "not JSON"),
    (b"\xff\xfe", "not UTF-8"),
    (b'{"text": "caf\xe9"}', "not UTF-8"),
    (b'{"text": "\\ud800"}', "not Unicode"),
    (b'{"text": "a", "path": "\\udfff"}', "not Unicode"),
    (b'["text"]', "not a JSON object"),
    (b"17", "not a JSON object"),
    (b'{"content": "x"}', 'no text in the field "text"'),
    (b'{"text": ["x"]}', 'no text in the field "text"'),
    (b'{"text": "a", "id": [1]}', 'the field "id"'),
    (b'{"text": "a" "id": 1}', "not JSON"),
    (b'{"text": "a\0b"}', "not JSON"),
    (b'{"text": "' + b"x" * 200 + b'"}', "more than 120 bytes"),
    (b"1" * 110, "not a JSON object"),
]
LINES = st.lists(
    st.one_of(
        st.tuples(st.just("good"), st.integers(0, len(GOOD) - 1)),
        st.tuples(st.just("bad"), st.integers(0, len(BAD) - 1)),
        st.tuples(st.just("blank"), st.integers(0, 2)),
        st.tuples(st.just("empty"), st.just(0)),
    ),
    max_size=30,
)


@given(lines=LINES, ended=st.booleans(), bom=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_jsonl_line_by_line(tmp_path: Path, lines: list[tuple[str, int]], ended: bool, bom: bool) -> None:
    raw, documents, bad = [], [], []
    for number, (kind, index) in enumerate(lines, 1):
        if kind == "good":
            raw.append(GOOD[index][0](number))
            documents.append(Document(*GOOD[index][1](number)))
        elif kind == "bad":
            raw.append(BAD[index][0])
            bad.append((number, BAD[index][1]))
        else:
            raw.append((b"", b"  ", b"\r")[index] if kind == "blank" else b'{"text": " "}')
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" * bom + b"\n".join(raw) + b"\n" * ended)
    report = ReadReport(max_bad=len(bad))
    assert list(iter_sources([str(path)], report, max_record_bytes=120)) == documents
    assert [b.where for b in report.bad] == [f"{path}:{number}" for number, _ in bad]
    for found, (_, reason) in zip(report.bad, bad, strict=True):
        assert reason in found.reason
    entry = report.sources[0]
    assert (entry.bad, entry.empty) == (len(bad), sum(kind == "empty" for kind, _ in lines))
    if bad:
        with pytest.raises(DataError, match=rf"more than the {len(bad) - 1} that --max-bad allows") as caught:
            list(iter_sources([str(path)], ReadReport(max_bad=len(bad) - 1), max_record_bytes=120))
        assert f"{path}:{bad[0][0]}: " in str(caught.value) and "\n" not in str(caught.value)


@given(content=st.binary(max_size=300))
@example(b"\xef\xbb\xbf")
@example(b"[" * 200_000)
@example(b'{"a":' * 200_000)
@example(b'{"text": "a", "id": ' + b"9" * 10_000 + b"}")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_read_or_reported(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.ndjson"
    path.write_bytes(content)
    report = ReadReport(max_bad=10_000)
    assert len(list(iter_sources([str(path)], report))) == 0
    assert report.sources[0].bad == len(
        [line for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip()]
    )


@pytest.mark.parametrize("ended", [True, False])
def test_a_huge_line_is_never_in_memory(tmp_path: Path, ended: bool) -> None:
    path = tmp_path / "huge.jsonl"
    with path.open("wb") as file:  # a sparse file: 32 megabytes in one line
        file.write(b'{"text": "before"}\n{"text": "')
        file.seek(1 << 25)
        file.write(b'"}\n{"text": "after"}' if ended else b"x")
    report = ReadReport()
    tracemalloc.start()
    try:
        found = list(iter_sources([str(path)], report, max_record_bytes=1 << 20))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [d.text for d in found] == (["before", "after"] if ended else ["before"])
    assert [str(bad) for bad in report.bad] == [f"{path}:2: the line has more than 1,048,576 bytes"]
    assert peak < 8 << 20


def test_malformed_records_are_tolerated_up_to_a_share(tmp_path: Path) -> None:
    def read(good: int, bad: int, max_bad: int | None = None) -> ReadReport:
        path = tmp_path / "x.jsonl"
        path.write_text('{"text": "a"}\n' * good + "{\n" * bad, encoding="utf-8")
        report = ReadReport(max_bad)
        assert len(list(iter_sources([str(path)], report))) == good
        return report

    assert read(0, 10).sources[0].bad == 10
    with pytest.raises(DataError, match=r"^11 of the first 11 records .* the 10 .*:1: .*:2: .*:3: .*; …\. Repair"):
        read(0, 11)
    assert read(19_980, 20).sources[0].bad == 20  # the 20th is record 20,000
    with pytest.raises(DataError, match="20 of the first 19,999 records"):
        read(19_979, 20)
    with pytest.raises(DataError, match="1 of the first 1,001 records"):
        read(1000, 1, max_bad=0)
    report = read(0, 150, max_bad=150)
    assert (report.sources[0].bad, len(report.bad)) == (150, 100)


def test_the_field_is_named_behind_the_file(tmp_path: Path) -> None:
    write(tmp_path, {"x.jsonl": '{"body": "b", "text": "t"}', "y#z.txt": "hash", "x.jsonl#odd": "file"})
    path = str(tmp_path / "x.jsonl")
    assert [d.text for d in read_source(path + "#body")] == ["b"]
    assert [d.text for d in read_source(path)] == ["t"]
    assert [d.text for d in read_source(path + "#odd")] == ["file"]  # what exists is meant
    assert [d.text for d in read_source(str(tmp_path / "y#z.txt"))] == ["hash"]
    with pytest.raises(DataError, match="neither a file nor a folder"):
        list(read_source(str(tmp_path / "y.txt#text")))


def parquet(path: Path, columns: dict[str, Any], group: int = 3) -> str:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table(columns), path, row_group_size=group, compression=None)
    return str(path)


def test_parquet_row_by_row(tmp_path: Path) -> None:
    texts = ["a", "é\u2028", None, " ", "x" * 21, "b", "c", "d"]
    source = parquet(
        tmp_path / "x.parquet",
        {"text": texts, "body": [f"b{i}" for i in range(8)], "id": [7, 8, 9, 10, 11, 12, None, 14], "n": [1.0] * 8},
    )
    report = ReadReport()
    found = list(iter_sources([source], report, max_record_bytes=20))
    assert [(d.path, d.text) for d in found] == [
        ("7", "a"), ("8", "é\u2028"), ("12", "b"), ("x.parquet:row 7", "c"), ("14", "d"),
    ]  # fmt: skip
    assert [str(bad) for bad in report.bad] == [
        f'{source}:row 3: no text in the field "text"',
        f"{source}:row 5: it has more than 20 bytes",
    ]
    assert report.sources[0].empty == 1
    assert [d.text for d in read_source(source + "#body")] == [f"b{i}" for i in range(8)]
    for column in ("n", "absent"):
        with pytest.raises(DataError, match=rf'no column "{column}" of strings \(columns of strings: text, body\)'):
            list(read_source(f"{source}#{column}"))


def test_parquet_names_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    broken = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0\4\0\0\0"), pa.py_buffer(b"ok\xff\xff")]
    )
    source = parquet(tmp_path / "x.parquet", {"text": broken, "path": ["a/b", "c"], "id": [[1], [2]]})
    report = ReadReport()
    assert [(d.path, d.text) for d in iter_sources([source], report)] == [("a/b", "ok")]
    assert [str(bad) for bad in report.bad] == [f"{source}:row 2: not UTF-8"]


def test_parquet_is_read_one_row_group_after_the_other(tmp_path: Path) -> None:
    source = Path(parquet(tmp_path / "x.parquet", {"text": ["a" * 500] * 3 + ["b" * 500] * 3}))
    column = pytest.importorskip("pyarrow.parquet").read_metadata(source).row_group(1).column(0)
    raw = bytearray(source.read_bytes())
    at = column.dictionary_page_offset or column.data_page_offset
    raw[at : at + 16] = b"\xff" * 16
    source.write_bytes(raw)
    found = []
    with pytest.raises(DataError, match="damaged after row 3"):
        for document in read_source(str(source)):
            found.append(document.text)
    assert found == ["a" * 500] * 3
    source.write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(DataError, match="not a parquet file"):
        list(read_source(str(source)))


def test_long_parquet_rows_are_decoded_one_by_one(tmp_path: Path) -> None:
    """A dictionary makes 32 rows of 1 MB of a file of 1 MB."""
    pa = pytest.importorskip("pyarrow")
    source = parquet(tmp_path / "x.parquet", {"text": ["a" * (1 << 20)] * 32}, group=32)
    assert Path(source).stat().st_size < 3 << 20
    before = pa.total_allocated_bytes()
    held = [pa.total_allocated_bytes() - before for _ in read_source(source)]
    assert len(held) == 32 and max(held) < 8 << 20


def test_a_parquet_file_cannot_hold_any_amount_of_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dictionary repeats one long text in any number of rows."""
    monkeypatch.setattr(readers, "_MOST_TEXT", 1 << 20)
    source = parquet(tmp_path / "x.parquet", {"text": ["a" * (1 << 18)] * 400}, group=400)
    found = read_source(source)
    with pytest.raises(DataError, match="more than 256 times its size in text by row"):
        for _ in range(400):
            next(found)
    honest = parquet(tmp_path / "y.parquet", {"text": [f"{i} {'word ' * 40}" for i in range(500)]})
    assert len(list(read_source(honest))) == 500


def test_parquet_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "x.parquet").write_bytes(b"")
    with pytest.raises(MissingExtraError, match=r"pip install 'glm5\[data\]'"):
        list(read_source(str(tmp_path / "x.parquet")))


def test_jsonl_equals_what_json_says(tmp_path: Path) -> None:
    texts = ["plain", 'quotes " and \\', "line\nend", "tab\tnul\0", "日本語 😀", "a\u2028\u0085b"]
    path = tmp_path / "x.jsonl"
    for ascii_only in (True, False):
        path.write_text("".join(json.dumps({"text": t}, ensure_ascii=ascii_only) + "\n" for t in texts), "utf-8")
        assert [d.text for d in read_source(str(path))] == texts
