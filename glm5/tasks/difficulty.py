"""Selects problems that are neither too easy nor too hard for a policy, by measured pass rates (§3.1, §3.2).

A group with only passes or only failures teaches nothing. `measure_pass_rates` plays problems several times. A JSONL
file keeps the counts of a named policy, one line per measurement; measurements of one problem add up.
`DifficultySampler` draws problems with a pass rate within bounds, plus a share of unmeasured problems. Stages do all of
this automatically for a family with a `difficulty`.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from glm5.chat import Tokenizer
from glm5.config.families import DifficultyConfig
from glm5.errors import DataError
from glm5.files import atomic_write
from glm5.records import Completer, Outcome, SamplingParams
from glm5.tasks.contract import Family
from glm5.tasks.env_threads import LIMIT_S
from glm5.tasks.episode import open_episodes, play

FIELDS = {"policy": str, "family": str, "index": int, "passed": int, "tries": int}


@dataclass(frozen=True)
class PassCount:
    """How many of `tries` samples passed. Without any (all episodes failed) the rate is nan."""

    passed: int
    tries: int

    @property
    def rate(self) -> float:
        return self.passed / self.tries if self.tries else math.nan

    def __add__(self, other: PassCount) -> PassCount:
        return PassCount(self.passed + other.passed, self.tries + other.tries)


def measure_pass_rates(
    completer: Completer,
    tokenizer: Tokenizer,
    family: Family,
    indices: Sequence[int],
    tries: int,
    params: SamplingParams,
    *,
    max_turns: int = 16,
    max_context: int = 4096,
    render_tools: bool = True,
    split: str = "train",
    env_seconds: float = LIMIT_S,
) -> dict[int, PassCount]:
    """Pass counts by problem index. Each problem of the split is played `tries` times, all in one batch.

    `completer` is an engine or anything else that continues token ids. A sample passes if its episode ends as SOLVED.
    Samples with ENV_ERROR are not counted. A problem with no other samples is not in the result.
    """
    problems = [(index, family.problem(split, index)) for index in indices]
    episodes = open_episodes(
        [problem for problem in problems for _ in range(tries)],
        tokenizer,
        env_seconds,
        max_turns=max_turns,
        max_context=max_context,
        render_tools=render_tools,
    )
    counts: dict[int, PassCount] = {}
    for trajectory in play(episodes, completer, params, env_seconds):
        if trajectory.outcome is not Outcome.ENV_ERROR:
            passed = PassCount(int(trajectory.outcome is Outcome.SOLVED), 1)
            counts[trajectory.group] = counts.get(trajectory.group, PassCount(0, 0)) + passed
    return counts


def family_key(name: str, options: Mapping[str, Any], render_tools: bool = True) -> str:
    """The key of a family's prompts in a file of pass counts: its name and every option that changes them."""
    return f"{name} {json.dumps(dict(options) | ({} if render_tools else {'render_tools': False}), sort_keys=True)}"


def read_pass_counts(path: Path, policy: str, family: str) -> dict[int, PassCount]:
    """Pass counts of one policy and one family (see `family_key`), by problem index. Other lines are checked and
    skipped. Raises DataError for a missing file and, with file and line, for a malformed line."""
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
    if row["index"] < 0 or not 0 <= row["passed"] <= row["tries"] or row["tries"] < 0:
        raise DataError(f"{where}: index={row['index']}, passed={row['passed']} of tries={row['tries']} cannot be.")
    return row


def write_pass_counts(path: Path, policy: str, family: str, counts: Mapping[int, PassCount]) -> None:
    """Append measurements of a policy, one line each. The file is replaced atomically: no line is ever cut off."""
    rows = [
        {"policy": policy, "family": family, "index": index, "passed": count.passed, "tries": count.tries}
        for index, count in counts.items()
    ]
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    atomic_write(path, before + "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def within(counts: Mapping[int, PassCount], low: float, high: float) -> list[int]:
    """Problem indices with a pass rate from `low` to `high`, both included, in ascending order."""
    return sorted(index for index, count in counts.items() if low <= count.rate <= high)


class DifficultySampler:
    """Maps a draw number to a problem index. Most draws go through the kept problems, reshuffled every round. A share
    `unseen` of the draws takes problems from `first_unseen` on, each once."""

    def __init__(
        self, counts: Mapping[int, PassCount], difficulty: DifficultyConfig, first_unseen: int, seed: int, name: str
    ) -> None:
        """Raises DataError if nothing is left to draw from; its message calls the problems `name`."""
        low, high = difficulty.low, difficulty.high
        self.kept = within(counts, low, high)
        if not self.kept and difficulty.unseen < 1:
            below = sum(count.rate < low for count in counts.values())
            raise DataError(
                f"{name}: none of {len(counts)} measured problems has a pass rate from {low} to {high} ({below} have a "
                f"lower one, {len(counts) - below} a higher one); widen the bounds of `difficulty`, or give it more "
                "problems or tries."
            )
        self._share, self._seed, self._first_unseen = Fraction(str(difficulty.unseen)), seed, first_unseen
        self._round: tuple[int, list[int]] = (-1, [])

    def index(self, draw: int) -> int:
        """The problem index of a draw; depends only on counts, options and draw. Draws may come in any order: unseen
        problems are evenly spaced, so their number among the first n draws is n times their share, rounded."""
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
