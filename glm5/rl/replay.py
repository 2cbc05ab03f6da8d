"""Writes batches of rollouts to a file and reads them back bit for bit, to repeat updates without an engine.

Each line is a JSON object with one trajectory, in training order. A trajectory that pads its group (`repair_group`) is
written as often as it is trained on. Keys:

    stage, step       the update that uses it; step 1 is the first of the stage, as in `metrics.jsonl`
    index, count      trajectory `index` of `count` in the batch; detects incomplete batches
    slot              position of its group in the batch
    problem, domain, group, reward, outcome, detail
    teacher           teacher of the prompt in distillation, else ""
    turns             [{given, shared, output, logprobs, versions, finish_reason}, ...]

A turn's context is the first `shared` tokens of the previous turn (context and output), then `given`: this keeps the
lines of long episodes short. Only outputs count in the loss. Floats are written with all their digits; non-finite ones
are strings ("inf", "-inf", "nan"). `detail` is for people: values that JSON cannot represent become strings.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from glm5.errors import DataError
from glm5.records import Outcome, Trajectory, Turn

FILE = "rollouts.jsonl"
MAX_TOKENS, TOKENS_PER_BYTE = 1 << 15, 32
"""Maximum tokens of the contexts and outputs of one trajectory when a file is read: `MAX_TOKENS` plus `TOKENS_PER_BYTE`
per byte of its line. Without a limit, many turns of a short line could reuse one long prefix through `shared`, and so
expand to far more tokens than the line has bytes. A usual episode of a hundred turns needs about 8 tokens per byte."""


def write(groups: Sequence[Sequence[Trajectory]], path: Path | str, stage: str = "", step: int = 1) -> None:
    """Append the batch of update `step` of a stage."""
    count = sum(map(len, groups))
    index = 0
    with Path(path).open("a", encoding="utf-8", errors="backslashreplace") as file:
        for slot, group in enumerate(groups):
            for trajectory in group:
                head = {"stage": stage, "step": step, "index": index, "count": count, "slot": slot}
                file.write(json.dumps(head | _line(trajectory), ensure_ascii=False, allow_nan=False) + "\n")
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
        own = (_text(row, "stage", where), _whole(row, "step", where), _whole(row, "count", where, least=1))
        if batch and own != key:
            raise _incomplete(before, batch, key)
        key = own
        index, slot = _whole(row, "index", where), _whole(row, "slot", where)
        expected = {batch[-1][0], batch[-1][0] + 1} if batch else {0}
        if index != len(batch) or slot not in expected:
            raise DataError(
                f"{where}: trajectory {index} of group {slot} is not the next one; lines are missing or out of order."
            )
        batch.append((slot, _trajectory(row, where, len(raw))))
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
                    if _text(row, "stage", where) != stage or _whole(row, "step", where) <= step:
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


# ------------------------------------------------------------------------------------------------------------- writing


def _line(trajectory: Trajectory) -> dict[str, Any]:
    turns, before = [], ()  # type: tuple[list[dict[str, Any]], tuple[int, ...]]
    for turn in trajectory.turns:
        shared = _common(before, turn.context_ids)
        turns.append(
            {
                "shared": shared,
                "given": list(turn.context_ids[shared:]),
                "output": list(turn.output_ids),
                "logprobs": [_exact(value) for value in turn.logprobs],
                "versions": list(turn.weight_versions),
                "finish_reason": turn.finish_reason,
            }
        )
        before = (*turn.context_ids, *turn.output_ids)
    return {
        "problem": trajectory.problem,
        "domain": trajectory.domain,
        "group": trajectory.group,
        "reward": _exact(trajectory.reward),
        "outcome": str(trajectory.outcome),
        "detail": _jsonable(trajectory.detail),
        "teacher": trajectory.teacher,
        "turns": turns,
    }


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _exact(value: float) -> float | str:
    return value if math.isfinite(value) else repr(float(value))


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _jsonable(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(child) for child in value]
    if isinstance(value, float):
        return _exact(value)
    return value if value is None or isinstance(value, bool | int | str) else str(value)


# ------------------------------------------------------------------------------------------------------------- reading


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


def _trajectory(row: Mapping[str, Any], where: str, size: int) -> Trajectory:
    """The trajectory of a line of `size` bytes."""
    outcome, detail = _text(row, "outcome", where), _typed(row, "detail", dict, where)
    if outcome not in list(Outcome):
        raise DataError(f'{where}: unknown outcome "{outcome}"; choose one of {", ".join(Outcome)}.')
    turns: list[Turn] = []
    left = MAX_TOKENS + TOKENS_PER_BYTE * size
    for item in _typed(row, "turns", list, where):
        if not isinstance(item, dict):
            raise DataError(f"{where}: a turn is not an object.")
        turns.append(_turn(item, turns[-1] if turns else None, where, left))
        left -= len(turns[-1].context_ids) + len(turns[-1].output_ids)
    return Trajectory(
        problem=_text(row, "problem", where),
        domain=_text(row, "domain", where),
        group=_whole(row, "group", where),
        turns=turns,
        reward=_number(row.get("reward"), "reward", where),
        outcome=Outcome(outcome),
        detail=detail,
        teacher=_text(row, "teacher", where) if "teacher" in row else "",
    )


def _turn(item: Mapping[str, Any], last: Turn | None, where: str, left: int) -> Turn:
    """A turn of at most `left` tokens."""
    before = (*last.context_ids, *last.output_ids) if last else ()
    shared = _whole(item, "shared", where)
    if shared > len(before):
        raise DataError(f"{where}: a turn shares {shared} tokens with the previous turn, which has {len(before)}.")
    given, output = _ids(item, "given", where), _ids(item, "output", where)
    if shared + len(given) + len(output) > left:
        raise DataError(f"{where}: the turns have too many tokens for a line of this length; check `shared`.")
    logprobs = tuple(_number(value, "logprobs", where) for value in _typed(item, "logprobs", list, where))
    versions = _ids(item, "versions", where)
    if not len(output) == len(logprobs) == len(versions):
        raise DataError(
            f"{where}: {len(output)} output tokens have {len(logprobs)} logprobs and {len(versions)} versions."
        )
    return Turn((*before[:shared], *given), output, logprobs, versions, _text(item, "finish_reason", where))


def _typed(row: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    value = row.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        names = {str: "a text", int: "a whole number", list: "a list", dict: "an object"}
        raise DataError(f'{where}: "{key}" is {"missing" if value is None else f"not {names[kind]}"}.')
    return value


def _text(row: Mapping[str, Any], key: str, where: str) -> str:
    return str(_typed(row, key, str, where))


def _whole(row: Mapping[str, Any], key: str, where: str, least: int = 0) -> int:
    value = int(_typed(row, key, int, where))
    if value < least:
        raise DataError(f'{where}: "{key}" is {value}; it must be at least {least}.')
    return value


def _ids(row: Mapping[str, Any], key: str, where: str) -> tuple[int, ...]:
    values = _typed(row, key, list, where)
    if not all(type(value) is int and value >= 0 for value in values):
        raise DataError(f'{where}: "{key}" contains a value that is not an integer of at least 0.')
    return tuple(values)


def _number(value: object, key: str, where: str) -> float:
    """Parse a float that `_exact` wrote."""
    if isinstance(value, str) and value in ("inf", "-inf", "nan"):
        return float(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
        return float(value)
    raise DataError(f'{where}: "{key}" contains {value!r:.40}, which is not a number.')
