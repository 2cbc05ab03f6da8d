"""The log of an agent's session: JSON lines, one per event, written to disk before the agent goes on.

A session that was killed at any moment resumes from its log: a half-written last line is dropped, files that the agent
had changed at the last event lie beside the log by their digest, and a call without a result is carried out again.

Events, by `kind`:

    start   task, settings and tools of the session; the first line
    reply   a message of the model, its token counts, the arguments that were not JSON, and what became of each earlier
            message in its prompt (`actions`: k kept, o omitted, d dropped)
    result  the result of one call; if files changed, all files changed so far, and a patch of what it changed (`diff`)
    note    what the agent itself told the model
    end     why the session ended; a resumed session has several
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from glm5.agents.workspace import MOST_ALL, File
from glm5.errors import DataError
from glm5.files import exclusive

VERSION = 1
MOST_LINE = 64 << 20
KINDS = ("start", "reply", "result", "note", "end")


class SessionLog:
    """A log that is open for writing; `with` holds it for this process alone.

    Raises DataError for a log that cannot be read, and if another process writes it.
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self.path = path
        self.events: list[dict[str, Any]] = []
        self._blobs = path.with_name(path.name + ".files")
        self._lock = exclusive(self._blobs, f"{path} is in use by another agent.")
        self._lock.__enter__()
        try:
            if resume:
                self.events, size = read_log(path)
            elif path.exists():
                raise DataError(f"{path} exists; resume that session with --resume, or name another log.")
            self._file = path.open("ab")
        except BaseException:
            self._lock.__exit__(None, None, None)
            raise
        if resume:
            self._file.truncate(size)

    def __enter__(self) -> SessionLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._lock.__exit__(None, None, None)

    def add(self, kind: str, **values: Any) -> dict[str, Any]:
        """Append an event; it is on disk when this returns."""
        event = {"kind": kind} | values
        self._file.write(json.dumps(event, ensure_ascii=True).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.events.append(event)
        if "files" in event:  # a session that rewrites large files must not fill the disk with what they were
            kept = {entry["digest"] for entry in event["files"].values()}
            for old in [path for path in self._blobs.iterdir() if path.name not in kept]:
                old.unlink()
        return event

    def keep(self, files: Mapping[str, File]) -> dict[str, Any]:
        """Store the contents of changed files; returns what an event needs to find them."""
        for file in files.values():
            if file.data is None or (self._blobs / str(file.digest)).exists():
                continue
            part = self._blobs / f"{file.digest}.part"
            with part.open("wb") as stream:
                stream.write(file.data)
                stream.flush()
                os.fsync(stream.fileno())
            part.rename(self._blobs / str(file.digest))
        return {path: {"digest": f.digest, "executable": f.executable} for path, f in files.items()}

    def files(self) -> dict[str, File]:
        """The files that the agent had changed at the last event. Raises DataError if one is missing or damaged."""
        last: Mapping[str, Any] = next((e["files"] for e in reversed(self.events) if "files" in e), {})
        return {path: self._kept(path, entry) for path, entry in last.items()}

    def _kept(self, path: str, entry: Mapping[str, Any]) -> File:
        digest = entry["digest"]
        if digest is None:
            return File(None)
        try:
            data = (self._blobs / Path(str(digest)).name).read_bytes()
        except OSError as error:
            raise DataError(f"{self.path}: the content of {path!r:.80} is missing: {error.strerror}.") from None
        if len(data) > MOST_ALL or hashlib.sha256(data).hexdigest() != digest:
            raise DataError(f"{self.path}: the content of {path!r:.80} is damaged.")
        return File(data, bool(entry["executable"]))


def read_log(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The events of a log, and the number of bytes that they take; what comes after is a line that was cut off.

    Raises DataError if the file is missing, is not a log, or is damaged before its last line.
    """
    events, size = list[dict[str, Any]](), 0
    try:
        for line in _lines(path):
            try:
                event = json.loads(line)
                if not isinstance(event, dict) or event.get("kind") not in KINDS:
                    raise ValueError("not an event")
            except (ValueError, RecursionError):
                raise DataError(f"{path}:{len(events) + 1} is not an event of an agent's log.") from None
            events.append(event)
            size += len(line)
    except OSError as error:
        raise DataError(f"Cannot read {path}: {(error.strerror or str(error)).lower()}.") from None
    if not events or events[0]["kind"] != "start" or events[0].get("version") != VERSION:
        raise DataError(f"{path} is not an agent's log of version {VERSION}.")
    return events, size


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        while line := stream.readline(MOST_LINE):
            if not line.endswith(b"\n"):
                if len(line) == MOST_LINE:
                    raise DataError(f"{path} has a line of more than {MOST_LINE >> 20} MiB.")
                return
            yield line
