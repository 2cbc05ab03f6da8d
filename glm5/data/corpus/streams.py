"""Untrusted bytes: files opened, decompressed and read within limits."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import stat
import tarfile
from pathlib import Path
from typing import IO, Any, cast

from glm5.config.corpus import LimitConfig

_MEMORY_OF_XZ = 256 << 20


class Refused(Exception):
    """Something that is skipped; its text is a key of `glm5.data.corpus.text.REASONS`."""


def opened(path: Path, most: int) -> IO[bytes]:
    """A regular file of at most `most` bytes. Raises Refused; never waits for a pipe."""
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb")
    except OSError:
        raise Refused("unreadable") from None
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode) or status.st_size > most:
        file.close()
        raise Refused("too_large" if stat.S_ISREG(status.st_mode) else "unreadable")
    return file


def room_of(file: IO[bytes], limits: LimitConfig) -> int:
    """Bytes that a file may expand to."""
    return limits.document_bytes + limits.expansion * os.fstat(file.fileno()).st_size


def decompressed(file: IO[bytes], compression: str) -> IO[bytes]:
    """The content of a file with one of `glm5.data.corpus.kinds.COMPRESSIONS`, or with none."""
    if compression in (".gz", ".dz"):
        return cast(IO[bytes], gzip.GzipFile(fileobj=file))
    if compression == ".bz2":
        return cast(IO[bytes], bz2.BZ2File(file))
    return io.BufferedReader(_Xz(file)) if compression == ".xz" else file  # tarfile wants no short reads


class _Xz(io.RawIOBase):
    """An xz stream whose dictionary is limited: its header may ask for 4 GiB."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._decoder = file, self._fresh()

    @staticmethod
    def _fresh() -> lzma.LZMADecompressor:
        return lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=_MEMORY_OF_XZ)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            raw = b""
            if self._decoder.eof:
                raw = self._decoder.unused_data or self._file.read(1 << 16)
                raw = raw.lstrip(b"\0")
                if not raw:
                    return 0
                self._decoder = self._fresh()
            elif self._decoder.needs_input and not (raw := self._file.read(1 << 16)):
                raise EOFError
            try:
                piece = self._decoder.decompress(raw, len(buffer))
            except lzma.LZMAError as error:
                raise (Refused("bomb") if "Memory" in str(error) else error) from None
            if piece:
                buffer[: len(piece)] = piece
                return len(piece)


class Bounded:
    """A stream that gives `room` bytes in all and `most` at once; more is a bomb or too large."""

    def __init__(self, file: IO[bytes], room: int, most: int) -> None:
        self._file, self._room, self._most, self._at = file, room, most, 0

    def read(self, size: int = -1) -> bytes:
        if size < 0:
            return self.rest()
        if size > max(self._most, 1 << 20):
            raise Refused("bomb")
        piece = self._file.read(min(size, self._room + 1)) or b""
        self._at += len(piece)
        self._room -= len(piece)
        if self._room < 0:
            raise Refused("bomb")
        return piece

    def readline(self, size: int) -> bytes:
        line = self._file.readline(min(size, self._room + 1))
        self._at += len(line)
        self._room -= len(line)
        if self._room < 0:
            raise Refused("bomb")
        return line

    def rest(self) -> bytes:
        """All that is left. Raises Refused for more than `most`."""
        parts, size = [], 0
        while piece := self.read(1 << 18):
            parts.append(piece)
            size += len(piece)
            if size > self._most:
                raise Refused("too_large")
        return b"".join(parts)

    def tell(self) -> int:
        return self._at

    def seek(self, to: int) -> int:
        """Forward only, by reading."""
        if to < self._at:
            raise tarfile.ReadError("backward")
        while self._at < to and self.read(min(to - self._at, 1 << 18)):
            pass
        return self._at
