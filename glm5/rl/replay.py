"""Writes batches of rollouts to a file and reads them back bit for bit, to repeat updates without an engine.

Each line is a JSON object with one trajectory, in training order. A trajectory that pads its group (`repair_group`) is
written as often as it is trained on. Keys:

    stage, step       the update that uses it; step 1 is the first of the stage, as in `metrics.jsonl`
    index, count      trajectory `index` of `count` in the batch; detects incomplete batches
    slot              position of its group in the batch

and those of a trajectory (`glm5.tasks.trajectory_json`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from glm5.errors import DataError
from glm5.records import Trajectory
from glm5.tasks.trajectory_json import decode, encode, text, whole

FILE = "rollouts.jsonl"


def write(groups: Sequence[Sequence[Trajectory]], path: Path | str, stage: str = "", step: int = 1) -> None:
    """Append the batch of update `step` of a stage."""
    count = sum(map(len, groups))
    index = 0
    with Path(path).open("a", encoding="utf-8", errors="backslashreplace") as file:
        for slot, group in enumerate(groups):
            for trajectory in group:
                head = {"stage": stage, "step": step, "index": index, "count": count, "slot": slot}
                file.write(json.dumps(head | encode(trajectory), ensure_ascii=False, allow_nan=False) + "\n")
                index += 1


def read(path: Path | str, stage: str | None = None, step: int | None = None) -> list[list[Trajectory]]:
    """The groups of all batches of a file, or of one stage or update. Raises DataError, with file and line, for a
    malformed line, an incomplete batch or a missing one."""
    found = [
        group
        for (own_stage, own_step), groups in batches(path)
        if stage in (None, own_stage) and step in (None, own_step)
        for group in groups
    ]
    if not found:
        asked = "".join(f" {name} {value}" for name, value in (("stage", stage), ("step", step)) if value is not None)
        raise DataError(f"{path} contains no rollouts{' of' + asked if asked else ''}.")
    return found


def batches(path: Path | str) -> Iterator[tuple[tuple[str, int], list[list[Trajectory]]]]:
    """Yields ((stage, step), groups) per batch, in file order; reads one batch at a time."""
    batch: list[tuple[int, Trajectory]] = []
    key: tuple[str, int, int] | None = None
    where = f"{path}, line 0"
    for number, raw in _lines(path):
        before, where = where, f"{path}, line {number}"
        row = _parsed(raw, where)
        own = (text(row, "stage", where), whole(row, "step", where), whole(row, "count", where, least=1))
        if batch and own != key:
            raise _incomplete(before, batch, key)
        key = own
        index, slot = whole(row, "index", where), whole(row, "slot", where)
        expected = {batch[-1][0], batch[-1][0] + 1} if batch else {0}
        if index != len(batch) or slot not in expected:
            raise DataError(
                f"{where}: trajectory {index} of group {slot} is not the next one; lines are missing or out of order."
            )
        batch.append((slot, decode(row, where, len(raw))))
        if len(batch) == own[2]:
            groups: list[list[Trajectory]] = [[] for _ in range(slot + 1)]
            for place, trajectory in batch:
                groups[place].append(trajectory)
            yield own[:2], groups
            batch = []
    if batch:
        raise _incomplete(where, batch, key)


def rewind(path: Path | str, stage: str, step: int) -> int:
    """Remove all trajectories of `stage` that belong to updates after `step`, and a truncated last line. Returns the
    number of removed lines. A resumed run writes them again. The file is replaced atomically."""
    path = Path(path)
    if not path.exists():
        return 0
    fresh, removed = path.with_name(f".{path.name}.writing"), 0
    try:
        with fresh.open("wb") as file:
            for number, raw in _lines(path):
                where = f"{path}, line {number}"
                cut_off = not raw.endswith(b"\n")
                if not cut_off:
                    row = _parsed(raw, where)
                    if text(row, "stage", where) != stage or whole(row, "step", where) <= step:
                        file.write(raw)
                        continue
                removed += 1
            file.flush()
            os.fsync(file.fileno())
        if removed:
            fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
    return removed


def _lines(path: Path | str) -> Iterator[tuple[int, bytes]]:
    try:
        with Path(path).open("rb") as file:
            yield from enumerate(file, start=1)
    except OSError as error:
        raise DataError(f"The rollouts {path} cannot be read: {error.strerror}.") from None


def _parsed(raw: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(raw)
    except (ValueError, RecursionError):
        raise DataError(f"{where}: not a JSON object; the line is damaged or was cut off. Remove its batch.") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: not a JSON object.")
    return row


def _incomplete(where: str, batch: Sequence[object], key: tuple[str, int, int] | None) -> DataError:
    stage, step, count = key or ("", 0, 0)
    return DataError(f'{where}: the batch of step {step} of "{stage}" ends after {len(batch)} of {count} trajectories.')
