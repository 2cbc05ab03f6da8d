"""The prefix cache on disk: whole pages in files that survive a restart, in bounded space.

A file is named by its page's link (see `page_hash`), so it is found without an index, and pages of other weights are
never found. It begins with a digest of link and contents: a damaged or truncated file is removed and counts as a miss.
Files are written in a thread of their own, which drops pages if it cannot keep up.
"""

from __future__ import annotations

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
_NAME = re.compile(r"[0-9a-f]{32}\.page")


class PageFiles:
    """Pages in `folder`, at most `limit` bytes, the least recently used ones removed first. One engine per folder.

    `damaged` counts files that were removed because they were not as written, `dropped` pages that were not written.
    Raises ConfigError for a folder that cannot be used, or that others may write to.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.damaged = self.dropped = self.used = 0
        self._files: OrderedDict[str, int] = OrderedDict()  # sizes by name, the least recently used one first
        self._lock = threading.Lock()  # for the three above
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.stat()
            if found.st_uid != os.geteuid() or found.st_mode & 0o022:
                raise ConfigError(f"Others may write to {folder}; use a folder for pages that only you can write to.")
            self._scan()
        except OSError as error:
            raise ConfigError(f"{folder} cannot hold pages: {error.strerror}.") from None
        self._work: Queue[Callable[[], None] | None] = Queue(WAITING)
        self._writer = threading.Thread(target=self._write, name="glm5-pages", daemon=True)
        self._writer.start()

    def _scan(self) -> None:
        found = []
        for path in self.folder.iterdir():
            if path.name.startswith(".glm5-"):
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
            file = os.open(self.folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(file, "rb") as opened:
                about = os.fstat(file)
                if not stat.S_ISREG(about.st_mode) or about.st_size != size:
                    return None
                os.utime(file)  # the order of use survives a restart
                return opened.read(size)
        except OSError:
            return None

    def put(self, link: bytes, data: bytes) -> None:
        """Have a page written, some time later."""
        if HEAD + len(data) > self.limit or link in self:
            return
        try:
            self._work.put_nowait(lambda: self._store(link, data))
        except Full:
            self.dropped += 1

    def clear(self) -> None:
        """Remove all files, some time later."""
        with self._lock:
            names = list(self._files)
            self._files.clear()
            self.used = 0
        self._work.put(lambda: self._unlink(names))

    def _unlink(self, names: list[str]) -> None:
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def flush(self) -> None:
        """Wait until everything is written."""
        done = threading.Event()
        self._work.put(done.set)
        done.wait()

    def close(self) -> None:
        """Write what waits, and end the thread."""
        if self._writer.is_alive():
            self._work.put(None)
            self._writer.join()

    def _write(self) -> None:
        while (job := self._work.get()) is not None:
            try:
                job()
            except OSError as error:
                self.dropped += 1
                log.warning("A page could not be written to %s: %s", self.folder, error.strerror)

    def _store(self, link: bytes, data: bytes) -> None:
        name, fresh = _name(link), self.folder / f".glm5-{token_hex(8)}"
        try:
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(MAGIC + page_digest(link, data) + data)
            fresh.rename(self.folder / name)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise
        with self._lock:
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
        (self.folder / name).unlink(missing_ok=True)


def _name(link: bytes) -> str:
    return f"{link.hex()}.page"
