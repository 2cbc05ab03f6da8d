"""SWE rows from a small git history and a small Debian package: which changes count, and what a row shows."""

from __future__ import annotations

import importlib.util
import io
import json
import lzma
import random
import shutil
import tarfile
import tracemalloc
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from glm5.chat.tokenizer import Tokenizer
from glm5.config.corpus import ChangesConfig, LimitConfig, SourceConfig
from glm5.data.corpus.plan import Input, list_inputs
from glm5.data.corpus.text import Skipped, Text
from glm5.data.swe import related
from glm5.data.swe.change import Change
from glm5.data.swe.debian import archives, described, package_changes
from glm5.data.swe.history import History
from glm5.data.swe.inputs import rows
from glm5.data.swe.issues import Issues, linked, read_issues, without_trailers
from glm5.data.swe.patching import applied, parse_diff
from glm5.data.swe.related import Retriever, words
from glm5.data.swe.rows import REASONS, Rows
from glm5.errors import DataError
from tests.data.test_git import git, tree

TOKENIZER = Tokenizer.byte_level()
LONG = "The parser returns nothing at all if the last line of its input has no line end, so the final record is lost."
BODY = "def parse(text):\n    return text.split()\n"


def commit(root: Path, message: str, files: dict[str, str | None], **environment: str) -> str:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            (root / name).unlink()
        else:
            (root / name).write_text(content)
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", message, **environment)
    return git(root, "rev-parse", "HEAD")


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A repository with changes of every sort, and the hashes of its commits by what they are."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    root = tmp_path_factory.mktemp("history") / "repo"
    root.mkdir()
    git(root, "init", "-q")
    files = {"src/parse.py": BODY, "src/reader.py": "def records(parser, line_end):\n    return parser(line_end)\n"}
    files |= {"src/colour.py": "BLUE = 1\n", "README.md": "A package.\n", "LICENSE": "x", "poetry.lock": "1\n"}
    made = {"root": commit(root, "Start", dict(files))}
    fixed = BODY.replace("split()", "splitlines()")
    made["fix"] = commit(
        root, f"Parse the last line\n\n{LONG}\n\nFixes #12\n\nSigned-off-by: A B <a@b>", {"src/parse.py": fixed}
    )
    made["short"] = commit(root, "Tidy", {"src/colour.py": "BLUE = 2\n"})
    made["docs"] = commit(root, f"Say more\n\n{LONG}", {"README.md": "A good package.\n"})
    made["lock"] = commit(root, f"Lock\n\n{LONG}", {"poetry.lock": "2\n"})
    made["revert"] = commit(root, f'Revert "Tidy"\n\n{LONG}', {"src/colour.py": "BLUE = 1\n"})
    made["bot"] = commit(root, f"Change\n\n{LONG}", {"src/colour.py": "BLUE = 3\n"}, GIT_AUTHOR_NAME="dependabot[bot]")
    made["form"] = commit(root, f"Form\n\n<!-- {LONG} -->\n## What\n- [ ] tests", {"src/colour.py": "BLUE = 4\n"})
    git(root, "checkout", "-q", "-b", "topic")
    made["side"] = commit(root, f"First half\n\n{LONG}", {"src/new.py": "NEW = 1\n"})
    made["side2"] = commit(root, "Second half", {"src/new.py": "NEW = 2\n"})
    git(root, "checkout", "-q", "main")
    git(root, "merge", "-q", "--no-ff", "-m", "Merge pull request #13 from x/topic\n\nAdd a new module", "topic")
    made["request"] = git(root, "rev-parse", "HEAD")
    git(root, "checkout", "-q", "-b", "other")
    made["lone"] = commit(root, f"Lone\n\n{LONG}", {"src/new.py": "NEW = 3\n"})
    git(root, "checkout", "-q", "main")
    commit(root, "Between", {"src/colour.py": "BLUE = 5\n"})
    git(root, "merge", "-q", "--no-ff", "-m", "Merge branch 'other'", "other")
    return root, made


def made_rows(source: SourceConfig, **config: Any) -> dict[str, Text | Skipped]:
    """The rows of a source by the last part of their names."""
    changes = ChangesConfig(**config)
    maker = Rows(changes, read_issues(changes.issues, 1 << 20), TOKENIZER)
    found = list_inputs(source.model_copy(update={"changes": changes}))[0]
    return {row.name.rpartition("/")[2]: row for one in found for row in rows(one, maker, LimitConfig())}


def test_changes_of_a_history(history: tuple[Path, dict[str, str]]) -> None:
    root, made = history
    source = SourceConfig(name="s", path=f"git:{root}")
    found = made_rows(source)
    assert {sha[:12] for name, sha in made.items() if name not in ("root", "side", "side2")} < set(found)
    reasons = {name: found[made[name][:12]] for name in ("short", "docs", "lock", "revert", "bot", "form")}
    assert {name: row.reason for name, row in reasons.items() if isinstance(row, Skipped)} == {
        "short": "description_short", "docs": "no_code_changed", "lock": "no_text_changed",
        "revert": "revert", "bot": "bot", "form": "description_template",
    }  # fmt: skip
    assert {row.reason for row in found.values() if isinstance(row, Skipped)} <= set(REASONS)
    request = found[made["request"][:12]]
    assert isinstance(request, Text) and "Pull request #13: Add a new module\nFirst half\n" in request.text
    assert "+NEW = 2" in request.text and made["side"][:12] not in found
    assert isinstance(found[made["lone"][:12]], Text)
    skipped = list_inputs(source.model_copy(update={"changes": ChangesConfig()}))[1]
    assert skipped == {"first commit": 1, "commit of a pull request": 2, "merge": 1}
    newest = made_rows(source, newest=2)
    assert set(newest) < set(found) and len(newest) == 2


def test_a_row_shows_the_state_before(history: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    root, made = history
    issues = tmp_path / "issues.jsonl"
    row = {"number": 12, "title": "Records are lost", "body": f"With the reader: {LONG}", "user": {"login": "someone"}}
    issues.write_text(json.dumps(row) + "\n" + json.dumps({"number": 13, "title": "T", "pull_request": {}}) + "\n")
    found = made_rows(SourceConfig(name="s", path=f"git:{root}"), issues=[str(issues)], need_issue=True)
    text = found[made["fix"][:12]]
    assert isinstance(text, Text) and text.kind == "swe"
    own = text.text[text.more["own"] :]
    parts = ["Issue #12: Records are lost", "Commit: Parse the last line", "Diff:", "-    return text.split()"]
    places = [own.index(part) for part in parts]
    assert places == sorted(places) and places[0] == 0
    before = text.text[: text.more["own"]]
    assert f"File: src/parse.py\n{BODY.strip()}" in before and "splitlines" not in before
    assert "File: src/reader.py" in before and before.index("src/reader.py") < before.index("src/parse.py")
    assert "Signed-off-by" not in text.text and "a@b" not in text.text
    assert text.more["counts"] | {"tokens": 0} == {
        "changed_files_whole": 1,
        "related_files": 1,
        "issues": 1,
        "tokens": 0,
    }
    others = [row for name, row in found.items() if name != made["fix"][:12]]
    assert all(isinstance(row, Skipped) for row in others)
    # The diff makes of the file that the row shows the file of the commit.
    change = parse_diff(own)[0]
    with History(str(root), 1 << 20) as opened:
        assert applied(BODY, change) == opened.change(made["short"], "n", "r", Issues(), ChangesConfig()).tree.read(
            "src/parse.py"
        )  # type: ignore[union-attr]


def test_no_row_is_longer_than_its_budget(history: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    root = shutil.copytree(history[0], tmp_path / "copy")
    long = "".join(f"LINE_{n} = {n}\n" for n in range(300))
    commit(root, "Long file", {"src/long.py": long})
    sha = commit(root, f"Change it\n\n{LONG}", {"src/long.py": long.replace("LINE_150 = 150", "LINE_150 = 0")})
    states = {256: "over_budget", 700: "left_out", 1200: "in_part", 2000: "in_part", 6000: "whole"}
    for tokens, wanted in states.items():
        found = made_rows(SourceConfig(name="s", path=f"git:{root}"), tokens=tokens)
        for row in found.values():
            if isinstance(row, Text):
                assert len(TOKENIZER.encode(row.text)) <= row.more["counts"]["tokens"] <= tokens
        row = found[sha[:12]]
        if isinstance(row, Skipped):
            assert row.reason == wanted
        else:
            assert row.more["counts"].get(f"changed_files_{wanted}") == 1
            assert ("LINE_149" in row.text) and (("LINE_290 " in row.text) == (wanted == "whole"))


def test_a_hostile_change_is_counted(
    history: tuple[Path, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = shutil.copytree(history[0], tmp_path / "copy")
    blob = git(root, "rev-parse", "HEAD:src/new.py")
    long = tree(root, [f"100644 blob {blob}\t{'n' * 30_000}{n}.py" for n in range(5)])  # more than arguments may have
    sha = git(root, "commit-tree", long, "-p", "HEAD", "-m", "long names")
    wide = commit(root, "wide", {f"w{n}.py": f"{n}\n" * 3000 for n in range(2)})
    for name, size, limits, reason in (
        (sha, 1 << 20, {}, "too_many_files"), (wide, 1 << 20, {"most_files": 1}, "too_many_files"),
        (wide, 1 << 20, {}, "too_many_lines"), (wide, 8000, {"most_lines": 10_000}, "too_large"),
        (wide, 4000, {"most_lines": 10_000}, "no_text_changed"),
    ):  # fmt: skip
        with History(str(root), size) as opened:
            assert opened.change(name, "n", "r", Issues(), ChangesConfig(**limits)) == reason
    (root / ".git" / "info" / "grafts").write_text(f"{history[1]['root']} {history[1]['fix']}\n")
    with History(str(root), 1 << 20) as opened:
        assert history[1]["fix"] in opened.changes(None)[0]
        with pytest.raises(DataError, match="damaged"):
            opened._object("0" * 40, 1)
        assert opened.commit(history[1]["fix"]).title == "Parse the last line"  # by a process that was started anew
    fix = history[1]["fix"][:12]

    def fail(*_: Any) -> None:
        raise RecursionError

    for target in ("glm5.data.swe.history.linked", "glm5.data.swe.rows._around"):
        monkeypatch.setattr(target, fail)
        found = made_rows(SourceConfig(name="s", path=f"git:{history[0]}"), tokens=600, least_words=1)
        assert found[fix] == Skipped(f"s/repo/{fix}", "damaged"), target
        monkeypatch.undo()


def test_the_license_is_that_of_the_state_before(history: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    root = shutil.copytree(history[0], tmp_path / "copy")
    texts = (
        "Permission is hereby granted, free of charge, to any person obtaining a copy",
        "GNU General Public License",
    )
    commit(root, "Choose one", {"COPYING": texts[0], "LICENSE": None})
    shas = [commit(root, f"{n}\n\n{LONG}", {"src/colour.py": f"C = {n}\n", "COPYING": texts[n]}) for n in (1, 0)]
    found = made_rows(SourceConfig(name="s", path=f"git:{root}", license="Zlib"))
    said = [found[sha[:12]] for sha in (*shas, history[1]["fix"])]
    assert [row.more["license"] for row in said if isinstance(row, Text)] == ["MIT", "GPL-2.0-or-later", ""]
    assert all(isinstance(row, Text) and "File: COPYING" not in row.text for row in said)
    assert {
        one.license
        for one in list_inputs(SourceConfig(name="s", path=f"git:{root}", license="Zlib", changes=ChangesConfig()))[0]
    } == {"Zlib"}


def package(folder: Path, patches: dict[str, str], files: dict[str, str], changelog: str = "") -> Path:
    """A source package in the format 3.0 (quilt), as dpkg-source would write it."""

    def archive(name: str, members: dict[str, str]) -> str:
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as out:
            for path, text in members.items():
                entry = tarfile.TarInfo(path)
                entry.size = len(text.encode())
                out.addfile(entry, io.BytesIO(text.encode()))
        (folder / name).write_bytes(lzma.compress(stream.getvalue()))
        return f" {sha256((folder / name).read_bytes()).hexdigest()} {(folder / name).stat().st_size} {name}\n"

    folder.mkdir(exist_ok=True)
    control = {f"debian/patches/{name}": text for name, text in patches.items()}
    control |= {"debian/patches/series": "\n".join(["# in order", *patches]), "debian/changelog": changelog}
    control["debian/copyright"] = "Format: x\n\nFiles: *\nCopyright: A\nLicense: Expat\n"
    sums = archive("p_1.orig.tar.xz", {f"p-1/{name}": text for name, text in files.items()})
    sums += archive("p_1-1.debian.tar.xz", control)
    (folder / "p_1-1.dsc").write_text(f"Format: 3.0 (quilt)\nSource: p\nChecksums-Sha256:\n{sums}Files:\n x\n")
    return folder


PATCH = """Description: Keep the last record
 {long}
Bug-Debian: https://bugs.debian.org/123456
Author: A B <a@b.example>
---
--- a/src/main.c
+++ b/src/main.c
@@ -{at},2 +{at},2 @@
 int a{at};
-int b{at};
+int c{at};
"""


def test_patches_of_a_debian_package(tmp_path: Path) -> None:
    main = "".join(f"int {'ab'[n % 2]}{n - n % 2 + 1};\n" for n in range(40))
    # More than what is decompressed at once: xz once gave short reads, and then the archive seemed damaged.
    big = random.Random(0).randbytes(1 << 17).hex()
    files = {"src/main.c": main, "src/two.c": "int record;\n", "src/big.c": big}
    patches = {"1.patch": PATCH.format(at=1, long=LONG), "huge.patch": PATCH.format(at="9" * 5000, long=LONG)}
    patches["3.patch"] = PATCH.format(at=3, long=LONG)
    patches |= {"bad.patch": PATCH.format(at=1, long=LONG), "docs.patch": "Subject: x\n\n--- a/x.1\n+++ b/x.1\n"}
    log = "p (1-1) sid; urgency=low\n\n  * 3.patch: as upstream. (Closes: #7)\n  * closes: #{}\n\n -- A B <a@b>  Mon\n"
    log = log.format("1" * 5000)
    folder = package(tmp_path / "d", patches, files, log)
    found = made_rows(SourceConfig(name="s", path=str(folder)), tokens=20_000)
    reasons = {name: row.reason for name, row in found.items() if isinstance(row, Skipped)}
    assert reasons == {
        "huge.patch": "patch_does_not_apply",
        "bad.patch": "patch_does_not_apply",
        "docs.patch": "no_text_changed",
    }
    row = found["3.patch"]
    assert isinstance(row, Text) and row.more["license"] == "MIT" and "a@b" not in row.text
    before, own = row.text[: row.more["own"]], row.text[row.more["own"] :]
    assert "int c1;" in before and "int c3;" not in before and "+int c3;" in own
    assert own.startswith("Debian bug #123456, #7: Keep the last record\nThe parser returns")
    assert "with the patches before 3.patch that apply\n" in before
    assert "3.patch: as upstream. (Closes: #7)" in own and "src/two.c" in before
    one = list_inputs(SourceConfig(name="s", path=str(folder), changes=ChangesConfig()))[0][0]
    (folder / "p_1.orig.tar.xz").write_bytes(b"other")
    with pytest.raises(DataError, match="has changed"):
        one.check()
    broken = list(rows(one, Rows(ChangesConfig(), Issues(), TOKENIZER), LimitConfig()))
    assert [row.reason for row in broken if isinstance(row, Skipped)] == ["damaged"]
    assert archives(folder / "p_1-1.dsc").original == folder / "p_1.orig.tar.xz"
    (folder / "p_1.orig.tar.xz").rename(tmp_path / "elsewhere")
    (folder / "p_1.orig.tar.xz").symlink_to(tmp_path / "elsewhere")
    assert archives(folder / "p_1-1.dsc").missing == "dsc_incomplete"


def test_two_versions_of_a_package(tmp_path: Path) -> None:
    """A file has another content in each: its tokens are counted anew. Contents that were replaced are not kept."""
    main = "".join(f"int {'ab'[n % 2]}{n - n % 2 + 1};\n" for n in range(40))
    patches = {f"{at}.patch": PATCH.format(at=at, long=LONG) for at in range(1, 40, 2)}
    maker = Rows(ChangesConfig(tokens=4000, least_sources=1), Issues(), TOKENIZER)
    for version, size in (("small", 2), ("large", 900)):
        folder = package(tmp_path / version, patches, {"src/main.c": main, "src/record.c": "int record;\n" * size})
        found = list_inputs(SourceConfig(name="s", path=str(folder), changes=ChangesConfig()))[0]
        for row in rows(found[0], maker, LimitConfig()):
            assert isinstance(row, Text) and len(TOKENIZER.encode(row.text)) <= row.more["counts"]["tokens"] <= 4000
    seen = [
        one for one in package_changes(folder / "p_1-1.dsc", "p", LimitConfig(), Issues()) if isinstance(one, Change)
    ]
    assert len(seen) == 20 and [one.tree.read("src/main.c") for one in seen].count(None) == 20


def test_packages_that_cannot_be_used_are_counted(tmp_path: Path) -> None:
    folder = package(tmp_path, {}, {"a.c": "int a;\n"})
    (folder / "old_1.dsc").write_text("Format: 1.0\n")
    (folder / "gone_1-1.dsc").write_text((folder / "p_1-1.dsc").read_text().replace("p_1", "gone_1"))
    skipped = list_inputs(SourceConfig(name="s", path=str(folder), changes=ChangesConfig()))[1]
    assert skipped == {"dsc_format": 1, "dsc_incomplete": 1}


def test_issue_links_and_signatures() -> None:
    text = "Fixes #12, closes: owner/name#3. See #4. Resolved issue #5 :issue:`6` fixes owner/other#7"
    assert linked(text, "Name.git") == [12, 3, 5, 6]
    log = "\n  * Closes: #1001\n  * 13.patch: no\n  * debian/patches/3.patch: yes\n  * Bug #100 is fixed\n"
    request = described("Bug: https://bugs.debian.org/100\n", "3.patch", log, Issues())[1]
    assert request.body == "debian/patches/3.patch: yes\nBug #100 is fixed"
    assert without_trailers("Text.\n\nCo-authored-by: A <a@b>\nSigned-off-by: C <c@d>") == "Text."


def test_lines_of_a_template_do_not_count(tmp_path: Path) -> None:
    form = "Please search before you ask a question here\n"
    rows_ = [{"number": n, "title": "t", "body": f"{form}### Version\nown words number {n}"} for n in range(9)]
    path = tmp_path / "i.jsonl"
    path.write_text("\n".join(map(json.dumps, rows_)))
    issues = read_issues([str(path)], 1000)
    assert issues.own_words(rows_[0]["body"]) == (13, 4)  # type: ignore[arg-type]
    for text, said in (
        ("", "contains none"),
        ('{"number": "1", "title": "t"}', "not an issue"),
        ("[" * 9999, "not an"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=said):
            read_issues([str(path)], 100_000)
    with pytest.raises(DataError, match="more than 10 bytes"):
        read_issues([str(path)], 10)


def test_scores_are_those_of_bm25s() -> None:
    bm25s = pytest.importorskip("bm25s")
    from glm5.data.chunk_index import bm25_library

    assert bm25_library() is bm25s
    texts = {f"f{n}": " ".join(f"word{(n * k) % 7} camelCase" for k in range(1, n + 2)) for n in range(12)}
    query = "word3 case word5 nothing"
    found = dict(Retriever(texts.get).ranked(query, {path: path for path in texts}))
    vocabulary: dict[str, int] = {}
    ids = [
        [vocabulary.setdefault(w, len(vocabulary)) for w in words(text) + words(path)] for path, text in texts.items()
    ]
    reference = bm25s.BM25(method="lucene", k1=1.2, b=0.75)
    reference.index((ids, vocabulary), show_progress=False)
    scores = reference.get_scores_from_ids([vocabulary[w] for w in dict.fromkeys(words(query)) if w in vocabulary])
    assert found == pytest.approx({path: float(s) for path, s in zip(texts, scores) if s > 0}, rel=1e-5)


def test_words_are_remembered_within_a_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores stay the same; in memory are what is kept and the one file that is being counted."""
    texts = {f"f{n}": " ".join(f"name{n}x{k}" for k in range(2000)) for n in range(30)}
    read: list[str] = []

    def text(key: str) -> str:
        read.append(key)
        return texts[key]

    keys, query = {path: path for path in texts}, "name f7 x nothing"
    free = Retriever(text)
    wanted = free.ranked(query, keys)
    assert wanted and free.ranked(query, keys) == wanted and read == list(texts)
    monkeypatch.setattr(related, "_MOST_KEPT", 1 << 20)
    read.clear()
    tracemalloc.start()
    try:
        bound = Retriever(text)
        assert bound.ranked(query, keys) == wanted
        assert tracemalloc.get_traced_memory()[1] < 4 << 20  # all counts together have 10 MB
    finally:
        tracemalloc.stop()
    assert bound.ranked(query, keys) == wanted
    assert 30 < len(read) < 60


@pytest.mark.skipif(importlib.util.find_spec("datatrove") is None, reason="datatrove is not installed")
def test_rows_of_one_repository_are_no_duplicates() -> None:
    from datatrove.data import Document

    from glm5.data.corpus.near import OwnText, content

    rows_ = [Document("the same files\n" + own, own, metadata={"own": 15}) for own in ("diff one", "diff two")]
    assert [content(row) for row in rows_] == ["diff one", "diff two"]
    assert [row.text for row in OwnText().run(iter([*rows_, Document("plain", "p")]))] == [
        "diff one",
        "diff two",
        "plain",
    ]


def test_inputs_share_bytes_and_keep_order(history: tuple[Path, dict[str, str]]) -> None:
    found, _ = list_inputs(SourceConfig(name="s", path=f"git:{history[0]}", changes=ChangesConfig()))
    assert [type(one) for one in found] == [Input] and found[0].bytes == sum(one.bytes for one in found[0].members)
    with pytest.raises(ValueError, match="neither"):
        SourceConfig(name="s", path=f"git:{history[0]}", changes=ChangesConfig(), repositories=True)
    with pytest.raises(DataError, match="neither"):
        list_inputs(SourceConfig(name="s", path="/nowhere", changes=ChangesConfig()))
