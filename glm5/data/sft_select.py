"""From attempts at problems to SFT data: rejection sampling, best-of-N, difficulty by pass rate (§3.1).

Attempts are JSON lines: a conversation as `glm5.data.sft` reads it, with `problem` (lines with one value are attempts
at one problem) and `reward`; `outcome` "env_error" says that an attempt counts for nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm5.data.readers import limited_lines
from glm5.data.sft import MAX_LINE_BYTES, Conversation, parse_conversation
from glm5.data.sft_filters import fault, mask_errors
from glm5.errors import DataError


@dataclass(frozen=True)
class Attempt:
    """One attempt at a problem. `counts` is False if the environment failed: it says nothing about the policy."""

    problem: str
    reward: float
    conversation: Conversation
    counts: bool = True


@dataclass(frozen=True)
class Rules:
    """What is selected.

    An attempt passes if its reward is at least `least_reward`. Of a problem whose pass rate is from `low` to `high`,
    the `best` passing attempts without a fault are kept: those of the highest reward, of equal ones the shortest.
    `longest` and `repeated` are those of `sft_filters.fault`. `mask`: leave erroneous segments out of the loss.
    """

    least_reward: float = 1.0
    low: float = 0.0
    high: float = 1.0
    least_attempts: int = 1
    best: int = 1
    longest: int = 200_000
    repeated: float = 0.2
    mask: bool = True


@dataclass
class Selected:
    """The conversations, counts of attempts by reason, and problems by pass rate in tenths."""

    conversations: list[Conversation] = field(default_factory=list)
    attempts: int = 0
    problems: int = 0
    masked: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    rates: Counter[str] = field(default_factory=Counter)

    def plain(self) -> dict[str, Any]:
        """As JSON: attempts = kept + the sum of the reasons."""
        return {
            "attempts": self.attempts,
            "problems": self.problems,
            "kept": len(self.conversations),
            "masked": self.masked,
            "reasons": dict(sorted(self.reasons.items(), key=lambda item: (-item[1], item[0]))),
            "pass_rates": dict(sorted(self.rates.items())),
        }


def select(attempts: Iterable[Attempt], rules: Rules) -> Selected:
    """Apply the rules. Raises DataError for attempts without any that is kept."""
    groups: dict[str, list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        groups[attempt.problem].append(attempt)
    found = Selected(attempts=sum(map(len, groups.values())), problems=len(groups))
    for group in groups.values():
        _of_problem(group, rules, found)
    if not found.conversations:
        why = ", ".join(f"{reason} {count:,}" for reason, count in found.reasons.most_common())
        raise DataError(f"None of the {found.attempts:,} attempts is selected ({why or 'there are none'}).")
    return found


def _of_problem(group: list[Attempt], rules: Rules, found: Selected) -> None:
    counted = [attempt for attempt in group if attempt.counts]
    found.reasons["env_error"] += len(group) - len(counted)
    if not counted:
        return
    passing = [attempt for attempt in counted if attempt.reward >= rules.least_reward]
    rate = len(passing) / len(counted)
    found.rates[f"{min(10, int(10 * rate)) / 10:.1f}"] += 1
    outside = "too_few_attempts" if len(counted) < rules.least_attempts else ""
    outside = outside or ("too_hard" if rate < rules.low else "too_easy" if rate > rules.high else "")
    if outside:
        found.reasons[outside] += len(counted)
        return
    found.reasons["failed"] += len(counted) - len(passing)
    good: dict[str, tuple[Attempt, Conversation, int]] = {}
    for attempt in passing:
        conversation, masked = mask_errors(attempt.conversation) if rules.mask else (attempt.conversation, 0)
        reason = fault(conversation, rules.longest, rules.repeated)
        key = _digest(conversation)
        if reason or key in good:
            found.reasons[reason or "copy"] += 1
        else:
            good[key] = attempt, conversation, masked
    order = sorted(good, key=lambda key: (-good[key][0].reward, _length(good[key][1]), key))
    found.reasons["not_among_best"] += len(order[rules.best :])
    for key in order[: rules.best]:
        found.conversations.append(good[key][1])
        found.masked += good[key][2]
    found.reasons = +found.reasons


def _length(conversation: Conversation) -> int:
    return sum(len(m.content) + len(m.reasoning or "") for m in conversation.messages if m.role == "assistant")


def _digest(conversation: Conversation) -> str:
    said = [(m.role, m.content, m.reasoning, repr(m.tool_calls)) for m in conversation.messages]
    return hashlib.sha256(json.dumps(said).encode("utf-8", "surrogatepass")).hexdigest()


def read_attempts(path: Path) -> Iterator[Attempt]:
    """Attempts of a JSONL file. Raises DataError, with file and line, for one that is none."""
    try:
        with path.open("rb") as file:
            for number, line in limited_lines(file, MAX_LINE_BYTES):
                yield _attempt(line, f"{path}:{number}")
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}.") from None


def _attempt(line: bytes | None, where: str) -> Attempt:
    try:
        if line is None:
            raise DataError(f"it has more than {MAX_LINE_BYTES:,} bytes")
        row = json.loads(line)
        reward = row["reward"]
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise DataError("`reward` is not a number")
        if not isinstance(row["problem"], str | int):
            raise DataError("`problem` is neither a text nor a number")
        counts = row.get("outcome") != "env_error"
        conversation = parse_conversation(row, sort_results=True) if counts else Conversation(())
        return Attempt(str(row["problem"]), float(reward), conversation, counts)
    except DataError as error:
        raise DataError(f"{where}: not an attempt: {error}") from None
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
        raise DataError(f"{where}: not an attempt: it needs `messages`, `problem` and `reward`") from None
