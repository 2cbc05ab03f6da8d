"""Unified diffs, parsed and applied in memory: a patch of a hostile package never meets the file system."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_TOO_MANY = "its hunks fit at too many lines to look at all"
_ESCAPE = re.compile(rb"\\([0-7]{3}|.)")
_ESCAPES = dict(zip((b"a", b"b", b"t", b"n", b"v", b"f", b"r"), map(bytes, zip(range(7, 14))), strict=True))
"""How git writes paths with such characters, in quotes."""
_MOST_LINES, _MOST_DIGITS = 1 << 20, 9
_MOST_WORK = 1 << 22
"""Lines that are looked at to find the hunks of one file."""


class PatchError(Exception):
    """A patch that is malformed, or does not apply."""


@dataclass
class Hunk:
    """Lines before and after, from line `start` (counted from 1) of the old file. `old_end` and `new_end`: whether the
    last line has a newline."""

    start: int
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    old_end: bool = True
    new_end: bool = True


@dataclass
class FileDiff:
    """The hunks of one file and the text of its diff; a path is None for a file that does not exist on that side."""

    old: str | None
    new: str | None
    hunks: list[Hunk]
    text: str

    @property
    def path(self) -> str:
        """The path after the change, or, of a deleted file, before it."""
        return self.new or self.old or ""


def parse_diff(text: str) -> list[FileDiff]:
    """The files of a unified diff, without the first component of their paths (as `patch -p1`). What stands between the
    files is ignored. Raises PatchError for paths outside the tree, and for hunks that end early."""
    lines = text.split("\n")
    if len(lines) > _MOST_LINES:
        raise PatchError("it has too many lines")
    found: list[FileDiff] = []
    at = 0
    while at + 2 < len(lines):
        if not (lines[at].startswith("--- ") and lines[at + 1].startswith("+++ ") and _HUNK.match(lines[at + 2])):
            at += 1
            continue
        old, new = _path(lines[at]), _path(lines[at + 1])
        begin, at = at, at + 2
        hunks: list[Hunk] = []
        while at < len(lines) and (head := _HUNK.match(lines[at])):
            hunk, at = _hunk(head, lines, at + 1)
            hunks.append(hunk)
        if old or new:
            found.append(FileDiff(old, new, hunks, "\n".join(lines[begin:at]) + "\n"))
    return found


def _path(line: str) -> str | None:
    path = line[4:].split("\t", 1)[0].rstrip()
    if path.startswith('"') and path.endswith('"'):
        raw = _ESCAPE.sub(_unescaped, path[1:-1].encode("utf-8", "surrogateescape"))
        path = raw.decode("utf-8", "surrogateescape")
    if path == "/dev/null":
        return None
    inner = path.partition("/")[2]
    if not inner or ".." in inner.split("/") or inner.startswith("/"):
        raise PatchError(f"the path {path:.80} is outside the tree")
    return inner


def _unescaped(found: re.Match[bytes]) -> bytes:
    code = found[1]
    return bytes([int(code, 8) & 255]) if code.isdigit() else _ESCAPES.get(code, code)


def _hunk(head: re.Match[str], lines: Sequence[str], at: int) -> tuple[Hunk, int]:
    if any(len(number or "") > _MOST_DIGITS for number in head.groups()):
        raise PatchError("a hunk is at a line that no file has")
    hunk = Hunk(int(head[1]))
    left, made = int(head[2] or 1), int(head[4] or 1)
    last = ""
    while left > 0 or made > 0 or (at < len(lines) and lines[at].startswith("\\")):
        if at >= len(lines):
            raise PatchError("a hunk ends early")
        sign, line = lines[at][:1], lines[at][1:]
        at += 1
        if sign == "\\":
            hunk.old_end, hunk.new_end = hunk.old_end and last == "+", hunk.new_end and last == "-"
            continue
        if sign not in (" ", "-", "+", ""):
            raise PatchError("a hunk has a line without a sign")
        last = sign or " "
        if last in " -":
            hunk.old.append(line)
            left -= 1
        if last in " +":
            hunk.new.append(line)
            made -= 1
    return hunk, at


def applied(text: str | None, diff: FileDiff) -> str | None:
    """The file after the diff; None for no file. A hunk may be found at other lines than it says, as by dpkg-source,
    but all of its lines must be there. Raises PatchError if it does not apply."""
    return _applied(text, diff)[0]


def spans(text: str | None, diff: FileDiff) -> list[tuple[int, int]]:
    """First line (counted from 0) and end of the lines of a file where `applied` finds each hunk. Raises PatchError."""
    return _applied(text, diff)[1]


def _applied(text: str | None, diff: FileDiff) -> tuple[str | None, list[tuple[int, int]]]:
    made = bool(diff.hunks) and not diff.hunks[0].start and not diff.hunks[0].old
    if not (diff.old is None or made) if text is None else diff.old is None:
        raise PatchError(f"{diff.path}: the file {'does not exist' if text is None else 'exists already'}")
    lines = (text or "").split("\n")
    if lines[-1] == "":
        lines.pop()
        ended = True
    else:
        ended = False
    shift = least = grown = 0
    found: list[tuple[int, int]] = []
    room = [_MOST_WORK]
    for hunk in diff.hunks:
        room[0] -= len(lines) >> 6  # that the lines after a hunk move
        at = _place(lines, hunk.old, max(hunk.start - 1, 0) + shift if hunk.old else hunk.start + shift, least, room)
        if at is None:
            raise PatchError(f"{diff.path}: the hunk at line {hunk.start} does not apply")
        whole = at + len(hunk.old) == len(lines)
        lines[at : at + len(hunk.old)] = hunk.new
        found.append((at - grown, at - grown + len(hunk.old)))
        grown += len(hunk.new) - len(hunk.old)
        ended = hunk.new_end if whole else ended
        shift = at + len(hunk.new) - (max(hunk.start - 1, 0) if hunk.old else hunk.start) - len(hunk.old)
        least = at + len(hunk.new)
    return None if diff.new is None else "\n".join(lines) + ("\n" if ended and lines else ""), found


def _place(lines: list[str], wanted: list[str], guess: int, least: int, room: list[int]) -> int | None:
    """The place of the lines nearest to a guess, at or after `least`. Takes the lines that it looks at from `room`, and
    raises PatchError if that is used up."""
    most = len(lines) - len(wanted)
    if most < least:
        return None
    if room[0] < 0:
        raise PatchError(_TOO_MANY)
    guess = min(max(guess, least), most)
    if not wanted:
        return guess
    first = wanted[0]
    for at in _outward(guess, least, most):
        found = lines[at] == first
        room[0] -= len(wanted) if found else 1
        if room[0] < 0:
            raise PatchError(_TOO_MANY)
        if found and lines[at : at + len(wanted)] == wanted:
            return at
    return None


def _outward(guess: int, least: int, most: int) -> Iterator[int]:
    for distance in range(max(guess - least, most - guess) + 1):
        yield from (at for at in (guess - distance, guess + distance) if least <= at <= most)
