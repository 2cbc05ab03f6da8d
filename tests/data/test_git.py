"""Git sources: what the commit says is read, and nothing in a hostile repository runs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from glm5.data import git as git_module
from glm5.data.sources import ReadReport, iter_sources, read_source
from glm5.errors import DataError

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(root: Path, *arguments: str, **environment: str) -> str:
    """Run git as a user would, but with no settings of this machine."""
    who = {f"GIT_{role}_{what}": "x" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    clean = {"PATH": os.environ["PATH"], "HOME": str(root), "GIT_CONFIG_NOSYSTEM": "1", **who, **environment}
    command = ["git", "-c", "init.defaultBranch=main", "-C", str(root), *arguments]
    return subprocess.run(command, env=clean, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two commits, then changes that were not committed."""
    root = tmp_path / "repo"
    root.mkdir()
    git(root, "init", "-q")
    files = {
        "b.txt": b"one\n",
        "a/z.md": b"two\r\nlines\r\n",
        "a.txt": b"three \xff",
        "bin.txt": b"x\0y",
        "big.py": b"x" * 99,
    }
    files |= {".hidden.py": b"h", "pic.png": b"p", "odd\nname é.txt": b"odd", "empty.txt": b" ", "ünï/c.rs": b"four"}
    for name, content in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content)
    (root / "link.txt").symlink_to("/etc/hostname")
    git(root, "add", "-A")
    git(root, "-c", "core.autocrlf=false", "commit", "-q", "-m", "first")
    git(root, "tag", "v1")
    (root / "b.txt").write_bytes(b"one, changed\n")
    (root / "new.txt").write_bytes(b"new\n")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "second")
    (root / "b.txt").write_bytes(b"not committed\n")
    (root / "untracked.txt").write_bytes(b"not committed\n")
    return root


def read(source: str, report: ReadReport | None = None) -> dict[str, str]:
    return {d.path: d.text for d in iter_sources([source], report, max_record_bytes=50)}


def test_the_committed_text_files(repository: Path) -> None:
    expected = {
        "a/z.md": "two\nlines\n", "a.txt": "three \ufffd", "b.txt": "one, changed\n", "new.txt": "new\n",
        "odd\nname é.txt": "odd", "ünï/c.rs": "four",
    }  # fmt: skip
    report = ReadReport()
    found = read(f"git:{repository}", report)
    assert found == expected
    assert list(found) == sorted(found, key=lambda path: path.split("/"))
    entry = report.sources[0]
    head = git(repository, "rev-parse", "HEAD")
    assert (entry.revision, entry.plain()["revision"]) == (head, head)
    assert (entry.binary, entry.empty, entry.bad) == (1, 1, 1)
    assert [str(bad) for bad in report.bad] == [f"{repository}@{head[:12]}:big.py: it has more than 50 bytes"]


def test_a_folder_of_the_same_files_gives_the_same_documents(repository: Path) -> None:
    git(repository, "checkout", "-q", "-f", "HEAD")
    (repository / "untracked.txt").unlink()
    (repository / "link.txt").unlink()
    assert list(read_source(f"git:{repository}")) == list(read_source(str(repository)))


def test_revisions_and_bare_repositories(repository: Path, tmp_path: Path) -> None:
    first = git(repository, "rev-parse", "v1")
    for revision in ("v1", "main~1", first, first[:10]):
        found = read(f"git:{repository}@{revision}")
        assert (found["b.txt"], "new.txt" in found) == ("one\n", False)
    bare = tmp_path / "odd@name.git"
    git(tmp_path, "clone", "-q", "--bare", str(repository), str(bare))
    assert read(f"git:{bare}") == read(f"git:{repository}")
    assert read(f"git:{bare}@v1") == read(f"git:{repository}@v1")


def test_what_is_no_repository_or_no_revision(repository: Path, tmp_path: Path) -> None:
    for revision in ("nonsense", "v1:a.txt", "0" * 40):
        with pytest.raises(DataError, match=f'not a git repository with a commit "{revision}"'):
            read(f"git:{repository}@{revision}")
    for revision in ("--all", "-h", "", "--output=x", "a b", "a\nb"):
        with pytest.raises(DataError, match="is not a revision"):
            read(f"git:{repository}@{revision}")
    for location in (tmp_path / "absent", "", "@v1"):
        with pytest.raises(DataError, match="has no folder"):
            read(f"git:{location}")
    (tmp_path / "plain").mkdir()
    for folder in (tmp_path / "plain", repository / "a"):  # not the repository above either
        with pytest.raises(DataError, match="git cannot read"):
            read(f"git:{folder}")
    empty = tmp_path / "empty"
    empty.mkdir()
    git(empty, "init", "-q")
    with pytest.raises(DataError, match="with a commit"):
        read(f"git:{empty}")


def tree(root: Path, entries: list[str]) -> str:
    """Write a tree object of lines as `git mktree` takes them."""
    command = ["git", "-C", str(root), "mktree"]
    done = subprocess.run(command, input="".join(f"{e}\n" for e in entries), check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_a_content_is_read_once(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many paths may name one blob; the first of them gives the document."""
    blob = git(repository, "rev-parse", "HEAD:new.txt")
    below = tree(repository, [f"100644 blob {blob}\tf{i}.py" for i in range(20)])
    top = tree(repository, [f"040000 tree {below}\ta", f"100644 blob {blob}\ta-b.py", f"100644 blob {blob}\tz.py"])
    commit = git(repository, "commit-tree", top, "-m", "copies")
    asked: list[bytes] = []
    report, given = ReadReport(), git_module._object

    def counted(*arguments: Any) -> bytes:
        asked.append(given(*arguments))
        return asked[-1]

    monkeypatch.setattr(git_module, "_object", counted)
    assert read(f"git:{repository}@{commit}", report) == {"a/f0.py": "new\n"}
    assert (len(asked), report.sources[0].copies, report.sources[0].documents) == (1, 21, 1)


def test_a_tree_that_names_a_million_paths_is_refused(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six levels that share their subtrees: the listing ends at the limit."""
    entries = [f"100644 blob {git(repository, 'rev-parse', 'HEAD:new.txt')}\tf{i}.py" for i in range(10)]
    for _ in range(6):
        entries = [f"040000 tree {tree(repository, entries)}\td{i}" for i in range(10)]
    commit = git(repository, "commit-tree", entries[0].split()[2], "-m", "bomb")
    monkeypatch.setattr(git_module, "_MAX_LISTING", 100_000)
    listed: list[str] = []
    monkeypatch.setattr(git_module, "is_hidden", listed.append)  # None: not hidden
    with pytest.raises(DataError, match="lists more than 100,000 bytes of paths in one commit"):
        read(f"git:{repository}@{commit}")
    assert 0 < len(listed) < 10_000


def test_without_git(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(DataError, match="needs the program git, which is not installed"):
        read(f"git:{repository}")


def test_damage_is_a_data_error(repository: Path) -> None:
    blob = git(repository, "rev-parse", "HEAD:new.txt")
    file = repository / ".git" / "objects" / blob[:2] / blob[2:]
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:4])
    with pytest.raises(DataError):
        read(f"git:{repository}")
    file.unlink()
    with pytest.raises(DataError, match=r"does not contain new\.txt|git cannot read"):
        read(f"git:{repository}")


def test_no_program_of_the_repository_runs(repository: Path, tmp_path: Path) -> None:
    """Every setting that names a program is planted, one blob is missing so that a partial clone would fetch it, and
    the marker file says whether anything ran. The plant works: git itself, asked for the status, runs it."""
    marker, script = tmp_path / "ran", tmp_path / "script"
    script.write_text(f"#!/bin/sh\necho $0 >> {marker}\nexit 1\n", encoding="utf-8")
    script.chmod(0o755)
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for name in ("post-checkout", "reference-transaction", "pre-auto-gc", "post-index-change"):
        shutil.copy(script, hooks / name)
    settings = {
        "core.fsmonitor": script, "core.hooksPath": hooks, "core.pager": script, "pager.ls-tree": script,
        "pager.cat-file": script, "core.sshCommand": script, "core.gitProxy": script, "core.editor": script,
        "core.askPass": script, "credential.helper": script, "diff.external": script, "filter.f.smudge": script,
        "filter.f.process": script, "diff.f.textconv": script, "alias.ls-tree": f"!{script}", "remote.r.vcs": "x",
        "alias.cat-file": f"!{script}", "remote.origin.url": f"ext::{script}", "protocol.ext.allow": "always",
        "protocol.allow": "always", "remote.origin.promisor": "true", "core.repositoryFormatVersion": "1",
        "extensions.partialClone": "origin", "remote.origin.uploadpack": script, "fetch.fsckObjects": "false",
    }  # fmt: skip
    for key, value in settings.items():
        git(repository, "config", key, str(value))
    (repository / ".gitattributes").write_text("* filter=f diff=f\n", encoding="utf-8")
    wanted = {"b.txt": "one, changed\n", "ünï/c.rs": "four"}
    assert read(f"git:{repository}").items() >= wanted.items()
    assert not marker.exists()

    blob = git(repository, "rev-parse", "HEAD:new.txt")
    (repository / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    with pytest.raises(DataError):
        read(f"git:{repository}")
    assert not marker.exists()
    subprocess.run(["git", "-C", str(repository), "status"], capture_output=True)
    assert marker.exists()
    marker.unlink()
    subprocess.run(["git", "-C", str(repository), "cat-file", "-p", blob], capture_output=True)
    assert marker.exists()


def test_settings_of_the_repository_lead_nowhere(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = repository / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr(git_module, "_SECONDS", 20.0)
    for place in (pipe, "/dev/zero"):
        for key in ("core.attributesFile", "core.excludesFile", "diff.orderFile", "mailmap.file"):
            git(repository, "config", key, str(place))
        opened, commit = git_module.open_git(str(repository))
        assert b"+one, changed" in opened.call("diff-tree", "-p", "v1", commit)
    head, plain = repository / ".git" / "HEAD", (repository / ".git" / "config").read_text()
    for section in ("include", '[core][IncludeIf "gitdir:**"'[1:]):
        (repository / ".git" / "config").write_text(f"{plain}[{section}]path=/dev/zero\n")
        with pytest.raises(DataError, match="includes another file"):
            read(f"git:{repository}")
    (repository / ".git" / "config").write_text(plain)
    (repository / ".git" / "info" / "pipe").symlink_to(pipe)
    with pytest.raises(DataError, match="a link or a device"):
        read(f"git:{repository}")
    pipe.rename(head)
    monkeypatch.setattr(git_module, "_SECONDS", 0.3)
    with pytest.raises(DataError, match="was stopped"):
        read(f"git:{repository}")


def test_neither_environment_nor_replacements_change_what_is_read(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read(f"git:{repository}")
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_OBJECT_DIRECTORY", str(other / ".git" / "objects"))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "core.bare")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "nonsense")
    git(repository, "replace", git(repository, "rev-parse", "HEAD"), git(repository, "rev-parse", "v1"))
    assert read(f"git:{repository}") == before


def test_a_repository_elsewhere_is_not_read(repository: Path, tmp_path: Path) -> None:
    """A `.git` file or a list of alternates would bring another folder's documents into the corpus."""
    given = tmp_path / "given"
    given.mkdir()
    (given / ".git").write_text(f"gitdir: {repository / '.git'}\n")
    with pytest.raises(DataError, match="keeps its objects in another one"):
        list(read_source(f"git:{given}"))
    shared = tmp_path / "shared"
    git(tmp_path, "clone", "-q", "--shared", str(repository), str(shared))
    with pytest.raises(DataError, match="keeps its objects in another one"):
        list(read_source(f"git:{shared}"))
    for place in ("objects", "packed-refs", "refs/heads"):
        linked = tmp_path / place.replace("/", "-")
        git(tmp_path, "clone", "-q", str(repository), str(linked))
        own, other = linked / ".git" / place, repository / ".git" / place
        other.exists() or other.touch()
        shutil.rmtree(own) if own.is_dir() else own.unlink(missing_ok=True)
        own.symlink_to(other)
        with pytest.raises(DataError, match="is a link or a device, so content may be elsewhere"):
            list(read_source(f"git:{linked}"))
