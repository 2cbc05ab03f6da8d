"""The logs of all ranks of a run as one, in the order of time (`glm5 logs`)."""

from __future__ import annotations

import heapq
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from glm5.errors import UsageError

LINE = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:]{8},[0-9]{3}) (DEBUG|INFO|WARNING|ERROR|CRITICAL) (.*)")
RANK_FILE = re.compile(r"log-rank([1-9][0-9]{0,6})\.txt")
HIDDEN = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters, and those that change lines or the direction of text on a terminal."""
LONGEST_LINE, MOST_LINES = 1 << 16, 1000
"""Of a line in characters, and lines of a record; what is beyond is left out."""


@dataclass(frozen=True, order=True)
class Record:
    """A record of a rank's log; `text` may have several lines, such as a trace."""

    when: str
    rank: int
    number: int
    level: int
    text: str

    def __str__(self) -> str:
        return f"{self.when} [rank {self.rank}] {logging.getLevelName(self.level)} {self.text}"


def rank_file(run_log: Path, rank: int) -> Path:
    """Where rank `rank` logs to: rank 0 to `run_log` itself."""
    return run_log if rank == 0 else run_log.with_name(f"log-rank{rank}.txt")


def records(run: Path, rank: int | None = None, level: int = logging.INFO) -> Iterator[Record]:
    """The records of `run` from `level` on, of all ranks or of one. Raises UsageError if there is no log."""
    found = {int(match[1]): path for path in run.glob("log-rank*.txt") if (match := RANK_FILE.fullmatch(path.name))}
    found[0] = run / "log.txt"
    found = {number: path for number, path in found.items() if path.is_file()}
    if rank is not None:
        found = {number: path for number, path in found.items() if number == rank}
    if not found:
        raise UsageError(f"{run} has no log{'' if rank is None else f' of rank {rank}'}; name the folder of a run.")
    # Each file is in the order of time, but for clocks that were set back.
    merged = heapq.merge(*(_read(path, number) for number, path in sorted(found.items())))
    return (record for record in merged if record.level >= level)


def _read(path: Path, rank: int) -> Iterator[Record]:
    started: tuple[str, int] | None = None
    lines: list[str] = []
    number = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        whole = True
        while line := file.readline(LONGEST_LINE):
            if not whole:
                whole = line.endswith("\n")
                continue
            whole = line.endswith("\n")
            line = HIDDEN.sub("�", line.rstrip("\n"))
            if match := LINE.fullmatch(line):
                if started:
                    yield Record(started[0], rank, number, started[1], "\n".join(lines))
                    number += 1
                started, lines = (match[1], logging.getLevelNamesMapping()[match[2]]), [match[3]]
            elif started and len(lines) < MOST_LINES:
                lines.append(line)
    if started:
        yield Record(started[0], rank, number, started[1], "\n".join(lines))
