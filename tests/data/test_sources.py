"""Documents from files: which are read, in which order, and which are held out."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import pytest

from glm5.data.sources import Document, read_source, read_sources
from glm5.errors import DataError


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
    with pytest.raises(DataError, match="hold no text file"):
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
