"""MBPP+ in EvalPlus: what its file cannot say. JSON has no tuples, sets and complex numbers, so a row's inputs get
their types by its number; and some functions have more than one right answer. The rules are those of evalplus 0.3.1.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from typing import Any

from glm5.tasks.coding.execute import same_value, untupled

LEVELS: tuple[tuple[Container[int], int | None, Iterable[int]], ...] = (
    ((0,), None, (2, 116, 132, 143, 222, 261, 273, 394, 399, 421, 424, 429, 470, 560, 579, 596, 616, 630, 726, 740, 744,
                  809)),
    ((1,), None, (63, 64, 70, 94, 120, 237, 272, 299, 400, 409, 417, 438, 473, 614, 780)),
    ((0, 1), None, (259, 278, 401, 445)),
    ((0,), 0, (250, 307, 405, 446, 617, 720, 763, 808)),
    ((1,), 0, (75, 413, 444, 722, 753)),
    ((0,), 1, (106, 750)),
    (range(1000), None, (580, 615, 791)),
)  # fmt: skip
"""(levels of nesting whose lists are tuples, 0 for an argument itself; which argument, or all; numbers of rows)."""
NOT_NONE = ("check_str", "text_match_three", "text_starta_endb")
"""Functions that need only say whether there is something."""
AS_SETS = (
    "similar_elements", "find_char_long", "common_in_nested_lists", "extract_singly", "larg_nnum", "intersection_array",
    "find_dissimilar", "Diff",
)  # fmt: skip
"""Functions whose result counts as a set."""


def typed(task: str, cases: list[list[Any]]) -> list[list[Any]]:
    """The inputs of a row with the types that its file has lost. Other benchmarks' rows stay as they are."""
    if not task.startswith("Mbpp/"):
        return cases
    number = int(task.removeprefix("Mbpp/"))
    if number == 115:
        return [[[(set(one) or {}) if isinstance(one, list) else {} for one in case[0]]] for case in cases]
    if number == 124:
        return [[float(case[0]), complex(case[1])] for case in cases]
    if number == 252:
        return [[complex(case[0])] for case in cases]
    for levels, which, numbers in LEVELS:
        if number in numbers:
            return [
                [_tupled(one, levels) if which in (None, place) else one for place, one in enumerate(case)]
                for case in cases
            ]
    return cases


def _tupled(value: Any, levels: Container[int], level: int = 0) -> Any:
    if isinstance(value, dict):
        return {key: _tupled(one, levels, level + 1) for key, one in value.items()}
    if not isinstance(value, list):
        return value
    members = [_tupled(one, levels, level + 1) for one in value]
    return tuple(members) if level in levels else members


def is_right(name: str, arguments: list[Any], got: Any, want: Any, tolerance: float) -> bool:
    """Whether a function's tagged result is right, by the rule for functions of its name."""
    if name in AS_SETS:
        ours, theirs = _members(got), _members(want)
        return ours is not None and ours == theirs
    if name in NOT_NONE:
        return (want is not None) == (got if isinstance(got, bool) else got is not None)
    if name == "are_equivalent" or same_value(got, want):
        return True
    if not isinstance(got, int | float):
        return False
    if name == "sum_div":
        return got == 0
    try:
        if name == "surface_Area":
            side, height = arguments  # the height of the pyramid, where the row's solution takes that of a side
            return abs(got - round(side**2 + 2 * side * math.hypot(side / 2, height))) <= tolerance
        if name == "digit_distance_nums":
            one, other = map(str, arguments)
            most = max(len(one), len(other))
            digits = zip(one.zfill(most), other.zfill(most), strict=True)
            return got == sum(abs(int(a) - int(b)) for a, b in digits)
    except (ArithmeticError, TypeError, ValueError):
        return False
    return False


def _members(value: Any) -> set[Any] | None:
    """The members of a tagged value, as Python's `set` takes them, or None if it cannot."""
    if isinstance(value, dict):
        if "dict" in value:
            return _members([key for key, _ in value["dict"]])
        value = value["set"] if "set" in value else untupled(value)
    try:
        return {_hashable(one) for one in value}
    except TypeError:
        return None


def _hashable(value: Any) -> Any:
    if isinstance(value, dict):
        kind, data = next(iter(value.items()))
        if kind == "dict":
            raise TypeError("a dict cannot be a member")
        return kind, data if isinstance(data, str) else tuple(map(_hashable, data))
    return value
