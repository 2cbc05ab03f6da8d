"""Committed text files of a local git repository, read object by object without a checkout.

A repository is untrusted input: its configuration can name programs that git would run. We call only `rev-parse`,
`ls-tree`, `cat-file`, and for its history `rev-list` and `diff-tree`, which need no working tree and no index. Hooks,
monitors, pagers, replacement objects, grafts and every transport are switched off. No variable of the caller's
environment and no setting of the repository redirects git to files elsewhere. Each process has limits on time and
memory.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from glm5.data.documents import Document, ReadReport
from glm5.data.readers import TEXT_SUFFIXES, is_hidden, text_document
from glm5.errors import DataError
from glm5.files import read_small

_SETTINGS = (
    "core.fsmonitor=false", f"core.hooksPath={os.devnull}", "core.pager=cat", "protocol.allow=never",
    f"core.attributesFile={os.devnull}", f"core.excludesFile={os.devnull}", f"mailmap.file={os.devnull}",
    f"diff.orderFile={os.devnull}", "core.commitGraph=false", "core.quotePath=false", "diff.suppressBlankEmpty=false",
)  # fmt: skip
_SECONDS, _MEMORY = 600.0, 2 << 30
"""Limits of one process: seconds, and bytes of memory of its own."""
_INCLUDE = re.compile(rb"\[include", re.IGNORECASE)
_MOST_CONFIG = 1 << 20
FILE_MODES = ("100644", "100755")  # others are links and submodules
_MAX_LISTING = 256 << 20
"""Bytes of paths, hashes and sizes of one commit: 25 times those of the Linux kernel."""
_MAX_ENTRY = 1 << 20  # with one path
_LISTED_BYTES = 1 << 16  # at a time


@dataclass(frozen=True)
class _Blob:
    path: str
    sha: str
    size: int


def read_git(location: str, report: ReadReport, limit: int) -> Iterator[Document]:
    """Text files of the commit that `location` (PATH or PATH@REVISION, by default HEAD) names.

    Suffixes and order are those of a folder source. A content is read once, for its first path; the other paths are
    counted as copies. The commit goes into the report. Raises DataError for a commit of too many paths: trees may share
    subtrees, so a few KB can name any number.
    """
    git, commit = open_git(location)
    path = git.path
    report.sources[-1].revision = commit
    with git.objects() as (ask, answer):
        for blob in _listing(git, commit, report):
            if blob.size > limit:
                report.add_bad(f"{path}@{commit[:12]}:{blob.path}", f"it has more than {limit:,} bytes")
                continue
            ask.write(blob.sha.encode() + b"\n")
            ask.flush()
            document = text_document(blob.path, _object(answer, blob, path), report)
            if document is not None:
                yield document


def open_git(location: str) -> tuple[Git, str]:
    """The repository and the hash of the commit that PATH or PATH@REVISION names. Raises DataError."""
    return open_at(*_split(location))


def open_at(path: Path, revision: str = "HEAD") -> tuple[Git, str]:
    """The repository at `path` and the hash of a commit of it. Raises DataError, also for a folder inside of one."""
    git = Git(path.resolve())
    git.stay_inside()
    named = ("--verify", "--quiet", "--end-of-options", revision + "^{commit}")
    commit = git.call("rev-parse", *named).decode("ascii", "replace").strip()
    if not commit.isalnum():
        raise DataError(f'{git.path} is not a git repository with a commit "{revision}".')
    return git, commit


def _split(location: str) -> tuple[Path, str]:
    """Path and revision. An @ that is part of an existing path is not a separator."""
    path, revision = location, "HEAD"
    if not Path(location).is_dir() and "@" in location:
        path, _, revision = location.rpartition("@")
    if not path or not Path(path).is_dir():
        raise DataError(f'"git:{location}" has no folder; write git:PATH or git:PATH@REVISION.')
    if not revision or revision.startswith("-") or any(not char.isprintable() or char == " " for char in revision):
        raise DataError(f'"git:{location}": {revision!r} is not a revision; write a branch, a tag or a commit.')
    return Path(path).resolve(), revision


class TooLong(DataError):
    """The output of a command is longer than it may be."""


class Git:
    """Calls git in a repository that is not trusted."""

    def __init__(self, path: Path) -> None:
        program = shutil.which("git")
        if program is None:
            raise DataError(f'Reading "git:{path}" needs the program git, which is not installed.')
        self.path = path
        settings = [part for setting in _SETTINGS for part in ("-c", setting)]
        self.command = [program, "--no-pager", "--no-replace-objects", *settings, "-C", str(path)]
        # Without the ceiling git would also look for a repository in parent folders.
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")} | {
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_GRAFT_FILE": os.devnull,
            "GIT_CEILING_DIRECTORIES": str(path.parent),
            "GIT_OPTIONAL_LOCKS": "0",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_NO_LAZY_FETCH": "1",
            "GIT_ALLOW_PROTOCOL": "none",
            "LC_ALL": "C",
        }

    def stay_inside(self) -> None:
        """Raise DataError for a repository with files outside its folder: a given folder is not trusted to name others,
        as a worktree's `.git` file, a clone's list of alternates and included settings do."""
        home = self.path / ".git" if (self.path / ".git").exists() else self.path
        for config in (home / "config", home / "config.worktree"):
            try:
                text = read_small(config, _MOST_CONFIG)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError:
                raise DataError(f"{config} is no plain file of settings.") from None
            if _INCLUDE.search(text):
                raise DataError(f"{config} includes another file of settings; take that out.")
        for name in ("--absolute-git-dir", "--git-common-dir"):
            where = (self.path / os.fsdecode(self.call("rev-parse", name).rstrip(b"\n"))).resolve()
            if not where.is_relative_to(self.path) or (where / "objects" / "info" / "alternates").exists():
                raise DataError(
                    f"{self.path}: this repository keeps its objects in another one ({where}); read that one."
                )
            link = next(_links(where), None)
            if link is not None:
                raise DataError(
                    f"{self.path}: {link} is a link or a device, so content may be elsewhere; use a plain clone."
                )

    def call(self, *arguments: str, most: int = _MAX_LISTING) -> bytes:
        """Standard output of a command. Raises DataError with git's first error line for a command that fails,
        TooLong for an output of more than `most` bytes."""
        return b"".join(self._pieces(arguments, most))

    def entries(self, *arguments: str) -> Iterator[bytes]:
        """Parts of a command's output between NUL bytes. Raises DataError as `call` does, and for an output that is
        longer than a listing may be."""
        rest = b""
        for piece in self._pieces(arguments, _MAX_LISTING):
            if len(rest) > _MAX_ENTRY:
                raise DataError(f"{self.path} lists a path of more than {_MAX_ENTRY:,} bytes; read it as a folder.")
            *found, rest = (rest + piece).split(b"\0") if b"\0" in piece else (rest + piece,)
            yield from found

    def _pieces(self, arguments: Sequence[str], most: int) -> Iterator[bytes]:
        size = 0
        with tempfile.TemporaryFile() as errors, self._process(arguments, errors, subprocess.DEVNULL) as process:
            assert process.stdout is not None  # a pipe
            clock = threading.Timer(_SECONDS, process.kill)
            clock.daemon = True  # else it would keep a program that ends by an error
            clock.start()
            try:
                while piece := process.stdout.read(_LISTED_BYTES):
                    size += len(piece)
                    if size > most:
                        raise TooLong(
                            f"{self.path} lists more than {most:,} bytes of paths in one commit, or of changes; read a "
                            "smaller checkout as a folder."
                        )
                    yield piece
                code = process.wait()
            finally:
                clock.cancel()
            errors.seek(0)
            self._check(code, errors.read(1000))

    @contextmanager
    def _process(
        self, arguments: Sequence[str], errors: IO[bytes] | int, asked: int
    ) -> Iterator[subprocess.Popen[bytes]]:
        """git with limits on memory and time, killed at the end."""
        with subprocess.Popen(
            [*self.command, *arguments], env=self.environment, stdin=asked, stdout=subprocess.PIPE, stderr=errors
        ) as process:
            try:
                if sys.platform == "linux":  # what is mapped only to be read, such as packs, does not count
                    with suppress(ProcessLookupError):
                        resource.prlimit(process.pid, resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
                        resource.prlimit(process.pid, resource.RLIMIT_CPU, (int(_SECONDS), int(_SECONDS) + 1))
                yield process
            finally:
                process.kill()

    def _check(self, code: int, errors: bytes) -> None:
        if code < 0:
            raise DataError(f"git was stopped reading {self.path}: it took {_SECONDS:.0f} s or {_MEMORY >> 20:,} MiB.")
        said = errors.decode("utf-8", "replace").strip()
        if code and said:
            raise DataError(f"git cannot read {self.path}: {said.splitlines()[0][:300]}")

    @contextmanager
    def objects(self) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
        """A process that answers object names with their content."""
        with self._process(("cat-file", "--batch"), subprocess.DEVNULL, subprocess.PIPE) as process:
            assert process.stdin is not None and process.stdout is not None  # both are pipes
            yield process.stdin, process.stdout


def _links(folder: Path) -> Iterator[Path]:
    """Links, pipes and devices among the files of a repository (hooks excepted: they are never run here)."""
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *files)):
            if not (stat.S_ISREG(mode := path.lstat().st_mode) or stat.S_ISDIR(mode)):
                yield path
        if Path(place) == folder and "hooks" in folders:
            folders.remove("hooks")


def _listing(git: Git, commit: str, report: ReadReport) -> list[_Blob]:
    """The text files of a commit, no links and no submodules; of files with one content the first."""
    found: dict[str, _Blob] = {}
    for entry in git.entries("ls-tree", "-r", "-z", "--long", "--full-tree", commit):
        meta, _, name = entry.partition(b"\t")
        mode, kind, sha, size = meta.decode("ascii", "replace").split()
        path = os.fsdecode(name)
        parts = path.split("/")
        if kind != "blob" or mode not in FILE_MODES or any(map(is_hidden, parts)):
            continue
        if Path(parts[-1]).suffix not in TEXT_SUFFIXES:
            continue
        if not size.isdigit():
            raise DataError(f"{git.path} does not contain {path}, as in a partial clone; fetch it first.")
        first = found.get(sha)
        report.sources[-1].copies += first is not None
        if first is None or parts < first.path.split("/"):
            found[sha] = _Blob(path, sha, int(size))
    return sorted(found.values(), key=lambda blob: blob.path.split("/"))


def _object(answer: IO[bytes], blob: _Blob, repository: Path) -> bytes:
    header = answer.readline(1000).split()
    if header[1:] != [b"blob", str(blob.size).encode()]:
        raise DataError(f"{repository} is damaged: git cannot read {blob.path} ({blob.sha}); see `git fsck`.")
    content = answer.read(blob.size + 1)
    if len(content) != blob.size + 1:
        raise DataError(f"{repository} is damaged: {blob.path} ({blob.sha}) ends early; see `git fsck`.")
    return content[:-1]
