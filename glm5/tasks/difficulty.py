"""Problems that are neither too easy nor too hard for a policy, by cached pass rates (§3.1, §3.2).

A group whose samples all pass or all fail teaches nothing. So the pass counts of a named policy are kept in a JSONL
file, one line per measurement; measurements of one problem add up. `FilteredFamily` wraps a family and hands out, from
its training split, problems whose pass rate is within bounds, plus a share of problems that were never measured. It
plugs in where families are made: `make_family("math", difficulty={...})`, so in `options` of a stage's family.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from glm5.errors import ConfigError, DataError
from glm5.files import disk_errors
from glm5.records import Outcome, Trajectory
from glm5.tasks.contract import Family, Problem

FIELDS = {"policy": str, "family": str, "index": int, "passed": int, "tries": int}


@dataclass(frozen=True)
class PassCount:
    """How many of `tries` samples passed."""

    passed: int
    tries: int

    @property
    def rate(self) -> float:
        return self.passed / self.tries

    def __add__(self, other: PassCount) -> PassCount:
        return PassCount(self.passed + other.passed, self.tries + other.tries)


def family_key(name: str, options: Mapping[str, Any]) -> str:
    """The name of a family's problems in a cache: its name and the options that change them."""
    return f"{name} {json.dumps({k: v for k, v in options.items() if k != 'difficulty'}, sort_keys=True)}"


def read_pass_counts(path: Path, policy: str, family: str) -> dict[int, PassCount]:
    """Training problem index -> pass count of one policy and one family (see `family_key`). Lines of others are
    checked and skipped. Raises DataError, with file and line, where a line is malformed."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; measure pass rates into it first.") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error}).") from None
    counts: dict[int, PassCount] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row = _read_row(line, f"{path}:{number}")
        if row["policy"] == policy and row["family"] == family:
            found = PassCount(row["passed"], row["tries"])
            counts[row["index"]] = counts.get(row["index"], PassCount(0, 0)) + found
    return counts


def _read_row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not a pass count: {error}") from None
    if not isinstance(row, dict) or set(row) != set(FIELDS):
        raise DataError(f"{where}: not a pass count: it needs exactly the keys {', '.join(FIELDS)}.")
    for name, kind in FIELDS.items():
        if not isinstance(row[name], kind) or isinstance(row[name], bool):
            raise DataError(f"{where}: {name} is {row[name]!r}; it must be {'text' if kind is str else 'an integer'}.")
    if row["index"] < 0 or not 0 <= row["passed"] <= row["tries"] or row["tries"] < 1:
        raise DataError(f"{where}: index={row['index']}, passed={row['passed']} of tries={row['tries']} cannot be.")
    return row


def write_pass_counts(path: Path, policy: str, family: str, counts: Mapping[int, PassCount]) -> None:
    """Append measurements of a policy, one line each."""
    rows = [
        {"policy": policy, "family": family, "index": index, "passed": count.passed, "tries": count.tries}
        for index, count in counts.items()
    ]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    with disk_errors(path), path.open("a", encoding="utf-8") as stream:
        stream.write(text)


def count_passes(trajectories: Iterable[Trajectory]) -> dict[int, PassCount]:
    """Pass counts by problem index of episodes of one family's training problems. Episodes that the environment lost
    say nothing and are left out. Raises DataError for problems of another split."""
    counts: dict[int, PassCount] = {}
    for trajectory in trajectories:
        parts = trajectory.problem.split("/")
        if len(parts) != 4 or parts[1] != "train" or not parts[3].isdecimal():
            raise DataError(f"pass counts: {trajectory.problem} names no training problem (family/train/seed/index).")
        if trajectory.outcome is not Outcome.ENV_ERROR:
            passed = PassCount(int(trajectory.outcome is Outcome.SOLVED), 1)
            counts[int(parts[3])] = counts.get(int(parts[3]), PassCount(0, 0)) + passed
    return counts


def within(counts: Mapping[int, PassCount], low: float, high: float) -> list[int]:
    """The indices, ascending, whose pass rate is at least `low` and at most `high`."""
    return sorted(index for index, count in counts.items() if low <= count.rate <= high)


class DifficultySampler:
    """Draw number -> problem index: kept problems in an order that is shuffled anew for every round, and in `unseen`
    of the draws problems behind the last measured one, none of them twice."""

    def __init__(
        self, counts: Mapping[int, PassCount], low: float, high: float, unseen: float = 0.0, seed: int = 0
    ) -> None:
        """Raises ConfigError for impossible bounds, DataError where nothing is left to draw from."""
        if not 0 <= low <= high <= 1 or not 0 <= unseen <= 1:
            raise ConfigError(
                f"difficulty: low={low}, high={high}, unseen={unseen}; 0 <= low <= high <= 1, unseen in 0..1."
            )
        self.kept = within(counts, low, high)
        if not self.kept and unseen < 1:
            raise DataError(
                f"difficulty: none of {len(counts)} measured problems has a pass rate from {low} to {high}; widen the "
                "bounds, measure more, or set unseen = 1."
            )
        self._share, self._seed = Fraction(str(unseen)), seed
        self._first_unseen = max(counts, default=-1) + 1
        self._round: tuple[int, list[int]] = (-1, [])

    def index(self, draw: int) -> int:
        """The problem index of a draw; the same for the same counts, options and draw. Any draw may be asked for
        first: the unseen ones are evenly spaced, so their number among the first n is n times their share, rounded."""
        before, after = (math.floor(n * self._share + Fraction(1, 2)) for n in (draw, draw + 1))
        if after > before:
            return self._first_unseen + before
        number, at = divmod(draw - before, len(self.kept))
        turn = self._round
        if turn[0] != number:
            order = list(self.kept)
            random.Random(f"difficulty-{self._seed}-{number}").shuffle(order)
            self._round = turn = (number, order)
        return turn[1][at]


class FilteredFamily:
    """A family whose training problems come from a `DifficultySampler`. Held-out problems are left alone."""

    def __init__(self, family: Family, sampler: DifficultySampler) -> None:
        self.name, self.domain = family.name, family.domain
        self._family, self._sampler = family, sampler

    def problem(self, split: str, index: int) -> Problem:
        if split != "train":
            return self._family.problem(split, index)
        return self._family.problem(split, self._sampler.index(index))


def filtered(
    family: Family, options: Mapping[str, Any], difficulty: Mapping[str, Any], seed: int = 0
) -> FilteredFamily:
    """The family under a `difficulty` option: `cache` (a file), `policy` (a name in it), and optionally `low`, `high`,
    `unseen`. Raises ConfigError for other keys."""
    known = {"cache", "policy", "low", "high", "unseen"}
    if not {"cache", "policy"} <= set(difficulty) <= known:
        raise ConfigError(
            f"difficulty of {family.name}: {sorted(difficulty)}; give cache and policy, and of {sorted(known)}."
        )
    key = family_key(family.name, options)
    counts = read_pass_counts(Path(difficulty["cache"]), difficulty["policy"], key)
    low, high, unseen = (difficulty.get(name, usual) for name, usual in (("low", 0.1), ("high", 0.9), ("unseen", 0.0)))
    return FilteredFamily(family, DifficultySampler(counts, low, high, unseen, seed))
