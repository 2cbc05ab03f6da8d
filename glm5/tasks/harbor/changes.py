"""What a policy changes step by step: diffs of the text files below a folder of its room, for readers and reports."""

from __future__ import annotations

import difflib
import stat

from glm5.sandbox.environment import Room, RoomFileError

MOST_ENTRIES, MOST_FILE, MOST_ALL = 5000, 1 << 16, 4 << 20
"""Entries below the folder, and bytes of a file and of all that are compared."""
MOST_LINES = 2000
"""Lines of a file: a longer one is only named, as comparing it may take long."""
MOST_COMPARED = 20_000
"""Lines that one look compares; further files are only named."""
SKIPPED = frozenset(".git __pycache__ .pytest_cache node_modules .venv".split())


class FolderDiff:
    """Compares a folder with what it was at the last look. A folder that is too large or gone has no diffs any more."""

    def __init__(self, room: Room, folder: str) -> None:
        self._room, self._folder = room, folder
        self._texts = self._look()

    def new(self) -> str:
        """What changed since the last look, as a patch."""
        before, self._texts = self._texts, self._look() if self._texts is not None else None
        if before is None or self._texts is None:
            return ""
        after = self._texts
        changed = [path for path in sorted(before.keys() | after.keys()) if before.get(path) != after.get(path)]
        found, left = list[str](), MOST_COMPARED
        for path in changed:
            text, lines = _diff(path, before.get(path), after.get(path), min(left, MOST_LINES))
            found.append(text)
            left -= lines
        return "".join(found)

    def _look(self) -> dict[str, bytes] | None:
        found, left = dict[str, bytes](), MOST_ALL
        try:
            for entry in self._room.files.entries(self._folder, MOST_ENTRIES):
                path = entry.path[len(self._folder.rstrip("/")) + 1 :]
                if stat.S_ISREG(entry.mode) and entry.size <= MOST_FILE and not SKIPPED & set(path.split("/")):
                    found[path] = self._room.download(entry.path, MOST_FILE)
                    left -= len(found[path])
                if left < 0:
                    return None
        except RoomFileError:
            return None
        return found


def _diff(path: str, before: bytes | None, after: bytes | None, most: int) -> tuple[str, int]:
    """The patch of one file, and the number of lines that were compared: at most `most`, else it is only named."""
    path = path.encode("utf-8", "replace").decode()
    old, new = ((data or b"").decode("utf-8", "replace").splitlines() for data in (before, after))
    if len(old) + len(new) > most or b"\0" in (before or b"") + (after or b""):
        return f"{path} has changed\n", 0
    names = "/dev/null" if before is None else f"a/{path}", "/dev/null" if after is None else f"b/{path}"
    lines = list(difflib.unified_diff(old, new, *names, lineterm=""))
    return "".join(f"{line}\n" for line in lines or [f"{path} has changed"]), len(old) + len(new)
