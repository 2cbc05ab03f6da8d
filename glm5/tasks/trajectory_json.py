"""A trajectory as a JSON object, and back bit for bit: for files of rollouts and for other processes.

Keys:

    problem, domain, group, reward, outcome, detail
    teacher           teacher of the prompt in distillation, else ""
    turns             [{given, shared, output, logprobs, versions, finish_reason}, ...]

A turn's context is the first `shared` tokens of the previous turn (context and output), then `given`: this keeps the
objects of long episodes short. Only outputs count in the loss. Floats are written with all their digits; non-finite
ones are strings ("inf", "-inf", "nan"). `detail` is for people (see `jsonable`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from glm5.errors import DataError
from glm5.records import Outcome, Trajectory, Turn

MAX_TOKENS, TOKENS_PER_BYTE = 1 << 15, 32
"""Maximum tokens of the contexts and outputs of one trajectory that is read: `MAX_TOKENS` plus `TOKENS_PER_BYTE` per
byte of its JSON text. Without a limit, many turns of a short text could reuse one long prefix through `shared`, and so
expand to far more tokens than the text has bytes. A usual episode of a hundred turns needs about 8 tokens per byte."""


MOST_DETAIL, MOST_DEPTH = 1 << 16, 12
"""Maximum parts and characters of a trajectory's `detail`, and levels of lists and objects in it."""


def encode(trajectory: Trajectory) -> dict[str, Any]:
    """The JSON object of a trajectory."""
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
        "problem": jsonable(trajectory.problem),
        "domain": jsonable(trajectory.domain),
        "group": trajectory.group,
        "reward": _exact(trajectory.reward),
        "outcome": str(trajectory.outcome),
        "detail": jsonable(trajectory.detail),
        "teacher": trajectory.teacher,
        "turns": turns,
    }


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    if a == b[: len(a)]:
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _exact(value: float) -> float | str:
    return value if math.isfinite(value) else repr(float(value))


def jsonable(value: Any, most: int = MOST_DETAIL) -> Any:
    """A copy of any value that JSON and UTF-8 can represent, with at most `most` parts and characters. What does not
    fit becomes text or is left out: the value may come from an agent, or quote what a policy wrote."""
    return _Copy(most).of(value, MOST_DEPTH)


class _Copy:
    """Copies one value; `left` is how many parts and characters it may still have."""

    def __init__(self, most: int) -> None:
        self.left = most

    def of(self, value: Any, depth: int) -> Any:
        self.left -= 1
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return int(value) if -(1 << 63) <= value < 1 << 63 else f"a number of {value.bit_length()} bits"
        if isinstance(value, float):
            return _exact(value)
        if isinstance(value, Mapping | list | tuple) and (depth < 1 or self.left < 1):
            return "..."
        if isinstance(value, Mapping):
            return {self.text(key): self.of(child, depth - 1) for key, child in self._within(list(value.items()))}
        if isinstance(value, list | tuple):
            return [self.of(child, depth - 1) for child in self._within(value)]
        return self.text(value)

    def text(self, value: Any) -> str:
        try:
            found = "".join((str(value),))  # no subclass of str
        except BaseException:  # its own code failed
            found = type(value).__name__
        found = found[: max(0, self.left)]
        self.left -= len(found)
        return found.encode("utf-8", "backslashreplace").decode()

    def _within(self, items: Sequence[Any]) -> Iterator[Any]:
        for item in items:
            if self.left < 1:
                return
            yield item


def decode(row: Mapping[str, Any], where: str, size: int) -> Trajectory:
    """The trajectory of a JSON object that was read from `size` bytes. Raises DataError, with `where`, for a field that
    is missing or of another type."""
    outcome, detail = text(row, "outcome", where), typed(row, "detail", dict, where)
    if outcome not in list(Outcome):
        raise DataError(f'{where}: unknown outcome "{outcome}"; choose one of {", ".join(Outcome)}.')
    turns: list[Turn] = []
    left = MAX_TOKENS + TOKENS_PER_BYTE * size
    for item in typed(row, "turns", list, where):
        if not isinstance(item, dict):
            raise DataError(f"{where}: a turn is not an object.")
        turns.append(_turn(item, turns[-1] if turns else None, where, left))
        left -= len(turns[-1].context_ids) + len(turns[-1].output_ids)
    return Trajectory(
        problem=text(row, "problem", where),
        domain=text(row, "domain", where),
        group=whole(row, "group", where),
        turns=turns,
        reward=_number(row.get("reward"), "reward", where),
        outcome=Outcome(outcome),
        detail=detail,
        teacher=text(row, "teacher", where) if "teacher" in row else "",
    )


def _turn(item: Mapping[str, Any], last: Turn | None, where: str, left: int) -> Turn:
    """A turn of at most `left` tokens."""
    before = (*last.context_ids, *last.output_ids) if last else ()
    shared = whole(item, "shared", where)
    if shared > len(before):
        raise DataError(f"{where}: a turn shares {shared} tokens with the previous turn, which has {len(before)}.")
    given, output = _ids(item, "given", where), _ids(item, "output", where)
    if shared + len(given) + len(output) > left:
        raise DataError(f"{where}: the turns have too many tokens for a line of this length; check `shared`.")
    logprobs = tuple(_number(value, "logprobs", where) for value in typed(item, "logprobs", list, where))
    versions = _ids(item, "versions", where)
    if not len(output) == len(logprobs) == len(versions):
        raise DataError(
            f"{where}: {len(output)} output tokens have {len(logprobs)} logprobs and {len(versions)} versions."
        )
    return Turn((*before[:shared], *given), output, logprobs, versions, text(item, "finish_reason", where))


def typed(row: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    """A field of a type. Raises DataError."""
    value = row.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        names = {str: "a text", int: "a whole number", list: "a list", dict: "an object"}
        raise DataError(f'{where}: "{key}" is {"missing" if value is None else f"not {names[kind]}"}.')
    return value


def text(row: Mapping[str, Any], key: str, where: str) -> str:
    """A text field. Raises DataError."""
    return str(typed(row, key, str, where))


def whole(row: Mapping[str, Any], key: str, where: str, least: int = 0) -> int:
    """A whole number of at least `least`. Raises DataError."""
    value = int(typed(row, key, int, where))
    if value < least:
        raise DataError(f'{where}: "{key}" is {value}; it must be at least {least}.')
    return value


def _ids(row: Mapping[str, Any], key: str, where: str) -> tuple[int, ...]:
    values = typed(row, key, list, where)
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
