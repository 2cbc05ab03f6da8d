"""The prefix cache on disk: whole pages in files that survive a restart, in bounded space.

A file is named by its page's link (see `page_hash`), so it is found without an index, and pages of other weights are
never found. It begins with a digest of link and contents: a damaged or truncated file is removed and counts as a miss.
Files are written and removed in a thread of their own, which drops pages if it cannot keep up. Whatever fails on the
disk costs pages only.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from queue import Full, Queue
from secrets import token_hex

from glm5.engine.page_hash import page_digest
from glm5.errors import ConfigError
from glm5.obs.logs import get_logger

log = get_logger("engine")

MAGIC = b"glm5page"
HEAD = len(MAGIC) + 16
WAITING = 256
"""Pages that may wait to be written."""
CLOSE_SECONDS = 30.0
"""Longest time to write what waits at the end."""
_NAME = re.compile(r"[0-9a-f]{32}\.page")
_FRESH = re.compile(r"\.glm5-[0-9a-f]{16}")


class PageFiles:
    """Pages in `folder`, at most `limit` bytes, the least recently used ones removed first. One engine per folder.

    `damaged` counts files that were removed because they were not as written, `dropped` pages that were not written.
    Raises ConfigError for a folder that cannot be used, that others may write to, or that another engine uses.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.damaged = self.dropped = self.used = 0
        self._files: OrderedDict[str, int] = OrderedDict()  # sizes by name, the least recently used one first
        self._cleared = 0  # times
        self._old: list[str] = []  # files to remove since
        self._lock = threading.Lock()  # for `used` and the three above
        own_folder(folder)
        self._held = _alone(folder)
        try:
            self._scan()
        except OSError as error:
            os.close(self._held)
            raise ConfigError(f"{folder} cannot hold pages: {error.strerror}.") from None
        self._closed = False
        self._work: Queue[Callable[[], None] | None] = Queue(WAITING)
        self._writer = threading.Thread(target=self._write, name="glm5-pages", daemon=True)
        self._writer.start()

    def _scan(self) -> None:
        found = []
        for path in self.folder.iterdir():
            if _FRESH.fullmatch(path.name):
                path.unlink(missing_ok=True)  # a write that did not end
            elif _NAME.fullmatch(path.name):
                about = path.lstat()
                found.append((about.st_mtime_ns, path.name, about.st_size))
        for _, name, size in sorted(found):
            self._files[name] = size
            self.used += size
        self._trim()

    def __contains__(self, link: bytes) -> bool:
        with self._lock:
            return _name(link) in self._files

    def get(self, link: bytes, size: int) -> bytes | None:
        """The contents of a page of `size` bytes; None if there is no good file."""
        name = _name(link)
        with self._lock:
            if name not in self._files:
                return None
            self._files.move_to_end(name)
        data = self._read(name, HEAD + size)
        if data is None or data[:HEAD] != MAGIC + page_digest(link, data[HEAD:]):
            log.warning("The page %s on disk is damaged; it is removed.", self.folder / name)
            self.damaged += 1
            self._remove(name)
            return None
        return data[HEAD:]

    def _read(self, name: str, size: int) -> bytes | None:
        try:
            file = os.open(self.folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(file, "rb") as opened:
                about = os.fstat(file)
                if not stat.S_ISREG(about.st_mode) or about.st_size != size:
                    return None
                with contextlib.suppress(OSError):  # a disk that is read-only by now
                    os.utime(file)  # the order of use survives a restart
                return opened.read(size)
        except OSError:
            return None

    def put(self, link: bytes, data: bytes) -> None:
        """Have a page written, some time later."""
        if HEAD + len(data) > self.limit or link in self:
            return
        cleared = self._cleared
        try:
            self._work.put_nowait(lambda: self._store(link, data, cleared))
        except Full:
            self.dropped += 1

    def clear(self) -> None:
        """Forget all pages, those that wait too. Their files are removed some time later."""
        with self._lock:
            self._cleared += 1
            self._old += self._files
            self._files.clear()
            self.used = 0
        with contextlib.suppress(Full):  # then the thread has other reasons to wake up
            self._work.put_nowait(lambda: None)

    def _sweep(self) -> None:
        """Remove the files from before the last `clear`."""
        with self._lock:
            old, self._old = self._old, []
        for name in old:
            self._unlink(name)

    def _unlink(self, name: str) -> None:
        try:
            (self.folder / name).unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s cannot be removed: %s", self.folder / name, error.strerror)

    def flush(self) -> None:
        """Wait until everything is written."""
        done = threading.Event()
        self._work.put(done.set)
        done.wait()

    def close(self) -> None:
        """Write what waits, for `CLOSE_SECONDS` at most, and end the thread."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(Full):
                self._work.put(None, timeout=CLOSE_SECONDS)
                self._writer.join(CLOSE_SECONDS)
            os.close(self._held)

    def _write(self) -> None:
        while (job := self._work.get()) is not None:
            self._sweep()
            try:
                job()
            except OSError as error:
                self.dropped += 1
                log.warning("A page could not be written to %s: %s", self.folder, error.strerror)

    def _store(self, link: bytes, data: bytes, cleared: int) -> None:
        if cleared != self._cleared:
            return
        name, fresh = _name(link), self.folder / f".glm5-{token_hex(8)}"
        try:
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(MAGIC + page_digest(link, data) + data)
            fresh.rename(self.folder / name)
        except OSError:
            self._unlink(fresh.name)
            raise
        with self._lock:
            if cleared != self._cleared:  # meanwhile
                self._old.append(name)
                return
            self.used += HEAD + len(data) - self._files.pop(name, 0)
            self._files[name] = HEAD + len(data)
        self._trim()

    def _trim(self) -> None:
        while True:
            with self._lock:
                if self.used <= self.limit:
                    return
                name = next(iter(self._files))
            self._remove(name)

    def _remove(self, name: str) -> None:
        with self._lock:
            self.used -= self._files.pop(name, 0)
        self._unlink(name)


def own_folder(folder: Path) -> None:
    """Make a folder that only we may write to. Raises ConfigError for one that others may write to too."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise ConfigError(f"{folder} cannot hold pages: {error.strerror}.") from None
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ConfigError(f"Others may write to {folder}; use a folder for pages that only you can write to.")


def _alone(folder: Path) -> int:
    """A descriptor that locks a folder until it is closed. File systems without such locks do without."""
    import fcntl

    try:
        held = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(held)
                raise ConfigError(f"Another server has its pages in {folder}; give each a folder of its own.") from None
    except OSError as error:
        raise ConfigError(f"{folder} cannot hold pages: {error.strerror}.") from None
    return held


def _name(link: bytes) -> str:
    return f"{link.hex()}.page"
