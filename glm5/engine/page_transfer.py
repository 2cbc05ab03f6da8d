"""Pages of a prompt on their way from one engine to another: prefill/decode disaggregation (§3.6).

The engine that decodes asks for the pages that it lacks. The engine that has computed them says their digests in a
stream of messages (see `glm5.serve.remote_prefill`), and moves their bytes through a channel: the shared memory of one
machine, or the same stream. A channel for RDMA would register the receiver's memory in `place`, and write to it.
"""

from __future__ import annotations

import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from glm5.engine.kv_pool import PAGE
from glm5.errors import EngineError

if TYPE_CHECKING:
    from glm5.engine.engine import Engine
    from glm5.engine.radix_cache import RadixCache

EXPORT_BYTES = 1 << 28
"""Most bytes of pages that are copied out of the cache at a time."""
_PLACE = re.compile(r"/proc/\d{1,10}/fd/\d{1,10}")


class PageError(EngineError):
    """Pages that must not be used: of other weights, damaged, or not what was asked for."""


@dataclass(frozen=True)
class Sheaf:
    """Consecutive pages of one prompt, from number `first` on, and what they were computed with."""

    first: int
    contents: Sequence[bytes]
    fingerprint: str
    version: int


def cache_of(engine: Engine) -> RadixCache:
    """The prefix cache, from which pages are sent. Raises PageError for an engine without one."""
    if engine.radix is None:
        raise PageError("Pages come from the prefix cache, and this engine has none: its model has a recurrent state.")
    return engine.radix


def export(engine: Engine, namespace: str, ids: Sequence[int], first: int) -> Sheaf:
    """The pages of a prompt that the engine has by now, from page number `first` on, `EXPORT_BYTES` of them at most. In
    the engine's thread."""
    radix = cache_of(engine)
    most = max(1, EXPORT_BYTES // engine.pool.page_bytes())
    contents = [engine.pool.to_bytes(page) for page in radix.dump(namespace, ids[: (first + most) * PAGE], first)]
    return Sheaf(first, contents, radix.fingerprint, engine.weight_version)


def adopt(engine: Engine, namespace: str, ids: Sequence[int], sheaf: Sheaf) -> int:
    """Take pages of `ids`, which end with them, into the prefix cache. Returns the length of the prefix that it then
    has. Raises PageError if they belong to other weights. In the engine's thread."""
    radix = cache_of(engine)
    if (sheaf.version, sheaf.fingerprint) != (engine.weight_version, radix.fingerprint):
        raise PageError(f"Pages of weight version {sheaf.version} do not fit this engine's {engine.weight_version}.")
    return radix.load(namespace, ids, sheaf.first, sheaf.contents)


class PageReceiver(ABC):
    """Where the bytes of some pages arrive. `place` tells the sender, as JSON."""

    place: dict[str, Any]

    @abstractmethod
    def read(self, count: int) -> bytes | None:
        """The next `count` bytes, which the sender says it has written; None if they follow in the stream."""

    def close(self) -> None:  # noqa: B027
        """Free the memory."""


class PageSender(ABC):
    """Moves the bytes of pages to a receiver."""

    @abstractmethod
    def write(self, data: bytes) -> bytes:
        """Move `data`, and return what must follow in the stream: all of it, or nothing."""

    def close(self) -> None:  # noqa: B027
        """End the transfer."""


class InStream(PageReceiver, PageSender):
    """Bytes within the stream of messages, so over whatever connects the two: TCP between machines."""

    place = {"kind": "stream"}

    def read(self, count: int) -> bytes | None:
        return None

    def write(self, data: bytes) -> bytes:
        return data


class SharedMemory(PageReceiver):
    """Anonymous memory that other processes of the same user on this machine can write to. It goes when both ends have
    closed it, however they end. Its size is fixed."""

    def __init__(self, size: int) -> None:
        import fcntl

        self._file = os.memfd_create("glm5-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._file, size)
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        self.place = {"kind": "memory", "path": f"/proc/{os.getpid()}/fd/{self._file}"}
        self._at = 0

    def read(self, count: int) -> bytes | None:
        data = b""
        while len(data) < count:
            piece = os.pread(self._file, count - len(data), self._at + len(data))
            if not piece:
                raise PageError("A prefill engine sent more than it was asked for.")
            data += piece
        self._at += count
        return data

    def close(self) -> None:
        os.close(self._file)


class ToSharedMemory(PageSender):
    """Writes to the `SharedMemory` of another process. Raises PageError for a path that is not such memory."""

    def __init__(self, path: str) -> None:
        import fcntl

        if _PLACE.fullmatch(path) is None:
            raise PageError(f"{path!r:.80} is not the shared memory of an engine.")
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise PageError(f"The shared memory {path} cannot be opened: {error.strerror}.") from None
        try:
            seals = fcntl.fcntl(self._file, fcntl.F_GET_SEALS)
        except OSError:  # no file in memory
            seals = 0
        if not seals & fcntl.F_SEAL_GROW:
            os.close(self._file)
            raise PageError(f"{path} is not the shared memory of an engine.")
        self._at, self._closed = 0, False
        self._lock = threading.Lock()  # `close` may come while another thread writes

    def write(self, data: bytes) -> bytes:
        view = memoryview(data)
        while view:
            with self._lock:
                if self._closed:  # the number may be another file's by now
                    raise PageError("The transfer has ended.")
                try:
                    written = os.pwrite(self._file, view, self._at)
                except OSError as error:
                    raise PageError(f"The shared memory is too small ({error.strerror}).") from None
            self._at += written
            view = view[written:]
        return b""

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._file)


def receiver(size: int, local: bool) -> PageReceiver:
    """Room for `size` bytes of pages; `local`: from a process of this machine."""
    return SharedMemory(size) if local and hasattr(os, "memfd_create") else InStream()


def sender(place: dict[str, Any], local: bool) -> PageSender:
    """The other end of a `PageReceiver`. Raises PageError for a place that this process must not or cannot write to."""
    kind = place.get("kind")
    if kind == "memory" and local:
        return ToSharedMemory(str(place.get("path", "")))
    if kind == "stream":
        return InStream()
    raise PageError(f"Pages cannot be sent to a place of kind {kind!r:.40} from here.")
