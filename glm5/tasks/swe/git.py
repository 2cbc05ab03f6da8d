"""Commits of git repositories that may come from anywhere, read by `glm5.data.git`: no program that they name runs, and
neither their settings nor their attributes change what is read."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from glm5.data.git import FILE_MODES, Git, open_at
from glm5.errors import DataError
from glm5.tasks.swe.repositories import MOST_FILES, MOST_UNPACKED

CLONE_S = 1800.0
Blobs = dict[str, tuple[str | None, str | None]]
"""Ids of the blobs before and after a change by path, None for no file."""


def log(git: Git, *arguments: str) -> Iterator[tuple[str, list[str], str]]:
    """Hash, hashes of the parents, and message of the commits that `git rev-list` lists. Raises DataError."""
    form = ("--encoding=UTF-8", "--format=%H%x00%P%x00%B%x00%x01")
    for record in git.call("rev-list", *form, *arguments).decode(errors="replace").split("\x01"):
        fields = record.strip("\n").split("\0")
        if len(fields) >= 3:
            yield fields[0].rsplit("\n", 1)[-1], fields[1].split(), fields[2]  # git writes a line before each


def clone(origin: str, name: str, commit: str, work: Path) -> Path:
    """`origin` if it is a local repository, else a bare clone of this URL that has `commit`. Raises DataError."""
    if origin and Path(origin).is_dir():
        return Path(origin)
    if not origin.startswith("https://"):
        raise DataError(f"{name}: no local repository and no https:// URL: {origin!r:.200}.")
    folder = work / "git" / f"{name.replace('/', '-')}-{hashlib.sha256(origin.encode()).hexdigest()[:8]}.git"
    if not folder.is_dir():
        part = _part(folder)
        part.mkdir(parents=True)
        try:
            _network(part, "clone", "--bare", "--quiet", "--", origin, ".")
            _place(part, folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    try:
        open_at(folder, commit)
    except DataError:  # it is newer than the clone
        _network(folder, "fetch", "--quiet", "--tags", "--", origin, "+refs/heads/*:refs/heads/*")
    return folder


def _network(folder: Path, *arguments: str) -> None:
    """Run git with https, without hooks and the user's settings. Raises DataError."""
    command = ["git", "-C", str(folder), "-c", f"core.hooksPath={os.devnull}", *arguments]
    own = {key: value for key, value in os.environ.items() if not key.startswith("GIT_") or key == "GIT_SSL_CAINFO"}
    away = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=CLONE_S,
                              env={**own, **away, "GIT_ALLOW_PROTOCOL": "https", "LC_ALL": "C"})  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DataError(f"git {arguments[0]} did not run: {error}.") from None
    if done.returncode:
        raise DataError(f"git {arguments[0]}: {done.stderr.decode(errors='replace').strip()[:300]}")


def _part(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.part{os.getpid()}.{threading.get_ident()}")


def _place(part: Path, folder: Path) -> None:
    """Give a finished folder its name, unless another build was faster."""
    try:
        part.replace(folder)
    except OSError:
        if not folder.is_dir():
            raise


def parent_of(git: Git, commit: str) -> str | None:
    """The first parent of a commit."""
    return next(iter(git.call("rev-list", "--parents", "-n", "1", commit).decode().split()[1:]), None)


def write_tree(git: Git, commit: str, folder: Path, instead: Mapping[str, str | None] | None = None) -> Path:
    """Write the files of a commit to `folder`, once, without links, submodules and paths that are not UTF-8. `instead`
    names other blobs for some paths, None for no file. Raises DataError if the files are too many or too large, or if a
    path reaches outside."""
    if folder.is_dir():
        return folder
    wanted = _files(git, commit)
    wanted.update(instead or {})
    ids = {path: blob for path, blob in wanted.items() if blob is not None}
    outside = next((path for path in ids if {"", ".", "..", ".git"} & set(path.split("/"))), None)
    if outside is not None:
        raise DataError(f"{git.path}: {commit} has a file {outside!r:.100}, which reaches outside of its folder.")
    texts, part = contents(git, ids.values()), _part(folder)
    part.mkdir(parents=True)
    try:
        for path, blob in ids.items():
            (part / path).parent.mkdir(parents=True, exist_ok=True)
            (part / path).write_bytes(texts[blob])
        _place(part, folder)
    except (OSError, ValueError) as error:  # such as a name that is too long
        raise DataError(f"{git.path}: {commit} cannot be written: {error}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def _files(git: Git, commit: str) -> dict[str, str | None]:
    """The blob of each file of a commit."""
    found: dict[str, str | None] = {}
    for row in _utf8(git.entries("ls-tree", "-r", "-z", "--full-tree", commit)):
        head, _, path = row.partition("\t")
        mode, _, blob = head.split()
        if mode in FILE_MODES:
            found[path] = blob
    if len(found) > MOST_FILES:
        raise DataError(f"{git.path}: {commit} has more than {MOST_FILES:,} files.")
    return found


def contents(git: Git, ids: Iterable[str]) -> dict[str, bytes]:
    """The blobs of these ids. Raises DataError if one is missing or they are too large."""
    found, size = dict[str, bytes](), 0
    with git.objects() as (ask, answer):
        for blob in dict.fromkeys(ids):
            ask.write(blob.encode() + b"\n")
            ask.flush()
            header = answer.readline(1000).split()
            if header[1:2] != [b"blob"]:
                raise DataError(f"{git.path} does not contain the object {blob}.")
            size += int(header[2])
            if size > MOST_UNPACKED:
                raise DataError(f"{git.path}: a commit has more than {MOST_UNPACKED >> 20} MiB.")
            found[blob] = answer.read(int(header[2]) + 1)[:-1]
            if len(found[blob]) != int(header[2]):
                raise DataError(f"{git.path}: the object {blob} ends early; see `git fsck`.")
    return found


def changed(git: Git, old: str, new: str) -> Blobs:
    """Each file whose content differs between two commits."""
    rows = git.call("diff-tree", "-r", "-z", "--raw", "--no-renames", "--no-ext-diff", old, new).split(b"\0")
    found: Blobs = {}
    for head, path in zip(rows[::2], rows[1::2], strict=False):
        fields = head.decode().lstrip(":").split()
        before, after = (
            blob if mode in FILE_MODES else None for mode, blob in zip(fields[:2], fields[2:4], strict=True)
        )
        if before != after:
            found |= dict.fromkeys(_utf8([path]), (before, after))
    return found


def changed_lines(git: Git, old: str, new: str) -> dict[str, int]:
    """The number of lines that differ between two commits by path, without files that git cannot compare."""
    options = ("-r", "-z", "--numstat", "--no-renames", "--no-ext-diff", "--no-textconv", "--text")
    rows = (row.split("\t", 2) for row in _utf8(git.entries("diff-tree", *options, old, new)))
    return {row[2]: int(row[0]) + int(row[1]) for row in rows if len(row) == 3 and row[0].isdigit()}


def _utf8(rows: Iterable[bytes]) -> Iterator[str]:
    for row in rows:
        try:
            text = row.decode()
        except UnicodeDecodeError:
            continue
        if text:
            yield text
