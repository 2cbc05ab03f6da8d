"""Moves files between the machine and a room, from outside, and never follows a link that the room's programs made.

Everything starts at a descriptor of the room's root folder and resolves inside it, by `openat2` with RESOLVE_IN_ROOT
and RESOLVE_NO_SYMLINKS. Programs may run meanwhile and change the tree; what is read is bounded in any case.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from glm5.errors import GradingError

OPENAT2 = 437
NO_MAGIC_LINKS, NO_SYMLINKS, IN_ROOT = 0x02, 0x04, 0x10
MOST_ENTRIES = 200_000
CHUNK = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)


class RoomFileError(GradingError):
    """A file of a room cannot be read or written: it is missing, a link, of another kind, or too large."""


class RoomFileTooLarge(RoomFileError):
    """A file has more bytes than were asked for."""


def open_inside(root: int, path: str, flags: int, mode: int = 0) -> int:
    """Open `path` below the folder `root`, following no links. Raises OSError.

    A terminal of the room never becomes ours: its end would then be the end of this process, if that leads a session.
    """
    flags |= os.O_CLOEXEC if flags & os.O_PATH else os.O_CLOEXEC | os.O_NOCTTY
    how = struct.pack("=3Q", flags, mode, NO_MAGIC_LINKS | NO_SYMLINKS | IN_ROOT)
    name = os.fsencode(path)
    if b"\0" in name:
        raise ValueError("a path holds a null character")
    result = int(_libc.syscall(ctypes.c_long(OPENAT2), root, name, how, ctypes.c_size_t(len(how))))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
    return result


@dataclass(frozen=True)
class Entry:
    """A file of a room. `mode` as of `os.lstat`; `size` in bytes."""

    path: str
    mode: int
    size: int


@dataclass(frozen=True)
class RoomFiles:
    """The files of one room. `root`: descriptor of its root folder. `owner`: user id of new files; None: the caller."""

    root: int
    owner: int | None

    def read(self, path: str, limit: int) -> bytes:
        """A regular file of at most `limit` bytes."""
        try:
            descriptor = open_inside(self.root, path, os.O_RDONLY | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise RoomFileError(f"{path} of the room cannot be read: {_why(error)}.") from error
        data = bytearray()
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise RoomFileError(f"{path} of the room is not a regular file.")
            while len(data) <= limit and (chunk := os.read(descriptor, min(CHUNK, limit + 1 - len(data)))):
                data += chunk
        except OSError as error:  # of /proc: the memory of a process
            raise RoomFileError(f"{path} of the room cannot be read: {_why(error)}.") from error
        finally:
            os.close(descriptor)
        if len(data) > limit:
            raise RoomFileTooLarge(f"{path} of the room has more than {limit:,} bytes.")
        return bytes(data)

    def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a file; missing folders are made, a link or file in its place is replaced."""
        parts = PurePosixPath(path).parts
        if not path.startswith("/") or len(parts) < 2 or ".." in parts or "\0" in path:
            raise RoomFileError(f"{path!r}: use an absolute path of the room without '..'.")
        try:
            folder = self.folder("/".join(parts[1:-1]))
            try:
                self._create(folder, parts[-1], data, mode)
            finally:
                os.close(folder)
        except OSError as error:
            raise RoomFileError(f"{path} of the room cannot be written: {_why(error)}.") from error

    def _create(self, folder: int, name: str, data: bytes, mode: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=folder)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            if self.owner is not None:
                os.fchown(descriptor, self.owner, self.owner)
            os.fchmod(descriptor, mode & 0o777)

    def folder(self, path: str) -> int:
        """A descriptor of a folder; it and its parents are made if they are missing. Raises OSError."""
        missing = list[str]()
        while True:
            try:
                found = open_inside(self.root, path or ".", os.O_PATH | os.O_DIRECTORY)
                break
            except FileNotFoundError:
                if not path:
                    raise
                path, _, name = path.rstrip("/").rpartition("/")
                missing.append(name)
        for name in reversed(missing):
            parent = found
            try:
                os.mkdir(name, 0o755, dir_fd=parent)
                found = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
            finally:
                os.close(parent)
            if self.owner is not None:
                os.fchown(found, self.owner, self.owner)
        return found

    def entries(self, path: str, most: int = MOST_ENTRIES) -> Iterator[Entry]:
        """Everything below a folder, parents first, in the order of names. Links are entries and not followed."""
        todo, count = [path.rstrip("/")], 0
        while todo:
            above = todo.pop()
            try:
                folder = open_inside(self.root, above or ".", os.O_RDONLY | os.O_DIRECTORY)
            except OSError as error:
                if above == path.rstrip("/"):
                    raise RoomFileError(f"{path} of the room cannot be read: {_why(error)}.") from error
                continue
            below = []
            try:
                for name in sorted(os.listdir(folder)):
                    try:
                        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    except OSError:  # it is gone, or its folder may be listed only
                        continue
                    if (count := count + 1) > most:
                        raise RoomFileError(f"{path} of the room has more than {most:,} entries.")
                    yield Entry(f"{above}/{name}", found.st_mode, found.st_size)
                    if stat.S_ISDIR(found.st_mode):
                        below.append(f"{above}/{name}")
            finally:
                os.close(folder)
            todo += reversed(below)

    def read_tree(self, path: str, limit: int) -> dict[str, bytes]:
        """The regular files below a folder by their path relative to it, at most `limit` bytes in sum."""
        files, left = dict[str, bytes](), limit
        for entry in self.entries(path):
            if stat.S_ISREG(entry.mode):
                if entry.size > left:
                    raise RoomFileError(f"{path} of the room has more than {limit:,} bytes.")
                data = self.read(entry.path, left)
                left -= len(data)
                files[entry.path[len(path.rstrip("/")) + 1 :]] = data
        return files


def _why(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
