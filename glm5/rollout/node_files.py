"""Files that come to a machine in pieces: a private folder with them for as long as a process there needs it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from glm5.errors import EngineError

PREFIX, LOCK, COMPLETE = "glm5-node-", "lock", "complete"
SHARED_MEMORY = Path("/dev/shm")
SHARE = 4
"""Shared memory must have this many times the size of the files, else they go to the folder for temporary files."""
Piece = tuple[str, int, str]
"""Name of the file that it belongs to, bytes, SHA-256. The pieces of a file are in order and next to each other."""


@contextlib.contextmanager
def arrived(run: str, pieces: Sequence[Piece], read: Callable[[int], Any]) -> Iterator[Path]:
    """A folder with the files of `pieces`, whose bytes are `read(index)`. Processes of this machine that need the same
    files of the same `run` at the same time share one folder; the last one removes it. `run` must be hard to guess.

    Raises:
        EngineError: a piece has not the hash that it should have.
        OSError: there is no room.
    """
    folder = _parent(sum(size for _, size, _ in pieces)) / f"{PREFIX}{run}-{digest(json.dumps(pieces).encode())[:16]}"
    while True:
        with _locked(folder, fcntl.LOCK_SH) as lock:
            if (folder / COMPLETE).exists():
                try:
                    yield folder
                finally:
                    _remove_if_last(folder, lock)
                return
        with _locked(folder, fcntl.LOCK_EX):
            if not (folder / COMPLETE).exists():
                try:
                    _write(folder, pieces, read)
                except BaseException:
                    shutil.rmtree(folder, ignore_errors=True)
                    raise


def remove_leftovers() -> None:
    """Remove the folders of processes that were killed."""
    for parent in (SHARED_MEMORY, Path(tempfile.gettempdir())):
        for folder in parent.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError), (folder / LOCK).open("r+b") as lock:
                _remove_if_last(folder, lock)


def _parent(size: int) -> Path:
    """Equal for all processes of a machine: it depends on the whole size of shared memory, not on what is free."""
    if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).total >= SHARE * size:
        return SHARED_MEMORY
    return Path(tempfile.gettempdir())


@contextlib.contextmanager
def _locked(folder: Path, kind: int) -> Iterator[IO[bytes]]:
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            lock = (folder / LOCK).open("ab")
        except FileNotFoundError:  # the folder has been removed meanwhile
            continue
        fcntl.flock(lock, kind)
        if os.fstat(lock.fileno()).st_nlink:
            break
        lock.close()
    with lock:
        yield lock


def _remove_if_last(folder: Path, lock: IO[bytes]) -> None:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)


def _write(folder: Path, pieces: Sequence[Piece], read: Callable[[int], Any]) -> None:
    for index, (name, _, wanted) in enumerate(pieces):
        piece = read(index)
        if digest(piece) != wanted:
            raise EngineError(f"A piece of {name} has changed on its way to this machine.")
        with (folder / name).open("ab") as file:
            file.write(piece)
        del piece
    (folder / COMPLETE).touch()


def digest(data: Any) -> str:
    """SHA-256 of a buffer, in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()
