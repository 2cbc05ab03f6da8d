"""Sources: releases and commits taken back; reading packages."""

from __future__ import annotations

import io
import re
import shutil
import ssl
import subprocess
import tarfile
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies

from glm5.data.git import open_at
from glm5.errors import DataError, UsageError
from glm5.tasks.swe import sdist_backend
from glm5.tasks.swe.build import Build
from glm5.tasks.swe.candidate import Candidate, unified
from glm5.tasks.swe.commits import Commits, fixes, message_of, open_commit
from glm5.tasks.swe.git import clone, write_tree
from glm5.tasks.swe.make import make
from glm5.tasks.swe.repositories import PACKAGES, download, from_tree, metadata, packages, pip, unpack
from glm5.tasks.swe.versions import Versions
from tests.tasks.swe.tiny import CLIP, TESTS, commit, git, tiny

OLD = CLIP.replace("x > high", "x >= high + 1").replace("part.strip() for", "part for").replace("def spread", "def gap")


def test_a_release_is_taken_back_hunk_by_hunk_and_whole(tmp_path: Path) -> None:
    new = tiny(tmp_path / "new")
    tiny(tmp_path / "old", source=OLD)
    (tmp_path / "old/CHANGES.md").write_text("# 0.9\n- first\n")
    (tmp_path / "new/CHANGES.md").write_text("# 1.0\n- Fix the upper end (#12)\n\n# 0.9\n- first\n")
    found = list(Versions(tmp_path / "old", "0.9").candidates(new, 0))
    texts = [candidate.changes["tiny/ranges.py"] for candidate in found]
    assert OLD in texts and len(texts) == len(set(texts)) >= 3
    assert all(candidate.description == "- Fix the upper end" for candidate in found)
    wider = [candidate.within and candidate.within.changes["tiny/ranges.py"] for candidate in found]
    assert [None if text == OLD else OLD for text in texts] == wider
    kinds = {str(c.changes["tiny/ranges.py"]): c.kind for c in found}
    assert kinds[OLD] == "refactor"  # it lacks `spread`, which it has as `gap`
    assert "bug-fix" in kinds.values()


def test_a_hunk_that_parses_and_does_not_compile_is_left_out(tmp_path: Path) -> None:
    apart = "    #\n" * 6
    inner = f"\n\ndef count():\n{{}}\n{apart}    def more():\n{{}}\n    return more\n"
    new = tiny(tmp_path / "new", source=CLIP + inner.format("    n = 1", "        nonlocal n\n        n = 2"))
    tiny(tmp_path / "old", source=CLIP + inner.format("    pass", "        return 3"))
    found = list(Versions(tmp_path / "old", "0.9").candidates(new, 0))
    assert len(found) == 2 and all(compile(str(c.changes["tiny/ranges.py"]), "m", "exec") for c in found)


def test_a_hunk_is_within_its_file_and_that_within_the_release(tmp_path: Path) -> None:
    new = tiny(tmp_path / "new")
    tiny(tmp_path / "old", source=OLD)
    (tmp_path / "old/tiny/__init__.py").write_text("x = 1\n")
    found = list(Versions(tmp_path / "old", "0.9").candidates(new, 0))
    (release,) = (candidate for candidate in found if len(candidate.changes) == 2)
    assert release.within is None
    for one in found:
        above = []
        while one.within is not None:
            one = one.within
            above.append(one)
        assert not above or above[-1].id == release.id
        assert [len(wider.changes) for wider in above] in ([], [2], [1, 2])
    assert {len(candidate.changes) for candidate in found if candidate.within and candidate.within.within} == {1}


def test_a_release_is_downloaded_without_its_backend_if_we_know_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[tuple[bool, bool]] = []

    def pip(*arguments: str, modules: Path | None = None) -> None:
        called.append(("--no-build-isolation" in arguments, modules is not None))
        name = next(a for a in arguments if "==" in a).replace("==", "-")
        if modules is not None and "odd" in name:
            raise DataError("no backend")
        Path(arguments[arguments.index("-d") + 1], f"{name}.tar.gz").touch()

    monkeypatch.setattr("glm5.tasks.swe.repositories.pip", pip)
    for name in ("plain", "plain", "odd"):
        assert download(name, "1.0", tmp_path / "sdists").name == f"{name}-1.0.tar.gz"
    assert called == [(True, True), (True, True), (False, False)]
    assert sorted(path.name for path in (tmp_path / "sdists").iterdir()) == ["odd-1.0.tar.gz", "plain-1.0.tar.gz"]


@pytest.mark.parametrize("backend", ["", "setuptools.build_meta", "poetry.core.masonry.api"])
def test_pip_runs_no_code_of_a_source_distribution(tmp_path: Path, backend: str) -> None:
    """Its metadata are those that it carries, whatever its set-up would say."""
    files = {"PKG-INFO": b"Metadata-Version: 2.1\nName: some.thing\nVersion: 1.0\n", "setup.py": b"raise SystemExit(9)"}
    if backend:
        files["pyproject.toml"] = f'[build-system]\nrequires = ["none-of-it"]\nbuild-backend = "{backend}"\n'.encode()
    with tarfile.open(tmp_path / "some.thing-1.0.tar.gz", "w:gz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(f"some.thing-1.0/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    out, modules = tmp_path / "out", sdist_backend.lay_out(tmp_path / "backends")
    pip("download", "--no-build-isolation", "--use-pep517", "--no-index", "--no-deps", "--no-binary", ":all:", "-f",
        str(tmp_path), "-d", str(out), "some.thing==1.0", modules=modules)  # fmt: skip
    assert [path.name for path in out.iterdir()] == ["some.thing-1.0.tar.gz"]


def test_changes_of_comments_only_are_no_candidates(tmp_path: Path) -> None:
    new = tiny(tmp_path / "new")
    tiny(tmp_path / "old", source=CLIP.replace('"""Numbers in ranges."""', '"""Ranges."""  # old'))
    assert not list(Versions(tmp_path / "old", "0.9").candidates(new, 0))


@pytest.fixture
def history(tmp_path: Path) -> Path:
    repo = tmp_path / "project"
    repo.mkdir()
    git(repo, "init", "-q")
    base = {"tiny/__init__.py": "", "tiny/ranges.py": OLD, "tests/test_ranges.py": "def test_x():\n    pass\n"}
    commit(repo, "Start", base)
    commit(
        repo,
        "Fix the upper end of ranges (#7)\n\nIt was wrong.",
        {"tiny/ranges.py": CLIP, "tests/test_ranges.py": TESTS},
    )
    commit(repo, "Fix a wrong word in the readme", {"README": "x"})
    commit(repo, "docs: fix", {"tiny/ranges.py": CLIP + "# x\n", "tests/test_ranges.py": TESTS + "# x\n"})
    return repo


def test_commits_that_fix_source_and_tests(history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(fixes(history, 10))
    assert [c.message for c in found] == ["Fix the upper end of ranges\n\nIt was wrong."]
    monkeypatch.setattr("glm5.tasks.swe.commits.install", lambda requirements, folder: tmp_path)
    repository, sources = open_commit(history, found[0], (), tmp_path / "work", "MIT")
    assert not (repository.root / ".git").exists()
    assert isinstance(sources[0], Commits)
    candidates: list[Candidate] = list(sources[0].candidates(repository, 0))
    assert [c.changes for c in candidates] == [{"tiny/ranges.py": OLD}]
    assert repository.read("tests/test_ranges.py") == TESTS


def test_no_program_of_a_repository_runs(history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`git archive` would write files as the repository's filters make them."""
    (history / ".git/info/attributes").write_text("* filter=x\n")
    for key, value in (("smudge", f"touch {tmp_path}/ran; cat"), ("required", "true")):
        git(history, "config", f"filter.x.{key}", value)
    monkeypatch.setattr("glm5.tasks.swe.commits.install", lambda requirements, folder: tmp_path)
    repository, _ = open_commit(history, next(fixes(history, 1)), (), tmp_path / "work", "MIT")
    assert repository.read("tiny/ranges.py") == CLIP and not (tmp_path / "ran").exists()


LISTED = """
[all]
framework = "node"
tests = ["test/**/*.test.js"]
exclude = ["test/slow.test.js"]

[package.project]
source = "npm"
version = "1.0"
previous = ["0.9"]

[package.elsewhere]
source = "git"
origin = "ext::sh -c 'touch ran'"
version = "HEAD"

[package.other]
source = "npm"
version = "1.0"
git = "https://example.com/other@HEAD"
licence = "MIT"

[package.offline]
source = "npm"
version = "1.0"
git = "https://example.com/offline@HEAD"
"""


@pytest.fixture
def commits_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `make` on repositories in JavaScript; the jobs that it would do, by name."""
    pytest.importorskip("tree_sitter", reason="tree-sitter (the extra swe) is not installed.")
    (tmp_path / "list.toml").write_text(LISTED)

    def run(**options: Any) -> dict[str, Any]:
        jobs: dict[str, Any] = {}
        monkeypatch.setattr(
            Build, "run", lambda self, found, *rest: jobs.update({j.name: j for j in found}) or {"sources": {}}
        )
        work, listed = tmp_path / "work", tmp_path / "list.toml"
        make(tmp_path / "out", work=work, listed=listed, language="javascript", sources=["commits"], **options)
        return jobs

    return run


UPPER = "function upper() {}\n"


def written_in_js(repo: Path) -> Path:
    repo.mkdir(parents=True)
    git(repo, "init", "-q")
    commit(repo, "Start", {"clip.js": "1\n", "test/a/clip.test.js": "2\n", "LICENSE": "MIT License\n"})
    changes = {"clip.js": UPPER, "test/a/clip.test.js": "4\n", "x.py": "5\n"}
    commit(repo, "Fix the upper end of clip (#7)\n\nWith a new function.", changes)
    commit(repo, "Fix what no listed test looks at", {"clip.js": "6\n", "test/slow.test.js": "7\n"})
    commit(repo, "Fix a wrong word of a test only", {"test/a/clip.test.js": "8\n", "dist/clip.js": "9\n"})
    return repo


def test_the_history_of_a_repository_in_another_language(commits_of: Any, tmp_path: Path) -> None:
    repo = written_in_js(tmp_path / "project")
    (name,) = jobs = commits_of(repos=[repo])
    repository, sources = jobs[name].opened()
    (candidate,) = sources[0].candidates(repository, 0)
    assert dict(candidate.changes) == {"clip.js": "1\n"} and candidate.description == "Fix the upper end of clip"
    assert candidate.kind == "feature" and candidate.missing == (("clip.js", "upper"),)
    assert repository.read("clip.js") == UPPER and repository.test_files == ("test/a/clip.test.js",)
    assert (repository.licence, repository.version) == ("MIT License", name.split()[1])
    assert repository.origin.startswith("git:" + name.split()[1])
    row = '{"id": "a", "sha256": "b", "package": "project", "version": "%s"}\n'
    for version, found in ((repository.version, [name]), ("0" * 12, [])):
        (tmp_path / "m.jsonl").write_text(row % version)
        assert list(commits_of(repos=[repo], manifest=tmp_path / "m.jsonl")) == found
    (tmp_path / "unlisted").mkdir()
    with pytest.raises(UsageError, match="no package unlisted"):
        commits_of(repos=[tmp_path / "unlisted"])
    with pytest.raises(UsageError, match="is not a folder"):
        commits_of(repos=[tmp_path / "typo"])
    with pytest.raises(UsageError, match="the same name"):
        commits_of(repos=[repo, tmp_path / "unlisted" / ".." / "project"])
    with pytest.raises(UsageError, match="for Python"):
        commits_of(repos=[repo], requires=["hypothesis"])


def test_a_listed_repository_is_cloned_once_and_others_go_on(
    commits_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def network(folder: Path, *arguments: str) -> None:
        asked.append(arguments[-2])
        if "other" not in arguments[-2]:
            raise DataError("no network")
        (tmp_path / "upstream/.git").rename(folder)

    written_in_js(tmp_path / "upstream")
    monkeypatch.setattr("glm5.tasks.swe.git._network", network)
    for _ in range(2):
        told: list[str] = []
        jobs = commits_of(only=["elsewhere", "other", "offline"], told=told.append)
        (name,) = jobs
        repository = jobs[name].opened()[0]
        assert repository.licence == "MIT" and repository.title == "other" and repository.read("clip.js") == UPPER
        assert "https://" in told[0] and "no network" in told[1] and not Path("ran").exists()
    assert asked == ["https://example.com/other", *["https://example.com/offline"] * 2]
    (tmp_path / "m.jsonl").write_text('{"id": "a", "sha256": "b", "package": "offline", "version": "1.0"}\n')
    assert not commits_of(only=["offline"], manifest=tmp_path / "m.jsonl") and len(asked) == 3


def test_a_repository_is_cloned_over_https_and_brought_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("this machine has no openssl.")
    upstream, key, certificate = written_in_js(tmp_path / "upstream"), tmp_path / "key.pem", tmp_path / "cert.pem"
    made = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost".split()
    made += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(made, check=True, capture_output=True)
    git(upstream, "update-server-info")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    monkeypatch.setenv("GIT_SSL_CAINFO", str(certificate))
    monkeypatch.setenv("no_proxy", "localhost")
    quiet = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(quiet, directory=str(upstream / ".git"))) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            origin = f"https://localhost:{server.server_port}/"
            first = clone(origin, "@a/project", git(upstream, "rev-parse", "HEAD"), tmp_path / "work")
            commit(upstream, "A later one", {"clip.js": "0\n"})
            git(upstream, "update-server-info")
            last = git(upstream, "rev-parse", "HEAD")
            assert clone(origin, "@a/project", last, tmp_path / "work") == first and open_at(first, last)[1] == last
            with pytest.raises(DataError, match="git clone"):
                clone(f"{origin}nowhere/", "other", "HEAD", tmp_path / "work")
        finally:
            server.shutdown()
            thread.join()
    assert [path.name for path in (tmp_path / "work/git").iterdir()] == [first.name]


ATTRIBUTES = """\
*.js text eol=crlf
/test export-ignore
README.md export-subst
"""
HOSTILE = {  # of the clone: they must change nothing
    "core.autocrlf": "true", "core.quotePath": "true", "diff.orderFile": "/none", "log.date": "bogus",
    "diff.algorithm": "no", "i18n.logOutputEncoding": "latin1", "core.fsmonitor": "touch /tmp/ran",
    "tar.tar.command": "touch /tmp/ran",
}  # fmt: skip


def test_settings_and_attributes_of_a_repository_change_nothing(commits_of: Any, tmp_path: Path) -> None:
    repo = tmp_path / "project"
    repo.mkdir()
    git(repo, "init", "-q")
    start = {"clip.js": "1\n", "caf\u00e9.js": "1\n", "test/clip.test.js": "1\n", ".gitattributes": ATTRIBUTES,
             "README.md": "$Format:%H %B$\n", "CHANGELOG": "old\n", "test/other.spec.mjs": "1\n",
             "logo.png": "\0001"}  # fmt: skip
    commit(repo, "Start", start)
    (repo / "link.js").symlink_to("clip.js")
    changes = {path: text.replace("1", "2").replace("old", "it is 2 now") for path, text in start.items()}
    commit(repo, "Fix the upper end of caf\u00e9", changes)
    for key, value in HOSTILE.items():
        git(repo, "config", key, value)
    original = git(repo, "rev-parse", "HEAD")
    git(repo, "replace", original, "HEAD~1")
    ((name, job),) = commits_of(repos=[repo]).items()
    repository, sources = job.opened()
    (candidate,) = sources[0].candidates(repository, 0)
    assert dict(candidate.changes) == {"clip.js": "1\n", "caf\u00e9.js": "1\n"} and "caf\u00e9" in candidate.description
    assert repository.read("clip.js") == "2\n" and repository.read("README.md") == start["README.md"]
    assert repository.read("CHANGELOG") == "old\n"  # what the fix says of itself
    assert repository.read("test/clip.test.js") == "2\n" and repository.read("test/other.spec.mjs") == "1\n"
    assert not (repository.root / "link.js").exists() and original.startswith(name.split()[1])
    (tmp_path / "project/sub").mkdir()
    with pytest.raises(DataError, match="not a git repository"):
        list(fixes(repo / "sub", 10))
    with pytest.raises(DataError, match="not a git repository with a commit"):
        list(fixes(repo, 10, until=f"--output={tmp_path}/x"))


LINES = strategies.lists(
    strategies.sampled_from(["a", "b\n", "c\r\n", "d\re", "f\x0cg\n", "h\x85\u2028", "\n"]), max_size=9
)


@settings(max_examples=25, deadline=None)
@given(strategies.tuples(LINES, LINES).map(lambda pair: tuple("".join(lines) for lines in pair)))
def test_git_applies_a_patch_of_any_lines(pair: tuple[str, str]) -> None:
    old, new = pair
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "a.txt")
        file.write_bytes(old.encode())
        patch = unified("a.txt", old, new).encode()
        command = ["git", "-C", folder, "apply", "--whitespace=nowarn", "-"]
        if old != new:
            subprocess.run(command, input=patch, check=True, capture_output=True)
        assert file.read_bytes() == new.encode()


def test_a_fix_that_comes_twice_is_one(commits_of: Any, tmp_path: Path) -> None:
    repo = written_in_js(tmp_path / "project")
    commit(repo, "Take that back", {"clip.js": "1\n", "test/a/clip.test.js": "2\n"})
    commit(repo, "Fix the upper end of clip again", {"clip.js": UPPER, "test/a/clip.test.js": "4\n"})
    assert len(commits_of(repos=[repo])) == 1


def test_a_tree_that_reaches_outside_or_is_too_large_falls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = written_in_js(tmp_path / "project")
    blob = git(repo, "hash-object", "-w", "--stdin", stdin=b"x")
    for name, said in (("..", "outside"), (".git", "outside"), ("a" * 300, "cannot be written")):
        entry = f"100644 {name}\0".encode() + bytes.fromhex(blob)
        tree = git(repo, "hash-object", "-t", "tree", "-w", "--literally", "--stdin", stdin=entry)
        made = git(repo, "commit-tree", "-m", "x", tree)
        with pytest.raises(DataError, match=said):
            write_tree(open_at(repo)[0], made, tmp_path / "out")
    for limit, said in (("MOST_UNPACKED", "MiB"), ("MOST_FILES", "files")):
        monkeypatch.setattr(f"glm5.tasks.swe.git.{limit}", 2)
        with pytest.raises(DataError, match=said):
            write_tree(*open_at(repo), tmp_path / "out")
        monkeypatch.undo()
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("CLI-318: Fix the order of groups [CLI-299]", "Fix the order of groups"),
        ("Fix #1712 in the parser", "Fix in the parser"),
        ("Fix decoding of UTF-8 and SHA-256 (PR: 12345, !34, bug 9)", "Fix decoding of UTF-8 and SHA-256"),
        ("Fix a crash\n\nReported-by: Joe Doe <joe@x.org>\nLink: https://a.b/c\nFixes: 12345678", "Fix a crash"),
        ("Bug: the list was reversed since commit 12345678", "Bug: the list was reversed since"),
        ("Fix the case of <b> after issues/77", "Fix the case of <b> after"),
        ("Fix the sum of a - b (#7) .\n\n.\n", "Fix the sum of a - b"),
    ],
)
def test_what_leads_to_a_commit_is_not_in_its_message(text: str, left: str) -> None:
    assert re.sub(r"\W+$", "", message_of(text)) == left


def test_a_folder_without_history_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a git repository"):
        list(fixes(tmp_path, 10))


def test_a_tree_without_tests_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(DataError, match="no test files"):
        from_tree(tmp_path, "a", "1", "MIT", "x")


def test_the_list_of_packages_is_readable() -> None:
    entries, common = packages()
    assert len(entries) >= 40 and common
    assert len({entry.name for entry in entries}) == len(entries)


def test_a_malformed_list_is_a_data_error(tmp_path: Path) -> None:
    path = tmp_path / "list.toml"
    path.write_text("[package.x]\nversion = 1\n")
    with pytest.raises(DataError, match="not a list of packages"):
        packages(path)


def test_unknown_names_are_usage_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match='did you mean "parso"'):
        make(tmp_path, work=tmp_path, only=["parsoo"])
    with pytest.raises(UsageError, match="unknown source"):
        make(tmp_path, work=tmp_path, sources=["mutations"])
    assert PACKAGES.is_file()


def archive(path: Path, names: dict[str, bytes], link: str = "") -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in names.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        if link:
            info = tarfile.TarInfo("p-1/link")
            info.type, info.linkname = tarfile.SYMTYPE, link
            tar.addfile(info)
    return path


@pytest.mark.parametrize(("named", "most"), [(False, 6), (True, None)])
def test_at_most_half_are_mutations_unless_they_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool, most: int | None
) -> None:
    """A part of a list may have more of them than of the others."""
    limits: list[int | None] = []

    def run(self: Build, jobs: Any, per_package: int, count: int | None, at_once: int) -> dict[str, Any]:
        limits.append(count)
        return {"sources": {"versions": {"tasks": 3}, "mutate": {"tasks": 1}}}

    monkeypatch.setattr(Build, "run", run)
    (tmp_path / "m.jsonl").write_text('{"id": "a", "sha256": "b", "package": "parso", "version": "1"}\n')
    make(tmp_path, work=tmp_path, only=["parso"], manifest=tmp_path / "m.jsonl" if named else None)
    assert limits == [None, most]


def test_links_of_an_archive_are_left_out(tmp_path: Path) -> None:
    root = unpack(archive(tmp_path / "p-1.tar.gz", {"p-1/a.py": b"x"}, link="/etc/passwd"), tmp_path / "p")
    assert [path.name for path in root.iterdir()] == ["a.py"]


def test_an_archive_that_reaches_outside_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="reaches outside"):
        unpack(archive(tmp_path / "p-1.tar.gz", {"p-1/../../a.py": b"x"}), tmp_path / "p")
    assert not (tmp_path / "p").exists()


def test_the_licence_comes_from_the_metadata(tmp_path: Path) -> None:
    text = "Name: p\nSummary: s\nLicense: UNKNOWN\nClassifier: License :: OSI Approved :: MIT License\n"
    (tmp_path / "PKG-INFO").write_text(text)
    assert metadata(tmp_path) == ("MIT License", "s")
    assert metadata(tmp_path / "none") == ("unknown", "")
    (tmp_path / "PKG-INFO").write_text("Name: x\nSummary: é\nLicense: Copyright © 2020\n  More\n", encoding="utf-8")
    assert metadata(tmp_path) == ("Copyright © 2020", "é")


def test_an_archive_with_a_name_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("x/a.py")
        member.pax_headers = {"path": "x/b\0c.py"}
        tar.addfile(member)
    with pytest.raises(DataError, match="cannot be unpacked"):
        unpack(tmp_path / "x.tar.gz", tmp_path / "out")
