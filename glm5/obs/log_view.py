"""The logs of all ranks of a run as one, in the order of time (`glm5 logs`)."""

from __future__ import annotations

import heapq
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from glm5.errors import UsageError

LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) (DEBUG|INFO|WARNING|ERROR|CRITICAL) (.*)")
RANK_FILE = re.compile(r"log-rank(\d+)\.txt")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


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
    if (run / "log.txt").exists():
        found[0] = run / "log.txt"
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
        for line in file:
            line = CONTROL.sub("�", line.rstrip("\n"))
            if match := LINE.fullmatch(line):
                if started:
                    yield Record(started[0], rank, number, started[1], "\n".join(lines))
                    number += 1
                started, lines = (match[1], logging.getLevelNamesMapping()[match[2]]), [match[3]]
            elif started:
                lines.append(line)
    if started:
        yield Record(started[0], rank, number, started[1], "\n".join(lines))
