"""Files that come to a machine in pieces: a folder with them for as long as a process there needs it. It is in a folder
that only the user of these processes can enter."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import random
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from glm5.errors import EngineError

LOCK, COMPLETE = "lock", "complete"
SHARED_MEMORY = Path("/dev/shm")
SHARE = 4
"""Shared memory must have this many times the size of the files, else they go to the folder for temporary files."""
KINDS = (".safetensors", ".json", ".jinja")
"""Kinds of files that a checkpoint is read from."""
WHOLE, SAMPLES, SAMPLE = 1 << 20, 16, 1 << 14
"""Of files beyond `WHOLE` bytes a fingerprint has as many samples of as many bytes."""
Piece = tuple[str, int, str]
"""Name of the file that it belongs to, bytes, SHA-256. The pieces of a file are in order and next to each other."""


@contextlib.contextmanager
def arrived(run: str, pieces: Sequence[Piece], read: Callable[[int], Any]) -> Iterator[Path]:
    """A folder with the files of `pieces`, whose bytes are `read(index)`. Processes of this machine that need the same
    files of the same `run` at the same time share one folder; the last one removes it. `run` must be hard to guess.

    Raises:
        EngineError: a piece has not the hash that it should have, or others can enter the folder for such folders.
        OSError: there is no room.
    """
    folder = _private(_parent(sum(size for _, size, _ in pieces))) / f"{run}-{digest(json.dumps(pieces).encode())[:16]}"
    while True:
        with _locked(folder, fcntl.LOCK_SH) as lock:
            if lock and (folder / COMPLETE).exists():
                try:
                    yield folder
                finally:
                    _remove_if_last(folder, lock)
                return
        # Without waiting: those who hold the folder may have found it complete meanwhile, and hold it for long.
        with _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB) as lock:
            if lock and not (folder / COMPLETE).exists():
                try:
                    _write(folder, pieces, read)
                except BaseException:
                    _remove(folder)
                    raise
        if not lock:
            time.sleep(random.uniform(0.001, 0.01))


def remove_leftovers() -> None:
    """Remove the folders of processes that were killed. Raises EngineError like `arrived`."""
    for parent in (SHARED_MEMORY, Path(tempfile.gettempdir())):
        if parent.is_dir():
            for folder in _private(parent).iterdir():
                with contextlib.suppress(OSError):
                    folder.rmdir()  # if it is empty
                with contextlib.suppress(OSError), (folder / LOCK).open("r+b") as lock:
                    _remove_if_last(folder, lock)


def _parent(size: int) -> Path:
    """Equal for all processes of a machine: it depends on the whole size of shared memory, not on what is free."""
    if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).total >= SHARE * size:
        return SHARED_MEMORY
    return Path(tempfile.gettempdir())


def _private(parent: Path) -> Path:
    """The folder in `parent` that only this user can enter; any user may write to `parent` itself."""
    folder = parent / f"glm5-nodes-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise EngineError(f"{folder} must be a folder that only its user can enter; remove it.")
    return folder


@contextlib.contextmanager
def _locked(folder: Path, kind: int) -> Iterator[IO[bytes] | None]:
    """The lock of the folder, which is made; None if others have it and `kind` says not to wait."""
    while True:
        with contextlib.suppress(FileExistsError):  # `exist_ok` would raise if others remove it at this moment
            folder.mkdir(mode=0o700)
        try:
            lock = (folder / LOCK).open("ab")
        except FileNotFoundError:  # the folder has been removed meanwhile
            continue
        try:
            fcntl.flock(lock, kind)
        except BlockingIOError:
            lock.close()
            yield None
            return
        if _present(folder, lock):
            break
        lock.close()
    with lock:
        yield lock


def _present(folder: Path, lock: IO[bytes]) -> bool:
    """Whether `lock` is the lock of the folder that has this name now."""
    try:
        return os.path.samestat(os.fstat(lock.fileno()), (folder / LOCK).stat())
    except FileNotFoundError:
        return False


def _remove_if_last(folder: Path, lock: IO[bytes]) -> None:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _present(folder, lock):
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a folder whose lock is held. Nobody may see half of it, so it loses its name first."""
    gone = folder.with_name(f"gone-{secrets.token_hex(8)}")
    with contextlib.suppress(OSError):
        folder.rename(gone)
        for file in sorted(gone.iterdir(), key=lambda file: file.name == LOCK):  # the lock last, for `remove_leftovers`
            file.unlink()
        gone.rmdir()


def _write(folder: Path, pieces: Sequence[Piece], read: Callable[[int], Any]) -> None:
    for left in folder.iterdir():  # by a process that was killed meanwhile
        if left.name != LOCK:
            left.unlink()
    written = ""
    for index, (name, _, wanted) in enumerate(pieces):
        if Path(name).name != name or name in ("", "..", LOCK, COMPLETE):
            raise EngineError(f"{name!r} is no name of a file.")
        piece = read(index)
        if digest(piece) != wanted:
            raise EngineError(f"A piece of {name} has changed on its way to this machine.")
        with (folder / name).open("ab" if name == written else "xb") as file:
            file.write(piece)
        written = name
        del piece
    (folder / COMPLETE).touch()


def checkpoint_files(folder: Path) -> list[Path]:
    """The files of a checkpoint. Raises EngineError for a folder without any, OSError for one that cannot be read."""
    found = sorted(path for path in folder.iterdir() if path.suffix in KINDS and path.is_file())
    if not found:
        raise EngineError(f"{folder} has no files of a checkpoint ({', '.join(KINDS)}).")
    return found


def fingerprint(folder: Path) -> str:
    """SHA-256 over names and sizes of a checkpoint's files and their content; of large ones over samples of it, their
    first and last bytes among them. Raises like `checkpoint_files`."""
    found = hashlib.sha256()
    for path in checkpoint_files(folder):
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            found.update(json.dumps([path.name, size]).encode())
            offsets = [0] if size <= WHOLE else [(size - SAMPLE) * i // (SAMPLES - 1) for i in range(SAMPLES)]
            for offset in offsets:
                file.seek(offset)
                found.update(file.read(WHOLE if size <= WHOLE else SAMPLE))
    return found.hexdigest()


def digest(data: Any) -> str:
    """SHA-256 of a buffer, in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()
