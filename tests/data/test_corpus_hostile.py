"""Hostile files, one by one: each is read, or skipped for a reason that fits, in bounded time and memory."""

from __future__ import annotations

import io
import multiprocessing
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tarfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from hashlib import sha256
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datatrove")
pytest.importorskip("fastwarc")

from glm5.chat.tokenizer import Tokenizer
from glm5.config.corpus import ChangesConfig, CorpusRecipe, SourceConfig
from glm5.data.corpus.formats import texts
from glm5.data.corpus.inputs import documents
from glm5.data.corpus.plan import list_inputs, make_plan, planned, source_counts
from glm5.data.corpus.read import sandboxed
from glm5.data.corpus.text import REASONS, Extracted, Skipped, Text
from glm5.data.swe.inputs import rows
from glm5.data.swe.issues import read_issues
from glm5.data.swe.rows import Rows
from glm5.errors import DataError
from tests.data.hostile import LIMITS, MAKERS, NOISE, NOTHING, TEXT_OR_NOTHING, WORDS, Cases, hostile_files, pages, pdfs
from tests.data.test_git import git, tree

SECONDS = 90.0
"""For one file; extraction has `LIMITS.seconds`, and the machine may be busy."""
MEMORY = 256 << 20
"""Bytes that reading a file may add to the process that reads."""


def outcomes(found: list[Text | Skipped]) -> set[str]:
    """What became of documents, after a check that it can be written down."""
    for one in found:
        (one.name + (one.text + str(one.more) if isinstance(one, Text) else "")).encode()
        assert isinstance(one, Text) or one.reason in REASONS
    return {"text" if isinstance(one, Text) else one.reason for one in found}


def _serve(asked: Connection) -> None:
    """Read the files that are asked for, until the connection ends."""
    with ExitStack() as stack:
        extract = sandboxed(stack, LIMITS)
        while True:
            try:
                path = Path(asked.recv())
            except EOFError:
                return
            try:
                found = list(texts(path, path.name, LIMITS, "text", extract))
                asked.send(sorted(outcomes(found)))
            except Exception as error:
                asked.send(repr(error))


class Reader:
    """A process that reads files, started anew after a file that hangs it."""

    def __init__(self) -> None:
        self.peak = 0
        self._process: Any = None

    def read(self, path: Path) -> list[str] | str:
        """What becomes of a file; a text if it hangs or crashes the process."""
        if self._process is None:
            spawn = multiprocessing.get_context("spawn")
            self._pipe, other = spawn.Pipe()
            self._process = spawn.Process(target=_serve, args=(other,), daemon=False)
            self._process.start()
            other.close()
            self._pipe.send("/none/a.html")  # imports are no file's fault
            self._pipe.recv()
        before = self._memory(reset=True)
        self._pipe.send(str(path))
        try:
            found = self._pipe.recv() if self._pipe.poll(SECONDS) else "hangs"
        except EOFError:
            found = "crashes"
        if found in ("hangs", "crashes"):
            self.stop()
            return str(found)
        self.peak = self._memory() - before
        return found  # type: ignore[no-any-return]

    def _memory(self, reset: bool = False) -> int:
        """Peak bytes of the process; with `reset`, its present bytes, from which peaks count again."""
        if sys.platform != "linux":
            return 0
        folder = Path("/proc", str(self._process.pid))
        if reset:
            (folder / "clear_refs").write_text("5")
        lines = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        return int(lines["VmRSS" if reset else "VmHWM"].split()[0]) << 10

    def stop(self) -> None:
        if self._process is not None:
            self._pipe.close()
            self._process.join(5)
            self._process.kill()
            self._process.join()
            self._process = None


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    one = Reader()
    yield one
    one.stop()


COUNTS = dict(zip(MAKERS, (24, 20, 21, 25, 21, 31, 23, 32, 20, 16, 2), strict=True))


def test_there_are_hundreds() -> None:
    assert sum(COUNTS.values()) + len(PLACES) + len(REPOSITORIES) + len(PACKAGES) >= 250


@pytest.mark.parametrize(
    "make",
    [pytest.param(make, marks=pytest.mark.slow if make in (pages, pdfs) else pytest.mark.long) for make in MAKERS],
    ids=lambda make: str(make.__name__),
)
def test_a_hostile_file_is_read_or_skipped_for_a_reason(
    make: Callable[[], Cases], reader: Reader, tmp_path: Path
) -> None:
    files, wrong, slowest, most = hostile_files(make), [], (0.0, ""), (0, "")
    assert len(files) == COUNTS[make] and len({(file.name, file.content) for file in files.values()}) == len(files)
    for number, (what, file) in enumerate(files.items()):
        path = tmp_path / str(number) / file.name
        path.parent.mkdir()
        path.write_bytes(file.content)
        began = time.monotonic()
        found = reader.read(path)
        slowest, most = max(slowest, (time.monotonic() - began, what)), max(most, (reader.peak, what))
        lost = not found and file.outcomes not in (NOTHING, TEXT_OR_NOTHING)
        if isinstance(found, str) or not set(found) <= file.outcomes or lost or reader.peak > MEMORY:
            wrong.append(f"{what}: {found}, {reader.peak >> 20} MiB, not {sorted(file.outcomes)}")
        assert [one.name for one in path.parent.iterdir()] == [file.name]
    print(f"{len(files)} files; longest {slowest[0]:.1f} s ({slowest[1]}), most {most[0] >> 20} MiB ({most[1]})")
    assert not wrong, "\n".join(wrong)


def plain(format: str, raw: bytes) -> Extracted:
    return Extracted(raw.decode("utf-8", "replace"))


def corpus(root: Path, out: Path) -> Counter[str]:
    """What becomes of a folder: outcomes of what is read, and why the rest is not, with their counts."""
    recipe = CorpusRecipe.model_validate({"name": "c", "tasks": 1, "sources": [{"name": "s", "path": str(root)}]})
    make_plan(recipe, out)
    found: Counter[str] = Counter(source_counts(out)["s"]["skipped"])  # type: ignore[call-overload]
    for one in planned(out, 0):
        one.check()
        found.update("text" if isinstance(each, Text) else each.reason
                     for each in documents(one, recipe.sources[0], LIMITS, plain))  # fmt: skip
    return found


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def _deep(path: Path) -> None:
    """Folders whose path is longer than the system takes at once."""
    here = os.open(path.parent, os.O_RDONLY)
    for _ in range(30):
        os.mkdir("d" * 200, dir_fd=here)
        inner = os.open("d" * 200, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(os.open("a.txt", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _write(path: Path) -> None:
    path.write_bytes(WORDS)


PLACES: dict[str, tuple[Callable[[Path], object], Counter[str]]] = {
    "link to its folder": (lambda path: path.symlink_to(path.parent), Counter(link=1)),
    "links in a circle": (lambda path: (path.symlink_to("b"), path.with_name("b").symlink_to(path)), Counter(link=2)),
    "link to nothing": (lambda path: path.symlink_to("/nowhere"), Counter(link=1)),
    "link to a device": (lambda path: path.symlink_to("/dev/zero"), Counter(link=1)),
    "link out": (lambda path: path.symlink_to("/etc/passwd"), Counter(link=1)),
    "pipe": (os.mkfifo, Counter(special=1)),
    "pipe called a page": (lambda path: os.mkfifo(path.with_suffix(".html")), Counter(special=1)),
    "socket": (_socket, Counter(special=1)),
    "device": (lambda path: os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5)), Counter(special=1)),
    "file of a terabyte": (_sparse, Counter(too_large=1)),
    "folder called a file": (lambda path: path.mkdir(), Counter()),
    "file of zstd": (lambda path: _write(path.with_suffix(".txt.zst")), Counter(unsupported=1)),
    "name with a line end": (lambda path: _write(path.with_name("a\nb.txt")), Counter(text=1)),
    "name of line ends": (lambda path: _write(path.with_name("\n\r.txt")), Counter(text=1)),
    "name that is not UTF-8": (lambda path: _write(path.with_name(os.fsdecode(b"\xff\xfe\x80.txt"))), Counter(text=1)),
    "name of 255 bytes": (lambda path: _write(path.with_name("x" * 251 + ".txt")), Counter(text=1)),
    "name with bidi controls": (lambda path: _write(path.with_name("\u202etxt.exe.txt")), Counter(text=1)),
    "name of control characters": (lambda path: _write(path.with_name("\x1b[2J\x07.txt")), Counter(text=1)),
    "name of an option": (lambda path: _write(path.with_name("--help -rf.txt")), Counter(text=1)),
    "name with marks": (lambda path: _write(path.with_name("{}!*?%00;$(id).txt")), Counter(text=1)),
    "two names for one file": (lambda path: (_write(path), os.link(path, path.with_name("b.txt"))), Counter(text=2)),
}


@pytest.mark.parametrize("case", PLACES)
def test_a_hostile_place_is_read_or_counted(case: str, tmp_path: Path) -> None:
    root = tmp_path / "s"
    root.mkdir()
    _write(root / "good.md")
    make, expected = PLACES[case]
    try:
        make(root / "a.txt")
    except PermissionError:
        pytest.skip("needs the right to make devices")
    assert corpus(root, tmp_path / "out") == expected + Counter(text=1)


def test_folders_of_any_depth_end(tmp_path: Path) -> None:
    root = tmp_path / "s"
    root.mkdir()
    _write(root / "good.md")
    _deep(root / "a")
    try:
        assert corpus(root, tmp_path / "out") == Counter(text=1, unreadable=1)
    finally:
        subprocess.run(["rm", "-rf", str(root)], check=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="the administrator reads everything")
def test_what_may_not_be_read_is_counted(tmp_path: Path) -> None:
    root = tmp_path / "s"
    (root / "folder").mkdir(parents=True)
    for name in ("good.md", "a.txt", "folder/b.txt"):
        _write(root / name)
    (root / "a.txt").chmod(0)
    (root / "folder").chmod(0)
    assert corpus(root, tmp_path / "out") == Counter(text=1, unreadable=2)
    (root / "folder").chmod(0o700)


@pytest.mark.parametrize("change", ["gone", "shorter", "longer", "another", "a pipe"])
def test_a_file_that_changes_after_the_plan_stops_the_run(change: str, tmp_path: Path) -> None:
    """Its part would not fit the others. What is read meanwhile is read within its limits."""
    root = tmp_path / "s"
    root.mkdir()
    _write(root / "a.txt")
    recipe = CorpusRecipe.model_validate({"name": "c", "tasks": 1, "sources": [{"name": "s", "path": str(root)}]})
    make_plan(recipe, tmp_path / "out")
    [one] = planned(tmp_path / "out", 0)
    found = documents(one, recipe.sources[0], LIMITS, plain)
    (root / "a.txt").unlink()
    if change == "a pipe":
        os.mkfifo(root / "a.txt")
    elif change != "gone":
        (root / "a.txt").write_bytes({"shorter": WORDS[:50], "longer": WORDS * 9, "another": WORDS[::-1]}[change])
    assert outcomes(list(found)) == ({"unreadable"} if change in ("gone", "a pipe") else {"text"})
    with pytest.raises(DataError, match="has changed since this corpus was planned"):
        one.check()


def _set(name: str, value: str) -> Callable[[Path], object]:
    return lambda root: git(root, "config", name, value)


def _file(name: str, content: bytes) -> Callable[[Path], object]:
    def make(root: Path) -> None:
        (root / ".git" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / ".git" / name).write_bytes(content)

    return make


def _entries(*lines: str) -> Callable[[Path], object]:
    """A commit of a tree with these entries; {blob} and {tree} are objects of the repository."""

    def make(root: Path) -> None:
        names = {"blob": git(root, "rev-parse", "HEAD:a.txt"), "tree": git(root, "rev-parse", "HEAD^{tree}")}
        commit = git(root, "commit-tree", tree(root, [line.format(**names) for line in lines]), "-m", "odd")
        git(root, "update-ref", "HEAD", commit)

    return make


def _commit(content: bytes, name: str) -> Callable[[Path], object]:
    def make(root: Path) -> None:
        (root / name).write_bytes(content)
        git(root, "add", "-A")
        git(root, "commit", "-q", "-m", "more")

    return make


def _remove(what: str) -> Callable[[Path], object]:
    def make(root: Path) -> None:
        sha = git(root, "rev-parse", what)
        (root / ".git" / "objects" / sha[:2] / sha[2:]).unlink()

    return make


def _object(what: str, content: bytes) -> Callable[[Path], object]:
    def make(root: Path) -> None:
        sha = git(root, "rev-parse", what)
        path = root / ".git" / "objects" / sha[:2] / sha[2:]
        path.chmod(0o600)
        path.write_bytes(content)

    return make


REPOSITORIES: dict[str, tuple[Callable[[Path], object], str]] = {
    "head of nothing": (_file("HEAD", b"ref: refs/heads/nowhere\n"), "no git repository|is not a git repository"),
    "head that is rubbish": (_file("HEAD", NOISE), "git cannot read|is not a git repository"),
    "heads in a circle": (_file("refs/heads/main", b"ref: refs/heads/main\n"), "is not a git repository|git cannot"),
    "head that leads out": (_file("HEAD", b"ref: ../../../etc/passwd\n"), "git cannot read|is not a git repository"),
    "references that are rubbish": (_file("packed-refs", NOISE), "git cannot read|is not a git repository"),
    "reference with a bad name": (_file("refs/heads/..lock", b"0" * 40), "read"),
    "settings that are rubbish": (_file("config", NOISE), "git cannot read|is not a git repository"),
    "settings that include others": (_set("include.path", "/dev/zero"), "includes another file"),
    "settings of a later version": (_set("core.repositoryFormatVersion", "99"), "git cannot read"),
    "objects elsewhere": (_file("objects/info/alternates", b"/nowhere/objects\n"), "keeps its objects in another"),
    "program for hooks": (_file("hooks/post-checkout", b"#!/bin/sh\ntouch {marker}\n"), "read"),
    "program that watches files": (_set("core.fsmonitor", "touch {marker}"), "read"),
    "program for a pager": (_set("core.pager", "touch {marker}"), "read"),
    "program for ssh": (_set("core.sshCommand", "touch {marker}"), "read"),
    "link to a device": (lambda root: (root / ".git" / "odd").symlink_to("/dev/zero"), "a link or a device"),
    "pipe": (lambda root: os.mkfifo(root / ".git" / "odd"), "a link or a device"),
    "pack that is rubbish": (_file("objects/pack/pack-" + "0" * 40 + ".idx", NOISE), "read|git cannot read"),
    "grafts": (_file("info/grafts", b"x" * 90_000), "read"),
    "attributes": (_file("info/attributes", b"* filter=f diff=f text eol=crlf working-tree-encoding=UTF-16\n"), "read"),
    "blob that is gone": (_remove("HEAD:a.txt"), "does not contain|git cannot read"),
    "tree that is gone": (_remove("HEAD^{{tree}}".replace("{{", "{").replace("}}", "}")), "git cannot read"),
    "commit that is gone": (_remove("HEAD"), "git cannot read|is not a git repository"),
    "blob that is rubbish": (_object("HEAD:a.txt", NOISE), "git cannot read|does not contain"),
    "blob bomb": (
        _object("HEAD:a.txt", zlib.compress(b"blob 99999999999\0" + b"a" * (16 << 20))),
        "too_large|git cannot",
    ),
    "large blob": (_commit(b"a" * (2 << 20), "b.txt"), "too_large"),
    "binary blob": (_commit(b"a\0b", "b.txt"), "binary"),
    "name with a line end": (_commit(WORDS, "b\nc.txt"), "read"),
    "name that is not UTF-8": (_commit(WORDS, os.fsdecode(b"\xff.txt")), "read"),
    "submodule": (_entries("160000 commit " + "1" * 40 + "\tsub", "100644 blob {blob}\ta.txt"), "read"),
    "link in a commit": (_entries("120000 blob {blob}\tb.txt", "100644 blob {blob}\ta.txt"), "read"),
    "mode of nothing": (_entries("100600 blob {blob}\tb.txt", "100644 blob {blob}\ta.txt"), "read"),
}


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize("case", REPOSITORIES)
def test_a_hostile_repository_is_read_or_refused_in_a_sentence(case: str, tmp_path: Path) -> None:
    """As a commit and as a history; nothing that it names is run."""
    root, marker = tmp_path / "r", tmp_path / "ran"
    root.mkdir()
    git(root, "init", "-q")
    (root / "a.txt").write_bytes(WORDS)
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "first")
    make, expected = REPOSITORIES[case]
    make(root)
    for path in (root / ".git" / "config", root / ".git" / "hooks" / "post-checkout"):
        if path.exists() and b"{marker}" in (raw := path.read_bytes()):
            path.write_bytes(raw.replace(b"{marker}", os.fsencode(marker)))
            path.chmod(0o755)
    said = []
    for changes in (None, ChangesConfig()):
        source = SourceConfig(name="s", path=f"git:{root}", changes=changes)
        try:
            inputs, _ = list_inputs(source)
            if changes is None:
                said += [one.reason if isinstance(one, Skipped) else "read"
                         for one in documents(inputs[0], source, LIMITS, plain)]  # fmt: skip
        except DataError as error:
            if changes is None:
                said.append(str(error))
            assert len(str(error).splitlines()) == 1
    assert any(re.search(expected, one) for one in said), said
    assert not marker.exists()


def _tar_of(members: dict[str, bytes], *more: tarfile.TarInfo) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
        for entry in more:
            archive.addfile(entry)
    return raw.getvalue()


PATCH = b"""Description: The last line is lost
 If the input has no line end, then the parser loses the last line of the file, without a word about it.
---
--- a/%s
+++ b/%s
@@ -1,1 +1,1 @@
-int x;
+int y;
"""
FILES = {f"p-1/{name}.c": b"int x;\n" for name in "abc"}


def control(name: str = "a.c", patch: bytes | None = None, series: bytes = b"1.patch\n") -> dict[str, bytes]:
    """The members of a packaging with one patch."""
    patch = PATCH % (name.encode(), name.encode()) if patch is None else patch
    return {"debian/patches/series": series, "debian/patches/1.patch": patch}


def _linked(name: str, kind: bytes, target: str) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, target
    return entry


OUT = "../../../../../../etc/passwd"
PACKAGES: dict[str, tuple[bytes, bytes, str]] = {
    "as it should be": (_tar_of(FILES), _tar_of(control()), "row"),
    "absolute paths": (
        _tar_of({**FILES, "/etc/x.c": b"int x;\n"}),
        _tar_of(control("/etc/x.c")),
        "patch_does_not_apply|row|no_text_changed",
    ),
    "paths that lead out": (
        _tar_of({**FILES, OUT: b"x"}),
        _tar_of(control(OUT + ".c")),
        "patch_does_not_apply|no_text_changed",
    ),
    "series that leads out": (_tar_of(FILES), _tar_of(control(series=OUT.encode())), "patch_missing"),
    "series of options": (
        _tar_of(FILES),
        _tar_of(control(series=b"-p9 --help\n1.patch -p1 # x\n")),
        "patch_missing|row",
    ),
    "series without an end": (
        _tar_of(FILES),
        _tar_of(control(series=b"1.patch\n" * 90_000)),
        "row|patch_does_not_apply",
    ),
    "series that is no text": (_tar_of(FILES), _tar_of(control(series=NOISE)), "nothing|patch_missing"),
    "links": (
        _tar_of(FILES, _linked("p-1/d.c", tarfile.SYMTYPE, "/etc/passwd")),
        _tar_of(control("d.c")),
        "patch_does_not_apply|row",
    ),
    "links in a circle": (_tar_of(FILES, _linked("p-1/d.c", tarfile.LNKTYPE, "p-1/d.c")), _tar_of(control()), "row"),
    "bomb": (_tar_of({**FILES, "p-1/b.c": b"a" * (24 << 20)}), _tar_of(control()), "row|bomb"),
    "bomb of many": (
        _tar_of({**FILES, **{f"p-1/{n}.c": b"a" * 900_000 for n in range(30)}}),
        _tar_of(control()),
        "bomb|row",
    ),
    "many files": (_tar_of({f"p-1/{n}.c": b"" for n in range(60)}), _tar_of(control()), "too_many_members"),
    "cut off": (_tar_of({**FILES, "p-1/d.c": NOISE})[:-4000], _tar_of(control()), "damaged"),
    "no archive": (NOISE, _tar_of(control()), "damaged"),
    "no packaging": (_tar_of(FILES), NOISE, "damaged"),
    "patch of noise": (_tar_of(FILES), _tar_of(control(patch=NOISE)), "patch_missing"),
    "patch of huge numbers": (
        _tar_of(FILES),
        _tar_of(control(patch=(PATCH % (b"a.c", b"a.c")).replace(b"1,1", b"9" * 99))),
        "patch_does_not_apply",
    ),
    "patch without an end": (
        _tar_of(FILES),
        _tar_of(control(patch=PATCH % (b"a.c", b"a.c") + b"+x\n" * 90_000)),
        "patch_does_not_apply|too_many_lines|row",
    ),
    "patch of nothing": (_tar_of(FILES), _tar_of(control(patch=b"")), "no_text_changed"),
}


@pytest.mark.parametrize("case", PACKAGES)
def test_a_hostile_source_package_is_read_or_counted(case: str, tmp_path: Path) -> None:
    original, packaging, expected = PACKAGES[case]
    sums = ""
    for name, content in (("p_1.orig.tar.gz", original), ("p_1-1.debian.tar.gz", packaging)):
        (tmp_path / name).write_bytes(content)
        sums += f" {sha256(content).hexdigest()} {len(content)} {name}\n"
    (tmp_path / "p_1-1.dsc").write_text(f"Format: 3.0 (quilt)\nSource: p\nChecksums-Sha256:\n{sums}Files:\n x\n")
    before = sorted(tmp_path.iterdir())
    config = ChangesConfig()
    [one], _ = list_inputs(SourceConfig(name="s", path=str(tmp_path), changes=config))
    found = list(rows(one, Rows(config, read_issues([], 1), Tokenizer.byte_level()), LIMITS))
    said = {"row" if isinstance(each, Text) else each.reason for each in found} or {"nothing"}
    assert said <= set(expected.split("|")), said
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("dsc", "reason"),
    [
        (b"", "dsc_format"),
        (NOISE, "dsc_format"),
        (b"Format: 1.0\n", "dsc_format"),
        (b"Format: 3.0 (quilt)\nChecksums-Sha256:\n " + b"0" * 64 + b" 1 ../../etc/passwd\n", "dsc_format"),
        (b"Format: 3.0 (quilt)\nChecksums-Sha256:\n 0 1 /etc/passwd.orig.tar.gz\n", "dsc_format"),
        (b"x" * (2 << 20), "too_large"),
    ],
)
def test_a_hostile_dsc_is_counted(dsc: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "p_1.dsc").write_bytes(dsc)
    with pytest.raises(DataError, match=f"no file to read \\(1 {reason}\\)"):
        list_inputs(SourceConfig(name="s", path=str(tmp_path), changes=ChangesConfig()))
