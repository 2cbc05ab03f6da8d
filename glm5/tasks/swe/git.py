"""Reads git repositories that may come from anywhere. No program that they name runs, and neither their settings nor
their attributes change what is read: files are the bytes of their blobs."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from glm5.errors import DataError
from glm5.tasks.swe.repositories import MOST_FILES, MOST_UNPACKED

GIT_S, CLONE_S = 120.0, 1800.0
FILE = re.compile(r"100(644|755)")  # modes of files; others are links and submodules
PROXIES = {"https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY", "SSL_CERT_FILE", "GIT_SSL_CAINFO"}


def git(repo: Path, *arguments: str, stdin: bytes = b"", network: bool = False) -> bytes:
    """Run git without the user's settings, hooks, helpers, replaced objects, and what a partial clone lacks. `network`
    allows https. Raises DataError."""
    command = ["git", "-C", str(repo), "-c", "log.showSignature=false", "-c", "core.fsmonitor=false", "-c",
               "core.hooksPath=/dev/null", "-c", "safe.directory=*", *arguments]  # fmt: skip
    environment = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "GIT_CONFIG_GLOBAL": os.devnull,
                   "GIT_CONFIG_SYSTEM": os.devnull, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C.UTF-8",
                   "GIT_ALLOW_PROTOCOL": "https" if network else "none", "GIT_NO_LAZY_FETCH": "1",
                   "GIT_NO_REPLACE_OBJECTS": "1", "GIT_GRAFT_FILE": os.devnull}  # fmt: skip
    if network:
        environment |= {name: value for name, value in os.environ.items() if name in PROXIES}
    try:
        timeout = CLONE_S if network else GIT_S
        done = subprocess.run(command, capture_output=True, input=stdin, env=environment, timeout=timeout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise DataError(f"git {arguments[0]} in {repo}: {error}") from None
    if done.returncode:
        raise DataError(f"git {arguments[0]} in {repo}: {done.stderr.decode(errors='replace').strip()[:300]}")
    return done.stdout


def resolve(repo: Path, name: str) -> str:
    """The full hash of a commit. Raises DataError, also if `repo` is a folder inside of a repository."""
    if git(repo, "rev-parse", "--show-prefix").strip():
        raise DataError(f"{repo} is a folder inside of a git repository; name its top folder.")
    return git(repo, "rev-parse", "--verify", "--end-of-options", f"{name}^{{commit}}").decode().strip()


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
            git(part, "clone", "--bare", "--quiet", "--", origin, ".", network=True)
            place(part, folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    try:
        resolve(folder, commit)
    except DataError:  # it is newer than the clone
        git(folder, "fetch", "--quiet", "--tags", "--", origin, "+refs/heads/*:refs/heads/*", network=True)
    return folder


def _part(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.part{os.getpid()}.{threading.get_ident()}")


def place(part: Path, folder: Path) -> None:
    """Give a finished folder its name, unless another build was faster."""
    try:
        part.replace(folder)
    except OSError:
        if not folder.is_dir():
            raise


def parent_of(repo: Path, commit: str) -> str | None:
    """The first parent of a commit."""
    return next(iter(git(repo, "rev-list", "--parents", "-n", "1", commit).decode().split()[1:]), None)


def blobs(repo: Path, commit: str) -> dict[str, tuple[str, int]]:
    """Id and bytes of each file of a commit, without links, submodules and paths that are not UTF-8. Raises DataError
    if they are too many or too large."""
    found: dict[str, tuple[str, int]] = {}
    for row in _utf8(git(repo, "ls-tree", "-r", "-l", "-z", "--full-tree", commit).split(b"\0")):
        head, _, path = row.partition("\t")
        mode, _, blob, size = head.split()
        if not FILE.fullmatch(mode):
            continue
        found[path] = blob, int(size)
    if len(found) > MOST_FILES or sum(size for _, size in found.values()) > MOST_UNPACKED:
        raise DataError(f"{repo}: {commit} has more than {MOST_FILES:,} files or {MOST_UNPACKED >> 20} MiB.")
    return found


def contents(repo: Path, ids: Iterable[str]) -> dict[str, bytes]:
    """The blobs of these ids. Raises DataError if one is missing or they are too large."""
    wanted = list(dict.fromkeys(ids))
    asked = "".join(f"{blob}\n" for blob in wanted).encode()
    sizes = [row.split()[2:] for row in git(repo, "cat-file", "--batch-check", stdin=asked).splitlines()]
    if not all(sizes) or sum(int(size) for (size,) in sizes) > MOST_UNPACKED:
        raise DataError(f"{repo}: an object is missing, or a change has more than {MOST_UNPACKED >> 20} MiB.")
    data, at, found = git(repo, "cat-file", "--batch", stdin=asked), 0, dict[str, bytes]()
    for blob, (size,) in zip(wanted, sizes, strict=True):
        start = data.index(b"\n", at) + 1
        at = start + int(size) + 1
        found[blob] = data[start : at - 1]
    return found


def write_tree(repo: Path, commit: str, folder: Path, instead: Mapping[str, str | None] | None = None) -> Path:
    """Write the files of a commit to `folder`, once. `instead` names other blobs for some paths, None for no file.
    Raises DataError."""
    if folder.is_dir():
        return folder
    wanted: dict[str, str | None] = {path: blob for path, (blob, _) in blobs(repo, commit).items()}
    wanted.update(instead or {})
    ids = {path: blob for path, blob in wanted.items() if blob is not None}
    outside = next((path for path in ids if {"", ".", "..", ".git"} & set(path.split("/"))), None)
    if outside is not None:
        raise DataError(f"{repo}: {commit} has a file {outside!r:.100}, which reaches outside of its folder.")
    texts, part = contents(repo, ids.values()), _part(folder)
    part.mkdir(parents=True)
    try:
        for path, blob in ids.items():
            (part / path).parent.mkdir(parents=True, exist_ok=True)
            (part / path).write_bytes(texts[blob])
        place(part, folder)
    except (OSError, ValueError) as error:  # such as a name that is too long
        raise DataError(f"{repo}: {commit} cannot be written: {error}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def changed(repo: Path, old: str, new: str) -> dict[str, tuple[str | None, str | None]]:
    """The blobs before and after of each file whose content differs between two commits, None if there is none."""
    rows = git(repo, "diff-tree", "-r", "-z", "--raw", "--no-renames", "--no-ext-diff", old, new).split(b"\0")
    found: dict[str, tuple[str | None, str | None]] = {}
    for head, path in zip(rows[::2], rows[1::2], strict=False):
        modes = head.decode().lstrip(":").split()
        before, after = (
            blob if FILE.fullmatch(mode) else None for mode, blob in zip(modes[:2], modes[2:4], strict=True)
        )
        if before != after:
            found |= dict.fromkeys(_utf8([path]), (before, after))
    return found


def _utf8(rows: Iterable[bytes]) -> Iterator[str]:
    for row in rows:
        try:
            text = row.decode()
        except UnicodeDecodeError:
            continue
        if text:
            yield text
