"""Files of the writable folders of an agent's room, handled from outside (see `room_files.py`).

Threads of a worker may change them meanwhile: every step resolves its path inside the room and follows no link.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from glm5.sandbox.room_files import open_inside

FOLDERS = ("/tmp", "/box")
MOST_PATH = 4000  # bytes of a path; in a folder of another room it may be longer
MOST_LEFT = 1000  # names of files that are too large
MOST_WIPED = 20_000  # files and folders; with more, a new room takes less time


@dataclass
class Kept:
    """What an agent left: see `AgentRun`."""

    files: dict[str, bytes] = field(default_factory=dict)
    executable: set[str] = field(default_factory=set)
    folders: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


class AgentFiles:
    """The folders of the room whose root folder is the descriptor `root`. `shown` are read-only paths and links of the
    caller, which may lie in them: those, and the folders that lead to them, must stay."""

    def __init__(self, root: int, shown: Iterable[str]) -> None:
        self._root, self._shown = root, frozenset(shown)
        kept = set(FOLDERS)
        for path in self._shown:
            while path.startswith(f"{FOLDERS[0]}/"):
                kept.add(path)
                path = os.path.dirname(path)
        self._landmarks = {path: self._identity(path) for path in kept}

    @contextlib.contextmanager
    def _open(self, path: str, flags: int) -> Iterator[int]:
        descriptor = open_inside(self._root, path, flags)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _stat(self, path: str) -> os.stat_result:
        with self._open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY) as folder:
            return os.stat(os.path.basename(path), dir_fd=folder, follow_symlinks=False)

    def _allow(self, path: str, mode: int) -> None:
        with self._open(path, os.O_PATH) as place:
            os.chmod(f"/proc/self/fd/{place}", mode)

    def _identity(self, path: str) -> tuple[int, int]:
        found = self._stat(path)
        return found.st_dev, found.st_ino

    def present(self) -> bool:
        """Whether the folders are still there; a room that was killed from outside has lost them."""
        return all(self._identity(path) == self._landmarks[path] for path in FOLDERS)

    def _spaces(self) -> Iterator[os.statvfs_result]:
        for path in FOLDERS:
            with self._open(path, os.O_PATH | os.O_DIRECTORY) as folder:
                yield os.fstatvfs(folder)

    def full(self) -> bool:
        return any(min(space.f_bavail, space.f_favail) == 0 for space in self._spaces())

    def _walk(self, top: str, without: Iterable[str] = ()) -> Iterator[tuple[str, os.stat_result]]:
        """Every entry under `top`, folders after their contents. Symbolic links are not followed."""
        todo = [(top, False)]
        while todo:
            path, seen = todo.pop()
            try:
                found = self._stat(path)
                if stat.S_ISDIR(found.st_mode) and not seen and path not in without:
                    if path in FOLDERS or path not in self._landmarks:
                        self._allow(path, 0o700)
                    with self._open(path, os.O_RDONLY | os.O_DIRECTORY) as folder:
                        below = [(f"{path}/{name}", False) for name in sorted(os.listdir(folder))[::-1]]
                    todo += [(path, True), *below]
                    continue
            except OSError:  # a path that is too long
                continue
            yield path, found

    def collect(self, most: int) -> Kept:
        """The working folder: regular files, at most `most` bytes of them with names, the executable ones, folders
        without any, and the names of what is beyond that. Links and special files are not kept."""
        kept, top, filled = Kept(), FOLDERS[1], set[str]()
        for path, found in self._walk(top):
            folder, name = stat.S_ISDIR(found.st_mode), path[len(top) + 1 :]
            if path in filled:
                filled.add(os.path.dirname(path))
            if path in filled or path == top or not (folder or stat.S_ISREG(found.st_mode)):
                continue
            size = (0 if folder else found.st_size) + len(os.fsencode(name))
            if size > most or len(os.fsencode(path)) > MOST_PATH:
                if not folder and len(kept.left_out) < MOST_LEFT:
                    kept.left_out.append(name)
                continue
            if not folder:
                self._allow(path, 0o600)
                with self._open(path, os.O_RDONLY | os.O_NONBLOCK) as file, open(file, "rb", closefd=False) as stream:
                    kept.files[name] = stream.read(found.st_size)
                if found.st_mode & stat.S_IXUSR:
                    kept.executable.add(name)
            else:
                kept.folders.append(name)
            most -= size
            filled.add(os.path.dirname(path))
        return kept

    def wipe(self) -> bool:
        """Empty the folders but for what must stay. False if there is too much in them, if something else stays, or if
        what must stay is not as it was."""
        try:
            if sum(space.f_files - space.f_ffree for space in self._spaces()) > MOST_WIPED:
                return False
            for top in FOLDERS:
                for path, found in self._walk(top, self._shown):
                    if path not in self._landmarks:
                        with self._open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY) as folder:
                            remove = os.rmdir if stat.S_ISDIR(found.st_mode) else os.unlink
                            remove(os.path.basename(path), dir_fd=folder)
            if any(path not in self._landmarks for top in FOLDERS for path, _ in self._walk(top, self._shown)):
                return False
            return all(self._identity(path) == identity for path, identity in self._landmarks.items())
        except OSError:
            return False
