"""Files of an agent's writable folders, handled inside the room by process 1 (`agent_launcher.py`).

Call `collect` and `wipe` only if no process of the agent is left.
"""

from __future__ import annotations

import contextlib
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from glm5.sandbox.launcher import BOX
else:
    from launcher import BOX

FOLDERS = (b"/tmp", BOX.encode())
MOST_LEFT = 1000  # names of files that are too large
MOST_WIPED = 20_000  # files and folders; with more, a new room takes less time


def write_files(files: list[list[bytes]]) -> None:
    for name, data in files:
        path = os.path.join(FOLDERS[1], name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as stream:
            stream.write(data)
        if data.startswith(b"#!"):
            os.chmod(path, 0o755)


def walk(top: bytes, without: Collection[bytes] = ()) -> Iterator[tuple[bytes, os.stat_result]]:
    """Every entry under `top`, folders after their contents. Symbolic links are not followed."""
    todo = [(top, False)]
    while todo:
        path, seen = todo.pop()
        try:
            found = os.lstat(path)
            if stat.S_ISDIR(found.st_mode) and not seen and path not in without:
                with contextlib.suppress(PermissionError):  # the launcher's own folder
                    os.chmod(path, 0o700)
                todo += [(path, True)] + [(os.path.join(path, name), False) for name in sorted(os.listdir(path))[::-1]]
                continue
        except OSError:  # a path that is too long
            continue
        yield path, found


def collect(most: int) -> bytes:
    """Rows of the regular files in the working folder, at most `most` bytes with their names; the names of others."""
    rows, top, left = [], FOLDERS[1], 0
    for path, found in walk(top):
        if not stat.S_ISREG(found.st_mode):
            continue
        name = path[len(top) + 1 :]
        if found.st_size + len(name) > most:
            left += 1
            rows += [row(b"left", name)] if left <= MOST_LEFT else []
            continue
        os.chmod(path, 0o600)
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as stream:
            data = stream.read(found.st_size)
        most -= len(data) + len(name)
        rows.append(row(b"file", name, data))
    return b"".join(rows)


def row(*parts: bytes) -> bytes:
    whole = b"".join(b"%d:%s" % (len(part), part) for part in parts)
    return b"%d:%s" % (len(whole), whole)


def landmarks(shown: list[bytes]) -> dict[bytes, tuple[int, int]]:
    """What must stay in the writable folders: these, read-only paths inside, and the folders that lead to them. Gives
    device and inode by path."""
    kept = set(FOLDERS)
    for path in shown:
        while path.startswith(FOLDERS[0] + b"/"):
            kept.add(path)
            path = os.path.dirname(path)
    return {path: _identity(path) for path in kept}


def _identity(path: bytes) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


def wipe(kept: dict[bytes, tuple[int, int]], shown: list[bytes]) -> bool:
    """Empty the writable folders but for `kept`, their `landmarks`. False if there is too much in them, if something
    else stays, or if one of `kept` is not as it was."""
    try:
        if sum(space.f_files - space.f_ffree for space in map(os.statvfs, FOLDERS)) > MOST_WIPED:
            return False
        for top in FOLDERS:
            for path, found in walk(top, shown):
                if path not in kept:
                    (os.rmdir if stat.S_ISDIR(found.st_mode) else os.unlink)(path)
        if any(path not in kept for top in FOLDERS for path, _ in walk(top, shown)):
            return False
        return all(_identity(path) == identity for path, identity in kept.items())
    except OSError:
        return False


def full() -> bool:
    return any(min(s.f_bavail, s.f_favail) == 0 for s in map(os.statvfs, FOLDERS))
