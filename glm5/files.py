"""Directories that are either complete or absent: write to a temporary folder, hash, rename, verify when reading."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5.errors import CheckpointError, DataError, Glm5Error

MANIFEST = "manifest.json"
_HASHED_AT_ONCE = 8
_MOST_MANIFEST = 64 << 20  # bytes


def read_small(path: Path, limit: int) -> bytes:
    """A regular file of at most `limit` bytes. Raises OSError, also for a larger one and for a pipe or a device, which
    could be endless or never answer: a folder from elsewhere may contain one or a link to one."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a file")
    with os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        raw = file.read(limit + 1)
    if len(raw) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit:,} bytes")
    return raw


def sha256_file(path: Path, stop: threading.Event | None = None) -> str:
    """Hex SHA-256 of a file's bytes; of its beginning if `stop` is set before the end."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while not (stop is not None and stop.is_set()) and (block := file.read(1 << 20)):
            digest.update(block)
    return digest.hexdigest()


def sha256_files(paths: Sequence[Path], unreadable: str | None = None) -> list[str]:
    """Hex SHA-256 of every file, several at a time: hashing does not hold the interpreter's lock. An interrupt ends it.

    Raises OSError for a file that cannot be read, or returns `unreadable` for it if that is given.
    """
    stop = threading.Event()

    def hashed(path: Path) -> str:
        try:
            return sha256_file(path, stop)
        except OSError:
            if unreadable is None:
                raise
            return unreadable

    pool = ThreadPoolExecutor(max(1, min(_HASHED_AT_ONCE, len(paths), os.cpu_count() or 1)))
    try:
        return list(pool.map(hashed, paths))
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


@contextmanager
def exclusive(path: Path, refusal: str) -> Iterator[None]:
    """Lock the folder `path` (made if missing) for this process while the block runs. Raises CheckpointError with the
    text `refusal` while another process has the lock. The lock ends with the process, even after a crash."""
    with disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(refusal) from None
        except OSError:
            warnings.warn(f"{path} is on a file system without locks; let no other run write there.", stacklevel=3)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full disk or a missing permission into one sentence that says what was kept."""
    try:
        yield
    except Glm5Error:
        raise
    except Exception as error:
        code = _error_number(error)
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise CheckpointError(
                f"No space left while writing {path}; what was saved before is intact. Free some space and run again."
            ) from error
        if code in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise CheckpointError(
                f"Cannot write {path}: {os.strerror(code).lower()}. Choose a writable folder."
            ) from error
        raise


def _error_number(error: Exception) -> int | None:
    """The operating system's error number; safetensors wraps it in its own exception and only names it in the text."""
    if isinstance(error, OSError):
        return error.errno
    named = re.search(r"\(os error (\d+)\)", str(error))
    return int(named[1]) if named else None


@contextmanager
def publish_dir(path: Path, *, foreign: bool = False, unlike: str = "") -> Iterator[Path]:
    """Yield a new folder to fill; after the block it becomes `path`, with a manifest of hashes.

    An earlier `path` is replaced only after everything is on disk. If the block or the disk fails, `path` is unchanged.
    Raises CheckpointError while another process writes it, and for a `path` that is a file, or a folder with content
    but no manifest: a mistyped name destroys nothing. With `foreign` such a folder is replaced too. A folder with a
    file like the pattern `unlike` is of another kind, and never replaced.
    """
    path = Path(os.path.realpath(path))  # a link to a folder stays one
    if path.exists() and not (path.is_dir() and (foreign or (path / MANIFEST).exists() or not any(path.iterdir()))):
        raise CheckpointError(f"{path} exists and is not a folder that glm5 wrote; choose another one, or remove it.")
    other = next(path.glob(unlike), None) if unlike and path.is_dir() else None
    if other is not None:
        raise CheckpointError(f"{path} holds {other.name}, which this would replace; choose another folder.")
    busy = f"Another process is writing {path}; wait for it, or choose another folder."
    aside = path.with_name(f".{path.name}.writing")
    old = path.with_name(f".{path.name}.old")
    with disk_errors(path):
        recover_dir(path)
        try:
            aside.mkdir(parents=True)
        except FileExistsError:
            raise CheckpointError(busy) from None
        held = _lock(aside)
        if not aside.exists():  # it looked abandoned to another process in the moment before it was locked
            raise CheckpointError(busy)
        try:
            yield aside
            write_manifest(aside)
            for file in aside.rglob("*"):
                _sync(file)
            shutil.rmtree(old, ignore_errors=True)
            if path.exists():
                path.rename(old)
            aside.rename(path)
            _sync(path.parent)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            if old.exists() and not path.exists():
                old.rename(path)
            raise
        finally:
            if held is not None:
                os.close(held)
        shutil.rmtree(old, ignore_errors=True)


def _lock(folder: Path) -> int | None:
    """A descriptor that locks `folder` until it is closed; None if another process has it or there is no folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:  # a file system without locks
        pass
    return descriptor


def recover_dir(path: Path) -> None:
    """Undo a crash between the two renames of `publish_dir`: restore the previous version, drop a half-written one, but
    leave alone what another process is writing."""
    path = Path(os.path.realpath(path))
    aside, old = (path.with_name(f".{path.name}.{end}") for end in ("writing", "old"))
    held = _lock(aside)
    if held is None and aside.exists():
        return
    if old.exists() and not path.exists():
        old.rename(path)
    shutil.rmtree(aside, ignore_errors=True)
    if held is not None:
        os.close(held)


def write_manifest(folder: Path) -> None:
    """List size and SHA-256 of every file below `folder`."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    listing = {p.relative_to(folder).as_posix(): {"bytes": p.stat().st_size, "sha256": sha256_file(p)} for p in files}
    (folder / MANIFEST).write_text(json.dumps({"files": listing}, indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class ListedFile:
    """A file as its folder's manifest describes it; `bytes` is its size."""

    folder: Path
    name: str
    bytes: int
    sha256: str

    @property
    def path(self) -> Path:
        return self.folder / self.name

    def damage(self, remedy: str) -> str:
        """What to say if it is not as described."""
        return f"{self.path} is missing or damaged (size or SHA-256 differs from {MANIFEST}). {remedy}"


def listed_files(folder: Path, error: type[Glm5Error], kind: str, remedy: str) -> list[ListedFile] | None:
    """The files of a folder's manifest; None without a manifest. Raises `error` for a manifest that is damaged or names
    a file outside the folder."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        files = json.loads(read_small(path, _MOST_MANIFEST))["files"]
        found = [ListedFile(folder, str(n), int(entry["bytes"]), str(entry["sha256"])) for n, entry in files.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise error(f"{path} is damaged; the {kind} cannot be trusted. {remedy}") from None
    root = folder.resolve()
    for file in found:
        if "\0" in file.name or not file.path.resolve().is_relative_to(root):
            raise error(f'{path} names "{file.name}", which lies outside the {kind}. {remedy}')
    return found


def damaged(files: Sequence[ListedFile]) -> list[ListedFile]:
    """Those that are missing, or whose size or hash differs."""
    sized, bad = [], set()
    for file in files:
        try:
            intact = file.path.is_file() and file.path.stat().st_size == file.bytes
        except OSError:
            intact = False
        sized += [file] * intact
        if not intact:
            bad.add(file)
    hashes = sha256_files([file.path for file in sized], unreadable="")
    bad |= {file for file, sha256 in zip(sized, hashes, strict=True) if sha256 != file.sha256}
    return [file for file in files if file in bad]


def verify_manifest(
    folder: Path,
    error: type[Glm5Error] = CheckpointError,
    kind: str = "checkpoint",
    remedy: str = "Use an earlier checkpoint.",
    settings: Callable[[str], bool] = lambda name: False,
) -> bool:
    """Check every listed file. Returns False for a folder without a manifest (it is not ours). Raises `error` for a
    damaged file; the message calls the folder a `kind` and ends with `remedy`. Files with a name for which `settings`
    is true may be edited: one warning lists the edited ones."""
    files = listed_files(folder, error, kind, remedy)
    if files is None:
        return False
    edited = []
    for file in damaged(files):
        if not (settings(file.name) and file.path.is_file()):
            raise error(file.damage(remedy))
        edited.append(file.name)
    if edited:
        warnings.warn(f"{folder}: edited since it was saved, and used as it is: {', '.join(edited)}.", stacklevel=2)
    return True


def atomic_write(path: Path, text: str) -> None:
    """Replace a text file atomically."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.writing")
        try:
            aside.write_text(text, encoding="utf-8")
            _sync(aside)
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSONL file; a last line cut off by a crash is left out, and removed from the file. Raises
    DataError for any other line that is not an object of JSON."""
    if not path.is_file():
        return
    good = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict):
                raise DataError(f"{path}:{number} is damaged; restore the file, or remove this line.")
            good += len(line)
            yield row
    if good < path.stat().st_size:
        with path.open("r+b") as file:
            file.truncate(good)
