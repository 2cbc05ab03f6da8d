"""Directories that are either complete or absent: write aside, hash, publish by renaming, verify on reading."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from glm5.errors import CheckpointError, Glm5Error

MANIFEST = "manifest.json"


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full disk or a missing permission into one sentence that says what was kept."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise CheckpointError(
                f"No space left while writing {path}; what was saved before is intact. Free some space and run again."
            ) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise CheckpointError(f"Cannot write {path}: {error.strerror}. Choose a writable folder.") from error
        raise
    except Glm5Error:
        raise
    except Exception as error:
        # safetensors wraps the operating system's error in its own exception type.
        if "os error 28" in str(error).lower() or "no space left" in str(error).lower():
            raise CheckpointError(
                f"No space left while writing {path}; what was saved before is intact. Free some space and run again."
            ) from error
        raise


@contextmanager
def publish_dir(path: Path) -> Iterator[Path]:
    """Yield a fresh folder to fill; when the block ends well, it becomes `path` with a manifest of hashes.

    An earlier `path` is replaced only after everything is on disk. If the block or the disk fails, `path` stays as it was.
    """
    aside = path.with_name(f".{path.name}.writing")
    old = path.with_name(f".{path.name}.old")
    with disk_errors(path):
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
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
        shutil.rmtree(old, ignore_errors=True)


def recover_dir(path: Path) -> None:
    """Undo a crash between the two renames of `publish_dir`: put the previous version back, drop what was half written."""
    old = path.with_name(f".{path.name}.old")
    if old.exists() and not path.exists():
        old.rename(path)
    shutil.rmtree(path.with_name(f".{path.name}.writing"), ignore_errors=True)


def write_manifest(folder: Path) -> None:
    """List size and SHA-256 of every file below `folder`."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    listing = {p.relative_to(folder).as_posix(): {"bytes": p.stat().st_size, "sha256": sha256_file(p)} for p in files}
    (folder / MANIFEST).write_text(json.dumps({"files": listing}, indent=1) + "\n", encoding="utf-8")


def verify_manifest(folder: Path) -> bool:
    """Check every listed file. False when the folder has no manifest (it is not ours); raises where one is damaged."""
    path = folder / MANIFEST
    if not path.exists():
        return False
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        expected = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{path} is damaged; the checkpoint cannot be trusted. Use an earlier one.") from None
    for name, (size, digest) in expected.items():
        file = folder / name
        if not file.resolve().is_relative_to(folder.resolve()):
            raise CheckpointError(f'{path} names "{name}", which lies outside the checkpoint.')
        if not file.is_file() or file.stat().st_size != size or sha256_file(file) != digest:
            raise CheckpointError(
                f"{file} is missing or damaged (size or SHA-256 differs from {MANIFEST}). Use an earlier checkpoint."
            )
    return True


def atomic_write(path: Path, text: str) -> None:
    """Replace a text file in one step."""
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
