"""The copy of a repository that a coding agent works on: a room over the repository, and what changed in it.

The room shows the repository at `/repo`, copy-on-write, so nothing outside changes. What the agent changed is read from
outside the room, without following links; folders of version control and of caches do not count. `apply` writes the
changes to the repository itself, after `safety_commit` has kept its state.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import itertools
import os
import re
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from glm5.errors import GradingError, UsageError
from glm5.sandbox.programs import Room
from glm5.sandbox.room_files import MOST_ENTRIES, open_inside

ROOT = "/repo"
CACHES = frozenset("__pycache__ .pytest_cache .mypy_cache .ruff_cache .hypothesis node_modules .venv .tox".split())
"""Names of folders whose changes are not the agent's work."""
METADATA = frozenset((".git", ".hg", ".svn"))
"""Names of folders and files of version control. Programs that read them here would run what the agent put there."""
MOST_FILE, MOST_ALL, MOST_FILES = 4 << 20, 64 << 20, 2000
MOST_NAMED = 1000
"""Files that are left out and named: a log has their names in one line."""
MOST_DIFF_LINES, MOST_COMPARED = 4000, 20_000
"""Lines of a file between those that both states begin and end with, and of all files of a patch, that are compared
line by line, which could take minutes; what is more is shown as replaced."""
CONTEXT = 3
MOST_COMMAND = 64 << 10
"""Characters of the paths in one command line, for which the system has a limit."""
GIT_S = 60.0
_QUIET = ("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false")
"""The repository may come from anywhere: none of its programs is to run here."""
NO_FETCH = {"GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1"}
"""Nor the one that a partial clone names to fetch the objects that it lacks."""


@dataclass(frozen=True)
class File:
    """A changed file. `data` is None if it was deleted."""

    data: bytes | None
    executable: bool = False

    @property
    def digest(self) -> str | None:
        return None if self.data is None else hashlib.sha256(self.data).hexdigest()


@dataclass(frozen=True)
class Changes:
    """What an agent changed: files by path relative to the repository, and why others are left out."""

    files: Mapping[str, File]
    left_out: Mapping[str, str]


class TooManyFiles(GradingError):
    """A folder has more files than can be watched."""


class Workspace:
    """Watches a room over a repository. The repository must not change meanwhile."""

    def __init__(self, room: Room, repo: Path) -> None:
        self._room, self._repo = room, repo
        root = os.open(repo, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._base = dict(_walk(root, ""))
        finally:
            os.close(root)

    def changes(self) -> Changes:
        """The files of the room that differ from those of the repository.

        A file whose change time is that of the repository's is the same, for no program can set that time; of others
        the contents decide. Raises TooManyFiles.
        """
        closed: list[str] = []
        now = dict(_walk(self._room.files.root, ROOT, closed))
        files = {
            path: File(None)
            for path, found in self._base.items()
            if stat.S_ISREG(found.st_mode)
            and (path not in now or stat.S_ISDIR(now[path].st_mode))
            and not any(path.startswith(f"{folder}/") for folder in closed)
        }
        left_out, total, unnamed = dict.fromkeys(closed[:MOST_NAMED], "the folder cannot be read"), 0, 0
        # Files of the repository first, then those near its top: too many others must not push them out.
        for path, found in sorted(
            now.items(), key=lambda item: (item[0] not in self._base, item[0].count("/"), item[0])
        ):
            same = path in self._base and found.st_ctime_ns == self._base[path].st_ctime_ns
            if same or stat.S_ISDIR(found.st_mode):
                continue
            before, executable = base_file(self._repo, path), bool(found.st_mode & stat.S_IXUSR)
            try:
                if total + found.st_size > MOST_ALL or len(files) >= MOST_FILES:
                    raise GradingError(f"the changes are more than {MOST_FILES:,} files or {MOST_ALL >> 20} MiB")
                data = self._room.download(f"{ROOT}/{path}", MOST_FILE)
            except GradingError as error:
                if len(left_out) < MOST_NAMED:
                    left_out[path] = str(error)
                else:
                    unnamed += 1
                continue
            if before is None or before.data != data or before.executable != executable:
                total += len(data)
                files[path] = File(data, executable)
        unnamed += max(0, len(closed) - MOST_NAMED)
        return Changes(files, left_out | ({"...": f"{unnamed:,} more are not named"} if unnamed else {}))


def _walk(root: int, top: str, closed: list[str] | None = None) -> Iterator[tuple[str, os.stat_result]]:
    """Everything below a folder, by path relative to it, without the folders that do not count. Folders that cannot be
    read are added to `closed`."""
    todo, count = [""], 0
    while todo:
        above = todo.pop()
        try:
            folder = open_inside(root, f"{top}/{above}".strip("/") or ".", os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            if closed is not None:
                closed.append(above)
            continue
        try:
            for name in sorted(os.listdir(folder)):
                path = f"{above}/{name}" if above else name
                with contextlib.suppress(OSError):
                    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    is_folder = stat.S_ISDIR(found.st_mode)
                    if name.lower() in METADATA or (is_folder and name in CACHES):
                        continue
                    if is_folder:
                        todo.append(path)
                    yield path, found
                if (count := count + 1) > MOST_ENTRIES:
                    raise TooManyFiles(f"{top or 'the repository'} has more than {MOST_ENTRIES:,} files.")
        finally:
            os.close(folder)


def restore(room: Room, files: Mapping[str, File]) -> None:
    """Bring changes of an earlier room into this one. Raises GradingError if that fails."""
    gone = [f"{ROOT}/{path}" for path, file in files.items() if file.data is None]
    while gone:
        part = [gone.pop()]
        while gone and sum(map(len, part)) < MOST_COMMAND and len(part) < 500:
            part.append(gone.pop())
        done = room.exec(["/bin/rm", "-rf", "--", *part], timeout_s=60)
        if done.exit_code:
            said = done.stderr.decode("utf-8", "replace").strip()[-200:]
            raise GradingError(f"what was deleted before cannot be deleted again: {said}")
    room.upload(
        {f"{ROOT}/{path}": file.data for path, file in files.items() if file.data is not None},
        {f"{ROOT}/{path}": 0o755 if file.executable else 0o644 for path, file in files.items()},
    )


def base_file(repo: Path, path: str, most: int = MOST_FILE) -> File | None:
    """A regular file of the repository; None if it is missing, a link, below a link, or too large."""
    with contextlib.suppress(OSError), _parent(repo, path) as (folder, name):
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        with os.fdopen(descriptor, "rb") as stream:
            found = os.fstat(descriptor)
            if stat.S_ISREG(found.st_mode) and found.st_size <= most:
                return File(stream.read(most), bool(found.st_mode & stat.S_IXUSR))
    return None


def _is_file(repo: Path, path: str) -> bool:
    with contextlib.suppress(OSError), _parent(repo, path) as (folder, name):
        return stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    return False


@contextlib.contextmanager
def _parent(repo: Path, path: str, make: bool = False) -> Iterator[tuple[int, str]]:
    """A descriptor of the folder of a file in the repository, and the file's name. Raises OSError for a path that
    leaves the repository or leads through a link."""
    *folders, name = PurePosixPath(path).parts
    if path.startswith("/") or ".." in (*folders, name):
        raise PermissionError(f"{path} leaves the repository")
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    descriptor = os.open(repo, flags)
    try:
        for folder in folders:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, dir_fd=descriptor)
            deeper = os.open(folder, flags | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = deeper
        yield descriptor, name
    finally:
        os.close(descriptor)


def apply(repo: Path, files: Mapping[str, File], seen: Mapping[str, str | None]) -> dict[str, str]:
    """Write changes to the repository. `seen` has the digest of each file when the agent began (None: there was none);
    a file that has changed since is left alone. Returns why files were not written."""
    refused: dict[str, str] = {}
    for path, file in sorted(files.items(), key=lambda item: item[1].data is not None):  # deletions first
        now = base_file(repo, path)
        digest = None if now is None else now.digest
        if digest == file.digest and (now is None or now.executable == file.executable):
            continue
        if digest != seen.get(path):
            refused[path] = "it was changed here while the agent worked"
            continue
        try:
            with _parent(repo, path, make=file.data is not None) as (folder, name):
                if file.data is None:
                    os.unlink(name, dir_fd=folder)
                    _drop_empty(repo, path)
                else:
                    _replace(folder, name, file)
        except OSError as error:
            refused[path] = error.strerror or str(error)
    return refused


def _drop_empty(repo: Path, path: str) -> None:
    """Remove the folders of a deleted file that are empty now."""
    with contextlib.suppress(OSError):
        for above in list(PurePosixPath(path).parents)[:-1]:
            with _parent(repo, str(above)) as (folder, name):
                os.rmdir(name, dir_fd=folder)


def _replace(folder: int, name: str, file: File) -> None:
    """Write a file beside the old one and rename it."""
    part = f".{name[:80]}.glm5-part"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.suppress(FileNotFoundError):
        os.unlink(part, dir_fd=folder)
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise PermissionError("a link is in its place")
    with os.fdopen(os.open(part, flags, 0o755 if file.executable else 0o644, dir_fd=folder), "wb") as stream:
        stream.write(file.data or b"")
    os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)


def check_work_tree(repo: Path) -> None:
    """Raise UsageError unless `repo` is the top folder of a git work tree."""
    top = _git(repo, ["rev-parse", "--show-toplevel"], check=False)
    if not top or Path(top).resolve() != repo.resolve():
        raise UsageError(f"{repo} is not the top folder of a git work tree; changing it in place needs one.")


def safety_commit(repo: Path, name: str, paths: Iterable[str] = ()) -> str:
    """Keep the state of a git work tree as `refs/glm5/NAME`: untracked files, and those of `paths` even if git ignores
    them. The index and the branch stay as they are. Returns the commit. Raises UsageError if git fails."""
    check_work_tree(repo)
    with tempfile.TemporaryDirectory(prefix="glm5-index-") as folder:
        index = {"GIT_INDEX_FILE": f"{folder}/index"} | _without_filters(repo)
        head = _git(repo, ["rev-parse", "--verify", "--quiet", "HEAD"], check=False)
        if head:
            _git(repo, ["read-tree", "HEAD"], index)
        entries = _git(repo, ["ls-files", "--stage", "-z"], index).split("\0")
        modules = [entry.partition("\t")[2] for entry in entries if entry.startswith("160000 ")]
        # git would ask each for its state, with the programs of its own settings.
        wanted = "\0".join([".", *(f":(exclude,literal){module}" for module in modules)])
        from_input = ["--pathspec-from-file=-", "--pathspec-file-nul"]
        _git(repo, ["add", "--all", *from_input], index, stdin=os.fsencode(wanted))
        there = b"\0".join(os.fsencode(path) for path in paths if _is_file(repo, path))
        if there:
            literal = index | {"GIT_LITERAL_PATHSPECS": "1"}
            _git(repo, ["add", "--force", *from_input], literal, stdin=there)
        tree = _git(repo, ["write-tree"], index)
    who = {f"GIT_{role}_{key}": "glm5" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
    parent = ["-p", head] if head else []
    commit = _git(repo, ["commit-tree", tree, *parent, "-m", f"Before the agent {name}"], who)
    _git(repo, ["update-ref", f"refs/glm5/{name}", commit])
    return commit


def _without_filters(repo: Path) -> dict[str, str]:
    """Variables that have git store files as they are, whatever programs the repository names to convert them."""
    told = _git(repo, ["config", "--name-only", "--get-regexp", r"^filter\..*\.(clean|process|required)$"], check=False)
    names = told.splitlines()
    found = {"GIT_CONFIG_COUNT": str(len(names))} if names else {}
    for number, name in enumerate(names):
        found[f"GIT_CONFIG_KEY_{number}"] = name
        found[f"GIT_CONFIG_VALUE_{number}"] = "false" if name.endswith(".required") else ""
    return found


def _git(
    repo: Path, arguments: Sequence[str], env: Mapping[str, str] | None = None, check: bool = True, stdin: bytes = b""
) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(repo), *_QUIET, *arguments],
            capture_output=True,
            timeout=GIT_S,
            input=stdin,
            env=_environment() | NO_FETCH | dict(env or {}),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"git is needed to change a repository in place: {error}.") from error
    if done.returncode and check:
        why = done.stderr.decode("utf-8", "replace").strip().splitlines() or [""]
        raise UsageError(f"git {arguments[0]} fails in {repo}: {why[-1][:200]}")
    return os.fsdecode(done.stdout).strip()


def _environment() -> dict[str, str]:
    """Ours without the variables by which a git that runs us, such as a hook, names its own repository."""
    return {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}


def diff(repo: Path, files: Mapping[str, File], since: Mapping[str, File] | None = None) -> str:
    """The changes as a patch for `git apply`; binary files are only named. With `since`, what has changed since those
    changes."""
    parts, left = [], MOST_COMPARED
    for path in sorted({*files, *(since or {})}):
        base = base_file(repo, path)
        before, after = (since or {}).get(path, base), files.get(path, base or File(None))
        if before != after:
            text, lines = _file_diff(path, None if before is None or before.data is None else before, after, left)
            parts.append(text)
            left -= lines
    return "".join(parts)


def _file_diff(path: str, before: File | None, after: File, most: int) -> tuple[str, int]:
    """The patch of one file, and the number of lines that were compared, at most `most`."""
    a, b = _quoted(f"a/{path}"), _quoted(f"b/{path}")
    head = [f"diff --git {a} {b}\n"]
    mode, old_mode = _mode(after), _mode(before)
    if before is None:
        head.append(f"new file mode {mode}\n")
    elif after.data is None:
        head.append(f"deleted file mode {old_mode}\n")
    elif mode != old_mode:
        head += [f"old mode {old_mode}\n", f"new mode {mode}\n"]
    old, new = _lines(before), _lines(after)
    if old is None or new is None:
        return "".join([*head, f"Binary files {a} and {b} differ\n"]), 0
    names = ("/dev/null" if before is None else a, "/dev/null" if after.data is None else b)
    alike = _alike(old, new)
    end = _alike(reversed(old[alike:]), reversed(new[alike:]))
    first, last = max(0, alike - CONTEXT), max(0, end - CONTEXT)
    old, new = old[first : len(old) - last], new[first : len(new) - last]
    compared = len(old) + len(new)
    if compared > min(most, MOST_DIFF_LINES):
        spans = [f"{first + bool(lines)},{len(lines)}" for lines in (old, new)]
        body = [f"--- {names[0]}\n", f"+++ {names[1]}\n", f"@@ -{spans[0]} +{spans[1]} @@\n"]
        lead, tail = alike - first, end - last
        body += [" " + line for line in old[:lead]]
        body += ["-" + line for line in old[lead : len(old) - tail]] + ["+" + x for x in new[lead : len(new) - tail]]
        body += [" " + line for line in old[len(old) - tail :]]
        compared = 0
    else:
        body = list(difflib.unified_diff(old, new, *names, n=CONTEXT))
        body[2:] = [_moved(line, first) if line[0] == "@" else line for line in body[2:]]
    return "".join(head) + "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in body
    ), compared


def _alike(old: Iterable[str], new: Iterable[str]) -> int:
    """The number of lines that both begin with."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False)))


def _moved(head: str, lines: int) -> str:
    """The first line of a hunk for a place that is so many lines further down."""
    return re.sub(r"(?<=[-+])\d+", lambda number: str(int(number[0]) + lines), head)


def _lines(file: File | None) -> list[str] | None:
    """Lines with their ends; None for a binary file."""
    data = b"" if file is None or file.data is None else file.data
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    if "\0" in text:
        return None
    *whole, last = text.split("\n")
    return [line + "\n" for line in whole] + ([last] if last else [])


def _quoted(path: str) -> str:
    """A path as git writes it in a patch: in quotes if it holds anything that could be mistaken."""
    if path.isprintable() and path.isascii() and not {'"', "\\"} & set(path):
        return path
    return '"' + "".join(chr(b) if 32 <= b < 127 and b not in b'"\\' else f"\\{b:03o}" for b in os.fsencode(path)) + '"'


def _mode(file: File | None) -> str:
    return "100755" if file is not None and file.executable else "100644"
